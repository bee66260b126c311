"""Memory that a client shares with its server: reads of it, and notices of places that are free again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from pswire.errors import InvalidRequest
from pswire.network.shared_memory import Segment, SharedView
from pswire.network.sockets import PayloadSender

ENOUGH = 8
"""Divisor of a segment's size: once that part of it is free again, the client is told at once."""

TELL_SECONDS = 0.05
"""Seconds after which a client is told of free memory, even if it is little and no answer has told it."""


def take_segment(sock: socket.socket, limit: int) -> Segment:
    """Takes the segment that a client hands over with its first byte.

    Args:
        sock: the connection.
        limit: size in bytes that it may have.

    Raises:
        OSError: the client has closed the connection.
        InvalidRequest: it has handed over no memory, or too much.
    """
    byte, files, _, _ = socket.recv_fds(sock, 1, 1)
    try:
        if not byte:
            raise ConnectionResetError("the connection was closed at once")
        if len(files) != 1:
            raise InvalidRequest("the client did not send a shared memory segment")
        return Segment.take(files[0], limit)
    finally:
        for file in files:
            os.close(file)


class ClientMemory:
    """A client's segment as its server reads it. Belongs to the event loop, but for the release of data.

    The client is told of free places with the next message to it, which mostly is the answer to what was there: a
    message of its own would wake it up for nothing.

    Args:
        memory: the segment.
        ring: as of `SharedView`.
        channel: returns the sender of messages to the client.
    """

    def __init__(self, memory: memoryview, ring: int, channel: Callable[[], PayloadSender]) -> None:
        self._view: SharedView | None = SharedView(memory, self._let_go, ring)
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._telling = self._watching = False

    def read(self, place: int, size: int, reader: int) -> memoryview:
        """Returns data; arguments as of `SharedView.read`."""
        if self._view is None:
            raise ValueError("the connection is closed")
        self._watch()
        return self._view.read(place, size, reader)

    def close(self) -> None:
        """Ends all reads and notices."""
        self._view = None  # else only a collection of garbage would give its memory back

    def _let_go(self, place: int, size: int) -> None:
        """Notes that data are not needed any more. Called from any thread, at any time."""
        untold, view = self._channel().let_go(place, size), self._view
        if view is None or self._telling or untold < view.size // ENOUGH:
            return
        self._telling = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._tell_freed)

    def _tell_freed(self) -> None:
        self._telling = False
        if self._view is not None:
            self._channel().tell_freed()

    def _watch(self) -> None:
        """Schedules a notice of the rest, which may be little and yet all the room that its client can have."""
        if not self._watching:
            self._watching = True
            self._loop.call_later(TELL_SECONDS, self._tell_rest)

    def _tell_rest(self) -> None:
        self._tell_freed()
        self._watching = False
        if self._view is not None and self._view.looked_at:
            self._watch()
