"""Objects that no pickle can hold, since what they stand for stays in this process, or on servers."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, SupportsIndex


class Unpicklable:
    """Base of what cannot be sent to another process: whoever tries is told at once, and what to do instead.

    Attributes:
        pickle_remedy: what to send, or to save, instead.
    """

    pickle_remedy: ClassVar[str] = "make it there, with a strategy of that process"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        what: Any = getattr(self, "name", None)
        named = f" {what!r}" if isinstance(what, str) else ""
        raise TypeError(
            f"the {type(self).__name__}{named} cannot be pickled, and so not be sent to another process: it belongs to "
            f"a strategy of this one; {self.pickle_remedy}"
        )
