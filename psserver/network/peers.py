"""Connections to the other servers of a job, on which this one says its votes. A thread keeps each of them.

A server introduces itself over gRPC, and then votes on the other's tcp transport, or over gRPC where that cannot be
reached. A vote that is said while there is no connection, or on one that breaks, is dropped: the machine keeps it, and
says it again once there is another.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

import grpc

from psserver.config import ServerConfig
from psserver.effects import NOWHERE, Peer
from psserver.network.served import Served
from pswire.cluster import Task
from pswire.encoding import plain_votes
from pswire.encoding.messages import said_to_pb
from pswire.encoding.protocol import spoken
from pswire.encoding.verbs import INCARNATION_KEY, TOKEN_KEY, VERBS, bearer, parse, refused
from pswire.errors import InvalidRequest, PSError, ServerGone
from pswire.network.grpc_channel import open_channel, reason, stub
from pswire.network.sockets import Message, MessageKind, MessageSocket, connect, head_of
from pswire.network.tls_socket import Stream
from pswire.pb import parameter_server_pb2 as pb
from pswire.security.names import certificate_name, task_name
from pswire.servers.votes import Testimony, Vote

log = logging.getLogger("psserver")

PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.1, 1.0
"""Seconds between two attempts to connect: the first pause, and the longest."""

CONNECT_SECONDS = 5.0
"""Seconds that an attempt may take, at each of its steps."""

GRACE_SECONDS = 1.0
"""Seconds that a connection gets to close; one that is being made may take longer, and ends by itself."""

LOOK_SECONDS = 0.2
"""Seconds between two looks at whether a connection is to be closed."""


class Carrier(Protocol):
    """A connection to another server."""

    transport: str

    def say(self, said: Vote | Testimony) -> None:
        """Sends a vote or a testimony; returns at once. Called from any thread."""

    def keep(self, closed: threading.Event) -> None:
        """Serves the connection until it is to be closed; raises why it breaks."""

    def drop(self) -> None:
        """Closes the connection; after `keep`."""


class Peers:
    """All connections to other servers. May be used by any thread.

    Args:
        core: told when a connection is there and when it is not.
        config: the certificates and the token that this server shows; its own task.
    """

    def __init__(self, core: Served, config: ServerConfig) -> None:
        self._core = core
        self._config = config
        self._known: tuple[Peer, ...] = ()
        self._links: dict[int, PeerConnection] = {}
        self._wanted: set[int] = set()  # to whom something was said
        self._lock = threading.Lock()  # guards all of them
        self._closed = False

    def know(self, servers: Sequence[Peer]) -> None:
        """Takes where the servers of a job are, or from now on are.

        Connections to others are closed. Who is in the place of one to whom something was said may not have heard it:
        it is connected at once, and the machine says it again.
        """
        with self._lock:
            self._known = tuple(servers)
            outdated = [server for server, link in self._links.items() if link.peer not in servers]
            closed = [self._links.pop(server) for server in outdated]
            for server in self._wanted:
                self._connect(server)
        for link in closed:
            link.close()

    def say(self, server: int, said: Vote | Testimony) -> None:
        """Says a vote or a testimony to a server. The first one makes the connection."""
        link = self._links.get(server)
        if link is None:
            with self._lock:
                self._wanted.add(server)
                link = self._connect(server)
        if link is not None:
            link.say(said)

    def _connect(self, server: int) -> PeerConnection | None:
        """Returns the connection to a server, made now if there is none; None while it is gone."""
        found = self._links.get(server)
        peer = self._known[server] if server < len(self._known) else NOWHERE
        if found is None and peer != NOWHERE and not self._closed:
            found = self._links[server] = PeerConnection(self._core, self._config, server, peer)
        return found

    def close(self) -> None:
        """Closes all connections, and makes no others."""
        with self._lock:
            self._closed = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()
        for link in links:
            link.join()


class PeerConnection:
    """The connection to one server, which is made again when it breaks.

    Args:
        core: told when the connection is there and when it is not.
        config: as for `Peers`.
        server: the other server's number.
        peer: where it is.
    """

    def __init__(self, core: Served, config: ServerConfig, server: int, peer: Peer) -> None:
        self.peer = peer
        self._core = core
        self._config = config
        self._server = server
        self._task = Task("ps", server)
        self._name = certificate_name(task_name(self._task))
        token = config.security.token
        self._metadata = ((INCARNATION_KEY, str(peer.incarnation)), *([(TOKEN_KEY, bearer(token))] if token else ()))
        self._carrier: Carrier | None = None
        self._connected = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"votes to {self._task}", daemon=True)
        self._thread.start()

    def say(self, said: Vote | Testimony) -> None:
        """Says something if there is a connection; else the machine says it again later."""
        carrier = self._carrier
        if carrier is not None:
            carrier.say(said)

    def close(self) -> None:
        """Closes the connection for good."""
        self._closed.set()

    def join(self) -> None:
        """Waits for the thread to end."""
        self._thread.join(GRACE_SECONDS)

    def _run(self) -> None:
        pause = PAUSE_SECONDS
        while not self._closed.is_set():
            try:
                self._connect_once()
            except (PSError, OSError, grpc.RpcError) as error:
                if self._closed.is_set():
                    return
                if isinstance(said := _said(error), ServerGone):
                    self._core.outlive(said)
                    return
                pause = PAUSE_SECONDS if self._connected else min(2 * pause, LAST_PAUSE_SECONDS)
                self._connected = False
                self._core.miss(self._server, f"at {self.peer.address}: {_why(error)}")
            self._closed.wait(pause)

    def _connect_once(self) -> None:
        """Connects, and serves the connection until it breaks.

        Raises:
            PSError, OSError, grpc.RpcError: why there is none.
        """
        with open_channel(self.peer.address, self._config.security, self._name) as channel:
            answer = self._introduce(channel)
            transport = self._transport(answer)
            carrier: Carrier
            if transport is not None:
                channel.close()
                carrier = transport
            else:
                call = stub(channel, VERBS["Vote"].path, (False, False))
                carrier = CallCarrier(call, self._metadata, self._core.incarnation)
            log.debug("%s is connected to %s over %s", self._config.task, self._task, carrier.transport)
            self._carrier = carrier
            self._connected = True
            # From now on votes are sent at once; those before are said again by the machine.
            self._core.meet(self._server)
            try:
                carrier.keep(self._closed)
            finally:
                self._carrier = None
                carrier.drop()

    def _introduce(self, channel: grpc.Channel) -> pb.IntroduceReply:
        request = pb.IntroduceRequest(
            server=self._config.task.index, incarnation=self._core.incarnation, spoken=spoken()
        )
        call = stub(channel, VERBS["Introduce"].path, (False, False))
        answer = call(request.SerializeToString(), timeout=CONNECT_SECONDS, metadata=self._metadata)
        return parse(pb.IntroduceReply, answer)

    def _transport(self, answer: pb.IntroduceReply) -> TransportCarrier | None:
        """Connects to the tcp transport; None where it cannot be reached, or somebody else answers."""
        if not answer.data_port:
            return None
        host = self.peer.address.rpartition(":")[0].strip("[]")
        hello = pb.TransportHello(session=self._core.incarnation, token=answer.transport_token, replaces=True)
        tls = self._config.security.client_context() if self._config.security.tls else None
        try:
            lease = self._config.timeouts.session_timeout
            sock = connect(host, answer.data_port, CONNECT_SECONDS, lease, True, tls, self._name)
            try:
                sock.sendall(Message(MessageKind.HELLO, header=hello.SerializeToString()).head())
                transport = TransportCarrier(sock, self._core.incarnation)
                transport.await_welcome()
            except BaseException:
                sock.close()
                raise
        except (OSError, InvalidRequest) as error:
            log.info(
                "%s uses gRPC to %s, because the tcp transport cannot be reached (%s)",
                self._config.task,
                self._task,
                error,
            )
            return None
        return transport


class TransportCarrier:
    """A connection on the other server's tcp transport.

    Args:
        sock: connected, after the hello.
        incarnation: of this server.
    """

    transport = "tcp"

    def __init__(self, sock: Stream, incarnation: int) -> None:
        self._sock = sock
        self._incarnation = incarnation
        self._link = MessageSocket(sock)

    def await_welcome(self) -> None:
        """Waits until the other server has taken the hello.

        Raises:
            OSError, InvalidRequest: nobody does, or what listens there is not the server.
        """
        deadline = time.monotonic() + CONNECT_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            for message in self._link.receive():
                if message.kind is not MessageKind.WELCOME:
                    raise InvalidRequest(f"it sent {message.kind.name} in place of WELCOME")
                self._link.trust()
                return
            self._wait(False, left)
        raise TimeoutError(f"no answer within {CONNECT_SECONDS:g} s")

    def _wait(self, writes: bool, seconds: float) -> tuple[bool, bool]:
        """Waits until something can be read, or, if asked for, written; returns which."""
        poll = select.poll()  # select would take no file above 1,023
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if writes else 0))
        events = sum(event for _, event in poll.poll(1000 * seconds))
        return bool(events & ~select.POLLOUT), bool(events & select.POLLOUT)

    def say(self, said: Vote | Testimony) -> None:
        """Sends a vote as far as the system takes it; `keep` sends the rest, and finds out if the connection broke."""
        kind, header = MessageKind.PLAIN_VOTE, plain_votes.pack(said)
        if header is None:
            kind, header = MessageKind.VOTE, said_to_pb(said, self._incarnation).SerializeToString()
        with suppress(OSError):
            self._link.send((head_of(kind, 0, header),))

    def keep(self, closed: threading.Event) -> None:
        """Waits until the connection breaks; raises `OSError` or `InvalidRequest`."""
        while not closed.is_set():
            readable, writable = self._wait(bool(self._link.waiting), LOOK_SECONDS)
            if readable:
                for _ in self._link.receive():  # nothing comes this way but the end
                    pass
            if writable:
                self._link.flush()

    def drop(self) -> None:
        """Closes the socket."""
        self._sock.close()


class CallCarrier:
    """Votes as calls over gRPC, one after another.

    Args:
        call: the verb.
        metadata: of each call.
        incarnation: of this server.
    """

    transport = "grpc"

    def __init__(self, call: Callable[..., bytes], metadata: tuple[tuple[str, str], ...], incarnation: int) -> None:
        self._call = call
        self._metadata = metadata
        self._incarnation = incarnation
        self._votes: SimpleQueue[bytes] = SimpleQueue()

    def say(self, said: Vote | Testimony) -> None:
        """Hands a vote to `keep`."""
        self._votes.put(said_to_pb(said, self._incarnation).SerializeToString())

    def keep(self, closed: threading.Event) -> None:
        """Sends what is said; raises `grpc.RpcError` where a call fails."""
        while not closed.is_set():
            with suppress(Empty):
                self._call(self._votes.get(timeout=LOOK_SECONDS), timeout=CONNECT_SECONDS, metadata=self._metadata)

    def drop(self) -> None:
        """Does nothing: the channel is closed by its owner."""


def _why(error: Exception) -> str:
    """Says in words why there is no connection."""
    if not isinstance(error, grpc.RpcError):
        return getattr(error, "message", None) or getattr(error, "strerror", None) or str(error)
    said = _said(error)
    return said.message if said is not None else reason(error.details() or "" if isinstance(error, grpc.Call) else "")


def _said(error: Exception) -> PSError | None:
    """Returns the error that another server has answered with; None where it did not."""
    if not isinstance(error, grpc.Call):
        return error if isinstance(error, PSError) else None
    return refused(error.details() or "", error.trailing_metadata() or ())
