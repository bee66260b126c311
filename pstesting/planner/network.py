"""What the network between two hosts carries: this one, and one on which another process answers.

Zeros are sent, as many as are asked for. Nothing that comes is kept, or looked at.
"""

from __future__ import annotations

import socket
import socketserver
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pstesting.simulation.costs import OF_FRAMES
from pswire.cluster import join_address
from pswire.errors import ConfigError, Unreachable

CONNECTIONS = 4
"""That send at a time: one alone may wait for its own window."""

SECONDS = 2.0
"""For which each direction is measured, after half of that in which connections come to their speed."""

PINGS = 2000
"""Round trips, of which the middle one tells the latency."""

WORD = struct.Struct("<cQ")
"""What a connection asks for: to take bytes ("t") and say so, to send them ("s"), one byte ("p"), or the end ("e")."""

BLOCK = 1 << 18
LEAST, MOST = 1 << 16, 1 << 40
"""Bytes of one request."""

PATIENCE = 20.0
"""Seconds in which nothing comes, after which the other end counts as gone."""

ZEROS = bytes(BLOCK)


@dataclass(frozen=True)
class Network:
    """What the network between two hosts carries.

    Attributes:
        rate: bytes per second, headers included, in the slower of its two directions.
        latency: seconds that a message needs one way, beyond what it needs within one host.
    """

    rate: float
    latency: float


# ---- The end that answers ----


class _Answers(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


class _Connection(socketserver.BaseRequestHandler):
    """Does what its peer asks for, and is closed where that is nonsense."""

    def handle(self) -> None:
        sock: socket.socket = self.request
        sock.settimeout(PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError, struct.error):
            while True:
                kind, size = WORD.unpack(sock.recv(WORD.size, socket.MSG_WAITALL))
                if kind == b"e":
                    self.server.shutdown()
                    return
                if kind not in (b"p", b"s", b"t") or size > MOST:
                    return
                if kind == b"t":
                    _take(sock, size)
                _send(sock, size if kind == b"s" else 1)


def answer(host: str, port: int, told: Callable[[str], object]) -> None:
    """Answers on this host, until it has been measured once.

    Args:
        host: the address or name to listen on.
        port: 0 for any.
        told: called with the address, as `HOST:PORT`, once it listens.

    Raises:
        ConfigError: nothing can listen there.
    """
    try:
        answers = _Answers((host, port), _Connection)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port} ({error.strerror})") from None
    with answers:
        told(join_address(host, answers.server_address[1]))
        answers.serve_forever(poll_interval=0.1)


def _take(sock: socket.socket, size: int) -> None:
    memory = bytearray(BLOCK)
    while size:
        came = sock.recv_into(memory, min(size, BLOCK))
        if not came:
            raise ConnectionError("the other side has closed the connection")
        size -= came


def _send(sock: socket.socket, size: int) -> None:
    while size:
        sent = min(size, BLOCK)
        sock.sendall(memoryview(ZEROS)[:sent])
        size -= sent


# ---- The end that measures ----


def measure(host: str, port: int) -> Network:
    """Measures the network between this host and one where `answer` runs, which ends then.

    Raises:
        Unreachable: nobody answers there, or no more.
    """
    with _here() as here:
        within = _round_trip(*here)
    try:
        between = _round_trip(host, port)
        rate = min(_rate(host, port, kind) for kind in (b"t", b"s"))
        with _connected(host, port) as sock:
            sock.sendall(WORD.pack(b"e", 0))
    except OSError as error:
        raise Unreachable(
            f"{join_address(host, port)} does not answer ({error}); run psctl calibrate --answer {port} on that "
            "host, and check firewalls"
        ) from None
    return Network(rate / OF_FRAMES, max(between - within, 0.0) / 2)


@contextmanager
def _here() -> Iterator[tuple[str, int]]:
    """Has another process of this host answer; gives its address."""
    code = "from pstesting.planner.network import answer; answer('127.0.0.1', 0, lambda at: print(at, flush=True))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            host, _, port = process.stdout.readline().strip().rpartition(":")
            yield host, int(port)
        finally:
            process.kill()


def _connected(host: str, port: int) -> socket.socket:
    sock = socket.create_connection((host, port), PATIENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _round_trip(host: str, port: int) -> float:
    """Returns the seconds of the median round trip of a small message."""
    took = []
    with _connected(host, port) as sock:
        for _ in range(PINGS):
            begun = time.perf_counter()
            sock.sendall(WORD.pack(b"p", 0))
            _take(sock, 1)
            took.append(time.perf_counter() - begun)
    return statistics.median(took)


def _rate(host: str, port: int, kind: bytes) -> float:
    """Returns the bytes per second that connections move together, in one direction."""
    until = time.perf_counter() + 1.5 * SECONDS

    def move() -> float:
        found, size = [(0.0, 0)], LEAST  # when how much was moved
        with _connected(host, port) as sock:
            while found[-1][0] < until:
                begun = time.perf_counter()
                sock.sendall(WORD.pack(kind, size))
                if kind == b"t":
                    _send(sock, size)
                _take(sock, size if kind == b"s" else 1)
                now = time.perf_counter()
                found.append((now, found[-1][1] + size))
                size = min(max(LEAST, int(size * 0.1 / (now - begun))), MOST)  # some ten a second
        (first, before), (last, after) = next(each for each in found if each[0] > until - SECONDS), found[-1]
        return (after - before) / (last - first) if last > first else found[-1][1] / (1.5 * SECONDS)

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        return sum(each.result() for each in [threads.submit(move) for _ in range(CONNECTIONS)])
