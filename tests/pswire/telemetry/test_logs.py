"""The log, as text and as JSON, and what of it is read back."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pswire.telemetry import logging_setup
from pswire.telemetry.metrics import Histogram

SECONDS = 30


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    """What one test says of the process is not said in another."""
    token = logging_setup.SESSION.set(0)
    yield
    logging_setup.SESSION.reset(token)
    logging_setup.name("")
    logging_setup.follow(None)


def record(message: str = "it is so", *args: object, **more: object) -> logging.LogRecord:
    return logging.LogRecord("psserver", logging.WARNING, __file__, 1, message, args, more.get("exc_info"))


def said(one: logging.LogRecord) -> dict:
    """A record as JSON, read back."""
    line = logging_setup.Json().format(one)
    assert "\n" not in line
    found = logging_setup.read(line)
    assert found is not None
    return found


def test_a_line_says_where_its_process_stands():
    """Task, round and session come from those who know, and not from who writes the line."""
    logging_setup.name("/job:worker/task:1")
    logging_setup.follow(lambda: (12, 1_700_000_000_000_000_002))
    one = record("waits for %s", "worker 0")
    found = said(one)
    assert datetime.fromisoformat(found.pop("time")).timestamp() == pytest.approx(one.created, abs=0.001)
    assert found == {
        "level": "warning",
        "logger": "psserver",
        "message": "waits for worker 0",
        "task": "/job:worker/task:1",
        "round": 12,
        "session": "1700000000000000002",
    }


def test_what_is_not_known_is_null():
    """The keys are always there."""
    found = said(record())
    assert (found["task"], found["round"], found["session"]) == (None, None, None)
    assert found["time"].endswith("Z")
    assert len(found["time"]) == len("2026-11-21T21:58:51.123Z")


def test_whose_call_is_answered_is_said_before_whose_process_it_is():
    """In the thread that answers it, and in no other."""
    logging_setup.follow(lambda: (3, 7))
    found = []

    def answer() -> None:
        logging_setup.SESSION.set(9)
        found.append(said(record())["session"])

    thread = threading.Thread(target=answer)
    thread.start()
    thread.join(SECONDS)
    assert [*found, said(record())["session"]] == ["9", "7"]


def test_an_error_has_its_traceback():
    """On the same line."""
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        found = said(record(exc_info=sys.exc_info()))
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ZeroDivisionError: division by zero")
    assert "exception" not in said(record())


@given(st.text())
def test_whatever_is_said_comes_back(text):
    """Line ends, quotes and codes of terminals do not end a line, nor change it."""
    line = logging_setup.Json().format(record("%s", text))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    found = logging_setup.read(line)
    assert found is not None
    assert found["message"] == text


def test_arguments_that_do_not_fit_are_said():
    """A mistake of who writes the line makes one line, too, in JSON."""
    assert said(record("%d of them", "x"))["message"].startswith("'%d of them', with arguments that cannot be written")


def test_long_texts_lose_their_middle():
    """So that who relays a line takes it whole."""
    found = said(record("a" * 50_000 + "z" * 50_000))["message"]
    assert len(found) < 2 * logging_setup.MAX_CHARACTERS
    assert (found[:100], found[-100:]) == ("a" * 100, "z" * 100)


@pytest.mark.parametrize("line", ["", "{", "{}", "[1]", '{"level": "info"}', "psworker: error: no", "{'a': 1}"])
def test_other_lines_are_not_taken_for_ours(line):
    """A script may print JSON of its own."""
    assert logging_setup.read(line) is None


@pytest.mark.parametrize(("named", "who"), [(True, "/job:ps/task:0 "), (False, "")])
def test_text_names_the_task_unless_others_do(named, who):
    """A launcher heads the lines of its tasks with their names."""
    logging_setup.name("/job:ps/task:0")
    line = logging_setup.Text(named).format(record())
    assert line[8:] == f" W {who}psserver: it is so"


def test_a_process_writes_nothing_but_json():
    """Its log, and the warnings of Python."""
    script = (
        "import logging, warnings\n"
        "from pswire.telemetry import logging_setup as logs\n"
        "logs.configure('json', 'info'); logs.name('me'); assert logs.structured()\n"
        "logging.getLogger('mine').info('one'); logging.getLogger('mine').debug('none'); warnings.warn('two')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["level"], line["task"]) for line in lines] == [("info", "me"), ("warning", "me")]
    assert "two" in lines[1]["message"]


# ---- Histograms ----


@given(st.lists(st.floats(0, 200)))
def test_a_histogram_counts_what_is_not_above_a_bound(values):
    """Bounds are included, and all values are in the last bucket."""
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    for name, count in histogram.buckets():
        assert count == sum(value <= float(name) for value in values)
    assert histogram.buckets()[-1] == ("+Inf", len(values))
    assert histogram.total == pytest.approx(sum(values))
