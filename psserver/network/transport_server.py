"""The transports of a server: pushes and pulls over plain sockets, with data in the socket or in shared memory.

One event loop serves all clients. Data from a client are read into memory once, or not at all where the memory is
shared. The thread that makes an answer sends as much of it as the system takes; the loop sends the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from functools import partial
from pathlib import Path

from psserver.config import ServerConfig
from psserver.network import unix_socket
from psserver.network.access import Access
from psserver.network.served import Served
from psserver.network.tls_handshake import Handshake
from psserver.network.transport_connection import Connection, Connections
from pswire.cluster import join_address
from pswire.network.sockets import tune
from pswire.network.tls_socket import Sealed
from pswire.security.identity import ServerContexts
from pswire.security.names import named

log = logging.getLogger("psserver.transports")

MAX_STRANGERS = 256
"""Most connections without a hello; beyond it the oldest is closed."""

REST_SECONDS = 1.0
"""Seconds without an accept once the system has no room for a connection."""

SAME_HOST = "this host:"
"""The other end of a connection over shared memory."""

FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Error numbers of a system that has no room for a connection."""

SILENCE_SECONDS = 30.0
"""Seconds after which a client's host that acknowledges nothing is given up."""


class TransportServer(Connections):
    """The listener for the transports of all sessions. All methods belong to the event loop.

    Args:
        core: the server proper.
        config: address, certificate and limits.
        access: checks clients and their calls.
    """

    def __init__(self, core: Served, config: ServerConfig, access: Access) -> None:
        super().__init__(core, config, access)
        self._tls = ServerContexts(config.security) if config.security.tls else None
        self.port = 0
        """Port of the tcp transport, once it listens."""
        self.path = ""
        """Path of the shm transport's socket, once it listens; "" where the system has none."""
        self._host = config.host
        self._wanted = config.data_port
        self._listeners: list[socket.socket] = []
        self._handshakes: list[Handshake] = []
        self._resting = False

    def start(self) -> None:
        """Starts listening; raises `OSError` if the port cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        tcp = socket.create_server((self._host.strip("[]"), self._wanted), family=family, backlog=MAX_STRANGERS)
        self.port = tcp.getsockname()[1]
        self._listen(tcp, False)
        if not self._shared_memory:
            return
        with contextlib.suppress(OSError):  # a system without Unix sockets, or a place that cannot be written
            unix, path = unix_socket.listen(MAX_STRANGERS)
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
            sock, address = listener.accept()
            if not shared:
                tune(sock, SILENCE_SECONDS, breaks=True)
        except OSError as error:
            if error.errno in FULL:
                self._rest(listener, shared, error)
            return
        self._resting = False
        strangers: list[Handshake | Connection] = list(self._handshakes)
        strangers += [connection for connection in self.connections if connection.session is None]
        if len(strangers) >= MAX_STRANGERS:
            strangers[0].close("too many idle connections")
        peer = SAME_HOST if shared else join_address(*address[:2])
        if self._tls is None or shared:
            self.connections.append(Connection(self, sock, shared, peer))
        else:
            self._handshakes.append(Handshake(self._tls.newest(), sock, partial(self._shaken, peer)))

    def _shaken(self, peer: str, handshake: Handshake, sealed: Sealed | None) -> None:
        """Removes a handshake that is over; adds its connection if it has succeeded."""
        self._handshakes.remove(handshake)
        if sealed is not None:
            self.connections.append(Connection(self, sealed, False, peer, named(sealed.peer_names())))
        elif handshake.failure:
            self.access.refused.note("connect", peer, "handshake", handshake.failure)

    def _rest(self, listener: socket.socket, shared: bool, error: OSError) -> None:
        """Stops accepting for a moment: a waiting client would keep the loop busy with failing accepts."""
        if not self._resting:
            log.warning("%s cannot accept connections for now (%s)", self.task, error.strerror)
        self._resting = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(REST_SECONDS, self._heed, listener, shared)

    def stop(self) -> None:
        """Closes all listeners and connections."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        if self.path:
            Path(self.path).unlink(missing_ok=True)
        for handshake in list(self._handshakes):
            handshake.close("the server is shutting down")
        self.close()
