"""The connection between two workers of one host: messages in a socket, data in memory that both share."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN
from pswire.model.tensor import align
from pswire.network.payload import EMPTY, Payload
from pswire.network.shared_memory import Segment, SharedArena, SharedView

HEAD = struct.Struct("<BxxxIQQQQ")
"""Kind, server, call, place, size of the header, size of the payload."""

ROOMS = (1 << 34, 1 << 30, 1 << 26)
"""Bytes of a segment, of which only what is in use at a time takes memory; less where the system gives no more."""

CREDENTIALS = struct.Struct("iII")
"""Process, user and group of the other end, as the system knows them."""

SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""The sockets of this process: a fork of it has no part in the job, and must not keep them open."""

TURN = 64
"""Messages of one link that are handled before another's."""


def host_socket() -> socket.socket:
    """Returns a socket for a connection of this host's workers, which does not block."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    SOCKETS.add(sock)
    return sock


class LinkMessage(IntEnum):
    """What a message is."""

    HELLO = 1
    """Whose session it is; brings the memory of its sender."""
    WELCOME = 2
    """The answer to it; brings the memory of answers."""
    PUSH = 3
    """A contribution."""
    ANSWER = 4
    """What came of it."""
    SINGLY = 5
    """A contribution is pushed by its sender, or all of it to a server up to a round."""
    FREED = 6
    """Data are needed no more."""
    ALIVE = 7
    """Nothing else."""


class LinkLost(Exception):
    """The other end is gone, or is not what it should be."""


class Left(LinkLost):
    """The process of the other end is gone, or reads no more of what was written for it."""


class Silent(LinkLost):
    """The other end says nothing, but may be there: it may read what was written for it when it goes on."""


class Pulse:
    """The times at which a thread says that it is there.

    Args:
        silence: seconds after which the other end counts as gone, if nothing comes from it.

    Attributes:
        now: the time when it was due last, in monotonic seconds.
        stood_still: True if this process did nothing for so long before that it could hear nobody.
    """

    def __init__(self, silence: float) -> None:
        self.silence = silence
        self.now = time.monotonic()
        self.stood_still = False

    @property
    def left(self) -> float:
        """Seconds until it is due."""
        return max(self.now + self.silence / 4 - time.monotonic(), 0.0)

    def is_due(self) -> bool:
        """Returns True at most four times in a `silence`; then it counts as done."""
        now = time.monotonic()
        if now - self.now < self.silence / 4:
            return False
        self.stood_still, self.now = now - self.now > self.silence / 2, now
        return True


@dataclass(frozen=True)
class HostMessage:
    """One message.

    Attributes:
        kind: what it is.
        server: index of the server that it is about.
        call: a number that its first sender has given.
        header: an encoded message of the protocol, or nothing.
        payload: what belongs to it.
    """

    kind: LinkMessage
    server: int = 0
    call: int = 0
    header: bytes = b""
    payload: Payload = EMPTY


class Outbox:
    """Memory into which this process writes what others read. May be used by any thread.

    Raises:
        OSError: the system gives none.
    """

    def __init__(self) -> None:
        for size in ROOMS:
            try:
                segment, self.file = Segment.make(size)
            except (OSError, OverflowError):  # the address space of this process is limited
                if size == ROOMS[-1]:
                    raise
            else:
                break
        self.arena = SharedArena(segment.memory)

    def close(self) -> None:
        """Hands the memory to nobody any more; who has it keeps it."""
        with suppress(OSError):
            os.close(self.file)


class HostLink:
    """A connection to another worker of this host. May be sent on by any thread; one receives.

    The other end may read what was sent until it closes its end, so it closes that when it reads nothing any more, and
    only then is this memory written again. An end that is over is therefore shut in one direction at first: see `end`.

    Args:
        sock: the connection, which does not block.
        outbox: the memory for what is sent; of a leader the same for all links.
        shuts: what is shut where this end is over: `SHUT_WR` lets the other one find it out, which then closes;
            `SHUT_RD` only wakes the thread of this one, which then closes.

    Attributes:
        session: the session of the other end; 0 before its hello.
        heard: the time at which something came last, in monotonic seconds.
    """

    def __init__(self, sock: socket.socket, outbox: Outbox, shuts: int) -> None:
        self.sock = sock
        SOCKETS.add(sock)
        self.session = 0
        self.heard = time.monotonic()
        self._outbox = outbox
        self._shuts = shuts
        self._mirror: SharedView | None = None
        self._lock = threading.Lock()  # guards that it is over, and what the other end has still to read
        self._over = False
        self._lent = Counter[int]()
        self._untold = deque[int]()  # places of the other end that are free again

    # ---- Sending ----

    def introduce(self, kind: LinkMessage, call: int = 0) -> None:
        """Hands over the memory of what is sent from now on, with a hello or a welcome; raises `OSError`."""
        socket.send_fds(self.sock, [HEAD.pack(kind, 0, call, 0, 0, 0)], [self._outbox.file])

    def tell(self, kind: LinkMessage, call: int = 0, place: int = 0, server: int = 0) -> None:
        """Sends a message without data; raises `LinkLost`."""
        self._send(HEAD.pack(kind, server, call, place, 0, 0))

    def send(self, message: HostMessage, key: Hashable = None) -> bool:
        """Sends a message with data.

        Args:
            message: the message; its payload is whole.
            key: a name of these data; several that send them under one name write them once.

        Returns:
            False, and sends nothing, if its data do not fit into the memory.

        Raises:
            LinkLost: it cannot be sent.
        """
        buffers = list(_laid_out(message.header, message.payload))
        size = sum(map(len, buffers))
        place = self._outbox.arena.put(buffers, size, key)
        if place is None:
            return False
        with self._lock:
            if self._over:
                self._outbox.arena.free(place)
                raise LinkLost("it is closed")
            self._lent[place] += 1
        sizes = len(message.header), message.payload.size
        self._send(HEAD.pack(message.kind, message.server, message.call, place, *sizes))
        return True

    def _send(self, data: bytes) -> None:
        while self._untold:
            with suppress(IndexError):  # another thread was faster
                self._put(HEAD.pack(LinkMessage.FREED, 0, 0, self._untold.popleft(), 0, 0))
        self._put(data)

    def _put(self, data: bytes) -> None:
        with self._lock:  # the number of a closed socket may be another file's
            if self._over:
                raise LinkLost("it is closed")
            try:
                self.sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError as error:  # also where the other end reads nothing for long: a message is lost, so all are
                self._end()
                raise LinkLost(f"sending failed ({error})") from None

    # ---- Receiving ----

    def receive(self) -> Iterator[HostMessage]:
        """Yields what has come, at most a turn of it.

        Raises:
            Left: the other end is closed.
            LinkLost: it sends what is no message.
        """
        for _ in range(TURN):
            try:
                data, files, _, _ = socket.recv_fds(self.sock, HEAD.size, 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                raise Left(str(error)) from None
            try:
                self.heard = time.monotonic()
                found = self._take(data, files)
            except (InvalidRequest, ValueError, struct.error, OSError) as error:
                raise LinkLost(f"it sent an invalid message ({error})") from None
            finally:
                for file in files:
                    os.close(file)
            if found is not None:
                yield found

    def _take(self, data: bytes, files: list[int]) -> HostMessage | None:
        if not data:
            raise Left("its process has ended, or has left")
        number, server, call, place, head, size = HEAD.unpack(data)
        kind = LinkMessage(number)
        if files:
            self._mirror = SharedView(Segment.take(files[0]).memory, self._let_go)
        if kind is LinkMessage.FREED:
            self._free(place)
            return None
        if kind is LinkMessage.ALIVE:
            return None
        if not head:
            return HostMessage(kind, server, call)
        if self._mirror is None:
            raise InvalidRequest("a message refers to memory that was not shared")
        begin = align(head)
        view = self._mirror.read(place, begin + size, reader=1)
        payload = Payload([(0, view[begin:])], size) if size else EMPTY
        return HostMessage(kind, server, call, bytes(view[:head]), payload)

    def _let_go(self, place: int, _: int) -> None:
        self._untold.append(place)  # the next message tells it: one by itself would wake the other end for nothing

    def _free(self, place: int) -> None:
        with self._lock:
            if not self._lent[place]:
                raise InvalidRequest(f"there is no data at {place}")
            self._lent[place] -= 1
        self._outbox.arena.free(place)

    def say_alive(self, pulse: Pulse) -> None:
        """Says that this end is there, and looks whether the other one is; raises `LinkLost`."""
        if pulse.stood_still:
            self.heard = pulse.now
        self.tell(LinkMessage.ALIVE)
        if pulse.now - self.heard > pulse.silence:
            raise Silent(f"nothing was received for {pulse.now - self.heard:.3g} s")

    # ---- The end ----

    def end(self) -> None:
        """Sends nothing more. May be called by any thread; the one that receives then finds it over, and closes it."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._over = True
        with suppress(OSError):  # it is closed
            self.sock.shutdown(self._shuts)

    def close(self) -> None:
        """Closes it; only the thread that receives does. The other end may read on what it was sent."""
        with self._lock:
            self._over = True
            self.sock.close()

    def reclaim(self) -> None:
        """Takes back the memory of what was sent: the other end has left, and reads no more."""
        with self._lock:
            lent, self._lent = list(self._lent.elements()), Counter[int]()
        for place in lent:
            self._outbox.arena.free(place)

    @property
    def is_ours(self) -> bool:
        """True if the other end is a process of the same user."""
        found = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return bool(CREDENTIALS.unpack(found)[1] == os.geteuid())


PADDING = memoryview(bytes(ALIGN))


def _laid_out(header: bytes, payload: Payload) -> Iterator[memoryview]:
    """Yields the bytes of a message: its header, and each chunk of its payload at its place behind that."""
    begin = align(len(header))
    yield memoryview(header)
    at = len(header)
    for offset, buffer in payload.chunks:
        yield PADDING[: begin + offset - at]
        yield buffer
        at = begin + offset + len(buffer)
    yield PADDING[: max(begin - at, 0)]


def _forget() -> None:
    for sock in list(SOCKETS):
        sock.close()


os.register_at_fork(after_in_child=_forget)
