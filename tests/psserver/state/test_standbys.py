"""Processes that wait for the place of a server."""

from __future__ import annotations

import pytest

from psserver.state.standbys import Standbys
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.limits import STANDBY_SECONDS
from pswire.model.places import Standby


def test_a_process_that_has_become_the_server_waits_no_more():
    """Its server may move on at once, though the process said a moment ago that it waits."""
    moved = dict[int, str]()
    standbys = Standbys(Task("ps", 1), moved)
    for address in ("a:1", "b:1"):
        standbys.offer(Standby(address), 0.0)
    assert standbys.give(0, "a:1", 0.1) == "a:1"
    with pytest.raises(ConfigError, match="/job:ps/task:0 is already moving to a:1"):
        standbys.give(0, "b:1", 0.2)
    moved[0] = "a:1"
    assert [standby.address for standby in standbys.waiting(0.3)] == ["b:1"]
    assert standbys.give(0, "b:1", 0.3) == "b:1"
    standbys.offer(Standby("c:1"), 0.4)
    moved[0] = "b:1"
    assert standbys.give(0, "c:1", 0.5) == "c:1"


def test_a_server_whose_job_is_over_knows_who_has_not_heard_of_it():
    """Who asks then is told; one that asks no more is not waited for, nor one that has become a server."""
    moved = dict[int, str]()
    standbys = Standbys(Task("ps", 1), moved)
    assert not standbys.untold(0.0)
    for address in ("a:1", "b:1", "c:1"):
        standbys.offer(Standby(address), 0.0)
    standbys.offer(Standby("a:1"), 1.0, over=True)
    moved[0] = "b:1"
    assert standbys.untold(1.0), "c has not asked since"
    standbys.offer(Standby("c:1"), 1.1, over=True)
    assert not standbys.untold(1.2)
    standbys.offer(Standby("a:1"), 2.0)
    assert standbys.untold(2.0), "another job has begun"
    assert not standbys.untold(2.1 + STANDBY_SECONDS)
