"""The reducer against NumPy: sums in task order, bit for bit, however the payloads were cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.execution.contributions import Contributions, reduce
from pswire.errors import Diverged
from pswire.model.plan import Operand, Plan, Reduction, Ref
from pswire.model.tensor import DTYPES, TensorSpec, spec_of
from pswire.transport.payload import Payload
from tests.kit.programs import job_of

SUMMED = sorted(set(DTYPES) - {"bool"})
AVERAGED = [name for name in SUMMED if DTYPES[name].kind not in "iu"]


def values_of(dtype: str, count: int, seed: int) -> np.ndarray:
    """Numbers of all sizes, whose sum depends on its order."""
    random = np.random.default_rng(seed)
    exponents = random.integers(-8, 9, count)
    values = random.integers(-99, 100, count) * (2.0**exponents if DTYPES[dtype].kind not in "iu" else 1)
    return np.abs(values).astype(DTYPES[dtype]) if DTYPES[dtype].kind == "u" else values.astype(DTYPES[dtype])


def cut(array: np.ndarray, places: list[int]) -> list[np.ndarray]:
    """The array in read-only pieces, as they come over a network."""
    ends = sorted({place % (array.size + 1) for place in places})
    pieces = [piece.copy() for piece in np.split(array.reshape(-1), ends) if piece.size]
    for piece in pieces:
        piece.flags.writeable = False
    return pieces


def folded(arrays: list[np.ndarray], spec: TensorSpec) -> np.ndarray:
    """The sum in the order given, as NumPy makes it."""
    if not arrays:
        return np.zeros(spec.shape, DTYPES[spec.dtype])
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = np.add(total, array)
    return np.asarray(total, DTYPES[spec.dtype])


members = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 2.0, 0.5]), st.lists(st.integers(0, 40), max_size=4)), min_size=1, max_size=5
)


@given(dtype=st.sampled_from(SUMMED), shape=st.sampled_from([(), (1,), (7,), (3, 5), (0, 4)]), members=members)
def test_a_sum_is_numpys(dtype, shape, members):
    """In task order, for every dtype; those of weight 0 are not looked at."""
    spec = TensorSpec(dtype, shape)
    arrays = [values_of(dtype, spec.size, seed).reshape(shape) for seed in range(len(members))]
    contributions = [
        (weight, cut(array, places) if weight else [None])
        for array, (weight, places) in zip(arrays, members, strict=True)
    ]
    expected = folded([array for array, (weight, _) in zip(arrays, members, strict=True) if weight], spec)
    with np.errstate(all="ignore"):
        found = reduce("sum", spec, contributions)
    assert spec_of(found) == spec
    assert found.tobytes() == expected.tobytes()


@given(dtype=st.sampled_from(AVERAGED), members=members)
def test_a_mean_is_the_sum_over_the_weights(dtype, members):
    """Divided once, in at least single precision; nothing over nothing is NaN."""
    spec = TensorSpec(dtype, (6,))
    arrays = [values_of(dtype, 6, seed) for seed in range(len(members))]
    present = [array for array, (weight, _) in zip(arrays, members, strict=True) if weight]
    wide = np.result_type(DTYPES[dtype], np.float32)
    with np.errstate(all="ignore"):
        total = wide.type(sum(weight for weight, _ in members))
        expected = (folded(present, spec).astype(wide) / total).astype(DTYPES[dtype])
        contributions = [(weight, cut(array, at)) for array, (weight, at) in zip(arrays, members, strict=True)]
        found = reduce("mean", spec, contributions)
    assert spec_of(found) == spec
    np.testing.assert_array_equal(found.astype("complex128"), expected.astype("complex128"))


@given(places=st.lists(st.lists(st.integers(0, 30), max_size=5), min_size=3, max_size=3))
def test_how_a_payload_is_cut_changes_no_bit(places):
    """A sum is the same on every run."""
    spec = TensorSpec("float32", (30,))
    arrays = [values_of("float32", 30, seed) for seed in range(3)]
    found = reduce("sum", spec, [(1.0, cut(array, at)) for array, at in zip(arrays, places, strict=True)])
    assert found.tobytes() == reduce("sum", spec, [(1.0, [array]) for array in arrays]).tobytes()


def test_the_order_is_the_one_given():
    """Task order, and no other: floating-point sums depend on it."""
    spec = TensorSpec("float64", ())
    numbers = [np.array([x]) for x in (1e16, 1.0, -1e16)]
    assert float(reduce("sum", spec, [(1.0, [x]) for x in numbers])) == 0.0
    assert float(reduce("sum", spec, [(1.0, [x]) for x in (numbers[0], numbers[2], numbers[1])])) == 1.0


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_contributions_are_only_read(op, count):
    """They are their senders' memory, which may be writable."""
    arrays = [np.array([2.0, 4.0]) for _ in range(count)]
    reduce(op, TensorSpec("float64", (2,)), [(4.0, [array]) for array in arrays])
    assert all(array.tolist() == [2.0, 4.0] for array in arrays)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mean_over_many_elements_fits_half_precision(dtype):
    """Weights that the dtype itself cannot hold divide as they should."""
    array = np.array([1000.0]).astype(DTYPES[dtype])
    found = reduce("mean", TensorSpec(dtype, (1,)), [(100_000.0, [array]), (1.0, [array])])
    assert float(found[0]) == pytest.approx(2000 / 100_001, rel=0.01)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_what_overflows_or_is_undefined_is_silent(op, recwarn):
    """As a kernel is, which may sum the same contributions."""
    arrays = [np.array([np.inf, 3e38], "float32"), np.array([-np.inf, 3e38], "float32"), np.ones(2, "float32")]
    found = reduce(op, TensorSpec("float32", (2,)), [(1.0, [array]) for array in arrays])
    assert np.isnan(found[0])
    assert np.isinf(found[1])
    assert not recwarn.list


def test_the_first_contribution_that_is_there_counts():
    """Of replica 0's, or if its process is lost of the next one's, whole and alone."""
    spec = TensorSpec("float32", (3,))
    there = [np.full(3, value, "float32") for value in (5.0, 7.0)]
    given = [(0.0, []), *((1.0, [array]) for array in there)]
    assert reduce("first", spec, given).tolist() == [5.0] * 3
    assert reduce("first", spec, given[1:]).tolist() == [5.0] * 3
    assert reduce("first", spec, given[2:]).tolist() == [7.0] * 3


SCALAR, PAIR = TensorSpec("float32", ()), TensorSpec("int64", (2,))
OPERANDS = Plan((Reduction("sum", PAIR, (0,)),), (Operand(SCALAR, (0,)), Operand(PAIR, (1,)), Operand(PAIR, (0,))))


def sent(rate: float, pair: list[int], gap: int, cuts: list[int]) -> Payload:
    """What one member sends, cut at these places, with bytes of this value between tensors."""
    packed = Payload.pack([np.float32(rate), np.array(pair), np.array([5, 6])])
    whole = np.full(packed.size, gap, "uint8")
    for at, buffer in packed.chunks:
        whole[at : at + len(buffer)] = buffer
    ends = [0, *cuts, packed.size]
    return Payload([(low, whole[low:high].data) for low, high in pairwise(ends)], packed.size)


def taken(*payloads: Payload) -> dict[Ref, list[float]]:
    job = job_of(OPERANDS, [[]] * len(payloads))
    parts = [
        replace(part, said=replace(part.said, weights=(1.0,)), payload=payload)
        for part, payload in zip(job.parts, payloads, strict=True)
    ]
    found = Contributions(replace(job, parts=tuple(parts))).operands()
    return {ref: value.reshape(-1).tolist() for ref, value in found}


@pytest.mark.parametrize("cuts", [[], [4], [64], [65, 72]])
@pytest.mark.parametrize("gap", [0, 7])
def test_operands_are_the_same_however_they_come(cuts, gap):
    """In one piece or in several; what lies between them is nobody's."""
    found = taken(sent(0.5, [1, 2], 0, []), sent(0.5, [1, 2], gap, cuts), sent(0.5, [1, 2], 0, []))
    assert found == {Ref("operand", 0): [0.5], Ref("operand", 2): [1, 2]}
    assert taken(sent(0.5, [1, 2], gap, cuts), sent(0.5, [1, 2], 0, [])) == found


@pytest.mark.parametrize("cuts", [[], [4], [65, 72]])
@pytest.mark.parametrize(("rate", "pair", "number"), [(0.25, [1, 2], 0), (0.5, [1, 3], 2)])
def test_operands_that_differ_are_told_with_their_senders(cuts, rate, pair, number):
    """Whether they came in one piece or not."""
    with pytest.raises(Diverged, match=rf"operand {number} differs: .*worker/task:0 sent .*worker/task:2 sent"):
        taken(sent(0.5, [1, 2], 0, cuts), sent(0.5, [1, 2], 0, []), sent(rate, pair, 0, cuts))
