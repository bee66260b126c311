"""How long and where objects live: callbacks that keep nothing alive, and objects that only this process has."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, SupportsIndex


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a bound method as long as its object is there, and does not keep that."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = found()
        return None if bound is None else bound(*args)

    return call


class Unpicklable:
    """Base of what cannot be sent to another process: whoever tries is told at once, and what to do instead.

    Attributes:
        _pickle_remedy: what to send, or to save, instead.
    """

    _pickle_remedy: ClassVar[str] = "create it there, with a strategy of that process"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        what: Any = getattr(self, "name", None)
        named = f" {what!r}" if isinstance(what, str) else ""
        raise TypeError(
            f"the {type(self).__name__}{named} cannot be pickled or sent to another process, because it "
            f"belongs to this process's session with the servers; {self._pickle_remedy}"
        )
