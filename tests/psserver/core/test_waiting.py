"""Calls that wait: the same rules for all kinds of them, with everything that they wait for turned by the test."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from psserver.core.waiting import MAX_CALLS, Asked, Hold, Owed, Read, Waiters, Watch
from psserver.devices import Device
from psserver.effects import Fail, Reply, Work, attempt, settle
from psserver.state.clocks import Clocks
from pswire.api import UNTIL_ENDED, UNTIL_GONE
from pswire.errors import Fenced, InvalidRequest

ONE, TWO = 1, 2
"""Sessions."""


class Table:
    """Waiters, and what they wait for: a log, a round that may write, rounds that are complete."""

    def __init__(self):
        self.log = SimpleNamespace(entries=[], losses=[], proposed={}, traces={})
        self.members = SimpleNamespace(version=0, states=lambda now: ())
        value = np.ones(1, "float32")
        self.store = SimpleNamespace(
            lent=set(),
            value=lambda id: value,
            views=lambda ids: [value for _ in ids],
            check_rows=lambda reads: None,
            row_views=lambda reads: [],
            ask=lambda reads: [],
            device=Device.parse("cpu"),
        )
        self.rounds = SimpleNamespace(last=-1, clocks=Clocks(), backlog=SimpleNamespace(behind=False, awaits=0))
        self.ended = {}
        self.waiters = Waiters(self.log, self.members, self.store, self.rounds, self.reply)

    def reply(self, row):
        return [Reply(row.future, "the answer")]

    def add(self, kind, session=ONE, after=0):
        """The future of a call that waits."""
        future = Future()
        said = SimpleNamespace(session=session, round=0, want=(), lookups=())
        more = {Watch: (after, -1), Hold: (after, UNTIL_GONE), Read: (Asked((0,), after),), Owed: ("record", said)}[
            kind
        ]
        self.waiters.add(kind(session, future, *more))
        return future

    def progress(self):
        """What can be answered is."""
        for effect in self.waiters.answers(0.0, self.ended.get, len(self.ended)):
            match effect:
                case Reply(future, value):
                    settle(future, value)
                case Fail(future, error):
                    settle(future, None, error)
                case Work(queue="arrays", call=call, args=args, future=future):
                    settle(future, *attempt(lambda call=call, args=args: call(*args)))

    def let_all(self):
        """All that is waited for has come."""
        self.log.entries.append("an entry")
        self.log.losses.append("a loss")
        self.rounds.last, self.store.lent = 0, set()
        self.progress()

    def waiting(self):
        """How many calls of each kind wait."""
        return tuple(len(self.waiters.rows[kind]) for kind in KINDS)


KINDS = (Watch, Hold, Read, Owed)


@pytest.fixture
def table():
    """A round writes, and nothing has happened so far."""
    found = Table()
    found.store.lent = {0}
    return found


def done(*futures):
    return [future.done() for future in futures]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_waits_until_there_is_what_it_waits_for(table, kind):
    """And is answered once."""
    future = table.add(kind)
    table.progress()
    assert (done(future), sum(table.waiting())) == ([False], 1)
    table.let_all()
    assert (done(future), future.exception(), sum(table.waiting())) == ([True], None, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_whose_session_has_ended_is_told_why(table, kind):
    """Whatever it waits for has come or not; the others wait on."""
    mine, other = table.add(kind), table.add(kind, TWO)
    table.ended[ONE] = Fenced("it was ended")
    table.members.version += 1
    table.progress()
    assert done(mine, other) == [True, False]
    assert mine.exception() is table.ended[ONE]


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
    """Nothing is kept of it, and nothing is read for it."""
    table.add(kind).cancel()
    table.members.version += 1
    table.progress()
    assert not any(table.waiting())


def test_all_are_given_up_together(table):
    """Of those who wait for news those who are meant."""
    futures = [table.add(kind, session) for kind in KINDS for session in (ONE, TWO)]
    assert set(table.waiters.drop(lambda session: session == TWO)) == {futures[1], *futures[3:]}
    assert table.waiting() == (1, 1, 0, 0)


def test_who_comes_looks_at_nobody_else(table):
    """Of a thousand processes each holds a call, and each that comes must not look at those of all others."""
    held = [table.add(Hold, session) for session in range(ONE, 50)]
    looked = []
    ends = 0
    assert not table.waiters.answers(0.0, looked.append, ends)
    looked.clear()
    table.add(Hold, 50)
    assert not table.waiters.answers(0.0, looked.append, ends)
    assert looked == [50]
    table.members.version += 1
    assert not table.waiters.answers(0.0, looked.append, ends)
    assert looked == [50]
    table.waiters.answers(0.0, looked.append, ends + 1)
    assert len(looked) == len(held) + 2


def test_who_waits_for_the_end_hears_no_news(table):
    """And who has no session waits for nothing."""
    until, looking, reading = Future(), Future(), Future()
    table.waiters.add(Hold(ONE, until, 0, UNTIL_ENDED))
    table.waiters.add(Watch(0, looking, 0, 0))
    table.waiters.add(Read(0, reading, Asked((5,), 9)))
    table.progress()
    assert done(until, looking, reading) == [False, True, True]
    table.let_all()
    assert done(until) == [False]


def test_a_variable_that_is_written_is_not_read(table):
    """Others are."""
    table.rounds.last = 0
    futures = [Future(), Future()]
    for id, future in enumerate(futures):
        table.waiters.add(Read(ONE, future, Asked((id,), 0)))
    table.progress()
    assert done(*futures) == [False, True]
    with pytest.raises(InvalidRequest, match="twice"):
        table.waiters.add(Read(ONE, Future(), Asked((1, 1), 0)))
