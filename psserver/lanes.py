"""The lanes of a server: pushes and pulls over plain sockets, their data in the socket or in shared memory.

One event loop serves all clients. What a client sends is read into memory once, or not at all where the memory is
shared; answers are sent by the thread that makes them, as far as the system takes them, and then by the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import islice
from pathlib import Path

from psserver import names
from pswire import replies
from pswire.api import ParameterServer, PullReply, RoundReply
from pswire.cluster import Task
from pswire.errors import Fenced, InvalidRequest, MemoryLimit, PSError
from pswire.lanes.rings import CLIENT_BYTES, Mirror, Ring, Segment
from pswire.lanes.sockets import Channel, Kind, Link, Message, tune
from pswire.payload import Assembly, Payload
from pswire.pb import parameter_server_pb2 as pb
from pswire.wire import parse, refusal_to_pb

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""How long a connection may take to say who it is."""

MAX_STRANGERS = 256
"""Connections that have not said who they are; the oldest has to go."""

SILENCE_SECONDS = 30.0
"""How long a client's host may not acknowledge anything."""

TURN = 32
"""Messages of one client that are taken at once: then it is the turn of others."""

BACKLOG = 1024
"""Buffers that a client has not taken, beyond which it is not listened to."""


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

    def token(self, session: int) -> bytes:
        """What the client of a session says to show that it is."""
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
        asyncio.get_running_loop().add_reader(listener, self._accept, listener, shared)

    def _accept(self, listener: socket.socket, shared: bool) -> None:
        try:
            sock, _ = listener.accept()
            if not shared:
                tune(sock, SILENCE_SECONDS)
        except OSError:
            return
        strangers = [connection for connection in self.connections if connection.session is None]
        if len(strangers) >= MAX_STRANGERS:
            strangers[0].close("too many connections that say nothing")
        self.connections.append(Connection(self, sock, shared))

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
            connection.close("the server ends")
        if self._outbox is not None:
            os.close(self._outbox[1])
            self._outbox = None


class Connection:
    """One client's lane. Belongs to the event loop, but for what answers.

    Args:
        lanes: who has accepted it.
        sock: the connection.
        shared: whether data are in memory that the client will hand over.
    """

    def __init__(self, lanes: Lanes, sock: socket.socket, shared: bool) -> None:
        self.session: int | None = None
        """Whose it is, once it has said so."""
        self._lanes = lanes
        self._sock = sock
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._link = Link(sock)
        self._channel = Channel(self._link, None, False, self._blocked)
        self._mirror: Mirror | None = None
        self._freed: deque[int] = deque()
        self._assemblies: dict[int, Assembly] = {}
        self._closed = self._armed = self._paused = False
        self._late = self._loop.call_later(HELLO_SECONDS, self._check_hello)
        self._loop.add_reader(sock, self._readable)

    def close(self, why: str) -> None:
        """Ends the connection; what its client has not sent whole, it sends again on another."""
        if self._closed:
            return
        self._closed = True
        self._late.cancel()
        if not self._paused:
            self._loop.remove_reader(self._sock)
        if self._armed:
            self._loop.remove_writer(self._sock)
        self._sock.close()
        self._channel.close()
        self._mirror = None  # else only a collection of garbage would give its memory back
        self._assemblies.clear()
        self._lanes.connections.remove(self)
        log.debug("a lane of session %s is closed: %s", self.session, why)

    def _check_hello(self) -> None:
        if self.session is None:
            self.close("no hello")

    # ---- The socket ----

    def _readable(self) -> None:
        if self._closed or self._paused:
            return
        try:
            if self._shared and self._mirror is None:
                self._take_segment()
            if self._take_turn() == TURN:
                self._loop.call_soon(self._readable)  # there may be more that was read already
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(str(error))
        except InvalidRequest as error:
            log.warning("a lane is closed, since what came is malformed: %s", error.message)
            self.close(error.message)

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
        """The first byte of a client that shares memory brings its segment."""
        byte, files, _, _ = socket.recv_fds(self._sock, 1, 1)
        try:
            if not byte:
                raise ConnectionResetError("it was closed at once")
            if len(files) != 1:
                raise InvalidRequest("no memory was handed over")
            segment = Segment.take(files[0], self._lanes.in_flight)
        finally:
            for file in files:
                os.close(file)
        self._mirror = Mirror(segment.memory, self._let_go)

    def _hand_over(self) -> None:
        """Our first byte brings the memory in which answers are: nobody gets it who has not shown whose it is."""
        ring, file = self._lanes.outbox()
        socket.send_fds(self._sock, [b"\0"], [file])
        self._channel = Channel(self._link, ring, False, self._blocked)

    def _blocked(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._arm)

    def _arm(self) -> None:
        if not self._closed and not self._armed:
            self._armed = True
            self._loop.add_writer(self._sock, self._writable)

    def _writable(self) -> None:
        try:
            left = self._channel.flush()
        except OSError as error:
            self.close(str(error))
            return
        if not left:
            self._armed = False
            self._loop.remove_writer(self._sock)
            self._go_on()

    def _pause(self) -> None:
        """Reads nothing more for now."""
        if not self._paused:
            self._paused = True
            self._loop.remove_reader(self._sock)

    def _go_on(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            self._loop.add_reader(self._sock, self._readable)
            self._loop.call_soon(self._readable)

    def _go_on_soon(self) -> None:
        """Reads on; told by any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._go_on)

    def _let_go(self, place: int) -> None:
        """Data are needed no more; told by any thread, at any time."""
        self._freed.append(place)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._tell_freed)

    def _tell_freed(self) -> None:
        places = [self._freed.popleft() for _ in range(len(self._freed))]
        if places and not self._closed:
            self._channel.let_go(places)

    # ---- Messages ----

    def _handle(self, message: Message) -> None:
        if self.session is None:
            self._hello(message)
            return
        match message.kind:
            case Kind.PUSH:
                self._call(message, self._push)
            case Kind.PULL:
                self._call(message, self._pull)
            case Kind.PART:
                self._part(message)
            case Kind.FREED:
                self._channel.freed(message.place)
            case _:
                raise InvalidRequest(f"a client sends no {message.kind.name}")

    def _hello(self, message: Message) -> None:
        hello = parse(pb.LaneHello, message.header)
        if message.kind is not Kind.HELLO or not self._lanes.owns(hello.session, hello.token):
            raise InvalidRequest("a connection has not shown whose it is")
        if self._shared:
            self._hand_over()
        self.session = hello.session
        self._late.cancel()
        self._link.trust()
        self._channel.tell(Kind.WELCOME)

    def _call(self, message: Message, call: Callable[[Message], None]) -> None:
        """Whatever goes wrong with a call is told to the client."""
        try:
            call(message)
        except PSError as error:
            self._refuse(message.call, error)

    def _push(self, message: Message) -> None:
        data = self._data(message, 0)  # first: those of a push that is refused are needed no more
        header = parse(pb.PushHeader, message.header)
        self._check_session(header.session)
        if header.size > self._lanes.max_payload_bytes:
            raise MemoryLimit(
                f"a message of {header.size} bytes is above this server's limit of {self._lanes.max_payload_bytes}; "
                "give the server more memory, or spread the variables over more servers",
                self._lanes.task,
            )
        assembly = Assembly(header.size)
        self._assemblies[message.call] = assembly
        self._add(message, assembly, data)
        answer = _Answer(self._channel, message.call)
        future = self._lanes.core.push(replies.contribution_from_pb(header), assembly.payload, answer.begin)
        future.add_done_callback(partial(self._answer_round, answer))

    def _answer_round(self, answer: _Answer, future: Future[RoundReply]) -> None:
        try:
            reply = future.result()
            answer.send(replies.round_to_pb(reply).SerializeToString(), reply.payload)
        except PSError as error:
            self._channel.drop(answer.call)
            self._refuse(answer.call, error)

    def _pull(self, message: Message) -> None:
        header = parse(pb.PullRequest, message.header)
        self._check_session(header.session)
        future = self._lanes.core.pull(header.session, tuple(header.variables), header.after)
        future.add_done_callback(partial(self._answer_pull, message.call))

    def _answer_pull(self, call: int, future: Future[PullReply]) -> None:
        try:
            reply = future.result()
            self._channel.send(Kind.ANSWER, call, replies.pull_to_pb(reply).SerializeToString(), reply.payload)
        except PSError as error:
            self._refuse(call, error)

    def _check_session(self, session: int) -> None:
        if session != self.session:
            raise Fenced(f"this lane is of session {self.session}, not of {session}")

    def _part(self, message: Message) -> None:
        assembly = self._assemblies.get(message.call)
        data = self._data(message, assembly.payload.reader if assembly else 0)
        if assembly is not None:  # else it is what is left of a call that has failed
            self._add(message, assembly, data)

    def _add(self, message: Message, assembly: Assembly, data: memoryview | None) -> None:
        if data is not None:
            assembly.add(message.offset, (data,))
        if assembly.payload.whole:
            del self._assemblies[message.call]
        elif self._mirror is None and assembly.payload.crowded(self._lanes.in_flight, self._go_on_soon):
            self._pause()

    def _data(self, message: Message, reader: int) -> memoryview | None:
        if message.data is not None or not message.size:
            return message.data
        if self._mirror is None:
            raise InvalidRequest("data without memory")
        return self._mirror.read(message.place, message.size, reader)

    def _refuse(self, call: int, error: PSError) -> None:
        self._assemblies.pop(call, None)
        self._go_on_soon()  # what is left of the call is read, and thrown away
        self._channel.tell(Kind.REFUSAL, call, refusal_to_pb(error).SerializeToString())


class _Answer:
    """An answer to a push, which may be sent while it is made.

    Args:
        channel: where to.
        call: to which call.
    """

    def __init__(self, channel: Channel, call: int) -> None:
        self.call = call
        self._channel = channel
        self._begun = False

    def begin(self, payload: Payload) -> None:
        """It begins to grow."""
        if payload.size:
            self._begun = True
            header = pb.RoundHeader(size=payload.size).SerializeToString()
            self._channel.send(Kind.PART, self.call, header, payload, ends=True)

    def send(self, header: bytes, payload: Payload) -> None:
        """All of it is there."""
        if self._begun:
            self._channel.end(Kind.ANSWER, self.call, header)
        else:
            self._channel.send(Kind.ANSWER, self.call, header, payload)
