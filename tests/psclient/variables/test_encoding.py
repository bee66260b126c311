"""Encoded contributions: what a server decodes of them is, bit for bit, what a plain reference says, residuals too."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from psclient._src.variables.encoding import encode, encode_rows, half
from psserver.execution import decoding
from pswire.model.compression import BLOCK, PIECE, Codec
from pswire.model.tensor import TensorSpec
from tests.kit.references import CODECS, DTYPES, Worker, arithmetic

SHAPES = ((1,), (), (3, 5), (BLOCK,), (BLOCK + 1,), (PIECE + BLOCK + 7,))


def random(shape, dtype, seed=0):
    """Numbers of many magnitudes, some of them equal."""
    rng = np.random.default_rng(seed)
    return (np.round(rng.normal(size=shape), 2) * 10.0 ** rng.integers(-3, 3, size=shape)).astype(dtype)


def same_bits(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_an_array_is_what_the_reference_says(name, shape, dtype):
    """Of every dtype and size, contribution after contribution: what is decoded, and what is left over."""
    codec, spec = CODECS[name]._codec, TensorSpec(dtype, shape)
    worker = Worker(CODECS[name], shape, DTYPES[dtype])
    residual = np.zeros(shape, arithmetic(DTYPES[dtype]))
    for seed in range(3):
        array = random(shape, DTYPES[dtype], seed)
        data, finite = encode(codec, array, spec, residual)
        assert (data.dtype, data.nbytes, finite) == (np.uint8, codec.nbytes(spec), True)
        same_bits(decoding.decode(codec, data, spec), worker.send(array))
        same_bits(residual, worker.residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [(), (1,), (4, 3), (PIECE // 2 + 1,)], ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_rows_are_what_the_reference_says(name, width, dtype):
    """A row's residual waits until the row comes again; other rows are as they were."""
    codec, whole = CODECS[name]._codec, TensorSpec(dtype, (40, *width))
    worker = Worker(CODECS[name], whole.shape, DTYPES[dtype])
    residual = np.zeros(whole.shape, worker.residual.dtype)
    rng = np.random.default_rng(1)
    for seed in range(3):
        ids = np.sort(rng.choice(40, 25, replace=False))
        rows = random((25, *width), DTYPES[dtype], seed)
        sent, (data, finite) = encode_rows(codec, ids, rows, whole, residual)
        expected_ids, expected = worker.send_rows(ids, rows)
        assert finite
        assert sent.tolist() == expected_ids
        assert data.nbytes == codec.row_bytes(whole) * len(sent)
        found = decoding.decode_rows(codec, data.reshape(-1).view(np.uint8), whole, len(sent))
        same_bits(np.ascontiguousarray(found), expected)
        same_bits(residual, worker.residual)


@pytest.mark.parametrize(
    ("kind", "largest"), [("float16", 65504.0), ("bfloat16", float(ml_dtypes.finfo(ml_dtypes.bfloat16).max))]
)
def test_what_is_too_large_for_half_precision_is_its_largest_number(kind, largest):
    """And the rest comes with later contributions, so that nothing is lost; it never becomes infinite."""
    spec, residual = TensorSpec("float64", (3,)), np.zeros(3)
    array, total = np.array([2.5 * largest, -1.25 * largest, 1.0]), np.zeros(3)
    for number in range(3):
        data, finite = encode(Codec(kind), array if not number else np.zeros(3), spec, residual)
        assert finite
        total += decoding.decode(Codec(kind), data, spec)
    assert total.tolist() == array.tolist()


def test_half_precision_is_that_of_numpy():
    """Of every half, of its neighbours in single precision, of what lies in the middle of two, and of chance."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    chance = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    next_to = [np.nextafter(halves, np.float32(end)) for end in (-np.inf, np.inf)]
    given = np.concatenate([halves, *next_to, (halves[:-1] + halves[1:]) / 2, chance[np.isfinite(chance)]])
    bits, rounded = half(given)
    expected = np.clip(given, -65504, 65504).astype(np.float16)
    assert bits.tobytes() == expected.tobytes()
    assert rounded.tobytes() == expected.astype(np.float32).tobytes()
    every = np.arange(1 << 16, dtype=np.uint16)
    found = decoding.decode(Codec("float16"), every.view(np.uint8), TensorSpec("float32", (1 << 16,)))
    with np.errstate(invalid="ignore"):
        assert found.tobytes() == every.view(np.float16).astype(np.float32).tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_arrives_so_and_leaves_no_trace(name, bad):
    """A server sees NaN or infinity at its place; the residual is what it was, not NaN, and what follows is finite."""
    codec, spec = CODECS[name]._codec, TensorSpec("float32", (2 * PIECE + 9,))
    residual = random(spec.shape, "float32", 3)
    before, array = residual.copy(), random(spec.shape, "float32", 4)
    array[PIECE + 5] = bad
    data, finite = encode(codec, array, spec, residual)
    assert not finite
    assert not np.isfinite(decoding.decode(codec, data, spec)[PIECE + 5])
    same_bits(residual, before)
    rows = TensorSpec("float32", (4, 2))
    left = np.ones((4, 2), "float32")
    given = np.array([[1, bad], [1, 1]], "float32")
    sent, (data, finite) = encode_rows(codec, np.array([1, 3]), given, rows, left)
    assert not finite
    assert not np.isfinite(decoding.decode_rows(codec, data.reshape(-1).view(np.uint8), rows, len(sent))[0]).all()
    assert left.tolist() == np.ones((4, 2)).tolist()


@pytest.mark.parametrize("name", CODECS)
def test_what_residuals_are_left_by(name):
    """No rows leave them as they are; a sum that is too large with one is told, and it is finite again."""
    codec, spec, residual = CODECS[name]._codec, TensorSpec("float32", (4, 2)), np.ones((4, 2), "float32")
    ids, (data, finite) = encode_rows(codec, np.empty(0, np.int64), np.empty((0, 2), "float32"), spec, residual)
    assert (len(ids), data.nbytes, finite, residual.tolist()) == (0, 0, True, np.ones((4, 2)).tolist())
    most = np.full((4, 2), np.finfo(np.float32).max)
    residual = most.copy()
    _, finite = encode(codec, most, spec, residual)
    assert not finite
    assert np.isfinite(residual).all()


def test_small_numbers():
    """Denormal ones wait until they have become something, as nothing is divided by 0; a zero is sent as positive."""
    spec, residual = TensorSpec("float32", (4,)), np.zeros(4, "float32")
    tiny = np.full(4, 1e-45, "float32")
    data, finite = encode(Codec("int8"), tiny, spec, residual)
    assert finite
    assert decoding.decode(Codec("int8"), data, spec).tolist() == [0.0] * 4
    assert residual.tolist() == tiny.tolist()
    spec, residual = TensorSpec("float16", (4,)), np.zeros(4, "float32")
    data, _ = encode(Codec("topk", 1.0), np.array([-0.0, 1, -1e-8, 0], "float16"), spec, residual)
    assert not np.signbit(decoding.decode(Codec("topk", 1.0), data, spec)).any()
