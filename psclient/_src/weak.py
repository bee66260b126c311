"""Calls that keep nothing alive: callbacks of objects that may be dropped without a word."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a bound method as long as its object is there, and does not keep that."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = found()
        return None if bound is None else bound(*args)

    return call
