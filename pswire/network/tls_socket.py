"""TLS on the socket of a transport: what a `Link` needs of a socket, encrypted.

What is encrypted goes through memory, so that one system call carries many records: a record has 16 KiB at most, and to
send and receive each by itself would cost more than to encrypt it.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from pswire.network import scratch

RECORD = 1 << 14
"""Bytes of a record of TLS. Smaller buffers become one."""

PIECE = 1 << 18
"""Bytes that are encrypted at once: who receives waits as long."""


class Sealed:
    """A TLS connection as a plain socket. After the handshake it may be written and read by two threads.

    Args:
        sock: a connected socket.
        context: the certificates that this end shows, and asks for.
        name: name that the other end's certificate must have; None for the end that was connected to.

    Attributes:
        heard: True once anything has come from the other end.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str | None = None) -> None:
        self.heard = False
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=name is None, server_hostname=name)
        self._lock = threading.Lock()  # guards all of it: OpenSSL allows one thread at a time
        self._sealed = memoryview(b"")  # encrypted bytes that the system has not taken yet
        self._taken = 0  # of how many bytes it was made

    def shake(self) -> None:
        """Goes on with the handshake; where the socket blocks, to its end.

        Raises:
            BlockingIOError: the handshake is not over yet.
            OSError: the handshake has failed.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._tell()
                if not self._take():
                    raise ConnectionResetError("the other side has closed the connection") from None
            except ssl.SSLError:
                with suppress(OSError):  # the other end may be told why
                    self._tell()
                raise
            else:
                self._tell()
                return

    def peer_names(self) -> list[str]:
        """The DNS names on the other end's certificate."""
        found = self._tls.getpeercert() or {}
        names = found.get("subjectAltName", ())
        return [str(name[1]) for name in names if isinstance(name, tuple) and name[0] == "DNS"]

    def fileno(self) -> int:
        """Returns the socket's file descriptor, for selectors."""
        return self._sock.fileno()

    def getsockname(self) -> object:
        """Returns the socket's own address."""
        return self._sock.getsockname()

    def getpeername(self) -> object:
        """Returns the address of the other end; raises `OSError` if that is gone."""
        return self._sock.getpeername()

    def setblocking(self, blocking: bool) -> None:
        """Sets whether the socket blocks."""
        self._sock.setblocking(blocking)

    def sendall(self, data: bytes) -> None:
        """Sends all data, as a socket that blocks does."""
        self._tls.write(data)
        self._tell()

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Sends a piece of the buffers; returns how many bytes.

        Raises:
            BlockingIOError: the system has not taken all of it; the same buffers must come first the next time.
        """
        with self._lock:
            if not self._sealed:
                self._taken = sum(map(self._tls.write, _records(buffers)))
                self._sealed = memoryview(self._outgoing.read())
            while self._sealed:
                self._sealed = self._sealed[self._sock.send(self._sealed) :]
            return self._taken

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Receives into a buffer, as a socket that does not block does."""
        view, at = memoryview(buffer), 0
        with self._lock:
            while at < len(view):
                try:
                    # With a buffer it returns a number, which the stubs do not know.
                    at += cast(int, self._tls.read(len(view) - at, view[at:]))
                except ssl.SSLWantReadError:
                    # What is there is given first: to receive more may say that there is no more for now.
                    if at or not self._take():
                        return at
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return at
        return at

    def close(self) -> None:
        """Closes the socket."""
        self._sock.close()

    def _take(self) -> int:
        """Receives what is there; returns how many bytes, 0 at the end."""
        buffer = scratch.lend()
        try:
            count = self._sock.recv_into(buffer)
            self._incoming.write(buffer[:count])
            self.heard = self.heard or count > 0
        finally:
            scratch.give_back(buffer)
        return count

    def _tell(self) -> None:
        """Sends what TLS has to say."""
        self._sock.sendall(self._outgoing.read())


Stream = socket.socket | Sealed
"""The two kinds of connection that a link sends and receives on."""


def _records(buffers: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The first piece of some buffers, of which small ones are joined."""
    found: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    size = together = 0
    for buffer in buffers:
        part = buffer[: PIECE - size]
        if small and together + len(part) > RECORD:
            found.append(b"".join(small))
            small, together = [], 0
        if len(part) >= RECORD:
            found.append(part)
        else:
            small.append(part)
            together += len(part)
        size += len(part)
        if size == PIECE:
            break
    return [*found, b"".join(small)] if small else found
