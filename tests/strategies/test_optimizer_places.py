"""Optimizers on every kind of strategy agree with plain NumPy; with variables on several servers they make the
steps of one place, whichever variables take part, also from a checkpoint of another number of servers."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import psclient as ps
from psclient.optimizers import schedules
from tests.kit import references
from tests.kit.strategies import USUAL, by_replica, in_replicas, kinds, merged, opened, refused, replicas, variable

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
        name: value
        for some in ("average", "schedule", "decay", "scale and accumulation", "global_clipnorm")
        for name, value in OPTIONS[some]().items()
    },
}

ORDERS = {
    "all first": ["abc", "a", "bc", "abd", "b", "abcd", "dc", "abcd"],
    "one first": ["a", "bc", "a", "d", "abc", "ad", "abcd", "abcd"],
}
NOT_FINITE = (2, 6)
"""Steps in which a gradient is not finite, where a loss scale leaves them out."""


class Trained:
    """One optimizer and its variables in one strategy."""

    def __init__(self, strategy, make):
        self.strategy = strategy
        devices = strategy.extended.parameter_devices  # each variable on the server whose turn it is
        self.variables = {
            name: variable(strategy, np.linspace(-1, 1, 3 + at), beside=(devices[at % len(devices)],))
            for at, name in enumerate("abcd")
        }
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

    def build(self, *names):
        for some in names:
            self.optimizer.build([self.variables[name] for name in some])
        return self

    def checkpoint(self):
        return ps.train.Checkpoint(variables=self.variables, optimizer=self.optimizer)

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
    "one first": ("norm and accumulation",),
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
            one.step(names, at, bad=at in NOT_FINITE and "loss_scale_factor" in OPTIONS[options]())
        if at % 4 == 3:
            assert_equal(there.state(), here.state())


class Failing(ps.optimizers.SGD):
    """Fails in its update function when it is told so."""

    fails = False

    def update(self, v, gradient, iterations, *slots):
        if self.fails:
            raise ArithmeticError("as it was told")
        super().update(v, gradient, iterations, *slots)


@pytest.mark.parametrize(("options", "where"), list(some(["replica", "cross-replica"])))
def test_a_call_that_fails_leaves_nothing(strategy, options, where):
    """Neither in one round nor in two, in any context: the next calls make the steps that they would have made. What
    was begun before it in the same scope is done: it is no part of the call."""

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
    other, failing.optimizer.fails = variable(strategy), True

    def both():
        with strategy.scope():
            strategy.extended.update(other, lambda v: v.assign_add(1.0))
            failing.step("abc", 0, inside=False)

    refused(ArithmeticError, "as it was told", both)
    assert (other.numpy().tolist(), int(failing.optimizer.iterations)) == ([1.0] * 3, int(calm.optimizer.iterations))


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
            with pytest.raises(ps.errors.LocalityError, match="copies that this update does not change"):
                strategy.extended.update(here, step)
        found = [x.numpy().tolist() for x in (here, there, optimizer.iterations)]
        assert found == [[0.0] * 3, [2.0] * 3, 0]


MOVES = pytest.mark.parametrize(
    ("before", "after"),
    [("servers-1x1", "servers-2x1"), pytest.param("servers-2x1", "servers-1x1", marks=pytest.mark.soak)],
)


def heavy(options="nothing", name="sgd"):
    return ps.optimizers.SGD(**({"learning_rate": 0.1, "momentum": 0.9, "name": name} | OPTIONS[options]()))


@MOVES
@pytest.mark.parametrize("options", ["all", *(pytest.param(name, marks=pytest.mark.soak) for name in OPTIONS)])
def test_a_restored_optimizer_goes_on_where_it_was(options, before, after, in_tmp_path):
    """Whatever a step keeps on several servers: slots, averages, kept gradients, counts, the schedule's place. Also
    variables that came late. Without servers, and without a checkpoint, the steps are the same. Paths say what is
    whose, and not the optimizer's name; another optimizer of that name keeps its number apart, however many copies of
    their counts there are."""

    def train(strategy, steps, path=""):
        trained = Trained(strategy, partial(heavy, options, "renamed" if path else "sgd")).build("abc", "d")
        other = ps.optimizers.SGD(0.1, name=trained.optimizer.name)
        other.build([trained.variables["a"]])
        checkpoint = ps.train.Checkpoint(trained=trained.checkpoint(), other=other)
        if path:
            checkpoint.restore(path).assert_consumed()
            assert_equal(trained.state(), saved)
        for at in steps:
            trained.step("abcd", at, bad=at == 1 and "loss_scale_factor" in OPTIONS[options]())
        assert int(other.iterations) == 0
        return checkpoint, trained.state()

    with opened(before) as strategy:
        checkpoint, saved = train(strategy, range(3))
        path = checkpoint.save("run/ckpt")
    with opened("mirrored-1") as strategy:
        expected = train(strategy, range(8))[1]
    with opened(after) as strategy:
        assert_equal(train(strategy, range(3, 8), path)[1], expected)


@MOVES
def test_what_comes_late_counts_the_steps_since_the_restore(before, after, in_tmp_path):
    """On a server that had no count before, it is the count of now, and not that of the checkpoint."""

    def late(trained):
        trained.step("a", 3)
        trained.build("b").step("ab", 4)
        assert int(trained.optimizer.iterations) == 5
        return trained.state()

    with opened(before) as strategy:
        trained = Trained(strategy, heavy)
        for at in range(3):
            trained.step("a", at)
        path = trained.checkpoint().save("run/ckpt")
        expected = late(trained)
    with opened(after) as strategy:
        trained = Trained(strategy, heavy).build("a")
        trained.checkpoint().restore(path).assert_consumed()
        assert_equal(late(trained), expected)


STEPS = 5


def gradient(t, replica):
    """The gradient of one replica in one step."""
    return np.sin(np.arange(3.0) + t + 10 * replica)


@kinds(*USUAL)
def test_all_strategies_agree_with_numpy(strategy):
    """In replicas, in merge_call, in the scope and outside of it, with per-replica gradients: the same steps. Gradients
    are summed over the replicas, each step counts once, and all copies are equal."""
    rule = references.adam(0.1, 0.9, 0.999, 1e-7)
    w, optimizer = variable(strategy, references.START), ps.optimizers.Adam(0.1)

    def gradients(t):
        return by_replica(strategy, lambda replica: gradient(t, replica))

    optimizer.apply_gradients([(gradients(1), w)])
    with strategy.scope():
        optimizer.apply_gradients([(gradients(2), w)])
    merged(strategy, lambda s, g: optimizer.apply_gradients([(g, w)]), gradients(3))
    in_replicas(strategy, lambda _, own, g: optimizer.apply_gradients([(g, own)]), w, gradients(4))
    in_replicas(strategy, lambda replica: optimizer.apply_gradients([(gradient(5, replica), w)]))
    expected, state = references.START, {}
    for t in range(1, STEPS + 1):
        expected = rule(expected, sum(gradient(t, replica) for replica in range(replicas(strategy))), state, t)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-12)
    assert int(optimizer.iterations) == STEPS
    assert len({tuple(np.asarray(copy)) for copy in strategy.experimental_local_results(w)}) == 1


@kinds(*USUAL)
def test_what_is_built_is_used(strategy):
    """By `build`, before the first step; in a replica function with the variable as an argument too. Slots are where
    their variable is, and the count of the steps, whenever a variable came, is on the non-slot devices. Integers are
    not trained: the error names the variable and its dtype before anything is made for it."""
    w, u, late = (variable(strategy, np.zeros(3)) for _ in range(3))
    n, optimizer = replicas(strategy), ps.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([w])
    assert int(optimizer.iterations) == 0
    strategy.run(lambda own: optimizer.build([own]), (u,))
    count = optimizer.iterations
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w), (np.ones(3), u)]))
    assert (optimizer.iterations is count, int(count)) == (True, 1)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w), (np.ones(3), late)]))
    np.testing.assert_allclose(w.numpy(), -0.1 * n - (0.9 * 0.1 * n + 0.1 * n))
    np.testing.assert_allclose([u.numpy(), late.numpy()], np.full((2, 3), -0.1 * n))
    assert int(optimizer.iterations) == 2
    both, none = ps.optimizers.Adam(), ps.optimizers.Adam()
    both.build([w, u])
    assert [x.devices for x in both.variables if x is not both.iterations] == [w.devices] * 2 + [u.devices] * 2
    assert both.iterations.devices == strategy.extended.non_slot_devices([w, u])
    assert not any(x.trainable for x in both.variables)
    whole = variable(strategy, np.zeros(3, "int64"))
    with pytest.raises(ValueError, match=f"'{whole.name}' is of int64.*floating dtype"):
        strategy.run(lambda: none.apply_gradients([(np.ones(3, "int64"), whole)]))
    with pytest.raises(RuntimeError, match="no state"):
        _ = none.iterations
