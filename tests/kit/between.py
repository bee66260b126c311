"""A place between a server's lane and its clients, for networks that break and for ears on the wire."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

SECONDS = 10.0
"""Within which a thread ends whose connection is gone."""


class Between:
    """Takes the place of a lane in what its server offers, and connects each client to the server.

    Args:
        stack: ends it, and gives the server its place back.
        lanes: the server's lanes; they have `port` and `path`.
        name: "tcp" or "shm".
    """

    def __init__(self, stack: ExitStack, lanes: Any, name: str) -> None:
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._to: Any = ("127.0.0.1", lanes.port) if name == "tcp" else lanes.path
        self._family = socket.AF_INET if name == "tcp" else socket.AF_UNIX
        self._listener = socket.socket(self._family)
        if name == "tcp":
            self._listener.bind(("127.0.0.1", 0))
            lanes.port = self._listener.getsockname()[1]
        else:
            path = f"{stack.enter_context(tempfile.TemporaryDirectory())}/between"
            self._listener.bind(path)
            stack.callback(setattr, lanes, "path", lanes.path)  # which the server removes at its end
            lanes.path = path
        self._listener.listen()
        stack.callback(self.close)
        self.start(self._accept)

    def connected(self, near: socket.socket, far: socket.socket) -> None:
        """Begins to hand on what comes; called by one thread for each connection: the client's end, the server's."""
        raise NotImplementedError

    def start(self, run: Callable[[], object]) -> None:
        """Runs something in a thread that ends with the connections."""
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def cut(self) -> None:
        """Breaks all connections now."""
        for sock in list(self._open):
            shut(sock)

    def close(self) -> None:
        """Breaks all, and takes no more."""
        shut(self._listener)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(SECONDS)
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(self._family)
            far.connect(self._to)
            self._open += [near, far]
            self.connected(near, far)


def shut(sock: socket.socket) -> None:
    """Ends a connection, so that whoever waits for it wakes up."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
