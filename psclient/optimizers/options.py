"""Options of all optimizers, and their rules: when one is created, and when it is changed later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from psclient._src.options import check_word
from psclient._src.variables.sparse_updates import CatchUp, Sparse
from psclient.optimizers.loss_scale import DynamicLossScale
from psclient.optimizers.ranges import (
    AT_LEAST_0,
    FROM_0_TO_1,
    MORE_THAN_0,
    Range,
    check_count,
    check_number,
    is_finite,
    is_number,
)
from psclient.optimizers.schedules import LearningRateSchedule

LearningRate = float | LearningRateSchedule | Callable[[], float]
"""A number, a schedule, or a function that each process calls for each step, and that gives all the same."""


_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
_RANGES = {
    "weight_decay": AT_LEAST_0,
    **dict.fromkeys(_CLIPS, MORE_THAN_0),
    "ema_momentum": FROM_0_TO_1,
    "loss_scale_factor": MORE_THAN_0,
}
_COUNTS = {"ema_overwrite_frequency": 1, "gradient_accumulation_steps": 2}
"""Options that are whole numbers, and the least that each may be."""
_WORDS: dict[str, Any] = {"sparse": Sparse, "catch_up": CatchUp}


class Options(TypedDict, total=False):
    """Arguments that every optimizer takes beside its own; see `Optimizer`."""

    weight_decay: float | None
    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | DynamicLossScale | None
    gradient_accumulation_steps: int | None
    sparse: Sparse
    catch_up: CatchUp
    name: str | None


OPTIONS = frozenset(Options.__annotations__) - {"name"}
"""Names of the options but `name`."""


def check_rate(rate: object) -> Any:
    """Checks a learning rate; returns it as it is kept.

    Raises:
        TypeError: the rate is neither a number, nor a schedule, nor a function.
        ValueError: the rate is not finite.
    """
    if isinstance(rate, LearningRateSchedule) or callable(rate):
        return rate
    if not is_number(rate):
        raise TypeError(f"learning_rate is {rate!r}; use a number, a schedule, or a function that returns a number")
    return check_number("learning_rate", rate)


def rate_now(rate: object) -> Any:
    """Returns a learning rate as one step takes it: a number, or the schedule.

    Raises:
        TypeError: the rate is a function, which returned no number.
        ValueError: the function returned one that is not finite.
    """
    if isinstance(rate, LearningRateSchedule) or not callable(rate):
        return rate
    found = rate()
    if not is_number(found):
        raise TypeError(f"the function passed as learning_rate returned {found!r}; it must return a number")
    if not is_finite(found):
        raise ValueError(f"the function passed as learning_rate returned {found!r}; it must return a finite number")
    return float(found)


def check_options(options: Mapping[str, object]) -> dict[str, Any]:
    """All options but the name, as they are kept.

    Args:
        options: all of them, by name.

    Raises:
        ValueError: one is out of its range, or does not go with another.
        TypeError: one is no number.
    """
    _check_together(options)
    for name, least in _COUNTS.items():
        if options[name] is not None:
            check_count(name, options[name], least, ", or None")
    numbers = {name: _kept(name, options[name], range) for name, range in _RANGES.items()}
    words = {name: check_word(name, options[name], kind) for name, kind in _WORDS.items()}
    return {**options, **numbers, **words, "use_ema": bool(options["use_ema"])}


def _kept(name: str, value: object, range: Range) -> Any:
    absent = value is None and name != "ema_momentum"
    return value if absent or isinstance(value, DynamicLossScale) else check_number(name, value, range)


def _check_together(options: Mapping[str, object]) -> None:
    clips = [name for name in _CLIPS if options[name] is not None]
    if len(clips) > 1:
        raise ValueError(
            f"gradients can be clipped in only one way, but {' and '.join(clips)} were passed; use one of them"
        )
    if options["ema_overwrite_frequency"] is not None and not options["use_ema"]:
        raise ValueError("ema_overwrite_frequency needs an average; add use_ema=True")
