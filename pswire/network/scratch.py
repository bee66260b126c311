"""Buffers to receive into, lent to the sockets that have something to read: a thousand idle ones need none."""

from __future__ import annotations

from collections import deque

SCRATCH = 1 << 16
"""Bytes of a buffer: received at once where a message may be small."""

KEPT = 16
"""Buffers that are kept for the next sockets."""

NOTHING = memoryview(b"")
"""What a socket has that has no buffer."""

_FREE: deque[memoryview] = deque()
"""The buffers that no socket has. Used by any thread, without a lock: each of its methods is one step."""


def lend() -> memoryview:
    """Returns a buffer, in which anything may be."""
    try:
        return _FREE.pop()
    except IndexError:
        return memoryview(bytearray(SCRATCH))


def give_back(buffer: memoryview) -> None:
    """Takes a buffer back of which nothing is needed any more."""
    if len(_FREE) < KEPT:
        _FREE.append(buffer)
