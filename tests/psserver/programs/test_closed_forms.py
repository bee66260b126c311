"""Closed forms: many updates that rows have missed are one, and each row is where these would have led it."""

from functools import cache

import numpy as np
import pytest

from psserver.programs.kernels.closed_forms import closed_form
from psserver.programs.kernels.replay import MANY, Replay
from psserver.programs.kernels.rows import RowUpdate
from pswire.model.tensor import TensorSpec
from tests.kit.programs import kept_kernels, same_bits, traced

ROWS, WIDTH, UPDATES = 60, 16, 500
FIRST = np.array([0, 1, 330, 480, 490, UPDATES - MANY, UPDATES - 1, UPDATES, 0, 250] * 6)
SCHEDULE = 0.01 * (1 + 0.5 * np.sin(np.arange(UPDATES) / 50))


def momentum(w, m, g, decay, rate):
    """SGD with momentum, as Keras has it."""
    m.assign(decay * m - rate * g)
    w.assign_add(m)


def decayed(w, m, g, decay, rate, smaller):
    """Nesterov's momentum of variables that decay."""
    w.assign(w - w * smaller)
    m.assign(decay * m - rate * g)
    w.assign_add(decay * m - rate * g)


def adam(w, m, s, g, one, two, rate, epsilon):
    """Adam, as Keras has it."""
    m.assign_add(one * (g - m))
    s.assign_add(two * (g * g - s))
    w.assign_sub(rate * m / (np.sqrt(s) + epsilon))


def adam_of_torch(w, m, s, g, one, two, rate, epsilon, smaller, correction):
    """AdamW, as torch has it, whose root is corrected, and not the rate."""
    w.assign(w * smaller)
    m.assign(m + (g - m) * one)
    s.assign(s * two + g * g * (1 - two))
    w.assign_sub(rate * (m / (np.sqrt(s) / correction + epsilon)))


def nadam_of_torch(w, m, s, g, one, two, of_gradient, of_mean, correction, epsilon):
    """NAdam, as torch has it, which changes weights by a gradient and by a mean of gradients."""
    m.assign_add(one * (g - m))
    s.assign(two * s + (1 - two) * g * g)
    size = np.sqrt(s / correction) + epsilon
    w.assign_sub(of_gradient * (g / size))
    w.assign_sub(of_mean * (m / size))


def rms(w, m, s, g, rho, rate, epsilon, decay):
    """RMSprop with momentum, as Keras has it."""
    s.assign(rho * s + (1 - rho) * np.square(g))
    m.assign(decay * m + rate * g / np.sqrt(s + epsilon))
    w.assign_sub(m)


CORRECTION = np.sqrt(1 - 0.999 ** (np.arange(UPDATES) + 500.0))
CASES = {
    "momentum": (momentum, 2, (0.9, SCHEDULE)),
    "long momentum": (momentum, 2, (0.999, SCHEDULE)),
    "decayed": (decayed, 2, (0.9, SCHEDULE, 1e-3)),
    "adam": (adam, 3, (0.1, 0.001, SCHEDULE, 1e-7)),
    "adam without epsilon": (adam, 3, (0.1, 0.001, SCHEDULE, 0.0)),
    "adam of another sight": (adam, 3, (0.05, 0.001, SCHEDULE, 1e-3)),
    "adam of torch": (adam_of_torch, 3, (0.1, 0.999, SCHEDULE, 1e-8, 0.999, CORRECTION)),
    "nadam of torch": (nadam_of_torch, 3, (0.1, 0.999, SCHEDULE, SCHEDULE, CORRECTION**2, 1e-8)),
    "rms": (rms, 3, (0.9, SCHEDULE, 1e-7, 0.9)),
}

MARK = 1_000.5
INTERPRETED = kept_kernels(1, patience=10**9)


@cache
def case(name, dtype):
    """A program, the numbers of its updates as a server keeps them, and the number of its tables."""
    fn, tables, numbers = CASES[name]
    program, given = program_of(fn, tables, len(numbers), dtype)
    each = [np.broadcast_to(np.asarray(number, dtype), UPDATES) for number in numbers]
    each = [each[int(o - MARK)] if o >= MARK else np.full(UPDATES, o) for o in given]
    update, kept = RowUpdate(INTERPRETED, program, np.empty(0, np.int64)), []
    arrays = [*tables_of(tables, 1.0, dtype), np.empty((0, WIDTH), dtype)]
    for k in range(UPDATES):
        update.run([*arrays, *(number[k : k + 1].reshape(()) for number in each)])
        kept.append(update.scalars)
    return program, [np.array(column) for column in zip(*kept, strict=True)], tables


def program_of(fn, tables, numbers, dtype):
    """A function of tables, a gradient and numbers, as a program, and the operands that it has met."""
    spec, own = TensorSpec(dtype, (ROWS, WIDTH)), np.dtype(dtype).type

    def given(*args):
        return fn(*args, *(own(MARK + n) for n in range(numbers)))

    return traced(given, [spec] * tables, [spec])


def tables_of(count, size, dtype):
    """Tables as gradients of a size leave them: their moments are of that size, and its square."""
    rng = np.random.default_rng(7)
    first, second = 0.05 * rng.normal(size=(ROWS, WIDTH)), 0.3 * size * rng.normal(size=(ROWS, WIDTH))
    third = 0.1 * size**2 * rng.uniform(0.5, 2, size=(ROWS, WIDTH))
    return [each.astype(dtype) for each in (first, second, third)[:count]]


@pytest.fixture(scope="module")
def kernels():
    made = kept_kernels(2, patience=1)
    yield made
    made.close()


def run(replay, tables, scalars, first=FIRST):
    """The tables with all updates, once by whatever runs now."""
    found = [table.copy() for table in tables]
    replay.run(found, scalars, np.arange(ROWS), first, UPDATES)
    return found


def compiled(kernels, replay, tables, scalars):
    for _ in range(3):
        run(replay, tables, scalars)
        kernels.compiler.wait()


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0, 1e3])
@pytest.mark.parametrize("name", CASES)
def test_many_at_once_lead_where_one_by_one_does(name, size):
    """Whatever the size of gradients beside epsilon, and however many updates a row has missed."""
    program, scalars, count = case(name, "float64")
    tables = tables_of(count, size, "float64")
    wanted, found = (run(Replay(INTERPRETED, program, closed), tables, scalars) for closed in (False, True))
    assert not same_bits(found[0], wanted[0]), "it was made up one by one"
    for before, one, other in zip(tables, wanted, found, strict=True):
        scale = np.maximum(np.abs(before), np.abs(one - before))
        assert np.all(np.abs(one - other) <= 1e-7 * scale)


@pytest.mark.parametrize(
    "name",
    ["adam of torch", *(pytest.param(name, marks=pytest.mark.ci) for name in ("momentum", "decayed", "adam", "rms"))],
)
def test_a_kernel_gives_the_interpreters_bits(kernels, name):
    """And so does it which rows are made up together, or beforehand in a copy."""
    program, scalars, count = case(name, "float32")
    tables = tables_of(count, 1.0, "float32")
    wanted = run(Replay(INTERPRETED, program, closed=True), tables, scalars)
    replay = Replay(kernels, program, closed=True)
    compiled(kernels, replay, tables, scalars)
    assert all(map(same_bits, run(replay, tables, scalars), wanted))
    for ids in (np.arange(3, 9), np.array([4])):
        seen = replay.rows(tables, scalars, ids, FIRST[ids], UPDATES)
        assert all(same_bits(one, other[ids]) for one, other in zip(seen, wanted, strict=True))


def changed(numbers, place, at, value):
    """Numbers of which one is another from an update on."""
    found = [each.copy() for each in numbers]
    found[place][at:] = value
    return found


@pytest.mark.parametrize(
    ("place", "at", "value"),
    [(3, UPDATES - 1, 1e-6), (1, 0, 0.2), (2, UPDATES - 1, np.nan)],
    ids=["epsilon changes", "the root falls too fast", "a rate is NaN"],
)
def test_what_has_no_such_sum_is_made_up_one_by_one(place, at, value):
    program, scalars, count = case("adam", "float32")
    scalars, tables = changed(scalars, place, at, value), tables_of(count, 1.0, "float32")
    found, wanted = (run(Replay(INTERPRETED, program, closed), tables, scalars) for closed in (True, False))
    assert all(map(same_bits, found, wanted))


def test_a_row_at_rest_stays():
    """A row whose moments are zero is what it was, bit for bit."""
    program, scalars, count = case("adam", "float32")
    tables = tables_of(count, 1.0, "float32")
    for moment in tables[1:]:
        moment[::2] = 0
    found = run(Replay(INTERPRETED, program, closed=True), tables, scalars)
    assert all(same_bits(one[::2], other[::2]) for one, other in zip(found, tables, strict=True))


def largest(w, m, s, g):
    """Divides by the largest second moment so far."""
    m.assign(0.9 * m + g)
    s.assign(np.maximum(s, 0.5 * s + g * g))
    w.assign_sub(m / (np.sqrt(s) + 1e-3))


def mixed(w, m, s, g):
    m.assign(0.9 * m + g)
    s.assign(0.9 * s)
    w.assign_sub(m * s)


def turned(w, m, s, g):
    m.assign(0.9 * s + g)
    s.assign(0.9 * m)
    w.assign_sub(m)


def one_for_each_row(w, m, s, g):
    """Multiplies moments by a number for each row."""
    m.assign(0.9 * m + g)
    s.assign(0.9 * s + np.sum(g * g, axis=1, keepdims=True))
    w.assign_sub(m / (np.sqrt(s) + 1e-3))


def form_of(kernels, fn, dtype, tables, width=WIDTH):
    """The closed form of a function of tables, of which the last one has another width, and a gradient."""
    specs = [TensorSpec(dtype, (ROWS, WIDTH))] * (tables - 1) + [TensorSpec(dtype, (ROWS, width))]
    program = kernels.row_steps(traced(fn, specs, specs[:1])[0]).last.program
    return closed_form(program, [tables], range(tables))


@pytest.mark.parametrize("fn", [largest, mixed, turned])
def test_other_programs_have_none(kernels, fn):
    assert form_of(kernels, fn, "float32", 3) is None


def test_nor_have_tables_of_half_precision_or_of_two_widths(kernels):
    """Half precision is rounded in each update, and a number for each row is another kind of table."""

    def heavy(w, m, g):
        m.assign(0.5 * m + g)
        w.assign_sub(m)

    assert form_of(kernels, heavy, "float32", 2)
    assert form_of(kernels, heavy, "bfloat16", 2) is None
    assert form_of(kernels, one_for_each_row, "float32", 3, width=1) is None
