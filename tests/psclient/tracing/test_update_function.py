"""Update functions that are traced once: other numbers are other operands, and nothing else is taken for the same."""

from __future__ import annotations

import enum
import functools
import math
import numbers
import operator
import sys
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.tracing import update_function
from psclient._src.tracing.symbolic_numbers import Scalar, Tape
from psclient._src.tracing.update_function import UpdateFunction
from psclient.optimizers import schedules
from pswire.errors import ProgramError
from tests.kit.cases import search
from tests.kit.references import OPTIMIZERS
from tests.kit.strategies import kinds, merged, opened, refused, variable

pytestmark = kinds("embedded-1")


@pytest.fixture
def traced(calls_of):
    """What was traced, one item for each time; a first trace may run its function twice."""
    return calls_of("_trace", UpdateFunction)


def update(strategy, v, fn, *args, **kwargs):
    returned = strategy.extended.update(v, fn, args, kwargs)
    return v.numpy().tolist() if returned is None else np.asarray(returned).tolist()


# ---- One trace ----


def test_other_numbers_make_no_other_trace(strategy, traced):
    """Numbers and what is computed from them are operands; arrays and reduced values are inputs, but for an array that
    the function makes itself. Also of another variable of that shape, and where a function asks for a number's type."""

    @ps.update_function
    def fn(v, x, rate, decay=0.5):
        v.assign((1 - decay) * v + (2 * rate**2 + abs(-rate) // 2) * x)

    for v in (variable(strategy), variable(strategy)):
        value = 0.0
        for rate, decay in ((1.0, 0.5), (3.0, 0.25), (0.5, 0.5)):
            value = (1 - decay) * value + (2 * rate**2 + rate // 2) * 2.0
            assert update(strategy, v, fn, np.full(3, 2.0, "float32"), rate, decay=decay) == [value] * 3
    assert len(traced) == 1
    fn = ps.update_function(lambda v, xs, named: v.assign(xs["a"] * np.array([1.0, 2.0, 3.0]) + named))
    for k in (1.0, 2.0):
        with strategy.scope():
            total = strategy.extended.reduce_to("sum", np.full(3, k, "float32"), v)
        assert update(strategy, v, fn, {"a": total}, named=np.full(3, k, "float32")) == [2 * k, 3 * k, 4 * k]
    assert len(traced) == 2

    @ps.update_function
    def typed(v, k):
        match k:
            case int():
                return v * 0 + k * 10
            case float() if isinstance(k, float):
                return v * 0 + k

    assert [update(strategy, v, typed, k)[0] for k in (1.0, 2.0, 3, 4)] == [1.0, 2.0, 30.0, 40.0]
    assert len(traced) == 4


class Way(enum.Enum):
    UP, DOWN = range(2)


@ps.update_function
def seen_in_many_ways(v, a, b=0):
    if isinstance(a, Way):
        return v.assign_add(1.0 if a is Way.UP else -1.0).value()
    if callable(a):
        return a(v)
    if isinstance(a, list | tuple):
        return v * len(a) + sum(a)
    if isinstance(a, dict):
        return v + sum(a.values()) + len("".join(a))
    if isinstance(a, str):
        return v + len(a)
    return v + a + (1000 if a is None or a is True else 0) if a is not None else v.value()


DIFFERENT = [
    [1.0, 1, True, "a", "bb", None, Way.UP, Way.DOWN],
    [[1.0], [1.0, 2.0], (1.0,), {"a": 1.0}, {"bbb": 1.0}],
    [np.ones(3, "float32"), np.ones(3), np.ones(()), np.float32(1), np.ones((1, 3))],
    [abs, np.negative, lambda v: v * 3, lambda v: v * 4],
]


@pytest.mark.parametrize("different", DIFFERENT)
def test_what_differs_is_not_taken_for_the_same(strategy, different):
    """Types, structures, dtypes, shapes, words, functions: each gives what a fresh trace of it gives."""
    for args in different * 2:
        results = []
        for fn in (seen_in_many_ways, UpdateFunction(seen_in_many_ways.__wrapped__)):
            v = variable(strategy, [1.0, 2.0, 3.0])
            results.append(update(strategy, v, fn, args))
        assert results[0] == results[1]


def test_a_variable_that_is_given_twice_is_another_call(strategy):
    """Than two of that shape; a function is the same elsewhere, without servers."""

    @ps.update_function
    def fn(v, a, b):
        """Moves on."""
        a.assign(b + 1.0)
        b.assign(a * 2.0)

    v, a, b = (variable(strategy, np.zeros(1)) for _ in range(3))
    for args in ((a, b), (v, v), (b, a)):
        strategy.extended.update(v, fn, args)
    assert [x.numpy().tolist() for x in (v, a, b)] == [[2.0], [4.0], [2.0]]
    with opened("mirrored-2") as mirrored:
        v, a, b = (variable(mirrored, np.zeros(1)) for _ in range(3))
        mirrored.extended.update(v, fn, (a, b))
        assert [x.numpy().tolist() for x in (a, b)] == [[1.0], [2.0]]
    assert (fn.__name__, fn.__doc__) == ("fn", "Moves on.")


# ---- Looking at numbers ----


def test_what_a_function_sees_of_a_number_is_seen_again(strategy, traced):
    """`if`, `math` and `int` are allowed: another trace is made where they would see something else, and kept."""

    @ps.update_function
    def fn(v, k, n):
        factor = math.sqrt(n)
        if k > 0 and n:
            v.assign_add(k * factor)
        else:
            v.assign(range(10)[int(n)] - k / n if n else -1.0)

    v, value = variable(strategy, np.zeros(1)), 0.0
    for k, n in ((1.0, 4.0), (2.0, 4.0), (1.0, 9.0), (-1.0, 4.0), (-2.0, 4.0), (3.0, 4.0), (-1.0, 0.0)):
        value = value + k * math.sqrt(n) if k > 0 and n else n - k / n if n else -1.0
        assert update(strategy, v, fn, k, n) == [value]
    assert len(traced) == 4


def test_numbers_that_no_trace_can_hold_for_are_computed(strategy):
    """NaN is equal to nothing, also when the function has looked at it; -0.0 is not 0.0."""

    @ps.update_function
    def looks(v, k):
        return v + float(k)

    @ps.update_function
    def divides(v, k):
        return 1.0 / (v + k)

    v = variable(strategy, np.zeros(1))
    for _ in range(3):
        assert math.isnan(update(strategy, v, looks, math.nan)[0])
    assert len(looks._traces) == 1
    with np.errstate(all="ignore"):
        assert [update(strategy, v.assign(-0.0), divides, k) for k in (0.0, -0.0)] == [[math.inf], [-math.inf]]


def test_a_number_that_is_returned_is_that_of_the_call(strategy):
    """Operands may stand before variables; a function that asks for a name is traced for each."""

    @ps.update_function
    def fn(v, k):
        v.assign_add(k)
        return k * 2

    v = variable(strategy, np.zeros(1))
    with strategy.scope():
        assert [float(strategy.extended.update(v, fn, (k,))) for k in (1.0, 10.0)] == [2.0, 20.0]
    add = ps.update_function(lambda v, x, w: v.assign_add(x + w))
    v, w = variable(strategy, np.zeros(3)), None
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        w = ps.Variable(np.ones(3))
    assert update(strategy, v, add, np.full(3, 2.0), w) == [3.0] * 3

    @ps.update_function
    def fn(v, k):
        v.assign_add(k if "weight" in v.name else 0 * k)

    with strategy.scope():
        named = [ps.Variable(np.zeros(1), name=name) for name in ("weight", "bias")]
    assert [update(strategy, v, fn, 2.0) for v in named * 2] == [[2.0], [0.0], [4.0], [0.0]]


def test_errors_come_back_each_time(strategy):
    """Of the function, of numbers beyond a dtype, of what is by a closure and not an argument: with the user's line."""

    @ps.update_function
    def fn(v, k):
        v.assign_add(1 / k)

    v, small = variable(strategy, np.zeros(1)), variable(strategy, np.zeros(1, "int8"))
    assert update(strategy, v, fn, 2.0) == [0.5]
    refused(ZeroDivisionError, "", lambda: update(strategy, v, fn, 0.0))
    add = ps.update_function(lambda v, k: v.assign_add(k))
    assert update(strategy, small, add, 3) == [3]
    for _ in range(2):
        refused(ProgramError, f"{__file__}:.*300", lambda: update(strategy, small, add, 300))
    refused(ProgramError, f"{__file__}:.*an argument is a set", lambda: update(strategy, v, fn, {1, 2}))
    v, other = variable(strategy), variable(strategy)
    with pytest.raises(ProgramError, match=f"uses.*{other.name}.*which is not among its arguments; pass it"):
        strategy.extended.update(v, ps.update_function(lambda v: v.assign(other * 2.0)))
    with strategy.scope():
        total = strategy.extended.reduce_to("sum", np.ones(3, "float32"), v)
        with pytest.raises(ProgramError, match="not among its arguments"):
            strategy.extended.update(v, ps.update_function(lambda v: v.assign(v + total)))


def test_a_call_is_made_before_its_trace_is_anothers(strategy):
    """A thread that finds the trace as soon as it is there, with a number of its own, changes nothing of that call."""
    fn, first, second = ps.update_function(lambda v, k: v.assign_add(k)), variable(strategy), variable(strategy)

    class Watched(dict):
        def __setitem__(self, key, found):
            super().__setitem__(key, found)
            strategy.extended.update(second, fn, (100.0,))

    fn._traces = Watched()
    merged(strategy, lambda strategy: strategy.extended.update(first, fn, (2.0,)))
    assert [v.numpy().tolist() for v in (first, second)] == [[2.0] * 3, [100.0] * 3]


# ---- What a function reads by other ways ----

FACTOR = 2.0


def doubled(x):
    return x * FACTOR


def test_what_a_function_finds_by_name_may_become_something_else(strategy, traced, monkeypatch):
    """A global, one of a helper, the helper, a variable around it: another object is seen, the same one traced once."""
    around, v = 1.0, variable(strategy, [1.0])

    @ps.update_function
    def fn(v):
        (found,) = [doubled(x) + around for x in (v,)]
        return found

    def both():
        return [update(strategy, v, fn) for _ in range(2)]

    module = sys.modules[__name__]
    assert both() == [[3.0], [3.0]]
    around = 10.0
    assert both() == [[12.0], [12.0]]
    monkeypatch.setattr(module, "FACTOR", 3.0)
    assert both() == [[13.0], [13.0]]
    monkeypatch.setattr(module, "doubled", lambda x: x - FACTOR)
    assert both() == [[8.0], [8.0]]
    monkeypatch.setattr(module, "FACTOR", 4.0)
    assert both() == [[7.0], [7.0]]
    assert len(traced) == 5
    monkeypatch.undo()
    assert both() == [[12.0], [12.0]]
    assert len(traced) == 5


class Ruled(ps.optimizers.Optimizer):
    """Its numbers are the class's, one of them a cached property; its rule is a function that it has."""

    length = 1.0

    def __init__(self):
        super().__init__(1.0)
        self.rules = (doubled,)

    @property
    def whole(self):
        return self.length

    @functools.cached_property
    def offset(self):
        return OFFSET

    def update(self, v, gradient, iterations):
        v.assign_sub(self.rules[0](gradient) * self.whole * self.offset)


class Bare(Ruled):
    """Has nothing of its own yet."""


OFFSET = 1.0


def test_an_optimizer_is_looked_into(strategy, traced, monkeypatch):
    """Numbers of its class are operands as its own are; what its functions, properties and methods are, and read, makes
    a trace: also where it hides that of a base, or was only asked for, or is gone again."""
    v, optimizer, module = variable(strategy, [0.0]), Bare(), sys.modules[__name__]

    def moved():
        """By how much each of two steps moves the variable."""
        before = float(v.numpy()[0])
        for _ in range(2):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(1), v)]))
        return (before - float(v.numpy()[0])) / 2

    assert moved() == 2.0
    count = len(traced)
    monkeypatch.setattr(Ruled, "length", 3.0)
    assert moved() == 6.0
    assert len(traced) == count
    monkeypatch.setattr(module, "FACTOR", 1.0)
    assert moved() == 3.0
    monkeypatch.setattr(module, "OFFSET", 5.0)
    assert moved() == 15.0
    with monkeypatch.context() as patch:
        patch.setattr(Bare, "length", 2.0, raising=False)
        assert moved() == 10.0
        patch.setattr(Bare, "whole", property(lambda self: getattr(self, "more", 1.0)), raising=False)
        assert moved() == 5.0
        patch.setattr(Ruled, "more", 4.0, raising=False)
        assert moved() == 20.0
        patch.setattr(Bare, "update", lambda self, v, gradient, iterations: v.assign_sub(gradient), raising=False)
        assert moved() == 1.0
    assert moved() == 15.0
    monkeypatch.setattr(Ruled, "whole", property(lambda self: self.length * 2))
    assert moved() == 30.0
    monkeypatch.setattr(Ruled, "update", lambda self, v, gradient, iterations: v.assign_sub(7.0 * gradient))
    assert moved() == 7.0


def scaled(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args) * FACTOR

    return wrapper


def shifted(x):
    return x + OFFSET


def test_each_link_of_a_wrapped_function_is_looked_into(strategy):
    """What a decorator reads counts, and what the function reads that it wraps; also of a function that is given."""
    v, module = variable(strategy, [1.0]), sys.modules[__name__]
    wrapped = partial(scaled(shifted))
    for outer, times in ((scaled(shifted), 1), (scaled(scaled(shifted)), 2), (wrapped, 1)):
        by_name = ps.update_function(lambda v: outer(v.value()))  # noqa: B023
        given = ps.update_function(lambda v, g: g(v.value()))
        for factor, offset in ((2.0, 1.0), (3.0, 1.0), (3.0, 2.0)):
            with mock.patch.multiple(module, FACTOR=factor, OFFSET=offset):
                assert update(strategy, v, by_name) == [(1.0 + offset) * factor**times]
                if outer is not wrapped:  # such an argument is refused
                    assert update(strategy, v, given, outer) == [(1.0 + offset) * factor**times]


def test_what_a_function_does_not_come_to_is_no_hindrance(strategy, traced, monkeypatch):
    """A global named as an attribute, an object that has everything, names without a value until they are there."""
    monkeypatch.setattr(sys.modules[__name__], "shape", 1.0, raising=False)
    v, fn = variable(strategy, [1.0]), ps.update_function(lambda v: v * float(v.shape[0]))
    for value in (2.0, 3.0):
        assert update(strategy, v, fn) == [1.0]
        monkeypatch.setattr(sys.modules[__name__], "shape", value)
    assert len(traced) == 1
    everything, v = mock.call, variable(strategy, [1.0])
    assert update(strategy, v, ps.update_function(lambda v: v + (0 if everything else 1))) == [1.0]
    v = variable(strategy, [1.0])

    @ps.update_function
    def fn(v, later):
        return v + (number if later else 0.0)  # noqa: F821

    assert update(strategy, v, fn, False) == [1.0]
    number = 2.0
    assert update(strategy, v, fn, True) == [3.0]
    number = 3.0
    assert update(strategy, v, fn, True) == [4.0]
    del number


def test_memory_is_bounded(strategy, monkeypatch):
    monkeypatch.setattr(update_function, "MAX_TRACES", 3)
    fn = ps.update_function(lambda v, n, word: v * int(n))
    v = variable(strategy, [1.0])
    for n in range(20):
        assert update(strategy, v, fn, n, "same") == [n]
    for n in range(10):
        assert update(strategy, v, fn, n, f"word {n}") == [n]
    assert len(fn._traces) <= 3
    assert max(map(len, fn._traces.values())) <= update_function.MAX_TRACES_OF_ONE_KIND


# ---- Scalars ----


def bits(op, x, y):
    """Of whole numbers alone."""
    return op(x, y) if isinstance(x, int) and isinstance(y, int) else x


NUMBER = st.one_of(st.integers(-5, 5), st.floats(-4, 4, width=16))
ARITHMETIC = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")},
    **{name: partial(bits, getattr(operator, name)) for name in ("and_", "or_", "xor")},
    "lt": lambda x, y: int(x < y),
    "eq": lambda x, y: int(x == y),
    "if": lambda x, y: x if y else -y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: abs(x),
    "round": lambda x, y: round(x),
    "trunc": lambda x, y: math.trunc(x),
    "divmod": lambda x, y: divmod(x, y)[0] + divmod(7, y)[1],
    "int": lambda x, y: int(x),
}
STEP = st.tuples(
    st.sampled_from(sorted(ARITHMETIC)), st.integers(0, 20), st.integers(0, 20) | NUMBER.map(lambda n: (n,))
)


def follow(steps, numbers):
    values = list(numbers)

    def at(place):
        return place[0] if isinstance(place, tuple) else values[place % len(values)]

    for op, a, b in steps:
        values.append(ARITHMETIC[op](at(a), at(b)))
    return values[-1]


@search(3)
@given(steps=st.lists(STEP, max_size=8), first=st.lists(NUMBER, min_size=3, max_size=3), data=st.data())
def test_a_tape_gives_what_plain_numbers_give_or_does_not_hold(steps, first, data):
    """The values from other numbers of the same types are exactly those of the plain computation."""
    tape = Tape(first)
    try:
        found = follow(steps, [tape.scalar(place) for place in range(3)])
    except (ZeroDivisionError, OverflowError):
        return
    plain = follow(steps, first)
    known = found.value if isinstance(found, Scalar) else found
    assert (known, type(known)) == (plain, type(plain))
    second = [data.draw(st.integers(-5, 5) if type(n) is int else st.floats(-4, 4, width=16)) for n in first]
    values = tape.replay(second)
    if values is not None:
        expected = follow(steps, second)
        known = values[found.place] if isinstance(found, Scalar) else found
        assert (known, type(known)) == (expected, type(expected))
    assert tape.replay(first) is not None


def test_scalars_are_numbers_to_numpy():
    """Weak beside arrays, of their own dtype alone; NumPy has to look."""
    scalar = Tape([0.1]).scalar(0)
    assert (np.ones(2, "float32") * scalar).dtype == np.float32
    assert (scalar * np.float32(2)).dtype == np.float32
    assert np.sqrt(scalar) == np.sqrt(0.1)
    assert np.asarray(scalar) == 0.1
    assert f"{scalar:.3f} {scalar!r}" == "0.100 Scalar(0.1)"
    assert {scalar: 1}[0.1] == 1
    assert complex(scalar) == 0.1


@pytest.mark.parametrize("number", [0.5, 3, 2j])
def test_a_scalar_is_a_number_of_its_type(number):
    """To `isinstance`, to the numbers' classes, and in what a number has; to ask for its type is no look at it."""
    tape = Tape([number])
    scalar = tape.scalar(0)
    for kind in (bool, int, float, complex, numbers.Number, numbers.Real, numbers.Integral, Scalar, str, np.ndarray):
        assert isinstance(scalar, kind) == (isinstance(number, kind) or kind is Scalar)
    assert not hasattr(scalar, "shape")
    assert tape.replay([number * 2]) is not None
    assert (scalar.real, scalar.imag, str(scalar)) == (number.real, number.imag, str(number))
    assert tape.replay([number * 2]) is None


# ---- Optimizers keep the promise ----


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kept_trace_is_what_a_new_one_would_be(strategy, monkeypatch, name):
    """Each call of each update function is traced a second time: the same program, the same operands to the bit."""
    own, compared = UpdateFunction.call, []

    def twice(self, *args):
        kept, fresh = own(self, *args), own(UpdateFunction(self.__wrapped__), *args)
        assert kept.traced.program == fresh.traced.program
        for a, b in zip(kept.inputs, fresh.inputs, strict=True):
            if isinstance(a, np.ndarray):
                assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
            else:
                assert a[:2] == b[:2]
                assert a.source is b.source or a.source == b.source
        compared.append(kept)
        return kept

    monkeypatch.setattr(UpdateFunction, "call", twice)
    w = variable(strategy, np.linspace(-1, 1, 5, dtype="float32"))
    optimizer = OPTIMIZERS[name]()
    for step in range(3):
        for key, value in list(vars(optimizer).items()):
            if type(value) is float and not value.is_integer():  # numbers of steps stay
                setattr(optimizer, key, value * 0.9)
        if step:
            optimizer.learning_rate = schedules.ExponentialDecay(0.1 / step, 3, 0.5)
        # Within another merge_call: a step in its own does not ask again for what the last one did.
        merged(strategy, lambda _: optimizer.apply_gradients([(np.ones(5, "float32"), w)]))
    assert len(compared) >= 6
