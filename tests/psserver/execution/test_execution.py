"""One round of one server: all of it or nothing, the same for everyone."""

from __future__ import annotations

import numpy as np
import pytest

from psserver.devices import Device
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare, ReadyRound
from psserver.programs import interpreter
from psserver.programs.kernels.kernels import Kernels
from pswire.api import Contribution
from pswire.errors import Diverged, MemoryLimit, ProgramError
from pswire.model.log import Member
from pswire.model.plan import Apply, Operand, PlacedVariable, Plan, Reduction, Ref, VariableSpec
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import TensorSpec
from pswire.transport.payload import EMPTY
from tests.kit import programs
from tests.kit.rig import WORKERS, adding, payload, reduce_only, sgd, sum_into

NUMBER = TensorSpec("int64", ())
PAIR = TensorSpec("float64", (2,))
V = PlacedVariable(0, VariableSpec("v", NUMBER), (0,))
W = PlacedVariable(1, VariableSpec("w", PAIR), (0,))
KERNELS = Kernels(Device())


def part(place, plan, values=(), operands=(), weights=None, want=(), server=0):
    weights = (1.0,) * len(plan.reductions) if weights is None else weights
    said = Contribution(place + 1, 1, 4, plan.id, weights, want=want)
    return MemberShare(Member(WORKERS[place], place + 1, 1), said, payload(plan, server, values, weights, operands))


def run(plan, parts, values, server=0):
    job = ReadyRound(4, PreparedPlan(plan, server), tuple(parts), (), lambda: "the section")
    return programs.run(job, KERNELS, values)


def test_a_round_reduces_applies_and_gives():
    """Nothing is written in place: what was there stays as it was."""
    before = {0: np.array(10)}
    before[0].flags.writeable = False
    plan = sum_into(V)
    outcome = run(plan, [part(0, plan, [3], want=(0,)), part(1, plan, [4])], before)
    assert {id: int(value) for id, value in outcome.assigned.items()} == {0: 17}
    assert {id: int(value) for id, value in outcome.wanted.items()} == {0: 17}
    assert [int(value) for value in outcome.given] == [7]
    assert int(before[0]) == 10


def test_what_is_assigned_is_its_own():
    """A plain copy of what came over the network keeps no message alive, and of another variable no alias."""
    copy = Program((Input("variable", PAIR), Input("value", PAIR)), (), ((0, 1),), (1,))
    plan = Plan(
        (Reduction("sum", PAIR, (0,)),), (), (copy,), (Apply(0, (0,), (Ref("variable", 1), Ref("reduction", 0))),)
    )
    outcome = run(plan, [part(0, plan, [[1.0, 2.0]])], {1: np.zeros(2)})
    assert outcome.assigned[1].flags.owndata
    assert outcome.assigned[1].tolist() == [1.0, 2.0]


def test_a_second_program_that_fails_leaves_nothing():
    """The first one's result is not handed out."""
    power = Program((Input("variable", NUMBER), Input("value", NUMBER)), (Node("pow", (0, 1)),), ((0, 2),), ())
    refs = (Ref("variable", 0), Ref("reduction", 0))
    plan = Plan(
        (Reduction("sum", NUMBER, (0,)),), (), (adding(NUMBER), power), (Apply(0, (0,), refs), Apply(1, (0,), refs))
    )
    values = {0: np.array(2)}
    with pytest.raises(ProgramError, match=r"^/job:ps/task:0: round 4 \(the section\) failed: pow of int64"):
        run(plan, [part(0, plan, [-1])], values)
    assert int(values[0]) == 2
    outcome = run(plan, [part(0, plan, [3])], values)
    assert int(outcome.assigned[0]) == 125


def test_the_second_program_sees_what_the_first_assigned():
    """In the order of the section's calls."""
    refs = (Ref("variable", 0), Ref("reduction", 0))
    plan = Plan((Reduction("sum", NUMBER, (0,)),), (), (adding(NUMBER),), (Apply(0, (0,), refs), Apply(0, (0,), refs)))
    assert int(run(plan, [part(0, plan, [5])], {0: np.array(1)}).assigned[0]) == 11


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.25), (0.0, -0.0), (np.nan, 0.0)])
def test_operands_that_differ_are_a_divergence(first, second):
    """Both processes and both values are in the message."""
    plan = sgd(W)
    parts = [part(0, plan, [[1.0, 1.0]], [first]), part(1, plan, [[1.0, 1.0]], [second])]
    with pytest.raises(Diverged) as told:
        run(plan, parts, {1: np.zeros(2)})
    for word in (
        str(WORKERS[0]),
        str(WORKERS[1]),
        f"[{first:g}",
        f"[{second:g}",
        "operand 0",
        "round 4",
        "the section",
    ):
        assert word in str(told.value)


def test_operands_are_compared_whole():
    """However long; the message shows their beginning."""
    long = TensorSpec("float64", (1000,))
    scale = Program((Input("variable", long), Input("operand", long)), (Node("add", (0, 1)),), ((0, 2),), ())
    plan = Plan((), (Operand(long, (0,)),), (scale,), (Apply(0, (0,), (Ref("variable", 0), Ref("operand", 0))),))
    one, other = np.zeros(1000), np.zeros(1000)
    other[-1] = 1.0
    with pytest.raises(Diverged) as told:
        run(plan, [part(0, plan, operands=[one]), part(1, plan, operands=[other])], {0: np.zeros(1000)})
    assert len(str(told.value)) < 1000
    assert run(plan, [part(0, plan, operands=[one]), part(1, plan, operands=[one])], {0: one}).assigned[0].shape == (
        1000,
    )


def test_who_observes_brings_no_operands():
    """Those of the others count; where only observers are, the round cannot run its programs."""
    plan = sgd(W)
    said = Contribution(2, 1, 4, plan.id, (0.0,), observes=True)
    observer = MemberShare(Member(WORKERS[1], 2, 1), said, EMPTY)
    outcome = run(plan, [part(0, plan, [[2.0, 4.0]], [0.5]), observer], {1: np.zeros(2)})
    assert outcome.assigned[1].tolist() == [-1.0, -2.0]


def test_weights_count_in_the_mean():
    """A weight of 0 leaves out its bytes; those of the others are found all the same."""
    reductions = tuple(Reduction("mean", PAIR, (0,)) for _ in range(2))
    plan = Plan(reductions, returned=(Ref("reduction", 0), Ref("reduction", 1)))
    ones, twos = [1.0, 1.0], [2.0, 2.0]
    parts = [part(0, plan, [ones, twos], weights=(0.0, 3.0)), part(1, plan, [twos, ones], weights=(1.0, 1.0))]
    first, second = run(plan, parts, {}).given
    assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [0.75, 0.75])


def test_a_server_does_its_own_part():
    """What a plan does elsewhere is neither read nor given here; results keep their numbers."""
    far = PlacedVariable(2, VariableSpec("far", NUMBER), (1,))
    plan = sum_into(far, V)
    parts = [part(0, plan, [100, 5], server=0)]
    outcome = run(plan, parts, {0: np.array(1)})
    assert {id: int(value) for id, value in outcome.assigned.items()} == {0: 6}
    assert [int(value) for value in outcome.given] == [5]


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


def test_a_variable_without_a_value_is_an_error():
    """And no silence: everyone waits for an answer."""
    plan = sum_into(V)
    with pytest.raises(ProgramError):
        run(plan, [part(0, plan, [1])], {})


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
    with pytest.raises(told, match=r"round 4 \(the section\) failed: .*what the machine says") as caught:
        run(plan, [part(0, plan, [1])], {0: np.array(1)})
    assert caught.value.task == "/job:ps/task:0"


def test_a_reduction_alone_assigns_nothing():
    """And wants nothing that was not assigned."""
    plan = reduce_only(PAIR)
    outcome = run(plan, [part(0, plan, [[1.0, 2.0]], want=(1,))], {1: np.zeros(2)})
    assert (outcome.assigned, outcome.wanted) == ({}, {})
