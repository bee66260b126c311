"""Sessions and their leases, with a clock that the test turns."""

from __future__ import annotations

import pytest

from psserver.membership import COARSE, DRAWN, REMEMBERED, Membership
from pswire.errors import ConfigError, Diverged, Fenced
from pswire.log import Epoch, Member
from tests.support.rig import CHIEF, WORKERS

A, B, C = WORKERS[:3]
LEASE = 10.0


@pytest.fixture
def members():
    """Nobody yet."""
    return Membership(LEASE)


def opened(members, task, now=0.0, drives=False, key=0):
    """The number of a new session."""
    return members.open(task, 0 if drives else 1, drives, key, now)[0]


def states(members, now=0.0):
    return {state.member.session: state.state for state in members.states(now)}


def plan(plan_id):
    return f"section {plan_id.decode()}"


def beat(members, number, now, waits=(-1, b"")):
    members.check(number)
    members.beat(number, waits, now, plan)


def test_a_lease_ends_after_its_time_and_not_before(members):
    """At the very end it holds; each sign of life begins it anew."""
    number = opened(members, A, 100.0)
    assert members.expire(100.0 + LEASE) == []
    beat(members, number, 100.0 + LEASE)
    assert members.expire(100.0 + 2 * LEASE) == []
    assert members.expire(100.1 + 2 * LEASE) == [A]
    assert members.expire(500.0) == []
    assert states(members) == {number: "lost"}


def test_any_call_renews_a_lease(members):
    """Beats are for those who have nothing else to say."""
    number = opened(members, A)
    members.touch(number, 9.0)
    assert members.expire(18.0) == []


def test_a_clock_that_jumps_ends_no_lease_that_is_forgiven(members):
    """A server that stood still could hear nobody; it says for how long."""
    one, chief = opened(members, A), opened(members, CHIEF, drives=True)
    members.forgive(1000.0)
    assert members.expire(1005.0) == []
    assert members.chief_silent(1005.0) == 5.0
    assert members.expire(1011.0) == [A, CHIEF]
    assert states(members) == {one: "lost"}
    assert chief > one


def test_a_chief_has_a_lease_too(members):
    """It is no member, and is lost like one."""
    opened(members, CHIEF, drives=True)
    assert members.states(0.0) == ()
    assert members.expire(LEASE + 1) == [CHIEF]


def test_who_opens_again_replaces_itself_alone(members):
    """By task and role: a worker that is chief as well has two sessions."""
    first, chief, other = opened(members, A), opened(members, A, drives=True), opened(members, B)
    second = opened(members, A)
    assert states(members) == {first: "failed", other: "open", second: "open"}
    members.check(chief)
    with pytest.raises(Fenced, match="started again"):
        members.check(first)


def test_one_mode_for_all_who_run_the_script(members):
    """Another one is refused, with both names; who is alone, or has taken the place of its own task, is not."""
    chief, one = opened(members, A, drives=True), members.open(A, 1, False, 0, 0.0, "async")[0]
    with pytest.raises(
        ConfigError, match=r"worker/task:1.*'sync'.*worker/task:0.*'async'.*ps.Sync\(\) or ps.Async\(\)"
    ):
        opened(members, B)
    members.check(one)
    members.check(chief)
    assert states(members) == {one: "open"}
    again = members.open(A, 1, False, 0, 0.0, "sync")[0]
    other = opened(members, B)
    assert states(members) == {one: "failed", again: "open", other: "open"}


def test_a_refused_session_ends_nobody(members):
    """What a task had goes on if its new process may not begin."""
    first, other = opened(members, A), opened(members, B)
    with pytest.raises(ConfigError):
        members.open(A, 1, False, 0, 0.0, "async")
    assert states(members) == {first: "open", other: "open"}


def test_numbers_and_tokens_are_never_given_twice(members):
    """Nor those of an earlier life of the server, which are smaller."""
    later = Membership(LEASE, first=1 << 40)
    numbers = [opened(later, A), opened(later, A), opened(later, CHIEF, drives=True)]
    assert numbers == sorted(set(numbers))
    assert min(numbers) > 1 << 40
    assert later.token >> DRAWN == (1 << 40 >> COARSE) + 1


def test_a_token_cannot_be_guessed(members):
    """Those above count, and the rest is drawn by lot: no two servers give the same to their first chief."""
    drawn = {Membership(LEASE).open(CHIEF, 0, True, 0, 0.0)[1] for _ in range(8)}
    assert len(drawn) == 8
    assert {token >> DRAWN for token in drawn} == {1}


def test_only_so_many_sessions_may_be_open():
    """One more is refused with what to do; a task that is started again takes its own place."""
    few = Membership(LEASE, limit=2)
    opened(few, A)
    opened(few, CHIEF, drives=True)
    with pytest.raises(ConfigError, match=r"worker/task:1.*2 sessions.*--max-sessions"):
        opened(few, B)
    again = opened(few, A)
    few.leave(again, "")
    opened(few, B)


def test_what_has_ended_is_not_remembered_for_ever():
    """Who opens again and again is refused one day: each time is told to the chief, and takes memory."""
    few = Membership(LEASE, limit=1)
    for _ in range(REMEMBERED):
        opened(few, A)
    with pytest.raises(ConfigError, match="started 64 times already"):
        opened(few, A)


def test_a_resent_open_is_the_same_session(members):
    """By its key; another key is another process."""
    first = members.open(CHIEF, 0, True, 77, 0.0)
    assert members.open(CHIEF, 0, True, 77, 1.0) == first
    second = members.open(CHIEF, 0, True, 78, 2.0)
    assert second[0] > first[0]
    assert second[1] > first[1]


def test_what_a_chief_acts_on_changes_the_version(members):
    """And nothing else does: beats and calls go unnoticed."""
    versions = [members.version]

    def changed():
        versions.append(members.version)
        return versions[-1] > versions[-2]

    number = opened(members, A)
    assert changed()
    members.enter(number, "dataset:0")
    assert changed()
    members.enter(number, "dataset:0")
    beat(members, number, 1.0, (3, b"x"))
    members.touch(number, 2.0)
    assert not changed()
    members.expire(100.0)
    assert changed()
    members.leave(number, "")
    assert changed()
    members.leave(number, "")
    assert not changed()


def test_waiting_for_different_plans_in_a_round_ends_everyone(members):
    """Members, that is; the chief goes on, and tells."""
    one, two, three = (opened(members, task) for task in (A, B, C))
    chief = opened(members, CHIEF, drives=True)
    beat(members, one, 0.0, (4, b"x"))
    beat(members, two, 0.0, (4, b"x"))
    beat(members, three, 0.0, (5, b"y"))
    beat(members, three, 0.0, (4, b"y"))
    for number in (one, two, three):
        with pytest.raises(Diverged, match=r"round 4.*worker/task:0 is at: section x.*worker/task:2 is at: section y"):
            members.check(number)
    members.check(chief)
    assert set(states(members).values()) == {"failed"}


def test_who_has_ended_waits_for_nothing(members):
    """What it said last does not count against the others."""
    one, two = opened(members, A), opened(members, B)
    beat(members, one, 0.0, (4, b"x"))
    members.leave(one, "ValueError: a bug")
    beat(members, two, 0.0, (4, b"y"))
    members.check(two)


def test_who_waits_no_more_says_so_with_its_next_beat(members):
    """What it waited for before does not count against the others."""
    one, two = opened(members, A), opened(members, B)
    beat(members, one, 0.0, (4, b"x"))
    beat(members, one, 0.0)
    beat(members, two, 0.0, (4, b"y"))
    members.check(two)


def test_who_takes_no_part_ends_nobody():
    """A process that no epoch has taken in yet may wait for anything, and diverge: it is no part of the job."""
    members = Membership(LEASE, epoch=lambda: Epoch(1, (Member(A, one, 1),)))
    one, newcomer = opened(members, A), opened(members, B)
    beat(members, one, 0.0, (4, b"x"))
    beat(members, newcomer, 0.0, (4, b"y"))
    members.leave(newcomer, "Diverged: in round 4")
    members.check(one)
    assert states(members) == {one: "open", newcomer: "failed"}


def test_a_divergence_that_is_reported_ends_everyone(members):
    """Any other error ends its own session alone."""
    one, two, three = (opened(members, task) for task in (A, B, C))
    members.leave(one, "ValueError: Diverged from the plan")
    members.check(two)
    members.leave(two, "Diverged: in round 3")
    with pytest.raises(Diverged, match=r"^in round 3$"):
        members.check(three)


def test_a_clean_end_is_none_after_a_failure(members):
    """Who was thought dead may still say that it is done; who failed may not take it back."""
    lost, failed, replaced = opened(members, A), opened(members, B), opened(members, C)
    members.expire(LEASE + 1)
    members.leave(lost, "")
    beat_again = opened(members, C)
    members.leave(failed, "an error")
    members.leave(replaced, "")
    for _ in range(2):
        with pytest.raises(Fenced, match="it failed"):
            members.leave(failed, "")
        members.leave(failed, "another error")
    assert states(members) == {lost: "left", failed: "failed", replaced: "left", beat_again: "open"}


def test_a_new_job_knows_who_is_there(members):
    """Members of the old one are gone; those who came for the new one stay; who had ended is forgotten."""
    member, newcomer, gone = opened(members, A), opened(members, B), opened(members, C)
    members.leave(gone, "")
    members.begin_anew([member, 999])
    assert states(members) == {newcomer: "open"}
    for number in (member, gone):
        with pytest.raises(Fenced, match="unknown here"):
            members.check(number)


def test_the_end_of_a_chief(members):
    """The newest one's own farewell is what counts."""
    assert not members.chief_left()
    assert members.chief_silent(5.0) == float("inf")
    old, new = opened(members, CHIEF, drives=True), opened(members, CHIEF, 3.0, drives=True)
    opened(members, A, 4.0)
    with pytest.raises(Fenced, match="started again"):
        members.leave(old, "")
    assert not members.chief_left()
    assert members.chief_silent(5.0) == 2.0
    members.leave(new, "")
    assert members.chief_left()


def test_states_tell_how_long_it_is_silent(members):
    """And where it waits."""
    number = opened(members, A, 4.0)
    members.enter(number, "dataset:0")
    (state,) = members.states(6.5)
    assert (state.member.task, state.member.session, state.entry, state.silent) == (A, number, "dataset:0", 2.5)
