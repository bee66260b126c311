"""The lanes of a server: pushes and pulls over plain sockets, their data in the socket or in shared memory.

One event loop serves all clients. What a client sends is read into memory once, or not at all where the memory is
shared; answers are sent by the thread that makes them, as far as the system takes them, and then by the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import os
import secrets
import socket
from pathlib import Path

from psserver import names
from psserver.connection import Connection
from pswire.api import ParameterServer
from pswire.cluster import Task
from pswire.errors import MemoryLimit, PSError
from pswire.lanes.rings import CLIENT_BYTES, Ring, Segment
from pswire.lanes.sockets import tune
from pswire.payload import Assembly

log = logging.getLogger(__name__)

MAX_STRANGERS = 256
"""Connections that have not said who they are; the oldest has to go."""

MAX_TOKENS = 4096
"""Sessions that may open lanes; of those without one the oldest can no more, and pushes and pulls over gRPC."""

REST_SECONDS = 1.0
"""How long nobody is let in once the system has no room for a connection."""

FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What the system says then."""

SILENCE_SECONDS = 30.0
"""How long a client's host may not acknowledge anything."""


class Lanes:
    """Listens for the lanes of all sessions. All methods belong to the event loop, but `token`.

    Args:
        core: the server proper.
        task: which task this is, for messages.
        host: the address to listen on.
        port: the port of the tcp lane, 0 to pick one.
        max_payload_bytes: what one message may announce.
        shared_memory: bytes in which answers are for clients on this host: twice the largest model whose values these
            use where they are. Only what was once in use at a time takes memory; 0 for no shm lane.
        in_flight: bytes of one client's contribution that are held before they are used, where they can be used bit
            by bit; the rest waits in the client.
    """

    def __init__(
        self,
        core: ParameterServer,
        task: Task,
        host: str,
        port: int,
        max_payload_bytes: int,
        shared_memory: int,
        in_flight: int = CLIENT_BYTES,
    ) -> None:
        self.in_flight = in_flight
        self._shared_memory = shared_memory
        self.core = core
        self.task = str(task)
        self.max_payload_bytes = max_payload_bytes
        self.port = 0
        """Of the tcp lane, once it listens."""
        self.path = ""
        """Of the shm lane's socket, once it listens; "" where the system has none."""
        self._host = host
        self._wanted = port
        self._tokens: dict[int, bytes] = {}
        self._listeners: list[socket.socket] = []
        self._outbox: tuple[Ring, int] | None = None
        self.connections: list[Connection] = []
        self.leaving: set[Connection] = set()
        """Those that are over, and whose clients may still look at our memory."""
        self.ended: PSError | None = None
        """Why no call is taken any more."""
        self._resting = False

    def token(self, session: int) -> bytes:
        """What the client of a session says to show that it is."""
        if session not in self._tokens and len(self._tokens) >= MAX_TOKENS:
            busy = {connection.session for connection in list(self.connections)}
            del self._tokens[next((old for old in self._tokens if old not in busy), next(iter(self._tokens)))]
        return self._tokens.setdefault(session, secrets.token_bytes(16))

    def owns(self, session: int, token: bytes) -> bool:
        """Whether a client has shown that a session is its own."""
        known = self._tokens.get(session)
        return known is not None and hmac.compare_digest(known, token)

    def outbox(self) -> tuple[Ring, int]:
        """Where answers are written for all clients that share memory, and its file; raises `OSError` if it fails."""
        if self._outbox is None:
            segment, file = Segment.make(self._shared_memory)
            self._outbox = Ring(segment.memory), file
        return self._outbox

    def assembly(self, size: int) -> Assembly:
        """Where a message's payload is collected; raises `MemoryLimit` for one that announces too much."""
        if size > self.max_payload_bytes:
            raise MemoryLimit(
                f"a message of {size} bytes is above this server's limit of {self.max_payload_bytes}; "
                "give the server more memory, or spread the variables over more servers",
                self.task,
            )
        return Assembly(size)

    def start(self) -> None:
        """Listens from now on; raises `OSError` where the port cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        tcp = socket.create_server((self._host.strip("[]"), self._wanted), family=family, backlog=MAX_STRANGERS)
        self.port = tcp.getsockname()[1]
        self._listen(tcp, False)
        if not self._shared_memory:
            return
        with contextlib.suppress(OSError):  # a system without Unix sockets, or a place that cannot be written
            unix, path = names.listen(MAX_STRANGERS)
            self._listen(unix, True)
            self.path = str(path)

    def _listen(self, listener: socket.socket, shared: bool) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._heed(listener, shared)

    def _heed(self, listener: socket.socket, shared: bool) -> None:
        if listener in self._listeners:  # else the server has ended meanwhile
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, shared)

    def _accept(self, listener: socket.socket, shared: bool) -> None:
        try:
            sock, _ = listener.accept()
            if not shared:
                tune(sock, SILENCE_SECONDS)
        except OSError as error:
            if error.errno in FULL:
                self._rest(listener, shared, error)
            return
        self._resting = False
        strangers = [connection for connection in self.connections if connection.session is None]
        if len(strangers) >= MAX_STRANGERS:
            strangers[0].close("too many connections that say nothing")
        self.connections.append(Connection(self, sock, shared))

    def _rest(self, listener: socket.socket, shared: bool, error: OSError) -> None:
        """Lets nobody in for a moment: who waits would have the loop try again and again."""
        if not self._resting:
            log.warning("%s lets nobody in for now (%s)", self.task, error.strerror)
        self._resting = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(REST_SECONDS, self._heed, listener, shared)

    def end(self, error: PSError) -> None:
        """Answers all calls that wait, and all that come, with an error."""
        self.ended = error
        for connection in list(self.connections):
            connection.end(error)

    def stop(self) -> None:
        """Ends all connections."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        if self.path:
            Path(self.path).unlink(missing_ok=True)
        for connection in list(self.connections):
            connection.close("the server ends", gone=True)
        for connection in self.leaving:
            loop.remove_reader(connection.sock)
            connection.drop()
        self.leaving.clear()
        if self._outbox is not None:
            os.close(self._outbox[1])
            self._outbox = None
