"""A link that delays packets, both ways: a program that moves frames between two network namespaces.

It needs no kernel with `netem`, which many lack. Each end of the link is a TAP interface, which this program makes, and
which is gone once it ends. As a script it imports nothing but the standard library.

    python delays.py SECONDS INTERFACE NAMESPACE INTERFACE NAMESPACE
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000
CLONE_NEWNET = 0x40000000

MTU = 9000
"""The largest packet: large, so that few frames have to be moved."""

MOST = 64
"""Frames that are read in a row before others are written."""


def open_tap(interface: str, namespace: str) -> int:
    """Makes a TAP interface in a network namespace, and returns its file, which may be used in any.

    Args:
        interface: the interface's name.
        namespace: path of the namespace's file. This process is in it afterwards.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace, "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", interface.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def relay(one: int, other: int, delay: float) -> None:
    """Moves frames between two files, each after so many seconds, until one of them ends."""
    queues: dict[int, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}
    peers = {one: other, other: one}
    while True:
        first = min((queue[0][0] for queue in queues.values() if queue), default=None)
        wait = None if first is None else max(first - time.monotonic(), 0.0)
        for source in select.select([one, other], [], [], wait)[0]:
            with suppress(BlockingIOError):
                for _ in range(MOST):
                    frame = os.read(source, 1 << 16)
                    queues[source].append((time.monotonic() + delay, frame))
        now = time.monotonic()
        for source, queue in queues.items():
            while queue and queue[0][0] <= now:
                with suppress(OSError):  # the interface is not up yet, or full: a packet is lost
                    os.write(peers[source], queue.popleft()[1])


def main(delay: str, *ends: str) -> None:
    """Makes both ends, says so with one byte, and moves frames."""
    one, other = open_tap(*ends[:2]), open_tap(*ends[2:])
    os.write(1, b"!")
    relay(one, other, float(delay))


if __name__ == "__main__":
    main(*sys.argv[1:])
