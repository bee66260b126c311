"""What is given by name, or came from elsewhere: files that may be without an end, and names for a terminal."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from pswire.errors import ConfigError

MOST_BYTES = 4 << 20
"""Bytes of a file of settings, of a certificate, or of a token."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def open_regular(path: str) -> int:
    """Opens a file for reading; returns its descriptor. Waits for nobody, as who opens a FIFO would.

    Raises:
        OSError: it cannot be opened, or is a FIFO, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def read_small(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Returns what a file has, which may be a pipe.

    Raises:
        OSError: it cannot be read.
        ConfigError: it has more bytes than are read.
    """
    with open(path, "rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise ConfigError(f"{path} has more than {most >> 20} MiB, so it cannot be the right file; check the path")
    return found


def printable(text: str) -> str:
    r"""Returns a text without characters that steer a terminal: those are written as `\x1b` is here."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
