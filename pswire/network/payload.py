"""Payloads: the tensors of one message, packed, which may still be on their way.

The tensors lie one after another, each at a multiple of `ALIGN` bytes, small and large alike. What is received is
held as it came and never joined; what is sent is held where it is and never copied. A payload may grow while it is
read: a server updates a variable as soon as the contributions to that variable are there, and sends its value
while others are still on their way.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN
from pswire.model.tensor import BUFFERS, DTYPES, Array, TensorSpec, as_bytes, join, layout

Chunk = tuple[int, memoryview]
"""An offset in a payload, and the bytes that belong there."""


GATHERED = 1 << 12
"""Most bytes of an array, on the average, for which arrays are copied together."""

ZEROS = [memoryview(bytes(size)) for size in range(ALIGN)]
"""Padding of each size."""

_NBYTES = attrgetter("nbytes")


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
        end, chunks = 0, list[Chunk]()
        for array in arrays:
            if array.nbytes:
                start = -(-end // ALIGN) * ALIGN  # as `align`, without a call: a round may have thousands of arrays
                chunks.append((start, array.data.cast("B") if array.dtype.char in BUFFERS else as_bytes(array)))
                end = start + array.nbytes
        return cls(chunks, end)

    @classmethod
    def copied(cls, arrays: Iterable[Array]) -> Payload:
        """As `pack`, with memory of its own: the arrays may change. Padding is zero."""
        end, buffers = 0, list[Any]()
        for array in arrays:
            if array.nbytes:
                gap = -end % ALIGN
                if gap:
                    buffers.append(ZEROS[gap])
                buffers.append(array if array.dtype.char in BUFFERS else as_bytes(array))
                end += gap + array.nbytes
        return cls([(0, memoryview(b"".join(buffers)))] if end else (), end)

    @classmethod
    def gathered(cls, arrays: Sequence[Array]) -> Payload:
        """As `pack`; small arrays are copied together, since to hand over each takes longer."""
        small = sum(map(_NBYTES, arrays)) <= GATHERED * len(arrays)
        return cls.copied(arrays) if small else cls.pack(arrays)

    def copy(self) -> Payload:
        """Returns a payload with the bytes that are there, in memory of its own."""
        return Payload([(offset, memoryview(bytes(data))) for offset, data in self.chunks[:]], self.size)

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

    def hold(self) -> None:
        """Nobody reads it before it is whole: it comes without a stop."""
        with self._lock:
            self.reader = 0
            told, self._crowding = [then for _, then in self._crowding], []
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
        if (here := sum(piece.nbytes for piece in found)) != spec.nbytes:
            raise InvalidRequest(
                f"{spec} at byte {offset} has {spec.nbytes} bytes, but the payload of {self.size} bytes has only "
                f"{here} of them"
            )
        return found

    def tensors(
        self, specs: Sequence[TensorSpec], into: Mapping[int, Array] = MappingProxyType({}), shared: bool = False
    ) -> list[Array]:
        """All tensors as arrays: views where one chunk holds them, copies elsewhere.

        Args:
            specs: the tensors, in order.
            into: arrays for some of them, by their places in that order, which are filled in place of new ones; each of
                its tensor's dtype and shape, contiguous.
            shared: True for arrays that have several readers, and so are read-only.
        """
        offsets, size = layout(specs)
        if size != self.size:
            raise InvalidRequest(f"a payload of {self.size} bytes cannot hold tensors of {size}")
        found = zip(offsets, specs, strict=True)
        if len(self.chunks) == 1 and self.end == size and not (into or self.chunks[0][0]):
            data = self.chunks[0][1]
            data = data.toreadonly() if shared else data
            return [np.ndarray(spec.shape, DTYPES[spec.dtype], data, offset) for offset, spec in found]
        arrays = [
            _filled(into[place], self.pieces(offset, spec)) if place in into else join(self.pieces(offset, spec), spec)
            for place, (offset, spec) in enumerate(found)
        ]
        for place, array in enumerate(arrays):
            if shared and place not in into:
                array.flags.writeable = False
        return arrays


def _filled(array: Array, pieces: Iterable[Array]) -> Array:
    flat, at = array.reshape(-1), 0
    for piece in pieces:
        flat[at : at + len(piece)] = piece
        at += len(piece)
    return array


def _offset(chunk: Chunk) -> int:
    return chunk[0]


EMPTY = Payload()
"""A payload without tensors."""
