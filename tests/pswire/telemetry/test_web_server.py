"""The port of metrics and pages has limits, and keeps to them; what fails is told."""

from __future__ import annotations

import socket
import time

import pytest

from pswire.telemetry import web_server
from pswire.telemetry.page import sampler
from tests.kit.rig import SOON, Job, eventually, serving
from tests.kit.telemetry import Served, page_of


@pytest.fixture
def job(tmp_path):
    """A job on one server."""
    with serving("core", 1, tmp_path) as servers:
        yield Job(servers)


def connected(served: Served, data: bytes = b"") -> socket.socket:
    """A connection on which some bytes were sent."""
    found = socket.create_connection(("127.0.0.1", served.port), SOON)
    found.sendall(data)
    return found


def raw(served: Served, data: bytes) -> bytes:
    """What the server answers to some bytes."""
    with connected(served, data) as connection:
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
        answer = raw(served, data)
        assert time.monotonic() - began < SOON / 2, "it waited for more"
        # Where it has not read all, the system may drop the answer.
        assert answer == b"" or status in answer.split(b"\r\n")[0], answer[:200]
        assert served.look().status == 200


def test_silent_connections_keep_nobody_out(job, monkeypatch):
    """The budget is full of connections that send nothing, or a byte now and then: the oldest makes room."""
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 6)
    monkeypatch.setattr(web_server, "HASTE_SECONDS", 0.2)
    with page_of(job) as served:
        slow = [connected(served, b"GET / HT" if n == 0 else b"") for n in range(6)]
        time.sleep(0.5)
        for _ in range(3):
            assert served.look().status == 200
        assert slow[0].recv(1) == b"", "the oldest was let go of"
        for each in slow:
            each.close()


def test_who_is_slow_is_let_go_of(job, monkeypatch):
    """A byte now and then is no request: the whole of it has its time."""
    monkeypatch.setattr(web_server, "SILENT_SECONDS", 0.6)
    with page_of(job) as served, connected(served) as slow:
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
        busy = [connected(served) for _ in range(3)]
        answer = raw(served, b"")
        assert b"503" in answer
        assert b"try again" in answer
        for each in busy:
            each.close()
        eventually(lambda: served.look().status == 200)


def test_so_many_pages_are_live_and_no_more(job, monkeypatch):
    """The others are told, and may look without; a stream that its reader has left makes room."""
    monkeypatch.setattr(web_server, "MAX_STREAMS", 2)
    with page_of(job) as served:
        request = f"GET /events?code={served.code} HTTP/1.0\r\n\r\n".encode()
        streams = [connected(served, request) for _ in range(2)]
        for each in streams:
            assert b"200" in each.recv(100)
        got = served.get(f"/events?code={served.code}")
        assert (got.status, got.headers["Retry-After"]) == (503, "10")
        assert served.look().status == 200
        for each in streams:
            each.close()

        def is_live() -> bool:
            with connected(served, request) as last:
                return b"200" in last.recv(100)

        eventually(is_live)


def test_the_end_of_the_server_ends_its_streams(job):
    """At once: nobody has to leave first."""
    with page_of(job) as served:
        stream = connected(served, f"GET /events?code={served.code} HTTP/1.0\r\n\r\n".encode())
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
    assert "could not read the state of the job" in got.text
    assert "could not read the state of the job" in caplog.text
