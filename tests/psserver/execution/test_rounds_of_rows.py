"""Rounds with rows: what is reduced of them, what is written where, and what a failure leaves, which is nothing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.execution.contributions import Contributions
from psserver.execution.execution import Execution
from psserver.plans.memory import Need, plan_bytes
from pswire.api import RowRead
from pswire.errors import ProgramError
from pswire.model.plan import Apply, Plan, Reduction, Ref
from pswire.model.program import Input, Node, Program
from pswire.model.rows import Rows
from pswire.model.tensor import DTYPES, TensorSpec
from tests.kit.cases import search
from tests.kit.contributions import round_of, rows, share
from tests.kit.programs import kept_kernels, run, same_bits, step, updates
from tests.kit.rig import adding, power

TABLE, WIDE, NUMBER = TensorSpec("float32", (6, 2)), TensorSpec("float32", (4096,)), TensorSpec("int64", (6, 2))
DECAY = replace(adding(TABLE), nodes=(Node("multiply", (0, 0)), Node("add", (1, 2))), assigns=((0, 3),))
G, H = Ref("reduction", 0), Ref("reduction", 1)
V = Ref("variable", 0)


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def kernels(request):
    made = kept_kernels(2, patience=1 if request.param == "compiled" else 10**9, smallest=0)
    yield made
    made.close()


def made(kernels, job, values, alone=frozenset()):
    run(job, kernels, {id: array.copy() for id, array in values.items()}, frozenset(values))
    kernels.compiler.wait()
    return run(job, kernels, values, alone)


MEMBER = st.one_of(st.none(), st.lists(st.integers(0, 5), unique=True, max_size=6).map(sorted))


@search(0.6)
@given(
    members=st.lists(MEMBER, min_size=1, max_size=4),
    op=st.sampled_from(["sum", "mean", "first"]),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "int32"]),
    part_bytes=st.sampled_from([16, 48, 1 << 20]),
)
def test_rows_are_reduced_as_whole_arrays_are(members, op, dtype, part_bytes):
    """In task order, bit for bit where there is a row, whoever has none, or no weight, however payloads are cut."""
    if op == "mean" and dtype == "int32":
        return
    plan = Plan((Reduction(op, TensorSpec(dtype, (6, 2)), (0,), "", "rows"),), returned=(G,))
    shares, wholes, weights = [], [], []
    for place, ids in enumerate(members):
        if ids is None:
            shares.append(share(place, plan, [None]))
            continue
        values = np.random.default_rng(place).integers(-99, 99, (len(ids), 2)) / (1 if dtype == "int32" else 7)
        values = values.astype(DTYPES[dtype])
        weights.append(float(place + 1))
        shares.append(
            share(place, plan, [Rows(np.array(ids, np.int64), values)], weights=weights[-1:], part_bytes=part_bytes)
        )
        whole = np.zeros((6, 2), DTYPES[dtype])
        whole[ids] = values
        wholes.append((ids, whole))
    counted = wholes[:1] if op == "first" else wholes
    expected = np.zeros((6, 2), DTYPES[dtype])
    for _, whole in counted:
        expected = expected + whole
    if op == "mean" and weights:
        expected = expected / np.asarray(sum(weights), DTYPES[dtype])
    contributions = Contributions(round_of(plan, *shares))
    found = contributions.reduced_rows(0)
    assert found.ids.tolist() == sorted({id for ids, _ in counted for id in ids})
    assert found.values.shape == (len(found.ids), 2)
    assert (found.values == expected[found.ids]).all()
    whole = contributions.value(0)
    assert whole.dtype == DTYPES[dtype]
    assert (whole == expected).all()


@pytest.mark.parametrize(
    ("op", "program"),
    [("sum", adding(TABLE)), ("mean", adding(TABLE)), ("first", DECAY), ("mean", DECAY)],
    ids=["sum on rows", "mean on rows", "first whole", "mean whole"],
)
def test_an_update_of_rows_is_that_of_the_whole(kernels, op, program):
    """On rows and on a whole array that is made of them: of integers the same bits as a dense round."""
    dense = updates(program, op=op)
    sparse = replace(dense, reductions=(replace(dense.reductions[0], form="rows"),))
    assert sparse.by_rows == ((0,) if program is not DECAY else (None,))
    gives = [rows(0, 3, of=4.0), rows(), rows(3, 5, of=8.0)]
    wholes = []
    for one in gives:
        wholes.append(np.zeros(TABLE.shape, "float32"))
        wholes[-1][one.ids] = one.values
    weights = [(2.0,), (1.0,), (1.0,)]
    table = np.arange(12, dtype="float32").reshape(6, 2)
    found, expected = (
        made(kernels, round_of(plan, *(share(n, plan, [all[n]], weights=weights[n]) for n in range(3))), {0: table})
        for plan, all in ((sparse, gives), (dense, wholes))
    )
    assert same_bits(found.assigned[0], expected.assigned[0])
    assert not same_bits(found.assigned[0], table)


@pytest.mark.parametrize("form", ["rows", "keys"])
def test_a_norm_of_rows_needs_no_whole(kernels, form):
    """The sum over all members is measured, each place once; of a gradient that no memory would hold."""
    whole = TensorSpec("float32", (1 << 38, 2))
    norm = Program(
        (Input("value", whole),),
        (Node("square", (0,)), Node("sum", (1,), (("axis", None), ("keepdims", False)))),
        (),
        (2,),
    )
    plan = Plan((Reduction("mean", whole, (0,), "", form),), (), (norm,), (Apply(0, (0,), (G,)),), (Ref("result", 0),))
    gives = [rows(2, 7, of=8.0), rows(), rows(7, 1 << 37, of=4.0)]
    if form == "keys":
        gives = [Rows(np.stack([ids, np.ones_like(ids)]), values) for ids, values in gives]
    shares = [share(n, plan, [each], weights=((4.0, 2.0, 2.0)[n],)) for n, each in enumerate(gives)]
    found = run(round_of(plan, *shares), kernels, {})
    assert [float(value) for value in found.given] == [2 * (8.0**2 + 12.0**2 + 4.0**2) / 8**2]
    assert plan_bytes(plan, 0, [Need(1 << 52, 1 << 52)]) < 1 << 20


def both(program):
    """A plan of a dense update, and of one by rows."""
    spec = program.inputs[1].spec
    reductions = (Reduction("sum", WIDE, (0,), "'d'"), Reduction("sum", spec, (0,), "'table'", "rows"))
    return replace(updates(adding(WIDE), program), reductions=reductions)


BAD = {"not in order": (3, 1), "twice": (1, 1), "negative": (-1, 2), "too large": (2, 6), "far too large": (0, 2**62)}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("program", [adding(TABLE), DECAY], ids=["on rows", "whole"])
def test_ids_that_are_no_rows_fail_the_round_before_anything_is_written(kernels, bad, program):
    """The error names whose ids they are and for what; a dense variable beside them stays as it was, too."""
    plan = both(program)
    values = {0: np.zeros(4096, "float32"), 1: np.ones(TABLE.shape, "float32")}
    good = share(0, plan, [np.ones(4096, "float32"), rows(0, 2)])
    made(kernels, round_of(plan, good), {id: array.copy() for id, array in values.items()})
    job = round_of(plan, good, share(1, plan, [np.ones(4096, "float32"), rows(*BAD[bad])]))
    with pytest.raises(ProgramError, match="'table': the row ids from /job:worker/task:1 must increase and be below 6"):
        run(job, kernels, values, frozenset(values))
    assert not values[0].any()
    assert (values[1] == 1).all()


def test_rows_that_an_op_refuses_fail_the_round_before_anything_is_written(kernels):
    """A lazy update whose program may refuse a value: what comes before it is not written in place."""
    plan = both(power(NUMBER))
    plan = replace(plan, applies=(plan.applies[0], replace(plan.applies[1], sparse="lazy")))
    assert plan.by_rows == (None, 1)
    values = {0: np.zeros(4096, "float32"), 1: np.full((6, 2), 2)}
    goes, fails = (
        round_of(plan, share(0, plan, [np.ones(4096, "float32"), rows(1, 4, of=power, dtype="int64")]))
        for power in (3, -1)
    )
    made(kernels, goes, {id: array.copy() for id, array in values.items()})
    with pytest.raises(ProgramError, match="pow of int64"):
        run(fails, kernels, values, frozenset(values))
    assert not values[0].any()
    assert (values[1] == 2).all()
    outcome = run(goes, kernels, values, frozenset(values))
    assert outcome.assigned[1][:, 0].tolist() == [2, 8, 2, 2, 8, 2]


def test_two_updates_of_one_table_follow_each_other(kernels):
    """On rows and whole, in the plan's order; the copy that the first has made is the second's."""
    plan = Plan(
        (Reduction("sum", TABLE, (0,), "", "rows"), Reduction("sum", TABLE, (0,))),
        (),
        (adding(TABLE), DECAY),
        (Apply(0, (0,), (V, G)), Apply(1, (0,), (V, H)), Apply(0, (0,), (V, G))),
    )
    table = np.full(TABLE.shape, 2, "float32")
    expected = table.copy()
    expected[[1, 4]] += 1
    expected = expected * expected + 3
    expected[[1, 4]] += 1
    job = round_of(plan, share(0, plan, [rows(1, 4), np.full(TABLE.shape, 3, "float32")]))
    for alone in (frozenset[int](), frozenset({0})):
        assert same_bits(made(kernels, job, {0: table.copy()}, alone).assigned[0], expected)


def test_reduced_rows_are_given_and_looked_up(kernels):
    """Reduced ones each once, with how many they are; for each member its own, as they are after the round."""
    plan = replace(updates(adding(TABLE)), reductions=both(adding(TABLE)).reductions[1:], returned=(G,))
    shares = [
        share(0, plan, [rows(1, 3, of=np.array([[1, 1], [2, 2]], "float32"))]),
        share(1, plan, [rows(3, 5, of=np.array([[4, 4], [8, 8]], "float32"))]),
    ]
    said = replace(shares[0].said, lookups=(RowRead.of(0, np.array([0, 1], np.int64)),))
    execution = Execution(round_of(plan, replace(shares[0], said=said), shares[1]), kernels)
    step(execution, {0: np.ones(TABLE.shape, "float32")}, {0})
    ids, values = execution.given.arrays
    assert (ids.tolist(), values[:, 0].tolist(), list(execution.given.rows)) == ([1, 3, 5], [1, 6, 8], [3])
    assert execution.lookups.found[1][0].tolist() == [[1, 1], [2, 2]]
