"""The status page is for whoever has a code of the job's token, for an hour, and changes nothing."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import time
from html import unescape

import numpy as np
import pytest

from pswire.security.link_codes import GOOD_SECONDS, check_code, make_code
from pswire.telemetry import web_server
from pswire.telemetry.page import sampler, status_page
from tests.kit.pages import OTHER_TOKEN, TOKEN, page_of
from tests.kit.rig import SOON, WORKERS, Job, serving

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
    """The page of its server."""
    with page_of(job) as found:
        yield found


# ---- Codes ----


def test_a_code_is_good_for_an_hour():
    """To the second, and for the job of its token."""
    code = make_code(TOKEN, NOW)
    assert check_code(TOKEN, code, NOW) is None
    assert check_code(TOKEN, code, NOW + GOOD_SECONDS - 1) is None
    assert check_code(TOKEN, code, NOW + GOOD_SECONDS) == "over"
    assert check_code(OTHER_TOKEN, code, NOW) == "other job"
    assert TOKEN not in code


def test_a_code_that_was_changed_is_not_taken():
    """Each digit counts: the end, the tag, and the proof."""
    code = make_code(TOKEN, NOW)
    for place, digit in enumerate(code):
        if digit != "-":
            changed = code[:place] + ("0" if digit != "0" else "1") + code[place + 1 :]
            assert check_code(TOKEN, changed, NOW) in ("wrong", "other job"), place


@pytest.mark.parametrize("code", ["x", "1-2-3", "é" * 80, "-" * 200, "1" * 100_000, make_code(TOKEN, NOW)[:-1]])
def test_what_is_no_code_is_not_taken(code):
    """Whatever came from the network."""
    assert check_code(TOKEN, code, NOW) == "malformed"


# ---- Who may look ----


def test_the_link_opens_the_page_and_the_cookie_keeps_it_open(served):
    """The cookie is for this job, no script reads it, and no other site sends it; it opens the events as well."""
    first = served.look()
    assert first.status == 200
    assert "job runs" in first.text
    cookie, *about = first.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(about)
    (age,) = [int(each.removeprefix("Max-Age=")) for each in about if each.startswith("Max-Age=")]
    assert GOOD_SECONDS - 60 < age <= GOOD_SECONDS
    assert served.get("/", Cookie=cookie).status == 200
    assert served.get("/", Cookie=f"other=1; {cookie}; more=2").status == 200
    assert served.get("/", Cookie="paramserver-00000000=1").status == 403


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", "needs a link with a code"),
        ("nothing", "not whole"),
        (make_code(OTHER_TOKEN, time.time()), "of another job"),
        (make_code(TOKEN, time.time() - GOOD_SECONDS - 1), "is over"),
    ],
    ids=["none", "malformed", "other job", "over"],
)
@pytest.mark.parametrize("path", ["/", "/events"])
def test_who_has_no_code_is_told_how_to_get_one(served, path, code, said):
    """And nothing of the job."""
    got = served.get(f"{path}?code={code}")
    assert got.status == 403
    assert said in got.text
    assert "psctl page" in got.text
    assert "worker" not in got.text
    assert "Set-Cookie" not in got.headers


def test_a_changed_code_is_refused(served):
    """The proof is of its end."""
    end, rest = served.code.split("-", 1)
    got = served.get(f"/?code={int(end, 16) + 3600:x}-{rest}")
    assert (got.status, "was changed" in got.text) == (403, True)


def test_events_end_with_the_code(job):
    """A page that stays open shows nothing after the hour, and says why."""
    with page_of(job) as served:
        code = make_code(TOKEN, time.time() - GOOD_SECONDS + 2)
        assert served.get(f"/?code={code}").status == 200
        got = served.get(f"/events?code={code}")  # the answer ends
        assert got.headers["Content-Type"] == "text/event-stream"
        assert "event: parts" in got.text
        assert "event: over" in got.text
        assert "The code is over" in got.text


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:9100", 200), ("[::1]:9100", 200), ("evil.example", 403), ("evil.example:80", 403)],
)
def test_without_a_token_the_page_is_for_this_machine(job, host, status):
    """No page from elsewhere reaches it by a name of its own that it lets lead here."""
    with page_of(job, token="") as served:
        got = served.get("/", Host=host)
    assert got.status == status
    assert ("job runs" in got.text) == (status == 200)


def test_without_a_token_others_are_told(job):
    """Their address counts, whatever they say."""
    page = status_page.StatusPage(sampler.Source(WORKERS[0], "", lambda: ((), ()), lambda index: (None, ())), "")
    try:
        for client, status in [("10.0.0.7", 403), ("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200)]:
            request = web_server.Request("/", "", {"host": "localhost"}, client)
            assert page.page(request).status == status, client
    finally:
        page.close()


def test_metrics_need_no_code(served):
    """They contain no names of variables, and Prometheus has no code."""
    got = served.get("/metrics")
    assert got.status == 200
    assert "paramserver_server_rounds_total" in got.text
    assert "alert" not in got.text


# ---- What is shown ----


def test_names_are_text(served):
    """A variable may have any name; it is shown as it is, and is no part of the page."""
    got = served.look()
    assert SCRIPT not in got.text
    assert SCRIPT in unescape(got.text)
    stream = served.get(f"/events?code={make_code(TOKEN, time.time() - GOOD_SECONDS + 2)}").text
    assert "event: parts" in stream
    assert SCRIPT not in stream


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


# ---- Nothing is changed ----


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_refused(served, method):
    """Also with a good code."""
    got = served.get(f"/?code={served.code}", method)
    assert (got.status, got.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/%2e%2e/etc/passwd", "/page.css", "/events/", "/metrics/x"])
def test_a_path_is_no_file(served, path):
    """There are three, and nothing else."""
    assert served.get(path).status == 404
    assert served.get(f"{path}?code={served.code}").status == 404


def test_looking_changes_nothing(job, served):
    """Neither the log, nor sessions, nor what the server was told last; no round waits."""
    core = job.servers.cores[0]
    before, recent = core.status(), [each.what for each in core.recent()]
    for _ in range(5):
        assert served.look().status == 200
    served.get(f"/events?code={make_code(TOKEN, time.time() - GOOD_SECONDS + 2)}")
    assert core.status() == before
    assert [each.what for each in core.recent()] == recent


# ---- Attacks on the port ----


def raw(port: int, data: bytes) -> bytes:
    """What the server answers to some bytes."""
    with socket.create_connection(("127.0.0.1", port), SOON) as connection:
        connection.sendall(data)
        found = b""
        try:
            while piece := connection.recv(1 << 16):
                found += piece
        except ConnectionResetError:  # it does not read what it does not take
            pass
        return found


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.0\r\n" + b"X-Long: " + b"a" * 20_000, b"431"),
        (b"GET / HTTP/1.0\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(5000)), b"431"),
        (b"GET /" + b"a" * 20_000, b"431"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    ],
    ids=["long header", "many headers", "long path", "no request", "version", "TLS"],
)
def test_a_request_is_bounded(job, monkeypatch, data, status):
    """What is too long, or no request, is refused at once, and no more of it is read; the next caller is answered."""
    monkeypatch.setattr(web_server, "SILENT_SECONDS", SOON)
    with page_of(job) as served:
        began = time.monotonic()
        answer = raw(served.port, data)
        assert time.monotonic() - began < SOON / 2, "it waited for more"
        # Where it has not read all, the system may drop the answer.
        assert answer == b"" or status in answer.split(b"\r\n")[0], answer[:200]
        assert served.look().status == 200


def test_silent_connections_keep_nobody_out(job, monkeypatch):
    """The budget is full of connections that send nothing, or a byte now and then: the oldest makes room."""
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 6)
    monkeypatch.setattr(web_server, "HASTE_SECONDS", 0.2)
    with page_of(job) as served:
        slow = [socket.create_connection(("127.0.0.1", served.port), SOON) for _ in range(6)]
        slow[0].sendall(b"GET / HT")
        time.sleep(0.5)
        for _ in range(3):
            assert served.look().status == 200
        assert slow[0].recv(1) == b"", "the oldest was let go of"
        for each in slow:
            each.close()


def test_who_is_slow_is_let_go_of(job, monkeypatch):
    """A byte now and then is no request: the whole of it has its time."""
    monkeypatch.setattr(web_server, "SILENT_SECONDS", 0.6)
    with page_of(job) as served, socket.create_connection(("127.0.0.1", served.port), SOON) as slow:
        began = time.monotonic()
        try:
            while time.monotonic() - began < SOON:
                slow.sendall(b"G")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - began < SOON / 2


def test_beyond_the_budget_there_is_an_answer(job, monkeypatch):
    """Who comes while all places are in use is told so at once."""
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(web_server, "HASTE_SECONDS", 60.0)
    with page_of(job) as served:
        busy = [socket.create_connection(("127.0.0.1", served.port), SOON) for _ in range(3)]
        answer = raw(served.port, b"")
        assert b"503" in answer
        assert b"try again" in answer
        for each in busy:
            each.close()
        deadline = time.monotonic() + SOON
        while served.look().status != 200:
            assert time.monotonic() < deadline


def test_so_many_pages_are_live_and_no_more(job, monkeypatch):
    """The others are told, and may look without; a stream that its reader has left makes room."""
    monkeypatch.setattr(web_server, "MAX_STREAMS", 2)
    with page_of(job) as served:
        request = f"GET /events?code={served.code} HTTP/1.0\r\n\r\n".encode()
        streams = [socket.create_connection(("127.0.0.1", served.port), SOON) for _ in range(2)]
        for each in streams:
            each.sendall(request)
            assert b"200" in each.recv(100)
        got = served.get(f"/events?code={served.code}")
        assert (got.status, got.headers["Retry-After"]) == (503, "10")
        assert served.look().status == 200
        for each in streams:
            each.close()
        deadline = time.monotonic() + SOON
        with socket.create_connection(("127.0.0.1", served.port), SOON) as last:
            last.sendall(request)
            found = last.recv(100)
        while b"200" not in found:
            assert time.monotonic() < deadline
            with socket.create_connection(("127.0.0.1", served.port), SOON) as last:
                last.sendall(request)
                found = last.recv(100)


def test_the_end_of_the_server_ends_its_streams(job):
    """At once: nobody has to leave first."""
    with page_of(job) as served:
        stream = socket.create_connection(("127.0.0.1", served.port), SOON)
        stream.sendall(f"GET /events?code={served.code} HTTP/1.0\r\n\r\n".encode())
        assert b"200" in stream.recv(100)
        began = time.monotonic()
    found = b""
    while piece := stream.recv(1 << 16):
        found += piece
    stream.close()
    assert time.monotonic() - began < SOON / 2
    assert b"the process has ended" in found


def test_a_fault_of_the_page_is_shown(job, monkeypatch, caplog):
    """And it is in the log; the server goes on."""
    monkeypatch.setattr(sampler, "view_of", lambda looked, expected=(): 1 / 0)
    with page_of(job) as served:
        got = served.look()
    assert got.status == 200
    assert "could not look at the job" in got.text
    assert "could not look at the job" in caplog.text
