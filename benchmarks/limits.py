"""The limits of this machine that a wire is measured against: memory, and plain TCP on loopback.

As a command it prints them.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from measures import spread

BLOCK = 1 << 20
"""Bytes that one system call may move: beyond that nothing gets faster."""

NBYTES = 100_000_000
"""Bytes that each measurement moves: as much as the largest model's gradients."""

TURNS, PINGS = 5, 200
"""Measurements of each kind at a time."""


@dataclass
class Limits:
    """Measurements so far; `measure` adds to them, so that they can lie between those of other things.

    Attributes:
        memcpy: bytes per second of copying one array into another, by one thread.
        tcp: bytes per second of one plain TCP connection between two processes on loopback, one way.
        ping: seconds of a round trip of one byte over that connection.
    """

    memcpy: list[float] = field(default_factory=list)
    tcp: list[float] = field(default_factory=list)
    ping: list[float] = field(default_factory=list)

    def measure(self, turns: int = TURNS) -> None:
        """Measures each of the three a few times."""
        source, target = np.ones(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
        for _ in range(turns):
            start = time.perf_counter()
            np.copyto(target, source)
            self.memcpy.append(NBYTES / (time.perf_counter() - start))
        with _sink() as peer:
            _send(peer, source.data)  # the connection's window grows
            self.tcp += [NBYTES / _send(peer, source.data) for _ in range(turns)]
            self.ping += [_send(peer, source[:1].data) for _ in range(PINGS)]

    def report(self) -> dict[str, dict[str, float]]:
        """The limits as they are written with `--json`."""
        return {
            "memcpy_gb_per_s": spread(self.memcpy, 1e-9),
            "tcp_gb_per_s": spread(self.tcp, 1e-9),
            "tcp_round_trip_us": spread(self.ping, 1e6),
        }


@contextmanager
def _sink() -> Iterator[socket.socket]:
    """A connection to another process that reads and answers; it ends with the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        command = [sys.executable, str(Path(__file__)), "sink", str(listener.getsockname()[1])]
        process = subprocess.Popen(command)
        peer, _ = listener.accept()
    try:
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield peer
    finally:
        process.wait()


def _send(peer: socket.socket, data: memoryview) -> float:
    """Sends a message, its size first; returns the seconds until the other has it whole."""
    start = time.perf_counter()
    peer.sendall(len(data).to_bytes(8, "little"))
    for at in range(0, len(data), BLOCK):
        peer.sendall(data[at : at + BLOCK])
    peer.recv(1)
    return time.perf_counter() - start


def _receive(port: int) -> None:
    """Reads messages into one buffer and answers each with a byte, until the connection ends."""
    buffer = memoryview(bytearray(NBYTES))
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := peer.recv(8, socket.MSG_WAITALL):
            at, size = 0, int.from_bytes(head, "little")
            while at < size:
                at += peer.recv_into(buffer[at : min(size, at + BLOCK)])
            peer.sendall(b"\0")


def main() -> None:
    """Prints the limits; `sink PORT` is the other end of the connection."""
    if sys.argv[1:2] == ["sink"]:
        _receive(int(sys.argv[2]))
        return
    limits = Limits()
    limits.measure()
    print(f"memcpy {statistics.median(limits.memcpy) / 1e9:.2f} GB/s")
    print(f"TCP one way {statistics.median(limits.tcp) / 1e9:.2f} GB/s")
    print(f"TCP round trip {statistics.median(limits.ping) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
