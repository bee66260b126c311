"""Payloads: the tensors of one message, packed, which may still be on their way.

The tensors lie one after another, each at a multiple of `ALIGN` bytes, small and large alike. What is received is
held as it came and never joined; what is sent is held where it is and never copied. A payload may grow while it is
read: a server updates a variable as soon as the contributions to that variable are there, and sends its value
while others are still on their way.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN, PART_BYTES
from pswire.model.tensor import DTYPES, Array, TensorSpec, align, as_bytes, join, layout
from pswire.transport.traffic import Traffic

Chunk = tuple[int, memoryview]
"""An offset in a payload, and the bytes that belong there."""


class Payload:
    """Packed tensor bytes. May be added to, and read, by any thread.

    Args:
        chunks: `(offset, buffer)` in increasing order; gaps are padding and read as nothing.
        size: bytes from offset 0 to the end of the last tensor.

    Attributes:
        end: up to where the bytes are there.
    """

    def __init__(self, chunks: Iterable[Chunk] = (), size: int = 0) -> None:
        self.chunks = list(chunks)
        self.size = size
        self.end = self.chunks[-1][0] + len(self.chunks[-1][1]) if self.chunks else 0
        self.begin = 0
        """Up to where somebody has let go of it."""
        self.reader = 0
        """Bytes that somebody takes at once who reads it as it comes, and lets go of what was read; 0: nobody does."""
        self._lock = threading.Lock()  # guards what is there, and who waits for more
        self._taker: Payload | None = None
        self._waiting: list[tuple[int, Callable[[], object]]] = []
        self._crowding: list[tuple[int, Callable[[], object]]] = []
        self._unread = False

    @classmethod
    def pack(cls, arrays: Iterable[Array]) -> Payload:
        """A payload over the arrays' own memory: nothing is copied. Arrays must be `portable`."""
        chunks: list[Chunk] = []
        end = 0
        for array in arrays:
            if array.nbytes:
                start = align(end)
                end = start + array.nbytes
                chunks.append((start, as_bytes(array)))
        return cls(chunks, end)

    @property
    def whole(self) -> bool:
        """True if all bytes are there."""
        return self.end == self.size

    # ---- Growing ----

    def add(self, offset: int, buffer: memoryview) -> None:
        """More bytes are there: behind all others, or in part again, which are the same and change nothing."""
        with self._lock:
            start = max(offset, self.end)
            if start < offset + len(buffer):
                self.end = offset + len(buffer)
                if not self._unread:
                    self.chunks.append((start, buffer[start - offset :]))
            told = self._told()
        for then in told:
            then()

    def reach(self, offset: int, then: Callable[[], object]) -> None:
        """Calls a function, once, when all bytes before an offset are there: at once, or in the thread that adds."""
        with self._lock:
            self._waiting.append((offset, then))
            told = self._told()
        for then in told:
            then()

    def _told(self) -> list[Callable[[], object]]:
        """Returns who waits no more."""
        told = [then for offset, then in self._waiting if offset <= self.end]
        if told:
            self._waiting = [waiter for waiter in self._waiting if waiter[0] > self.end]
        return told

    def release(self, end: int) -> None:
        """Lets go of what lies before an offset, which nobody will read: its memory serves what comes."""
        with self._lock:
            while self.chunks and self.chunks[0][0] + len(self.chunks[0][1]) <= end:
                self.chunks.pop(0)
            # Not the first chunk: a reader may need what comes next while it has not read all of that one.
            self.begin = max(self.begin, min(end, self.end))
            told = [then for offset, then in self._crowding if offset <= self.begin]
            self._crowding = [waiter for waiter in self._crowding if waiter[0] > self.begin]
        for then in told:
            then()

    def discard(self) -> None:
        """Nobody reads any more of it: what is here is let go of, and so is what still comes."""
        with self._lock:
            self._unread, self.reader = True, 0
            self.chunks.clear()
            told, self._crowding = [then for _, then in self._crowding], []
        for then in told:
            then()

    @property
    def window(self) -> int:
        """The bytes that its reader takes at once, or that of the payload which takes what comes here."""
        return self.reader if self._taker is None else self._taker.window

    def crowded(self, limit: int, then: Callable[[], object]) -> bool:
        """Returns whether more than `limit` bytes are buffered while a streaming reader can still make progress.

        Args:
            limit: number of bytes; a reader that takes more than half of it at once is never crowded.
            then: called once, when no more than `limit` bytes are buffered; only where more were.
        """
        if self._taker is not None:
            return self._taker.crowded(limit, then)
        with self._lock:
            crowded = 0 < 2 * self.reader <= limit < self.end - self.begin
            if crowded:
                self._crowding.append((self.end - limit, then))
        return crowded

    def follow(self, other: Payload) -> None:
        """Takes from another payload, of the same bytes, what is not here yet, as it comes: a push sent again."""
        other._taker = self
        end = other.end
        for chunk in other.chunks[:]:
            self.add(*chunk)
        other.release(end)
        if end < self.size:
            other.reach(end + 1, lambda: self.follow(other))

    # ---- Reading ----

    def pieces(self, offset: int, spec: TensorSpec) -> list[Array]:
        """One tensor as 1-D arrays over the received bytes, in order; together they are its elements."""
        dtype, end = DTYPES[spec.dtype], offset + spec.nbytes
        first = max(bisect.bisect_right(self.chunks, offset, key=_offset) - 1, 0) if len(self.chunks) > 1 else 0
        for start, buffer in self.chunks[first : first + 1]:
            if start <= offset < end <= start + len(buffer):
                return [np.frombuffer(buffer, dtype, spec.size, offset - start)]
        found: list[Array] = []
        for start, buffer in self.chunks[first:]:
            if start >= end:
                break
            low, high = max(offset, start), min(end, start + len(buffer))
            if low < high:
                found.append(np.frombuffer(buffer[low - start : high - start], dtype))
        if sum(piece.nbytes for piece in found) != spec.nbytes:
            raise InvalidRequest(f"{spec} at byte {offset} is not whole in a payload of {self.size} bytes")
        return found

    def tensors(self, specs: Sequence[TensorSpec]) -> list[Array]:
        """All tensors as arrays: views where one chunk holds them (then read-only), copies elsewhere."""
        offsets, size = layout(specs)
        if size != self.size:
            raise InvalidRequest(f"a payload of {self.size} bytes cannot hold tensors of {size}")
        return [join(self.pieces(offset, spec), spec) for offset, spec in zip(offsets, specs, strict=True)]

    def parts(self, part_bytes: int = PART_BYTES) -> Iterator[Part]:
        """All parts of a payload that is whole."""
        cutter = Cutter(self, part_bytes)
        while (part := cutter.next()) is not None:
            yield part


def _offset(chunk: Chunk) -> int:
    return chunk[0]


EMPTY = Payload()
"""A payload without tensors."""

Part = tuple[int, list[memoryview]]
"""The offset of a part in its payload, and its buffers, in order."""


class Cutter:
    """Cuts a payload into parts, as it grows. A tensor that fits a part is never cut; padding becomes zeros.

    Args:
        payload: the payload to cut.
        part_bytes: greatest size of a part, a multiple of `2 * ALIGN`. One that has half of it is not waited with,
            and what is left at the end is one part if it fits.

    Attributes:
        payload: the constructor's payload.
    """

    def __init__(self, payload: Payload, part_bytes: int = PART_BYTES) -> None:
        self.payload = payload
        self._part_bytes = part_bytes
        self._next = 0  # the chunk that comes next
        self._pieces: list[list[Chunk]] = []  # the chunks of the parts that come next
        self._seen = 0
        self._cut = 0

    @property
    def done(self) -> bool:
        """True if the whole payload is cut."""
        return self._cut == self.payload.size

    def when(self, more: int, then: Callable[[], object]) -> None:
        """Calls a function once there are so many bytes more than `next` has seen, at least one, or all."""
        self.payload.reach(min(self._seen + max(more, 1), self.payload.size), then)

    def next(self) -> Part | None:
        """The next part; None while its bytes are not there, and at the end."""
        if not self._pieces:
            self._pieces = self._split(self._take())
        return self._part() if self._pieces else None

    def _take(self) -> list[Chunk]:
        """The chunks of the next part, or one that is larger than a part; none while too few are there."""
        self._seen = self.payload.end
        chunks, enough = self.payload.chunks, self._part_bytes // 2
        taken: list[Chunk] = []
        # Where it is cut depends on sizes alone, never on what is there by now: others may be told of the same parts.
        if self.payload.size - self._cut <= self._part_bytes:
            if self.payload.whole:
                taken, self._next = chunks[self._next :], len(chunks)
            return taken
        size = 0
        for offset, buffer in chunks[self._next :]:
            if size >= enough or (taken and len(buffer) >= enough):
                break
            taken.append((offset, buffer))
            size = offset + len(buffer) - taken[0][0]
        else:
            if size < enough:
                return []
        self._next += len(taken)
        return taken

    def _split(self, chunks: list[Chunk]) -> list[list[Chunk]]:
        """The chunks of each part."""
        if len(chunks) != 1 or len(chunks[0][1]) <= self._part_bytes:
            return [chunks] if chunks else []
        offset, buffer = chunks[0]
        count = -(-len(buffer) // self._part_bytes)
        step = align(-(-len(buffer) // count))
        return [[(offset + at, buffer[at : at + step])] for at in range(0, len(buffer), step)]

    def _part(self) -> Part:
        """The next chunks with the padding between them, and behind them unless they are the payload's last."""
        start, buffers = self._cut, []
        for offset, buffer in self._pieces.pop(0):
            if offset > self._cut:
                buffers.append(_ZEROS[: offset - self._cut])
            buffers.append(buffer)
            self._cut = offset + len(buffer)
        padding = min(align(self._cut), self.payload.size) - self._cut
        if padding:
            buffers.append(_ZEROS[:padding])
            self._cut += padding
        return start, buffers


_ZEROS = memoryview(bytes(ALIGN))


MIN_PART_BYTES = 1 << 12
"""Least size of parts on the average, so that what a peer announced bounds what it costs to hold."""

SPARE_PARTS = 16
"""Number of parts that may be smaller than that."""


class Assembly:
    """Collects the parts of one payload as they come; bounds what a peer may send.

    Args:
        size: bytes that the peer announced.
        traffic: counts what comes.

    Attributes:
        payload: grows with every part.
    """

    def __init__(self, size: int, traffic: Traffic | None = None) -> None:
        self.payload = Payload((), size)
        self._traffic = traffic
        self._end = 0
        self._room = SPARE_PARTS + size // MIN_PART_BYTES

    def add(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Takes a part; raises `InvalidRequest` if it is out of place."""
        size = sum(map(len, buffers))
        if not size:
            return
        payload = self.payload
        self._room -= 1
        if offset != self._end or self._end + size > payload.size:
            raise InvalidRequest(f"a part of {size} bytes at {offset}; expected {self._end} of {payload.size}")
        # A part holds its whole message in memory, and an array cannot begin within an element.
        if offset % ALIGN or self._room < 0:
            raise InvalidRequest(f"parts of {payload.size} bytes are cut too small, or not at {ALIGN} bytes")
        if self._traffic is not None:
            self._traffic.add(received=size)
        for buffer in buffers:
            payload.add(self._end, buffer)
            self._end += len(buffer)

    def check_whole(self) -> Payload:
        """The payload; raises `InvalidRequest` if parts are missing."""
        if not self.payload.whole:
            raise InvalidRequest(f"the stream ended at byte {self.payload.end} of {self.payload.size}")
        return self.payload
