"""Event files as TensorBoard reads them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.types_pb2 import DT_DOUBLE, DT_STRING


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """The numbers in a directory's event files: names, steps and values, in the order in which they were written."""
    return [(v.tag, each.step, v.simple_value) for each in _events(directory) for v in each.summary.value]


def _events(directory: Path) -> Iterator[Event]:
    """Records of their length, its sum, the bytes, and their sum."""
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def tensors(directory: Path) -> list[tuple[str, int, str, str, np.ndarray]]:
    """What is in a directory's event files: names, steps, plugins, descriptions and values, as they were written.

    Values are float64, or objects that are bytes; those of `scalar` have no plugin.
    """
    found = []
    for each in _events(directory):
        for v in each.summary.value:
            shape = [dim.size for dim in v.tensor.tensor_shape.dim]
            if not v.HasField("tensor"):
                value = np.float64(v.simple_value)
            elif v.tensor.dtype == DT_DOUBLE:
                value = np.frombuffer(v.tensor.tensor_content, "<f8")
            else:
                assert v.tensor.dtype == DT_STRING
                value = np.array([*v.tensor.string_val, None], object)[:-1]
            plugin, description = v.metadata.plugin_data.plugin_name, v.metadata.summary_description
            found.append((v.tag, each.step, plugin, description, value.reshape(shape)))
    return found


def decoded_png(data: bytes) -> np.ndarray:
    """The pixels of a PNG file whose rows have no filter: uint8, of shape (height, width, channels)."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    rest, chunks = data[8:], []
    while rest:
        (size,) = struct.unpack(">I", rest[:4])
        kind, body, (crc,) = rest[4:8], rest[8 : 8 + size], struct.unpack(">I", rest[8 + size : 12 + size])
        assert crc == zlib.crc32(kind + body)
        chunks.append((kind, body))
        rest = rest[12 + size :]
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, bits, color, *methods = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (bits, methods, chunks[2][1]) == (8, [0, 0, 0], b"")
    channels = {0: 1, 4: 2, 2: 3, 6: 4}[color]
    rows = np.frombuffer(zlib.decompress(chunks[1][1]), np.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)
