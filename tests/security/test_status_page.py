"""The status page is for whoever has a code of the job's token, and changes nothing; certificates put it behind TLS."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from pstesting import forks
from pstesting.processes import SECONDS
from pswire.telemetry import web_server
from pswire.telemetry.page import sampler, status_page
from pswire.telemetry.web_server import HASTE_SECONDS, MAX_CONNECTIONS, SILENT_SECONDS
from tests.kit.certificates import Certificates, listening, options
from tests.kit.internals import GOOD_SECONDS, check_code, make_code
from tests.kit.rig import WORKERS, Job, eventually, serving
from tests.kit.telemetry import OTHER_TOKEN, TOKEN, page_of

SCRIPT = "<script>alert(1)</script>"
NOW = 1_700_000_000.0


@pytest.fixture
def job(tmp_path):
    """A job with a worker, and a variable whose name is an attack."""
    with serving("core", 1, tmp_path) as servers:
        found = Job(servers)
        (one,) = found.join(WORKERS[0])
        found.variable(one, np.zeros(4, "float32"), name=SCRIPT)
        yield found


@pytest.fixture
def served(job):
    with page_of(job) as found:
        yield found


def test_a_code_is_good_for_an_hour():
    """To the second, and for the job of its token. Each digit counts: the end, the tag, and the proof."""
    code = make_code(TOKEN, NOW)
    assert check_code(TOKEN, code, NOW) is None
    assert check_code(TOKEN, code, NOW + GOOD_SECONDS - 1) is None
    assert check_code(TOKEN, code, NOW + GOOD_SECONDS) == "over"
    assert check_code(OTHER_TOKEN, code, NOW) == "other job"
    assert TOKEN not in code
    for place, digit in enumerate(code):
        if digit != "-":
            changed = code[:place] + ("0" if digit != "0" else "1") + code[place + 1 :]
            assert check_code(TOKEN, changed, NOW) in ("wrong", "other job"), place
    for wrong in ("x", "1-2-3", "é" * 80, "-" * 200, "1" * 100_000, code[:-1]):
        assert check_code(TOKEN, wrong, NOW) == "malformed"


def test_the_link_opens_the_page_and_the_cookie_keeps_it_open(served):
    """The cookie is for this job, no script reads it, and no other site sends it; it opens the events as well."""
    first = served.look()
    assert first.status == 200
    assert "job is running" in first.text
    cookie, *about = first.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(about)
    (age,) = [int(each.removeprefix("Max-Age=")) for each in about if each.startswith("Max-Age=")]
    assert GOOD_SECONDS - 60 < age <= GOOD_SECONDS
    assert served.get("/", Cookie=cookie).status == 200
    assert served.get("/", Cookie=f"other=1; {cookie}; more=2").status == 200
    assert served.get("/", Cookie="paramserver-00000000=1").status == 403


def later(code, seconds):
    """A code whose end somebody has moved, which its proof shows."""
    end, rest = code.split("-", 1)
    return f"{int(end, 16) + seconds:x}-{rest}"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", "needs a link with a code"),
        ("nothing", "is incomplete"),
        (make_code(OTHER_TOKEN, time.time()), "belongs to another job"),
        (make_code(TOKEN, time.time() - GOOD_SECONDS - 1), "has expired"),
        (later(make_code(TOKEN, time.time()), 3600), "was changed"),
    ],
    ids=["none", "malformed", "other job", "over", "changed"],
)
@pytest.mark.parametrize("path", ["/", "/events"])
def test_who_has_no_code_is_told_how_to_get_one(served, path, code, said):
    """And nothing of the job."""
    got = served.get(f"{path}?code={code}")
    assert got.status == 403
    assert said in got.text
    assert "psctl dashboard" in got.text
    assert "worker" not in got.text
    assert "Set-Cookie" not in got.headers


def test_events_end_with_the_code(job, served):
    """A page that stays open shows nothing after the hour. Looking changes nothing; names are text."""
    core, code = job.servers.cores[0], make_code(TOKEN, time.time() - GOOD_SECONDS + 2)
    before, recent = core.status(), [each.what for each in core.events()]
    for _ in range(5):
        got = served.get(f"/?code={code}")
        assert got.status == 200
    assert SCRIPT not in got.text
    assert SCRIPT in unescape(got.text)
    got = served.get(f"/events?code={code}")  # the answer ends
    assert got.headers["Content-Type"] == "text/event-stream"
    assert "event: parts" in got.text
    assert SCRIPT not in got.text
    assert "event: over" in got.text
    assert "The code has expired" in got.text
    assert core.status() == before
    assert [each.what for each in core.events()] == recent


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:9100", 200), ("[::1]:9100", 200), ("evil.example", 403), ("evil.example:80", 403)],
)
def test_without_a_token_the_page_is_for_this_machine(job, host, status):
    """No page from elsewhere reaches it by a name of its own that it lets lead here; a caller's address counts."""
    with page_of(job, token="") as served:
        got = served.get("/", Host=host)
    assert got.status == status
    assert ("job is running" in got.text) == (status == 200)
    source = sampler.PageSource(WORKERS[0], "", lambda: ((), ()), lambda index: (None, ()))
    with closing(status_page.StatusPage(source, "")) as page:
        for client, status in [("10.0.0.7", 403), ("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200)]:
            request = web_server.Request("/", "", {"host": "localhost"}, client)
            assert page.page(request).status == status, client


def test_nothing_is_loaded_from_elsewhere_and_nothing_leaks(served):
    """The policy names our style and our script by their hashes; the link is told to nobody, and kept by no cache."""
    got = served.look()
    rules = dict(rule.split(" ", 1) for rule in got.headers["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    for name in ("style", "script"):
        (text,) = re.findall(f"<{name}>(.*?)</{name}>", got.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{name}-src"] == f"'sha256-{digest}'"
    assert not re.findall(r"""(?:src|href)=(?!"data:)""", got.text)
    assert not re.findall(r"\bon\w+=|style=", got.text)
    for name, value in {
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
    }.items():
        assert got.headers[name] == value
    assert served.code not in got.text


@pytest.mark.parametrize("code", [True, False])
def test_nothing_else_is_served(served, code):
    """There are three paths, which are no files, and two methods; also with a good code. Metrics need none: they
    contain no names of variables, and Prometheus has no code."""
    got = served.get("/metrics")
    assert got.status == 200
    assert "paramserver_server_rounds_total" in got.text
    assert "alert" not in got.text
    given = f"?code={served.code}" if code else ""
    for path in ("/../../etc/passwd", "/%2e%2e/etc/passwd", "/page.css", "/events/", "/metrics/x"):
        assert served.get(path + given).status == 404
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        got = served.get(f"/{given}", method)
        assert (got.status, got.headers["Allow"]) == (405, "GET, HEAD")


NAMES = ("metrics.paramserver", "ps-0.paramserver")


class Secured:
    """A real server with certificates and a metrics port, and the link that `psctl dashboard` prints for it."""

    def __init__(self, certificates: Certificates, address: str) -> None:
        self._ca = certificates.out / "ps-0" / "ca.crt"
        environ = os.environ | options(certificates.out).variables()
        command = [sys.executable, "-m", "psclient.psctl", "dashboard", "--server", "ps:0", "--address", address]
        self.said = forks.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        self.link = self.said.split()[1]
        self.port = urlsplit(self.link).port or 0

    def plain(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), SECONDS)

    def get(self, path: str, name: str = NAMES[0], ca: Path | None = None) -> str:
        """The whole answer to a request over TLS, as Prometheus asks: the server's certificate must have the name."""
        context = ssl.create_default_context(cafile=ca or self._ca)
        with context.wrap_socket(self.plain(), server_hostname=name) as sock:
            sock.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            return read(sock)


def read(sock: socket.socket) -> str:
    found = b""
    while data := sock.recv(1 << 16):
        found += data
    return found.decode()


@pytest.fixture(scope="module")
def secured(certificates: Certificates) -> Iterator[Secured]:
    with ExitStack() as stack:
        flags = ["--metrics-port", "0"]
        yield Secured(certificates, listening(stack, security=options(certificates.out), flags=flags)[1])


@pytest.mark.parametrize("name", NAMES)
def test_metrics_and_health_are_behind_tls(secured: Secured, certificates: Certificates, name: str) -> None:
    """By the name of all tasks or its own, to whoever knows the CA; no certificate is asked for."""
    assert "paramserver_certificate_expiry_timestamp_seconds" in secured.get("/metrics", name)
    assert secured.get("/healthz", name).startswith("HTTP/1.0 200")
    for wrong in ({"name": "ps-1.paramserver"}, {"ca": certificates.other / "ps-0" / "ca.crt"}):
        with pytest.raises(ssl.SSLCertVerificationError):
            secured.get("/metrics", **wrong)


def test_the_link_is_of_https(secured: Secured) -> None:
    """Its cookie is sent over TLS alone; without a code there is no page, and without TLS one line in HTTP."""
    assert secured.link.startswith("https://127.0.0.1:")
    assert "a browser warns, because it does not know the job's CA" in secured.said
    answer = secured.get(secured.link.removeprefix(f"https://127.0.0.1:{secured.port}"))
    assert answer.startswith("HTTP/1.0 200")
    assert "SameSite=Strict; Secure\r\n" in answer
    assert secured.get("/").startswith("HTTP/1.0 403")
    with secured.plain() as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read(sock)
    assert answer.startswith("HTTP/1.0 400")
    assert "this port uses TLS; open it with https" in answer
    assert "paramserver_" not in answer


def answered(secured: Secured) -> bool:
    """Whether a newcomer is answered; where the server came late to read the others, it is turned away."""
    try:
        return "200 OK" in secured.get("/healthz")
    except OSError:
        return False


def test_a_handshake_that_does_not_go_on_is_in_nobodys_way(secured: Secured) -> None:
    """Neither one that never begins, nor one that stops amid; they end after their time, and make room before."""
    with ExitStack() as stack:
        slow = [stack.enter_context(secured.plain()) for _ in range(MAX_CONNECTIONS)]
        for sock in slow[::2]:
            sock.sendall(b"\x16\x03\x01\x02\x00\x01")
        time.sleep(HASTE_SECONDS)  # else they may still be about to say something, and the newcomer is turned away
        began = time.monotonic()
        eventually(lambda: answered(secured))
        assert time.monotonic() - began < SILENT_SECONDS
        for sock in slow:
            assert sock.recv(1) in (b"", b"\x15")
