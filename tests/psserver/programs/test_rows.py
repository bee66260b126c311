"""Programs on rows: the same as on the whole table, where there is a row; nothing elsewhere."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.programs.kernels.row_groups import Groups
from psserver.programs.kernels.rows import apply_rows
from pswire.errors import InvalidRequest, ProgramError
from pswire.model.tensor import DTYPES, TensorSpec
from tests.kit.cases import search
from tests.kit.programs import expected, kept_kernels, same_bits, traced

SIZE = 11


def adagrad(w, acc, g, rate=0.1):
    acc.assign_add(g * g)
    w.assign_sub(rate * g / (np.sqrt(acc) + 1e-7))


def smooth(w, acc, g):
    acc.assign(np.tanh(acc + g))
    w.assign_sub(acc * np.exp(-g))


@pytest.fixture(scope="module", params=[1, 3])
def kernels(request):
    """Kernels that are compiled as soon as they are asked for."""
    made = kept_kernels(request.param, patience=1)
    yield made
    made.close()


def tables(program, operands, dtype, shape, rows):
    """The program's inputs: tables, rows and operands."""
    rng = np.random.default_rng(0)
    rest = iter(operands)
    taken = {"variable": lambda: rng.random(shape).astype(DTYPES[dtype]), "value": lambda: rows}
    return [taken.get(item.kind, lambda: next(rest))() for item in program.inputs]


def dense(program, inputs, shape, ids):
    """What the program makes of the whole tables, the rows summed one by one into a gradient of zeros."""
    whole = []
    for item, array in zip(program.inputs, inputs, strict=True):
        if item.kind == "value":
            gradient = np.zeros(shape, array.dtype)
            first = set()
            for row, id in zip(array, ids, strict=True):
                gradient[id] = gradient[id] + row if id in first else row
                first.add(id)
            array = gradient
        whole.append(array.copy())
    return expected(program, whole)[0]


@search(0.6)
@given(
    ids=st.lists(st.integers(0, SIZE - 1), max_size=20),
    tail=st.sampled_from([(), (1,), (5,), (2, 16), (300,), (0,)]),
    dtype=st.sampled_from(["float32", "float64", "float16"]),
    fn=st.sampled_from([adagrad, smooth]),
)
def test_rows_are_updated_as_in_the_whole_table(kernels, ids, tail, dtype, fn):
    """Compiled or interpreted, bit for bit; repeated ids are summed first, in their order; other rows stay."""
    shape = (SIZE, *tail)
    spec = TensorSpec(dtype, shape)
    program, operands = traced(fn, [spec, spec], [spec])
    rows = np.random.default_rng(1).random((len(ids), *tail)).astype(DTYPES[dtype])
    for _ in range(2):
        inputs = tables(program, operands, dtype, shape, rows)
        before = [array.copy() for array in inputs]
        wanted = dense(program, inputs, shape, ids)
        apply_rows(kernels, program, inputs, np.array(ids, "int64"))
        for target, value in wanted.items():
            touched = np.isin(np.arange(SIZE), ids)
            assert same_bits(inputs[target][touched], value[touched])
            assert same_bits(inputs[target][~touched], before[target][~touched])
        assert same_bits(rows, before[[item.kind for item in program.inputs].index("value")])
        kernels.compiler.wait()


def test_many_rows_by_several_threads(kernels):
    """Each row of a table belongs to one of them."""
    shape = (5000, 3)
    spec = TensorSpec("float32", shape)
    program, operands = traced(adagrad, [spec, spec], [spec])
    rng = np.random.default_rng(0)
    ids, rows = rng.integers(0, 5000, 9000), rng.random((9000, 3), "float32")
    kernels.rows(kernels.steps(program)[-1])
    kernels.compiler.wait()
    inputs = tables(program, operands, "float32", shape, rows)
    wanted = dense(program, inputs, shape, ids)
    apply_rows(kernels, program, inputs, ids)
    touched = np.isin(np.arange(5000), ids)
    assert all(same_bits(inputs[target][touched], value[touched]) for target, value in wanted.items())


def test_one_table_by_two_names(kernels):
    """Interpreted or compiled, both are read before either is written, and the last write stays."""
    spec = TensorSpec("float32", (SIZE, 3))
    program, _ = traced(lambda w, acc, g: (w.assign(acc + g), acc.assign(w - g)), [spec, spec], [spec])
    for _ in range(2):
        table, rows = np.ones((SIZE, 3), "float32"), np.full((2, 3), 5, "float32")
        inputs = [rows if item.kind == "value" else table for item in program.inputs]
        wanted = dense(program, inputs, (SIZE, 3), [4, 2])
        apply_rows(kernels, program, inputs, np.array([4, 2]))
        assert same_bits(table[[4, 2]], list(wanted.values())[-1][[4, 2]])
        kernels.compiler.wait()


@given(ids=st.lists(st.integers(0, 3000), max_size=40), size=st.sampled_from([3001, 1 << 31, 1 << 50]))
def test_groups_hold_every_row_once_in_order(kernels, ids, size):
    """Places increase, and within a place rows stay as they came, however large the table is, by NumPy or compiled."""
    kernels.compiler.groups()
    kernels.compiler.wait()
    by_numpy, groups = (Groups.of(np.array(ids, "int64"), size, made) for made in (None, kernels.compiler.groups()))
    assert all(same_bits(*pair) for pair in zip(astuple(by_numpy), astuple(groups), strict=True))
    found = [
        (id, groups.order[low:high].tolist())
        for id, low, high in zip(groups.ids.tolist(), groups.starts, groups.starts[1:], strict=False)
    ]
    assert found == [(id, [at for at, other in enumerate(ids) if other == id]) for id in sorted(set(ids))]


@pytest.mark.parametrize("ids", [[-1], [SIZE], [[0]], 0])
def test_ids_outside_of_the_table_are_refused(kernels, ids):
    """Before anything is written."""
    spec = TensorSpec("float32", (SIZE, 2))
    program, operands = traced(adagrad, [spec, spec], [spec])
    rows = np.ones((1, 2), "float32")
    with pytest.raises(InvalidRequest, match=f"rows of a table of {SIZE}"):
        apply_rows(kernels, program, tables(program, operands, "float32", (SIZE, 2), rows), np.array(ids))


def test_inputs_that_are_something_else_are_refused(kernels):
    """Kernels see addresses only."""
    shape = (SIZE, 2)
    spec = TensorSpec("float32", shape)
    program, operands = traced(adagrad, [spec, spec], [spec])
    for rows in (np.ones((2, 2), "float32"), np.ones((1, 3), "float32"), np.ones((1, 2))):
        with pytest.raises(ProgramError, match="of an update of rows is float32"):
            apply_rows(kernels, program, tables(program, operands, "float32", shape, rows), np.array([0]))
    inputs = tables(program, operands, "float32", shape, np.ones((1, 2), "float32"))
    inputs[0] = np.ones((SIZE, 4), "float32")[:, ::2]
    with pytest.raises(ProgramError, match="contiguous"):
        apply_rows(kernels, program, inputs, np.array([0]))


REFUSED = {
    "sum is not elementwise": lambda w, acc, g: w.assign_sub(g / np.sum(g)),
    "one shape of tables": lambda w, acc, g: w.assign_sub(np.ones((2,), "float32") * g),
    "no results": lambda w, acc, g: w * g,
    "no array but": lambda w, acc, g: w.assign_sub(np.ones((SIZE, 2), "float32") * g),
}


@pytest.mark.parametrize("said", REFUSED)
def test_programs_that_are_not_of_rows_are_refused(kernels, said):
    """With what they do in the message."""
    spec = TensorSpec("float32", (SIZE, 2))
    program, operands = traced(REFUSED[said], [spec, spec], [spec])
    rows = np.ones((1, 2), "float32")
    with pytest.raises(ProgramError, match=said):
        apply_rows(kernels, program, tables(program, operands, "float32", (SIZE, 2), rows), np.array([0]))
