"""Updates of rows: what is said to keep a row without a gradient keeps it, and what cannot run on rows is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psserver.programs.kernels.rows import resized
from pswire.errors import ProgramError
from pswire.model.row_updates import keeps_rows, measures, refusal, table_shape
from pswire.model.tensor import DTYPES, TensorSpec
from tests.kit import references
from tests.kit.cases import search
from tests.kit.programs import expected, plain, row_programs, traced

SHAPE = (4, 3)
O = ps.optimizers  # noqa: E741
CHANGES = "changes rows"

OPTIMIZERS: dict[str, str | None] = {
    **dict.fromkeys(("SGD", "Adagrad", "Adagrad by rows")),
    **dict.fromkeys(("SGD, momentum", "SGD, Nesterov", "Adadelta", "RMSprop", "RMSprop, plain", "Ftrl"), CHANGES),
    **dict.fromkeys(("Adam", "Adam, AMSGrad", "LazyAdam", "AdamW", "Adamax", "Nadam", "Lion"), CHANGES),
    "DelayedNesterov": CHANGES,
    "Lamb": "neither elementwise",
}
"""Optimizers, and why the update of each is not run on rows; None where it is."""
MAKE = references.OPTIMIZERS | references.MORE | {"RMSprop, plain": lambda: O.RMSprop(0.5)}


def table_program(optimizer):
    """The program of an optimizer's own update of a table."""
    v = ps.Variable(np.zeros(SHAPE, "float32"))
    slots = [optimizer.initial_slot(slot, v) for slot in optimizer.slots]
    specs = [TensorSpec(str(array.dtype), array.shape) for array in (v, *slots)]
    values = [TensorSpec("float32", SHAPE), TensorSpec("int64", ())]

    def update(v, *rest):
        *slots, gradient, iterations = rest
        if optimizer._running:
            slots[-1] = slots[-1].value()
        optimizer.update(v, gradient, iterations, *slots)

    return traced(update, specs, values)[0]


def gradient_of(program):
    """The number of the input that is a whole gradient."""
    return next(n for n, item in enumerate(program.inputs) if item.kind == "value" and item.spec.shape)


def changed(program, inputs):
    """Which assigned elements are others than before, and which of all elements were computed of finite numbers."""
    with np.errstate(all="ignore"):
        _, values = plain(replace(program, outputs=tuple(range(len(program.specs)))), inputs)
        assigned, _ = expected(program, inputs)
    shape = table_shape(program)
    finite = np.ones(shape, bool)
    for value in values:
        wide = np.asarray(value).astype("complex128")
        finite &= np.broadcast_to(np.isfinite(wide), shape)
    moved = [np.broadcast_to(np.asarray(new) != inputs[target], shape) for target, new in assigned.items()]
    return np.any(moved, axis=0) if moved else np.zeros(shape, bool), finite


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_each_optimizer_does_to_a_row_without_a_gradient(name):
    """It is said as it is: its rows stay, or it is no update of rows."""
    why = OPTIMIZERS[name]
    program = table_program(MAKE[name]())
    given = [gradient_of(program)]
    refused = refusal(program, given)
    if refused is not None:
        assert why is not None
        assert why in refused
        return
    assert keeps_rows(program, given) == (why is None)


def test_no_optimizer_is_excluded():
    """Who adds one says here what it does."""
    known = {type(MAKE[name]()).__name__ for name in OPTIMIZERS}
    classes = [each for each in vars(O).values() if isinstance(each, type)]
    made = {each.__name__ for each in classes if issubclass(each, O.Optimizer)}
    assert made - {"Optimizer"} == known


POOL = [0.0, -0.0, 1.0, -1.5, 3.25, 0.1, -7.0, 2.0, 100.0]


@search(2.5)
@given(program=row_programs([SHAPE]), seed=st.integers(0, 1000))
def test_a_program_that_is_said_to_keep_rows_keeps_them(program, seed):
    """Whatever it is made of: no number changes that was computed of finite ones."""
    assert refusal(program, [2]) is None
    if not keeps_rows(program, [2]):
        return
    rng = np.random.default_rng(seed)
    inputs = []
    for number, item in enumerate(program.inputs):
        with np.errstate(all="ignore"):
            array = np.array(rng.choice(POOL, item.spec.shape)).astype(DTYPES[item.spec.dtype])
        inputs.append(np.zeros_like(array) if number == 2 else array)
    try:
        moved, finite = changed(program, inputs)
    except (ProgramError, ValueError):
        return  # a power of integers that is refused, on rows as on the whole
    assert not (moved & finite).any()


F, THREE, NUMBER = (TensorSpec("float32", shape) for shape in (SHAPE, (3,), ()))


def nothing(*assigned):
    """An update has no result."""


KEPT = {
    "w + 2 g": (lambda w, u, g: w.assign_add(2.0 * g), True),
    "w - 0 g": (lambda w, u, g: w.assign_sub(g * 0.0), True),
    "w + g g u": (lambda w, u, g: w.assign_add(g * g * u), True),
    "w - g / (u + 1)": (lambda w, u, g: w.assign_sub(g / (u + 1)), True),
    "|g| into w": (lambda w, u, g: w.assign(np.abs(g)), False),
    "max(w, w + g)": (lambda w, u, g: w.assign(np.maximum(w, w + g)), True),
    "where(u, w, w - g)": (lambda w, u, g: w.assign(np.where(u > 0, w, w - g)), True),
    "tanh, sin, sign, rounds": (lambda w, u, g: w.assign_add(np.tanh(np.sin(np.sign(np.round(g))))), True),
    "by another dtype": (lambda w, u, g: w.assign((w.astype("float64") + g).astype("float32")), False),
    "u into w": (lambda w, u, g: w.assign(u + g), False),
    "exp(g)": (lambda w, u, g: w.assign_add(np.exp(g)), False),
    "g - w": (lambda w, u, g: w.assign(g - w), False),
    "g / g": (lambda w, u, g: w.assign_add(g / g), False),
    "w - w": (lambda w, u, g: w.assign(w - w + g), False),
    "a second table": (lambda w, u, g: nothing(w.assign_add(g), u.assign(u * 0.9)), False),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_known_to_keep_rows(name):
    """Zero stays zero through what keeps it, and adds nothing."""
    fn, kept = KEPT[name]
    program, _ = traced(fn, [F, F], [F])
    given = [gradient_of(program)]
    assert refusal(program, given) is None
    assert keeps_rows(program, given) == kept


REFUSED = {
    "a sum": (lambda w, g: w.assign_add(g * np.sum(g)), [F], [F], "sum works neither elementwise"),
    "a number": (lambda w, g: w.assign_add(np.float32(1)), [NUMBER], [F], "only tables of one shape"),
    "two shapes": (lambda w, u, g: w.assign_add(g * u), [F, THREE], [F], "only tables of one shape"),
    "an output": (lambda w, g: g + w.assign_add(g).value(), [F], [F], "cannot return results"),
    "an array": (lambda w, g: w.assign_add(g * np.ones(SHAPE, "float32")), [F], [F], "only tables and rows"),
    "a whole beside rows": (lambda w, g, h: w.assign_add(g * h), [F], [F, F], "cannot mix rows with whole arrays"),
    "scalar": (lambda w, s, g: nothing(w.assign_add(g), s.assign_add(np.float32(1))), [F, NUMBER], [F], "not scalars"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_on_rows_is_refused_in_words(name):
    """Each with its reason."""
    fn, variables, values, why = REFUSED[name]
    program, _ = traced(fn, variables, values)
    given = [n for n, item in enumerate(program.inputs) if item.kind == "value"][:1]
    assert why in (refusal(program, given) or "")


# ---- Measurements ----


MEASURED: dict[str, tuple[Any, bool]] = {
    "norm": (lambda g, n: np.sum(np.square(g)).astype("float64"), True),
    "norm, scaled": (lambda g, n: np.sum(np.square(g / n)), True),
    "finite": (lambda g, n: np.all(np.isfinite(g)), True),
    "both": (lambda g, n: np.logical_and(np.all(np.isfinite(g)), np.sum(np.abs(g)) < n), True),
    "not zero": (lambda g, n: np.any(g * n), True),
    "shifted": (lambda g, n: np.sum(g + n), False),
    "mean": (lambda g, n: np.mean(g), False),
    "largest": (lambda g, n: np.max(g), False),
    "small": (lambda g, n: np.all(np.abs(g) < n), False),
    "centred": (lambda g, n: np.sum(np.square(g - np.sum(g))), False),
    "by column": (lambda g, n: np.sum(g, axis=0), False),
    "the rows": (lambda g, n: g * n, False),
    "of a number": (lambda g, n: np.square(n), False),
}
"""What is computed of a gradient and a number, and whether its rows are enough."""


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_measured_of_rows_is_what_is_measured_of_the_whole(name):
    """Whatever other rows are there, which are zero; else it is not said to be."""
    fn, enough = MEASURED[name]
    program, operands = traced(fn, [], [F, NUMBER])
    given = [n for n, item in enumerate(program.inputs) if item.kind == "value" and item.spec.shape]
    assert measures(program, given) == enough
    if not enough:
        return
    few = resized(program, SHAPE, (2, SHAPE[1]))
    for n, row in itertools.product((0.5, 40.0), ([1, -2, 3], [0, 0, 0], [1, np.inf, 2], [np.nan, 0, 1])):
        rows, rest = np.array([[0.5, 1, 2], row], "float32"), iter(operands)
        whole = np.zeros(SHAPE, "float32")
        whole[[0, 3]] = rows
        scalars = [next(rest) if item.kind == "operand" else np.float32(n) for item in program.inputs]
        (one,), (other,) = (
            plain(each, [array if place in given else scalar for place, scalar in enumerate(scalars)])[1]
            for each, array in ((few, rows), (program, whole))
        )
        np.testing.assert_array_equal(one, other)
