"""Event files as TensorBoard reads them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


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
