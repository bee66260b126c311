"""Optimizers whose variables live on several servers: the same steps as in one place, whichever variables take part."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from psclient.optimizers import schedules
from tests.kit.strategies import kinds, opened, variable

pytestmark = kinds("servers-3x1", soak=("servers-1", "servers-2", "servers-3"))
"""Three, of four variables: two lie in one place, as all do on one server, and the others in places of their own."""


@pytest.fixture(scope="module")
def local(shared):
    return shared("mirrored-1")


def dynamic():
    return ps.optimizers.DynamicLossScale(4.0, dynamic_growth_steps=2)


OPTIONS = {
    "nothing": dict,
    "clipnorm": lambda: {"clipnorm": 0.5},
    "global_clipnorm": lambda: {"global_clipnorm": 0.5},
    "average": lambda: {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    "accumulation": lambda: {"gradient_accumulation_steps": 2},
    "schedule": lambda: {"learning_rate": schedules.ExponentialDecay(0.1, 2, 0.5)},
    "decay": lambda: {"weight_decay": 0.1},
    "scale": lambda: {"loss_scale_factor": dynamic()},
    "scale and accumulation": lambda: {"loss_scale_factor": dynamic(), "gradient_accumulation_steps": 2},
    "norm and accumulation": lambda: {"global_clipnorm": 0.5, "gradient_accumulation_steps": 2},
    "all": lambda: {
        "learning_rate": schedules.ExponentialDecay(0.1, 2, 0.5),
        "global_clipnorm": 0.5,
        "use_ema": True,
        "weight_decay": 0.1,
        "gradient_accumulation_steps": 2,
        "loss_scale_factor": dynamic(),
    },
}

ORDERS = {
    "all first": ["abc", "a", "bc", "abd", "b", "abcd", "dc", "abcd"],
    "one first": ["a", "bc", "a", "d", "abc", "ad", "abcd", "abcd"],
}
NOT_FINITE = (2, 6)
"""Steps in which a gradient is not finite, where a loss scale leaves them out."""


def placed(strategy, at):
    """A variable on the server whose turn it is."""
    devices = strategy.extended.parameter_devices
    with strategy.scope(), strategy.extended.colocate_vars_with(devices[at % len(devices)]):
        return variable(strategy, np.linspace(-1, 1, 3 + at))


class Trained:
    """One optimizer and its variables in one strategy."""

    def __init__(self, strategy, make):
        self.strategy = strategy
        self.variables = {name: placed(strategy, at) for at, name in enumerate("abcd")}
        self.optimizer = make()

    def step(self, names, at, bad=False, inside=True):
        """One call with the gradients of some variables; in one of them an element may be infinite."""
        pairs = []
        for name in names:
            gradient = np.sin(np.arange(self.variables[name].size) + at)
            if bad and name == names[-1]:
                gradient[1] = np.inf
            pairs.append((gradient, self.variables[name]))
        if inside:
            self.strategy.run(lambda: self.optimizer.apply_gradients(pairs))
        else:
            self.optimizer.apply_gradients(pairs)

    def state(self):
        """All that there is, by what it is: values of variables, slots and averages, counts."""
        found = {name: v.numpy() for name, v in self.variables.items()}
        known = {v.name: name for name, v in self.variables.items()}
        for x in self.optimizer.variables:
            owner, _, slot = x.name.removeprefix(f"{self.optimizer.name}/").rpartition("/")
            if owner:
                if not slot.startswith("gradient_staged"):
                    found[known[owner], slot] = x.numpy()
                continue
            count = next(c for c in COUNTS if slot.startswith(c))
            copies = found.setdefault(count, x.numpy())
            assert x.numpy() == copies, f"{x.name} differs from its copies"
        return found


COUNTS = ("iterations", "accumulated", "loss_scale", "good_steps", "skipped_steps")


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-12, err_msg=str(key))


CHOSEN = {
    "all first": ("all",),
    "one first": ("clipnorm", "norm and accumulation"),
    "replica": ("nothing",),
    "cross-replica": ("all",),
}


def some(others):
    """Options with orders or contexts, those of `CHOSEN` in `make test`, and all in `make soak`."""
    for options in OPTIONS:
        for other in others:
            yield pytest.param(options, other, marks=[pytest.mark.soak] * (options not in CHOSEN[other]))


@pytest.mark.parametrize(("options", "order"), list(some(ORDERS)))
def test_places_make_no_difference(strategy, local, options, order):
    """Whatever the options, and whichever of the variables take part in a step or come late."""

    def make():
        given = {"learning_rate": 0.1} | OPTIONS[options]()
        return ps.optimizers.Adam(**given)

    there, here = Trained(strategy, make), Trained(local, make)
    for at, names in enumerate(ORDERS[order]):
        for one in (there, here):
            one.step(names, at, bad=at in NOT_FINITE and has_scale(options))
        if at % 4 == 3:
            assert_equal(there.state(), here.state())


def has_scale(options):
    return "loss_scale_factor" in OPTIONS[options]()


class Failing(ps.optimizers.SGD):
    """Fails in its update function when it is told so."""

    fails = False

    def update(self, v, gradient, iterations, *slots):
        if self.fails:
            raise ArithmeticError("as it was told")
        super().update(v, gradient, iterations, *slots)


@pytest.mark.parametrize(("options", "where"), list(some(["replica", "cross-replica"])))
def test_a_call_that_fails_leaves_nothing(strategy, options, where):
    """Neither in one round nor in two, in any context: the next calls make the steps that they would have made."""

    def make():
        return Failing(**({"learning_rate": 0.1, "momentum": 0.5} | OPTIONS[options]()))

    inside = where == "replica"
    failing, calm = Trained(strategy, make), Trained(strategy, make)
    for at in range(3):
        calm.step("abc", at)
        failing.step("abc", at, inside=inside)
        before = failing.state()
        failing.optimizer.fails = True
        with pytest.raises(ArithmeticError, match="as it was told"):
            failing.step("abc", at + 10, inside=inside)
        failing.optimizer.fails = False
        assert_equal(failing.state(), before)
    assert_equal(failing.state(), calm.state())


def test_what_was_begun_before_a_call_that_fails_is_done(strategy):
    """In the same scope: it is no part of the call."""
    trained, other = Trained(strategy, lambda: Failing(0.1)), variable(strategy)
    trained.optimizer.fails = True

    def both():
        with strategy.scope():
            strategy.extended.update(other, lambda v: v.assign_add(1.0))
            trained.step("abc", 0, inside=False)

    with pytest.raises(ArithmeticError, match="as it was told"):
        both()
    assert other.numpy().tolist() == [1.0] * 3
    trained.optimizer.fails = False
    trained.step("abc", 0)
    assert int(trained.optimizer.iterations) == 1


def test_an_update_that_is_refused_leaves_nothing():
    """It is no part of the section that goes on: neither what it assigned nor what it would have."""
    with opened("servers-2x1") as strategy:
        here, there = variable(strategy), variable(strategy)
        optimizer = ps.optimizers.SGD(0.1)
        optimizer.build([here, there])

        def step(v):
            v.assign_add(1.0)
            optimizer.iterations.assign_add(1)

        with strategy.scope():
            strategy.extended.update(there, lambda v: v.assign_add(2.0))
            with pytest.raises(ps.errors.LocalityError, match="copies that this update does not reach"):
                strategy.extended.update(here, step)
        found = [x.numpy().tolist() for x in (here, there, optimizer.iterations)]
        assert found == [[0.0] * 3, [2.0] * 3, 0]
