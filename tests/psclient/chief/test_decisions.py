"""A chief's decisions as plain data: what the log says, and who is there, give the entries that follow."""

from __future__ import annotations

from dataclasses import replace

from psclient._src.chief.decisions import decide, undone
from psclient._src.chief.epochs import Beginning
from psclient._src.chief.job_state import JobState
from pswire.api import Watched
from pswire.model.log import Approved, Done, Epoch, EpochClosed, LogEntry, Member, Position, Start, Started
from pswire.model.plan import Plan
from pswire.model.status import OpenRound, ServerStatus, SessionState, WorkerProgress
from tests.support.rig import WORKERS

A, B, C = WORKERS[:3]
BOTH = {A, B}
a, b, c = (Member(task, number, 1, "sync") for number, task in enumerate((A, B, C), 11))
PLAN = Plan()


def at(member, state="open", join_point=""):
    """A session as server 0 sees it."""
    return SessionState(member, state, join_point, 0.0)


def job(*entries: LogEntry) -> JobState:
    """What a log says."""
    state = JobState()
    state.take(entries)
    return state


def began(*members: Member) -> EpochClosed:
    """The first epoch of a job, whose members know where to begin."""
    return EpochClosed(Epoch(1, members, start=Start(1, 0)))


def look(*sessions, plans=()):
    return Watched(1, 0, (), tuple(plans), sessions)


def status(server=0, **told):
    return replace(ServerStatus(server, 1, 0, None, -1, (), (), 0, 0, 0, 0.0), **told)


def test_a_plan_is_approved_once():
    """Whether anybody takes part or not."""
    assert decide(job(), look(plans=[PLAN]), BOTH) == [Approved(PLAN)]
    assert decide(job(Approved(PLAN)), look(plans=[PLAN]), BOTH) == []


def test_a_job_begins_once_all_have_come():
    """In task order; one that has left by then has come, and takes no part."""
    assert decide(job(), look(at(b)), BOTH) == []
    assert decide(job(), look(at(b), at(a)), BOTH) == [Beginning(1, (a, b))]
    assert decide(job(), look(at(b, "lost"), at(a)), BOTH) == []
    assert decide(job(), look(at(b, "left"), at(a)), BOTH) == [Beginning(1, (a,))]


def test_nothing_follows_where_nothing_changes():
    """The same members are here."""
    assert decide(job(began(a, b)), look(at(a), at(b)), BOTH) == []


def test_a_new_member_is_taken_in_at_its_join_point():
    """Not before it says where it waits; with it come those that wait at the same place."""
    state = job(began(a))
    assert decide(state, look(at(a), at(b)), {A}) == []
    assert decide(state, look(at(a), at(b, join_point="save"), at(c, join_point="dataset:0")), {A}) == [
        EpochClosed(Epoch(2, (a, b), "save"))
    ]
    assert decide(state, look(at(a), at(b, join_point="save"), at(c, join_point="save")), {A}) == [
        EpochClosed(Epoch(2, (a, b, c), "save"))
    ]


def test_while_one_is_taken_in_others_come_at_the_same_place_only():
    """Older members have one join point to look out for, until they have said where the new one begins."""
    state = job(began(a), EpochClosed(Epoch(2, (a, b), "save")))
    other = look(at(a), at(b), at(c, join_point="dataset:0"))
    assert decide(state, other, {A}) == []
    assert decide(state, look(at(a), at(b), at(c, join_point="save")), {A}) == [
        EpochClosed(Epoch(3, (a, b, c), "save"))
    ]
    state.take([Started(Start(2, 7))])
    assert decide(state, other, {A}) == [EpochClosed(Epoch(3, (a, b, c), "dataset:0"))]


def test_a_member_that_is_gone_is_left_out():
    """Whether it is lost, or beats and holds a round up."""
    state = job(began(a, b))
    assert decide(state, look(at(a), at(b, "lost")), BOTH) == [EpochClosed(Epoch(2, (a,)))]
    assert decide(state, look(at(a), at(b)), BOTH, hung={b.session}) == [EpochClosed(Epoch(2, (a,)))]


def test_who_comes_back_to_nobody_begins_after_the_last_round():
    """First those who are gone are fenced; only then the servers are asked."""
    state, back = job(began(a)), at(b, join_point="dataset:0")
    assert decide(state, look(at(a, "lost"), back), {A}) == [EpochClosed(Epoch(2, ()))]
    state.take([EpochClosed(Epoch(2, ()))])
    (beginning,) = decide(state, look(at(a, "lost"), back), {A})
    assert beginning == Beginning(3, (b,))
    told = (Position(0, 1, 8),)
    waits = (OpenRound(6, "a sum", (A,), True),)
    statuses = [status(round=4), status(1, round=5, waiting=waits, positions=told)]
    assert beginning.closed(statuses) == EpochClosed(Epoch(3, (b,), start=Start(3, 7, told)))
    assert beginning.closed([status(), status(1)]) == EpochClosed(Epoch(3, (b,), start=Start(3, 0)))


def test_asynchronous_members_come_and_go_at_once():
    """Who is gone is fenced first, so that its place is final; each who is new has an epoch, and begins at that."""
    x, y, z = (replace(member, mode="async") for member in (a, b, c))
    state = job(began(x, y))
    assert decide(state, look(at(x), at(y, "lost"), at(z)), BOTH) == [EpochClosed(Epoch(2, (x,)))]
    state.take([EpochClosed(Epoch(2, (x,)))])
    back = replace(y, session=21)
    decided = decide(state, look(at(x), at(z), at(back)), BOTH)
    assert decided == [Beginning(3, (x, z), C), Beginning(4, (x, back, z), B)]
    told = (Position(0, 0, 3),)
    statuses = [status(places=(WorkerProgress(B, 8, ()),)), status(1, places=(WorkerProgress(B, 9, told),))]
    closed = [each.closed(statuses) for each in decided]
    assert [each.epoch.start for each in closed] == [Start(3, 0), Start(4, 10, told)]
    state.take(closed)
    assert decide(state, look(at(x), at(z), at(back)), BOTH) == []


def test_a_job_ends_when_its_members_have_left():
    """A task that is still here, or did not do its part, is waited for."""
    state = job(began(a, b))
    assert decide(state, look(at(a, "left"), at(b)), BOTH) == [EpochClosed(Epoch(2, (b,)))]
    assert Done() not in decide(state, look(at(a, "left"), at(b, "failed")), BOTH)
    assert decide(state, look(at(a, "left"), at(b, "left")), BOTH) == [EpochClosed(Epoch(2, ())), Done()]


def test_what_is_undone_is_known_of_each_task():
    """Of the newest session that it had."""
    sessions = (at(a, "lost"), at(replace(a, session=21)), at(b, "left"))
    assert undone(sessions, {A, B, C}) == {A: "still here", C: "never came"}
