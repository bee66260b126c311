"""The Unix socket of a server.

Its name exists while the server listens; a later server removes those of killed ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import tempfile
from pathlib import Path

SHARED = Path("/dev/shm")
"""Directory of the socket, if it exists: containers that share memory share it."""

PREFIX = "paramserver-"
"""Prefix of the socket's name."""


def listen(backlog: int) -> tuple[socket.socket, Path]:
    """Opens a listening Unix socket; returns it and its path, which the caller removes.

    Args:
        backlog: number of clients that may wait to be accepted.

    Raises:
        OSError: the socket cannot be had.
    """
    folder = SHARED if os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir())
    _remove_dead(folder)
    path = folder / f"{PREFIX}{secrets.token_hex(8)}"
    new = path.with_name(f".{path.name}")
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(new))
        new.chmod(0o666 if folder == SHARED else 0o600)  # the token protects it
        listener.listen(backlog)
        new.rename(path)  # not before: a name without a listener counts as a dead server's
    except OSError:
        listener.close()
        new.unlink(missing_ok=True)
        raise
    return listener, path


def _remove_dead(folder: Path) -> None:
    """Removes the sockets of killed servers, at which nobody listens."""
    for path in folder.glob(f"{PREFIX}*"):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.setblocking(False)
            if path.is_socket() and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
