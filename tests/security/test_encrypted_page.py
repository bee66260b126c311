"""Where a task has certificates, its metrics and its page are behind TLS, and nobody's handshake is in the way."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pstesting import forks
from pstesting.processes import CALM, SECONDS
from pswire.telemetry.web_server import HASTE_SECONDS, MAX_CONNECTIONS, SILENT_SECONDS
from tests.kit.certificates import Certificates, options
from tests.kit.internals import start_server

NAMES = ("metrics.paramserver", "ps-0.paramserver")


class Served:
    """A real server with certificates and a metrics port.

    Attributes:
        link: the link that `psctl page` prints for it.
    """

    def __init__(self, certificates: Certificates, address: str) -> None:
        self._ca = certificates.out / "ps-0" / "ca.crt"
        environ = os.environ | options(certificates.out).variables()
        command = [sys.executable, "-m", "psclient.psctl", "page", "--server", "ps:0", "--address", address]
        said = forks.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        self.said = said
        self.link = said.split()[1]
        self.port = urlsplit(self.link).port or 0

    def plain(self) -> socket.socket:
        """A connection without TLS."""
        return socket.create_connection(("127.0.0.1", self.port), SECONDS)

    def get(self, path: str, name: str = NAMES[0], ca: Path | None = None) -> str:
        """The whole answer to a request over TLS, as Prometheus asks: the server's certificate must have the name."""
        context = ssl.create_default_context(cafile=ca or self._ca)
        with context.wrap_socket(self.plain(), server_hostname=name) as sock:
            sock.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            return read(sock)


def read(sock: socket.socket) -> str:
    """All that comes."""
    found = b""
    while data := sock.recv(1 << 16):
        found += data
    return found.decode()


@pytest.fixture(scope="module")
def served(certificates: Certificates) -> Iterator[Served]:
    """The server."""
    with ExitStack() as stack:
        process, address = start_server(
            until_done=False, timeouts=CALM, security=options(certificates.out), flags=["--metrics-port", "0"]
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        yield Served(certificates, address)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_and_health_are_behind_tls(served: Served, name: str) -> None:
    """By the name that all tasks have, or the task's own; no certificate is asked for, as Prometheus has none."""
    assert "paramserver_certificate_expiry_timestamp_seconds" in served.get("/metrics", name)
    assert served.get("/healthz", name).startswith("HTTP/1.0 200")


def test_the_link_is_of_https(served: Served) -> None:
    """It sets a cookie that a browser sends over TLS alone; without a code the page is shown to nobody."""
    assert served.link.startswith("https://127.0.0.1:")
    assert "a browser knows neither the job's CA" in served.said
    answer = served.get(served.link.removeprefix(f"https://127.0.0.1:{served.port}"))
    assert answer.startswith("HTTP/1.0 200")
    assert "SameSite=Strict; Secure\r\n" in answer
    assert served.get("/").startswith("HTTP/1.0 403")


def test_another_name_and_another_ca_are_seen(served: Served, certificates: Certificates) -> None:
    """Who asks knows whom it asks."""
    with pytest.raises(ssl.SSLCertVerificationError):
        served.get("/metrics", "ps-1.paramserver")
    with pytest.raises(ssl.SSLCertVerificationError):
        served.get("/metrics", ca=certificates.other / "ps-0" / "ca.crt")


def test_a_request_without_tls_is_told(served: Served) -> None:
    """At once, in HTTP; it gets nothing else."""
    with served.plain() as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read(sock)
    assert answer.startswith("HTTP/1.0 400")
    assert "this port speaks TLS: ask for https" in answer
    assert "paramserver_" not in answer


def test_a_handshake_that_does_not_go_on_is_in_nobodys_way(served: Served) -> None:
    """Neither one that never begins, nor one that stops amid; they end after their time, and make room before."""
    with ExitStack() as stack:
        slow = [stack.enter_context(served.plain()) for _ in range(MAX_CONNECTIONS)]
        for sock in slow[::2]:
            sock.sendall(b"\x16\x03\x01\x02\x00\x01")
        time.sleep(HASTE_SECONDS)  # else they may still be about to say something, and the newcomer is turned away
        began = time.monotonic()
        assert "200 OK" in served.get("/healthz")
        assert time.monotonic() - began < SILENT_SECONDS
        for sock in slow:
            assert sock.recv(1) in (b"", b"\x15")
