"""How tensors become bytes: a packed payload, cut into parts, each part framed as protobuf.

The tensors of one message lie one after another in a *payload*, each at a multiple of `ALIGN` bytes,
small and large alike. The payload travels as *parts* of at most `PART_BYTES`. A part's frame is a
valid protobuf message whose last bytes are the part's data, so encoding is one copy and decoding none:

    +--------------------+----------------------------------------------+
    | field 1: header    | field 2: Part { offset, pad, data }          |
    +--------------------+----------------------------------------------+

`pad` makes the data start at a multiple of `ALIGN` within the frame, so that arrays over it are aligned.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN, MAX_NDIM, MAX_TENSOR_BYTES, PART_BYTES

Array = npt.NDArray[np.generic]

DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""Every dtype that a variable may have, little-endian, by name."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    Attributes:
        dtype: a key of `DTYPES`.
        shape: sizes of the dimensions.
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * DTYPES[self.dtype].itemsize

    def check(self) -> TensorSpec:
        """Returns itself; raises `InvalidRequest` for an unknown dtype or an impossible shape."""
        if self.dtype not in DTYPES:
            raise InvalidRequest(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPES)}")
        # An empty tensor is bounded by its other dimensions: NumPy refuses to make a larger one.
        extent = math.prod(n for n in self.shape if n) * DTYPES[self.dtype].itemsize
        if len(self.shape) > MAX_NDIM or any(n < 0 for n in self.shape) or extent > MAX_TENSOR_BYTES:
            raise InvalidRequest(f"impossible shape {self.shape}")
        return self


def spec_of(array: Array) -> TensorSpec:
    """The spec of an array; raises `InvalidRequest` for a dtype that does not travel (objects, strings)."""
    # NumPy makes a dtype's name anew each time, which costs more than all else here.
    name = _NAMES.get(array.dtype) or array.dtype.name
    if name not in DTYPES:
        raise InvalidRequest(f"arrays of dtype {array.dtype} cannot travel; known are {', '.join(DTYPES)}")
    return TensorSpec(name, array.shape)


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def portable(array: npt.ArrayLike) -> Array:
    """The array as it travels: C order, little-endian; copied only where it is not so already."""
    result = np.asarray(array)
    if result.dtype.byteorder == ">" or not result.dtype.isnative:
        result = result.astype(result.dtype.newbyteorder("="))
    return result if result.flags.c_contiguous else np.ascontiguousarray(result).reshape(result.shape)


def align(offset: int) -> int:
    """The next multiple of `ALIGN`."""
    return -(-offset // ALIGN) * ALIGN


def layout(specs: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """The offset of each tensor in a payload, and the size of the payload, in bytes."""
    offsets, end = [], 0
    for spec in specs:
        start = align(end) if spec.nbytes else end
        offsets.append(start)
        end = start + spec.nbytes
    return offsets, end


def as_bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data


class Payload:
    """Packed tensor bytes, held as they came: chunks at increasing offsets, never joined.

    Args:
        chunks: `(offset, buffer)` in increasing order; gaps are padding and read as nothing.
        size: bytes from offset 0 to the end of the last tensor.
    """

    def __init__(self, chunks: Sequence[tuple[int, memoryview]], size: int) -> None:
        self.chunks = chunks
        self.size = size

    @classmethod
    def pack(cls, arrays: Iterable[Array]) -> Payload:
        """A payload over the arrays' own memory: nothing is copied. Arrays must be `portable`."""
        chunks: list[tuple[int, memoryview]] = []
        end = 0
        for array in arrays:
            if array.nbytes:
                start = align(end)
                end = start + array.nbytes
                chunks.append((start, as_bytes(array)))
        return cls(chunks, end)

    def pieces(self, offset: int, spec: TensorSpec) -> list[Array]:
        """One tensor as 1-D arrays over the received bytes, in order; together they are its elements."""
        dtype, end = DTYPES[spec.dtype], offset + spec.nbytes
        found: list[Array] = []
        first = bisect.bisect_right(self.chunks, offset, key=lambda chunk: chunk[0]) - 1
        for start, buffer in self.chunks[max(first, 0) :]:
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

    def parts(self, part_bytes: int = PART_BYTES) -> Iterator[tuple[int, list[memoryview]]]:
        """Cuts the payload: `(offset, buffers)` of each part, in order. Padding becomes zeros."""
        pending: list[memoryview] = []
        start = end = 0
        for offset, buffer in self.chunks:
            if offset > end:
                pending.append(_ZEROS[: offset - end])
                end = offset
            while buffer:
                room = part_bytes - (end - start)
                if not room:
                    yield start, pending
                    pending, start = [], end
                    continue
                pending.append(buffer[:room])
                end += len(pending[-1])
                buffer = buffer[room:]
            if end - start >= part_bytes:
                yield start, pending
                pending, start = [], end
        if pending:
            yield start, pending


_ZEROS = memoryview(bytes(ALIGN))


def join(pieces: Sequence[Array], spec: TensorSpec) -> Array:
    """The pieces of one tensor as an array of its shape: a view if there is one piece, else a copy."""
    if len(pieces) == 1:
        return pieces[0].reshape(spec.shape)
    return np.concatenate([np.empty(0, DTYPES[spec.dtype]), *pieces]).reshape(spec.shape)


EMPTY = Payload((), 0)
"""A payload without tensors."""


# Frames: protobuf's wire format of `{ bytes header = 1; Part part = 2; }` by hand, since the generated
# class copies the data twice more each way. A test holds that both write and read the same bytes.

_HEADER, _PART = b"\x0a", b"\x12"
_OFFSET, _PAD, _DATA = b"\x09", b"\x12", b"\x1a"

MAX_OVERHEAD = 256
"""Bytes of a frame that are neither header nor data: a part keeps its whole frame in memory."""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(buffer: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(buffer) or shift > 63:
            raise InvalidRequest("a frame ends within a number")
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


@dataclass(frozen=True)
class Frame:
    """One message of a stream: an encoded header, a part, or both.

    Attributes:
        header: an encoded protobuf message, or empty.
        offset: where the part's data belong in the payload.
        data: the buffers of the part, in order; None where the frame has no part.
    """

    header: bytes = b""
    offset: int = 0
    data: Sequence[memoryview] | None = None

    def encode(self) -> bytes:
        """The bytes of the frame; the data are copied once."""
        head = _HEADER + _varint(len(self.header)) + self.header if self.header else b""
        if self.data is None:
            return head
        size = sum(len(buffer) for buffer in self.data)
        tail = _OFFSET + self.offset.to_bytes(8, "little")
        data_tag = _DATA + _varint(size) if size else b""
        # The pad's own two bytes count. Where the pad makes the part's length one byte longer to write, a
        # pad that is longer by all but that byte makes up for it.
        rest = len(tail) + 2 + len(data_tag) + size
        written = len(_varint(rest))
        pad = -(len(head) + 1 + written + rest - size) % ALIGN
        if len(_varint(rest + pad)) > written:
            pad += ALIGN - 1
        tail += _PAD + _varint(pad) + bytes(pad) + data_tag
        return b"".join((head, _PART, _varint(len(tail) + size), tail, *self.data))

    @classmethod
    def decode(cls, message: bytes) -> Frame:
        """Reads a frame; its data are views of `message`. Raises `InvalidRequest` for anything else."""
        buffer = memoryview(message)
        header, offset, at = b"", 0, 0
        data: memoryview | None = None
        while at < len(buffer):
            tag = buffer[at]
            length, start = _read_varint(buffer, at + 1)
            at = start + length
            if at > len(buffer):
                raise InvalidRequest("a frame's field is longer than the frame")
            if tag == _HEADER[0]:
                header = bytes(buffer[start:at])
            elif tag == _PART[0]:
                offset, data = _decode_part(buffer[start:at])
            else:
                raise InvalidRequest(f"a frame has an unknown field (tag {tag})")
        if data is None:
            return cls(header, offset)
        if len(buffer) - len(header) - len(data) > MAX_OVERHEAD:
            raise InvalidRequest("a frame is mostly padding")
        return cls(header, offset, (data,))


def _decode_part(part: memoryview) -> tuple[int, memoryview]:
    offset, data, at = 0, part[:0], 0
    while at < len(part):
        tag = part[at]
        if tag == _OFFSET[0]:
            if at + 9 > len(part):
                raise InvalidRequest("a part ends within its offset")
            offset = int.from_bytes(part[at + 1 : at + 9], "little")
            at += 9
            continue
        length, start = _read_varint(part, at + 1)
        at = start + length
        if at > len(part) or tag not in (_PAD[0], _DATA[0]):
            raise InvalidRequest("a part is malformed")
        if tag == _DATA[0]:
            data = part[start:at]
    return offset, data


def frames(header: bytes, payload: Payload) -> Iterator[Frame]:
    """The messages that carry a header and a payload: the first part rides with the header."""
    parts = payload.parts()
    first = next(parts, None)
    yield Frame(header) if first is None else Frame(header, *first)
    for offset, buffers in parts:
        yield Frame(b"", offset, buffers)


MIN_PART_BYTES = 1 << 12
"""What parts have on the average at least, so that what a peer announced bounds what it costs to hold."""

SPARE_PARTS = 16
"""How many parts may be smaller than that."""


class Assembly:
    """Collects the parts of one payload as they come; bounds what a peer may send.

    Args:
        size: bytes that the header announced.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._chunks: list[tuple[int, memoryview]] = []
        self._end = 0
        self._room = SPARE_PARTS + size // MIN_PART_BYTES

    def add(self, frame: Frame) -> None:
        """Takes the part of a frame, if it has one; raises `InvalidRequest` if it is out of place."""
        size = sum(len(buffer) for buffer in frame.data or ())
        if not size:
            return
        self._room -= 1
        if frame.offset != self._end or self._end + size > self.size:
            raise InvalidRequest(f"a part of {size} bytes at {frame.offset}; expected {self._end} of {self.size}")
        # A part holds its whole message in memory, and an array cannot begin within an element.
        if frame.offset % ALIGN or self._room < 0:
            raise InvalidRequest(f"parts of {self.size} bytes are cut too small, or not at {ALIGN} bytes")
        for buffer in frame.data or ():
            self._chunks.append((self._end, buffer))
            self._end += len(buffer)

    @property
    def whole(self) -> bool:
        """Whether all bytes are there."""
        return self._end == self.size

    def payload(self) -> Payload:
        """The payload; raises `InvalidRequest` if parts are missing."""
        if not self.whole:
            raise InvalidRequest(f"the stream ended at byte {self._end} of {self.size}")
        return Payload(self._chunks, self.size)
