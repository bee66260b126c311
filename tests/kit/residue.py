"""What a test may leave behind: processes, ports, open files."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import psutil

from pstesting.forks import forked_from


def listens(address: str) -> bool:
    """Whether anybody accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def open_files() -> list[str]:
    """What the descriptors of this process stand for."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(link.readlink()))
    return found


def children() -> set[int]:
    """Ids of the processes that this one has started, and theirs; but for those that others are forked from."""
    return {process.pid for process in psutil.Process().children(recursive=True)} - forked_from
