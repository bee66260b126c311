"""The frames of the grpc transport: protobuf messages around the parts of a payload.

A part's frame is a valid protobuf message whose last bytes are the part's data, so encoding is one copy and
decoding none:

    +--------------------+----------------------------------------------+
    | field 1: header    | field 2: Part { offset, pad, data }          |
    +--------------------+----------------------------------------------+

On a stream of many calls the last frame of an answer has an end, field 3, before the part.

`pad` makes the data start at a multiple of `ALIGN` within the frame, so that arrays over it are aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN
from pswire.network.parts import Part

# Frames: protobuf's wire format of `{ bytes header = 1; Part part = 2; }` by hand, since the generated
# class copies the data twice more each way. A test holds that both write and read the same bytes.

_HEADER, _PART, _END = b"\x0a", b"\x12", b"\x1a"
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
        offset: place of the part's data in the payload, in bytes.
        data: the buffers of the part, in order; None where the frame has no part.
        end: where the frame ends an answer, the encoded error, or empty; None where it does not.
    """

    header: bytes = b""
    offset: int = 0
    data: Sequence[memoryview] | None = None
    end: bytes | None = None

    def encode(self) -> bytes:
        """Returns the bytes of the frame; the data are copied once."""
        head = _HEADER + _varint(len(self.header)) + self.header if self.header else b""
        if self.end is not None:
            head += _END + _varint(len(self.end)) + self.end
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
        end: bytes | None = None
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
            elif tag == _END[0]:
                end = bytes(buffer[start:at])
            else:
                raise InvalidRequest(f"a frame has an unknown field (tag {tag})")
        if data is None:
            return cls(header, offset, None, end)
        if len(buffer) - len(header) - len(data) > MAX_OVERHEAD:
            raise InvalidRequest("a frame is mostly padding")
        return cls(header, offset, (data,), end)


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


def within(field: int, message: bytes) -> bytes:
    """Returns the bytes of a message that has another one, encoded, in a field below 16, and nothing else."""
    return bytes((field << 3 | 2,)) + _varint(len(message)) + message


def frames(header: bytes, parts: Iterable[Part]) -> Iterator[Frame]:
    """The messages that carry a header and the parts of a payload: the first part rides with the header."""
    rest = iter(parts)
    first = next(rest, None)
    yield Frame(header) if first is None else Frame(header, *first)
    for offset, buffers in rest:
        yield Frame(b"", offset, buffers)
