"""What processes report: the log as text and as JSON, histograms with exemplars, and views of a job for people."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pswire.cluster import Task
from pswire.model import log as job_log
from pswire.model.log import Generation, GenerationClosed, JobStarted, LogEntry, Member, Snapshotted
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.status import SessionState
from pswire.model.tensor import TensorSpec
from pswire.telemetry import logging_setup
from pswire.telemetry.metrics import ALL, Histogram, Row
from pswire.telemetry.page.markup import table
from pswire.telemetry.page.time_line import time_line
from pswire.telemetry.prometheus import Page
from pswire.telemetry.views.history import KEPT, LIVES, Event, JobHistory, Life, lives_of
from pswire.telemetry.views.rates import phase_words

SECONDS = 30


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    """What one test says of the process is not said in another."""
    token = logging_setup.SESSION.set(0)
    logging_setup.name("")  # tests of commands have named this process
    logging_setup.follow(None)
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
    """Task, round and session come from those who know, and not from who writes the line. The keys are always there:
    what is not known is null."""
    found = said(record())
    assert (found["task"], found["round"], found["session"]) == (None, None, None)
    assert found["time"].endswith("Z")
    assert len(found["time"]) == len("2026-11-21T21:58:51.123Z")
    logging_setup.name("/job:worker/task:1")
    logging_setup.follow(lambda: (12, 1_700_000_000_000_000_002))
    one = record("waits for %s", "worker 0")
    found = said(one)
    assert datetime.fromisoformat(found.pop("time")).timestamp() == pytest.approx(one.created, abs=0.001)
    who = {"task": "/job:worker/task:1", "round": 12, "session": "1700000000000000002"}
    assert found == {"level": "warning", "logger": "psserver", "message": "waits for worker 0", **who}


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


def test_lines_that_go_wrong_are_said():
    """Arguments that do not fit make one line, too; long texts lose their middle, so that who relays takes all."""
    assert said(record("%d of them", "x"))["message"].startswith(
        "'%d of them', with arguments that cannot be formatted"
    )
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


# ---- Exemplars ----

LABELS = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def pages() -> Iterator[tuple[Page, Page]]:
    """Pages of the same values, with and without exemplars."""
    traced, plain = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value, labels in ((0.5, None), (0.75, LABELS), (1.5, None), (7.0, LABELS)):
        traced.observe(value, labels)
        plain.observe(value)
    rows = [Row("paramserver_test_seconds", "histogram", "A test's.", lambda found: {ALL: found})]
    found = [Page("127.0.0.1", 0, lambda of=each: [(rows, of)]) for each in (traced, plain)]
    yield found[0], found[1]
    for page in found:
        page.close()


def asked(page: Page, accept: str) -> tuple[str, list[str]]:
    with urlopen(Request(page.url, headers={"Accept": accept}), timeout=10) as answer:
        text = answer.read().decode()
        return text, [line for line in text.splitlines() if "paramserver_test" in line]


def test_openmetrics_has_exemplars(pages):
    """A bucket has the last value in it that was traced, with its trace."""
    text, _ = asked(pages[0], OPENMETRICS)
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == "paramserver_test_seconds"]
    found = {sample.labels["le"]: sample.exemplar for sample in family.samples if "le" in sample.labels}
    assert found["1.0"].labels == LABELS
    assert {bound: each and each.value for bound, each in found.items()} == {"1.0": 0.75, "2.0": None, "+Inf": 7.0}


def test_the_plain_format_stays_as_it_is(pages):
    """No exemplar, and not a character else."""
    traced, plain = (asked(page, "text/plain; version=0.0.4")[1] for page in pages)
    assert traced == plain
    assert not any("trace_id" in line for line in traced)
    _, without = asked(pages[1], OPENMETRICS)
    assert not any("#" in line and "trace_id" in line for line in without)


# ---- Views of a job ----

ONE, TWO, AGAIN = (Member(Task("worker", n), session, 1) for n, session in ((0, 1), (1, 2), (1, 3)))
BEGUN = JobStarted(7, (11, 12))
VARIABLE = PlacedVariable(0, VariableSpec("w", TensorSpec("float32", (4,)), True), (0,))


class Log:
    """A log that the test writes."""

    def __init__(self, *entries: LogEntry) -> None:
        self.entries = list(entries)

    def read(self, index: int) -> tuple[LogEntry | None, list[LogEntry]]:
        """As `ReadLog`."""
        return next(iter(self.entries), None), self.entries[index:]


def followed(log: Log) -> JobHistory:
    """A history that has read the log at time 10."""
    history = JobHistory(log.read)
    history.follow(10.0)
    return history


def test_generations_say_who_came_and_who_went():
    """By sessions: a task that was started again has come, and its last process has gone."""
    log = Log(BEGUN, GenerationClosed(Generation(1, (ONE, TWO))))
    history = followed(log)
    log.entries += [GenerationClosed(Generation(2, (ONE,))), GenerationClosed(Generation(3, (ONE, AGAIN)))]
    history.follow(20.0)
    assert [(event.time, event.said) for event in history.events] == [
        (None, "a chief started the job on 2 servers"),
        (None, "generation 1: worker-0, worker-1"),
        (20.0, "generation 2: worker-0; left: worker-1"),
        (20.0, "generation 3: worker-0, worker-1; joined: worker-1"),
    ]


def test_each_decision_is_told_once():
    """Losses, checkpoints, the end; variables are kept apart. Another job begins anew, with the time at which it was
    seen; of its many events the newest stay."""
    log = Log(BEGUN)
    history = followed(log)
    log.entries += [
        job_log.Created(VARIABLE), Snapshotted(b"p", 5, "run/1"), Snapshotted(b"q", 6, "run/2", "no room"),
        job_log.Gone(1, "was lost"), job_log.Lost(0, "it was silent"), job_log.Done(),
    ]  # fmt: skip
    history.follow(11.0)
    history.follow(12.0)
    assert [(event.what, event.time) for event in history.events[1:]] == [
        *(("checkpoint", 11.0), ("checkpoint", 11.0), ("loss", 11.0), ("loss", 11.0), ("end", 11.0))
    ]
    assert "no room" in history.events[2].said
    assert "goes on with copies" in history.events[3].said
    assert history.variables == [VARIABLE]
    log.entries[:] = [JobStarted(8, (11, 12)), GenerationClosed(Generation(1, (ONE,)))]
    history.follow(30.0)
    assert [(event.what, event.time) for event in history.events] == [("begin", 30.0), ("generation", 30.0)]
    assert history.variables == []
    log.entries += [GenerationClosed(Generation(number, (ONE,))) for number in range(2, 3 * KEPT)]
    history.follow(40.0)
    assert len(history.events) == KEPT
    assert history.events[-1].said == f"generation {3 * KEPT - 1}: worker-0"


def test_a_life_ends_when_it_was_heard_of_last():
    """An open one goes on; of a server that does not tell when sessions began there is nothing to draw."""
    sessions = [
        SessionState(TWO, "lost", "", 12.0, opened=40.0),
        SessionState(AGAIN, "open", "", 0.5, opened=10.0),
        SessionState(ONE, "open", "", 0.1),
    ]
    task = "/job:worker/task:1"
    assert lives_of(sessions) == [Life(task, False, "lost", 40.0, 12.0), Life(task, False, "open", 10.0, 0.0)]
    many = [SessionState(ONE, "failed", "", 1.0, opened=float(n)) for n in range(1, 100)]
    assert [life.began for life in lives_of(many)] == [float(n) for n in range(LIVES, 0, -1)]


def test_the_time_line_is_said_in_words_as_well():
    """Each bar has a label and cells with the same; generations are marks where their time is known."""
    lives = [Life("/job:worker/task:1", False, "lost", 40.0, 12.0), Life("/job:chief/task:0", True, "open", 20.0, 0.0)]
    events = [Event(at, what, "", BEGUN) for at, what in ((None, "generation"), (90.0, "generation"), (95.0, "loss"))]
    drawn = time_line(lives, events, 100.0)
    assert 'aria-label="worker-1: from 40 s ago until 12 s ago: lost: no heartbeat"' in drawn
    assert 'aria-label="chief-0 (drives): from 20 s ago until now"' in drawn
    assert '<rect class="ended" x="0" y="3" width="700"' in drawn
    assert '<rect class="open" x="500" y="3" width="500"' in drawn
    assert drawn.count('class="generation" d="M750 0') == drawn.count('class="generation"') == 2
    assert time_line([], events, 100.0) == ""


def test_tables_name_their_rows_and_columns():
    """For who hears them; a column that is empty in all rows is left out, and all text is text."""
    found = table("A & B", ("name", "state", "none"), [{"name": "<b>", "state": "up"}, {"name": "y", "state": "lost"}])
    assert "<caption><span>A &amp; B</span></caption>" in found
    assert found.count('scope="col"') == 2
    assert '<th scope="row">&lt;b&gt;</th><td class="good">up</td>' in found
    assert '<td class="bad">lost</td>' in found


def test_a_round_s_time_in_words():
    """The phases in their order, whatever the order in which they came."""
    assert phase_words({"answering": 0.001, "waiting": 0.006, "applying": 0.003}) == (
        "10.0 ms: waiting 60 %, applying 30 %, answering 10 %"
    )
    assert phase_words({}) == ""
