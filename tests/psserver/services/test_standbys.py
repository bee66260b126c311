"""Processes that wait for the place of a server."""

import pytest

from psserver.services.standbys import Standbys
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.limits import STANDBY_SECONDS
from pswire.model.log import JobStarted
from pswire.model.places import Standby
from pswire.servers.places import MoveRequest, OfferRequest


class Log:
    """A job of two servers with copies."""

    def __init__(self):
        self.incarnations, self.started, self.servers = (1, 2), JobStarted(7, (1, 2), copies=(1, 0)), 2
        self.addresses, self.moved, self.over = ("x:1", "y:1"), {}, False

    def standbys(self):
        return Standbys(Task("ps", 1), lambda: self, lambda token: None, list)


def test_a_process_that_has_become_the_server_waits_no_more():
    """Its server may move on at once, though the process said a moment ago that it waits."""
    log = Log()
    standbys = log.standbys()
    for address in ("a:1", "b:1"):
        standbys.offer(0.0, OfferRequest(Standby(address)))
    assert standbys.move(0.1, MoveRequest(0, "a:1"))[0] == "a:1"
    with pytest.raises(ConfigError, match="/job:ps/task:0 is already moving to a:1"):
        standbys.move(0.2, MoveRequest(0, "b:1"))[0]
    log.moved[0] = "a:1"
    assert [standby.address for standby in standbys.waiting(0.3)] == ["b:1"]
    assert standbys.move(0.3, MoveRequest(0, "b:1"))[0] == "b:1"
    standbys.offer(0.4, OfferRequest(Standby("c:1")))
    log.moved[0] = "b:1"
    assert standbys.move(0.5, MoveRequest(0, "c:1"))[0] == "c:1"


def test_a_server_whose_job_is_over_knows_who_has_not_heard_of_it():
    """Who asks then is told; one that asks no more is not waited for, nor one that has become a server."""
    log = Log()
    standbys = log.standbys()
    assert not standbys.untold(0.0)
    for address in ("a:1", "b:1", "c:1"):
        standbys.offer(0.0, OfferRequest(Standby(address)))
    log.over = True
    standbys.offer(1.0, OfferRequest(Standby("a:1")))
    log.moved[0] = "b:1"
    assert standbys.untold(1.0), "c has not asked since"
    standbys.offer(1.1, OfferRequest(Standby("c:1")))
    assert not standbys.untold(1.2)
    log.over = False
    standbys.offer(2.0, OfferRequest(Standby("a:1")))
    assert standbys.untold(2.0), "another job has begun"
    assert not standbys.untold(2.1 + STANDBY_SECONDS)
