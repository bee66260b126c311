"""Plans: memory that rounds take, contributions with rows that fit them, and two that differ, told apart in words."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.devices import ServerDevice
from psserver.plans.divergence import LONG, PlanText, compared
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from psserver.state.sessions import diverged
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.errors import Diverged, InvalidRequest
from pswire.model.consistency import SYNC, Consistency
from pswire.model.log import Member
from pswire.model.plan import Apply, Operand, PlacedVariable, Plan, Reduction, Ref, SnapshotOrder, VariableSpec
from pswire.model.program import Input, Node, Program
from pswire.model.rows import MAX_ROWS, row_specs
from pswire.model.tensor import DTYPES, TensorSpec
from pswire.network.payload import Payload
from tests.kit.cases import search
from tests.kit.programs import job_of, plan_of, run, traced
from tests.kit.rig import SOON, WORKERS

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
        super().__init__(ServerDevice(), smallest=0)
        self.compiler.elementwise = lambda form, now=False: lambda *_: 0  # type: ignore[method-assign, assignment]


def taken(plan, kernels, values):
    """Bytes that a round of two workers takes at most. The least of three rounds: the first remembers things anew, and
    in any one the interpreter may enlarge its table of strings by 2 MB."""
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


@pytest.mark.parametrize("kernels", [Kernels(ServerDevice(), patience=10**9), Ready()], ids=["interpreted", "compiled"])
@given(plan=plans())
def test_a_round_takes_no_more_than_its_plan_says(kernels, plan):
    """Beside the new values of variables; with nothing written in place."""
    values = {number: np.ones(SPEC.shape, "float32") for number in (0, 1)}
    new = len(set(plan.writes(0))) * SPEC.nbytes
    assert taken(plan, kernels, values) <= plan_bytes(plan) + new + SLACK


def test_what_a_whole_plan_holds_is_counted():
    """Results that are read at the end are there at once; one application alone needs far less."""
    many = [Apply(0, (0,), (Ref("variable", 0),)) for _ in range(20)]
    last = Program((VALUE,) * 20, (Node("add", (0, 19)),), (), (20,))
    plan = Plan((), (), (PROGRAMS[0], last), (*many, Apply(1, (0,), tuple(Ref("result", n) for n in range(20)))))
    assert plan_bytes(plan) >= 20 * SPEC.nbytes
    assert plan_bytes(plan, 1) == 0
    assert plan_bytes(Plan((), (), PROGRAMS, tuple(many[:1]))) <= 4 * SPEC.nbytes


NUMBER = TensorSpec("float32", ())
WHOLE = st.builds(
    lambda dtype, rest: TensorSpec(dtype, (50, *rest)),
    st.sampled_from(["float32", "uint8", "bfloat16", "complex128"]),
    st.sampled_from([(), (3,), (2, 5), (0,)]),
)
REDUCTIONS = st.lists(
    st.builds(
        lambda spec, servers, form: Reduction("sum", spec, servers, "", form),
        WHOLE,
        st.sampled_from([(0,), (1,), (0, 1)]),
        st.sampled_from(["dense", "rows"]),
    ),
    max_size=5,
)


def said_of(plan, weights, rows, **more):
    return Contribution(1, 1, 4, plan.id, weights, rows=rows, **more)


@search(0.8)
@given(reductions=REDUCTIONS, data=st.data())
def test_rows_lie_where_a_payload_has_them(reductions, data):
    """Behind operands and dense contributions: of each that counts here ids, then rows, as they are packed."""
    plan = Plan(tuple(reductions), (Operand(NUMBER, (0,)), Operand(NUMBER, (1,))))
    weights = tuple(data.draw(st.sampled_from([0.0, 1.0])) for _ in reductions)
    rows = tuple(data.draw(st.integers(0, 9)) * bool(weights[number]) for number in plan.rows)
    dense: dict[Ref, list[np.ndarray]] = {Ref("operand", 0): [np.array(0.5, "float32")]}
    behind: dict[Ref, list[np.ndarray]] = {}
    for number, one in enumerate(reductions):
        if not weights[number] or 0 not in one.servers:
            continue
        specs = [one.tensor] if one.form == "dense" else row_specs(one.tensor, rows[plan.rows.index(number)])
        arrays = [
            np.random.default_rng(number + 7 * n).integers(0, 99, spec.shape).astype(DTYPES[spec.dtype])
            for n, spec in enumerate(specs)
        ]
        (dense if one.form == "dense" else behind)[Ref("reduction", number)] = arrays
    payload = Payload.pack([array for arrays in (dense | behind).values() for array in arrays])
    said = said_of(plan, weights, rows)
    prepared = PreparedPlan(plan, 0)
    prepared.check(said, payload.size)
    layout = prepared.layout(said)
    assert (layout.size, set(layout.of), set(layout.rows)) == (payload.size, set(dense), {ref.index for ref in behind})
    for ref, (array,) in dense.items():
        pieces = payload.pieces(layout.of[ref][0], TensorSpec(array.dtype.name, array.shape))
        assert b"".join(piece.tobytes() for piece in pieces) == array.tobytes()
    for ref, (ids, values) in behind.items():
        *places, count = layout.rows[ref.index]
        for at, array in zip(places, (ids, values), strict=True):
            spec = TensorSpec(array.dtype.name, array.shape)
            assert b"".join(piece.tobytes() for piece in payload.pieces(at, spec)) == array.tobytes()
        assert count == len(ids)
    for wrong in (payload.size + 1, payload.size - 1):
        with pytest.raises(InvalidRequest, match="does not fit a compiled step"):
            prepared.check(said, wrong)


TABLE = TensorSpec("float32", (9, 2))
ROWS = Reduction("sum", TABLE, (0,), "", "rows")
ROW_PLAN = Plan((ROWS, Reduction("sum", TABLE, (0,)), ROWS))
SAID = said_of(ROW_PLAN, (1.0, 1.0, 1.0), (3, 0))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (replace(SAID, rows=()), r"row counts \(\) for a compiled step with 2 reductions of rows"),
        (replace(SAID, rows=(3,)), r"row counts \(3,\) for a compiled step with 2"),
        (replace(SAID, rows=(3, 0, 0)), "has row counts"),
        (replace(SAID, rows=(1 << 40, 0)), f"the limit is {MAX_ROWS} rows each"),
        (replace(SAID, rows=(3, MAX_ROWS + 1)), f"the limit is {MAX_ROWS} rows each"),
        (replace(SAID, rows=(4, 0)), "does not fit a compiled step"),
        (replace(SAID, rows=(0, 3), weights=(1.0, 1.0, 0.0)), "does not fit a compiled step"),
        (replace(SAID, weights=(1.0, 1.0)), "2 weights does not fit a compiled step with 3 reductions"),
        (replace(SAID, weights=()), "0 weights does not fit"),
        (replace(SAID, weights=(1.0,) * 4), "4 weights does not fit"),
    ],
)
def test_a_contribution_that_does_not_fit_is_refused(said, why):
    """By its header and its size alone: how many rows somebody says costs nothing."""
    prepared = PreparedPlan(ROW_PLAN, 0)
    size = Payload.pack([np.zeros(TABLE.shape, "float32"), np.zeros(3, "int64"), np.zeros((3, 2), "float32")]).size
    prepared.check(SAID, size)
    with pytest.raises(InvalidRequest, match=why):
        prepared.check(said, size)


def test_who_only_looks_sends_no_rows():
    """Neither does a layout with rows stay for those who send others."""
    prepared = PreparedPlan(ROW_PLAN, 0)
    prepared.check(said_of(ROW_PLAN, (0.0,) * 3, (), observes=True), 0)
    sizes = {count: prepared.layout(replace(SAID, rows=(count, 0))).size for count in (0, 1, 5, 0)}
    assert sizes[0] < sizes[1] < sizes[5]


THREE = TensorSpec("float32", (3,))
VARIABLES = {n: PlacedVariable(n, VariableSpec(name, THREE), (0,)) for n, name in enumerate(("vee", "uu"))}


def section(fn, values=(THREE,), variables=(THREE,)):
    return plan_of(traced(fn, variables, values)[0])


BASE = section(lambda v, g: v.assign(v - g))
ELSEWHERE = replace(BASE, reductions=(replace(BASE.reductions[0], servers=(1,)),))


def one_update_more():
    more = section(lambda u: u.assign(u * np.ones(3, "float32")), values=())
    (apply,) = more.applies
    apply = replace(apply, program=1, args=(Ref("variable", 1), Ref("operand", 0)))
    applies, programs = (*BASE.applies, apply), (*BASE.programs, *more.programs)
    return replace(BASE, operands=more.operands, programs=programs, applies=applies)


DIFFERENT = {
    "another op": (
        section(lambda v, g: v.assign(v + g)),
        "#2 = subtract(#0 float32[3], #1 float32[3])",
        "#2 = add(#0 float32[3], #1 float32[3])",
    ),
    "another order": (section(lambda v, g: v.assign(g - v)), "subtract(#0", "subtract(#1"),
    "one op more": (section(lambda v, g: v.assign(np.sqrt(v - g))), "assigns #2 to variable 'vee'", "#3 = sqrt(#2"),
    "another reduction": (
        section(lambda v, g: v.assign(v - g.astype("float32")), [TensorSpec("int8", (3,))]),
        "",
        "int8",
    ),
    "an operand more": (
        section(lambda v, g: v.assign(v - g * np.ones(3, "float32"))),
        "computes #2 = subtract(",
        "takes operand 0, float32[3], as #2",
    ),
    "an update more": (one_update_more(), "nothing", "update 1 of variable 'uu' on /job:ps/task:0 takes variable"),
    "another server": (ELSEWHERE, "on /job:ps/task:0", "on /job:ps/task:1"),
    "something given back": (replace(BASE, returned=(Ref("reduction", 0),)), "nothing", "reduction 0 is returned"),
    "another checkpoint": (replace(BASE, snapshot=SnapshotOrder("x", (0,), 7)), "nothing", "'x' of round 7"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_sections_that_differ_are_told_apart(name):
    """Each position says what its process does where the two first differ, and not what they do alike."""
    other, mine, its = DIFFERENT[name]
    assert other.id != BASE.id
    one, two = compared([PlanText(BASE, VARIABLES), PlanText(other, VARIABLES)])
    assert mine in one.partition("[first difference: ")[2]
    assert its in two.partition("[first difference: ")[2]
    told = str(diverged(4, zip(WORKERS, [PlanText(BASE, VARIABLES), PlanText(other, VARIABLES)], strict=False)))
    assert one in told
    assert two in told


def test_attributes_are_told_apart():
    square = [TensorSpec("float32", (3, 3))]
    one, two = (section(lambda v, g, axis=axis: np.sum(g, axis=axis), square) for axis in (0, 1))
    told = compared([PlanText(one, VARIABLES), PlanText(two, VARIABLES)])
    assert ["axis=0" in told[0], "axis=1" in told[1]] == [True, True]


def test_what_is_not_known_is_left_as_it_is():
    """A server that has only heard of a section cannot say what is in it."""
    words = [PlanText(BASE, VARIABLES), "a later step"]
    assert compared(words) == words


def test_a_long_section_is_cut():
    """A message stays one that people read; a short section is whole."""
    many = replace(BASE, applies=BASE.applies * 1000)
    assert len(PlanText(many, VARIABLES)) < LONG + 10
    assert PlanText(BASE, VARIABLES) == BASE.describe(VARIABLES)


@pytest.mark.parametrize("heartbeats", [False, True], ids=["in a round", "by heartbeats"])
def test_processes_with_different_functions_are_told_which(job, heartbeats):
    """Both update the same variable, and would read the same words twice otherwise."""
    two = job.join(*WORKERS[:2])
    job.variable(two[0], np.zeros(3, "float32"), name="vee")
    other = DIFFERENT["another op"][0]
    for section in (BASE, other):
        job.approve(section, two[0])

    def at(worker, section):
        if heartbeats:
            return job.verbs[0].heartbeat(worker.session, 0, section.id)
        return worker.push(section, [np.ones(3, "float32")])

    at(two[0], BASE)
    with pytest.raises(Diverged, match=r"= subtract\(.*= add\("):
        at(two[1], other).result(SOON)


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_an_asynchronous_worker_makes_rounds_that_count_as_no_step(mode):
    """Of any variables; a worker whose rounds all make together may not, and nobody saves or restores so."""
    plan = Plan((Reduction("sum", NUMBER, (0,)),))
    said = said_of(plan, (1.0,), (), alone=True)
    member = Member(Task("worker", 0), 1, 1, Consistency(mode))
    PreparedPlan(plan, 0).check(said, 4, member)
    saves = replace(plan, snapshot=SnapshotOrder("run/ckpt", (0,)))
    for wrong, sender in ((plan, replace(member, consistency=SYNC)), (plan, None), (saves, member)):
        prepared = PreparedPlan(wrong, 0)
        with pytest.raises(InvalidRequest, match="a round of a single worker may use only variables"):
            prepared.check(replace(said, plan_id=wrong.id), 4, sender)
