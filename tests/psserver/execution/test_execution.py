"""One round of one server: all of it or nothing, the same for everyone; its reducer against NumPy, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.devices import ServerDevice
from psserver.execution.contributions import Contributions, reduce
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare, ReadyRound
from psserver.programs import interpreter
from psserver.programs.kernels.kernels import Kernels
from pswire.api import Contribution
from pswire.errors import Diverged, MemoryLimit, ProgramError
from pswire.model.log import Member
from pswire.model.plan import Apply, Operand, PlacedVariable, Plan, Reduction, Ref, VariableSpec
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import DTYPES, TensorSpec, spec_of
from pswire.network.payload import Payload
from tests.kit import programs
from tests.kit.programs import job_of, updates
from tests.kit.rig import WORKERS, payload, reduce_only, sgd, sum_into

NUMBER = TensorSpec("int64", ())
PAIR = TensorSpec("float64", (2,))
V = PlacedVariable(0, VariableSpec("v", NUMBER), (0,))
W = PlacedVariable(1, VariableSpec("w", PAIR), (0,))
KERNELS = Kernels(ServerDevice())


def part(place, plan, values=(), operands=(), weights=None, want=(), server=0):
    weights = (1.0,) * len(plan.reductions) if weights is None else weights
    said = Contribution(place + 1, 1, 4, plan.id, weights, want=want)
    return MemberShare(Member(WORKERS[place], place + 1, 1), said, payload(plan, server, values, weights, operands))


def run(plan, parts, values, server=0):
    job = ReadyRound(4, PreparedPlan(plan, server), tuple(parts), (), lambda: "the section")
    return programs.run(job, KERNELS, values)


def test_a_round_reduces_applies_and_gives():
    """Nothing is written in place: what was there stays as it was. A reduction alone assigns nothing, and a variable
    without a value is an error, and no silence: everyone waits for an answer."""
    before = {0: np.array(10)}
    before[0].flags.writeable = False
    plan = sum_into(V)
    outcome = run(plan, [part(0, plan, [3], want=(0,)), part(1, plan, [4])], before)
    assert {id: int(value) for id, value in outcome.assigned.items()} == {0: 17}
    assert {id: int(value) for id, value in outcome.wanted.items()} == {0: 17}
    assert [int(value) for value in outcome.given] == [7]
    assert int(before[0]) == 10
    with pytest.raises(ProgramError):
        run(plan, [part(0, plan, [1])], {})
    plan = reduce_only(PAIR)
    outcome = run(plan, [part(0, plan, [[1.0, 2.0]], want=(1,))], {1: np.zeros(2)})
    assert (outcome.assigned, outcome.wanted) == ({}, {})


def test_weights_count_in_the_mean():
    """A weight of 0 leaves out its bytes; those of the others are found all the same."""
    reductions = tuple(Reduction("mean", PAIR, (0,)) for _ in range(2))
    plan = Plan(reductions, returned=(Ref("reduction", 0), Ref("reduction", 1)))
    ones, twos = [1.0, 1.0], [2.0, 2.0]
    parts = [part(0, plan, [ones, twos], weights=(0.0, 3.0)), part(1, plan, [twos, ones], weights=(1.0, 1.0))]
    first, second = run(plan, parts, {}).given
    assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [0.75, 0.75])


def test_what_is_assigned_is_its_own():
    """A plain copy of what came over the network keeps no message alive, and of another variable no alias."""
    copy = Program((Input("variable", PAIR), Input("value", PAIR)), (), ((0, 1),), (1,))
    plan = updates(copy)
    outcome = run(plan, [part(0, plan, [[1.0, 2.0]])], {0: np.zeros(2)})
    assert outcome.assigned[0].flags.owndata
    assert outcome.assigned[0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.25), (0.0, -0.0), (np.nan, 0.0)])
def test_operands_are_compared_bit_by_bit(first, second):
    """A zero and its negative differ, and equal NaNs do not. Both processes and both values are in the message."""
    plan = sgd(W)
    one, other, same = (part(n, plan, [[1.0, 1.0]], [rate]) for n, rate in enumerate((first, second, first)))
    with pytest.raises(Diverged) as told:
        run(plan, [one, other], {1: np.zeros(2)})
    words = str(WORKERS[0]), str(WORKERS[1]), f"[{first:g}", f"[{second:g}", "operand 0", "round 4", "the section"
    assert [word for word in words if word not in str(told.value)] == []
    run(plan, [one, same], {1: np.zeros(2)})


def test_operands_are_compared_whole():
    """However long; the message shows their beginning."""
    long = TensorSpec("float64", (1000,))
    scale = Program((Input("variable", long), Input("operand", long)), (Node("add", (0, 1)),), ((0, 2),), ())
    plan = updates(scale)
    one, other = (part(n, plan, operands=[np.eye(1, 1000, 999)[0] * n]) for n in (0, 1))
    with pytest.raises(Diverged) as told:
        run(plan, [one, other], {0: np.zeros(1000)})
    assert len(str(told.value)) < 1000
    assert run(plan, [one, one], {0: np.zeros(1000)}).assigned[0].shape == (1000,)


def test_results_pass_from_program_to_program():
    """Counted over all applications, those of other servers included."""
    give = Program((Input("value", NUMBER),), (Node("add", (0, 0)),), (), (1, 0))
    reductions = (Reduction("sum", NUMBER, (1,)), Reduction("sum", NUMBER, (0,)))
    applies = (
        Apply(0, (1,), (Ref("reduction", 0),)),
        Apply(0, (0,), (Ref("reduction", 1),)),
        Apply(0, (0,), (Ref("result", 2),)),
    )
    plan = Plan(reductions, (), (give,), applies, (Ref("result", 4), Ref("result", 3)))
    assert [int(value) for value in run(plan, [part(0, plan, [9, 3])], {}).given] == [12, 3]


def failing(kind):
    def run(*_):
        raise kind("what the machine says")

    return run


@pytest.mark.parametrize(
    ("raised", "told"), [(MemoryError, MemoryLimit), (RuntimeError, ProgramError), (KeyError, ProgramError)]
)
def test_whatever_goes_wrong_is_told(monkeypatch, raised, told):
    """With the task, the round, what was updated in it and what was said, as an error of ours."""
    monkeypatch.setattr(interpreter.Script, "run", failing(raised))
    plan = sum_into(V)
    with pytest.raises(told, match=r"what the machine says.*; in round 4 \(the section\)") as caught:
        run(plan, [part(0, plan, [1])], {0: np.array(1)})
    assert caught.value.task == "/job:ps/task:0"


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


SCALAR, INTEGERS = TensorSpec("float32", ()), TensorSpec("int64", (2,))
OPERANDS = Plan(
    (Reduction("sum", INTEGERS, (0,)),), (Operand(SCALAR, (0,)), Operand(INTEGERS, (1,)), Operand(INTEGERS, (0,)))
)


def sent(rate: float, pair: list[int], gap: int, cuts: list[int]) -> Payload:
    """What one member sends, cut at these places, with bytes of this value between tensors."""
    packed = Payload.pack([np.float32(rate), np.array(pair), np.array([5, 6])])
    whole = np.full(packed.size, gap, "uint8")
    for at, buffer in packed.chunks:
        whole[at : at + len(buffer)] = buffer
    ends = [0, *cuts, packed.size]
    return Payload([(low, whole[low:high].data) for low, high in pairwise(ends)], packed.size)


def taken(*payloads: Payload) -> dict[Ref, list[float]]:
    job = job_of(OPERANDS, [[np.array([5, 6])]] * len(payloads), [np.float32(0), np.zeros(2, "int64")])
    parts = [
        replace(part, said=replace(part.said, weights=(1.0,)), payload=payload)
        for part, payload in zip(job.parts, payloads, strict=True)
    ]
    found = Contributions(replace(job, parts=tuple(parts))).operands()
    return {ref: value.reshape(-1).tolist() for ref, value in found}


@pytest.mark.parametrize("cuts", [[], [4], [64], [65, 72]])
@pytest.mark.parametrize("gap", [0, 7])
def test_operands_are_the_same_however_they_come(cuts, gap):
    """In one piece or in several; what lies between them is nobody's. Those that differ are told with their senders."""
    whole, other = sent(0.5, [1, 2], 0, []), sent(0.5, [1, 2], gap, cuts)
    assert taken(whole, other, whole) == taken(other, whole) == {Ref("operand", 0): [0.5], Ref("operand", 2): [1, 2]}
    for rate, pair, number in ((0.25, [1, 2], 0), (0.5, [1, 3], 2)):
        with pytest.raises(Diverged, match=rf"operand {number} must be equal .*worker/task:0 has .*worker/task:2 has"):
            taken(other, whole, sent(rate, pair, gap, cuts))
