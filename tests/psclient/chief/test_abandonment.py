"""When a chief gives a job up: what counts is for how long it saw nobody."""

from __future__ import annotations

from psclient._src.chief.abandonment import STEP, AbandonmentTimer
from pswire.cluster import Task
from pswire.limits import Timeouts
from pswire.model.log import Member
from pswire.model.status import SessionState

A, B = Task("worker", 0), Task("worker", 1)
TIMEOUTS = Timeouts(alone=10.0, first=30.0)


def states(**ends: str) -> list[SessionState]:
    """Sessions of A and B, in the order in which they are given."""
    tasks = {"a": A, "b": B}
    return [
        SessionState(Member(tasks[name[0]], number, 1, "sync"), state, "", 0.0, False)
        for number, (name, state) in enumerate(ends.items())
    ]


def given_up(presence: AbandonmentTimer, sessions: list[SessionState], start: float, end: float) -> tuple[float, str]:
    """When it gives up, looking once a second, and what it says; the end where it does not."""
    now = start
    while now < end:
        if (told := presence.look(sessions, now)) is not None:
            return now, str(told)
        now += 1.0
    return end, ""


def test_it_waits_for_those_who_are_gone() -> None:
    """And says of each task what became of its newest process."""
    presence = AbandonmentTimer({A, B}, TIMEOUTS)
    now, told = given_up(presence, states(a="lost", b="failed", a2="left"), 100.0, 200.0)
    assert now == 110.0
    assert told.startswith(f"no worker has been here for 10 s (PS_TIMEOUT_ALONE): {A} left, {B} failed. ")


def test_it_waits_longer_for_those_who_never_came() -> None:
    """A script may do much before it makes its strategy, also where another one has failed by then."""
    now, told = given_up(AbandonmentTimer({A, B}, TIMEOUTS), states(a="failed"), 0.0, 100.0)
    assert now == 30.0
    assert f"(PS_TIMEOUT_FIRST): {A} failed, {B} never came. " in told
    now, told = given_up(AbandonmentTimer({A}, Timeouts(alone=50.0, first=30.0)), [], 0.0, 100.0)
    assert (now, "(PS_TIMEOUT_ALONE)" in told) == (50.0, True)


def test_whoever_is_there_begins_it_anew() -> None:
    presence = AbandonmentTimer({A, B}, TIMEOUTS)
    assert given_up(presence, states(a="lost", b="lost"), 0.0, 10.0) == (10.0, "")
    assert given_up(presence, states(a="lost", b="lost", b2="open"), 10.0, 50.0) == (50.0, "")
    assert given_up(presence, states(a="lost", b="lost", b2="lost"), 50.0, 100.0)[0] == 59.0


def test_time_in_which_it_stood_still_does_not_count() -> None:
    """A process that was stopped, or on a machine that was, could not see who was there."""
    presence = AbandonmentTimer({A}, TIMEOUTS)
    gone = states(a="lost")
    assert presence.look(gone, 0.0) is None
    assert presence.look(gone, 5000.0) is None
    assert given_up(presence, gone, 5001.0, 6000.0)[0] == 5000.0 + TIMEOUTS.alone - STEP
