"""Servers that have other values: which one the chief gives up, and when none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from psclient._src.chief.differences import LEASES, Differences
from psclient._src.chief.job_state import JobState
from psclient._src.transport.hosting import Hosting
from pstesting.clock import Clock
from pswire.cluster import Task
from pswire.limits import Timeouts
from pswire.model.log import Created, Epoch, EpochClosed, Gone, Return
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.status import Difference, ServerStatus
from pswire.model.tensor import TensorSpec

LEASE = 10.0
HOMES = {"a": (0, 1), "b": (1, 2), "c": (2, 3), "d": (3, 0), "all": (0, 1, 2, 3)}
"""The servers of each variable, the home first."""


class Job:
    """A job of four servers, and what these say of one another."""

    def __init__(self):
        self.state, self.clock = JobState(), Clock()
        self.hosting = Hosting(Task("chief", 0), [SimpleNamespace(task=Task("ps", index)) for index in range(4)])
        session = SimpleNamespace(hosting=self.hosting, timeouts=Timeouts(lease=LEASE))
        log = SimpleNamespace(state=self.state)
        self.differences = Differences([], session, log, None, self.clock)
        self.state.take([EpochClosed(Epoch(1, ()))])
        for number, (name, servers) in enumerate(HOMES.items()):
            spec = VariableSpec(name, TensorSpec("float32", ()), True)
            self.state.take([Created(PlacedVariable(number, spec, servers))])

    def lose(self, server):
        self.state.take([Gone(server, "was lost")])
        self.hosting.lose([entry for entry in self.state.log if isinstance(entry, Gone)])

    def look(self, *pairs, names=("a",), round=64, agreed=0, at=70):
        """Returns the server that is given up where some pairs differ; None for none."""
        found = {server: [] for server in range(4)}
        for one, other in pairs:
            for mine, their in ((one, other), (other, one)):
                found[mine].append(Difference(their, round, tuple(names), 0, agreed))
        statuses = [
            ServerStatus(server, 1, 1, None, at, (), (), 0, 0, 0, 0.0, differences=tuple(each))
            for server, each in found.items()
            if server not in self.state.gone
        ]
        lost = self.differences.look(statuses)
        return None if lost is None else int(lost.task.rpartition(":")[2])


@pytest.fixture
def job():
    return Job()


@pytest.mark.parametrize(
    ("pair", "names", "gives_up"),
    [
        ((0, 1), ["a"], 1),
        ((1, 2), ["b"], 2),
        ((0, 3), ["d"], 0),
        ((0, 3), ["d", "all"], 3),
        ((1, 3), ["all"], 3),
    ],
)
def test_who_has_the_copies_is_given_up(job, pair, names, gives_up):
    """Where they differ readers ask the other one; where they ask both, or neither, it is the higher one."""
    assert job.look(pair, names=names) == gives_up


def test_who_differs_from_more_servers_is_given_up(job):
    """Though its values were read."""
    assert job.look((0, 1), (0, 2), (0, 3), names=["all"]) == 0


def test_who_is_read_in_place_of_one_that_is_gone_stays(job):
    job.lose(2)
    assert job.look((0, 3), names=["c", "d"]) == 0


def test_nobody_is_given_up_before_both_have_told(job):
    assert job.look((0, 1), round=64, at=64) is None
    assert job.look((0, 1), round=64, at=65) == 1


def test_nobody_is_given_up_whose_values_would_be_lost(job, caplog):
    """It is said once."""
    job.lose(2)
    for _ in range(2):
        assert job.look((0, 1)) is None
    assert [record.getMessage() for record in caplog.records if "stay so" in record.getMessage()] == [
        "/job:ps/task:0 and /job:ps/task:1 have other values since round 64 ('a'), and stay so: no other copy would be "
        "left of what one of them has"
    ]


def test_nobody_is_given_up_while_a_server_is_taken_back(job):
    """Members wait for it, and the others save for it."""
    job.state.take([EpochClosed(Epoch(2, (), returns=Return(3, 9, 2)))])
    assert job.look((0, 1)) is None


def test_who_has_begun_with_the_same_and_differs_again_stays(job, caplog):
    """The two compute differently, and will: that is said once, and another pair is repaired all the same."""
    assert job.look((0, 1)) == 1
    for _ in range(2):
        job.clock.now += LEASES * LEASE
        assert job.look((0, 1)) is None
    assert sum("and so compute differently" in record.getMessage() for record in caplog.records) == 1
    assert job.look((0, 1), (2, 3), names=["c"]) == 3


def test_who_had_the_same_values_since_is_repaired_again_after_ten_leases(job):
    """As where memory fails from time to time."""
    assert job.look((0, 1)) == 1
    job.clock.now += LEASES * LEASE - 1
    assert job.look((0, 1), round=640, agreed=3, at=700) is None
    job.clock.now += 1
    assert job.look((0, 1), round=640, agreed=3, at=700) == 1
