"""Packets that vanish, as a firewall or a NAT loses them: of one connection alone, and nobody is told."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

from pswire.transport.tls_socket import Sealed, Stream

_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""A filter of the kernel's: `return 0`."""


def drop(sock: Stream) -> None:
    """Drops whatever arrives for a TCP connection from now on, acknowledgements too; this end is told nothing."""
    program = struct.pack("HL", 1, ctypes.addressof(_NOTHING))
    _plain(sock).setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def take_again(sock: Stream) -> None:
    """Drops nothing any more: what was lost is sent again by the system."""
    _plain(sock).setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def _plain(sock: Stream) -> socket.socket:
    return sock._sock if isinstance(sock, Sealed) else sock


def connections(*ports: int) -> Iterator[socket.socket]:
    """Both ends of all connections with some ports, as far as this process has them."""
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(file))) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and not _ports(sock).isdisjoint(ports):
                        yield sock


def _ports(sock: socket.socket) -> set[int]:
    return {sock.getsockname()[1], sock.getpeername()[1]}  # one that only listens has no other end
