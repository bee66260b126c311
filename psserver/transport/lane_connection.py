"""One client's lane, as the server has it: messages in, calls of the core, answers out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar, cast

from psserver.transport.access import Access, Names
from psserver.transport.client_memory import ClientMemory
from pswire.api import ParameterServer, PullReply, RoundReply
from pswire.encoding import messages
from pswire.encoding.protocol import check_protocol
from pswire.encoding.verbs import VERBS, Verb, parse, refusal_to_pb
from pswire.errors import ConfigError, Fenced, Forbidden, InvalidRequest, PSError
from pswire.pb import parameter_server_pb2 as pb
from pswire.transport.payload import Assembly, Payload
from pswire.transport.shared_memory import Segment, SharedArena
from pswire.transport.sockets import Kind, Message, MessageSocket, PayloadSender
from pswire.transport.tls_socket import Stream
from pswire.transport.traffic import LaneName, Traffic

log = logging.getLogger("psserver.lanes")

T = TypeVar("T")

PUSH, PULL = VERBS["Push"], VERBS["Pull"]
"""The verbs that lanes speak."""

HELLO_SECONDS = 10.0
"""How long a connection may take to say who it is."""

TURN = 32
"""Messages of one client that are taken at once: then it is the turn of others."""

BACKLOG = 1024
"""Buffers that a client has not taken, beyond which it is not listened to."""

MAX_CALLS = 256
"""Calls of one client that may wait for their answers at a time."""

WORDS = 4
"""How often a client is told in its lease that the server is there."""

LEAST_WORD_SECONDS = 0.05
"""How often at most, whatever lease a client says that it has."""


class Hub(Protocol):
    """Who accepts the connections, and has what they share. All of it belongs to the event loop."""

    core: ParameterServer
    access: Access
    task: str
    in_flight: int
    traffic: Mapping[LaneName, Traffic]
    ended: PSError | None
    connections: list[Connection]
    leaving: set[Connection]

    def let_in(self, connection: Connection, hello: pb.LaneHello) -> None:
        """Refuses a client that does not show whose it is."""

    def replace(self, connection: Connection) -> None:
        """Ends all others of its session."""

    def outbox(self) -> tuple[SharedArena, int]:
        """The memory for answers to clients that share memory, and its file."""

    def assembly(self, size: int, lane: LaneName) -> Assembly:
        """A new message's payload."""


class Connection:
    """One client's lane. Belongs to the event loop, but for what answers.

    Args:
        lanes: who has accepted it.
        sock: the connection.
        shared: whether data are in memory that the client will hand over.
        names: of the client's certificate; None where the lane asks for none. A client that shares memory shows its
            token alone, which came over a channel that has asked.
    """

    def __init__(self, lanes: Hub, sock: Stream, shared: bool, names: Names = None) -> None:
        self.session: int | None = None
        """Whose it is, once it has said so."""
        self.lane: LaneName = "shm" if shared else "tcp"
        self.names = names
        self._lanes = lanes
        self._traffic = lanes.traffic[self.lane]
        self.sock = sock
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._link = MessageSocket(sock)
        self._channel = PayloadSender(self._link, None, False, self._blocked, self._traffic)
        self._memory: ClientMemory | None = None
        self._assemblies: dict[int, Assembly] = {}
        self._under_way: dict[Future[Any], int] = {}
        self._word_seconds = 0.0  # pause between two words to a client that waits; 0: it wants none
        self._word: asyncio.TimerHandle | None = None  # the next
        self._closed = self._armed = self._paused = False
        self._late = self._loop.call_later(HELLO_SECONDS, self._check_hello)
        self._loop.add_reader(sock, self._readable)
        if names is not None:
            self._loop.call_soon(self._readable)  # the hello may have come with the end of the handshake

    @property
    def _plain(self) -> socket.socket:
        """The connection of a client that shares memory: it stays on this host, and is not encrypted."""
        return cast(socket.socket, self.sock)

    def close(self, why: str, gone: bool = False) -> None:
        """Ends the connection; what its client has not sent whole, it sends again on another.

        Args:
            why: for the log.
            gone: whether the client is, and looks at none of our memory any more.
        """
        if self._closed:
            return
        self._closed = True
        self._late.cancel()
        if self._word is not None:
            self._word.cancel()
        if not self._paused:
            self._loop.remove_reader(self.sock)
        if self._armed:
            self._loop.remove_writer(self.sock)
        if self._memory is not None:
            self._memory.close()
        self._assemblies.clear()
        self._lanes.connections.remove(self)
        log.debug("a lane of session %s is closed: %s", self.session, why)
        if self._shared and self.session is not None and not gone:
            # Its client may look at answers in our memory, and ends its side when it does no more.
            with contextlib.suppress(OSError):
                self._plain.shutdown(socket.SHUT_WR)
            self._lanes.leaving.add(self)
            self._loop.add_reader(self.sock, self._await_end)
        else:
            self.drop()

    def _await_end(self) -> None:
        """Throws away what comes, until the client ends its side."""
        try:
            if self._plain.recv(1 << 16):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._lanes.leaving.discard(self)
        self._loop.remove_reader(self.sock)
        self.drop()

    def drop(self) -> None:
        """The client is gone, or the server ends: its places are free."""
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
                self._loop.call_soon(self._readable)  # there may be more that was read already
        except BlockingIOError:
            pass
        except ConnectionResetError as error:
            self.close(str(error), gone=True)
        except (InvalidRequest, Forbidden, ConfigError) as error:
            log.warning("a lane is closed, since what came is refused: %s", error.message)
            self.close(error.message)
        except OSError as error:
            self.close(str(error))
        except Exception:  # a bug of ours, or no memory: the client goes another way
            log.exception("a lane is closed")
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
        """The first byte of a client that shares memory brings its segment."""
        byte, files, _, _ = socket.recv_fds(self._plain, 1, 1)
        try:
            if not byte:
                raise ConnectionResetError("it was closed at once")
            if len(files) != 1:
                raise InvalidRequest("no memory was handed over")
            segment = Segment.take(files[0], self._lanes.in_flight)
        finally:
            for file in files:
                os.close(file)
        self._memory = ClientMemory(segment.memory, lambda places: self._channel.let_go(places))

    def _hand_over(self) -> None:
        """Our first byte brings the memory in which answers are: nobody gets it who has not shown whose it is."""
        ring, file = self._lanes.outbox()
        socket.send_fds(self._plain, [b"\0"], [file])
        self._channel = PayloadSender(self._link, ring, False, self._blocked, self._traffic)

    def _blocked(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._arm)

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
        """Reads nothing more for now."""
        if not self._paused:
            self._paused = True
            self._loop.remove_reader(self.sock)

    def _go_on(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            self._loop.add_reader(self.sock, self._readable)
            self._loop.call_soon(self._readable)

    def _go_on_soon(self) -> None:
        """Reads on; told by any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._go_on)

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
        if message.kind is not Kind.HELLO:
            raise InvalidRequest("a connection has not shown whose it is")
        check_protocol(hello.protocol, f"session {hello.session}", self._lanes.task)
        self._lanes.let_in(self, hello)
        if self._shared:
            self._hand_over()
        self.session = hello.session
        self._late.cancel()
        self._link.trust()
        if hello.lease > 0:
            self._word_seconds = max(hello.lease / WORDS, LEAST_WORD_SECONDS)
        if hello.replaces:
            self._lanes.replace(self)
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
        self._check(PUSH, header)
        assembly = self._lanes.assembly(header.size, self.lane)
        self._assemblies[message.call] = assembly
        self._add(message, assembly, data)
        answer = LaneAnswer(self._channel, message.call)
        future = self._lanes.core.push(messages.contribution_from_pb(header), assembly.payload, answer.begin)
        self._wait(future, message.call, partial(self._answer_round, answer))

    def _answer_round(self, answer: LaneAnswer, future: Future[RoundReply]) -> None:
        try:
            reply = future.result()
            self._let_rest_pass(answer.call)
            answer.send(messages.round_to_pb(reply).SerializeToString(), reply.payload)
        except PSError as error:
            self._channel.drop(answer.call)
            self._refuse(answer.call, error)

    def _pull(self, message: Message) -> None:
        header = parse(pb.PullRequest, message.header)
        self._check(PULL, header)
        future = self._lanes.core.pull(header.session, tuple(header.variables), header.after)
        self._wait(future, message.call, partial(self._answer_pull, message.call))

    def _answer_pull(self, call: int, future: Future[PullReply]) -> None:
        try:
            reply = future.result()
            self._channel.send(Kind.ANSWER, call, messages.pull_to_pb(reply).SerializeToString(), reply.payload)
        except PSError as error:
            self._refuse(call, error)

    def _check(self, verb: Verb, header: pb.PushHeader | pb.PullRequest) -> None:
        """Raises why a call is not taken."""
        if header.session != self.session:
            raise Fenced(f"this lane is of session {self.session}, not of {header.session}")
        self._lanes.access.check(verb, header, self.names)
        if self._lanes.ended is not None:
            raise self._lanes.ended
        if len(self._under_way) >= MAX_CALLS:
            raise InvalidRequest(
                f"{MAX_CALLS} calls of this session wait on its lane already; wait for some of them before the next",
                self._lanes.task,
            )

    def _wait(self, future: Future[T], call: int, answer: Callable[[Future[T]], object]) -> None:
        """Answers a call when its future is done."""
        self._under_way[future] = call
        if self._word_seconds and self._word is None:
            self._word = self._loop.call_later(self._word_seconds, self._speak)
        future.add_done_callback(self._under_way.pop)
        future.add_done_callback(answer)

    def _speak(self) -> None:
        """Says that the server is there, as long as a call is under way."""
        self._word = None
        if self._closed or not (self._under_way or self._channel.sending):
            return
        if not self._link.waiting:  # else what waits to be sent says as much
            alive = pb.LaneAlive(received=self._link.received, paused=self._paused)
            self._channel.tell(Kind.ALIVE, header=alive.SerializeToString())
        self._word = self._loop.call_later(self._word_seconds, self._speak)

    def end(self, error: PSError) -> None:
        """Answers all calls that wait with an error."""
        for call in list(self._under_way.values()):
            self._refuse(call, error)

    def _part(self, message: Message) -> None:
        assembly = self._assemblies.get(message.call)
        data = self._data(message, assembly.payload.window if assembly else 0)
        if assembly is not None:  # else it is what is left of a call that has failed
            self._add(message, assembly, data)

    def _add(self, message: Message, assembly: Assembly, data: memoryview | None) -> None:
        if data is not None:
            assembly.add(message.offset, (data,))
        if assembly.payload.whole:
            self._assemblies.pop(message.call, None)  # it may have been refused by now
        elif self._memory is None and assembly.payload.crowded(self._lanes.in_flight, self._go_on_soon):
            self._pause()

    def _data(self, message: Message, reader: int) -> memoryview | None:
        if message.data is not None or not message.size:
            return message.data
        if self._memory is None:
            raise InvalidRequest("data without memory")
        return self._memory.read(message.place, message.size, reader)

    def _let_rest_pass(self, call: int) -> None:
        """What is left of a call that is answered is read, and thrown away."""
        if self._assemblies.pop(call, None) is not None:
            self._go_on_soon()

    def _refuse(self, call: int, error: PSError) -> None:
        self._let_rest_pass(call)
        self._channel.tell(Kind.REFUSAL, call, refusal_to_pb(error).SerializeToString())


class LaneAnswer:
    """An answer to a push on its way over a lane, which may be sent while it grows.

    Args:
        channel: where to.
        call: to which call.
    """

    def __init__(self, channel: PayloadSender, call: int) -> None:
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
