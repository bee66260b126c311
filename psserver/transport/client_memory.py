"""The memory that a client shares with its server: what is read of it, and what the client is told is free again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from pswire.transport.shared_memory import SharedView

ENOUGH = 8
"""A client is told at once of memory that is free again when it is this part of its segment."""

TELL_SECONDS = 0.05
"""After how long a client is told of memory that is free again, though it is little."""


class ClientMemory:
    """A client's segment, as its server reads it. Belongs to the event loop, but for those who let go of what was read.

    Args:
        memory: the segment.
        tell: tells the client of places that are free again.
    """

    def __init__(self, memory: memoryview, tell: Callable[[list[int]], object]) -> None:
        self._view: SharedView | None = SharedView(memory, self._let_go)
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._freed: deque[int] = deque()
        self._untold = 0  # bytes of these, nearly: threads add to it at once
        self._telling = self._watching = False

    def read(self, place: int, size: int, reader: int) -> memoryview:
        """Reads data; see `SharedView.read`."""
        if self._view is None:
            raise ValueError("the connection is closed")
        self._watch()
        return self._view.read(place, size, reader)

    def close(self) -> None:
        """Nothing is read or told any more."""
        self._view = None  # else only a collection of garbage would give its memory back

    def _let_go(self, place: int, size: int) -> None:
        """Data are needed no more; told by any thread, at any time.

        To wake the loop costs who computes: it is woken when there is much to tell, or nothing else to come.
        """
        self._freed.append(place)
        self._untold += size
        view = self._view
        if view is None or self._telling or (view.looked_at and self._untold < view.size // ENOUGH):
            return
        self._telling = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._tell_freed)

    def _tell_freed(self) -> None:
        self._telling, self._untold = False, 0  # first: what is freed from now on may not be among these
        places = [self._freed.popleft() for _ in range(len(self._freed))]
        if places and self._view is not None:
            self._tell(places)

    def _watch(self) -> None:
        """Tells the rest after a while: it may be little, and yet all the room that its client can have."""
        if not self._watching:
            self._watching = True
            self._loop.call_later(TELL_SECONDS, self._tell_rest)

    def _tell_rest(self) -> None:
        self._tell_freed()
        self._watching = False
        if self._view is not None and self._view.looked_at:
            self._watch()
