"""Calls that wait: the same rules for all kinds of them, with everything that they wait for turned by the test."""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest

from psserver.calls import MAX_CALLS
from psserver.core.reads import Reads
from psserver.devices import ServerDevice
from psserver.effects import Fail, Reply, Work, attempt, settle
from psserver.rounds.clocks import Clocks
from psserver.rounds.late_answers import LateAnswers
from psserver.services.watches import Watches
from psserver.values.dense import Dense
from pswire.api import UNTIL_ENDED, UNTIL_GONE, PullRequest, WatchRequest
from pswire.cluster import Task
from pswire.errors import Fenced, InvalidRequest, ServerLost
from pswire.model.consistency import Consistency
from pswire.model.log import Generation, Member

ONE, TWO = 1, 2
"""Sessions."""


class Table:
    """Calls, and what they wait for: a log, a round that may write, rounds that are complete."""

    def __init__(self):
        self.log = SimpleNamespace(entries=[], losses=[], proposed={}, traces={})
        self.members = SimpleNamespace(version=0, states=lambda now: ())
        value = np.ones(1, "float32")
        self.store = SimpleNamespace(
            lent=frozenset(),
            find=lambda id: Dense(value),
            views=lambda ids: [Dense(value) for _ in ids],
            check_rows=lambda reads: None,
            ask=lambda reads: [],
            device=ServerDevice.parse("cpu"),
        )
        backlog = SimpleNamespace(behind=False, awaits=0)
        self.rounds = SimpleNamespace(last=-1, clocks=Clocks(), backlog=backlog, generation=None)
        self.replied = []
        self.watches = Watches(self.members)
        self.reads = Reads(self.store, self.rounds)
        self.late = LateAnswers(self.store, self.rounds, str, self.reply)
        self.calls = {
            "news": self.watches.news,
            "losses": self.watches.losses,
            "ends": self.watches.ends,
            "reads": self.reads.calls,
            "owed": self.late.owed,
            "ahead": self.late.ahead,
        }

    def reply(self, record, waiters):
        return [Reply(future, "the answer") for _, future in waiters]

    def add(self, kind, session=ONE, after=0, alone=False):
        """The future of a call that waits; `after` is the round of one that is owed, `alone` one that is no step."""
        future = Future()
        if kind in WATCHED:
            asked = WatchRequest(session, after, WATCHED[kind])
            self.carry_out(self.watches.add(asked, future, self.log, 0.0))
        elif kind == "reads":
            self.carry_out(self.reads.add(PullRequest(session, (0,), after), future))
        else:
            said = SimpleNamespace(session=session, round=after, want=(), lookups=(), alone=alone)
            self.late.add(said, future, "record")
        return future

    def progress(self):
        self.carry_out([*self.late.due(), *self.reads.answers(), *self.watches.answers(self.log, 0.0)])

    def carry_out(self, effects):
        for effect in effects:
            match effect:
                case Reply(future, value):
                    settle(future, value)
                case Fail(future, error):
                    settle(future, None, error)
                case Work(queue="arrays", call=call, args=args, future=future):
                    settle(future, *attempt(lambda call=call, args=args: call(*args)))

    def end(self, session, error):
        for calls in (self.watches, self.reads.calls, self.late):
            self.carry_out(calls.session_ended(session, error))

    def let_all(self):
        """All that is waited for has come."""
        self.log.entries.append("an entry")
        self.log.losses.append("a loss")
        self.rounds.last, self.store.lent = 0, frozenset()
        self.progress()

    def waiting(self, kind):
        return len(list(self.calls[kind]))


WATCHED = {"news": -1, "losses": UNTIL_GONE, "ends": UNTIL_ENDED}
KINDS = ("news", "losses", "reads", "owed")


@pytest.fixture
def table():
    """A round writes, and nothing has happened so far."""
    found = Table()
    found.store.lent = frozenset({0})
    return found


def done(*futures):
    return [future.done() for future in futures]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_waits_until_there_is_what_it_waits_for(table, kind):
    """And is answered once."""
    future = table.add(kind)
    table.progress()
    assert (done(future), table.waiting(kind)) == ([False], 1)
    table.let_all()
    assert (done(future), future.exception(), table.waiting(kind)) == ([True], None, 0)


@pytest.mark.parametrize("kind", [*KINDS, "ends"])
def test_whose_session_has_ended_is_told_why(table, kind):
    """Whatever it waits for has come or not; the others wait on."""
    mine, other = table.add(kind), table.add(kind, TWO)
    error = Fenced("it was ended")
    table.end(ONE, error)
    table.progress()
    assert done(mine, other) == [True, False]
    assert mine.exception() is error


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_one_session_are_bounded(table, kind):
    """The oldest of too many of a kind are refused; those of other kinds and sessions do not count."""
    others = [table.add(other, session) for other in KINDS for session in (ONE, TWO) if (other, session) != (kind, ONE)]
    mine = [table.add(kind) for _ in range(MAX_CALLS + 2)]
    table.progress()
    assert done(*mine, *others) == [True] * 2 + [False] * (MAX_CALLS + len(others))
    with pytest.raises(InvalidRequest, match=f"{MAX_CALLS} later calls"):
        mine[0].result()


@pytest.mark.parametrize("kind", KINDS)
def test_whose_caller_has_gone_away_waits_no_more(table, kind):
    table.add(kind).cancel()
    table.let_all()
    assert not table.waiting(kind)


def test_who_comes_looks_at_nobody_else(table):
    """Of a thousand processes each holds calls, and each that comes must not look at those of all others."""
    held = [table.add(kind, session) for session in range(ONE, 50) for kind in ("losses", "news")]
    table.progress()
    held[0].cancel()  # which a look at it would find out
    table.add("losses", 50)
    assert table.waiting("losses") == 50
    table.log.losses.append("a loss")
    table.progress()
    assert done(*held) == [True, False] * 49


def test_who_waits_for_the_end_hears_no_news(table):
    """And who has no session waits for nothing."""
    until, looking, reading = table.add("ends"), Future(), table.add("reads", 0, 9)
    table.carry_out(table.watches.add(WatchRequest(0, 0, 0), looking, table.log, 0.0))
    table.store.lent = frozenset()
    table.progress()
    assert done(until, looking, reading) == [False, True, True]
    table.let_all()
    assert done(until) == [False]


def test_a_variable_that_is_written_is_not_read(table):
    table.rounds.last = 0
    futures = [Future(), Future()]
    for id, future in enumerate(futures):
        table.reads.add(PullRequest(ONE, (id,), 0), future)
    table.progress()
    assert done(*futures) == [False, True]
    with pytest.raises(InvalidRequest, match="twice"):
        table.reads.add(PullRequest(ONE, (1, 1), 0), Future())


def bounded(table, workers):
    """Workers with bounded staleness, none of which may be more than a round ahead; all begin with round 0."""
    members = tuple(
        Member(Task("worker", each), each + 1, 1, Consistency("bounded", staleness=1)) for each in range(workers)
    )
    table.rounds.clocks.close_generation(None, Generation(1, members))
    table.store.lent = frozenset()


def test_an_answer_ahead_waits_until_the_last_has_come_near(table):
    """And as all others, while a round writes."""
    bounded(table, 3)
    clocks = table.rounds.clocks
    for session in (ONE, TWO):
        clocks.over(session, 1, False)
    futures = [table.add("owed", session, 1) for session in (ONE, TWO)]
    table.progress()
    assert (done(*futures), table.waiting("ahead")) == ([False, False], 2)
    table.store.lent = frozenset({0})
    clocks.over(3, 0, False)
    table.progress()
    assert (done(*futures), table.waiting("ahead"), table.waiting("owed")) == ([False, False], 0, 2)
    table.store.lent = frozenset()
    table.progress()
    assert done(*futures) == [True, True]


def test_a_round_that_counts_as_no_step_waits_for_no_clock(table):
    """Its number says nothing of how far its worker is."""
    bounded(table, 2)
    table.rounds.clocks.over(ONE, 1, False)
    futures = [table.add("owed", ONE, 1), table.add("owed", ONE, 7, alone=True)]
    said = SimpleNamespace(session=ONE, round=7, alone=True)
    assert table.late.hold("record", [(said, futures[1])]) == [(said, futures[1])]
    table.progress()
    assert done(*futures) == [False, True]


def test_who_is_ahead_is_looked_at_when_the_last_moves(table):
    """Of a thousand workers most may be ahead, and each push of another one must not look at them all."""
    bounded(table, 50)
    clocks = table.rounds.clocks
    for session in range(1, 49):
        clocks.over(session, 1, False)
    futures = [table.add("owed", session, 1) for session in range(1, 49)]
    table.progress()
    futures[0].cancel()  # which a look at it would find out
    clocks.over(49, 0, False)  # one of the last two
    table.progress()
    assert table.waiting("ahead") == 48
    clocks.over(50, 0, False)
    table.progress()
    assert done(*futures) == [True] * 48


def test_who_is_ahead_is_told_that_its_session_has_ended(table):
    """Though nobody else moves."""
    bounded(table, 2)
    table.rounds.clocks.over(ONE, 1, False)
    future = table.add("owed", ONE, 1)
    table.progress()
    error = Fenced("it was ended")
    table.end(ONE, error)
    assert future.exception(0) is error
    assert not table.waiting("ahead")


def test_answers_of_two_threads_do_not_disturb_each_other() -> None:
    """A server that ends fails what its threads are about to answer: who answers first is heard, and neither of them is
    told of the other; a caller that has gone away is not answered."""
    futures, gone = [Future[int]() for _ in range(2000)], Future[int]()
    gone.cancel()
    both, before = Barrier(2), sys.getswitchinterval()

    def each(error: bool) -> None:
        both.wait()
        for number, future in enumerate([gone, *futures]):
            settle(future, number, ServerLost("it ends") if error else None)

    sys.setswitchinterval(1e-6)  # threads alternate as often as the interpreter lets them
    try:
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(each, error) for error in (True, False)]:
                done.result()
    finally:
        sys.setswitchinterval(before)
    for number, future in enumerate(futures, 1):
        assert future.exception() is not None or future.result() == number
    assert gone.cancelled()
