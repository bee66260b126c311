"""When the chief changes a job's consistency, and where all members go on."""

from __future__ import annotations

from dataclasses import replace

from psclient._src.chief.decisions import decide
from psclient._src.chief.epochs import Beginning
from psclient._src.chief.job_state import JobState
from pswire.api import Watched
from pswire.model.changes import Change
from pswire.model.log import STEP, Epoch, EpochClosed, LogEntry, Member, Position, Start, Started
from pswire.model.status import OpenRound, ServerStatus, SessionState, WorkerProgress
from tests.kit.rig import WORKERS

A, B, C = WORKERS[:3]
BOTH = {A, B}
a, b, c = (Member(task, number, 1, "whole") for number, task in enumerate((A, B, C), 11))
TO_ASYNC = Change(0, 5, "async")
POSITIONS = (Position(0, 2, 0),)


def at(member, change=None, state="open", join_point=""):
    return SessionState(member, state, str(change) if change else join_point, 0.0)


def job(*entries: LogEntry) -> JobState:
    state = JobState()
    state.take(entries)
    return state


def began(*members: Member) -> EpochClosed:
    return EpochClosed(Epoch(1, members, start=Start(1, 0)))


def look(*sessions):
    return Watched(1, 0, (), (), sessions)


def status(server=0, **told):
    return replace(ServerStatus(server, 1, 0, None, -1, (), (), 0, 0, 0, 0.0), **told)


def changed(number, change, *members, round, positions=(), made=0):
    """The epoch of a change."""
    here = str(replace(change, number=made, round=round))
    return EpochClosed(Epoch(number, tuple(map(change.moved, members)), here, Start(number, round, positions)))


def test_a_change_is_made_once_all_members_ask_for_it():
    """Not before, and not for two values; it begins after all rounds that anybody knows."""
    state = job(began(a, b))
    assert decide(state, look(at(a, TO_ASYNC), at(b)), BOTH) == []
    other = replace(TO_ASYNC, nonfinite="skip")
    assert decide(state, look(at(a, TO_ASYNC), at(b, other)), BOTH) == []
    (beginning,) = decide(state, look(at(a, TO_ASYNC), at(b, TO_ASYNC)), BOTH)
    assert isinstance(beginning, Beginning)
    statuses = [status(round=4, positions=POSITIONS), status(1, round=3)]
    assert beginning.closed(statuses) == changed(2, TO_ASYNC, a, b, round=5, positions=POSITIONS)
    left = [status(round=4), status(1, round=4, waiting=(OpenRound(7, "of one that is gone", (A,), True),))]
    assert beginning.closed(left) == changed(2, TO_ASYNC, a, b, round=8)


def test_rounds_of_their_own_are_counted_by_each_and_not_by_servers():
    """All go on from the greatest number; the servers' number of rounds has no meaning for it."""
    x, y = (replace(member, mode="async") for member in (a, b))
    state = job(began(x, y))
    asks = (Change(0, 9, "whole"), Change(0, 4, "whole"))
    (beginning,) = decide(state, look(*map(at, (x, y), asks)), BOTH)
    places = WorkerProgress(A, 8, POSITIONS), WorkerProgress(B, 3, ())
    assert beginning.closed([status(round=40, places=places), status(1, round=2)]) == changed(
        2, asks[0], x, y, round=9, positions=POSITIONS
    )


def test_what_was_asked_before_the_last_change_is_no_question():
    """A session's word stays where it is; the number says which change it means."""
    first = changed(2, TO_ASYNC, a, b, round=5)
    state = job(began(a, b), first)
    x, y = first.epoch.members
    assert decide(state, look(at(x, TO_ASYNC), at(y, TO_ASYNC)), BOTH) == []
    back = Change(1, 9, "whole")
    assert decide(state, look(at(x, TO_ASYNC), at(y, back)), BOTH) == []
    (beginning,) = decide(state, look(at(x, back), at(y, back)), BOTH)
    assert beginning.change == back


def test_who_is_gone_is_fenced_before_a_change():
    """So what it sent arrives before the servers are asked, or never."""
    state = job(began(a, b))
    here = look(at(a, TO_ASYNC), at(b, TO_ASYNC, "lost"))
    assert decide(state, here, BOTH) == [EpochClosed(Epoch(2, (a,)))]
    state.take([EpochClosed(Epoch(2, (a,)))])
    (beginning,) = decide(state, here, BOTH)
    assert beginning.members == (a,)
    assert beginning.change == TO_ASYNC
    own = job(began(*(replace(member, mode="async") for member in (a, b))))
    assert decide(own, here, BOTH) == [EpochClosed(Epoch(2, (replace(a, mode="async"),)))]


def test_a_change_waits_for_nobody_who_waits_to_be_taken_in():
    """It goes on waiting, and is taken in afterwards, as all make their rounds by then."""
    state = job(began(a), EpochClosed(Epoch(2, (a, b), "dataset:0")))
    late = at(b, join_point="dataset:0")
    (beginning,) = decide(state, look(at(a, TO_ASYNC), late), {A})
    assert beginning.members == (a,)
    state.take([beginning.closed([status(round=4)])])
    moved = TO_ASYNC.moved(b)
    for seen in (b, moved):  # as it was told of before the change, and after it
        assert decide(state, look(at(TO_ASYNC.moved(a), TO_ASYNC), at(seen, join_point="dataset:0")), {A}) == [
            Beginning(4, (TO_ASYNC.moved(a), moved), B, Start(3, 5))
        ]


def test_who_was_taken_in_is_waited_for():
    """Once an older member has said where it begins, it makes rounds as all do."""
    state = job(began(a), EpochClosed(Epoch(2, (a, b), "dataset:0")), Started(Start(2, 3)))
    assert decide(state, look(at(a, TO_ASYNC), at(b, join_point="dataset:0")), {A}) == []
    (beginning,) = decide(state, look(at(a, TO_ASYNC), at(b, TO_ASYNC)), {A})
    assert beginning.members == (a, b)


def test_who_leaves_at_a_step_that_did_not_come_takes_part():
    """It leaves at the next one: nobody has taken in the epoch without it."""
    state = job(began(a, b), EpochClosed(Epoch(2, (a,), STEP, leaving=(b,))))
    assert decide(state, look(at(a, TO_ASYNC), at(b)), BOTH) == []
    (beginning,) = decide(state, look(at(a, TO_ASYNC), at(b, TO_ASYNC)), BOTH)
    assert beginning.members == (a, b)


def test_news_of_before_a_change_leave_nobody_out():
    """The sessions that a held answer tells of may still have the old mode."""
    x = replace(a, mode="async"), replace(b, mode="async")
    state = job(began(*x), changed(2, Change(0, 9, "whole"), *x, round=9))
    assert decide(state, look(*map(at, x)), BOTH) == []


def test_nobody_begins_before_the_round_of_the_last_change():
    """Also where its task has made no round of its own yet, or has made few of them long ago."""
    x, z = replace(a, mode="async"), replace(c, mode="async")
    state = job(began(a), changed(2, TO_ASYNC, a, round=5, positions=POSITIONS))
    (beginning,) = decide(state, look(at(x, TO_ASYNC), at(z)), {A})
    for places in ((), (WorkerProgress(C, 2, ()),)):
        closed = beginning.closed([status(round=9, places=places)])
        assert closed == EpochClosed(Epoch(3, (x, z), start=Start(3, 5, POSITIONS)))
    further = beginning.closed([status(places=(WorkerProgress(C, 7, ()),))])
    assert further.epoch.start == Start(3, 8)
