"""A round takes no more memory than its plan was said to take, and lets go what nobody reads any more."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.devices import Device
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from pswire.model.plan import Apply, Operand, Plan, Reduction, Ref
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import TensorSpec
from tests.kit.programs import job_of, run

SPEC = TensorSpec("float32", (100_000,))
VARIABLE, VALUE = Input("variable", SPEC), Input("value", SPEC)
SLACK = 1 << 17
"""Bytes of Python's own."""

PROGRAMS = (
    Program((VARIABLE,), (Node("square", (0,)),), (), (1,)),
    Program((VARIABLE, VALUE), (Node("add", (0, 1)), Node("exp", (2,)), Node("negative", (3,))), (), (2, 4)),
    Program((VALUE, VALUE), (Node("add", (0, 1)), Node("sum", (2,)), Node("multiply", (0, 3))), (), (4, 3)),
    Program((VARIABLE, VALUE), (Node("add", (0, 1)), Node("negative", (0,))), ((0, 2),), (3,)),
    Program((VARIABLE, VALUE), (Node("multiply", (0, 1)),), ((0, 2),), ()),
    Program((VARIABLE,), (), (), (0,)),
    Program((VALUE, VALUE), (), (), ()),
)


@st.composite
def plans(draw):
    """Up to eight applications on two variables, two reductions, an operand, and one another's results."""
    values = [Ref("reduction", 0), Ref("reduction", 1), Ref("operand", 0)]
    applies, results = [], 0
    for number in draw(st.lists(st.integers(0, len(PROGRAMS) - 1), min_size=1, max_size=8)):
        program = PROGRAMS[number]
        refs = [
            draw(st.sampled_from([Ref("variable", 0), Ref("variable", 1)] if item.kind == "variable" else values))
            for item in program.inputs
        ]
        applies.append(Apply(number, (0,), tuple(refs)))
        values += [Ref("result", results + n) for n, spec in enumerate(program.output_specs) if spec == SPEC]
        results += len(program.outputs)
    possible = [ref for ref in values if ref.kind != "operand"]
    returned = draw(st.lists(st.sampled_from(possible), unique=True, max_size=3))
    reductions = (Reduction("sum", SPEC, (0,)), Reduction("mean", SPEC, (0,)))
    return Plan(reductions, (Operand(SPEC, (0,)),), PROGRAMS, tuple(applies), tuple(returned))


class Ready(Kernels):
    """Kernels that do nothing, at once: what is measured is the memory around them."""

    def __init__(self) -> None:
        super().__init__(Device(), smallest=0)
        self.compiler.elementwise = lambda form, now=False: lambda *_: 0  # type: ignore[method-assign, assignment]


def taken(plan, kernels, values):
    """Bytes that a round of two workers takes at most.

    The least of three rounds: the first remembers things anew, and in any one the interpreter may enlarge its table of
    strings by 2 MB.
    """
    contributions = [[np.full(SPEC.shape, worker, "float32") for _ in plan.reductions] for worker in (1, 2)]
    operands = [np.ones(operand.tensor.shape, "float32") for operand in plan.operands]
    job = job_of(plan, contributions, operands, part_bytes=1 << 30)
    peaks = []
    for _ in range(3):
        tracemalloc.start()
        try:
            run(job, kernels, values)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)


def plan_bytes(plan, server=0):
    return PreparedPlan(plan, server, limited=True).nbytes


@pytest.mark.parametrize("kernels", [Kernels(Device(), patience=10**9), Ready()], ids=["interpreted", "compiled"])
@given(plan=plans())
def test_a_round_takes_no_more_than_its_plan_says(kernels, plan):
    """Beside the new values of variables; with nothing written in place."""
    values = {number: np.ones(SPEC.shape, "float32") for number in (0, 1)}
    new = len(set(plan.writes(0))) * SPEC.nbytes
    assert taken(plan, kernels, values) <= plan_bytes(plan) + new + SLACK


@pytest.mark.parametrize("read", [False, True], ids=["by nobody", "by the next"])
def test_results_are_let_go_when_nobody_reads_them_any_more(read):
    """However many there are, a round holds a few."""
    next_one = Program((VALUE,), (Node("square", (0,)),), (), (1,))
    refs = [Ref("result", n) if read else Ref("variable", 0) for n in range(30)]
    applies = [Apply(0, (0,), (Ref("variable", 0),)), *(Apply(int(read), (0,), (ref,)) for ref in refs)]
    plan = Plan((), (), (PROGRAMS[0], next_one), tuple(applies))
    values = {0: np.ones(SPEC.shape, "float32")}
    assert taken(plan, Kernels(Device(), patience=10**9), values) <= 4 * SPEC.nbytes


def test_what_a_whole_plan_holds_is_counted():
    """Results that are read at the end are there at once; one application alone needs far less."""
    many = [Apply(0, (0,), (Ref("variable", 0),)) for _ in range(20)]
    last = Program((VALUE,) * 20, (Node("add", (0, 19)),), (), (20,))
    plan = Plan((), (), (PROGRAMS[0], last), (*many, Apply(1, (0,), tuple(Ref("result", n) for n in range(20)))))
    assert plan_bytes(plan) >= 20 * SPEC.nbytes
    assert plan_bytes(plan, 1) == 0
    assert plan_bytes(Plan((), (), PROGRAMS, tuple(many[:1]))) <= 4 * SPEC.nbytes
