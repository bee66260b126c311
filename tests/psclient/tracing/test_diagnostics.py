"""Mistakes in update functions that Python does not tell of: they are refused, or said, at the user's line."""

from __future__ import annotations

import functools
import logging
import random
import time
import warnings

import numpy as np
import pytest

import psclient as ps
from psclient._src.tracing import diagnostics
from pswire.errors import ProgramError
from tests.kit.strategies import kinds, refused, variable

pytestmark = kinds("default", "mirrored-2", "embedded-1")


def generates(v):
    yield v.assign(v * 2)


async def awaits(v):
    v.assign(v * 2)


async def both(v):
    yield v.assign(v * 2)


def expression(v):
    return (x.assign(x * 2) for x in [v])


@pytest.mark.parametrize("fn", [generates, awaits, both, expression])
@pytest.mark.parametrize("wrapped", [lambda fn: fn, ps.update_function, functools.partial])
def test_a_function_that_does_not_run_is_refused(strategy, fn, wrapped):
    """Generators and coroutines: nothing of them has run when they return; on every kind of strategy."""
    v = variable(strategy, [1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ProgramError) as caught:
            strategy.extended.update(v, wrapped(fn))
    assert str(caught.value).startswith(f"{__file__}:{fn.__code__.co_firstlineno}: {fn.__name__}")
    assert "use a plain function" in str(caught.value)
    assert v.numpy().tolist() == [1.0]


def test_arguments_are_a_tuple(strategy):
    """Of `update` and `update_non_slot`; the error says how to write it."""
    v, extended = variable(strategy), strategy.extended
    places, said = extended.non_slot_devices([v]), r" takes a tuple of arguments.*use args=\(x,\)"
    for args in (2.0, np.ones(3), "a"):
        refused(TypeError, f"^update{said}", lambda args=args: extended.update(v, lambda v, x: v.assign(x), args))
        refused(TypeError, f"^update_non_slot{said}", lambda args=args: extended.update_non_slot(places, abs, args))


RNG = np.random.default_rng(0)


@kinds("embedded-1")
@pytest.mark.parametrize(
    "noise",
    [
        lambda v: np.random.normal(size=v.shape),
        lambda v: RNG.random(v.shape, "float32"),
        lambda v: np.random.default_rng().integers(1 << 60),
        lambda v: [random.random() for _ in range(3)],
        lambda v: random.random(),
        lambda v: random.randrange(1 << 60),
        lambda v: time.perf_counter(),
        lambda v: np.float64(random.random()),
    ],
)
def test_noise_is_refused_in_what_is_traced_once(strategy, noise):
    """The first call's would be that of all, also where it meets nothing but numbers before these meet the variable; a
    function that is traced at each call may make some."""
    v = variable(strategy, np.ones(3))

    def fn(v):
        v.assign(v * noise(v))

    strategy.extended.update(v, fn)
    before = v.numpy().tolist()
    with pytest.raises(ProgramError, match=r"differs in each call.*pass it as an argument") as caught:
        strategy.extended.update(v, ps.update_function(fn))
    assert str(caught.value).startswith(f"{__file__}:{fn.__code__.co_firstlineno + 1}: fn makes a")
    with pytest.raises(ProgramError, match=f"{__file__}:.* makes a number that differs in each call"):
        strategy.extended.update(v, ps.update_function(lambda v, k: v.assign_sub(k * random.random() * v)), (0.5,))
    assert v.numpy().tolist() == before


calls = 0


@kinds("embedded-1")
def test_what_differs_by_intention_is_traced_at_each_call(strategy):
    """A number of a global that the function changes. A trace with a number that fits a dtype does not hold for one
    that does not, and the other way round."""
    v = variable(strategy, [0.0])

    @ps.update_function
    def fn(v):
        global calls
        calls += 1
        v.assign_add(1.0 * calls)

    for total in (1.0, 3.0, 6.0):
        strategy.extended.update(v, fn)
        assert v.numpy().tolist() == [total]
    fn = ps.update_function(lambda v, k: v.assign(np.where(v > k, v, 0)))
    for k, expected in ((3, 7), (300, 0), (6, 7), (-300, 7), (301, 0), (7, 0)):
        v = variable(strategy, np.array([7], "uint8"))
        strategy.extended.update(v, fn, (k,))
        assert v.numpy().tolist() == [expected], k


@kinds("embedded-1")
def test_arrays_that_are_the_same_in_each_call_are_taken(strategy):
    """Made in the function, read by closure, of a generator that begins anew: each call has them."""
    own = np.array([1.0, 2.0, 3.0], "float32")

    @ps.update_function
    def fn(v):
        v.assign(own + np.ones(3, "float32") + np.random.default_rng(1).integers(5, size=3) * v)

    v = variable(strategy)
    for _ in range(2):
        strategy.extended.update(v, fn)
    expected = np.random.default_rng(1).integers(5, size=3) * (own + 1) + own + 1
    np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6)


MASK = np.ones((600, 500), "float32")


@kinds("embedded-1")
def test_large_arrays_that_travel_are_told_once(strategy, caplog):
    """By name and size, for each line; small ones, arguments and variables are not."""
    v = variable(strategy, np.ones((600, 500), "float32"))
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        beside = ps.Variable(MASK, name="beside the large one")
    row, scale = MASK[0], MASK * 2

    def masked(v):
        v.assign(v * MASK * scale)

    def small(v, mask, beside):
        v.assign(v * row * mask * beside)

    caplog.set_level(logging.WARNING, "psclient")
    for fn in (masked, ps.update_function(masked)) * 2:
        strategy.extended.update(v, fn)
        strategy.extended.update(v, small, (MASK, beside))
    texts = [record.getMessage() for record in caplog.records if record.name == diagnostics.log.name]
    assert len(texts) == 2
    for name, text in zip(("MASK", "scale"), texts, strict=True):
        assert text.startswith(f"{__file__}:{masked.__code__.co_firstlineno + 1}: masked uses {name} (")
        assert "float32[600,500], 1 MiB" in text
        assert "sent to the servers in each call; make it a variable" in text
