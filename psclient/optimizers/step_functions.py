"""The update functions that make a step: what all optimizers do around their own `update`.

    become     each variable    keeps its gradient for the second round, where a step takes two
    measure    each variable    how large its gradient is, and whether it is finite; `measure_norm` of a shard
    total      each server      that of all variables together
    begin      each server      counts the call, computes its learning rate, decides whether it makes a step
    advance    each variable    moves the number that goes by steps alone, if its optimizer has one
    apply      each variable    accumulates, clips, decays, updates, averages

Whatever stays is assigned by the last three, which are of one round: a call that does not come to it leaves nothing.
They depend on their arguments alone, so that each is traced once. `optimizer` is what `Optimizer.settings` lets
through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from psclient._src.arrays.devices import Value
from psclient._src.tracing.diagnostics import fail, refuse_result, refuse_step
from psclient._src.tracing.hyperparameters import Settings
from psclient._src.tracing.tracer import VariableTracer
from psclient._src.tracing.update_function import update_function
from psclient._src.variables.sparse_updates import CatchUp, Sparse
from psclient._src.variables.variable import Variable
from psclient.optimizers.loss_scale import DynamicLossScale
from psclient.optimizers.schedules import LearningRateSchedule

SINGLE = np.dtype(np.float32)

Updated = Variable | VariableTracer
"""A variable with copies here, or the tracer of one on servers."""


class OptimizerView(Protocol):
    """An optimizer as steps see it: numbers and `update`. An update function gets one with nothing else."""

    sparse: Sparse
    catch_up: CatchUp
    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: Value
    loss_scale_factor: Value
    gradient_accumulation_steps: Value
    weight_decay: Value
    learning_rate: Value
    ema_momentum: float
    ema_overwrite_frequency: int | None
    _decays_before: ClassVar[bool]

    def _settings(self) -> Settings:
        """Returns the hyperparameters of now."""

    @property
    def _chosen(self) -> OptimizerView:
        """The optimizer itself; of groups the rule of the variable's group."""

    def _divided(self, v: Value, gradient: Value) -> Value:
        """Returns the gradient that is meant, where more than the loss scale is in it."""

    def _shorten(self, v: Any) -> None:
        """Shortens rows of a variable that may not exceed a norm, before its update."""

    def _advanced(self, number: Value, iterations: Value) -> Value:
        """Returns what the slot `_running` is in a step."""

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> object:
        """Updates one variable; returns nothing."""


def state_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """In which dtype steps of a variable are computed, and its slots are kept: half precision has too few digits."""
    return SINGLE if dtype.name in ("float16", "bfloat16") else dtype


SMALLEST_SCALE = 2.0**-100
"""A loss scale is not halved below this: gradients are divided by it."""


@update_function
def become(v: Updated, value: Value) -> None:
    """Gives a variable the value of something else, in its own dtype."""
    v.assign(value.astype(v.dtype))


@update_function
def measure(
    v: Updated, optimizer: OptimizerView, gradient: Value, accumulator: Updated | None, scale: Value
) -> dict[str, Value]:
    """Measures a gradient: the sum of its squares, float64, and whether all of it is finite, as far as is needed.

    Args:
        v: the variable, in a trace.
        optimizer: the optimizer, as the module says.
        gradient: the sum over all replicas, multiplied by the loss scale.
        accumulator: the variable that has the gradients of the calls before, if several make a step; else None.
        scale: the dynamic loss scale, or None.
    """
    whole = _whole(optimizer._chosen, _unscaled(v, optimizer, gradient, scale), accumulator)
    found, optimizer = {}, optimizer._chosen
    if optimizer.global_clipnorm is not None:
        found["squares"] = np.sum(np.square(whole)).astype(np.float64)
    if isinstance(optimizer.loss_scale_factor, DynamicLossScale):
        found["finite"] = np.all(np.isfinite(whole))
    return found


@update_function
def measure_norm(
    v: Updated, optimizer: OptimizerView, gradient: Value, accumulator: Updated | None, scale: Value
) -> dict[str, Value]:
    """Measures a shard's gradient, which is clipped by the norm of the whole one: the sum of its squares, float64.

    Args:
        v: as in `measure`.
        optimizer: as in `measure`.
        gradient: as in `measure`.
        accumulator: as in `measure`.
        scale: as in `measure`.
    """
    whole = _whole(optimizer._chosen, _unscaled(v, optimizer, gradient, scale), accumulator)
    return {"squares": np.sum(np.square(whole)).astype(np.float64)}


@update_function
def total(parts: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """The norm of all gradients, and whether all are finite.

    Args:
        parts: of each variable what `measure` found.
    """
    found = dict(parts[0])
    for part in parts[1:]:
        for name in found:
            found[name] = found[name] + part[name] if name == "squares" else np.logical_and(found[name], part[name])
    if "squares" in found:
        found["norm"] = np.sqrt(found.pop("squares"))
    return found


@update_function
def begin(optimizer: OptimizerView, state: Mapping[str, Updated], finite: Value) -> dict[str, Value]:
    """Begins a step.

    Args:
        optimizer: the optimizer, as the module says.
        state: the variables that all steps share, by name.
        finite: true if all gradients are finite; None if it does not matter.

    Returns:
        `t`: the step's number, from 1; of a schedule `rate`; with a loss scale `scale`, by which gradients are to be
            divided, and `finite`; where a call may make no step, `go`: true if it does.
    """
    optimizer, before = optimizer._chosen, state["iterations"].value()
    found: dict[str, Value] = {"t": before + 1}
    calls = before
    if "accumulated" in state:
        kept = state["accumulated"].value()
        calls = before * optimizer.gradient_accumulation_steps + kept
        found["go"] = kept + 1 >= optimizer.gradient_accumulation_steps
    if isinstance(optimizer.learning_rate, LearningRateSchedule):
        found["rate"] = _rate(optimizer.learning_rate, calls)
    if finite is not None:
        found |= {"finite": finite, "scale": state["loss_scale"].value()}
        found["go"] = np.logical_and(finite, found["go"]) if "go" in found else finite
        _rescale(optimizer.loss_scale_factor, state, finite)
    if "accumulated" in state:
        more = kept + 1 if finite is None else np.where(finite, kept + 1, kept)
        state["accumulated"].assign(np.where(found["go"], 0, more))
    state["iterations"].assign(np.where(found["go"], before + 1, before) if "go" in found else before + 1)
    return found


def _rate(schedule: LearningRateSchedule, calls: Value) -> Value:
    """The learning rate of a call; a schedule may also return a plain number."""
    rate = schedule(calls)
    refuse_result(schedule.__call__, rate)
    shape: tuple[int, ...] = getattr(rate, "shape", ())
    if shape or isinstance(rate, bool | str | None):
        fail(f"the schedule {type(schedule).__name__} returns {rate!r}; it has to return one number for each step")
    return rate if hasattr(rate, "astype") else np.full_like(calls, rate, dtype=np.float64)


def _rescale(rule: DynamicLossScale, state: Mapping[str, Updated], finite: Value) -> None:
    scale, good = state["loss_scale"].value(), state["good_steps"].value() + 1
    grown = np.logical_and(good >= rule.dynamic_growth_steps, np.isfinite(scale * 2))
    better = np.where(grown, scale * 2, scale)
    state["loss_scale"].assign(np.where(finite, better, np.maximum(scale / 2, SMALLEST_SCALE)))
    state["good_steps"].assign(np.where(np.logical_and(finite, np.logical_not(grown)), good, 0))
    state["skipped_steps"].assign_add(np.where(finite, 0, 1))


@update_function
def advance(number: Updated, optimizer: OptimizerView, begun: Mapping[str, Value]) -> None:
    """Moves a slot that is one number; it is no part of `apply`, which may run on rows, at any time later.

    Args:
        number: the slot.
        optimizer: the optimizer, as the module says.
        begun: the result of `begin`.
    """
    before = number.value()
    after = optimizer._chosen._advanced(before, begun["t"])
    number.assign(np.where(begun["go"], after, before) if "go" in begun else after)


@update_function
def apply(
    v: Updated,
    optimizer: OptimizerView,
    gradient: Value,
    accumulator: Updated | None,
    begun: Mapping[str, Value],
    norm: Value,
    average: Updated | None,
    decays: bool,
    slots: Sequence[Updated],
    number: Updated | None = None,
    marks: Updated | None = None,
    of_rows: bool = False,
) -> None:
    """Makes a step of one variable; nothing of it, where `begun` says so.

    Args:
        v: as in `measure`.
        optimizer: as in `measure`.
        gradient: as in `measure`.
        accumulator: as in `measure`.
        begun: the result of `begin`.
        norm: norm of all gradients, where they are clipped by it; of a shard, which is clipped by the norm of its
            variable's gradient, that; else None.
        average: the variable's moving average, or None.
        decays: True if the variable takes part in weight decay.
        slots: the variable's slots, in order, but for that number.
        number: the slot that `advance` has moved, or None.
        marks: the variable that has the rows of the calls before, if a step of several calls is for their rows alone;
            else None.
        of_rows: True if this call's gradient is of some rows; else all rows have one.
    """
    shorten, own = optimizer._shorten, _unscaled(v, optimizer, gradient, begun.get("scale"))
    optimizer = optimizer._chosen
    if "go" not in begun:
        shorten(v)
        _change(v, optimizer, _clipped(optimizer, own, norm), begun, average, decays, slots, number)
        return
    changing = [v, *slots] if average is None else [v, *slots, average]
    before = [x.value() for x in changing]
    with np.errstate(all="ignore"):  # What is not finite is left out.
        whole = _whole(optimizer, own, accumulator)
        shorten(v)
        _change(v, optimizer, _clipped(optimizer, whole, norm), begun, average, decays, slots, number)
        marked = None if marks is None else _marked(marks, own, of_rows)
        changes = begun["go"] if marked is None else np.logical_and(begun["go"], marked.astype(bool))
        for x, old in zip(changing, before, strict=True):
            x.assign(np.where(changes, x.value(), old))
        if accumulator is not None:
            _accumulate(accumulator, accumulator.value() + own, begun)
        if marks is not None:
            _accumulate(marks, marked, begun)


def _accumulate(kept: Updated, more: Value, begun: Mapping[str, Value]) -> None:
    if "finite" in begun:
        more = np.where(begun["finite"], more, kept.value())
    # Zeros, and servers see that: so a row that no call of a step has needs no work.
    kept.assign(np.where(begun["go"], np.less(more, more).astype(more.dtype), more))


def _marked(marks: Updated, own: Value, of_rows: bool) -> Value:
    """Returns what is zero in each row of which no call of this step has had a gradient."""
    if not of_rows:
        return np.ones_like(marks.value())
    size = np.abs(own)
    size = np.max(size, axis=tuple(range(1, len(own.shape))), keepdims=True) if len(own.shape) > 1 else size
    return np.maximum(marks.value(), size)


def _change(
    v: Updated,
    optimizer: OptimizerView,
    own: Value,
    begun: Mapping[str, Value],
    average: Updated | None,
    decays: bool,
    slots: Sequence[Updated],
    number: Updated | None,
) -> None:
    if "rate" in begun:
        vars(optimizer)["_learning_rate"] = begun["rate"].astype(own.dtype)
    vars(optimizer)["_decaying"] = decays
    if decays and optimizer._decays_before:
        value = v.astype(own.dtype)
        v.assign(value - value * optimizer.weight_decay * optimizer.learning_rate)
    before = v.assigned if isinstance(v, VariableTracer) else v.read_value()
    given = (*slots,) if number is None else (*slots, number.value())
    returned = optimizer.update(v, own, begun["t"], *given)
    refuse_step(optimizer, returned, (v, *slots), _assigned_since(before, v))
    if average is not None:
        _average(v, optimizer, begun["t"], average)


def _assigned_since(before: Value, v: Updated) -> bool:
    # An array is replaced by each assignment, also by one of the same value.
    return v.assigned > before if isinstance(v, VariableTracer) else v.read_value() is not before


def _unscaled(v: Updated, optimizer: OptimizerView, gradient: Value, scale: Value) -> Value:
    own, optimizer = optimizer._divided(v, gradient).astype(state_dtype(v.dtype)), optimizer._chosen
    if scale is not None:
        return own / scale.astype(own.dtype)
    return own if optimizer.loss_scale_factor is None else own / optimizer.loss_scale_factor


def _whole(optimizer: OptimizerView, own: Value, accumulator: Updated | None) -> Value:
    if accumulator is None:
        return own
    return (own + accumulator.value()) / optimizer.gradient_accumulation_steps


def _clipped(optimizer: OptimizerView, own: Value, norm: Value) -> Value:
    if optimizer.clipvalue is not None:
        return np.clip(own, -optimizer.clipvalue, optimizer.clipvalue)
    if optimizer.clipnorm is not None:
        length = np.sqrt(np.sum(np.square(own))) if norm is None else norm.astype(own.dtype)
        return own * (optimizer.clipnorm / np.maximum(length, optimizer.clipnorm))
    if norm is not None:
        limit = optimizer.global_clipnorm
        # The difference is 0, or makes all gradients NaN where one is not finite.
        return own * (limit / np.maximum(norm, limit) + (norm - norm)).astype(own.dtype)
    return own


def _average(v: Updated, optimizer: OptimizerView, t: Value, average: Updated) -> None:
    new, rest = v.astype(average.dtype), 1 - optimizer.ema_momentum
    average.assign(np.where(t == 1, new, optimizer.ema_momentum * average.value() + rest * new))
    if optimizer.ema_overwrite_frequency:
        overwrites = t % optimizer.ema_overwrite_frequency == 0
        v.assign(np.where(overwrites, average.value().astype(v.dtype), v.value()))
