"""A network that loses a connection without a word: nothing is refused or reset, and nothing arrives any more.

A test starts a `Relay`; a program of a job has its lanes go `through` it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from pswire.security.names import certificate_name

WAYS = ("up", "down")
"""From the client, and to it."""

_PORT = struct.Struct("!H")
_BYTES = 1 << 16


class Relay:
    """Hands on all that comes, until it swallows it. Used by a test; its threads end with the stack.

    Args:
        stack: ends the relay.

    Attributes:
        port: port on which it listens, on this host.
        count: connections that have come.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.count = 0
        self._lock = threading.Lock()  # guards the two below
        self._open: list[socket.socket] = []
        self._silent = {way: threading.Event() for way in WAYS}  # of the connections that are there now
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        stack.callback(self._close)
        _start(self._accept)

    def swallow(self, ways: Sequence[str] = WAYS) -> None:
        """From now on nothing arrives on the connections that are there, in these directions; later ones are well."""
        with self._lock:
            for way in ways:
                self._silent[way].set()
            self._silent = {way: threading.Event() for way in WAYS}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                (port,) = _PORT.unpack(near.recv(_PORT.size, socket.MSG_WAITALL))
                far = socket.create_connection(("127.0.0.1", port))
                with self._lock:
                    self.count += 1
                    self._open += [near, far]
                    silent = self._silent
                _start(partial(_pump, near, far, silent["up"]))
                _start(partial(_pump, far, near, silent["down"]))

    def _close(self) -> None:
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            sock.close()


def _start(run: Callable[[], object]) -> None:
    threading.Thread(target=run, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, silent: threading.Event) -> None:
    """Reads all that comes, so that its sender does not notice; an end is swallowed, too."""
    with contextlib.suppress(OSError):
        while data := source.recv(_BYTES):
            if not silent.is_set():
                sink.sendall(data)
    if not silent.is_set():
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


def through(relay: int, server: int) -> None:
    """Makes the tcp lanes of this process to one server go through a relay.

    Args:
        relay: port of the relay.
        server: index of the server.
    """
    from psclient._src.transport import lane

    connect, name = lane._connect, certificate_name(f"ps-{server}")

    def relayed(kind: str, offer: lane.Offer, *rest: object) -> object:
        if kind != "tcp" or offer.name != name:
            return connect(kind, offer, *rest)  # type: ignore[arg-type]
        sock = connect(kind, dataclasses.replace(offer, port=relay), *rest)  # type: ignore[arg-type]
        sock.sendall(_PORT.pack(offer.port))
        return sock

    lane._connect = relayed  # type: ignore[assignment]
