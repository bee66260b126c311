"""Images as PNG, by zlib alone.

Source: "Portable Network Graphics (PNG) Specification", W3C, 2003.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""PNG's types of color by the number of channels: gray, gray with alpha, red-green-blue, and that with alpha."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode_png(image: npt.NDArray[np.uint8]) -> bytes:
    """Returns an image as a PNG file.

    Args:
        image: uint8, of shape (height, width, channels), none of them 0; channels as in `COLOR_TYPES`.
    """
    height, width, channels = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
    # Each row begins with the number of its filter; 0 is none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, width * channels)], axis=1)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
