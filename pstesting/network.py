"""A network that loses a connection without a word: nothing is refused or reset, and nothing arrives any more.

A test starts a `Relay`. A program of a job has its transports go `through` it, or takes it for a server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from pswire.security.names import certificate_name

WAYS = ("up", "down")
"""From the client, and to it."""

_PORT_BYTES = 2
_BYTES = 1 << 16


class Relay:
    """Hands on all that comes, until it swallows it. Used by a test; its threads end with the stack.

    Args:
        stack: ends the relay.
        host: the address of this host on which it listens. Transports of a server are not at another one than its own,
            so that only gRPC reaches it there.

    Attributes:
        port: port on which it listens.
        count: connections that have come.
    """

    def __init__(self, stack: ExitStack, host: str = "127.0.0.1") -> None:
        self.count = 0
        self._to = 0
        self._host = host
        self._lock = threading.Lock()  # guards the three below
        self._cut = False
        self._open: list[socket.socket] = []
        self._silent = {way: threading.Event() for way in WAYS}  # of the connections that are there now
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        stack.callback(self._close)
        _start(self._accept)

    @property
    def address(self) -> str:
        """The relay's `host:port`, in place of the server's."""
        return f"{self._host}:{self.port}"

    def lead_to(self, address: str) -> None:
        """Connections lead to a server, by its `host:port`; until then each says the port itself, as with `through`."""
        self._to = int(address.rpartition(":")[2])

    def swallow(self, ways: Sequence[str] = WAYS) -> None:
        """From now on nothing arrives on the connections that are there, in these directions; later ones are well."""
        with self._lock:
            for way in ways:
                self._silent[way].set()
            self._silent = {way: threading.Event() for way in WAYS}

    def cut(self) -> None:
        """From now on nothing arrives, on later connections neither, until `mend`."""
        with self._lock:
            self._cut = True
        self.swallow()

    def mend(self) -> None:
        """Ends all connections; later ones are well."""
        with self._lock:
            self._cut = False
            for sock in self._open:
                _shut(sock)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._lead(self._listener.accept()[0])

    def _lead(self, near: socket.socket) -> None:
        said = b"" if self._to else near.recv(_PORT_BYTES, socket.MSG_WAITALL)
        port = self._to or int.from_bytes(said, "big")
        with self._lock:
            self.count += 1
            self._open.append(near)
            if self._cut:
                return
            silent = self._silent
        try:
            far = socket.create_connection(("127.0.0.1", port))
        except OSError:  # also where it ended before it said a port
            _shut(near)
            return
        with self._lock:
            self._open.append(far)
        _start(partial(_pump, near, far, silent["up"]))
        _start(partial(_pump, far, near, silent["down"]))

    def _close(self) -> None:
        for sock in [self._listener, *self._open]:
            _shut(sock)
            sock.close()


def _shut(sock: socket.socket) -> None:
    """Ends a connection, and wakes the thread that waits for it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _start(run: Callable[[], object]) -> None:
    threading.Thread(target=run, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, silent: threading.Event) -> None:
    """Reads all that comes, so that its sender does not notice; an end is swallowed, too."""
    with contextlib.suppress(OSError):
        while data := source.recv(_BYTES):
            if not silent.is_set():
                sink.sendall(data)
    if not silent.is_set():
        _shut(sink)


def through(relay: int, server: int) -> None:
    """Makes the tcp transports of this process to one server go through a relay.

    Args:
        relay: port of the relay.
        server: index of the server.
    """
    from psclient._src.network import transport

    connect, name = transport._connect, certificate_name(f"ps-{server}")

    def relayed(kind: str, offer: transport.Offer, *rest: object) -> object:
        if kind != "tcp" or offer.name != name:
            return connect(kind, offer, *rest)  # type: ignore[arg-type]
        sock = connect(kind, dataclasses.replace(offer, port=relay), *rest)  # type: ignore[arg-type]
        sock.sendall(offer.port.to_bytes(_PORT_BYTES, "big"))
        return sock

    transport._connect = relayed  # type: ignore[assignment]
