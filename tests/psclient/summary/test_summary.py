"""Summaries: what is in the event files, as TensorFlow writes it, who writes there, and what is refused."""

from __future__ import annotations

import inspect
import sys

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import refused
from tests.kit.telemetry import decoded_png, scalars, tensors


def test_numbers_are_in_the_event_file(tmp_path):
    """Python's, NumPy's and variables', as soon as the default ends; with their own steps, or the default's. The
    innermost writer is the default, and the outer one again when it ends."""
    outer, inner = (ps.summary.create_file_writer(str(tmp_path / name)) for name in ("outer", "inner"))
    with outer.as_default(step=0):
        assert ps.summary.scalar("loss", 0.5)
        with inner.as_default(step=7):
            ps.summary.scalar("a", 1.0)
        assert ps.summary.scalar("loss", np.float64(0.125), step=2)
        ps.summary.flush()
        assert scalars(tmp_path / "outer") == [("loss", 0, 0.5), ("loss", 2, 0.125)]
        assert ps.summary.scalar("loss", ps.Variable(np.float32(0.25), name="loss"), step=np.int64(3))
    assert scalars(tmp_path / "outer")[2:] == [("loss", 3, 0.25)]
    assert scalars(tmp_path / "inner") == [("a", 7, 1.0)]
    outer.close()
    inner.close()


@pytest.mark.parametrize("keys", [{"max_queue": 2}, {"max_queue": 100, "flush_millis": 0}])
def test_a_full_queue_is_written(tmp_path, keys):
    """Without a flush: after so many summaries, or so long."""
    writer = ps.summary.create_file_writer(str(tmp_path), **keys)
    with writer.as_default():
        ps.summary.scalar("a", 1.0, step=0)
        ps.summary.scalar("a", 2.0, step=1)
        assert scalars(tmp_path) == [("a", 0, 1.0), ("a", 1, 2.0)]
    writer.close()


def test_without_tensorboardx_one_is_told(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboardX"]:
        monkeypatch.setitem(sys.modules, name, None)
    said = r"pip install -e '.\[summary\]' in the clone, or use ps.summary.create_noop"
    refused(ModuleNotFoundError, said, lambda: ps.summary.create_file_writer(str(tmp_path)))


@pytest.fixture
def written(tmp_path):
    """Calls a function where a writer is the default, and returns the values that it wrote."""

    def write(fn):
        writer = ps.summary.create_file_writer(str(tmp_path))
        with writer.as_default(step=3):
            assert fn() is True
        writer.close()
        return [value for *_, value in tensors(tmp_path)]

    return write


SIGNATURES = {
    "scalar": "name, data, step=None, description=None",
    "histogram": "name, data, step=None, buckets=None, description=None",
    "image": "name, data, step=None, max_outputs=3, description=None",
    "text": "name, data, step=None, description=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_names_and_defaults_of_tensorflow(name):
    parameters = inspect.signature(getattr(ps.summary, name)).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(shown) == SIGNATURES[name]


def test_each_kind_names_its_plugin(tmp_path):
    """With its name as it was given, its step, and its description."""
    writer = ps.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        assert ps.summary.histogram("layer 1/weights", [1.0], step=1, description="of *weights*")
        assert ps.summary.image("digits", np.zeros((1, 1, 1, 1)), step=np.int64(2), description="of *digits*")
        assert ps.summary.text("notes", "all is well", step=3, description="of *notes*")
        assert ps.summary.histogram("plain", [1.0], 4)
        assert ps.summary.scalar("loss", 0.5, step=5, description="of *loss*")
    writer.close()
    assert [rest for *rest, _ in tensors(tmp_path)] == [
        ["layer 1/weights", 1, "histograms", "of *weights*"],
        ["digits", 2, "images", "of *digits*"],
        ["notes", 3, "text", "of *notes*"],
        ["plain", 4, "histograms", ""],
        ["loss", 5, "", "of *loss*"],
    ]
    assert scalars(tmp_path)[4:] == [("loss", 5, 0.5)]


def test_the_rules_hold_for_each_kind(tmp_path):
    """A step is needed; without a writer, or after its end, nothing is written, nor looked at; of replicas the first
    one writes."""
    calls = {
        "scalar": lambda: ps.summary.scalar("a", 1.0),
        "histogram": lambda: ps.summary.histogram("a", np.ones(2)),
        "image": lambda: ps.summary.image("a", np.zeros((1, 2, 2, 3))),
        "text": lambda: ps.summary.text("a", "b"),
    }
    writer = ps.summary.create_file_writer(str(tmp_path))
    for name, call in calls.items():
        with writer.as_default(), pytest.raises(ValueError, match=rf"{name}\('a'\) needs a step; use {name}\(name"):
            call()
        with ps.summary.create_noop_writer().as_default(step=0):
            assert not call()
        assert not call()
        with ps.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, writer.as_default(step=0):
            assert strategy.experimental_local_results(strategy.run(call)) == (True, False)
    for _ in range(2):
        writer.close()
    with writer.as_default(step=0):
        ps.summary.flush()
        assert not any(call() for call in calls.values())
    assert [plugin for _, _, plugin, _, _ in tensors(tmp_path)] == ["", "histograms", "images", "text"]


# ---- Histograms. What they are compared with is what TensorFlow 2.21.0 with TensorBoard writes. ----


@pytest.mark.parametrize(
    ("data", "buckets", "expected"),
    [
        ([0.0, 1.0, 1.0, 2.0, 4.0], 4, [[0, 1, 1], [1, 2, 2], [2, 3, 1], [3, 4, 1]]),
        ([2.0, 2.0], 4, [[2, 2, 0], [2, 2, 0], [2, 2, 0], [2, 2, 2]]),
        ([], 4, [[0, 0, 0]] * 4),
        ([1.0, 2.0], 0, np.zeros((0, 3))),
        ([[True, False], [False, False]], 2, [[0, 0.5, 3], [0.5, 1, 1]]),
        (np.array([-4, 4], np.int8), 2, [[-4, 0, 1], [0, 4, 1]]),
        (np.array([1.0, 2.0], ml_dtypes.bfloat16), np.int64(1), [[1, 2, 2]]),
        ([np.nan, 1.0, np.inf, 2.0, -np.inf], 1, [[1, 2, 2]]),  # so a gradient that overflows ends no training
    ],
)
def test_values_are_counted_in_buckets(written, data, buckets, expected):
    """Left edge, right edge, count; the greatest value is in the last bucket."""
    (found,) = written(lambda: ps.summary.histogram("h", data, buckets=buckets))
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (buckets, 3)


@pytest.mark.parametrize("values", [[0.0, 5e-324], [1.0, np.nextafter(1.0, 2.0)], [-1e300, 1e300], None], ids=str)
def test_there_are_30_buckets_between_the_least_and_the_greatest(written, values):
    """Of any range, also of one that is less than so many numbers, or almost all of them."""
    values = np.array(values or np.random.default_rng(0).normal(size=1000))
    (found,) = written(lambda: ps.summary.histogram("h", ps.Variable(values)))
    assert (found.shape, found[:, 2].sum()) == ((30, 3), values.size)
    assert (found[0, 0], found[-1, 1]) == (values.min(), values.max())
    np.testing.assert_array_equal(found[1:, 0], found[:-1, 1])
    expected = [1, *[0] * 28, 1] if values.size == 2 else np.histogram(values, 30)[0]
    np.testing.assert_array_equal(found[:, 2], expected)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_an_image_is_in_the_file(written, channels, dtype):
    """Its width, its height, and a PNG of each: bytes as they are, fractions of 1 as such of 255.5, cut off."""
    bytes_ = np.random.default_rng(channels).integers(0, 256, (2, 5, 4, channels)).astype(np.uint8)
    data = bytes_ if dtype is np.uint8 else (bytes_.astype(dtype) + 0.25) / 255.5
    (found,) = written(lambda: ps.summary.image("i", data))
    assert found[:2].tolist() == [b"4", b"5"]
    np.testing.assert_array_equal([decoded_png(each) for each in found[2:]], bytes_)


def test_fractions_are_tensorflows(written):
    """Below 0 and above 1 they are cut, and what is not finite is black or bright: what TensorFlow 2.21.0 writes."""
    data = np.linspace(-0.5, 1.5, 2 * 3 * 4 * 3).reshape(2, 3, 4, 3)
    data[1, 0, 0], data[1, 0, 1] = [np.nan, np.inf, -np.inf], 0.5
    (found,) = written(lambda: ps.summary.image("i", data))
    black = [[0, 0, 0]]
    assert decoded_png(found[2]).tolist() == [
        black * 4,
        [*black * 2, [1, 8, 16], [23, 30, 37]],
        [[44, 52, 59], [66, 73, 80], [88, 95, 102], [109, 116, 124]],
    ]
    assert decoded_png(found[3])[0, :2].tolist() == [[0, 255, 0], [127, 127, 127]]


@pytest.mark.parametrize(("given", "keys", "count"), [(5, {}, 3), (2, {}, 2), (5, {"max_outputs": 0}, 0), (0, {}, 0)])
def test_so_many_images_are_written(written, given, keys, count):
    """The first ones; by default three."""
    data = np.zeros((given, 2, 3, 1), np.uint8) + np.arange(given, dtype=np.uint8).reshape(-1, 1, 1, 1)
    (found,) = written(lambda: ps.summary.image("i", data, **keys))
    assert found[:2].tolist() == [b"3", b"2"]
    assert [decoded_png(each).max() for each in found[2:]] == list(range(count))


@pytest.mark.parametrize(
    ("data", "shape", "expected"),
    [
        ("some *words*", (), [b"some *words*"]),
        ("Grüße", (), ["Grüße".encode()]),
        (b"bytes\0", (), [b"bytes\0"]),
        (np.str_("of NumPy"), (), [b"of NumPy"]),
        ([["a", "b"], ["c", "d"]], (2, 2), [b"a", b"b", b"c", b"d"]),
        (np.array(["long", "s"]), (2,), [b"long", b"s"]),
        ([], (0,), []),
    ],
)
def test_a_text_is_in_the_file(written, data, shape, expected):
    (found,) = written(lambda: ps.summary.text("t", data))
    assert (found.shape, found.ravel().tolist()) == (shape, expected)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ps.summary.scalar("a", np.zeros(3)), ValueError, r"one number, not an array of shape \(3,\); reduce"),
        (lambda: ps.summary.scalar("a", "text"), ValueError, "could not convert"),
        (lambda: ps.summary.histogram("a", [1.0], buckets=-1), ValueError, r"histogram\('a'\) has buckets=-1"),
        (lambda: ps.summary.histogram("a", [1.0], buckets=2.0), ValueError, "an integer of at least 0"),
        (lambda: ps.summary.histogram("a", [1j]), ValueError, "needs real numbers"),
        (lambda: ps.summary.histogram("a", "words"), ValueError, "could not convert"),
        (lambda: ps.summary.image("a", np.zeros((2, 2, 3))), ValueError, r"of shape \(2, 2, 3\); pass \(images"),
        (lambda: ps.summary.image("a", np.zeros((1, 2, 2, 5))), ValueError, "with 1 to 4 channels"),
        (lambda: ps.summary.image("a", np.zeros((1, 0, 2, 3))), ValueError, "with 1 to 4 channels"),
        (lambda: ps.summary.image("a", np.zeros((1, 2, 2, 3), int)), ValueError, "is of int64; pass uint8"),
        (lambda: ps.summary.image("a", np.zeros((1, 2, 2, 3)), max_outputs=-1), ValueError, "max_outputs=-1"),
        (lambda: ps.summary.image("a", np.zeros((1, 2, 2, 3)), max_outputs=True), ValueError, "max_outputs=True"),
        (lambda: ps.summary.text("a", 1.0), TypeError, r"text\('a'\) got a float; pass a str"),
        (lambda: ps.summary.text("a", ["a", ["b", "c"]]), (TypeError, ValueError), "list"),
        (lambda: ps.summary.text("a", None), TypeError, "NoneType"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, call, error, says):
    """With its name, and nothing of it is written."""
    writer = ps.summary.create_file_writer(str(tmp_path))
    with writer.as_default(step=0), pytest.raises(error, match=says):
        call()
    writer.close()
    assert tensors(tmp_path) == []
