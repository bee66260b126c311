"""The status page is for whoever has a code of the job's token, for an hour, and changes nothing."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from html import unescape

import numpy as np
import pytest

from pswire.telemetry import web_server
from pswire.telemetry.page import sampler, status_page
from tests.kit.internals import GOOD_SECONDS, check_code, make_code
from tests.kit.rig import WORKERS, Job, serving
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
