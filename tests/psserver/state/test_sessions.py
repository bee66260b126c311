"""Sessions and their leases, with a clock that the test turns."""

import pytest

from psserver.registry import Registry
from psserver.state.sessions import DRAWN, MAX_TERM, Membership
from pswire.cluster import Task
from pswire.errors import ConfigError, Diverged, Fenced, Forbidden, InvalidRequest, NewcomerDiverged, TaskTaken
from pswire.model.consistency import ASYNC, SYNC, Consistency
from pswire.model.log import Generation, Member
from pswire.model.status import Pace
from pswire.security.session_numbers import count_of, is_made_for
from tests.kit.rig import CHIEF, WORKERS

A, B, C = WORKERS[:3]
LEASE = 10.0
HEARTBEAT = 2.0


def bounded(k):
    return Consistency("bounded", staleness=k)


def backup(workers):
    return Consistency(backup_workers=workers)


def quorum(grace):
    return Consistency(quorum=2, grace=grace)


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


def test_a_task_whose_process_is_gone_is_taken(members):
    """Its connection has ended and no heartbeat has followed, its lease is over, or it left. While it is alive a second
    process of it is refused, and the first does not notice. A chief beside it goes on."""
    first, chief, other = opened(members, A), opened(members, A, drives=True), opened(members, B)
    with pytest.raises(TaskTaken, match=r"another process is /job:worker/task:0 of this job.*0\.5 s ago.*TF_CONFIG"):
        opened(members, A, 0.5)
    assert states(members) == {first: "open", other: "open"}
    members.part(first, 1.0)
    with pytest.raises(TaskTaken):
        opened(members, A, 0.9 + HEARTBEAT)
    second = opened(members, A, 1.0 + HEARTBEAT)
    assert states(members) == {first: "failed", other: "open", second: "open"}
    members.check(chief)
    with pytest.raises(Fenced, match="started again"):
        members.check(first)
    for now in (LEASE / 2, LEASE, 1.5 * LEASE):
        members.touch(other, now)  # while nobody is heard no lease is over
    third = opened(members, A, 1.5 * LEASE)
    fourth = again(members, third, A, 1.5 * LEASE)
    assert states(members)[fourth] == "open"


@pytest.mark.parametrize(
    ("mode", "other", "words"),
    [
        (ASYNC, SYNC, r"task:1 runs with ps.Sync\(\).*task:0 with ps.Async\(\); give .* the same"),
        (bounded(1), bounded(3), r"with ps.BoundedStaleness\(3\), .*task:0 with ps.BoundedStaleness\(1\)"),
        (backup(1), backup(2), r"with ps.Sync\(backup_workers=2\), .*task:0 with ps.Sync\(backup_workers=1\)"),
        (backup(1), SYNC, r"with ps.Sync\(\), but"),
        (quorum(0.0), quorum(1.0), r"with ps.Quorum\(2, grace=1\), .*task:0 with ps.Quorum\(2, grace=0\)"),
    ],
    ids=["modes", "bounds", "backup workers", "none", "times of grace"],
)
def test_one_mode_for_all_who_run_the_script(members, mode, other, words):
    """And one bound, one number of backup workers, one quorum: another one is refused, with both names; who is alone,
    or has taken the place of its own task, is not."""
    chief, one = opened(members, A, drives=True), members.open(Member(A, 0, 1, mode), False, 0, 0.0)[0]
    with pytest.raises(ConfigError, match=words):
        members.open(Member(B, 0, 1, other), False, 0, 0.0)
    members.check(one)
    members.check(chief)
    assert states(members) == {one: "open"}
    next_one = again(members, one, A)
    same = opened(members, B)
    with pytest.raises(ConfigError):  # what a task had goes on if its new process may not begin
        members.open(Member(A, 0, 1, mode), False, 0, 2 * LEASE)
    assert states(members) == {one: "failed", next_one: "open", same: "open"}


def test_another_job_is_refused_until_this_one_is_over():
    """The sentence says how to join it, and how to discard it. A process of the same job comes as always."""
    held = [True]
    members = begun(held=lambda: held[0])
    held[0] = False
    one = members.open(Member(A, 0, 1), False, 0, 0.0, job="red")[0]
    refused = r"belongs to the job 'blue', but these servers hold the job 'red': .*set PS_JOB=red.*psctl job delete"
    with pytest.raises(ConfigError, match=refused + "|.*task:0 of it are here"):
        members.open(Member(B, 0, 1), False, 0, 0.0, job="blue")
    with pytest.raises(ConfigError, match="without a name"):
        members.open(Member(B, 0, 1), False, 0, 0.0)
    held[0] = True
    members.leave(one, "")
    with pytest.raises(ConfigError, match="it was not closed cleanly, and its variables are still there"):
        members.open(Member(B, 0, 1), False, 0, 0.0, job="blue")
    assert members.job == "red"
    two = members.open(Member(B, 0, 1), False, 0, 0.0, job="red")[0]
    held[0] = False
    members.leave(two, "")
    members.open(Member(B, 0, 1), False, 0, 0.0, job="blue")
    assert members.job == "blue"


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


def test_states_tell_how_long_it_is_silent(members):
    """And where it waits."""
    number = opened(members, A, 4.0)
    members.enter(number, "dataset:0")
    (state,) = members.states(6.5)
    assert (state.member.task, state.member.session, state.join_point, state.silent) == (A, number, "dataset:0", 2.5)


def test_a_clean_end_is_none_after_a_failure(members):
    """Who was thought dead may still say that it is done; who failed may not take it back."""
    lost, failed, replaced = opened(members, A), opened(members, B), opened(members, C)
    for number in (lost, failed, replaced):
        members.part(number, 0.0)
    members.expire(LEASE + 1)
    for _ in range(2):  # a farewell may be sent again
        members.leave(lost, "")
    heartbeat_again = opened(members, C)
    members.leave(failed, "an error")
    members.leave(replaced, "")
    for _ in range(2):
        with pytest.raises(Fenced, match="it failed"):
            members.leave(failed, "")
        members.leave(failed, "another error")
    with pytest.raises(Fenced, match="it left"):
        members.check(lost)
    assert states(members) == {lost: "left", failed: "failed", replaced: "left", heartbeat_again: "open"}


def test_who_is_excluded_while_it_heartbeats_is_told_why(members):
    """It held a round up; who had ended is told of that end."""
    hung, left, other = opened(members, A), opened(members, B), opened(members, C)
    members.leave(left, "")
    members.exclude({hung, left, 999})
    with pytest.raises(Fenced, match="PS_ROUND_TIMEOUT"):
        members.check(hung)
    assert states(members) == {hung: "hung", left: "left", other: "open"}
    with pytest.raises(Fenced, match="PS_ROUND_TIMEOUT"):
        members.leave(hung, "")


def test_a_divergence_that_is_reported_ends_everyone(members):
    """Any other error ends its own session alone. Who leaves and has not heard of it is told; with an error it may."""
    one, two, three = (opened(members, task) for task in (A, B, C))
    members.leave(one, "ValueError: Diverged from the plan")
    members.check(two)
    members.leave(two, "Diverged: in round 3")
    for call in (lambda: members.check(three), lambda: members.leave(three, "")):
        with pytest.raises(Diverged, match=r"^in round 3$"):
            call()
    members.leave(three, "an error of its own")
    assert set(states(members).values()) == {"failed"}


def test_waiting_for_different_plans_in_a_round_ends_everyone(members):
    """Members, that is; the chief goes on, and tells."""
    one, two, three = (opened(members, task) for task in (A, B, C))
    chief = opened(members, CHIEF, drives=True)
    heartbeat(members, one, 0.0, (4, b"x"))
    heartbeat(members, two, 0.0, (4, b"x"))
    heartbeat(members, three, 0.0, (5, b"y"))
    heartbeat(members, three, 0.0, (4, b"y"))
    for number in (one, two, three):
        with pytest.raises(Diverged, match=r"round 4.*worker/task:0 runs: section x.*worker/task:2 runs: section y"):
            members.check(number)
    members.check(chief)
    assert set(states(members).values()) == {"failed"}


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
