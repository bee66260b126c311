"""A stranger on gRPC's port: it speaks HTTP/2, has no token, and begins messages that it never ends."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
CHUNK = 16 << 10


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def _literal(name: str, value: str) -> bytes:
    """A header, neither indexed nor compressed."""
    return b"".join([b"\0", *(bytes([len(text)]) + text.encode() for text in (name, value))])


class Stranger:
    """One connection, on which messages are begun.

    Args:
        address: `host:port` of a server.
        path: of the method.
        size: bytes that each message announces; one less is sent.
        more: more headers.
    """

    def __init__(self, address: str, path: str, size: int, more: Sequence[tuple[str, str]] = ()) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)))
        self.sock.setblocking(False)
        self._path, self._size, self._more = path, size, more
        self._left: dict[int, int] = {}
        self._window: dict[int, int] = {}
        self._initial = self._connection = 65535
        self._out = bytearray(PREFACE + _frame(SETTINGS, 0, 0))
        self._in = bytearray()
        self.sent = 0

    def begin(self, streams: int) -> None:
        """Begins messages."""
        said = [(":method", "POST"), (":scheme", "http"), (":path", self._path), (":authority", "x")]
        said += [("te", "trailers"), ("content-type", "application/grpc"), *self._more]
        block = b"".join(_literal(*header) for header in said)
        for number in range(1 + 2 * len(self._left), 1 + 2 * (len(self._left) + streams), 2):
            self._out += _frame(HEADERS, 4, number, block)
            self._left[number] = self._size + 4  # of five bytes that say its size, and all but one of its own
            self._window[number] = self._initial

    def pump(self, seconds: float) -> None:
        """Sends as much as the server takes, for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            moved = self._send() + self._receive()
            if not moved:
                time.sleep(0.005)

    def _send(self) -> int:
        for number, left in self._left.items():
            size = min(left, CHUNK, self._window.get(number, 0), self._connection)
            if size > 0 and len(self._out) < 1 << 20:
                first = left == self._size + 4
                body = struct.pack(">BI", 0, self._size) if first else b""
                body += b"\0" * (size - len(body))
                self._out += _frame(DATA, 0, number, body)
                self._left[number] -= len(body)
                self._window[number] -= len(body)
                self._connection -= len(body)
        try:
            sent = self.sock.send(self._out) if self._out else 0
        except OSError:
            return 0
        del self._out[:sent]
        self.sent += sent
        return sent

    def _receive(self) -> int:
        try:
            data = self.sock.recv(1 << 16)
        except OSError:
            return 0
        self._in += data
        while len(self._in) >= 9:
            size = int.from_bytes(self._in[:3], "big")
            if len(self._in) < 9 + size:
                break
            kind, flags = self._in[3], self._in[4]
            stream = int.from_bytes(self._in[5:9], "big")
            self._take(kind, flags, stream, bytes(self._in[9 : 9 + size]))
            del self._in[: 9 + size]
        return len(data)

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & 1:
            for at in range(0, len(body), 6):
                key, value = struct.unpack(">HI", body[at : at + 6])
                if key == 4:
                    grown, self._initial = value - self._initial, value
                    self._window = {number: each + grown for number, each in self._window.items()}
            self._out += _frame(SETTINGS, 1, 0)
        elif kind == PING and not flags & 1:
            self._out += _frame(PING, 1, 0, body)
        elif kind == WINDOW_UPDATE:
            (more,) = struct.unpack(">I", body)
            if stream:
                self._window[stream] = self._window.get(stream, 0) + more
            else:
                self._connection += more
        elif (kind == HEADERS and flags & 1) or kind == 3:  # the server has answered, or ended it
            self._left.pop(stream, None)
            self._window.pop(stream, None)
