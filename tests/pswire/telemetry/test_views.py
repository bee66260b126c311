"""What is made of a job's log and sessions, for people."""

from __future__ import annotations

from pswire.cluster import Task
from pswire.model.log import Created, Done, Epoch, EpochClosed, Gone, JobStarted, LogEntry, Lost, Member, Snapshotted
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.status import SessionState
from pswire.model.tensor import TensorSpec
from pswire.telemetry.page.markup import table
from pswire.telemetry.page.time_line import time_line
from pswire.telemetry.views.history import KEPT, LIVES, Event, JobHistory, Life, lives_of
from pswire.telemetry.views.rates import phase_words

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


def test_epochs_say_who_came_and_who_went():
    """By sessions: a task that was started again has come, and its last process has gone."""
    log = Log(BEGUN, EpochClosed(Epoch(1, (ONE, TWO))))
    history = followed(log)
    log.entries += [EpochClosed(Epoch(2, (ONE,))), EpochClosed(Epoch(3, (ONE, AGAIN)))]
    history.follow(20.0)
    assert [(event.time, event.said) for event in history.events] == [
        (None, "a chief began the job on 2 servers"),
        (None, "epoch 1: worker-0, worker-1"),
        (20.0, "epoch 2: worker-0; not any more: worker-1"),
        (20.0, "epoch 3: worker-0, worker-1; came: worker-1"),
    ]


def test_each_decision_is_told_once():
    """Losses, checkpoints, the end; variables are kept apart."""
    log = Log(BEGUN)
    history = followed(log)
    log.entries += [
        Created(VARIABLE),
        Snapshotted(b"p", 5, "run/1"),
        Snapshotted(b"q", 6, "run/2", "no room"),
        Gone(1, "was lost"),
        Lost(0, "it was silent"),
        Done(),
    ]
    history.follow(11.0)
    history.follow(12.0)
    assert [(event.what, event.time) for event in history.events[1:]] == [
        *(("checkpoint", 11.0), ("checkpoint", 11.0), ("loss", 11.0), ("loss", 11.0), ("end", 11.0))
    ]
    assert "no room" in history.events[2].said
    assert "goes on with copies" in history.events[3].said
    assert history.variables == [VARIABLE]


def test_another_job_begins_anew():
    """Nothing of the last one stays; its entries have the time at which they were seen."""
    log = Log(BEGUN, Created(VARIABLE), Done())
    history = followed(log)
    log.entries[:] = [JobStarted(8, (11, 12)), EpochClosed(Epoch(1, (ONE,)))]
    history.follow(30.0)
    assert [(event.what, event.time) for event in history.events] == [("begin", 30.0), ("epoch", 30.0)]
    assert history.variables == []


def test_events_are_bounded():
    """The newest stay."""
    log = Log(BEGUN, *(EpochClosed(Epoch(number, (ONE,))) for number in range(1, 3 * KEPT)))
    history = followed(log)
    assert len(history.events) == KEPT
    assert history.events[-1].said == f"epoch {3 * KEPT - 1}: worker-0"


def test_a_life_ends_when_it_was_heard_of_last():
    """An open one goes on; of a server that does not tell when sessions began there is nothing to draw."""
    sessions = [
        SessionState(TWO, "lost", "", 12.0, opened=40.0),
        SessionState(AGAIN, "open", "", 0.5, opened=10.0),
        SessionState(ONE, "open", "", 0.1),
    ]
    assert lives_of(sessions) == [
        Life("/job:worker/task:1", False, "lost", 40.0, 12.0),
        Life("/job:worker/task:1", False, "open", 10.0, 0.0),
    ]
    many = [SessionState(ONE, "failed", "", 1.0, opened=float(n)) for n in range(1, 100)]
    assert [life.began for life in lives_of(many)] == [float(n) for n in range(LIVES, 0, -1)]


def test_the_time_line_is_said_in_words_as_well():
    """Each bar has a label and cells with the same; epochs are marks where their time is known."""
    lives = [Life("/job:worker/task:1", False, "lost", 40.0, 12.0), Life("/job:chief/task:0", True, "open", 20.0, 0.0)]
    events = [Event(None, "epoch", "", BEGUN), Event(90.0, "epoch", "", BEGUN), Event(95.0, "loss", "", BEGUN)]
    drawn = time_line(lives, events, 100.0)
    assert 'aria-label="worker-1: from 40 s ago until 12 s ago: lost: its lease ended"' in drawn
    assert 'aria-label="chief-0 (drives): from 20 s ago until now"' in drawn
    assert '<rect class="ended" x="0" y="3" width="700"' in drawn
    assert '<rect class="open" x="500" y="3" width="500"' in drawn
    assert drawn.count('class="epoch" d="M750 0') == drawn.count('class="epoch"') == 2
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
