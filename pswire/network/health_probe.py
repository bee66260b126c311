"""Asks a server whether it serves (`grpc.health.v1`), with the standard library alone.

Probes of containers ask every few seconds, and importing gRPC costs ten times as much as the rest. So this speaks as
much HTTP/2 as one call takes. It finds out only that a server serves; why one does not is for `psctl health`.
"""

from __future__ import annotations

import socket
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
ACK, END_STREAM, END_HEADERS, PADDED = 1, 1, 4, 8

LONGEST = 1 << 14
"""Bytes of a frame: no more may come, as this end has not allowed it."""

REQUEST = bytes(5)
"""A message of no bytes in gRPC's frame: the health of the whole server is asked for."""

SERVING = b"\0\0\0\0\2\x08\x01"
"""The message of a server that serves, in gRPC's frame."""


def serves(address: str, seconds: float, files: tuple[str, str, str] | None = None) -> bool:
    """Asks a server; returns True if it says that it serves.

    Args:
        address: the server's address, `host:port`.
        seconds: time that the server may take to answer.
        files: paths of a certificate, its key and the CA, in PEM; None for no TLS. The server may show any certificate
            that the CA has signed, because a probe knows an address and no task.

    Raises:
        OSError: there is no connection or no answer, or the ends do not agree on TLS.
        ValueError: this is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address")
    until = time.monotonic() + seconds
    with socket.create_connection((host.strip("[]"), int(port)), seconds) as sock:
        if files is None:
            return _asked(sock, "http", until)
        with _sealed(sock, *files) as sealed:
            return _asked(sealed, "https", until)


def _sealed(sock: socket.socket, certificate: str, key: str, ca: str) -> socket.socket:
    import ssl  # takes as long as all the rest, and is needed by few

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(ca)
    context.load_cert_chain(certificate, key, "")  # without a password OpenSSL would ask for one at the terminal
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(sock)


def _asked(sock: socket.socket, scheme: str, until: float) -> bool:
    names = {":method": "POST", ":scheme": scheme, ":path": "/grpc.health.v1.Health/Check", ":authority": "health"}
    names |= {"te": "trailers", "content-type": "application/grpc"}
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in names.items())
    call = _frame(HEADERS, END_HEADERS, 1, block) + _frame(DATA, END_STREAM, 1, REQUEST)
    sock.sendall(PREFACE + _frame(SETTINGS) + call)
    said = b""
    while len(said) < len(SERVING):
        head = _read(sock, 9, until)
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        if length > LONGEST or kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
            return False  # no server of ours, or an error in place of an answer
        payload = _read(sock, length, until)
        if kind == SETTINGS and not flags & ACK:
            sock.sendall(_frame(SETTINGS, ACK))
        elif kind == DATA:
            said += payload[1 : length - payload[0]] if payload and flags & PADDED else payload
    return said == SERVING


def _frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    """A text of at most 126 characters in a block of headers."""
    return bytes([len(text)]) + text.encode()


def _read(sock: socket.socket, count: int, until: float) -> bytes:
    found = b""
    while len(found) < count:
        sock.settimeout(max(until - time.monotonic(), 0.001))
        more = sock.recv(count - len(found))
        if not more:
            raise ConnectionError("the server has closed the connection")
        found += more
    return found
