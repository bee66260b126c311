"""One client's transport on the server: messages in, calls of the core, answers out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

from psserver.config import ServerConfig
from psserver.network.access import Access, Names
from psserver.network.client_memory import ClientMemory, take_segment
from psserver.network.served import Served
from psserver.registry import Registered
from pswire.api import Contribution, HeartbeatRequest, PullReply, RoundReply
from pswire.encoding import messages, plain_votes
from pswire.encoding.verbs import VERBS, Verb, parse, refusal_to_pb
from pswire.errors import ConfigError, Fenced, Forbidden, InvalidRequest, MemoryLimit, PSError
from pswire.limits import BUFFER_BYTES
from pswire.network.parts import Assembly
from pswire.network.payload import Payload
from pswire.network.shared_memory import Segment, SharedArena
from pswire.network.sockets import Message, MessageKind, MessageSocket, PayloadSender
from pswire.network.tls_socket import Stream
from pswire.network.traffic import TransportName, traffic
from pswire.pb import parameter_server_pb2 as pb
from pswire.servers.votes import Testimony, Vote

log = logging.getLogger("psserver.transports")

T = TypeVar("T")

PUSH, PULL, VOTE, HEARTBEAT = VERBS["Push"], VERBS["Pull"], VERBS["Vote"], VERBS["Heartbeat"]
"""The verbs of transports."""

DRIVE = pb.HeartbeatReply(drive=True).SerializeToString()
"""The answer to a heartbeat whose process is to drive the job; to all others it is empty."""

HELLO_SECONDS = 10.0
"""Seconds within which a connection must send its hello."""

TURN = 32
"""Messages of one client that are handled at once, before other clients get their turn."""

BACKLOG = 1024
"""Buffers that a client has not taken, beyond which nothing more is read from it."""

MAX_CONNECTIONS = 8
"""Most connections of one session, which uses one, and for a moment a second; beyond it the oldest is closed."""

MAX_CALLS = 256
"""Most calls of one client that wait for their answers at the same time."""

TOO_MANY = (
    f"{MAX_CALLS} calls of this session wait on this connection, which is the limit; wait for some of them before the "
    "next one"
)

WORDS = 4
"""Signs of life that a waiting client gets per lease."""

LEAST_WORD_SECONDS = 0.05
"""Least seconds between two signs of life, whatever lease a client names."""


class Heartbeat:
    """Signs of life to a client, in equal intervals, as long as it waits. Belongs to the event loop.

    Args:
        loop: the event loop.
        waits: returns True while the client waits.
        heartbeat: sends a sign of life.

    Attributes:
        seconds: the interval; 0 if the client wants no sign of life.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, waits: Callable[[], bool], heartbeat: Callable[[], object]
    ) -> None:
        self.seconds = 0.0
        self._loop = loop
        self._waits = waits
        self._send = heartbeat
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to heartbeat, unless it does already: the client waits."""
        if self.seconds and self._next is None:
            self._next = self._loop.call_later(self.seconds, self._heartbeat)

    def _heartbeat(self) -> None:
        self._next = None
        if self._waits():
            self._send()
            self.start()

    def stop(self) -> None:
        """Heartbeats no more."""
        if self._next is not None:
            self._next.cancel()


class Connection:
    """One client's transport. Belongs to the event loop, but for the methods that answer.

    Args:
        transports: all transports of the server.
        sock: the connection.
        shared: True if data are in memory that the client will hand over.
        peer: where the client is, for messages.
        names: the names in the client's certificate; None where the transport asks for none. A client that shares
            memory shows only its token, which came over a channel that has asked.

    Attributes:
        session: the client's session; None before its hello.
    """

    def __init__(
        self, transports: Connections, sock: Stream, shared: bool, peer: str = "", names: Names = None
    ) -> None:
        self.session: int | None = None
        self._registered: Registered | None = None
        self._hello_said = pb.TransportHello()
        self.transport: TransportName = "shm" if shared else "tcp"
        self._transports, self.peer, self.names = transports, peer, names
        self._traffic = transports.traffic[self.transport]
        self.sock = sock
        self._shared, self._loop = shared, asyncio.get_running_loop()
        self._link = MessageSocket(sock)
        self._channel = PayloadSender(self._link, None, False, partial(self._soon, self._arm), self._traffic)
        self._memory: ClientMemory | None = None
        self._decoder = messages.PushDecoder()
        self._assemblies: dict[int, Assembly] = {}
        self._under_way: dict[Future[Any], int] = {}
        self._heartbeat = Heartbeat(
            self._loop, lambda: not self._closed and bool(self._under_way or self._channel.sending), self._speak
        )
        self._closed = self._armed = self._paused = False
        self._late = self._loop.call_later(HELLO_SECONDS, self._check_hello)
        self._loop.add_reader(sock, self._readable)
        if names is not None:
            self._loop.call_soon(self._readable)  # the hello may have come with the end of the handshake

    @property
    def _plain(self) -> socket.socket:
        """The socket of a client that shares memory: it stays on this host, and is not encrypted."""
        return cast(socket.socket, self.sock)

    def close(self, why: str, gone: bool = False) -> None:
        """Closes the connection. Messages that its client has not sent whole, it sends again on another one.

        Args:
            why: the reason, for the log.
            gone: True if the client is gone, and reads no memory of this server any more.
        """
        if self._closed:
            return
        self._closed = True
        self._late.cancel()
        self._heartbeat.stop()
        if not self._paused:
            self._loop.remove_reader(self.sock)
        if self._armed:
            self._loop.remove_writer(self.sock)
        if self._memory is not None:
            self._memory.close()
        self._assemblies.clear()
        self._transports.connections.remove(self)
        log.debug("a connection of session %s is closed: %s", self.session, why)
        if self._shared and self.session is not None and not gone:
            # Its client may still read answers in our memory; it closes its side afterwards.
            with contextlib.suppress(OSError):
                self._plain.shutdown(socket.SHUT_WR)
            self._transports.leaving.add(self)
            self._loop.add_reader(self.sock, self._await_end)
        else:
            self.drop()

    def _await_end(self) -> None:
        """Discards data until the client closes its side."""
        try:
            if self._plain.recv(1 << 16):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._transports.leaving.discard(self)
        self._loop.remove_reader(self.sock)
        self.drop()

    def drop(self) -> None:
        """Closes the socket and releases the memory of its answers: the client is gone, or the server ends."""
        self.sock.close()
        self._channel.close()

    def _check_hello(self) -> None:
        if self.session is None:
            self.close("no hello")

    # ---- The socket ----

    def _readable(self) -> None:
        if self._closed or self._paused:
            return
        try:
            if self._shared and self._memory is None:
                self._take_segment()
            if self._take_turn() == TURN:
                self._loop.call_soon(self._readable)  # more messages may have been read already
        except BlockingIOError:
            pass
        except ConnectionResetError as error:
            self.close(str(error), gone=True)
        except (InvalidRequest, Forbidden, ConfigError) as error:
            self._transports.refuse(self, error)
        except OSError as error:
            self.close(str(error))
        except Exception:  # a bug of ours, or no memory: the client goes another way
            log.exception("a connection is closed after an internal error")
            self.close("internal error")

    def _take_turn(self) -> int:
        """Handles some messages; returns how many."""
        count = 0
        for message in islice(self._link.receive(), TURN):
            self._handle(message)
            count += 1
            if self._closed:
                break
            if self._link.waiting > BACKLOG:
                self._pause()
            if self._paused:
                break
        return count

    def _take_segment(self) -> None:
        """Takes the segment that comes with the first byte of a client that shares memory."""
        segment = take_segment(self._plain, self._transports.in_flight + self._transports.buffer_bytes)
        self._memory = ClientMemory(segment.memory, self._transports.in_flight, lambda: self._channel)

    def _hand_over(self) -> None:
        """Hands over the memory of answers, with this side's first byte, to a client that has shown its session."""
        ring, file = self._transports.outbox()
        socket.send_fds(self._plain, [b"\0"], [file])
        self._channel = PayloadSender(self._link, ring, False, partial(self._soon, self._arm), self._traffic)

    def _soon(self, call: Callable[[], None]) -> None:
        """Calls a function on the event loop. Called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(call)

    def _arm(self) -> None:
        if not self._closed and not self._armed:
            self._armed = True
            self._loop.add_writer(self.sock, self._writable)

    def _writable(self) -> None:
        try:
            left = self._channel.flush()
        except OSError as error:
            self.close(str(error))
            return
        if not left:
            self._armed = False
            self._loop.remove_writer(self.sock)
            self._go_on()

    def _pause(self) -> None:
        """Stops reading for now."""
        if not self._paused:
            self._paused = True
            self._loop.remove_reader(self.sock)

    def _go_on(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            self._loop.add_reader(self.sock, self._readable)
            self._loop.call_soon(self._readable)

    # ---- Messages ----

    def _handle(self, message: Message) -> None:
        if self.session is None:
            self._hello(message)
            return
        match message.kind:
            case MessageKind.PUSH:
                self._call(message, self._push)
            case MessageKind.PULL:
                self._call(message, self._pull)
            case MessageKind.PART:
                self._part(message)
            case MessageKind.FREED:
                self._channel.freed(message.place)
            case MessageKind.HEARTBEAT:
                self._call(message, self._renew)
            case MessageKind.VOTE | MessageKind.PLAIN_VOTE:
                self._vote(message)
            case _:
                raise InvalidRequest(f"a client must not send {message.kind.name}")

    def _hello(self, message: Message) -> None:
        hello = parse(pb.TransportHello, message.header)
        if message.kind is not MessageKind.HELLO:
            raise InvalidRequest("a connection has not shown whose it is")
        self._registered, self._hello_said = self._transports.let_in(self, hello), hello
        if self._shared:
            self._hand_over()
        self.session = hello.session
        self._late.cancel()
        self._link.trust()
        self._heartbeat.seconds = max(hello.lease / WORDS, LEAST_WORD_SECONDS) if hello.lease > 0 else 0.0
        if hello.replaces:
            self._transports.replace(self)
        self._channel.tell(MessageKind.WELCOME)

    def _call(self, message: Message, call: Callable[[Message], None]) -> None:
        """Handles a call. Its errors are sent to the client."""
        try:
            call(message)
        except PSError as error:
            self._refuse(message.call, error)

    def _push(self, message: Message) -> None:
        data = self._data(message, 0)  # first: a refused push needs its data no more
        said, size = self._decoder.decode(message.header)
        self._check(PUSH, said)
        self._transports.check_size(size)
        payload, answer = self._payload(message, size, data), TransportAnswer(self._channel, message.call)
        future = self._transports.core.push(said, payload, answer.begin)
        del payload, data  # the round may be over: then its answer tells that they are free
        self._wait(future, message.call, partial(self._answer_round, answer))

    def _payload(self, message: Message, size: int, data: memoryview | None) -> Payload:
        """Returns the payload of a call, of which the first message, or the only one, is here."""
        if size == message.size and not message.offset:
            return Assembly.whole(size, self._traffic, data)
        assembly = self._assemblies[message.call] = Assembly(size, self._traffic)
        self._add(message, assembly, data)
        return assembly.payload

    def _answer_round(self, answer: TransportAnswer, future: Future[RoundReply]) -> None:
        del self._under_way[future]
        try:
            reply = future.result()
            self._let_rest_pass(answer.call)
            answer.send(self._transports.encoder.encode(reply), reply.payload)
        except PSError as error:
            self._channel.drop(answer.call)
            self._refuse(answer.call, error)

    def _pull(self, message: Message) -> None:
        header = parse(pb.PullRequest, message.header)
        self._check(PULL, header)
        future = self._transports.core.call(messages.PULL.from_pb(header))
        self._wait(future, message.call, partial(self._answer_pull, message.call))

    def _answer_pull(self, call: int, future: Future[PullReply]) -> None:
        del self._under_way[future]
        try:
            reply = future.result()
            self._channel.send(MessageKind.ANSWER, call, messages.pull_to_pb(reply).SerializeToString(), reply.payload)
        except PSError as error:
            self._refuse(call, error)

    def _renew(self, message: Message) -> None:
        """Answers a heartbeat, at once."""
        self._check(HEARTBEAT, self._hello_said)
        drives = self._transports.core.call(HeartbeatRequest(self._hello_said.session, -1, b"", None))
        self._channel.tell(MessageKind.ANSWER, message.call, DRIVE if drives else b"")

    def _vote(self, message: Message) -> None:
        """Takes what another server says, which has no answer."""
        said, hello = _said(message, self.session), self._hello_said
        self._transports.access.check(VOTE, hello, self.names)
        self._transports.core.hear(self._transports.access.voter(hello.session), said)

    def _check(self, verb: Verb, asked: Contribution | pb.PullRequest | pb.TransportHello) -> None:
        """Checks a call.

        Raises:
            PSError: why the call is refused.
        """
        if asked.session != self.session:
            raise Fenced(f"this connection belongs to session {self.session}, not to {asked.session}")
        self._transports.access.check_held(asked.session, self._registered)
        if self.names is not None:
            self._transports.access.check(verb, asked, self.names)
        if self._transports.ended is not None:
            raise self._transports.ended
        if len(self._under_way) >= MAX_CALLS:
            raise InvalidRequest(TOO_MANY, self._transports.task)

    def _wait(self, future: Future[T], call: int, answer: Callable[[Future[T]], object]) -> None:
        """Answers a call once its future is done, and notes until then that it is under way."""
        self._under_way[future] = call
        self._heartbeat.start()
        future.add_done_callback(answer)

    def _speak(self) -> None:
        """Sends a sign of life."""
        if not self._link.waiting:  # else the waiting messages are signs of life
            alive = pb.TransportAlive(received=self._link.received, paused=self._paused)
            self._channel.tell(MessageKind.ALIVE, header=alive.SerializeToString())

    def end(self, error: PSError) -> None:
        """Fails all calls that wait with an error."""
        for call in list(self._under_way.values()):
            self._refuse(call, error)

    def _part(self, message: Message) -> None:
        assembly = self._assemblies.get(message.call)
        data = self._data(message, assembly.payload.window if assembly else 0)
        if assembly is not None:  # else it is the rest of a failed call
            self._add(message, assembly, data)

    def _add(self, message: Message, assembly: Assembly, data: memoryview | None) -> None:
        if data is not None:
            assembly.add(message.offset, (data,))
        if assembly.payload.whole:
            self._assemblies.pop(message.call, None)  # it may have been refused by now
        elif self._memory is None and assembly.payload.crowded(
            self._transports.in_flight, partial(self._soon, self._go_on)
        ):
            self._pause()

    def _data(self, message: Message, reader: int) -> memoryview | None:
        """Returns the data of a message; of those in shared memory a reader takes so many bytes at once."""
        if message.data is not None or not message.size:
            return message.data
        if self._memory is None:
            raise InvalidRequest("data without memory")
        return self._memory.read(message.place, message.size, reader)

    def _let_rest_pass(self, call: int) -> None:
        """Reads and discards the rest of an answered call."""
        if self._assemblies.pop(call, None) is not None:
            self._soon(self._go_on)

    def _refuse(self, call: int, error: PSError) -> None:
        self._let_rest_pass(call)
        self._channel.tell(MessageKind.REFUSAL, call, refusal_to_pb(error).SerializeToString())


def _said(message: Message, session: int | None) -> Vote | Testimony:
    """Reads what another server says; raises `InvalidRequest` if it does not say it for the connection's session."""
    if message.kind is MessageKind.PLAIN_VOTE:
        return plain_votes.unpack(message.header)
    said = parse(pb.ServerVote, message.header)
    if said.session != session:
        raise InvalidRequest(f"this connection belongs to session {session}, not to {said.session}")
    return messages.said_from_pb(said)


class TransportAnswer:
    """An answer to a push on a transport, which may be sent while it grows.

    Args:
        channel: the sender.
        call: the number of the call.
    """

    def __init__(self, channel: PayloadSender, call: int) -> None:
        self.call = call
        self._channel = channel
        self._begun = False

    def begin(self, payload: Payload) -> None:
        """Begins to send a payload that grows."""
        if payload.size:
            self._begun = True
            header = pb.RoundHeader(size=payload.size).SerializeToString()
            self._channel.send(MessageKind.PART, self.call, header, payload, ends=True)

    def send(self, header: bytes, payload: Payload) -> None:
        """Sends a complete answer, or the end of a growing one."""
        if self._begun:
            self._channel.end(MessageKind.ANSWER, self.call, header)
        else:
            self._channel.send(MessageKind.ANSWER, self.call, header, payload)


class Connections:
    """The transports of all clients of a server, and what they share. Belongs to the event loop.

    Args:
        core: the server proper.
        config: the limits. Only as much of the memory for answers is taken as was once in use at a time; twice the
            largest model whose values are used in place is best.
        access: checks clients and their calls.
    """

    def __init__(self, core: Served, config: ServerConfig, access: Access) -> None:
        self.core = core
        self.access = access
        self.task = str(config.task)
        self.in_flight = config.in_flight
        limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        self.buffer_bytes = 0 if limited else BUFFER_BYTES
        self.max_payload_bytes = config.max_payload_bytes
        self.traffic = traffic()
        """Payload bytes of each transport, gRPC included."""
        self.encoder = messages.RoundEncoder()
        """Of the answers on all transports."""
        self.connections: list[Connection] = []
        self.leaving: set[Connection] = set()
        """Closed connections whose clients may still read this server's memory."""
        self.ended: PSError | None = None
        """The error that refuses every call once the server is shutting down; None until then."""
        self._shared_memory = config.shared_memory
        self._outbox: tuple[SharedArena, int] | None = None

    def let_in(self, connection: Connection, hello: pb.TransportHello) -> Registered:
        """Admits a client after its hello; raises `InvalidRequest` or `Forbidden` if that is not valid."""
        found = self.access.admit_transport(hello, connection.names)
        others = [other for other in self.connections if other.session == hello.session]
        if len(others) >= MAX_CONNECTIONS:
            others[0].close("its client has opened too many connections")
        return found

    def refuse(self, connection: Connection, error: PSError) -> None:
        """Closes a connection, since what has come on it is refused; strangers are counted, and seldom told of."""
        if connection.session is None:
            self.access.refused.note("connect", connection.peer, "transport", error.message)
        else:
            said = "a connection of session %d is closed, because it sent an invalid message: %s"
            log.warning(said, connection.session, error.message)
        connection.close(error.message)

    def replace(self, connection: Connection) -> None:
        """Closes all other connections of a session: its client has given them up, and perhaps could not say so."""
        for other in [other for other in self.connections if other.session == connection.session]:
            if other is not connection:
                other.close("its client has opened a new connection")

    def outbox(self) -> tuple[SharedArena, int]:
        """Returns the memory for answers to clients that share memory, and its file; raises `OSError` on failure."""
        if self._outbox is None:
            segment, file = Segment.make(self._shared_memory)
            self._outbox = SharedArena(segment.memory), file
        return self._outbox

    def check_size(self, size: int) -> None:
        """Raises `MemoryLimit` for a message whose payload is too large."""
        if size > self.max_payload_bytes:
            raise MemoryLimit(
                f"a message of {size} bytes exceeds this server's limit of {self.max_payload_bytes}; give the server "
                "more memory, or add servers",
                self.task,
            )

    def end(self, error: PSError) -> None:
        """Fails all calls that wait, and all that come, with an error."""
        self.ended = error
        for connection in list(self.connections):
            connection.end(error)

    def close(self) -> None:
        """Closes all connections, and releases the memory for answers."""
        for connection in list(self.connections):
            connection.close("the server is shutting down", gone=True)
        for connection in self.leaving:
            asyncio.get_running_loop().remove_reader(connection.sock)
            connection.drop()
        self.leaving.clear()
        if self._outbox is not None:
            os.close(self._outbox[1])
            self._outbox = None
