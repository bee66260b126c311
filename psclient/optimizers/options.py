"""What all optimizers are told, and the rules of it: when one is created, and when it is changed later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np

from psclient.optimizers.scaling import DynamicLossScale
from psclient.optimizers.schedules import LearningRateSchedule

LearningRate = float | LearningRateSchedule | Callable[[], float]
"""A number, a schedule, or a function that each process calls for each step, and that gives all the same."""


class Range(NamedTuple):
    """Which numbers may be given.

    Attributes:
        words: that say so.
        holds: whether a number is one of them.
    """

    words: str
    holds: Callable[[float], bool]


AT_LEAST_0 = Range("at least 0", lambda x: x >= 0)
AT_MOST_0 = Range("at most 0", lambda x: x <= 0)
MORE_THAN_0 = Range("more than 0", lambda x: x > 0)
FROM_0_TO_1 = Range("between 0 and 1", lambda x: 0 <= x <= 1)
LESS_THAN_1 = Range("at least 0 and less than 1", lambda x: 0 <= x < 1)

_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
_RANGES = {
    "weight_decay": AT_LEAST_0,
    **dict.fromkeys(_CLIPS, MORE_THAN_0),
    "ema_momentum": FROM_0_TO_1,
    "loss_scale_factor": MORE_THAN_0,
}
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
    if not _is_number(rate):
        raise TypeError(f"learning_rate is {rate!r}; give a number, a schedule, or a function that returns a number")
    return float(rate)


def rate_now(rate: Any) -> Any:
    """A learning rate as one step takes it: a number, or the schedule.

    Raises:
        TypeError: it is a function, which returned no number.
    """
    if isinstance(rate, LearningRateSchedule) or not callable(rate):
        return rate
    found = rate()
    if not _is_number(found):
        raise TypeError(f"the function given as learning_rate returned {found!r}; it has to return a number")
    return float(found)


def check_number(name: str, value: Any, range: Range) -> float:
    """A number as it is kept: one of another type would be another kind of call, and so another program.

    Args:
        name: what it is for.
        value: whatever was given.
        range: which numbers it may be.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of the range.
    """
    if not _is_number(value):
        raise TypeError(f"{name} is {value!r}; give a number")
    if not range.holds(value):
        raise ValueError(f"{name} is {value!r}, and must be {range.words}")
    return float(value)


def _is_number(value: Any) -> bool:
    has = hasattr(type(value), "__float__") and not isinstance(value, bool | np.bool_)
    return has and not np.ndim(value)


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options but the name, as they are kept.

    Args:
        options: all of them, by name.

    Raises:
        ValueError: one is out of its range, or does not go with another.
        TypeError: one is no number.
    """
    _check_together(options)
    for name, least in _COUNTS.items():
        count = options[name]
        if count is not None and not (isinstance(count, int) and not isinstance(count, bool) and count >= least):
            raise ValueError(f"{name} is {count!r}, and must be a whole number of at least {least}, or None")
    numbers = {name: _kept(name, options[name], range) for name, range in _RANGES.items()}
    return {**options, **numbers, "use_ema": bool(options["use_ema"])}


def _kept(name: str, value: Any, range: Range) -> Any:
    absent = value is None and name != "ema_momentum"
    return value if absent or isinstance(value, DynamicLossScale) else check_number(name, value, range)


def _check_together(options: Mapping[str, Any]) -> None:
    clips = [name for name in _CLIPS if options[name] is not None]
    if len(clips) > 1:
        raise ValueError(f"gradients are clipped in one way, and {' and '.join(clips)} are given; keep one")
    if options["ema_overwrite_frequency"] is not None and not options["use_ema"]:
        raise ValueError("ema_overwrite_frequency is given, and there is no average; add use_ema=True")
