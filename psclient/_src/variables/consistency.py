"""The consistency of one variable: the one that was given, or that of the variable beside which it is created."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from psclient._src.context import StrategyFace
from psclient._src.options import Consistency

_beside: ContextVar[tuple[object, Consistency | None]] = ContextVar("beside", default=(None, None))


@contextlib.contextmanager
def created_beside(variable: Any) -> Iterator[None]:
    """Variables of the same strategy that are created within are updated as this one, if they do not say otherwise."""
    token = _beside.set((variable.strategy, variable.consistency))
    try:
        yield
    finally:
        _beside.reset(token)


def consistency_here(strategy: StrategyFace) -> Consistency | None:
    """Returns the consistency of the variable beside which the calling thread creates others; None for that of all."""
    owner, consistency = _beside.get()
    return consistency if owner is strategy else None


def check_consistency(given: object, name: str) -> None:
    """Raises `TypeError` if what was given for a variable is no consistency; None stands for that of the strategy."""
    if not isinstance(given, Consistency | None):
        raise TypeError(f"variable {name!r}: {given!r} is not a consistency; use ps.Async(), or leave consistency out")


def is_apart(strategy: StrategyFace, consistency: Consistency | None, name: str) -> bool:
    """Returns whether each worker updates a variable with a consistency alone, though others may be updated by all.

    Raises:
        ConfigError: a variable of this job cannot have it.
    """
    return consistency is not None and bool(strategy.backend.is_apart(consistency, name))
