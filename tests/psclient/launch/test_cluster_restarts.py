"""Restarts of a cluster as plain data: who is replaced, and what that costs."""

from __future__ import annotations

from psclient._src.launch.restarts import Replacement, Restarts
from psclient._src.processes.shutdown import SERVER_LOST
from pswire.cluster import Task

PS, A, B = Task("ps", 0), Task("worker", 0), Task("worker", 1)


def begun(left: int) -> Restarts:
    """All tasks were started at 0 seconds."""
    restarts = Restarts(left)
    for task in (PS, A, B):
        restarts.started(task, 0.0)
    return restarts


def test_who_fails_by_itself_costs_a_restart():
    """As long as there are any."""
    restarts = begun(1)
    assert restarts.unexplained({A: 1}) is None
    assert restarts.spend({A: 1}, [], 1.0) == [Replacement(A, True)]
    assert restarts.left == 0
    assert restarts.spend({B: -9}, [], 2.0) == []


def test_who_follows_a_lost_server_costs_nothing():
    """At the same time, or later: once each, for a successor was not there."""
    restarts = begun(2)
    failed = {A: SERVER_LOST, PS: -9}
    assert restarts.unexplained(failed) is None
    assert restarts.spend(failed, [], 5.0) == [Replacement(PS, True), Replacement(A, False)]
    restarts.started(A, 5.1)
    assert restarts.unexplained({B: SERVER_LOST}) is None
    assert restarts.spend({B: SERVER_LOST}, [], 6.0) == [Replacement(B, False)]
    assert restarts.left == 1
    assert restarts.unexplained({A: SERVER_LOST}) == A


def test_a_server_that_hangs_costs_what_its_clients_say_of_it():
    """One restart for the server, none for those who lost it; one for a client whose servers all answer."""
    restarts = begun(2)
    failed = {A: SERVER_LOST, B: SERVER_LOST}
    assert restarts.unexplained(failed) == A
    assert restarts.spend(failed, [PS], 5.0) == [Replacement(PS, True), Replacement(A, False), Replacement(B, False)]
    restarts.started(A, 6.0)
    assert restarts.unexplained({A: SERVER_LOST}) == A
    assert restarts.spend({A: SERVER_LOST}, [A], 7.0) == [Replacement(A, True)]
    assert restarts.left == 0
