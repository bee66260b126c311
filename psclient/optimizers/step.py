"""The update functions that make a step: what all optimizers do around their own `update`.

    collect    each variable    keeps the gradient for later, where it is needed in more than one round or step
    measure    each variable    how large its gradient is, and whether it is finite
    total      each server      that of all variables together
    begin      each server      counts the step, computes its learning rate, decides whether it is made
    apply      each variable    clips, decays, updates, averages

They depend on their arguments alone, so that each is traced once. `optimizer` is what `Optimizer.settings` lets
through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from psclient.optimizers.scaling import DynamicLossScale
from psclient.optimizers.schedules import LearningRateSchedule
from psclient.traces import update_function

SINGLE = np.dtype(np.float32)


def state_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In which dtype steps of a variable are computed, and its slots are kept: half precision has too few digits."""
    return SINGLE if dtype.name in ("float16", "bfloat16") else dtype


SMALLEST_SCALE = 2.0**-100
"""A loss scale is not halved below this: gradients are divided by it."""


@update_function
def collect(v: Any, optimizer: Any, gradient: Any, kept: Any, scale: Any) -> None:
    """Keeps a gradient: adds it to those of the calls before, if several make a step.

    Args:
        v: the variable.
        optimizer: as the module says.
        gradient: the sum over all replicas.
        kept: the variable that keeps it.
        scale: the dynamic loss scale, or None.
    """
    unscaled = _unscaled(v, optimizer, gradient, scale)
    if optimizer.gradient_accumulation_steps:
        kept.assign_add(unscaled)
    else:
        kept.assign(unscaled)


@update_function
def measure(v: Any, optimizer: Any, gradient: Any, is_kept: bool, scale: Any) -> dict[str, Any]:
    """The sum of squares of a gradient, float64, and whether all of it is finite, as far as they are needed.

    Args:
        v, optimizer, scale: as in `collect`.
        gradient: the sum over all replicas, or what keeps it.
        is_kept: whether it is the latter.
    """
    whole = _whole(v, optimizer, gradient, is_kept, scale)
    found = {}
    if optimizer.global_clipnorm is not None:
        found["squares"] = np.sum(np.square(whole)).astype(np.float64)
    if isinstance(optimizer.loss_scale_factor, DynamicLossScale):
        found["finite"] = np.all(np.isfinite(whole))
    return found


@update_function
def total(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
def begin(optimizer: Any, state: Mapping[str, Any], finite: Any) -> dict[str, Any]:
    """Begins a step.

    Args:
        optimizer: as the module says.
        state: the variables that all steps share, by name.
        finite: whether all gradients are; None if it does not matter.

    Returns:
        `t`: the step's number, from 1; of a schedule `rate`; of gradients that are kept, `due`: whether the step is
        made now; with a loss scale, `scale`: by which gradients are to be divided; `go`: whether anything is to change.
    """
    before = state["iterations"].value()
    found: dict[str, Any] = {"t": before + 1}
    if isinstance(optimizer.learning_rate, LearningRateSchedule):
        found["rate"] = optimizer.learning_rate(before)
    if "accumulated" in state:
        calls = state["accumulated"].value() + 1
        found["go"] = found["due"] = calls >= optimizer.gradient_accumulation_steps
        state["accumulated"].assign(np.where(found["due"], 0, calls))
    if finite is not None:
        found["scale"] = state["loss_scale"].value()
        _rescale(optimizer.loss_scale_factor, state, finite, found.get("due", np.equal(found["scale"], found["scale"])))
        found["go"] = np.logical_and(finite, found["go"]) if "go" in found else finite
    state["iterations"].assign(np.where(found["go"], before + 1, before) if "go" in found else before + 1)
    return found


def _rescale(rule: Any, state: Mapping[str, Any], finite: Any, due: Any) -> None:
    scale, good = state["loss_scale"].value(), state["good_steps"].value() + 1
    grown = np.logical_and(good >= rule.dynamic_growth_steps, np.isfinite(scale * 2))
    better = np.where(grown, scale * 2, scale)
    state["loss_scale"].assign(np.where(due, np.where(finite, better, np.maximum(scale / 2, SMALLEST_SCALE)), scale))
    again = np.where(np.logical_and(finite, np.logical_not(grown)), good, 0)
    state["good_steps"].assign(np.where(due, again, good - 1))
    left_out = np.logical_and(due, np.logical_not(finite))
    state["skipped_steps"].assign_add(np.where(left_out, 1, 0))


@update_function
def apply(
    v: Any,
    optimizer: Any,
    gradient: Any,
    is_kept: bool,
    begun: Mapping[str, Any],
    norm: Any,
    average: Any,
    decays: bool,
    slots: Sequence[Any],
) -> None:
    """Makes a step of one variable; nothing of it, where `begun` says so.

    Args:
        v, optimizer, gradient, is_kept: as in `measure`.
        begun: what `begin` returned.
        norm: of all gradients, where they are clipped by it, else None.
        average: the variable's moving average, or None.
        decays: whether the variable takes part in weight decay.
        slots: the variable's.
    """
    whole = _whole(v, optimizer, gradient, is_kept, begun.get("scale"))
    if "go" not in begun:
        _change(v, optimizer, _clipped(optimizer, whole, norm), begun, average, decays, slots)
        return
    changing = [v, *slots] if average is None else [v, *slots, average]
    before = [x.value() for x in changing]
    with np.errstate(all="ignore"):  # What is not finite is left out.
        _change(v, optimizer, _clipped(optimizer, whole, norm), begun, average, decays, slots)
    for x, old in zip(changing, before, strict=True):
        x.assign(np.where(begun["go"], x.value(), old))
    if is_kept and "due" in begun:
        gradient.assign(np.where(begun["due"], np.zeros_like(whole), gradient.value()))


def _change(
    v: Any,
    optimizer: Any,
    own: Any,
    begun: Mapping[str, Any],
    average: Any,
    decays: bool,
    slots: Sequence[Any],
) -> None:
    if "rate" in begun:
        optimizer.learning_rate = begun["rate"].astype(own.dtype)
    if decays:
        value = v.astype(own.dtype)
        v.assign(value - value * optimizer.weight_decay * optimizer.learning_rate)
    optimizer.update(v, own, begun["t"], *slots)
    if average is not None:
        _average(v, optimizer, begun["t"], average)


@update_function
def become(v: Any, other: Any) -> None:
    """Gives a variable the value of another."""
    v.assign(other.value())


def _unscaled(v: Any, optimizer: Any, gradient: Any, scale: Any) -> Any:
    own = gradient.astype(state_dtype(v.dtype))
    if scale is not None:
        return own / scale.astype(own.dtype)
    return own if optimizer.loss_scale_factor is None else own / optimizer.loss_scale_factor


def _whole(v: Any, optimizer: Any, gradient: Any, is_kept: bool, scale: Any) -> Any:
    if not is_kept:
        return _unscaled(v, optimizer, gradient, scale)
    calls = optimizer.gradient_accumulation_steps
    return gradient.value() / calls if calls else gradient.value()


def _clipped(optimizer: Any, own: Any, norm: Any) -> Any:
    if optimizer.clipvalue is not None:
        return np.clip(own, -optimizer.clipvalue, optimizer.clipvalue)
    if optimizer.clipnorm is not None:
        return own * (optimizer.clipnorm / np.maximum(np.sqrt(np.sum(np.square(own))), optimizer.clipnorm))
    if norm is not None:
        limit = optimizer.global_clipnorm
        return own * (limit / np.maximum(norm, limit)).astype(own.dtype)
    return own


def _average(v: Any, optimizer: Any, t: Any, average: Any) -> None:
    new, rest = v.astype(average.dtype), 1 - optimizer.ema_momentum
    average.assign(np.where(t == 1, new, optimizer.ema_momentum * average.value() + rest * new))
    if optimizer.ema_overwrite_frequency:
        overwrites = t % optimizer.ema_overwrite_frequency == 0
        v.assign(np.where(overwrites, average.value().astype(v.dtype), v.value()))
