"""Local steps in NumPy: workers on real servers, and a loop in one process over the same workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import psclient as ps
from psclient.optimizers import rules
from psclient.optimizers.local_steps.fragment import Fragment, rules_of
from psclient.optimizers.local_steps.schedule import Schedule
from psclient.optimizers.local_steps.steps import LocalSteps

SHAPES = [(3, 2), (5,), (4,), ()]
"""Of the parameters."""

CUTS = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]], 4: [[0], [1], [2], [3]]}
"""The places of the parameters of each fragment, by the number of fragments."""

Arrays = list[Any]


def first(dtype: Any = np.float64) -> Arrays:
    """The parameters with which all workers begin."""
    source = np.random.default_rng(0)
    return [source.normal(size=shape).astype(dtype) for shape in SHAPES]


def target(worker: int, step: int) -> Arrays:
    """What the examples of a worker's step pull the parameters to."""
    source = np.random.default_rng([1, worker, step])
    return [source.normal(size=shape) for shape in SHAPES]


def inner(own: Arrays, worker: int, step: int, rate: float = 0.1) -> Arrays:
    """An inner step of a worker: gradient descent."""
    pairs = zip(own, target(worker, step), strict=True)
    return [(p - p.dtype.type(rate) * (p - t.astype(p.dtype))).astype(p.dtype) for p, t in pairs]


def sgd(rate: float = 0.7, momentum: float = 0.9, **options: Any) -> Any:
    """torch's SGD with Nesterov momentum, on servers."""
    made: Any = rules.kind_of(rules.TORCH["SGD"], "SGD", rules.TorchRule)
    numbers = {"dampening": 0.0, "penalty": 0.0, "maximize": False}
    return made(rate, momentum=momentum, nesterov=bool(momentum), **numbers, **options)


class LocalWorker:
    """A worker that makes local steps.

    Args:
        strategy: its strategy.
        worker: its number.
        rule: makes the outer optimizer.
        schedule: arguments of `Schedule`.
        alpha, dynamic: as in `Schedule`.
        dtype: of the parameters.
        name: prefix of the names of variables.

    Attributes:
        own: its parameters.
        steps: counts, and exchanges.
    """

    def __init__(
        self,
        strategy: Any,
        worker: int,
        rule: Callable[[], Any],
        *schedule: int,
        alpha: float = 0.0,
        dynamic: bool = False,
        dtype: Any = np.float64,
        name: str = "p",
    ) -> None:
        self.strategy, self.worker = strategy, worker
        when = Schedule(*schedule, alpha=alpha, dynamic=dynamic)
        with strategy.scope():
            self.variables = [ps.Variable(p, name=f"{name}{n}") for n, p in enumerate(first(dtype))]
        self.cut = CUTS[when.fragments]
        rules = rules_of(rule(), when.fragments)
        made = [
            Fragment(strategy, own, [self.variables[n] for n in places])
            for own, places in zip(rules, self.cut, strict=True)
        ]
        self.steps = LocalSteps(strategy, made, when, f"{name}/local_steps")
        self.own: Arrays = [None] * len(SHAPES)
        self.steps.take_all(self._merge)

    def _merge(self, number: int, outer: Sequence[Any], alpha: float) -> None:
        for n, theirs in zip(self.cut[number], outer, strict=True):
            self.own[n] = merged(self.own[n], theirs, alpha)

    def step(self, tokens: float | None = None, count: int | None = None) -> bool:
        """Makes a local step; `count` numbers its examples, if that is not the count of steps."""
        self.own = inner(self.own, self.worker, self.steps.step if count is None else count)
        return self.steps.advance(tokens, lambda number: [self.own[n] for n in self.cut[number]], self._merge)

    def outer(self) -> Arrays:
        """The outer parameters."""
        return [np.array(v.numpy()) for v in self.variables]


def merged(own: Any, outer: Any, alpha: float) -> Any:
    """A worker's parameter after an exchange."""
    return np.array(own * alpha + outer * (1 - alpha)) if alpha else np.array(outer)


class Nesterov:
    """torch's SGD with Nesterov momentum, in NumPy: of one parameter."""

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum, self.m = rate, momentum, 0.0

    def __call__(self, p: Any, g: Any) -> Any:
        """The parameter after a step."""
        kind = p.dtype.type
        self.m = kind(self.momentum) * self.m + g
        return (p - kind(self.rate) * (g + kind(self.momentum) * self.m)).astype(p.dtype)


def simulated(
    workers: int,
    count: int,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    alpha: float = 0.0,
    tokens: Callable[[int, int], float] | None = None,
    rule: Callable[[], Callable[[Any, Any], Any]] = lambda: Nesterov(0.7, 0.9),
    dtype: Any = np.float64,
) -> tuple[list[Arrays], Arrays]:
    """Streaming DiLoCo in one process, as its paper has it; returns the parameters of each worker, and the outer ones.

    `tokens` are those of a worker's step, by the numbers of both.
    """
    outer = first(dtype)
    own = [[p.copy() for p in outer] for _ in range(workers)]
    rules = [rule() for _ in SHAPES]
    between, under_way = every // fragments, {}
    counts = [[0.0] * fragments for _ in range(workers)]
    for t in range(1, count + 1):
        for worker in range(workers):
            own[worker] = inner(own[worker], worker, t - 1)
            for p in range(fragments):
                counts[worker][p] += tokens(worker, t - 1) if tokens else 0.0
        for p in range(fragments):
            if (t - p * between) % every == 0:
                weights = [counts[w][p] if tokens else 1.0 for w in range(workers)]
                for w in range(workers):
                    counts[w][p] = 0.0
                for n in CUTS[fragments][p]:
                    kind = outer[n].dtype.type
                    moved = [(outer[n] - own[w][n]) * kind(weights[w]) for w in range(workers)]
                    outer[n] = rules[n](
                        outer[n], (sum(moved[1:], moved[0]) / kind(sum(weights))).astype(outer[n].dtype)
                    )
                under_way[t + delay] = p, [outer[n].copy() for n in CUTS[fragments][p]]
        if t in under_way:
            p, values = under_way.pop(t)
            for w in range(workers):
                for n, value in zip(CUTS[fragments][p], values, strict=True):
                    own[w][n] = merged(own[w][n], value, alpha)
    return own, outer
