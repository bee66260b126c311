"""Workers that serve a coordinator: when they begin, and what they say of errors."""

from __future__ import annotations

import threading

import pytest

import psclient as ps
from pstesting.processes import until
from tests.kit.coordinated import SECONDS, coordinated, here


def counter():
    return {"v": ps.Variable(0.0, name="v")}


def count():
    here().v.assign_add(1.0)


@pytest.mark.parametrize("came", [0, 1], ids=["none has come", "one has come"])
def test_a_coordinator_may_end_before_its_workers_have_come(came):
    """It has nothing to schedule, and leaves; workers that come later end well, too, as there is nothing to do."""
    with coordinated(counter, count, workers=2, started=came) as job:
        assert job.coordinator.done()
        ends = threading.Thread(target=job.strategy.close)
        ends.start()
        sessions = lambda: job.cluster.cores[0].status().sessions  # noqa: E731
        left = lambda: any(each.state != "open" and each.member.task.job == "chief" for each in sessions())  # noqa: E731
        until(left, SECONDS, lambda: f"{sessions()}")
        for worker in range(came, 2):
            job.start(worker)
        ends.join(SECONDS)
