"""Checkpoints of optimizers, restored onto another number of servers: the same numbers as without a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")

MOVES = pytest.mark.parametrize(
    ("before", "after"),
    [("servers-1x1", "servers-2x1"), pytest.param("servers-2x1", "servers-1x1", marks=pytest.mark.soak)],
)
OPTIONS = {
    "nothing": dict,
    "global_clipnorm": lambda: {"global_clipnorm": 0.5},
    "scale": lambda: {"loss_scale_factor": ps.optimizers.DynamicLossScale(4.0, dynamic_growth_steps=2)},
    "norm and accumulation": lambda: {"global_clipnorm": 0.5, "gradient_accumulation_steps": 2},
}
NOT_FINITE = 1
"""A step in which a gradient is not finite, where a loss scale leaves it out."""


class Trained:
    """An optimizer of two variables, which are on two servers where there are two."""

    def __init__(self, strategy, options):
        self.strategy = strategy
        devices = strategy.extended.parameter_devices
        self.variables = {}
        for name, device in (("a", devices[0]), ("b", devices[-1])):
            with strategy.scope(), strategy.extended.colocate_vars_with(device):
                self.variables[name] = ps.Variable(np.linspace(-1, 1, 3), name=name)
        self.optimizer = ps.optimizers.SGD(0.1, momentum=0.9, **OPTIONS[options]())
        self.scaled = options == "scale"

    def checkpoint(self):
        return ps.train.Checkpoint(variables=self.variables, optimizer=self.optimizer)

    def build(self, names):
        self.optimizer.build([self.variables[name] for name in names])

    def step(self, names, at):
        gradients = {name: np.sin(np.arange(3.0) + at + ord(name)) for name in names}
        if self.scaled and at == NOT_FINITE:
            gradients[names[0]][1] = np.inf
        pairs = [(gradients[name], self.variables[name]) for name in names]
        self.strategy.run(lambda: self.optimizer.apply_gradients(pairs))

    def state(self):
        """All values by name, of scratch none; copies have the value of what they are copies of."""
        found = {}
        for v in (*self.variables.values(), *self.optimizer.variables):
            if not v.name.endswith("gradient_staged"):
                value = v.numpy()
                first = found.setdefault(v.name.removesuffix(".copy"), value)
                np.testing.assert_array_equal(value, first, err_msg=v.name)
        return found


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


@MOVES
@pytest.mark.parametrize(
    ("options", "build"),
    [
        pytest.param("nothing", "late", marks=pytest.mark.soak),
        pytest.param("global_clipnorm", "at once", marks=pytest.mark.soak),
        pytest.param("scale", "at once", marks=pytest.mark.soak),
        ("norm and accumulation", "late"),
    ],
)
def test_it_goes_on_where_it_was(options, build, before, after):
    """Whatever a step keeps on several servers, and whichever variables came late."""

    def built(strategy):
        trained = Trained(strategy, options)
        for names in ["ab"] if build == "at once" else "ab":
            trained.build(names)
        return trained

    def train(trained, steps):
        for at in steps:
            trained.step("ab", at)
        return trained.state()

    with opened(before) as strategy:
        trained = built(strategy)
        saved = train(trained, range(3))
        path = trained.checkpoint().save("run/ckpt")
    with opened("mirrored-1") as strategy:
        expected = train(built(strategy), range(6))
    with opened(after) as strategy:
        trained = built(strategy)
        trained.checkpoint().restore(path).assert_consumed()
        assert_equal(trained.state(), saved)
        assert_equal(train(trained, range(3, 6)), expected)


@MOVES
def test_what_comes_late_counts_the_steps_since_the_restore(before, after):
    """On a server that had no count before, it is the count of now, and not that of the checkpoint."""

    def late(trained):
        trained.step("a", 3)
        trained.build("b")
        trained.step("ab", 4)
        assert int(trained.optimizer.iterations) == 5
        return trained.state()

    with opened(before) as strategy:
        trained = Trained(strategy, "nothing")
        for at in range(3):
            trained.step("a", at)
        path = trained.checkpoint().save("run/ckpt")
        expected = late(trained)
    with opened(after) as strategy:
        trained = Trained(strategy, "nothing")
        trained.build("a")
        trained.checkpoint().restore(path).assert_consumed()
        assert_equal(late(trained), expected)


def test_copies_do_not_number_what_else_is_saved():
    """Two optimizers of one name keep their numbers apart, however many copies of their counts there are."""

    def train(kind, steps, resume="", save=False):
        with opened(kind) as strategy:
            first = Trained(strategy, "nothing")
            first.build("a")
            first.build("b")
            other = ps.optimizers.SGD(0.1)
            other.build([first.variables["a"]])
            checkpoint = ps.train.Checkpoint(first=first.checkpoint(), other=other)
            if resume:
                checkpoint.restore(resume).assert_consumed()
            for at in range(steps):
                first.step("ab", at)
            path = checkpoint.save("run/ckpt") if save else ""
            return path, int(first.optimizer.iterations), int(other.iterations), other.iterations.name

    path, *saved = train("servers-2x1", 3, save=True)
    assert saved == [3, 0, "sgd/iterations_1"]
    assert train("servers-1x1", 0, path)[1:] == (3, 0, "sgd/iterations_1")


def test_copies_follow_an_optimizer_that_has_another_name():
    """Paths say what is whose: all copies of a count get what was saved of it, by whatever name."""
    with opened("servers-2x1") as strategy:
        trained = Trained(strategy, "nothing")
        trained.build("a")
        trained.build("b")
        for at in range(3):
            trained.step("ab", at)
        path = trained.checkpoint().save("run/ckpt")
        trained.step("ab", 3)
        expected = {name.replace("sgd", "renamed"): value for name, value in trained.state().items()}
    with opened("servers-2x1") as strategy:
        trained = Trained(strategy, "nothing")
        trained.optimizer = ps.optimizers.SGD(0.1, momentum=0.9, name="renamed")
        trained.build("a")
        trained.build("b")
        trained.checkpoint().restore(path).assert_consumed()
        trained.step("ab", 3)
        assert_equal(trained.state(), expected)
