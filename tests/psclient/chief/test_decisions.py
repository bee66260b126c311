"""A chief's decisions as plain data: what the log says, and who is there, give the entries that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psclient._src.chief.decisions import Beginning, decide, is_done, told_of, undone
from psclient._src.chief.job_log import JobState
from psclient._src.chief.timers import LeaveSaves, StepDown
from pswire.api import Watched
from pswire.limits import Timeouts
from pswire.model.changes import Change
from pswire.model.consistency import ASYNC, SYNC
from pswire.model.log import (
    STEP,
    Approved,
    Done,
    Generation,
    GenerationClosed,
    LogEntry,
    Member,
    Position,
    Return,
    Start,
    Started,
)
from pswire.model.plan import Plan
from pswire.model.status import STILL, OpenRound, Pace, ServerStatus, SessionState, WorkerProgress
from tests.kit.rig import WORKERS

A, B, C = WORKERS[:3]
BOTH = {A, B}
a, b, c = (Member(task, number, 1) for number, task in enumerate((A, B, C), 11))
PLAN = Plan()


def at(member, state="open", join_point=""):
    """A session as server 0 sees it."""
    return SessionState(member, state, join_point, 0.0)


def job(*entries: LogEntry) -> JobState:
    state = JobState()
    state.take(entries)
    return state


def closes(*generation: Any, **more: Any) -> GenerationClosed:
    """What the log says of a generation."""
    return GenerationClosed(Generation(*generation, **more))


def began(*members: Member) -> GenerationClosed:
    """The first generation of a job, whose members know where to begin."""
    return closes(1, members, start=Start(1, 0))


def look(*sessions, plans=()):
    return Watched(1, 0, (), tuple(plans), sessions)


def status(server=0, **told):
    return replace(ServerStatus(server, 1, 0, None, -1, (), (), 0, 0, 0, 0.0), **told)


def test_a_plan_is_approved_once():
    assert decide(job(), look(plans=[PLAN]), BOTH) == [Approved(PLAN)]
    assert decide(job(Approved(PLAN)), look(plans=[PLAN]), BOTH) == []


def test_a_job_begins_once_all_have_come():
    """In task order; one that has left by then has come, and takes no part; nothing follows where nothing changes."""
    assert decide(job(), look(at(b)), BOTH) == []
    assert decide(job(), look(at(b), at(a)), BOTH) == [Beginning(1, (a, b))]
    assert decide(job(), look(at(b, "lost"), at(a)), BOTH) == []
    assert decide(job(), look(at(b, "left"), at(a)), BOTH) == [Beginning(1, (a,))]
    assert decide(job(began(a, b)), look(at(a), at(b)), BOTH) == []


def test_a_job_that_nobody_is_left_of_does_not_say_that_it_goes_on():
    """As a trial of a sweep that ends by an exception; of two members the one that is left goes on."""
    failed = [at(b, "failed")]
    (closed,) = decide(job(began(a, b)), look(at(a), *failed), BOTH)
    assert told_of(job(began(a, b)), closed.generation, failed) == [f"goes on without {B}, which has failed"]
    (closed,) = decide(job(began(b)), look(*failed), {B})
    assert (closed.generation.members, told_of(job(began(b)), closed.generation, failed)) == ((), [])


def test_a_new_member_is_taken_in_at_its_join_point():
    """With those that wait at the same place; others wait until older members have said where it begins."""
    state, saves = job(began(a)), at(b, join_point="save")
    assert decide(state, look(at(a), at(b)), {A}) == []
    assert decide(state, look(at(a), saves, at(c, join_point="dataset:0")), {A}) == [closes(2, (a, b), "save")]
    assert decide(state, look(at(a), saves, at(c, join_point="save")), {A}) == [closes(2, (a, b, c), "save")]
    state = job(began(a), closes(2, (a, b), "save"))
    other = look(at(a), at(b), at(c, join_point="dataset:0"))
    assert decide(state, other, {A}) == []
    assert decide(state, look(at(a), at(b), at(c, join_point="save")), {A}) == [closes(3, (a, b, c), "save")]
    state.take([Started(Start(2, 7))])
    assert decide(state, other, {A}) == [closes(3, (a, b, c), "dataset:0")]


def test_a_member_that_is_gone_is_excluded():
    """Whether it is lost, or heartbeats and holds a round up."""
    state = job(began(a, b))
    assert decide(state, look(at(a), at(b, "lost")), BOTH) == [closes(2, (a,))]
    assert decide(state, look(at(a), at(b)), BOTH, hung={b.session}) == [closes(2, (a,))]


def test_who_comes_back_to_nobody_begins_after_the_last_round():
    """First those who are gone are fenced; only then the servers are asked."""
    state, back = job(began(a)), at(b, join_point="dataset:0")
    assert decide(state, look(at(a, "lost"), back), {A}) == [closes(2, ())]
    state.take([closes(2, ())])
    (beginning,) = decide(state, look(at(a, "lost"), back), {A})
    assert beginning == Beginning(3, (b,))
    told = (Position(0, 1, 8),)
    waits = (OpenRound(6, "a sum", (A,), True),)
    statuses = [status(round=4), status(1, round=5, waiting=waits, positions=told)]
    assert beginning.closed(statuses) == closes(3, (b,), start=Start(3, 7, told))
    assert beginning.closed([status(), status(1)]) == closes(3, (b,), start=Start(3, 0))


def test_asynchronous_members_come_and_go_at_once():
    """Who is gone is fenced first, so that its place is final; each who is new has a generation, and begins at that."""
    x, y, z = (replace(member, consistency=ASYNC) for member in (a, b, c))
    state = job(began(x, y))
    assert decide(state, look(at(x), at(y, "lost"), at(z)), BOTH) == [closes(2, (x,))]
    state.take([closes(2, (x,))])
    back = replace(y, session=21)
    decided = decide(state, look(at(x), at(z), at(back)), BOTH)
    assert decided == [Beginning(3, (x, z), C), Beginning(4, (x, back, z), B)]
    told = (Position(0, 0, 3),)
    statuses = [status(places=(WorkerProgress(B, 8, ()),)), status(1, places=(WorkerProgress(B, 9, told),))]
    closed = [each.closed(statuses) for each in decided]
    assert [each.generation.start for each in closed] == [Start(3, 0), Start(4, 10, told)]
    state.take(closed)
    assert decide(state, look(at(x), at(z), at(back)), BOTH) == []


def test_a_job_ends_when_its_members_have_left():
    """A task that is here, or did not do its part, is waited for; what is undone is known by its newest session."""
    state = job(began(a, b))
    assert decide(state, look(at(a, "left"), at(b)), BOTH) == [closes(2, (b,))]
    assert Done() not in decide(state, look(at(a, "left"), at(b, "failed")), BOTH)
    assert decide(state, look(at(a, "left"), at(b, "left")), BOTH) == [closes(2, ()), Done()]
    sessions = (at(a, "lost"), at(replace(a, session=21)), at(b, "left"))
    assert undone(sessions, {A, B, C}) == {A: "still connected", C: "never connected"}


BACK = replace(b, session=21)
OVER = {
    "one has not come": ([at(a, "left")], False),
    "one is here": ([at(a, "left"), at(b)], False),
    "one did not do its part": ([at(a, "left"), at(b, "failed")], False),
    "another process of its task is here": ([at(a, "left"), at(b, "failed"), at(BACK)], False),
    "that has left for it": ([at(a, "left"), at(b, "failed"), at(BACK, "left")], True),
    "or for one that was lost": ([at(b, "lost"), at(BACK, "left"), at(a, "left")], True),
    "one came when its task was done": ([at(b, "left"), at(BACK), at(a, "left")], False),
    "and what becomes of it undoes nothing": ([at(b, "left"), at(BACK, "lost"), at(a, "left")], True),
}


@pytest.mark.parametrize("case", OVER)
def test_a_job_is_over_once_its_tasks_have_left_cleanly(case):
    """Also where no generation took in who has left: those who would have done so left at the same time."""
    sessions, over = OVER[case]
    assert is_done(job(began(a, b)), sessions, BOTH) == over


LEAVES, SAVES = Pace(leaving=True), Pace(leaving=True, saving=True)
"""What heartbeats tell of members that leave, and leave with a checkpoint."""


def paced(member, pace=STILL, state="open", join_point=""):
    return replace(at(member, state, join_point), pace=pace)


def test_who_asks_to_leave_is_let_go_where_a_step_begins():
    """It is in the generation as one who leaves: it makes rounds with the others until all take that in."""
    state = job(began(a, b, c))
    sessions = [paced(a), paced(b, LEAVES), paced(c)]
    assert decide(state, look(*sessions), {A}) == [closes(2, (a, c), STEP, None, (b,))]
    state.take([closes(2, (a, c), STEP, None, (b,))])
    assert decide(state, look(*sessions), {A}) == []
    assert decide(state, look(paced(a), paced(b, LEAVES, "left"), paced(c)), {A}) == [], "nobody waits for it"
    assert decide(state, look(paced(a), paced(b, LEAVES, "lost"), paced(c)), {A}) == [closes(3, (a, c))]
    sessions[2] = paced(c, LEAVES)
    assert decide(state, look(*sessions), {A}) == [closes(3, (a,), STEP, None, (b, c))]
    sessions[0] = at(a, "lost")
    assert decide(state, look(*sessions), {A}) == [closes(3, (), STEP, None, (b, c))]


def test_who_comes_where_all_leave_waits_until_they_are_gone():
    state = job(began(a), closes(2, (), STEP, None, (a,)))
    new = paced(b, join_point="dataset:0")
    assert decide(state, look(paced(a, LEAVES), new), {A}) == []
    assert decide(state, look(paced(a, LEAVES, "left"), new), {A}) == [Beginning(3, (b,))]


def test_new_members_wait_until_those_who_leave_have():
    """They would begin amid rounds that these still make; and while one is taken in, nobody is let go."""
    state = job(began(a, b), closes(2, (a,), STEP, None, (b,)))
    new = paced(c, join_point="dataset:0")
    assert decide(state, look(paced(a), paced(b, LEAVES), new), {A}) == []
    assert decide(state, look(paced(a), paced(b, LEAVES, "left"), new), {A}) == [closes(3, (a, c), "dataset:0")]
    state.take([closes(3, (a, c), "dataset:0")])
    assert decide(state, look(paced(a, LEAVES), paced(c)), {A}) == []
    state.take([Started(Start(3, 7))])
    assert decide(state, look(paced(a, LEAVES), paced(c)), {A}) == [closes(4, (c,), STEP, None, (a,))]


def test_one_checkpoint_is_saved_for_all_who_leave_together():
    """The generation says which ordered it, so that who takes several in at once saves once."""
    state = job(began(a, b, c))
    first = closes(2, (a, c), STEP, None, (b,), 2)
    sessions = [paced(a), paced(b, SAVES), paced(c, LEAVES)]
    assert decide(state, look(*sessions[:2], paced(c)), {A}) == [first]
    assert decide(state, look(*sessions), {A}, may_save=False) == [closes(2, (a,), STEP, None, (b, c))]
    state.take([first])
    assert decide(state, look(*sessions), {A}) == [closes(3, (a,), STEP, None, (b, c), 2)]
    saves = LeaveSaves(10.0)
    assert saves.may(5.0)
    saves.decided([first], 5.0)
    assert not saves.may(15.0)
    assert saves.may(15.1)
    saves.decided([closes(3, (a,), STEP, None, (b, c), 2)], 15.1)
    assert saves.may(15.2), "that one ordered nothing"


def test_a_chief_that_is_told_to_end_stays_while_members_leave():
    """One that was told with it says so within a heartbeat; nobody is waited for beyond the grace period."""
    heartbeat, grace = Timeouts().heartbeat_interval, Timeouts().termination_grace
    stays, leaves, gone = [paced(a), paced(b)], [paced(a, LEAVES), paced(b)], [at(a, "left"), at(b, "lost")]

    def told():
        one = StepDown(Timeouts())
        assert not one.look(gone, 50.0), "it was not told"
        one.tell()
        return one

    alone = told()
    assert not alone.look(stays, 100.0)
    assert not alone.look(stays, 100.0 + 0.9 * heartbeat)
    assert alone.look(stays, 100.0 + heartbeat)
    together = told()
    assert not together.look(stays, 100.0)
    assert not together.look(leaves, 100.0 + 0.9 * heartbeat)
    assert not together.look(leaves, 120.0)
    assert not together.look(stays, 120.0 + 0.9 * heartbeat), "another one may be told yet"
    assert together.look(stays, 120.0 + heartbeat)
    hung = told()
    assert not hung.look(leaves, 100.0)
    assert not hung.look(leaves, 99.9 + grace)
    assert hung.look(leaves, 100.0 + grace)
    assert told().look(gone, 100.0), "nobody is here"


# ---- Changes of the consistency, and where all members go on ----

TO_ASYNC = Change(0, 5, ASYNC)
POSITIONS = (Position(0, 2, 0),)


def asks(member, change=None, state="open", join_point=""):
    """A session that asks for a change, or for none."""
    return at(member, state, str(change) if change else join_point)


def changed(number, change, *members, round, positions=(), made=0):
    here, start = str(replace(change, number=made, round=round)), Start(number, round, positions)
    return closes(number, tuple(map(change.moved, members)), here, start)


def test_a_change_is_made_once_all_members_ask_for_it():
    """Not before, and not for two values; it begins after all rounds that anybody knows."""
    state = job(began(a, b))
    assert decide(state, look(asks(a, TO_ASYNC), asks(b)), BOTH) == []
    other = replace(TO_ASYNC, nonfinite="skip")
    assert decide(state, look(asks(a, TO_ASYNC), asks(b, other)), BOTH) == []
    (beginning,) = decide(state, look(asks(a, TO_ASYNC), asks(b, TO_ASYNC)), BOTH)
    assert isinstance(beginning, Beginning)
    statuses = [status(round=4, positions=POSITIONS), status(1, round=3)]
    assert beginning.closed(statuses) == changed(2, TO_ASYNC, a, b, round=5, positions=POSITIONS)
    left = [status(round=4), status(1, round=4, waiting=(OpenRound(7, "of one that is gone", (A,), True),))]
    assert beginning.closed(left) == changed(2, TO_ASYNC, a, b, round=8)


def test_rounds_of_their_own_are_counted_by_each_and_not_by_servers():
    """All go on from the greatest number; the servers' number of rounds has no meaning for it."""
    x, y = (replace(member, consistency=ASYNC) for member in (a, b))
    state = job(began(x, y))
    wanted = (Change(0, 4, SYNC), Change(0, 9, SYNC))
    (beginning,) = decide(state, look(*map(asks, (x, y), wanted)), BOTH)
    places = WorkerProgress(A, 3, ()), WorkerProgress(B, 8, POSITIONS)
    statuses = [status(round=40, places=places), status(1, round=2)]
    assert beginning.closed(statuses) == changed(2, wanted[0], x, y, round=9, positions=POSITIONS)


def test_what_was_asked_before_the_last_change_is_no_question():
    """A session's word could not be moved; the number says which change it means."""
    first = changed(2, TO_ASYNC, a, b, round=5)
    state = job(began(a, b), first)
    x, y = first.generation.members
    assert decide(state, look(asks(x, TO_ASYNC), asks(y, TO_ASYNC)), BOTH) == []
    back = Change(1, 9, SYNC)
    assert decide(state, look(asks(x, TO_ASYNC), asks(y, back)), BOTH) == []
    (beginning,) = decide(state, look(asks(x, back), asks(y, back)), BOTH)
    assert beginning.change == back


def test_who_is_gone_is_fenced_before_a_change():
    """So what it sent arrives before the servers are asked, or never."""
    state = job(began(a, b))
    here = look(asks(a, TO_ASYNC), asks(b, TO_ASYNC, "lost"))
    assert decide(state, here, BOTH) == [closes(2, (a,))]
    state.take([closes(2, (a,))])
    (beginning,) = decide(state, here, BOTH)
    assert beginning.members == (a,)
    assert beginning.change == TO_ASYNC
    own = job(began(*(replace(member, consistency=ASYNC) for member in (a, b))))
    assert decide(own, here, BOTH) == [closes(2, (replace(a, consistency=ASYNC),))]


def test_a_change_waits_for_nobody_who_waits_to_be_taken_in():
    """It goes on waiting, and is taken in afterwards, as all make their rounds by then."""
    state = job(began(a), closes(2, (a, b), "dataset:0"))
    late = asks(b, join_point="dataset:0")
    (beginning,) = decide(state, look(asks(a, TO_ASYNC), late), {A})
    assert beginning.members == (a,)
    state.take([beginning.closed([status(round=4)])])
    moved = TO_ASYNC.moved(b)
    for seen in (b, moved):  # as it was told of before the change, and after it
        assert decide(state, look(asks(TO_ASYNC.moved(a), TO_ASYNC), asks(seen, join_point="dataset:0")), {A}) == [
            Beginning(4, (TO_ASYNC.moved(a), moved), B, Start(3, 5))
        ]


def test_who_was_taken_in_or_leaves_at_a_later_step_is_waited_for():
    """It makes rounds as all do, once an older member has said where it begins; who leaves is still in the
    generation."""
    state = job(began(a), closes(2, (a, b), "dataset:0"), Started(Start(2, 3)))
    assert decide(state, look(asks(a, TO_ASYNC), asks(b, join_point="dataset:0")), {A}) == []
    (beginning,) = decide(state, look(asks(a, TO_ASYNC), asks(b, TO_ASYNC)), {A})
    assert beginning.members == (a, b)
    state = job(began(a, b), closes(2, (a,), STEP, leaving=(b,)))
    assert decide(state, look(asks(a, TO_ASYNC), asks(b)), BOTH) == []
    (beginning,) = decide(state, look(asks(a, TO_ASYNC), asks(b, TO_ASYNC)), BOTH)
    assert beginning.members == (a, b)


def test_news_of_before_a_change_leave_nobody_out():
    """The sessions that a held answer tells of may still have the old mode."""
    x = replace(a, consistency=ASYNC), replace(b, consistency=ASYNC)
    state = job(began(*x), changed(2, Change(0, 9, SYNC), *x, round=9))
    assert decide(state, look(*map(asks, x)), BOTH) == []


def test_nobody_begins_before_the_round_of_the_last_change():
    """Also where its task has made no round of its own yet, or has made few of them long ago."""
    x, z = replace(a, consistency=ASYNC), replace(c, consistency=ASYNC)
    state = job(began(a), changed(2, TO_ASYNC, a, round=5, positions=POSITIONS))
    (beginning,) = decide(state, look(asks(x, TO_ASYNC), asks(z)), {A})
    for places in ((), (WorkerProgress(C, 2, ()),)):
        closed = beginning.closed([status(round=9, places=places)])
        assert closed == closes(3, (x, z), start=Start(3, 5, POSITIONS))
    further = beginning.closed([status(places=(WorkerProgress(C, 7, ()),))])
    assert further.generation.start == Start(3, 8)


def test_a_server_is_taken_back_once_who_leaves_has_left():
    """A member that has left holds nobody up for the rest of the job; one that is on its way is waited for."""
    state = job(began(a, b), closes(2, (a,), STEP, leaving=(b,)), Started(Start(2, 5)))
    mine, back = at(a), Return(1, 9, 3)
    assert decide(state, look(mine, at(b)), BOTH, back=back) == []
    assert decide(state, look(mine, at(b, "left")), BOTH, back=back) == [closes(3, (a,), STEP, returns=back)]
