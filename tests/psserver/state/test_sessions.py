"""Sessions and their leases, with a clock that the test turns; and who has opened which: one answer for all who ask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psserver.registry import REMEMBERED, TRANSPORT_TOKEN_BYTES, Registry
from psserver.state.sessions import DRAWN, MAX_TERM, Membership
from pswire.cluster import Task
from pswire.errors import ConfigError, Diverged, Fenced, Forbidden, InvalidRequest, NewcomerDiverged, TaskTaken
from pswire.model.consistency import ASYNC, Consistency
from pswire.model.log import Generation, Member
from pswire.model.status import Pace
from pswire.security.session_numbers import COUNT_BITS, count_of, is_made_for, number_for
from tests.kit.rig import CHIEF, WORKERS

A, B, C = WORKERS[:3]
LEASE = 10.0
HEARTBEAT = 2.0


def begun(limit=8, **more):
    return Membership(Registry(Task("ps", 0), limit), LEASE, HEARTBEAT, **more)


@pytest.fixture
def members():
    return begun()


def again(members, number, task, now=0.0, drives=False):
    members.leave(number, "it ended")
    return opened(members, task, now, drives)


def opened(members, task, now=0.0, drives=False, key=0):
    return members.open(Member(task, 0, 0 if drives else 1), drives, key, now)[0]


def states(members, now=0.0):
    return {state.member.session: state.state for state in members.states(now)}


def plan(plan_id):
    return f"section {plan_id.decode()}"


def heartbeat(members, number, now, waits=(-1, b"")):
    members.check(number)
    members.heartbeat(number, waits, now, plan)


def test_a_lease_ends_after_its_time_and_not_before(members):
    """At the very end it holds; each sign of life begins it anew. Somebody else is heard all the time."""
    number, other = opened(members, A, 100.0), opened(members, B, 100.0)

    def expired(now):
        members.touch(other, now)
        return members.expire(now)

    assert expired(100.0 + LEASE / 2) == expired(100.0 + LEASE) == []
    heartbeat(members, number, 100.0 + LEASE)
    assert expired(100.0 + 1.5 * LEASE) == expired(100.0 + 2 * LEASE) == []
    assert expired(100.1 + 2 * LEASE) == [A]
    assert expired(104.0 + 2 * LEASE) == []
    assert states(members) == {number: "lost", other: "open"}


def test_while_nobody_is_heard_no_lease_runs(members):
    """It is the server that is cut off: when the first is heard again, each has a whole lease to be."""
    one, two = opened(members, A), opened(members, B)
    for now in (LEASE / 2, LEASE, 3 * LEASE, 60.0):
        assert members.expire(now) == []
    heartbeat(members, one, 61.0)
    assert members.expire(62.0) == members.expire(61.0 + LEASE) == []
    for now in (65.0, 69.0, 72.0):
        heartbeat(members, one, now)
    assert members.expire(72.0) == [B]
    assert states(members) == {one: "open", two: "lost"}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("heard", [(3.0, 5.25), (5.25, 9.0)], ids=["no lease ends", "all leases begin anew"])
def test_after_half_a_lease_without_a_word_a_server_is_cut_off(members, heard, cut):
    """Then no lease ends, and who is heard after it begins all of them anew; while somebody was heard within that time,
    they end. Any call renews a lease: heartbeats are for those who have nothing else to say."""
    opened(members, A)
    other = opened(members, B)
    within = (3.0, 5.5) if heard[0] == 3.0 else (5.0, 9.0)
    for now in heard if cut else within:
        members.touch(other, now)
    assert members.expire(LEASE + 0.5) == ([] if cut else [A])


def test_whose_connection_ends_as_a_process_does_is_lost_all_the_same(members):
    """A killed process says so by its connection, at once; one that ends long after a silence is a cut network. Who is
    heard again has not vanished: a connection that ended was only that."""
    opened(members, A)
    members.part(opened(members, B), HEARTBEAT)
    members.part(opened(members, C), 2 * HEARTBEAT + 0.1)
    assert members.expire(LEASE) == []
    assert members.expire(LEASE + 0.1) == [B]
    alone = begun()
    number = opened(alone, A)
    alone.part(number, 1.0)
    heartbeat(alone, number, 2.0)
    assert alone.expire(3 * LEASE) == []
    with pytest.raises(TaskTaken):
        opened(alone, A, 2.0 + HEARTBEAT)


def test_a_clock_that_jumps_ends_no_lease_that_is_forgiven(members):
    """A server that stood still could hear nobody; it says for how long."""
    one, _, other = opened(members, A), opened(members, CHIEF, drives=True), opened(members, B)
    members.forgive(1000.0)
    assert members.expire(1005.0) == []
    assert members.chief_silent(1005.0) == 5.0
    members.touch(other, 1005.0)
    members.touch(other, 1009.0)
    assert members.expire(1011.0) == [A, CHIEF]
    assert states(members) == {one: "lost", other: "open"}
    alone = begun()
    opened(alone, CHIEF, drives=True)
    assert alone.states(0.0) == ()
    assert alone.expire(LEASE + 1) == [CHIEF]  # that nobody else is heard is no excuse for it


def test_only_one_process_is_chief(members):
    """Also where another task would drive; once its lease is over, the next one may, with a greater token."""
    number, token = members.open(Member(CHIEF, 0, 0), True, 1, 0.0)
    with pytest.raises(TaskTaken, match=r"another process is chief of this job, as /job:chief/task:0"):
        members.open(Member(A, 0, 0), True, 2, 1.0)
    assert members.token == token
    assert members.open(Member(A, 0, 0), True, 2, LEASE + 1)[1] > token
    with pytest.raises(Fenced):
        members.check(number)


def test_numbers_and_tokens_are_never_given_twice(members):
    """Nor those of an earlier life of the server, from which they are far by chance."""
    found = []
    for incarnation in (1 << 60, 1 << 61):
        later = begun(incarnation=incarnation)
        one = opened(later, A)
        numbers = [one, again(later, one, A), opened(later, CHIEF, drives=True)]
        assert [count_of(number) for number in numbers] == [1, 2, 3]
        assert [is_made_for(task, number) for task, number in zip((A, A, CHIEF), numbers, strict=True)] == [True] * 3
        assert later.term == 1
        found += numbers
    assert len(set(found)) == 6


def test_a_chief_is_above_all_that_anybody_has_heard_of(members):
    """Other servers may remember chiefs of an earlier life of this one; what no chief can have reached is refused.
    Below its term, which counts, a token has what was drawn."""
    number, token = members.open(Member(CHIEF, 0, 0), True, 5, 0.0, term=41, drawn=12345)
    assert (members.term, token >> DRAWN, token % (1 << DRAWN)) == (42, 42, 12345)
    assert members.open(Member(CHIEF, 0, 0), True, 5, 0.0, term=42) == (number, token)
    assert members.open(Member(CHIEF, 0, 0), True, 5, 0.0, term=50) == (number, members.token)
    assert members.term == 51
    with pytest.raises(InvalidRequest):
        members.open(Member(CHIEF, 0, 0), True, 5, 0.0, term=MAX_TERM + 1)


def test_only_so_many_sessions_may_be_open():
    """One more is refused with what to do; a task that is started again takes its own place."""
    few = begun(limit=2)
    first = opened(few, A)
    opened(few, CHIEF, drives=True)
    with pytest.raises(ConfigError, match=r"worker/task:1.*2 sessions.*--max-sessions"):
        opened(few, B)
    few.leave(again(few, first, A), "")
    opened(few, B)


def test_a_resent_open_is_the_same_session(members):
    """By its key; another key is another process. The key is its task's alone: another one that says it gets neither
    the session nor its token."""
    first = members.open(Member(CHIEF, 0, 0), True, 77, 0.0)
    assert members.open(Member(CHIEF, 0, 0), True, 77, 1.0) == first
    with pytest.raises(Forbidden, match=r"session \d+ belongs to /job:chief/task:0, not to /job:worker/task:0"):
        members.open(Member(A, 0, 0), True, 77, 1.0)
    second = members.open(Member(CHIEF, 0, 0), True, 78, 2.0 + LEASE)
    assert second[0] != first[0]
    assert second[1] > first[1]


def test_what_a_chief_acts_on_changes_the_version(members):
    """And nothing else does: heartbeats and calls go unnoticed, unless a process says that it leaves."""
    versions = [members.version]

    def changed():
        versions.append(members.version)
        return versions[-1] > versions[-2]

    number = opened(members, A)
    assert changed()
    members.enter(number, "dataset:0")
    assert changed()
    members.enter(number, "dataset:0")
    heartbeat(members, number, 1.0, (3, b"x"))
    members.touch(number, 2.0)
    members.heartbeat(number, (3, b"x"), 3.0, plan, Pace(5, 5, 5))
    assert not changed()
    members.heartbeat(number, (3, b"x"), 3.0, plan, Pace(5, 5, 5, True, True))
    assert changed()
    members.part(number, 3.0)
    assert not changed()
    members.expire(100.0)
    assert changed()
    members.leave(number, "")
    assert changed()
    members.leave(number, "")
    assert not changed()


@pytest.mark.parametrize("ends", [True, False], ids=["it has ended", "it waits no more"])
def test_what_somebody_waited_for_before_does_not_count(members, ends):
    """Against the others: once it has ended, or says so with its next heartbeat."""
    one, two = opened(members, A), opened(members, B)
    heartbeat(members, one, 0.0, (4, b"x"))
    if ends:
        members.leave(one, "ValueError: a bug")
    else:
        heartbeat(members, one, 0.0)
    heartbeat(members, two, 0.0, (4, b"y"))
    members.check(two)


def test_who_takes_no_part_ends_nobody():
    """A process that no generation has taken in yet may wait for anything, and diverge: it is no part of the job."""
    members = begun(generation=lambda: Generation(1, (Member(A, one, 1),)))
    one, newcomer = opened(members, A), opened(members, B)
    heartbeat(members, one, 0.0, (4, b"x"))
    heartbeat(members, newcomer, 0.0, (4, b"y"))
    members.leave(newcomer, "Diverged: in round 4")
    members.check(one)
    assert states(members) == {one: "open", newcomer: "failed"}


def test_who_takes_part_has_a_lease_to_come_where_another_server_keeps_the_sessions_now():
    """But not a process in whose place another one has come already. Who opened elsewhere has the session that it has:
    asked again by its number it is no second one."""
    before, absent, now = (Member(task, number, 1) for task, number in ((A, 1), (B, 2), (A, 3)))
    members = begun(generation=lambda: Generation(1, (before,), leaving=(absent,)))
    members.know(now, False, "job", 90.0)
    members.take_over(1 << DRAWN, 100.0)
    assert states(members) == {now.session: "open", absent.session: "open"}
    assert members.open(Member(A, 0, 1), False, now.session, 100.1, job="job")[0] == now.session
    with pytest.raises(TaskTaken):
        members.open(Member(A, 0, 1), False, 999, 100.1, job="job")
    assert members.open(Member(B, 0, 1), False, absent.session, 105.0, job="job")[0] == absent.session
    for moment in (104.0, 108.0, 112.0):
        members.touch(now.session, moment)
    assert members.expire(109.0) == []
    assert members.expire(112.0) == [B]


def test_the_end_of_a_chief(members):
    """The newest one's own farewell is what counts."""
    assert not members.chief_left()
    assert members.chief_silent(5.0) == float("inf")
    old, new = opened(members, CHIEF, drives=True), opened(members, CHIEF, 3.0 + LEASE, drives=True)
    opened(members, A, 4.0 + LEASE)
    with pytest.raises(Fenced, match="started again"):
        members.leave(old, "")
    assert not members.chief_left()
    assert members.chief_silent(5.0 + LEASE) == 2.0
    members.leave(new, "")
    assert members.chief_left()


def with_newcomer(members):
    """Sessions of two members of a job, and of one that takes part from round 4 on."""
    one, two, new = (opened(members, task) for task in (A, B, C))
    members.take_part([Member(A, one, 1), Member(B, two, 1)], -1)
    members.take_part([Member(A, one, 1), Member(B, two, 1), Member(C, new, 1)], 4)
    return one, two, new


def test_a_newcomer_that_waits_for_another_plan_ends_alone(members):
    """In the first round that it makes in a group; after that, and where all begin together, it is everyone's end."""
    one, two, new = with_newcomer(members)
    heartbeat(members, new, 0.0, (4, b"y"))
    heartbeat(members, one, 0.0, (4, b"x"))
    with pytest.raises(
        NewcomerDiverged, match=r"in its first round, 4.*worker/task:0 runs: section x.*go on without it"
    ):
        members.check(new)
    members.check(one)
    heartbeat(members, one, 0.0, (5, b"x"))
    heartbeat(members, two, 0.0, (5, b"y"))
    with pytest.raises(Diverged, match="round 5"):
        members.check(one)


def test_a_newcomer_that_is_as_one_of_two_who_differ_is_told_of_them(members):
    """All have ended by then, and its own error would blame it alone."""
    one, two, new = with_newcomer(members)
    heartbeat(members, two, 0.0, (4, b"y"))
    heartbeat(members, new, 0.0, (4, b"y"))
    heartbeat(members, one, 0.0, (4, b"x"))
    for number in (one, two, new):
        with pytest.raises(Diverged, match="round 4") as caught:
            members.check(number)
        assert not isinstance(caught.value, NewcomerDiverged)


def driven(mode="sync"):
    """A job with variables, three workers and a chief, all heard of at 0; with the numbers of their sessions."""
    members = begun(held=lambda: True)
    workers = [
        members.open(Member(Task("worker", index), 0, 1, Consistency(mode)), False, 0, 0.0)[0] for index in range(3)
    ]
    return members, workers, members.open(Member(CHIEF, 0, 0), True, 0, 0.0)[0]


def heard(members, workers, now):
    for number in workers:
        members.heartbeat(number, (-1, b""), now, str)


def test_the_lowest_worker_that_lives_is_to_drive():
    """Two heartbeats after the chief is gone: nobody before, and nobody else; a worker that leaves is passed over."""
    members, workers, chief = driven()
    members.part(chief, 1.0)
    heard(members, workers, 4.0)
    assert not any(members.is_to_drive(number, 4.9) for number in workers)
    assert [members.is_to_drive(number, 5.0) for number in workers] == [True, False, False]
    heard(members, workers[1:], 8.5)
    assert [members.is_to_drive(number, 8.5) for number in workers] == [False, True, False]
    members.heartbeat(workers[1], (-1, b""), 8.5, str, Pace(leaving=True))
    assert [members.is_to_drive(number, 8.5) for number in workers] == [False, False, True]
    members.open(Member(Task("worker", 2), 0, 0), True, 0, 8.6)
    assert not any(members.is_to_drive(number, 20.0) for number in workers[2:]), "somebody drives"


def test_where_all_leave_the_one_that_asks_is_to_drive():
    """At once after the chief is gone: nobody stays who could, and they need one to leave. Not while one stays."""
    members, workers, chief = driven()
    for number in workers[:2]:
        members.heartbeat(number, (-1, b""), 1.0, str, Pace(leaving=True))
    members.leave(chief, "it was told to end")
    assert not any(members.is_to_drive(number, 1.1) for number in workers), "worker 2 will, in two heartbeats"
    members.heartbeat(workers[2], (-1, b""), 1.2, str, Pace(leaving=True))
    assert all(members.is_to_drive(number, 1.2) for number in workers)
    assert not members.is_to_drive(workers[0] + 1, 1.2)
    members.leave(workers[1], "")
    assert [members.is_to_drive(number, 1.2) for number in workers] == [True, False, True]
    members, workers, chief = driven()
    for number in workers:
        members.heartbeat(number, (-1, b""), 1.0, str, Pace(leaving=True))
    members.part(chief, 0.0)
    assert not members.is_to_drive(workers[0], 1.9), "it may be alive for a heartbeat"
    assert members.is_to_drive(workers[0], 2.0)


def test_a_server_that_is_told_to_end_sees_whether_others_leave():
    """True while one does, None while one may say so yet, or the chief has to tell of the end; then False."""
    members, workers, chief = driven()
    assert members.leave_now(1.0) is None
    members.heartbeat(workers[0], (-1, b""), 1.0, str, Pace(leaving=True))
    assert members.leave_now(1.0) is True
    members.leave(workers[0], "")
    assert members.leave_now(1.0) is None
    for number in workers[1:]:
        members.leave(number, "")
    assert members.leave_now(1.0) is None, "the chief is here"
    members.leave(chief, "")
    assert members.leave_now(1.0) is False
    members, workers, chief = driven()  # of another server, which hears heartbeats and no farewells
    members.touch(workers[0], 3.0, Pace(leaving=True))
    members.touch(workers[0], 4.0, None)
    members.touch(workers[0] + 1, 4.0, Pace(leaving=True))
    assert members.leave_now(8.0) is True
    assert members.leave_now(8.1) is False
    members.touch(workers[0], 8.2, None)
    members.part(workers[0], 8.2)
    assert members.leave_now(8.2) is False


def test_nobody_drives_where_nothing_is_to_be_driven():
    """The chief has left, is only silent, or coordinates: then its script is its own; or there is no job."""
    members, workers, chief = driven()
    heard(members, workers, 6.0)
    assert not members.is_to_drive(workers[0], 6.0), "it is silent, and may be alive"
    members.leave(chief, "")
    assert not members.is_to_drive(workers[0], 6.0)
    members, workers, chief = driven("async")
    members.open(Member(CHIEF, 0, 1, ASYNC), False, 0, 0.0)
    members.part(chief, 0.0)
    heard(members, workers, 6.0)
    assert not members.is_to_drive(workers[0], 6.0)
    members, workers, chief = driven()
    members._held = lambda: False
    members.part(chief, 0.0)
    heard(members, workers, 6.0)
    assert not members.is_to_drive(workers[0], 6.0)


@pytest.fixture
def registry():
    """A server's on which one session may be open at a time; there are none so far."""
    return Registry(Task("ps", 1), limit=1)


def owners(registry, *numbers):
    return [found and found.task for found in map(registry.find, numbers)]


def test_a_session_is_of_the_task_that_opened_it_first(registry):
    """Another task is refused, and changes nothing; the same one may say it again."""
    registry.enter(7, A)
    before = registry.find(7)
    registry.enter(7, A)
    with pytest.raises(Forbidden, match=r"session 7 belongs to /job:worker/task:0.*restart /job:worker/task:1"):
        registry.enter(7, B)
    assert registry.find(7) == before
    assert owners(registry, 7, 8) == [A, None]


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


def test_the_generation_says_whose_its_members_are(registry):
    """Whoever opened them before; also where the session is opened after the generation has begun."""
    generation = Generation(1, (Member(A, 7, 1), Member(B, 8, 1)))
    registry.enter(7, A)
    registry.check(7, generation)
    registry.enter(8, A)
    with pytest.raises(
        Forbidden, match=r"session 8 belongs to /job:worker/task:1, but /job:worker/task:0 has opened it"
    ):
        registry.check(8, generation)
    registry.check(7, generation)
    registry.check(8, Generation(2, (Member(A, 8, 1),)))
    with pytest.raises(Fenced, match="was not opened on this server"):
        registry.check(9, generation)


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
