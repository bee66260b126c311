"""The health check without gRPC: what it takes for an answer, and what it does not."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pswire.network import health_probe
from pswire.network.health_probe import ACK, DATA, END_STREAM, GOAWAY, HEADERS, PADDED, RST_STREAM, SERVING, SETTINGS
from tests.kit.certificates import Certificates, guarded
from tests.kit.internals import Security

frame = health_probe._frame
BEGIN = frame(SETTINGS, payload=bytes(6)) + frame(SETTINGS, ACK) + frame(HEADERS, 4, 1, b"\x88")
TRAILERS = frame(HEADERS, END_STREAM | 4, 1, b"\x88")


def said(answer: bytes) -> bool:
    """What the probe makes of an answer after which the server is silent."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        return health_probe._asked(ours, "http", time.monotonic() + 60.0)


@pytest.mark.parametrize(
    ("answer", "serves"),
    {
        "at once": (BEGIN + frame(DATA, 0, 1, SERVING) + TRAILERS, True),
        "in two frames": (BEGIN + frame(DATA, 0, 1, SERVING[:3]) + frame(DATA, 0, 1, SERVING[3:]), True),
        "padded": (BEGIN + frame(DATA, PADDED, 1, b"\x02" + SERVING + bytes(2)), True),
        "not serving": (BEGIN + frame(DATA, 0, 1, SERVING[:-1] + b"\x02") + TRAILERS, False),
        "unknown": (BEGIN + frame(DATA, 0, 1, bytes(5)) + TRAILERS, False),
        "compressed": (BEGIN + frame(DATA, 0, 1, b"\x01" + SERVING[1:]), False),
        "no such service": (frame(SETTINGS) + TRAILERS, False),
        "reset": (BEGIN + frame(RST_STREAM, 0, 1, bytes(4)), False),
        "goes away": (frame(SETTINGS) + frame(GOAWAY, 0, 0, bytes(8)), False),
        "another protocol": (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", False),
    }.values(),
)
def test_a_server_serves_where_it_says_so(answer: bytes, serves: bool) -> None:
    """In gRPC's own frame, however that is cut; an error, another status or another protocol is no such answer."""
    assert said(answer) is serves


@pytest.mark.parametrize("length", range(0, len(BEGIN) + 16, 7))
def test_half_an_answer_is_none(length: int) -> None:
    """The connection's end is an error; and so is silence, after the time that was given."""
    part = (BEGIN + frame(DATA, 0, 1, SERVING))[:length]
    with pytest.raises(ConnectionError):
        said(part)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(part)
        with pytest.raises(TimeoutError):
            health_probe._asked(ours, "http", time.monotonic())


def test_both_ends_show_certificates(certificates: Certificates) -> None:
    """Any certificate of the CA will do for the server; one of another CA, or none, is refused by either end."""

    def files(directory: Path) -> tuple[str, str, str]:
        return f"{directory}/tls.crt", f"{directory}/tls.key", f"{directory}/ca.crt"

    with guarded(certificates.of("ps-0")) as server, guarded(Security()) as plain:
        assert health_probe.serves(server.address, 60.0, files(certificates.out / "ps-1"))
        assert health_probe.serves(plain.address, 60.0)
        with pytest.raises(ssl.SSLError):
            health_probe.serves(server.address, 60.0, files(certificates.other / "ps-0"))
        certificate, key, _ = files(certificates.other / "ps-0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            health_probe.serves(server.address, 60.0, (certificate, key, f"{certificates.out}/ps-0/ca.crt"))
        with pytest.raises(OSError):
            health_probe.serves(plain.address, 60.0, files(certificates.out / "admin"))
        with suppress(OSError):  # the server closes the connection, or answers with an alert of TLS
            assert not health_probe.serves(server.address, 60.0)
