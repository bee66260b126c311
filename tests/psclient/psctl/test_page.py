"""Links to status pages: to which host they lead, and what may stand in them."""

from __future__ import annotations

import pytest

from psclient.psctl.page import _nothing, _number, _of_chief, _of_servers
from pswire.errors import ConfigError
from pswire.telemetry.views.job_view import JobView, Problem, ServerView, TaskView

CODE = "1-2-3"


def server(page: str, address: str = "10.0.0.7:2222", number: int = 0, incarnation: int = 1) -> ServerView:
    return ServerView(f"/job:ps/task:{number}", address, "up", incarnation=incarnation, page=page)


def view(*servers: ServerView, tasks: tuple[TaskView, ...] = ()) -> JobView:
    problems = (Problem("unreachable", "/job:ps/task:1", "nothing listens there"),)
    return JobView("running", "whole", 1, 1, 1, 0, 0, servers, tasks, problems)


@pytest.mark.parametrize(
    ("page", "url", "local"),
    [
        ("http://127.0.0.1:9100/", "http://127.0.0.1:9100/?code=1-2-3", True),
        ("http://0.0.0.0:9100/", "http://10.0.0.7:9100/?code=1-2-3", False),
        ("http://[::]:9100/", "http://10.0.0.7:9100/?code=1-2-3", False),
        ("http://[::1]:9100/", "http://[::1]:9100/?code=1-2-3", True),
        ("http://ps-0.jobs:9100/", "http://ps-0.jobs:9100/?code=1-2-3", False),
    ],
)
def test_a_link_leads_to_where_the_page_is(page, url, local):
    """A server that listens everywhere is reached where psctl has reached it."""
    (link,) = _of_servers([server(page)], None, CODE)
    assert (link.url, link.local) == (url, local)


@pytest.mark.parametrize(
    "page", ["", "x", "javascript:alert(1)", "http://a:1/\x1b[2J", "http://a:1/?b", "http://a b:1/", "ftp://a:1/"]
)
def test_what_is_no_page_gets_no_code(page):
    """A task says where its page is; that goes to a terminal."""
    assert list(_of_servers([server(page)], None, CODE)) == []
    task = TaskView("/job:chief/task:0", True, "open", page=page)
    assert list(_of_chief(view(tasks=(task,)), CODE)) == []


def test_a_chief_that_is_gone_has_no_page():
    """Another one may have taken its place."""
    page = "http://127.0.0.1:9102/"
    tasks = tuple(TaskView("/job:chief/task:0", True, state, page=page) for state in ("lost", "open"))
    (link,) = _of_chief(view(tasks=tasks), "")
    assert link.url == page, "without a token there is no code"


def test_servers_have_short_names():
    """As the options of other commands have them."""
    assert [_number(text) for text in ("ps:1", "ps-1", "1")] == [1, 1, 1]
    with pytest.raises(ConfigError, match="write ps:0"):
        _number("worker:0")


def test_why_there_is_none_is_said():
    """And what to do."""
    found = view(server(""), server("", number=1, incarnation=0))
    assert "--metrics-port" in _nothing(found, None, False)
    assert "the chief tells of no status page" in _nothing(found, None, True)
    assert "ps-0 has no metrics port" in _nothing(found, 0, False)
    assert _nothing(found, 1, False) == "ps-1 does not answer: nothing listens there"
    assert "no ps-2 among the 2 servers" in _nothing(found, 2, False)
