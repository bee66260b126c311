"""Who has opened which session: one answer for the core, for certificates and for lanes."""

from __future__ import annotations

import pytest

from psserver.registry import LANE_TOKEN_BYTES, REMEMBERED, Registry
from pswire.cluster import Task
from pswire.errors import ConfigError, Fenced, Forbidden
from pswire.model.log import Epoch, Member
from tests.support.rig import WORKERS

A, B = WORKERS[:2]


@pytest.fixture
def registry():
    """A server's on which one session may be open at a time; there are none so far."""
    return Registry(Task("ps", 1), limit=1)


def owners(registry, *numbers):
    """The tasks of sessions; None for those that nobody has opened."""
    return [found and found.task for found in map(registry.find, numbers)]


def test_a_session_is_of_the_task_that_opened_it_first(registry):
    """Another task is refused, and changes nothing; the same one may say it again."""
    registry.enter(7, A)
    before = registry.find(7)
    registry.enter(7, A)
    with pytest.raises(Forbidden, match=r"session 7 is /job:worker/task:0's.*restart /job:worker/task:1"):
        registry.enter(7, B)
    assert registry.find(7) == before
    assert owners(registry, 7, 8) == [A, None]


def test_each_session_has_a_token_of_its_own(registry):
    """It is drawn by lot, and stays the same for as long as the session is known."""
    for number in range(REMEMBERED):
        registry.enter(number, A)
    tokens = {registry.lane_token(number) for number in range(REMEMBERED)}
    assert {len(token) for token in tokens} == {LANE_TOKEN_BYTES}
    assert len(tokens) == REMEMBERED
    token = registry.lane_token(0)
    registry.retire([0])
    registry.enter(0, A)
    assert registry.lane_token(0) == token


def test_one_job_has_so_many_sessions(registry):
    """One more is refused, and those that are known may open theirs again."""
    for number in range(REMEMBERED):
        registry.enter(number, A)
    with pytest.raises(ConfigError, match=f"started {REMEMBERED} times already.*--max-sessions"):
        registry.enter(REMEMBERED, A)
    registry.enter(0, A)
    assert owners(registry, 0, REMEMBERED) == [A, None]


def test_sessions_of_a_job_that_is_over_do_nothing_and_are_nobody_elses(registry):
    """They count no more. Their processes are told that the job is over, and not that they are strangers."""
    for number in range(REMEMBERED):
        registry.enter(number, A)
    registry.retire([0, 1, 999])
    with pytest.raises(Fenced, match="its job is over"):
        registry.check(0, None)
    with pytest.raises(Forbidden):
        registry.enter(0, B)
    assert owners(registry, 0, 999) == [A, None]
    registry.enter(REMEMBERED, B)
    registry.check(REMEMBERED, None)


def test_a_server_for_years_remembers_so_many(registry):
    """Of jobs that are over the oldest sessions are forgotten first, their tokens with them."""
    for number in range(3 * REMEMBERED):
        registry.enter(number, A)
        registry.retire([number])
    assert owners(registry, 2 * REMEMBERED - 1, 2 * REMEMBERED) == [None, A]
    assert len(registry._sessions) == len(registry._past) == REMEMBERED


def test_the_epoch_says_whose_its_members_are(registry):
    """Whoever opened them before; also where the session is opened after the epoch has begun."""
    epoch = Epoch(1, (Member(A, 7, 1), Member(B, 8, 1)))
    registry.enter(7, A)
    registry.check(7, epoch)
    registry.enter(8, A)
    with pytest.raises(Forbidden, match=r"session 8 is /job:worker/task:1's, and /job:worker/task:0 has opened it"):
        registry.check(8, epoch)
    registry.check(7, epoch)
    registry.check(8, Epoch(2, (Member(A, 8, 1),)))
    with pytest.raises(Fenced, match="not opened here"):
        registry.check(9, epoch)
