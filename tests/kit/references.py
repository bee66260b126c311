"""References in plain NumPy: the formulas of optimizers, compression as its description says it, and local steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import psclient as ps
from psclient.compat.v1 import train as v1
from psclient.optimizers import rules
from psclient.optimizers.local_steps.fragment import Fragment, rules_of
from psclient.optimizers.local_steps.schedule import Schedule
from psclient.optimizers.local_steps.steps import LocalSteps

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGEST = {"float16": np.float64(65504), "bfloat16": np.float64(ml_dtypes.finfo(BFLOAT16).max)}
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {"bfloat16": BFLOAT16}

CODECS = {
    "float16": ps.compression.Float16(),
    "bfloat16": ps.compression.BFloat16(),
    "int8": ps.compression.Int8(),
    "int4": ps.compression.Int4(),
    "topk": ps.compression.TopK(0.1),
}


def arithmetic(dtype: Any) -> np.dtype[Any]:
    """In which residuals are kept."""
    return np.dtype("float64" if np.dtype(dtype) == np.float64 else "float32")


def shown(how: ps.compression.Compression, whole: np.ndarray, dtype: Any, rows: bool = False) -> np.ndarray:
    """What a server takes for a finite contribution, whose residual is added, in the contribution's dtype.

    Of rows with `TopK` those that are not sent are NaN.
    """
    match how:
        case ps.compression.Float16():
            return halves(whole, "float16").astype(dtype)
        case ps.compression.BFloat16():
            return halves(whole, "bfloat16").astype(dtype)
        case ps.compression.Int8() | ps.compression.Int4():
            rounded = eighths if isinstance(how, ps.compression.Int8) else sixths
            blocks = list(whole) if rows else [whole.reshape(-1)[at : at + 256] for at in range(0, whole.size, 256)]
            steps = [rounded(np.atleast_1d(block)).reshape(-1) for block in blocks]
            return np.concatenate(steps).reshape(whole.shape).astype(dtype)
        case ps.compression.TopK(ratio):
            if rows:
                found = np.full(whole.shape, np.nan, dtype)
                kept = first_largest([np.abs(row).max() for row in whole], ratio)
                found[kept] = saturated(whole[kept], dtype)
                return found
            found = np.zeros(whole.size, dtype)
            kept = first_largest(np.abs(whole.reshape(-1)), ratio)
            found[kept] = saturated(whole.reshape(-1)[kept], dtype) + np.zeros(1, dtype)
            return found.reshape(whole.shape)
    raise AssertionError(how)


def halves(whole: np.ndarray, name: str) -> np.ndarray:
    return saturated(whole, DTYPES[name])


def saturated(whole: np.ndarray, dtype: Any) -> np.ndarray:
    """In another dtype; what is too large for that is its largest number."""
    with np.errstate(over="ignore"):
        found = whole.reshape(-1).astype(dtype)
    for at in np.flatnonzero(np.isinf(found)):
        found[at] = math.copysign(float(LARGEST[np.dtype(dtype).name]), float(whole.reshape(-1)[at]))
    return found.reshape(whole.shape)


def eighths(block: np.ndarray) -> np.ndarray:
    """Multiples of a 127th of the largest magnitude."""
    scale = np.abs(block).max() / block.dtype.type(127)
    if scale == 0:
        return np.zeros_like(block)
    return np.clip(np.rint(block / scale), -127, 127).astype(np.int8).astype(block.dtype) * scale


def sixths(block: np.ndarray) -> np.ndarray:
    """The nearest of 8 multiples of a sixth of the largest magnitude, with its sign; of two the larger one."""
    levels = np.array([6, 4, 3, 2, 1.5, 1, 0.5, 0], block.dtype)
    scale = np.abs(block).max() / levels[0]
    if scale == 0:
        return np.zeros_like(block)
    units = block / scale
    nearest = levels[np.abs(np.abs(units)[..., None] - levels).argmin(axis=-1)]
    return np.where(nearest > 0, np.copysign(nearest, units), 0).astype(block.dtype) * scale


def first_largest(magnitudes: Any, ratio: float) -> list[int]:
    """The places of the largest, the first of those that are equal, in increasing order."""
    order = sorted(range(len(magnitudes)), key=lambda place: (-float(magnitudes[place]), place))
    return sorted(order[: math.ceil(ratio * len(magnitudes))])


class Worker:
    """One process's contributions to a variable, compressed.

    Attributes:
        residual: what is left over.
    """

    def __init__(self, how: ps.compression.Compression, shape: tuple[int, ...], dtype: Any = "float32") -> None:
        self.how = how
        self.dtype = np.dtype(dtype)
        self.residual = np.zeros(shape, arithmetic(dtype))

    def send(self, contribution: np.ndarray) -> np.ndarray:
        """Returns what a server takes for an array."""
        whole = contribution.astype(self.residual.dtype) + self.residual
        sent = shown(self.how, whole, self.dtype)
        self.residual = whole - sent.astype(self.residual.dtype)
        return sent

    def send_rows(self, ids: Any, rows: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Returns what a server takes for rows, each place once."""
        whole = rows.astype(self.residual.dtype) + self.residual[ids]
        sent = shown(self.how, whole, self.dtype, rows=True)
        there = ~np.isnan(sent.reshape(len(ids), -1)[:, 0].astype("float32"))
        left = whole.copy()
        left[there] -= sent[there].astype(left.dtype)
        self.residual[ids] = left
        return list(np.asarray(ids)[there]), sent[there]


STEPS = 20
START = np.array([1.0, -2.0, 3.0])

Rule = Callable[[Any, Any, dict[str, Any], int], Any]
"""Gives the new weights, from the old ones, the gradient, the slots, and the step's number."""


def _moved(s: dict[str, Any], slot: str, rate: float, x: Any) -> Any:
    """Moves a slot's average towards `x`."""
    s[slot] = rate * s.get(slot, 0 * x) + (1 - rate) * x
    return s[slot]


def adam(rate: float, b1: float, b2: float, epsilon: float) -> Rule:
    def step(w: Any, g: Any, s: dict[str, Any], t: int) -> Any:
        m, v = _moved(s, "m", b1, g), _moved(s, "v", b2, g * g)
        return w - rate * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + epsilon)

    return step


def nadam(rate: float, b1: float, b2: float, epsilon: float) -> Rule:
    def step(w: Any, g: Any, s: dict[str, Any], t: int) -> Any:
        now, after = (b1 * (1 - 0.5 * 0.96**n) for n in (t, t + 1))
        s["product"] = s.get("product", 1.0) * now
        m, v = _moved(s, "m", b1, g), _moved(s, "v", b2, g * g)
        ahead = after * m / (1 - s["product"] * after) + (1 - now) * g / (1 - s["product"])
        return w - ahead * rate / (np.sqrt(v / (1 - b2**t)) + epsilon)

    return step


def gradient(t: int) -> Any:
    """The gradient of one step: away from zero, so that signs and quotients are sure."""
    return np.sin(np.arange(3.0) * 2 + t) * (1 + np.arange(3.0))


def trained(strategy: Any, optimizer: Any, w: Any, steps: int = STEPS) -> Any:
    """What an optimizer makes of a variable, where the replicas' gradients add up to `gradient`."""
    for t in range(1, steps + 1):
        share = (gradient(t).astype(w.dtype) / len(strategy.extended.worker_devices)).astype(w.dtype)
        strategy.run(lambda g=share: optimizer.apply_gradients([(g, w)]))
    return w.numpy()


# ---- Optimizers, and each thing that is done to gradients around them ----

O = ps.optimizers  # noqa: E741
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": partial(O.SGD, 0.5),
    "SGD, momentum": partial(O.SGD, 0.5, momentum=0.5),
    "SGD, Nesterov": partial(O.SGD, 0.5, momentum=0.5, nesterov=True),
    "SGD, clipped by value": partial(O.SGD, 0.5, clipvalue=2.0),
    "SGD, clipped by norm": partial(O.SGD, 0.5, clipnorm=2.0),
    "SGD, clipped by all": partial(O.SGD, 0.5, global_clipnorm=2.0),
    "SGD, scaled": partial(O.SGD, 0.5, loss_scale_factor=4.0),
    "SGD, accumulated": partial(O.SGD, 0.5, gradient_accumulation_steps=2),
    "SGD, averaged": partial(O.SGD, 0.5, use_ema=True, ema_overwrite_frequency=2),
    "Adagrad": partial(O.Adagrad, 0.5),
    "Adagrad by rows": partial(O.RowwiseAdagrad, 0.5),
    "Adadelta": partial(O.Adadelta, 0.5),
    "RMSprop": partial(O.RMSprop, 0.5, momentum=0.5, centered=True),
    "Ftrl": partial(O.Ftrl, 0.5, l1_regularization_strength=0.1),
    "Adam": partial(O.Adam, 0.5),
    "Adam, dynamically scaled": lambda: O.Adam(0.5, loss_scale_factor=O.DynamicLossScale(4.0, 2)),
    "AdamW": partial(O.AdamW, 0.5),
    "Adamax": partial(O.Adamax, 0.5),
    "Nadam": partial(O.Nadam, 0.5),
    "Lamb": partial(O.Lamb, 0.5),
    "Lion": partial(O.Lion, 0.5),
    "DelayedNesterov": partial(O.DelayedNesterov, 0.5, 0.5, 3),
}
MORE: dict[str, Callable[[], Any]] = {
    "SGD, clipped by norm and accumulated": partial(O.SGD, 0.5, clipnorm=2.0, gradient_accumulation_steps=2),
    "SGD, clipped by norm and scaled": lambda: O.SGD(0.5, clipnorm=2.0, loss_scale_factor=O.DynamicLossScale(4.0, 2)),
    "SGD, decayed": partial(O.SGD, 0.5, weight_decay=0.1),
    "SGD, by a schedule": lambda: O.SGD(O.schedules.ExponentialDecay(0.5, 2, 0.5)),
    "Adam, dense": partial(O.Adam, 0.5, sparse="dense"),
    "Adam, AMSGrad": partial(O.Adam, 0.5, amsgrad=True),
    "Adam, lazy": partial(O.Adam, 0.5, sparse="lazy"),
    "LazyAdam": partial(O.LazyAdam, 0.5),
    "v1 SGD": partial(v1.GradientDescentOptimizer, 0.5),
    "v1 momentum": partial(v1.MomentumOptimizer, 0.5, 0.5),
    "v1 Adagrad": partial(v1.AdagradOptimizer, 0.5),
    "v1 Adadelta": partial(v1.AdadeltaOptimizer, 0.5),
    "v1 Adam": partial(v1.AdamOptimizer, 0.5),
    "v1 Ftrl": partial(v1.FtrlOptimizer, 0.5),
    "v1 RMSprop": partial(v1.RMSPropOptimizer, 0.5, momentum=0.5, centered=True),
    "v1 proximal": partial(v1.ProximalGradientDescentOptimizer, 0.5),
    "v1 proximal Adagrad": partial(v1.ProximalAdagradOptimizer, 0.5),
}


# ---- Local steps: workers on real servers, and a loop in one process over the same workers ----

SHAPES = [(3, 2), (5,), (4,), ()]
"""Shapes of the parameters."""

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


def inner(own: Arrays, worker: int, step: int) -> Arrays:
    """An inner step of a worker: gradient descent."""
    pairs = zip(own, target(worker, step), strict=True)
    return [(p - p.dtype.type(0.1) * (p - t.astype(p.dtype))).astype(p.dtype) for p, t in pairs]


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
        schedule, options: arguments of `Schedule`.
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
        dtype: Any = np.float64,
        name: str = "p",
        **options: Any,
    ) -> None:
        self.strategy, self.worker = strategy, worker
        when = Schedule(*schedule, **options)
        with strategy.scope():
            self.variables = [ps.Variable(p, name=f"{name}{n}") for n, p in enumerate(first(dtype))]
        self.cut = CUTS[when.fragments]
        rules = rules_of(rule(), when.fragments)
        parts = [[self.variables[n] for n in places] for places in self.cut]
        made = [Fragment(strategy, own, part) for own, part in zip(rules, parts, strict=True)]
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
                    mean = sum(moved[1:], moved[0]) / kind(sum(weights))
                    outer[n] = rules[n](outer[n], mean.astype(outer[n].dtype))
                under_way[t + delay] = p, [outer[n].copy() for n in CUTS[fragments][p]]
        if t in under_way:
            p, values = under_way.pop(t)
            for w in range(workers):
                for n, value in zip(CUTS[fragments][p], values, strict=True):
                    own[w][n] = merged(own[w][n], value, alpha)
    return own, outer


# ---- Gradients of rows ----

KEYS = np.array([5, -9, 1 << 62, 0, 77, -(1 << 63), (1 << 63) - 1])
SHAPE = (len(KEYS), 3)
"""Of a table with a row for each key."""


def some_rows(step: int, replica: int, keyed: bool = False) -> ps.IndexedSlices:
    """Rows of one replica in one step, of integers; some come twice, and one replica has none in one step."""
    rng = np.random.default_rng(10 * step + replica)
    count = 0 if (step, replica) == (1, 1) else 3  # then rows of the other alone
    ids = rng.integers(0, SHAPE[0], count)
    return ps.IndexedSlices(rng.integers(-3, 4, (count, SHAPE[1])).astype("float32"), KEYS[ids] if keyed else ids)


def whole(step: int, replica: int) -> Any:
    """The same as a whole array."""
    return np.asarray(some_rows(step, replica)._with_shape(SHAPE))
