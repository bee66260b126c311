"""Kernels on rows: the bits of the interpreter, which are NumPy's, in updates and in those that rows have missed."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from psserver.programs.kernels.replay import Replay
from psserver.programs.kernels.row_codegen import LOOK
from psserver.programs.kernels.row_groups import RowGroups
from psserver.programs.kernels.row_steps import ROW_DTYPES, split_rows
from psserver.programs.kernels.rows import RowUpdate, apply_rows, resized
from pswire.errors import InvalidRequest, ProgramError
from pswire.model.program import OPS, Input, Node, Program
from pswire.model.row_updates import ALONG_ROWS, later_refusal, refusal
from pswire.model.tensor import DTYPES, TensorSpec
from tests.kit import programs
from tests.kit.cases import search

SIZE = 11
SHAPES = [(SIZE,), (SIZE, 1), (SIZE, 3), (SIZE, 8), (SIZE, 2, 9), (SIZE, 140)]

INTERPRETED = programs.kept_kernels(patience=10**9)


@pytest.fixture(scope="module")
def kernels():
    """Kernels that are compiled as soon as they are asked for; none of them fails."""
    made = programs.kept_kernels(2, patience=1)
    yield made
    made.close()
    assert made.compiler.failed == 0


def compiled(kernels, program, replayed=False):
    step, make = kernels.row_steps(program).last, kernels.replay if replayed else kernels.rows
    if step.shape is None:
        return False
    make(step)
    kernels.compiler.wait()
    return make(step) is not None


def check(kernels, program, inputs, ids):
    """Updates rows in place, and compares the tables with those of the interpreter: on these rows, and on others."""
    before, wanted = [array.copy() for array in inputs], programs.dense(program, inputs, ids)
    apply_rows(kernels, program, inputs, np.array(ids, "int64"))
    touched = np.isin(np.arange(len(inputs[min(wanted)])), ids)
    for target, value in wanted.items():
        assert programs.same_bits(inputs[target][touched], value[touched]), target
        assert programs.same_bits(inputs[target][~touched], before[target][~touched])


# ---- Ops ----


def every_op(dtype, shape=(SIZE, 40)):
    """A program that assigns to one table each what the ops make that kernels on rows have for a dtype."""
    wide = TensorSpec(dtype, shape)
    given = (*[Input("variable", wide)] * 2, Input("variable", TensorSpec("bool", shape)), Input("value", wide))
    nodes = []
    for node, result in programs.each_op(given, (0, 3)):
        alone = Program((*given, Input("variable", result)), (node,), ((4, 5),), ())
        if refusal(alone, [3]) is None and split_rows(alone)[-1].shape == shape:
            nodes.append((node, result))
    inputs = (*given, *(Input("variable", result) for _, result in nodes))
    assigns = tuple((4 + n, len(inputs) + n) for n in range(len(nodes)))
    return Program(inputs, tuple(node for node, _ in nodes), assigns, ())


def first(*dtypes, of):
    """Parameters of which all but a few are for CI or the soak: to compile takes long."""
    later = {dtype: pytest.mark.ci if dtype in ("bfloat16", "float16", "int32") else pytest.mark.soak for dtype in of}
    return [dtype if dtype in dtypes else pytest.param(dtype, marks=later[dtype]) for dtype in sorted(of)]


@pytest.mark.parametrize("dtype", first("float32", of=ROW_DTYPES))
def test_each_op_gives_the_interpreters_bits(kernels, dtype):
    """For every dtype that kernels on rows have, whatever the bits of the numbers are."""
    program = every_op(dtype)
    inputs = [programs.values(item.spec, n) for n, item in enumerate(program.inputs)]
    assert compiled(kernels, program)
    wanted = programs.dense(program, inputs, range(SIZE))
    apply_rows(kernels, program, inputs, np.arange(SIZE))
    made = zip(program.nodes, program.assigns, strict=True)
    assert [node for node, (target, _) in made if not programs.same_bits(inputs[target], wanted[target])] == []


def test_all_but_a_few_ops_have_kernels():
    """For real numbers of any size those of optimizers, and reductions; what has none is what dense kernels lack."""
    lacking = {"exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "floor_divide", "remainder", "pow"}
    lacking |= {"all", "any", "matmul"}
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert {node.op for node in every_op(dtype).nodes} == OPS.keys() - lacking


# ---- Along a row ----

WIDTHS = (1, 7, 8, 9, 100, 128, 129, 137, 4099)
"""Around the lengths at which NumPy sums by eights, and in halves."""

REDUCED_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "uint8", "int64")


@pytest.mark.parametrize("dtype", first("float32", of=REDUCED_DTYPES))
def test_rows_of_any_width_are_reduced_as_numpy_reduces(kernels, dtype):
    for width in WIDTHS:
        spec, shape = TensorSpec(dtype, (SIZE, width)), (SIZE, width)
        ops = ALONG_ROWS if DTYPES[dtype].kind in "fV" else ("sum", "max", "min")
        nodes = tuple(Node(op, (0,), programs.along(shape)) for op in ops)
        found = Program((Input("value", spec),), nodes, (), tuple(range(1, 1 + len(ops)))).output_specs
        inputs = (Input("value", spec), *(Input("variable", one) for one in found))
        assigns = tuple((1 + n, len(inputs) + n) for n in range(len(ops)))
        program = Program(inputs, nodes, assigns, ())
        assert compiled(kernels, program)
        rng = np.random.default_rng(width)
        rows = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)
        rows = rows.astype(DTYPES[dtype]) if DTYPES[dtype].kind in "fV" else programs.values(spec, width)
        tables = [np.zeros(one.shape, DTYPES[one.dtype]) for one in found]
        apply_rows(kernels, program, [rows, *tables], np.arange(SIZE))
        for op, table in zip(ops, tables, strict=True):
            assert programs.same_bits(table, getattr(np, op)(rows, axis=1, keepdims=True)), (op, width)


@pytest.mark.parametrize("dtype", first("float16", "float32", of=("float16", "bfloat16", "float32", "float64")))
def test_a_reduction_gives_no_negative_zero(kernels, dtype):
    """Interpreted or compiled: of zeros of both signs NumPy takes one or the other, by the processor."""
    shape = (SIZE, 5)
    given = (Input("value", TensorSpec(dtype, shape)), *[Input("variable", TensorSpec(dtype, (SIZE, 1)))] * 4)
    nodes = tuple(Node(op, (0,), programs.along(shape)) for op in ALONG_ROWS)
    program = Program(given, nodes, tuple((1 + n, 5 + n) for n in range(4)), ())
    rows = np.where(np.random.default_rng(0).random(shape) < 0.8, -0.0, 0.0).astype(DTYPES[dtype])
    for _ in range(2):
        tables = [np.ones((SIZE, 1), DTYPES[dtype]) for _ in ALONG_ROWS]
        apply_rows(kernels, program, [rows, *tables], np.arange(SIZE))
        assert all(programs.same_bits(table, np.zeros_like(table)) for table in tables)
        assert compiled(kernels, program)


def adagrad(w, acc, g):
    acc.assign_add(g * g)
    w.assign_sub(0.1 * g / (np.sqrt(acc) + 1e-7))


def given_to(program, operands, rows):
    """The inputs of a program: tables, rows, and its operands."""
    rest = iter(operands)
    makes = {"variable": programs.plain_numbers, "value": lambda *_: rows, "operand": lambda *_: next(rest)}
    return [makes[item.kind](item.spec, n) for n, item in enumerate(program.inputs)]


def test_many_rows_by_several_threads(kernels):
    spec = TensorSpec("float32", (5000, 3))
    program, operands = programs.traced(adagrad, [spec, spec], [spec])
    assert compiled(kernels, program)
    rng = np.random.default_rng(0)
    check(kernels, program, given_to(program, operands, rng.random((9000, 3), "float32")), rng.integers(0, 5000, 9000))


def test_one_table_by_two_names(kernels):
    """Interpreted or compiled, both are read before either is written, and the last write stays."""
    spec = TensorSpec("float32", (SIZE, 3))
    program, _ = programs.traced(lambda w, acc, g: (w.assign(acc + g), acc.assign(w - g)), [spec, spec], [spec])
    for _ in range(2):
        table, rows = np.ones((SIZE, 3), "float32"), np.full((2, 3), 5, "float32")
        inputs = [rows if item.kind == "value" else table for item in program.inputs]
        wanted = programs.dense(program, inputs, [4, 2])
        apply_rows(kernels, program, inputs, np.array([4, 2]))
        assert programs.same_bits(table[[4, 2]], list(wanted.values())[-1][[4, 2]])
        assert compiled(kernels, program)


@given(ids=st.lists(st.integers(0, 3000), max_size=40), size=st.sampled_from([3001, 1 << 31, 1 << 50]))
def test_groups_hold_every_row_once_in_order(kernels, ids, size):
    """Places increase, and within a place rows stay as they came, however large the table is, by NumPy or compiled."""
    kernels.compiler.groups()
    kernels.compiler.wait()
    by_numpy, groups = (RowGroups.of(np.array(ids, "int64"), size, made) for made in (None, kernels.compiler.groups()))
    assert all(programs.same_bits(*pair) for pair in zip(astuple(by_numpy), astuple(groups), strict=True))
    found = [
        (id, groups.order[low:high].tolist())
        for id, low, high in zip(groups.ids.tolist(), groups.starts, groups.starts[1:], strict=False)
    ]
    assert found == [(id, [at for at, other in enumerate(ids) if other == id]) for id in sorted(set(ids))]


@search(0.05)
@given(
    program=programs.row_programs(SHAPES),
    ids=st.lists(st.integers(0, SIZE - 1), max_size=15),
    seed=st.integers(0, 1000),
)
def test_random_updates_give_the_interpreters_bits(kernels, program, ids, seed):
    """Whatever they reduce, keep for a later pass, and assign, interpreted or by one kernel: it sums what is for one
    place, in its order; other rows stay, and those that were received."""
    assert compiled(kernels, program)
    inputs = [programs.values(item.spec, seed + n) for n, item in enumerate(program.inputs)]
    inputs[programs.ROWS] = programs.values(
        TensorSpec(program.inputs[programs.ROWS].spec.dtype, (len(ids), *inputs[programs.ROWS].shape[1:])), seed
    )
    for each in (INTERPRETED, kernels):
        given = [array.copy() for array in inputs]
        check(each, program, given, ids)
        assert programs.same_bits(given[programs.ROWS], inputs[programs.ROWS])


BROADCAST = Program(
    (*(Input("variable", TensorSpec("float32", (SIZE, width))) for width in (3, 1)),),
    (Node("broadcast_to", (1,), (("shape", (SIZE, 3)),)),),
    ((0, 2),),
    (),
)


@example(program=BROADCAST, rows=5)
@given(program=programs.row_programs(SHAPES), rows=st.integers(0, 12))
def test_a_program_for_other_rows_is_what_it_would_be_found_to_be(program, rows):
    """The specs of its values are not inferred anew; those that are said to be known are the same."""
    shape = program.inputs[programs.TABLE].spec.shape
    other = resized(program, shape, (rows, *shape[1:]))
    assert other.specs == Program(other.inputs, other.nodes, other.assigns, other.outputs).specs


def test_what_no_kernel_can_have_is_interpreted(kernels):
    """As a whole: a mean of integers, and what NumPy rounds in a way of its own."""

    def tanh(w, g):
        w.assign_sub(np.tanh(np.sum(g, axis=1, keepdims=True)) * g)

    def mean(w, g):
        w.assign_sub(np.mean(g, axis=1, keepdims=True) * np.ones(()))

    for fn, dtype in ((tanh, "float64"), (mean, "int32")):
        program, _ = programs.traced(fn, [TensorSpec("float64", (SIZE, 3))], [TensorSpec(dtype, (SIZE, 3))])
        assert not compiled(kernels, program)


REFUSED = {
    "sum works neither elementwise": lambda w, acc, g: w.assign_sub(g / np.sum(g)),
    "only tables of one shape": lambda w, acc, g: w.assign_sub(np.ones((2,), "float32") * g),
    "cannot return results": lambda w, acc, g: w * g,
    "only tables and rows": lambda w, acc, g: w.assign_sub(np.ones((SIZE, 2), "float32") * g),
}


@pytest.mark.parametrize("said", REFUSED)
def test_programs_that_are_not_of_rows_are_refused(kernels, said):
    spec = TensorSpec("float32", (SIZE, 2))
    program, operands = programs.traced(REFUSED[said], [spec, spec], [spec])
    with pytest.raises(ProgramError, match=said):
        apply_rows(kernels, program, given_to(program, operands, np.ones((1, 2), "float32")), np.array([0]))


def test_ids_and_inputs_that_do_not_fit_are_refused(kernels):
    """Ids outside of the table before anything is written, and inputs that are something else: kernels see addresses
    only."""
    spec = TensorSpec("float32", (SIZE, 2))
    program, operands = programs.traced(adagrad, [spec, spec], [spec])
    inputs = given_to(program, operands, np.ones((1, 2), "float32"))
    for ids in ([-1], [SIZE], [[0]], 0):
        with pytest.raises(InvalidRequest, match=f"rows of a table of {SIZE}"):
            apply_rows(kernels, program, inputs, np.array(ids))
    for rows in (np.ones((2, 2), "float32"), np.ones((1, 3), "float32"), np.ones((1, 2))):
        with pytest.raises(ProgramError, match="of an update of rows must be a contiguous float32"):
            apply_rows(kernels, program, given_to(program, operands, rows), np.array([0]))
    inputs[0] = np.ones((SIZE, 4), "float32")[:, ::2]
    with pytest.raises(ProgramError, match="contiguous"):
        apply_rows(kernels, program, inputs, np.array([0]))


# ---- Updates that rows have missed ----

COUNT = 5


@search(0.05)
@given(program=programs.row_programs(SHAPES), seed=st.integers(0, 1000))
def test_missed_updates_give_the_bits_of_whole_ones(kernels, program, seed):
    """One update after the other, each with its own numbers and a gradient of zeros; compiled or interpreted."""
    assume(later_refusal(program) is None)
    rng, zeros = np.random.default_rng(seed), np.zeros((0, *program.inputs[programs.ROWS].spec.shape[1:]))
    tables = [programs.plain_numbers(program.inputs[n].spec, seed + n) for n in (programs.TABLE, programs.SECOND)]
    ids = rng.permutation(SIZE)[: rng.integers(1, SIZE + 1)]
    first = rng.integers(0, COUNT + 1, len(ids))
    wanted, scalars = [table.copy() for table in tables], []
    nothing = zeros.astype(DTYPES[program.inputs[programs.ROWS].spec.dtype])
    for k in range(COUNT):
        number = programs.plain_numbers(program.inputs[programs.NUMBER].spec, seed + k)
        update = RowUpdate(kernels, program, np.empty(0, np.int64))
        update.run([*tables, nothing, number])
        scalars.append(update.scalars)
        gradient = np.zeros(program.inputs[programs.ROWS].spec.shape, nothing.dtype)
        made, _ = programs.expected(program, [*wanted, gradient, number])
        missed = ids[first <= k]
        for target, value in made.items():
            wanted[target][missed] = value[missed]
    kept = [np.array(column) for column in zip(*scalars, strict=True)]
    replay = Replay(kernels, program)
    for by_kernel in (False, True):
        if by_kernel:
            assert compiled(kernels, program, replayed=True)
        now = [table.copy() for table in tables]
        own = [now[n] for n in replay.tables]
        seen = replay.rows(own, kept, ids, first, COUNT)
        assert all(map(programs.same_bits, seen, (wanted[n][ids] for n in replay.tables)))
        replay.run(own, kept, ids, first, COUNT)
        assert all(map(programs.same_bits, own, (wanted[n] for n in replay.tables)))


def test_rows_that_rest_are_left_alone(kernels):
    """A row whose accumulator is zero has missed nothing, also where that is one number."""

    def fn(w, total, g):
        total.assign(0.5 * total + np.sum(g * g, axis=1, keepdims=True))
        w.assign_sub(total * w)

    program, operands = programs.traced(
        fn, [TensorSpec("float32", (SIZE, 4)), TensorSpec("float32", (SIZE, 1))], [TensorSpec("float32", (SIZE, 4))]
    )
    assert compiled(kernels, program, replayed=True)
    replay = Replay(kernels, program)
    w, total = np.full((SIZE, 4), np.inf, "float32"), np.zeros((SIZE, 1), "float32")
    replay.run([w, total], [np.full(3, 0.5, "float32") for _ in operands], np.arange(SIZE), np.zeros(SIZE, int), 3)
    assert np.isinf(w).all()  # and not NaN, which infinity times zero would have been


def test_a_row_that_comes_to_rest_is_left_alone_from_then_on(kernels):
    """Its accumulator is emptied by an update that it has missed: the thousands of later ones are not computed."""

    def fn(w, total, g, go):
        kept = total + g
        w.assign_sub(kept * go)
        total.assign(np.where(go.astype(bool), np.less(kept, kept).astype("float32"), kept))

    program, _ = programs.traced(
        fn, [TensorSpec("float32", (SIZE, 4))] * 2, [TensorSpec("float32", s) for s in ((SIZE, 4), ())]
    )
    assert compiled(kernels, program, replayed=True)
    w, total = np.zeros((SIZE, 4), "float32"), np.ones((SIZE, 4), "float32")
    update = RowUpdate(kernels, program, np.empty(0, np.int64))
    update.run([w, total, np.zeros((0, 4), "float32"), np.array(1, "float32")])
    kept = [np.full(2 * LOOK, number, number.dtype) for number in map(np.asarray, update.scalars)]
    for column in kept:
        column[LOOK:] = np.nan if column.dtype.kind == "f" else column[0]  # zero times NaN is NaN
    Replay(kernels, program).run([w, total], kept, np.arange(SIZE), np.zeros(SIZE, int), 2 * LOOK)
    assert (w == -1).all()
    assert not total.any()
