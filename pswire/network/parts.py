"""Parts of payloads: where the bytes of one message are cut for the wire, and put together again.

A sender cuts a payload with `Cutter`, as it grows; a receiver collects the parts with `Assembly`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN, PART_BYTES
from pswire.model.tensor import align
from pswire.network.payload import ZEROS, Chunk, Payload
from pswire.network.traffic import Traffic

Part = tuple[int, list[memoryview]]
"""The offset of a part in its payload, and its buffers, in order."""


STEPS = 16
"""Steps, at least, in which a payload leaves whose other end is told of it while it is made. Between hosts a payload
that is larger than a part has as many parts, where its tensors are small enough: a round that streams then begins
early, and sends back what it has made while the rest still comes, so that links are busy both ways but for the first
part and the last. Each part costs a system call, and the other end's attention: within a host more than it saves."""


class Cutter:
    """Cuts a payload into parts, as it grows. A tensor that fits a part is never cut; padding becomes zeros.

    Args:
        payload: the payload to cut.
        part_bytes: greatest size of a part, a multiple of `2 * ALIGN`. One that has half of it is not waited with.
        steps: parts of a payload that is larger than one, at least: one that has its share of it is not waited with
            either. What is left at the end is one part if it has no more than two shares, and fits.

    Attributes:
        payload: the constructor's payload.
    """

    def __init__(self, payload: Payload, part_bytes: int = PART_BYTES, steps: int = 1) -> None:
        self.payload = payload
        self._part_bytes = part_bytes
        self._enough = part_bytes // 2
        if payload.size > part_bytes:
            self._enough = min(self._enough, payload.size // steps)
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
        chunks, enough = self.payload.chunks, self._enough
        taken: list[Chunk] = []
        # Where it is cut depends on sizes alone, never on what is there by now: others may be told of the same parts.
        if self.payload.size - self._cut <= 2 * enough:
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
        start, chunks = self._cut, self._pieces.pop(0)
        buffers = padded(chunks, start)
        end = chunks[-1][0] + len(chunks[-1][1])
        self._cut = min(align(end), self.payload.size)
        if self._cut > end:
            buffers.append(ZEROS[self._cut - end])
        return start, buffers


def padded(chunks: Iterable[Chunk], start: int = 0) -> list[memoryview]:
    """Returns the bytes of chunks from an offset on, with the padding before each chunk."""
    end, buffers = start, list[memoryview]()
    for offset, buffer in chunks:
        if offset > end:
            buffers.append(ZEROS[offset - end])
        buffers.append(buffer)
        end = offset + len(buffer)
    return buffers


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
            raise InvalidRequest(f"parts of {payload.size} bytes are too small, or not multiples of {ALIGN} bytes")
        if self._traffic is not None:
            self._traffic.add(received=size)
        for buffer in buffers:
            payload.add(self._end, buffer)
            self._end += len(buffer)

    @classmethod
    def whole(cls, size: int, traffic: Traffic, data: memoryview | None) -> Payload:
        """Returns the payload of a message that has all of it."""
        traffic.add(received=size)
        return Payload([(0, data)] if data is not None else (), size)

    def check_whole(self) -> Payload:
        """The payload; raises `InvalidRequest` if parts are missing."""
        if not self.payload.whole:
            raise InvalidRequest(f"the stream ended at byte {self.payload.end} of {self.payload.size}")
        return self.payload


def parts_of(payload: Payload, part_bytes: int = PART_BYTES, steps: int = 1) -> Iterator[Part]:
    """Yields all parts of a payload that is whole."""
    cutter = Cutter(payload, part_bytes, steps)
    while (part := cutter.next()) is not None:
        yield part
