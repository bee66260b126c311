"""What all optimizers are told, and the rules of it: when one is created, and when it is changed later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import numpy as np

from psclient.optimizers.scaling import DynamicLossScale
from psclient.optimizers.schedules import LearningRateSchedule

LearningRate = float | LearningRateSchedule | Callable[[], float]
"""A number, a schedule, or a function that each process calls for each step, and that gives all the same."""

_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
_COUNTS = {"ema_overwrite_frequency": 1, "gradient_accumulation_steps": 2}
"""Options that are whole numbers, and the least that each may be."""


class Options(TypedDict, total=False):
    """What every optimizer takes beside its own arguments; see `Optimizer`."""

    weight_decay: float | None
    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | DynamicLossScale | None
    gradient_accumulation_steps: int | None
    name: str | None


OPTIONS = frozenset(Options.__annotations__) - {"name"}
"""Their names."""


def check_rate(rate: Any) -> Any:
    """A learning rate as it is kept.

    Raises:
        TypeError: it is neither a number, nor a schedule, nor a function.
    """
    if isinstance(rate, LearningRateSchedule) or callable(rate):
        return rate
    if isinstance(rate, bool | str) or np.ndim(rate) or not hasattr(type(rate), "__float__"):
        raise TypeError(f"learning_rate is {rate!r}; give a number, a schedule, or a function that returns a number")
    return float(rate)


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options but the name, as they are kept: whole numbers where a fraction is meant are fractions.

    Args:
        options: all of them, by name.

    Raises:
        ValueError: one is out of its range, or does not go with another.
    """
    _check_clips(options)
    _check_averages(options)
    for name, least in _COUNTS.items():
        count = options[name]
        if count is not None and not (isinstance(count, int) and not isinstance(count, bool) and count >= least):
            raise ValueError(f"{name} is {count!r}, and must be a whole number of at least {least}, or None")
    return {name: _fraction(value) if name not in _COUNTS else value for name, value in options.items()}


def _fraction(value: Any) -> Any:
    # A number of another type would be another kind of call, and so another program.
    return float(value) if type(value) is int else value


def _check_clips(options: Mapping[str, Any]) -> None:
    given = {name: options[name] for name in _CLIPS if options[name] is not None}
    if len(given) > 1:
        raise ValueError(f"gradients are clipped in one way, and {' and '.join(given)} are given; keep one")
    scale = options["loss_scale_factor"]
    if scale is not None and not isinstance(scale, DynamicLossScale):
        given["loss_scale_factor"] = scale
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"{name} is {value!r}, and must be more than 0")


def _check_averages(options: Mapping[str, Any]) -> None:
    momentum = options["ema_momentum"]
    if not 0 <= momentum <= 1:
        raise ValueError(f"ema_momentum is {momentum!r}, and must be between 0 and 1")
    if options["ema_overwrite_frequency"] is not None and not options["use_ema"]:
        raise ValueError("ema_overwrite_frequency is given, and there is no average; add use_ema=True")
