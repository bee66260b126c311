"""Messages on the plain socket of a transport, tcp or shm: both ends are the same.

A message is a head of fixed size, a header, which is an encoded protobuf message or nothing, and maybe the data of a
part. On the tcp transport the data follow in the socket; on the shm transport they lie in memory that both ends share,
and the message says where. The receiver of such data says when it needs them no more.

    kind, 3 zero bytes, size of header (4), call (8), offset (8), size of data (8), place (8), header, data

Sizes are in bytes, and all numbers are little-endian. `call` is a number that the client gave; `offset` is where the
data belong in their payload, as in `Part`.

A connection whose packets vanish, in a firewall or a NAT, looks like one on which nobody has anything to say. So a
server says several times in a client's lease that it is there (`ALIVE`), while a call of that client is under way, and
how many bytes it has received. The system's own means are not enough: TCP takes a quarter of an hour, and knows nothing
of what happens behind a proxy.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice, takewhile
from socket import (
    IPPROTO_TCP,
    SO_KEEPALIVE,
    SO_SNDBUF,
    SOL_SOCKET,
    TCP_KEEPCNT,
    TCP_KEEPIDLE,
    TCP_KEEPINTVL,
    TCP_NODELAY,
    TCP_USER_TIMEOUT,
    create_connection,
    socket,
)
from ssl import SSLContext

import numpy as np

from pswire.errors import InvalidRequest
from pswire.network import scratch
from pswire.network.parts import STEPS, Cutter, Part, padded
from pswire.network.payload import Payload
from pswire.network.scratch import NOTHING, SCRATCH
from pswire.network.shared_memory import SharedArena
from pswire.network.tls_socket import Sealed, Stream
from pswire.network.traffic import Traffic

HEAD = struct.Struct("<B3xIQQQQ")

INLINE = (1 << 64) - 1
"""The place of data that follow in the socket."""

MAX_HEADER_BYTES = 4 << 20
"""Of one header; a hello has far less."""

MAX_HELLO_BYTES = 1 << 10
"""Of the header of a hello."""

MAX_PART_BYTES = 4 << 20
"""Of the data of one message."""


SMALL = 1 << 14
"""Data of fewer bytes go in the socket also where memory is shared: to tell their place would cost as much."""

BUFFERS = 256
"""Buffers that are handed to the system at once."""

BLOCKED = (BlockingIOError, InterruptedError)


PROBES = 127
"""Signs of life that are asked for at most; the system allows no more."""


HOST_BYTES = 512 << 10
"""Bytes in flight between two ends on one host, of which the system counts twice as many."""


def tune(sock: socket, silence: float, breaks: bool) -> None:
    """Makes a TCP socket send at once, and ask the host of its other end for signs of life.

    Args:
        sock: a connected TCP socket.
        silence: seconds after which that host is silent.
        breaks: True if the connection breaks then. On a client it does not: its transport breaks only where the server
            answers heartbeats meanwhile. And a server may read nothing for as long as a round takes, which
            TCP_USER_TIMEOUT would count as silence.
    """
    sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
    if sock.getsockname()[0] == sock.getpeername()[0]:
        # On one host what is in flight stays in the processor's caches. A network is tuned by the system.
        sock.setsockopt(SOL_SOCKET, SO_SNDBUF, HOST_BYTES)
    # A host that loses its power says nothing.
    sock.setsockopt(SOL_SOCKET, SO_KEEPALIVE, 1)
    count = 2 if breaks else PROBES
    for option, value in ((TCP_KEEPIDLE, silence / 2), (TCP_KEEPINTVL, silence / 4), (TCP_KEEPCNT, count)):
        sock.setsockopt(IPPROTO_TCP, option, max(int(value), 1))
    if breaks:
        # The system asks for nothing while something is not acknowledged.
        sock.setsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT, int(1000 * silence))


def crosses(sock: Stream) -> bool:
    """Returns whether the other end of a connection is on another host, as the addresses of both ends say."""
    with suppress(OSError):  # the other end is gone
        here, there = sock.getsockname(), sock.getpeername()
        return isinstance(here, tuple) and isinstance(there, tuple) and here[0] != there[0]
    return False


def connect(
    host: str, port: int, seconds: float, silence: float, breaks: bool, tls: SSLContext | None, name: str
) -> Stream:
    """Connects to a tcp transport, and returns the connection, which blocks.

    Args:
        host, port: the address.
        seconds: the time limit of each step.
        silence, breaks: as for `tune`.
        tls: the context that encrypts the connection; None for none.
        name: the name that the other end's certificate must have.

    Raises:
        OSError: there is none.
    """
    sock = create_connection((host, port), seconds)
    tune(sock, silence, breaks)
    if tls is None:
        return sock
    sealed = Sealed(sock, tls, name)
    try:
        sealed.shake()
    except OSError:
        sealed.close()
        raise
    return sealed


class MessageKind(IntEnum):
    """The kind of a message."""

    HELLO = 1
    """The first of a client: its session and proof."""
    WELCOME = 2
    """The first of a server: the hello was right."""
    PUSH = 3
    """A PushHeader, and maybe the first part."""
    PULL = 4
    """A PullRequest."""
    PART = 5
    """A part; the first of an answer that is sent while it is made has a RoundHeader with the size."""
    ANSWER = 6
    """The last message of a call: a RoundHeader or a PullHeader, and maybe the last part; to a heartbeat a
    HeartbeatReply."""
    REFUSAL = 7
    """The last message of a call that failed: a Refusal."""
    FREED = 8
    """Data in shared memory are needed no more: `place` says which."""
    ALIVE = 9
    """A TransportAlive of a server, while a call is under way."""
    VOTE = 10
    """A ServerVote of another server: a testimony, or a vote that is not plain."""
    HEARTBEAT = 11
    """Of a client: nothing but that it lives, and has nothing else to say than with its last heartbeat over gRPC."""
    PLAIN_VOTE = 12
    """A plain vote of another server, packed; see `pswire.encoding.plain_votes`."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: the message's kind.
        call: number of the call that it belongs to.
        header: an encoded protobuf message, or empty.
        offset: place of the data in their payload, in bytes.
        size: bytes of data.
        place: place of the data in shared memory, or `INLINE`.
        data: the data that came in the socket.
    """

    kind: MessageKind
    call: int = 0
    header: bytes = b""
    offset: int = 0
    size: int = 0
    place: int = INLINE
    data: memoryview | None = None

    def head(self) -> bytes:
        """The head and the header as they travel."""
        return head_of(self.kind, self.call, self.header, self.offset, self.size, self.place)


def head_of(
    kind: MessageKind, call: int, header: bytes = b"", offset: int = 0, size: int = 0, place: int = INLINE
) -> bytes:
    """Returns the head and the header of a message as they travel; arguments as the attributes of `Message`."""
    return HEAD.pack(kind, len(header), call, offset, size, place) + header


class MessageSocket:
    """A socket that never blocks, with messages. May be written by any thread, is read by one.

    Args:
        sock: connected; encrypted or not.

    Attributes:
        sent, received: bytes that the system has taken, and given, since the other end has said who it is.
    """

    def __init__(self, sock: Stream) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.sent = self.received = 0
        self._out: deque[memoryview] = deque()
        self._lock = threading.Lock()  # guards what is to be sent
        self.max_header, self.max_data = MAX_HELLO_BYTES, 0
        """Greatest sizes of a message's parts; larger once the other end has proved its identity."""
        self._scratch = NOTHING
        self._read = self._filled = 0
        self._emptied = False  # the system gave less than there was room for: it has no more for now
        self._incoming = self._messages()

    @property
    def waiting(self) -> int:
        """Number of buffers that the system has not taken yet."""
        return len(self._out)

    def trust(self) -> None:
        """The other end has said who it is: its messages may be large, and bytes are counted from here."""
        self.sent = self.received = 0
        self.max_header, self.max_data = MAX_HEADER_BYTES, MAX_PART_BYTES

    def send(self, buffers: Sequence[bytes | memoryview]) -> bool:
        """Sends buffers, in order, as far as the system takes them; says whether something is left for `flush`.

        Raises:
            OSError: the connection is broken.
        """
        with self._lock:
            sent = 0
            if not self._out and len(buffers) <= BUFFERS:
                try:
                    sent = self.sock.sendmsg(buffers)
                except BLOCKED:
                    pass
                self.sent += sent
                if sent == sum(map(len, buffers)):
                    return False
            self._out += [memoryview(buffer) for buffer in buffers if len(buffer)]
            self._drop(sent)
            self._flush()
            return bool(self._out)

    def flush(self) -> bool:
        """Goes on with what is left; as `send`."""
        with self._lock:
            self._flush()
            return bool(self._out)

    def _flush(self) -> None:
        while self._out:
            try:
                sent = self.sock.sendmsg(list(islice(self._out, BUFFERS)))
            except BLOCKED:
                return
            self.sent += sent
            self._drop(sent)

    def _drop(self, sent: int) -> None:
        """Drops bytes that the system has taken."""
        while sent:
            first = self._out[0]
            if len(first) > sent:
                self._out[0] = first[sent:]
                return
            sent -= len(self._out.popleft())

    def receive(self) -> Iterator[Message]:
        """Returns the messages that are there; ends where the next one is not whole yet.

        Raises:
            OSError: the connection is broken, or the other end has closed it.
            InvalidRequest: the bytes are no message.
        """
        return takewhile(bool, self._incoming)  # type: ignore[arg-type]  # it ends at the first None

    def _messages(self) -> Generator[Message | None, None, None]:
        head = bytearray(HEAD.size)
        while True:
            while self._read == self._filled and not self._take():
                yield None
            data = None
            if self._filled - self._read >= HEAD.size:
                number, header_size, call, offset, size, place = HEAD.unpack_from(self._scratch, self._read)
                self._read += HEAD.size
            else:
                yield from self._fill(memoryview(head))
                number, header_size, call, offset, size, place = HEAD.unpack(head)
            kind = _KINDS.get(number)
            if kind is None:
                raise InvalidRequest(f"a message of unknown kind {number}")
            if header_size > self.max_header or size > self.max_data:
                raise InvalidRequest(
                    f"a message with {header_size} bytes of header and {size} bytes of data is larger than the limits, "
                    f"{self.max_header} and {self.max_data} bytes"
                )
            if self._filled - self._read >= header_size:
                header = bytes(self._scratch[self._read : self._read + header_size])
                self._read += header_size
            else:
                whole = bytearray(header_size)
                yield from self._fill(memoryview(whole))
                header = bytes(whole)
            if size and place == INLINE:
                data = np.empty(size, np.uint8).data
                yield from self._fill(data)
            yield Message(kind, call, header, offset, size, place, data)

    def _fill(self, buffer: memoryview) -> Generator[None, None, None]:
        """Reads until a buffer is full; gives None each time that nothing is there."""
        at = 0
        while at < len(buffer):
            if self._read < self._filled:
                count = min(len(buffer) - at, self._filled - self._read)
                buffer[at : at + count] = self._scratch[self._read : self._read + count]
                self._read += count
                at += count
            elif len(buffer) - at >= SCRATCH:
                count = self._take(buffer[at:])
                at += count
                if not count:
                    yield None
            elif not self._take():
                yield None

    def _take(self, buffer: memoryview | None = None) -> int:
        """Receives into a buffer, by default one that is lent for that, of which nothing is left.

        Returns:
            How many bytes; 0 if nothing is there for now. Then the lent buffer serves the next socket.
        """
        into = buffer
        if into is None:
            into = self._scratch = self._scratch or scratch.lend()
        count = 0
        if not self._emptied:
            try:
                count = self.sock.recv_into(into)
            except BLOCKED:
                pass
            else:
                if not count:
                    raise ConnectionResetError("the other side has closed the connection")
        # What has come since then makes the socket readable once more.
        self._emptied = 0 < count < len(into)
        self.received += count
        if buffer is None:
            self._read, self._filled = 0, count
        if not count and self._scratch:
            scratch.give_back(self._scratch)
            self._scratch = NOTHING
        return count


_KINDS = {int(kind): kind for kind in MessageKind}
"""By their numbers: faster than to ask the class."""


@dataclass(eq=False)
class _Stream:
    """A payload on its way out.

    Attributes:
        call: number of the call that it belongs to.
        cutter: cuts the payload.
        first: kind and header of its first message.
        part: a cut part that has found no room yet.
        ends: True if a message comes after its last part.
        last: kind and header of that message, once it is known.
        listens: True if it goes on by itself when the payload has grown.
    """

    call: int
    cutter: Cutter
    first: tuple[MessageKind, bytes]
    ends: bool
    part: Part | None = None
    last: tuple[MessageKind, bytes] | None = None
    listens: bool = False


class PayloadSender:
    """Messages with payloads on a link, in the socket or through shared memory. May be used by any thread.

    Args:
        link: the socket that the messages go through.
        ring: shared memory into which the data of parts are written; None sends them in the socket.
        waits: True if data wait until there is room in the ring, which the other end then has to make; else what has
            no room goes in the socket.
        blocked: called when something is left for `flush`, by any thread.
        traffic: counts payload bytes.
    """

    def __init__(
        self,
        link: MessageSocket,
        ring: SharedArena | None,
        waits: bool,
        blocked: Callable[[], object],
        traffic: Traffic,
    ) -> None:
        self.link = link
        self._traffic = traffic
        self._ring = ring
        self._waits = waits
        self._blocked = blocked
        self._part_bytes = min(MAX_PART_BYTES, ring.size // 8) if ring else MAX_PART_BYTES
        self._steps = STEPS if crosses(link.sock) else 1
        self._lock = threading.RLock()  # guards all below
        self._streams: deque[_Stream] = deque()
        self._unread = Counter[int]()  # announcements of each place in the ring
        self._closed = False
        self._freed: deque[int] = deque()  # places that the other end is not told of; of no lock, as the next one
        self.untold = 0
        """Bytes that are needed no more, of which the other end is not told yet, nearly."""

    def tell(self, kind: MessageKind, call: int = 0, header: bytes = b"") -> None:
        """Sends a message without data."""
        self._send((head_of(kind, call, header),))

    def let_go(self, place: int, size: int) -> int:
        """Notes that data in shared memory are needed no more, of which the next message tells the other end.

        May be called at any time, also while the thread is in another method of this object.

        Args:
            place, size: place and size of the data, in bytes.

        Returns:
            Bytes of which the other end is not told yet, nearly.
        """
        self._freed.append(place)
        self.untold += size  # threads may add to it at once
        return self.untold

    def tell_freed(self) -> None:
        """Tells the other end now of data that are needed no more."""
        self._send(())

    def send(self, kind: MessageKind, call: int, header: bytes, payload: Payload, ends: bool = False) -> None:
        """Sends a header and a payload, which may still grow.

        Args:
            kind: kind of the first message; those after it are parts.
            call: number of the call that they belong to.
            header: header of the first message.
            payload: the payload, which may still grow.
            ends: True if `end` will be called.
        """
        with self._lock:
            if self._closed:
                return
            if not (ends or self._streams or payload.size > self._part_bytes) and payload.end == payload.size:
                buffers = padded(payload.chunks)
                place = self._put(payload, 0, buffers, payload.size)
                if place is not None:
                    self._traffic.add(sent=payload.size)
                    head = head_of(kind, call, header, 0, payload.size, place)
                    self._send([head, *buffers] if place == INLINE else [head])
                    return
            self._streams.append(_Stream(call, Cutter(payload, self._part_bytes, self._steps), (kind, header), ends))
            self.pump()

    def end(self, kind: MessageKind, call: int, header: bytes) -> None:
        """Sends a message after the last part of a call's payload."""
        with self._lock:
            for stream in self._streams:
                if stream.call == call:
                    stream.last = kind, header
                    self.pump()
                    return
        self.tell(kind, call, header)

    def drop(self, call: int) -> None:
        """Sends no more of a call's payload."""
        with self._lock:
            if self._streams:
                self._streams = deque(stream for stream in self._streams if stream.call != call)

    def freed(self, place: int) -> None:
        """The other end needs data in shared memory no more; raises `InvalidRequest` if it was not told of them."""
        with self._lock:
            if self._ring is None or not self._unread[place]:
                raise InvalidRequest(f"offset {place} of the shared memory holds no message")
            self._unread -= Counter({place: 1})  # of which those that become 0 are gone
            self._ring.free(place)
            self.pump()

    def reserve(self, size: int) -> tuple[memoryview, int] | None:
        """Reserves shared memory that is sent without a copy: as `SharedArena.reserve`; None in a socket."""
        with self._lock:
            return None if self._ring is None else self._ring.reserve(size)

    def close(self) -> None:
        """The other end is gone: it reads nothing more, and nothing more is sent."""
        with self._lock:
            self._closed = True
            self._streams.clear()
            if self._ring is not None:
                for place in self._unread.elements():
                    self._ring.free(place)
            self._unread.clear()
            self._ring = None

    def flush(self) -> bool:
        """Goes on with what the system did not take; says whether something is left."""
        return self.link.flush()

    @property
    def sending(self) -> bool:
        """True if payloads are on their way."""
        return bool(self._streams)

    def unsent(self) -> set[int]:
        """The calls of whose payloads nothing has left, since nothing is there yet, or there is no room."""
        with self._lock:
            return {stream.call for stream in self._streams if stream.first[0] is not MessageKind.PART}

    def pump(self) -> None:
        """Sends what can be sent of all payloads on their way."""
        with self._lock:
            for stream in tuple(self._streams):
                # One that has grown meanwhile may have sent all others, too.
                if stream in self._streams and self._run(stream):
                    self._streams.remove(stream)

    def _run(self, stream: _Stream) -> bool:
        """Sends what there is of a payload; says whether that was the last."""
        out: list[bytes | memoryview] = []
        step, ready = stream.cutter.payload.size // STEPS, 0
        while stream.part or not (stream.cutter.done and stream.first[0] is MessageKind.PART):
            stream.part = stream.part or stream.cutter.next()
            if stream.part is None and not stream.cutter.done:
                self._send(out)
                if not stream.listens:
                    stream.listens = True
                    stream.cutter.when(step, lambda: self._grown(stream))
                return False
            offset, buffers = stream.part or (0, [])
            size = sum(map(len, buffers))
            place = self._put(stream.cutter.payload, offset, buffers, size)
            if place is None:
                self._send(out)
                return False
            (kind, header), stream.first, stream.part = stream.first, (MessageKind.PART, b""), None
            out += [head_of(kind, stream.call, header, offset, size, place)]
            out += buffers if place == INLINE else []
            self._traffic.add(sent=size)
            ready += size
            if ready > step:
                self._send(out)
                out, ready = [], 0
        if stream.last is not None:
            out.append(head_of(stream.last[0], stream.call, stream.last[1]))
        self._send(out)
        return stream.last is not None or not stream.ends

    def _put(self, payload: Payload, offset: int, buffers: Sequence[memoryview], size: int) -> int | None:
        """Returns where the data of a part are; None where they have to wait for room."""
        if self._ring is None or size < SMALL:
            return INLINE
        lent = self._ring.lend(buffers)
        if lent is not None:
            self._unread[lent] += 1
            return lent
        # All who are sent one payload are told of one place; it does not keep the arrays of which it is a copy.
        key = None if self._waits else (weakref.ref(payload), offset, size)
        place = self._ring.put(buffers, size, key)
        if place is not None:
            self._unread[place] += 1
        return INLINE if place is None and not self._waits else place

    def _grown(self, stream: _Stream) -> None:
        with self._lock:
            stream.listens = False
            self.pump()

    def _send(self, buffers: Sequence[bytes | memoryview]) -> None:
        if self._freed:
            buffers = [*self._freed_heads(), *buffers]
        if not buffers:
            return
        try:
            if self.link.send(buffers):
                self._blocked()
        except OSError:
            self._blocked()  # whoever reads the link finds out

    def _freed_heads(self) -> list[bytes]:
        """Takes the places that the other end is not told of; returns the messages that do."""
        self.untold = 0  # first: what is freed from now on may not be among these
        found: list[bytes] = []
        with suppress(IndexError):  # none is left, or another thread tells the rest
            while True:
                found.append(head_of(MessageKind.FREED, 0, place=self._freed.popleft()))
        return found
