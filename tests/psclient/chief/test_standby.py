"""Who stands by sees how the job is driven, by the newest chief's session."""

from __future__ import annotations

from dataclasses import replace

from psclient._src.chief.standby import outlook
from pswire.limits import Timeouts
from pswire.model.log import Member
from pswire.model.status import ServerStatus, SessionState
from tests.kit.rig import CHIEF, WORKERS

TIMES = Timeouts(beat=2.0)
EMPTY = ServerStatus(0, 1, 0, None, -1, (), (), 0, 0, 0, 0.0)


def chief(state, silent=0.0, task=CHIEF):
    """A chief's session."""
    return SessionState(Member(task, 7, 0), state, "", silent, True)


def seen(*sessions, over=False, broken=""):
    """How a job with these sessions is driven."""
    return outlook(replace(EMPTY, sessions=sessions, over=over, broken=broken), TIMES)


def test_the_newest_chief_counts():
    """Workers do not; one that has missed a beat may be gone, and one that has left has seen the job's end."""
    worker = SessionState(Member(WORKERS[0], 1, 1), "open", "", 0.0)
    assert seen() == seen(worker) == "none"
    assert seen(chief("lost"), chief("open", 2.5), worker) == "driven"
    assert seen(chief("open", 2.6)) == "gone"
    assert {seen(chief("open"), chief(state)) for state in ("lost", "failed", "hung")} == {"gone"}
    assert seen(chief("left"), worker) == seen(chief("open"), over=True) == "over"
    assert seen(over=True) == "over"  # a server that keeps no sessions says so as well


def test_a_lost_job_is_none_to_go_on_with():
    """Its processes all end, and begin anew."""
    assert {seen(chief(state), broken="a server was lost") for state in ("open", "failed")} == {"none"}
