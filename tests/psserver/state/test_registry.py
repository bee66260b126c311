"""Who has opened which session: one answer for all who ask."""

from dataclasses import replace

import pytest

from psserver.registry import REMEMBERED, TRANSPORT_TOKEN_BYTES, Registry
from pswire.cluster import Task
from pswire.errors import ConfigError, Fenced, Forbidden
from pswire.model.log import Generation, Member
from pswire.security.session_numbers import COUNT_BITS, count_of, is_made_for, number_for
from tests.kit.rig import WORKERS

A, B = WORKERS[:2]


@pytest.fixture
def registry():
    """A server's on which one session may be open at a time; there are none so far."""
    return Registry(Task("ps", 1), limit=1)


def owners(registry, *numbers):
    return [found and found.task for found in map(registry.find, numbers)]


def test_each_session_has_a_token_of_its_own(registry):
    """It is drawn by lot, and stays the same for as long as the session is known."""
    for number in range(REMEMBERED):
        registry.enter(number, A)
    tokens = {registry.transport_token(number) for number in range(REMEMBERED)}
    assert {len(token) for token in tokens} == {TRANSPORT_TOKEN_BYTES}
    assert len(tokens) == REMEMBERED
    token = registry.transport_token(0)
    registry.retire([0])
    registry.enter(0, A)
    assert registry.transport_token(0) == token


def test_one_job_has_so_many_sessions(registry):
    """One more is refused, and those that are known may open theirs again. Those of a job that is over count no more:
    they do nothing, and are nobody else's; their processes are told so, and not that they are strangers."""
    for number in range(REMEMBERED):
        registry.enter(number, A)
    with pytest.raises(ConfigError, match=f"started {REMEMBERED} times, which is the limit.*--max-sessions"):
        registry.enter(REMEMBERED, A)
    registry.enter(0, A)
    assert owners(registry, 0, REMEMBERED) == [A, None]
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


def test_a_number_is_of_the_task_that_it_was_made_for():
    """All servers see that in it; it is long enough that hardly any is another task's as well, and is never another."""
    made = [number_for(task, (7 << 60) + 5, count) for task in WORKERS for count in range(1, 200)]
    assert len(set(made)) == len(made)
    assert max(made) < 1 << 64
    for task in WORKERS:
        mine = [number for number in made if is_made_for(task, number)]
        assert [count_of(number) for number in mine] == [*range(1, 200)]
    ahead = [number_for(A, 0, (1 << COUNT_BITS) - 1 + more) for more in range(3)]
    assert len({*ahead, number_for(A, 0, 1)}) == 4
    assert all(is_made_for(A, number) for number in ahead)


def test_a_task_takes_back_its_own_number(registry):
    """Also one of a job that is over; with a new token, so that transports that were opened before are no longer of
    it."""
    number = number_for(A, 1 << 63, 1)
    for retired in (False, True):
        registry.enter(number, B) if not retired else registry.retire([number])
        if retired:
            registry._sessions[number] = replace(registry.find(number), task=B)
        before, version = registry.find(number), registry.ends
        registry.enter(number, A)
        assert owners(registry, number) == [A]
        assert registry.find(number).transport_token != before.transport_token
        assert registry.ends > version
        registry.check(number, Generation(1, (Member(A, number, 1),)))
        with pytest.raises(Forbidden, match="restart /job:worker/task:1"):
            registry.enter(number, B)


def test_a_server_takes_back_its_incarnation(registry):
    """It is drawn by lot, and made for nobody; a session that was made for its task no server takes."""
    server, incarnation, made = Task("ps", 0), (1 << 63) + 12345, number_for(A, 1 << 63, 1)
    registry.enter(incarnation, B)
    registry.enter(incarnation, server)
    registry.enter(made, A)
    for number, task in ((incarnation, B), (incarnation, Task("ps", 2)), (made, server)):
        with pytest.raises(Forbidden):
            registry.enter(number, task)
    assert owners(registry, incarnation, made) == [server, A]
