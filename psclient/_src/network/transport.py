"""One transport of a client: pushes and pulls over a plain socket, their data in the socket or in shared memory.

Calls are sent by the thread that makes them, as far as the system takes them; a thread for each transport sends the
rest. It also receives, unless a caller that waits has taken that over (`TransportReader`): an answer then reaches it
without a detour through another thread.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from psclient._src.network import forks
from psclient._src.network.silence import Silence
from pswire.encoding.verbs import parse, refusal_from_pb
from pswire.errors import InvalidRequest, PSError
from pswire.network.futures import LeanFuture
from pswire.network.parts import Assembly
from pswire.network.payload import EMPTY, Payload
from pswire.network.shared_memory import CLIENT_BYTES, Segment, SharedArena, SharedView, SlotHold
from pswire.network.sockets import Message, MessageKind, MessageSocket, PayloadSender, connect
from pswire.network.tls_socket import Stream
from pswire.network.traffic import Traffic, TransportName
from pswire.pb import parameter_server_pb2 as pb

T = TypeVar("T")

SHARED = "/dev/shm"
"""Folder of memory that a server and its clients share where the shm transport works."""

CONNECT_SECONDS = 5.0
"""Seconds that it may take to connect, and to be welcomed."""


ENOUGH = 8
"""Divisor of the server's memory: once that part of it is free again, the server is told at once."""

TELL_SECONDS = 0.25
"""Seconds after which the server is told of free memory, even if it is little and no call has told it."""


class TransportLost(Exception):
    """A transport is broken, or cannot be opened: what was under way on it goes another way."""


Header = pb.RoundHeader | pb.PullHeader | pb.HeartbeatReply

ANSWERS: dict[MessageKind, type[Header]] = {
    MessageKind.PUSH: pb.RoundHeader,
    MessageKind.PULL: pb.PullHeader,
    MessageKind.HEARTBEAT: pb.HeartbeatReply,
}
"""The header of the answer to each kind of call."""


@dataclass(frozen=True)
class Offer:
    """A server's offer of transports to a session.

    Attributes:
        session: number of the session that the transports belong to.
        token: proves that a connection is this session's.
        host, port: address of the tcp transport; the port is 0 where there is none.
        path: path of the shm transport's socket; "" where there is none.
        in_flight: bytes of a contribution that the server holds before they are used.
        name: the name that the server's certificate must have.
        buffer_bytes: bytes that this process's shared memory may have behind those for copies.
        tls: makes the context that encrypts the tcp transport; None for none.
    """

    session: int
    token: bytes
    host: str
    port: int
    path: str
    in_flight: int = CLIENT_BYTES
    name: str = ""
    buffer_bytes: int = 0
    tls: Callable[[], ssl.SSLContext] | None = None


class CallOwner(Protocol):
    """The maker of a call, which may make it in another way. Any thread calls its methods, and they do not wait."""

    def lost(self, call: TransportCall[Any], transport: Transport) -> None:
        """A transport is lost on which a call was under way."""

    def refused(self, call: TransportCall[Any], error: PSError) -> bool:
        """Returns whether it makes a call again that a server has refused."""


class TransportCall(LeanFuture[T]):
    """A call of a server, and its answer. It outlives the transport that it is made on.

    Args:
        session: number of the session that makes it.
        kind: kind of its message.
        header: header of its message.
        payload: payload of its message; it may still grow.
        decode: reads the answer, of a header and a payload.
        owner: told where it comes to no answer on a transport; by default the answer is that error.

    Attributes:
        session: as the argument.
        decode: as the argument.
        said: kind, header and payload of its message, as long as it may have to be sent again.
    """

    def __init__(
        self,
        session: int,
        kind: MessageKind,
        header: bytes,
        payload: Payload,
        decode: Callable[[Any, Payload], T],
        owner: CallOwner | None = None,
    ) -> None:
        super().__init__()
        self.session = session
        self.decode = decode
        self.said = kind, header, payload
        self._owner = owner

    def settle(self, work: Callable[[], T]) -> None:
        """Answers it with the result of a function, or with what it raises."""
        try:
            result = work()
        except BaseException as error:  # whatever it is, it belongs to the caller that waits
            self.fail(error)
            del self, work  # else the error, by its traceback, and the call hold each other
        else:
            self._let_go()
            self._end(result, None)

    def fail(self, error: BaseException) -> None:
        """Answers it with an error."""
        self._let_go()
        self.set_exception(error)

    def refuse(self, error: PSError) -> None:
        """Answers it with the error of a server, unless it is made again."""
        if self._owner is None or not self._owner.refused(self, error):
            self.fail(error)

    def lose(self, transport: Transport, why: str) -> None:
        """Goes on without a transport, which is lost."""
        if self._owner is None:
            self.fail(TransportLost(why))
        else:
            self._owner.lost(self, transport)

    def _let_go(self) -> None:
        """Lets go of what it has sent, before anybody sees the answer: that memory may serve the next call."""
        self.said = self.said[0], b"", EMPTY


@dataclass
class _Parts:
    """An answer that comes in parts.

    Attributes:
        assembly: collects the payload.
        header: its header, once it is there.
    """

    assembly: Assembly
    header: Header | None = None


class Transport:
    """A connection to a server's transport. May be used by any thread.

    Args:
        name: kind of the transport, "tcp" or "shm".
        offer: the server's offer.
        lease: seconds of silence after which it is broken.
        traffic: counts payload bytes.
        replaces: True if it takes the place of all connections that the server has of this session.

    Attributes:
        answered: number of answered calls.
        file: the socket's file descriptor, for selectors.

    Raises:
        TransportLost: the transport cannot be opened; the message says why.
    """

    def __init__(
        self, name: TransportName, offer: Offer, lease: float, traffic: Traffic, replaces: bool = False
    ) -> None:
        self.name = name
        self._silence = Silence(lease)
        self._traffic = traffic
        self.answered = 0
        self._calls: dict[int, TransportCall[Any]] = {}
        self._parts: dict[int, _Parts] = {}  # of these calls; of the thread that receives
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the calls, and that it is lost once
        self._why: str | None = None
        self._mirror, self._enough = cast(SharedView | None, None), 0
        self._tell_at = 0.0  # when the server is told of memory that is free again, while `_watching`
        self._over = self._rung = self._blocked = self._watching = False
        self._reading = threading.Lock()  # held by who receives
        self._leader: Callable[[], object] | None = None  # wakes a caller that has taken it
        self._heeding = threading.RLock()  # guards what the thread heeds
        self._welcome = threading.Event()  # or the end
        self._welcomed = False
        self._bell, self._rope = socket.socketpair()
        self._rope.setblocking(False)
        self._sockets: list[Stream] = [self._bell, self._rope]
        said = pb.TransportHello(session=offer.session, token=offer.token, lease=lease, replaces=replaces)
        hello = Message(MessageKind.HELLO, header=said.SerializeToString()).head()
        try:
            self._sock = _connect(name, offer, lease)
            self._sockets.append(self._sock)
            ring = self._introduce(hello, offer) if name == "shm" else None
            if ring is None:
                self._sock.sendall(hello)
            self._link = MessageSocket(self._sock)
            self._link.trust()
            self._channel = PayloadSender(self._link, ring, True, self._ring_bell, traffic)
            self.file = self._sock.fileno()
            self._events = select.epoll()
            self._events.register(self._bell, select.EPOLLIN)
            self._events.register(self._sock, select.EPOLLIN)
        except (OSError, InvalidRequest) as error:
            self._drop()
            raise TransportLost(_why(name, offer, error)) from None
        _TRANSPORTS.add(self)
        threading.Thread(target=self._run, name=f"transport {name}", daemon=True).start()
        self._welcome.wait(CONNECT_SECONDS)
        if not self._welcomed:
            self.close(self._why or f"{offer.host}:{offer.port} does not answer")
            raise TransportLost(self._why)

    def _introduce(self, hello: bytes, offer: Offer) -> SharedArena:
        """Says who it is, and hands over memory; the answer's first byte brings the server's."""
        try:
            segment, file = Segment.make(offer.in_flight + offer.buffer_bytes)
        except (OSError, OverflowError):  # the address space of this process is limited
            segment, file = Segment.make(offer.in_flight)
        files: list[int] = [file]
        try:
            sock = cast(socket.socket, self._sock)  # memory is shared on this host alone, by plain sockets
            socket.send_fds(sock, [b"\0" + hello], [file])
            _, taken, _, _ = socket.recv_fds(sock, 1, 1)
            files += taken
            if len(taken) != 1:
                raise OSError("the server did not pass its shared memory")
            self._mirror = SharedView(Segment.take(taken[0]).memory, self._let_go)
            self._enough = self._mirror.size // ENOUGH
        finally:
            for each in files:
                os.close(each)
        return SharedArena(segment.memory, offer.in_flight)

    def _let_go(self, place: int, size: int) -> None:
        """Releases data. Called from any thread, at any time.

        The next call tells the server, or the transport's thread where none is made soon, or there is much to tell.
        """
        if self._channel.let_go(place, size) > self._enough or not self._watching:
            self._ring_bell()
        self._leave()

    def _leave(self) -> None:
        """Leaves the server once nobody looks at its memory any more: until then it writes nothing else there."""
        if not self._over:
            return
        _LINGERING.add(self)  # first: another thread may let go of the last place, and find it there
        mirror = self._mirror
        if mirror is None or not mirror.looked_at:
            self._mirror = None  # else only a collection of garbage would give its memory back
            _LINGERING.discard(self)
            self._drop()

    def reserve(self, size: int) -> tuple[memoryview, int] | None:
        """Reserves memory from which payloads are sent without a copy, as `SharedArena.reserve`; None where none is."""
        return self._channel.reserve(size)

    def send(self, call: TransportCall[Any]) -> None:
        """Makes a call, which goes on without this transport if that is lost."""
        kind, header, payload = call.said
        number = next(self._numbers)
        with self._lock:
            if (why := self._why) is None:
                self._calls[number] = call
        if why is None:
            self._channel.send(kind, number, header, payload)
        else:
            call.lose(self, why)

    def close(self, why: str) -> None:
        """Ends the transport; calls under way raise `TransportLost`."""
        with self._lock:
            if self._why is not None:
                return
            self._why = why
            calls, self._calls = list(self._calls.values()), {}
        self._welcome.set()
        self._ring_bell()
        if (wake := self._leader) is not None:
            wake()
        for call in calls:
            call.lose(self, why)

    def silent(self) -> str:
        """Takes a heartbeat's answer, which came by gRPC; returns the reason if this transport is broken, else ""."""
        # Of a call that has not left the server knows nothing.
        with self._lock:
            calls = set(self._calls)
        waiting = bool(calls and calls - self._channel.unsent())
        return self._silence.heartbeat(waiting, time.monotonic())

    def _drop(self) -> None:
        for sock in self._sockets:
            sock.close()

    def keep(self) -> list[SlotHold]:
        """Holds the memory that a fork of the process may read, unchanged until the fork is gone.

        Called before the fork.
        """
        mirror = self._mirror
        return mirror.keep() if mirror is not None else []

    def forget(self) -> None:
        """Drops the transport in a fork of the process: it belongs to the process that opened it."""
        self._why = "a fork cannot use it"
        self._drop()

    # ---- A caller that receives in the thread's place ----

    @property
    def lost(self) -> bool:
        """True if it is broken, or closed."""
        return self._why is not None

    @property
    def waits(self) -> bool:
        """True if a call is under way."""
        return bool(self._calls)

    def take_over(self, wake: Callable[[], object]) -> bool:
        """Makes the calling thread the one that receives, until `give_back`.

        The transport's own thread ignores the socket until then.

        Args:
            wake: called by any thread once the transport is lost; then it must be given back soon.

        Returns:
            False, having changed nothing, if another thread receives right now, or the transport is lost.
        """
        with self._heeding:  # the thread waits for it, and does not look again and again
            if self._why is not None or not self._reading.acquire(blocking=False):
                return False
            self._leader = wake
            self._heed()
        if self._why is not None:  # since then, and who closed it may not have seen the caller
            self.give_back(wake)
        return self._leader == wake

    def give_back(self, wake: Callable[[], object]) -> None:
        """Makes the transport's own thread receive again, if a caller has: what comes while nobody waits is for it."""
        if self._leader != wake:
            return
        self._leader = None
        self._reading.release()
        self._heed()

    def read(self) -> bool:
        """Handles received data in the thread that has taken the transport over; closes a broken transport.

        Returns:
            False if the transport is lost.
        """
        try:
            self._receive()
        except (OSError, PSError) as error:
            self.close(str(error))
        except BaseException:
            # An interrupt, perhaps in the middle of a message: the rest of it would have no beginning.
            self.close("the process was interrupted while reading from it")
            raise
        return self._why is None

    # ---- The thread of the transport ----

    def _heed(self) -> None:
        """Tells the thread what it is to heed now: what comes, unless a caller receives; room for what it sends."""
        with self._heeding:
            if not self._events.closed:
                heeded = (select.EPOLLIN * (self._leader is None)) | (select.EPOLLOUT * self._blocked)
                self._events.modify(self._sock, heeded)

    def _ring_bell(self) -> None:
        if not self._rung:
            self._rung = True
            with suppress(OSError):  # nobody listens any more
                self._rope.send(b"\0")

    def _run(self) -> None:
        try:
            while self._why is None:
                self._turn()
        except (OSError, PSError) as error:
            self.close(str(error))
        finally:
            self.close("it has failed")  # whatever happened: nobody waits for what cannot come
            with self._reading, self._heeding:  # a caller that receives was told, and gives it back
                self._events.close()
            self._channel.close()
            self._over = True
            self._leave()

    def _turn(self) -> None:
        for file, events in self._events.poll(TELL_SECONDS if self._watching else None):
            if file == self._bell.fileno():
                self._bell.recv(4096)
                self._rung = False  # first: what comes from now on rings again
                self._watch()
                self._flush()
            elif events & select.EPOLLOUT:
                self._flush()
            if file == self._bell.fileno() or not events & ~select.EPOLLOUT:
                continue
            # The end of a connection is told whatever is heeded; a caller that receives finds it, too, and closes it.
            if self._reading.acquire(blocking=bool(events & (select.EPOLLHUP | select.EPOLLERR))):
                try:
                    self._receive()
                finally:
                    self._reading.release()
            else:
                with self._heeding:  # until a caller has said that it receives
                    pass

        if self._watching and time.monotonic() >= self._tell_at:
            self._watching = False  # first: what is freed from now on rings
            self._channel.tell_freed()

    def _watch(self) -> None:
        """Sees to it that the server is told of free memory at some time, or now if it is much."""
        now = time.monotonic()
        if self._channel.untold > self._enough:
            self._tell_at = now
        elif not self._watching:
            self._tell_at = now + TELL_SECONDS
        self._watching = True

    def _flush(self) -> None:
        """Goes on with what the system did not take; heeds the room for it as long as something is left."""
        left = self._channel.flush()
        if left != self._blocked:
            self._blocked = left
            self._heed()

    def _receive(self) -> None:
        """Handles what has come. Called by the thread that holds `_reading`."""
        if self._why is not None:  # perhaps in the middle of a message
            return
        self._silence.heard = True
        for message in self._link.receive():
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if message.kind is MessageKind.WELCOME:
            self._welcomed = True
            self._welcome.set()
        elif message.kind is MessageKind.FREED:
            self._channel.freed(message.place)
        elif message.kind is MessageKind.ALIVE:
            said = parse(pb.TransportAlive, message.header)
            self._silence.word(said.received, said.paused, self._link.sent, time.monotonic())
        else:
            self._answer(message)

    def _answer(self, message: Message) -> None:
        """Takes a message of an answer.

        Raises:
            InvalidRequest: the message has no place in the answer.
        """
        number, data, ends = message.call, message.data, message.kind is MessageKind.ANSWER
        if message.size and data is None:
            data = self._shared(message)
        call = self._calls.get(number)
        if call is None:
            return  # nobody waits for it any more
        if message.kind is MessageKind.REFUSAL:
            self._end(number, refusal_from_pb(parse(pb.Refusal, message.header)))
            return
        parts = self._parts.get(number)
        if ends or message.header:
            header = parse(ANSWERS[call.said[0]], message.header)
            size = 0 if isinstance(header, pb.HeartbeatReply) else header.size
            if ends and parts is None and size == message.size and not message.offset:
                self._end(number, header, Assembly.whole(size, self._traffic, data))
                return
            if parts is None:
                parts = self._parts[number] = _Parts(Assembly(size, self._traffic))
            parts.header = header if ends else None
        if parts is None:
            raise InvalidRequest("part of a response has no header")
        if data is not None:
            parts.assembly.add(message.offset, (data,))
        if parts.header and parts.assembly.payload.whole:
            self._end(number, parts.header, parts.assembly.payload)

    def _end(self, number: int, said: Header | PSError, payload: Payload = EMPTY) -> None:
        """Answers a call, with a header and a payload or with an error."""
        self._parts.pop(number, None)
        with self._lock:
            call = self._calls.pop(number, None)
        if call is None:
            return
        self.answered += 1
        forks.release()
        self._channel.drop(number)  # if an answer came before all was sent
        if isinstance(said, PSError):
            call.refuse(said)
        else:
            call.settle(partial(call.decode, said, payload))

    def _shared(self, message: Message) -> memoryview:
        """Returns the data of a message that lie in shared memory."""
        if self._mirror is None:
            raise InvalidRequest("a message refers to memory that was not shared")
        return self._mirror.read(message.place, message.size)


_TRANSPORTS: weakref.WeakSet[Transport] = weakref.WeakSet()
"""The transports of this process."""

_LINGERING: set[Transport] = set()
"""Closed transports, as long as a reader looks at their server's memory."""


def _keep() -> list[SlotHold]:
    return [hold for transport in list(_TRANSPORTS) for hold in transport.keep()]


def _forget() -> None:
    for transport in list(_TRANSPORTS):
        transport.forget()


forks.watch(_keep, _forget)


def _connect(name: TransportName, offer: Offer, lease: float) -> Stream:
    if name == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(CONNECT_SECONDS)
        sock.connect(offer.path)
        return sock
    tls = offer.tls and offer.tls()
    return connect(offer.host, offer.port, CONNECT_SECONDS, lease, False, tls, offer.name)


def _why(name: TransportName, offer: Offer, error: Exception) -> str:
    said = getattr(error, "verify_message", None) or getattr(error, "strerror", None) or error
    if name == "shm":
        return f"{offer.path} cannot be used ({said}); do server and client share {SHARED}?"
    return f"{offer.host}:{offer.port} cannot be reached ({said})"
