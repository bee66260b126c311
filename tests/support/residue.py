"""What a test may leave behind: processes, ports, open files."""

from __future__ import annotations

import socket

import psutil


def listens(address: str) -> bool:
    """Whether anybody accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def children() -> set[int]:
    """Ids of the processes that this one has started, and theirs."""
    return {process.pid for process in psutil.Process().children(recursive=True)}
