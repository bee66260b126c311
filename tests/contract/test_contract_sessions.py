"""Open, Beat, Leave: who is there, and how a session ends."""

from __future__ import annotations

from functools import partial

import pytest

from tests.kit.internals import (
    UNTIL_ENDED,
    ConfigError,
    Diverged,
    Done,
    Epoch,
    EpochClosed,
    Fenced,
    Hold,
    JobStarted,
    Lost,
    Member,
    NewcomerDiverged,
    ServerLost,
    Session,
    Start,
    Task,
    TaskTaken,
    TensorSpec,
    Timeouts,
    Turn,
    count_of,
)
from tests.kit.rig import BEAT, CHIEF, SOON, WORKERS, Job, core, eventually, reduce_only, together

NUMBER = TensorSpec("int64", ())
A, B, C = WORKERS[:3]


def states(job):
    """The state of each session that takes part in rounds, by its number."""
    watched = job.verbs[0].watch(job.opened.session, 0, 0).result(SOON)
    return {state.member.session: state.state for state in watched.sessions}


def entries(job):
    """Server 0's log."""
    return job.verbs[0].watch(job.opened.session, 0, 0).result(SOON).entries


def test_every_open_is_a_new_session(job):
    """Server 0 counts; the others take its number; each says who it is."""
    first, second = job.verbs[0].open(A, 2, 0, False), job.verbs[0].open(B, 1, 0, False)
    assert count_of(second.session) == count_of(first.session) + 1
    assert (first.server, first.incarnation, first.token, first.device) == (0, 100, 0, "cpu")
    other = job.verbs[1].open(A, 2, first.session, False)
    assert (other.session, other.server, other.incarnation) == (first.session, 1, 101)


def test_tokens_grow(job):
    """Each chief's is larger than all before; no other session has one."""
    tokens = [job.open(CHIEF, 0, True).token for _ in range(3)]
    assert [job.token, *tokens] == sorted({job.token, *tokens})


def test_a_task_that_opens_again_ends_its_last_session(job):
    """Its old process is told so, with its name."""
    old = job.open(A).session
    new = job.open(A).session
    with pytest.raises(Fenced, match="started again") as told:
        job.verbs[0].beat(old, -1, b"")
    assert told.value.task == str(A)
    job.verbs[0].beat(new, -1, b"")
    assert states(job) == {old: "failed", new: "open"}


def test_a_task_that_is_alive_is_not_taken(job):
    """A second process of it is refused, with its name; the first does not notice. When that is gone it is let in."""
    first = job.verbs[0].open(A, 1, 0, False).session
    waits = job.verbs[0].watch(first, 0, UNTIL_ENDED)
    eventually(lambda: len(job.servers.cores[0].machine.waiters.rows[Hold]) == 1)
    with pytest.raises(TaskTaken, match="another process is /job:worker/task:0") as told:
        job.verbs[0].open(A, 1, 0, False)
    assert told.value.task == str(A)
    job.verbs[0].beat(first, -1, b"")
    assert not waits.done()
    job.end(A)
    second = job.verbs[0].open(A, 1, 0, False).session
    with pytest.raises(Fenced, match="started again"):
        waits.result(SOON)
    assert states(job) == {first: "failed", second: "open"}


def test_a_process_that_goes_away_is_noticed(serve):
    """By the call that it held, which ends with its connection: its task may be taken a beat later, and not before."""
    servers = serve(1)
    verb, clock = servers.verbs[0], servers.clock
    session = verb.open(A, 1, 0, False).session
    held = verb.watch(session, 0, UNTIL_ENDED)
    eventually(lambda: len(servers.cores[0].machine.waiters.rows[Hold]) == 1)
    if servers.remote:
        verb.close()  # type: ignore[attr-defined]
    else:
        held.cancel()
    core = servers.cores[0]
    eventually(lambda: core.machine.members._sessions[session].parted is not None)
    clock.now += BEAT - 0.1
    with pytest.raises(TaskTaken):
        core.open(A, 1, 0, False)
    clock.now += 0.2
    assert core.open(A, 1, 0, False).session > session


def test_a_second_job_is_refused(job):
    """While the first is there, or what it has left; the sentence says what to do. It goes on as if nothing was."""
    (worker,) = job.join(A)
    job.variable(worker, 1)
    blue = partial(job.verbs[0].open, B, 1, 0, False, "sync", "blue")
    with pytest.raises(ConfigError, match=r"is of the job 'blue', and these servers hold a job without a name"):
        blue()
    job.verbs[0].beat(worker.session, -1, b"")
    job.verbs[0].leave(worker.session, "it failed")
    job.verbs[0].leave(job.opened.session, "it failed")
    with pytest.raises(ConfigError, match=r"was not left cleanly.*psctl job end"):
        blue()
    job.opened = job.open(CHIEF, 0, True)
    job.token = job.opened.token
    job.append(Done())
    job.verbs[0].leave(job.opened.session, "")
    assert blue().session > worker.session
    assert job.verbs[0].status().job == "blue"


def test_a_chief_learns_the_greatest_term_that_a_server_knows(job):
    """A server remembers the chiefs of an earlier life of server 0; a token is above all that its chief was told."""
    assert job.verbs[1].open(CHIEF, 0, job.opened.session, True).term == 1
    job.end(CHIEF, True)
    newer = job.verbs[0].open(CHIEF, 0, 77, True, term=40)
    assert newer.term == 41
    assert job.verbs[0].open(CHIEF, 0, 77, True, term=50).token > newer.token


def test_a_new_first_server_is_no_obstacle(serve):
    """It knows nothing of the chiefs that others remember, and no clock says which life came later."""
    servers = serve(2)
    job = Job(servers)
    for _ in range(3):
        job.begin()
    fresh = core(0, 50, root=servers.root, clock=servers.clock)
    session = Session(CHIEF, [fresh, servers.verbs[1]], 0, True, Timeouts(beat=60.0))
    session.open()
    begun = JobStarted(session.number, session.incarnations)
    for server in session.servers:
        assert server.approve(session.token, 0, [begun]) == 1
    session.leave()
    fresh.close()


def test_a_lost_server_is_told_to_everyone(job):
    """By the chief, in server 0's log: whoever is there learns it at once. Who comes for the next job is let in."""
    one, two = job.join(A, B)
    held = [job.verbs[0].watch(worker.session, 0, UNTIL_ENDED) for worker in (one, two)]
    job.verbs[0].approve(job.token, len(entries(job)), [Lost(1, "was lost; restart")])
    for future in held:
        with pytest.raises(ServerLost, match="was lost; restart") as told:
            future.result(SOON)
        assert told.value.task == "/job:ps/task:1"
    with pytest.raises(ServerLost):
        job.verbs[0].beat(one.session, -1, b"")
    job.verbs[0].beat(job.open(A).session, -1, b"")


def test_who_is_excluded_while_it_beats_is_told_why(job):
    """The chief has closed an epoch without it: on server 0 it learns that it held a round up."""
    hung, other = job.join(A, B)
    held = job.verbs[0].watch(hung.session, 0, UNTIL_ENDED)
    job.close([other.member])
    with pytest.raises(Fenced, match="PS_TIMEOUT_ROUND"):
        held.result(SOON)
    assert states(job) == {hung.session: "hung", other.session: "open"}


def test_a_process_may_be_worker_and_chief(job):
    """Both sessions of one task stand beside each other."""
    worker = job.open(A).session
    chief = job.open(A, 0, True)
    job.verbs[0].beat(worker, -1, b"")
    job.verbs[0].beat(chief.session, -1, b"")
    assert chief.token > job.token


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("verb", ["beat", "create", "pull", "propose", "watch", "push", "restore"])
def test_an_unknown_session_is_refused(job, verb, server):
    """By every server and verb."""
    (worker,) = job.join(A)
    variable = job.variable(worker, 1)
    plan = job.approve(reduce_only(NUMBER), worker)
    worker.session = 77
    calls = {
        "beat": lambda server: server.beat(77, -1, b""),
        "create": lambda server: server.create(77, 0, -1, variable.spec, (), None),
        "pull": lambda server: server.pull(77, [0], -1).result(SOON),
        "propose": lambda server: server.propose(77, plan, "", None),
        "watch": lambda server: server.watch(77, 0, -1).result(SOON),
        "push": lambda _: worker.push(plan, [1], server=server).result(SOON),
        "restore": lambda server: server.restore(77, "x", Turn()).result(SOON),
    }
    with pytest.raises(Fenced, match="restart the process"):
        calls[verb](job.verbs[server])


def test_leaving_twice_is_leaving_once(job):
    """A resent farewell changes nothing; an ended session cannot go on."""
    session = job.open(A).session
    for _ in range(2):
        job.verbs[0].leave(session, "")
    assert states(job) == {session: "left"}
    job.verbs[0].leave(session, "too late to fail")
    assert states(job) == {session: "left"}
    with pytest.raises(Fenced, match="it left"):
        job.verbs[0].beat(session, -1, b"")


def test_leaving_with_an_error_is_no_clean_end(job):
    """The chief can tell it from the others; nobody else is ended by it."""
    failed, other = job.open(A).session, job.open(B).session
    job.verbs[0].leave(failed, "ValueError: a bug")
    assert states(job) == {failed: "failed", other: "open"}


def test_an_unknown_session_may_leave(job):
    """There is nothing to end, and nobody to blame."""
    job.verbs[0].leave(77, "")


def test_a_silent_session_is_lost(job):
    """Its lease ends; whoever beats stays."""
    silent, loud = job.open(A).session, job.open(B).session
    job.servers.spend(12, loud, job.opened.session)
    assert states(job) == {silent: "lost", loud: "open"}
    with pytest.raises(Fenced, match="lease ended") as told:
        job.verbs[0].beat(silent, -1, b"")
    assert told.value.task == str(A)


def test_any_call_is_a_sign_of_life(job):
    """Not only beats renew a lease."""
    session, other = job.open(A).session, job.open(B).session
    for _ in range(3):
        job.servers.spend(6, job.opened.session, other)
        job.verbs[0].propose(session, None, "dataset:0", None)
    assert states(job) == {session: "open", other: "open"}


def test_who_waits_does_not_live_by_that(job):
    """A process that was killed while it waited in a round is found out, whatever else happens meanwhile."""
    dead, late = job.join(A, B)
    plan = job.approve(reduce_only(NUMBER), dead)
    waiting = dead.push(plan, [1])
    job.arrived(dead)
    job.servers.spend(12, late.session, job.opened.session)
    assert states(job) == {dead.session: "lost", late.session: "open"}
    with pytest.raises(Fenced, match="lease ended"):
        waiting.result(SOON)


def test_a_late_goodbye_counts(job):
    """Who was thought dead and then leaves cleanly has done its part."""
    session, other = job.open(A).session, job.open(B).session
    job.servers.spend(12, job.opened.session, other)
    assert states(job) == {session: "lost", other: "open"}
    job.verbs[0].leave(session, "")
    assert states(job) == {session: "left", other: "open"}


def test_time_in_which_a_server_stood_still_counts_for_no_lease(job):
    """It could hear nobody."""
    session, other = job.open(A).session, job.open(B).session
    job.servers.spend(8, job.opened.session, other)
    job.servers.clock.now += 1000.0
    job.servers.tick()
    job.servers.spend(1, job.opened.session, other)
    assert states(job) == {session: "open", other: "open"}
    job.servers.spend(3, job.opened.session, other)
    assert states(job) == {session: "lost", other: "open"}


def test_an_epoch_fences_whom_it_leaves_out(job):
    """On every server, in every verb; its waiting push is told, its contribution counts."""
    out, stays = job.join(A, B)
    plan = job.approve(reduce_only(NUMBER, server=1), out)
    waiting = out.push(plan, [5], server=1)
    job.arrived(out, server=1)
    job.close([stays.member])
    for server, why in zip(job.verbs, ("held up a round", "new epoch"), strict=True):
        with pytest.raises(Fenced, match=why):
            server.beat(out.session, -1, b"")
    with pytest.raises(Fenced, match="new epoch"):
        waiting.result(SOON)
    with pytest.raises(Fenced):
        out.push(plan, [5], server=1).result(SOON)
    reply = stays.push(plan, [2], server=1).result(SOON)
    assert reply.left_out == ()
    assert int(reply.payload.tensors([NUMBER])[0]) == 7


def test_processes_that_wait_for_each_other_are_found_out(job):
    """Two wait in one round for different plans, on different servers: the beats tell, with both positions."""
    one, two = job.join(A, B)
    here = job.approve(reduce_only(NUMBER, server=0, target="'loss'"), one)
    there = job.approve(reduce_only(NUMBER, server=1, target="'accuracy'"), one)
    waiting = one.push(here, [1])
    job.arrived(one)
    job.verbs[0].beat(one.session, 0, here.id)
    with pytest.raises(Diverged, match=r"round 0.*worker/task:0.*'loss'.*worker/task:1.*'accuracy'"):
        job.verbs[0].beat(two.session, 0, there.id)
    with pytest.raises(Diverged, match=r"'loss'.*'accuracy'"):
        waiting.result(SOON)
    with pytest.raises(Diverged, match=r"'loss'.*'accuracy'"):
        job.verbs[0].beat(one.session, -1, b"")
    assert set(states(job).values()) == {"failed"}


def test_a_newcomer_that_waits_for_another_plan_ends_alone(job):
    """Those who began together before it came are no newcomers in its first round."""
    one, new = job.join(A)[0], job.open(B).session
    job.append(EpochClosed(Epoch(2, (one.member, Member(B, new, 1)), "dataset:0")))
    job.verbs[0].propose(one.session, None, "", Start(2, 4))
    job.verbs[0].beat(one.session, 4, b"x")
    with pytest.raises(NewcomerDiverged):
        job.verbs[0].beat(new, 4, b"y")
    job.verbs[0].beat(one.session, 4, b"x")
    assert states(job) == {one.session: "open", new: "failed"}


def test_waiting_in_different_rounds_is_no_divergence(job):
    """One may be ahead of what another has last said."""
    one, two = job.join(A, B)
    job.verbs[0].beat(one.session, 3, b"x")
    job.verbs[0].beat(two.session, 4, b"y")
    job.verbs[0].beat(one.session, -1, b"")


def test_a_divergence_is_told_to_everyone(job):
    """Whoever finds it says so when it leaves; the others' sessions end with the same words."""
    one, two, three = job.join(A, B, C)
    job.verbs[0].leave(one.session, "Diverged: operand 0 differs")
    for other in (two, three):
        with pytest.raises(Diverged, match=r"^operand 0 differs$"):
            job.verbs[0].beat(other.session, -1, b"")
    job.verbs[0].beat(job.opened.session, -1, b"")


def test_who_leaves_is_told_that_the_job_failed(job):
    """A process that ends before it heard of it did not do its part; leaving with an error is taken as it is."""
    one, two = job.join(A, B)
    job.verbs[0].leave(one.session, "Diverged: operand 0 differs")
    for _ in range(2):
        with pytest.raises(Diverged, match=r"^operand 0 differs$"):
            job.verbs[0].leave(two.session, "")
    job.verbs[0].leave(two.session, "an error of its own")
    assert set(states(job).values()) == {"failed"}


def test_status_tells_of_the_chief(job):
    """Server 0 says how long it is silent; the others cannot know."""
    job.servers.clock.now += 4.0
    assert job.verbs[0].status().chief == pytest.approx(4.0)
    assert job.verbs[1].status().chief == float("inf")


def test_status_tells_who_is_missed(job):
    """An open round, what it does, whom it waits for, and whether it may run."""
    one, two = job.join(A, B)
    plan = reduce_only(NUMBER, target="'loss'")
    job.verbs[0].propose(one.session, plan, "", None)
    one.push(plan, [1])
    job.arrived(one)
    (waiting,) = job.verbs[0].status().waiting
    assert (waiting.round, waiting.missing, waiting.approved) == (0, (B,), False)
    job.approve(plan, one)
    (waiting,) = job.verbs[0].status().waiting
    assert waiting.approved
    assert "'loss'" in waiting.section
    together(two.push(plan, [1]))
    status = job.verbs[0].status()
    assert (status.waiting, status.round, status.server, status.incarnation) == ((), 0, 0, 100)


def test_status_without_a_job(serve):
    """A server that nobody has used has nothing to tell, and no error."""
    status = serve(1).verbs[0].status()
    assert (status.log, status.epoch, status.round, status.variables) == (0, None, -1, 0)


def test_epochs_travel_whole(job):
    """Members, entry and start come back as they were."""
    one, _ = job.join(A, Task("worker", 7), replicas=3)
    epoch = Epoch(2, job.epoch.members, "dataset:0")
    job.append(EpochClosed(epoch))
    assert [server.status().epoch for server in job.verbs] == [epoch, epoch]
    assert epoch.session(one.session).replicas == 3
