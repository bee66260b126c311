"""A small HTTP server that answers `GET`, and nothing else. It has a fixed budget of connections, and waits for nobody.

Each connection has a thread, for one request. Who sends no request in time is let go of, and at once where another one
needs the place, so that silent connections keep nobody out. With certificates a handshake of TLS comes first, in the
connection's thread and within the time for a request.
"""

from __future__ import annotations

import io
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

log = logging.getLogger("pswire")

SILENT_SECONDS = 10.0
"""Seconds in which a request has to be here, and in which an answer has to be taken."""

HASTE_SECONDS = 1.0
"""Seconds that a connection has for its request where another one needs its place."""

HEAD_BYTES = 16 << 10
"""Bytes of a request, which has no body."""

HANDSHAKE = b"\x16"
"""The first byte of TLS."""

MAX_CONNECTIONS = 40
"""Connections at a time."""

MAX_STREAMS = 8
"""How many of them may have an answer that does not end."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer, unless it has others."""


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        path: its path, as it came; it is compared, and never used as a name of a file.
        query: the query, as it came.
        headers: its headers, by name in lower case; of several the last.
        client: address of the other end, without port.
        encrypted: True if it came over TLS.
    """

    path: str
    query: str
    headers: Mapping[str, str]
    client: str
    encrypted: bool = False

    def parameter(self, name: str) -> str:
        """Returns the first value of a parameter of the query; "" if there is none."""
        return parse_qs(self.query).get(name, [""])[0]


@dataclass(frozen=True)
class HttpReply:
    """An answer.

    Attributes:
        body: the whole of it.
        kind: its content type.
        status: HTTP's number.
        headers: more headers; they win over `HEADERS`.
        stream: more of the body, piece by piece, as it comes up; None for an answer that is complete.
    """

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: Iterator[bytes] | None = None


Answer = Callable[[Request], HttpReply]
"""Answers a request, in a thread of its connection."""


class Budget:
    """The connections that are open. May be used from any thread."""

    def __init__(self) -> None:
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        self._lock = threading.Lock()  # guards the next
        self._open: dict[socket.socket, float | None] = {}  # since when; None once the request is here; oldest first

    def admit(self, connection: socket.socket, now: float) -> bool:
        """Returns whether there is a place for one more; the oldest that has said nothing for a while makes room."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest, since = next(((each, since) for each, since in self._open.items() if since), (None, now))
                if oldest is None or now - since < min(HASTE_SECONDS, SILENT_SECONDS):
                    return False
                del self._open[oldest]
                try:  # its thread sees that, and closes it; TLS would be ended in the middle of that thread's work
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)
                except OSError:
                    pass
            self._open[connection] = now
            return True

    def asked(self, connection: socket.socket) -> None:
        """A request is here."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = None

    def leave(self, connection: socket.socket) -> None:
        """A connection has ended."""
        with self._lock:
            self._open.pop(connection, None)


class WebServer(ThreadingHTTPServer):
    """Serves some paths, in threads of its own, until it is closed.

    Args:
        host: address to listen on.
        port: port to listen on; 0 picks one.
        answers: for each path what answers it.
        context: returns the context of TLS for a new connection; None for plain HTTP.

    Raises:
        OSError: the port cannot be had.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, host: str, port: int, answers: Mapping[str, Answer], context: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self.answers = answers
        self._context = context
        self.budget = Budget()
        super().__init__((str(address[0]), port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, daemon=True, name="web server")
        self._thread.start()

    def server_bind(self) -> None:
        """Binds the port, and asks no name server for our own name, as the standard library would."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def get_request(self) -> tuple[Any, Any]:
        """Accepts a connection. Its handshake is for its thread."""
        connection, address = super().get_request()
        if self._context is None:
            return connection, address
        return self._context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection in a thread, if there is a place for it."""
        if self.budget.admit(request, time.monotonic()):
            super().process_request(request, client_address)
        else:
            _turn_away(request)
            super().shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        self.budget.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Notes quietly that a connection has broken."""
        log.debug("a connection for metrics or a status page failed", exc_info=True)

    def close(self) -> None:
        """Stops serving; answers that do not end are ended by those who give them."""
        self.shutdown()
        self._thread.join()
        self.server_close()


def _raw(status: HTTPStatus, text: str, header: str = "") -> bytes:
    """Returns the bytes of a short answer to a connection that has no handler."""
    head = f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Type: text/plain\r\n{header}"
    return f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()


def _turn_away(connection: socket.socket) -> None:
    """Says that there is no room, if that can be said at once."""
    if isinstance(connection, ssl.SSLSocket):
        return  # it would take a handshake to say so
    text = f"{MAX_CONNECTIONS} connections are open, which is the limit; try again\n"
    try:
        connection.send(_raw(HTTPStatus.SERVICE_UNAVAILABLE, text, "Retry-After: 2\r\n"), socket.MSG_DONTWAIT)
    except OSError:
        pass


def _shake(connection: ssl.SSLSocket) -> None:
    """Ends a handshake; whoever speaks without TLS is told so.

    Raises:
        OSError: there is none.
    """
    # Whatever is not the beginning of a handshake is taken for HTTP.
    if socket.socket.recv(connection, 1, socket.MSG_PEEK) not in (HANDSHAKE, b""):
        socket.socket.sendall(connection, _raw(HTTPStatus.BAD_REQUEST, "this port uses TLS; open it with https\n"))
        socket.socket.shutdown(connection, socket.SHUT_WR)
        socket.socket.recv(connection, HEAD_BYTES)  # else the system would throw the answer away with what was sent
        raise ConnectionAbortedError("a request without TLS")
    connection.do_handshake()


def _head(connection: socket.socket, until: float) -> bytes:
    """Receives a request, or more than `HEAD_BYTES` of one that is too long.

    Raises:
        OSError: it is not here in time.
    """
    found = b""
    while len(found) <= HEAD_BYTES and not (b"\n\r\n" in found or b"\n\n" in found):
        connection.settimeout(max(until - time.monotonic(), 0.001))
        more = connection.recv(HEAD_BYTES)
        if not more:
            break
        found += more
    return found


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    server_version, sys_version = "paramserver", ""

    def setup(self) -> None:
        until = time.monotonic() + SILENT_SECONDS
        self.request.settimeout(SILENT_SECONDS)
        if isinstance(self.request, ssl.SSLSocket):
            _shake(self.request)
        super().setup()
        head = _head(self.request, until)
        self._is_too_long, self.rfile = len(head) > HEAD_BYTES, io.BytesIO(head)
        self.request.settimeout(SILENT_SECONDS)

    def handle(self) -> None:
        if self._is_too_long:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            super().handle()

    def do_GET(self) -> None:
        self.server.budget.asked(self.connection)
        path, _, query = self.path.partition("?")
        answer = self.server.answers.get(path)
        if answer is None:
            self._send(HttpReply(b"there is nothing here; see /metrics, and / for the status page\n", status=404))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        encrypted = isinstance(self.connection, ssl.SSLSocket)
        reply = answer(Request(path, query, headers, str(self.client_address[0]), encrypted))
        if reply.stream is None or self.command == "HEAD":
            self._send(reply)
        elif not self.server.budget.streams.acquire(blocking=False):
            text = f"{MAX_STREAMS} live pages are open, which is the limit; reload this page\n"
            self._send(HttpReply(text.encode(), status=HTTPStatus.SERVICE_UNAVAILABLE, headers={"Retry-After": "10"}))
        else:
            try:
                self._send(reply)
            finally:
                self.server.budget.streams.release()

    do_HEAD = do_GET

    def refuse(self) -> None:
        """Refuses a method by which something could be changed."""
        text = b"this port is for reading: GET, and no other method\n"
        self._send(HttpReply(text, status=HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "GET, HEAD"}))

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = refuse

    def _send(self, reply: HttpReply) -> None:
        self.send_response(reply.status)
        if reply.stream is None:
            self.send_header("Content-Length", str(len(reply.body)))
        for name, value in {"Content-Type": reply.kind, **HEADERS, **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(reply.body)
        for piece in reply.stream or ():
            self.wfile.write(piece)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses a request that is none; what came in it is not sent back."""
        self.command = getattr(self, "command", "") or ""
        self.requestline, self.request_version = "", "HTTP/1.0"  # else who has said none would get no status
        self._send(HttpReply(f"the request is refused: {HTTPStatus(code).phrase}\n".encode(), status=code))

    def log_message(self, format: str, *args: object) -> None:
        log.debug("web server: " + format, *map(_printable, args))


def _printable(value: object) -> str:
    return "".join(each if each.isprintable() else "?" for each in str(value))
