"""TLS on the socket of a lane: what a `Link` needs of a socket, encrypted."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence

TOGETHER = 1 << 14
"""Bytes: smaller buffers become one record of TLS, which has at most as many."""

PIECE = 1 << 18
"""Bytes that are encrypted at once: who receives waits as long."""


class Sealed:
    """A TLS connection, whose handshake is over, as a plain socket. May be written and read by two threads.

    Args:
        sock: connected.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()  # guards the connection: OpenSSL allows one thread at a time
        self._pending: bytes | memoryview | None = None  # what TLS has begun to send, and must be given again

    def peer_names(self) -> list[str]:
        """The DNS names on the other end's certificate."""
        found = self._sock.getpeercert() or {}
        names = found.get("subjectAltName", ())
        return [str(name[1]) for name in names if isinstance(name, tuple) and name[0] == "DNS"]

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    def setblocking(self, blocking: bool) -> None:
        """As of a socket."""
        self._sock.setblocking(blocking)

    def sendall(self, data: bytes) -> None:
        """As of a socket that blocks."""
        self._sock.sendall(data)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Sends what the system takes of the buffers; returns how many bytes.

        Raises:
            BlockingIOError: none; the same buffers must come first the next time.
        """
        with self._lock:
            if self._pending is None:
                self._pending = _joined(buffers)
            try:
                sent = self._sock.send(self._pending)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                raise BlockingIOError from None
            self._pending = None
            return sent

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """As of a socket that does not block."""
        with self._lock:
            try:
                return self._sock.recv_into(buffer)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def close(self) -> None:
        """As of a socket."""
        self._sock.close()


Stream = socket.socket | Sealed
"""What a link sends and receives on."""


def _joined(buffers: Sequence[memoryview]) -> bytes | memoryview:
    """The first piece of some buffers."""
    if len(buffers[0]) >= TOGETHER or len(buffers) == 1:
        return buffers[0][:PIECE]
    found, size = [], 0
    for buffer in buffers:
        found.append(buffer[: TOGETHER - size])
        size += len(found[-1])
        if size == TOGETHER:
            break
    return b"".join(found)
