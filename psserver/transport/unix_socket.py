"""The name of a server's Unix socket: there while somebody listens; those of killed servers go with the next one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import tempfile
from pathlib import Path

SHARED = Path("/dev/shm")
"""Where the socket is, if there is such a place: containers that share memory share it."""

PREFIX = "paramserver-"
"""With what its name begins."""


def listen(backlog: int) -> tuple[socket.socket, Path]:
    """A Unix socket that listens, and its path, which the caller removes; raises `OSError` where it cannot be had.

    Args:
        backlog: how many clients may wait to be let in.
    """
    folder = SHARED if os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir())
    _remove_dead(folder)
    path = folder / f"{PREFIX}{secrets.token_hex(8)}"
    new = path.with_name(f".{path.name}")
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(new))
        new.chmod(0o666 if folder == SHARED else 0o600)  # what opens it is the token
        listener.listen(backlog)
        new.rename(path)  # not before: a name at which nobody listens is a dead server's
    except OSError:
        listener.close()
        new.unlink(missing_ok=True)
        raise
    return listener, path


def _remove_dead(folder: Path) -> None:
    """Removes the names that killed servers have left: nobody listens there any more."""
    for path in folder.glob(f"{PREFIX}*"):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.setblocking(False)
            if path.is_socket() and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
