"""Open, Heartbeat, Leave, Enlist: who is there, how a session ends, and which index a worker gets that joins."""

from __future__ import annotations

from functools import partial

import pytest

from tests.kit.internals import (
    UNTIL_ENDED,
    ConfigError,
    Diverged,
    Done,
    Enlisted,
    Fenced,
    Generation,
    GenerationClosed,
    InvalidRequest,
    JobStarted,
    Lost,
    ServerLost,
    Session,
    Task,
    TaskTaken,
    TensorSpec,
    Timeouts,
    Turn,
    count_of,
)
from tests.kit.rig import (
    CHIEF,
    HEARTBEAT,
    SOON,
    WORKERS,
    Job,
    checkpoint,
    core,
    create,
    eventually,
    reduce_only,
    together,
)

NUMBER = TensorSpec("int64", ())
A, B, C = WORKERS[:3]
LEASE = 12
"""Seconds after which a place that nobody keeps is free: more than a lease."""


def states(job):
    """The state of each session that takes part in rounds, by its number."""
    watched = job.verbs[0].watch(job.opened.session, 0, 0).result(SOON)
    return {state.member.session: state.state for state in watched.sessions}


def heartbeat(job, session, round=-1, plan=b""):
    job.verbs[0].heartbeat(session, round, plan)


def test_every_open_is_a_new_session(job):
    """Server 0 counts; the others take its number; each says who it is. Each chief's token is larger than all before;
    no other session has one. A worker and a chief of one task stand beside each other."""
    first, second = job.verbs[0].open(A, 2, 0, False), job.verbs[0].open(B, 1, 0, False)
    assert count_of(second.session) == count_of(first.session) + 1
    assert (first.server, first.incarnation, first.token, first.device) == (0, 100, 0, "cpu")
    other = job.verbs[1].open(A, 2, first.session, False)
    assert (other.session, other.server, other.incarnation) == (first.session, 1, 101)
    tokens = [job.open(task, 0, True).token for task in (CHIEF, CHIEF, A)]
    assert [job.token, *tokens] == sorted({job.token, *tokens})
    heartbeat(job, first.session)


def test_a_task_that_opens_again_ends_its_last_session(job):
    """Its old process is told so, with its name."""
    old = job.open(A).session
    new = job.open(A).session
    with pytest.raises(Fenced, match="started again") as told:
        heartbeat(job, old)
    assert told.value.task == str(A)
    heartbeat(job, new)
    assert states(job) == {old: "failed", new: "open"}


def test_a_process_that_goes_away_is_noticed(serve):
    """By the call that it held, which ends with its connection: its task may be taken a heartbeat later, and not
    before."""
    servers = serve(1)
    verb, clock = servers.verbs[0], servers.clock
    session = verb.open(A, 1, 0, False).session
    held = verb.watch(session, 0, UNTIL_ENDED)
    eventually(lambda: len(servers.cores[0].machine.watches.ends) == 1)
    if servers.remote:
        verb.close()  # type: ignore[attr-defined]
    else:
        held.cancel()
    core = servers.cores[0]
    eventually(lambda: core.machine.members._sessions[session].parted is not None)
    clock.now += HEARTBEAT - 0.1
    with pytest.raises(TaskTaken):
        core.open(A, 1, 0, False)
    clock.now += 0.2
    assert core.open(A, 1, 0, False).session > session


def test_a_second_job_is_refused(job):
    """While the first is there, or what it has left; the sentence says what to do. It goes on as if nothing was."""
    (worker,) = job.join(A)
    job.variable(worker, 1)
    blue = partial(job.verbs[0].open, B, 1, 0, False, job="blue")
    with pytest.raises(ConfigError, match=r"belongs to the job 'blue', but these servers hold a job without a name"):
        blue()
    heartbeat(job, worker.session)
    job.verbs[0].leave(worker.session, "it failed")
    job.verbs[0].leave(job.opened.session, "it failed")
    with pytest.raises(ConfigError, match=r"was not closed cleanly.*psctl job delete"):
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
    session = Session(CHIEF, [fresh, servers.verbs[1]], 0, True, Timeouts(heartbeat_interval=60.0))
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
    job.verbs[0].approve(job.token, job.verbs[0].status().log, [Lost(1, "was lost; restart")])
    for future in held:
        with pytest.raises(ServerLost, match="was lost; restart") as told:
            future.result(SOON)
        assert told.value.task == "/job:ps/task:1"
    with pytest.raises(ServerLost):
        heartbeat(job, one.session)
    job.verbs[0].heartbeat(job.open(A).session, -1, b"")


@pytest.mark.parametrize("server", [0, 1])
def test_an_unknown_session_is_refused(job, server):
    """By every server and verb. But it may leave: there is nothing to end, and nobody to blame."""
    (worker,) = job.join(A)
    variable = job.variable(worker, 1)
    plan = job.approve(reduce_only(NUMBER), worker)
    worker.session = 77
    verb = job.verbs[server]
    for call in (
        lambda: verb.heartbeat(77, -1, b""),
        lambda: create(verb, 77, 0, variable.spec),
        lambda: verb.pull(77, [0], -1).result(SOON),
        lambda: verb.propose(77, plan, "", None),
        lambda: verb.watch(77, 0, -1).result(SOON),
        lambda: worker.push(plan, [1], server=server).result(SOON),
        lambda: verb.restore(77, "x", Turn()).result(SOON),
    ):
        with pytest.raises(Fenced, match="restart the process"):
            call()
    job.verbs[0].leave(77, "")


def test_what_waits_ends_with_its_server(job):
    """Nobody waits for what is gone: a push, a read, a watch, a snapshot."""
    one, _ = job.join(A, B)
    variable, plan = job.adder(one)
    order = job.approve(checkpoint("x", (0, 1)), one)
    server, machine = job.verbs[0], job.servers.cores[0].machine
    waiting = [
        one.push(plan, [1]),
        server.pull(one.session, [variable.id], 9),
        server.watch(one.session, server.status().log, -1),
        server.snapshot(job.token, order.id, ""),
    ]
    job.arrived(one)
    eventually(lambda: machine.job.reads.calls and machine.watches.news)
    eventually(lambda: machine.job.snapshots.saves[order.id].shard._done_callbacks)
    job.servers.cores[0].close()
    for future in waiting:
        with pytest.raises(ServerLost, match="server is shutting down") as told:
            future.result(SOON)
        assert told.value.task == "/job:ps/task:0"


def test_leaving_twice_is_leaving_once(job):
    """A resent farewell changes nothing; an ended session cannot go on. Leaving with an error is no clean end: the
    chief can tell it from the others, and nobody else is ended by it."""
    session, failed, other = (job.open(task).session for task in (A, B, C))
    job.verbs[0].leave(failed, "ValueError: a bug")
    for why in ("", "", "too late to fail"):
        job.verbs[0].leave(session, why)
        assert states(job) == {session: "left", failed: "failed", other: "open"}
    with pytest.raises(Fenced, match="it left"):
        heartbeat(job, session)


def test_a_silent_session_is_lost(job):
    """Its lease ends; whoever heartbeats stays. A late goodbye counts: who was thought dead has done its part."""
    silent, loud = job.open(A).session, job.open(B).session
    job.servers.spend(12, loud, job.opened.session)
    assert states(job) == {silent: "lost", loud: "open"}
    with pytest.raises(Fenced, match="sent no heartbeat") as told:
        heartbeat(job, silent)
    assert told.value.task == str(A)
    job.verbs[0].leave(silent, "")
    assert states(job) == {silent: "left", loud: "open"}


def test_any_call_is_a_sign_of_life(job):
    """Not only heartbeats renew a lease."""
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
    with pytest.raises(Fenced, match="sent no heartbeat"):
        waiting.result(SOON)


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


def test_an_generation_fences_whom_it_leaves_out(job):
    """On every server, in every verb; its waiting push is told, its contribution counts."""
    out, stays = job.join(A, B)
    plan = job.approve(reduce_only(NUMBER, server=1), out)
    waiting = out.push(plan, [5], server=1)
    job.arrived(out, server=1)
    job.close([stays.member])
    for server, why in zip(job.verbs, ("held up a round", "new generation"), strict=True):
        with pytest.raises(Fenced, match=why):
            server.heartbeat(out.session, -1, b"")
    with pytest.raises(Fenced, match="new generation"):
        waiting.result(SOON)
    with pytest.raises(Fenced):
        out.push(plan, [5], server=1).result(SOON)
    reply = stays.push(plan, [2], server=1).result(SOON)
    assert reply.excluded == ()
    assert int(reply.payload.tensors([NUMBER])[0]) == 7


def test_processes_that_wait_for_each_other_are_found_out(job):
    """Two wait in one round for different plans, on different servers: the heartbeats tell, with both positions.

    Waiting in different rounds is no divergence.
    """
    one, two = job.join(A, B)
    heartbeat(job, one.session, 3, b"x")
    heartbeat(job, two.session, 4, b"y")  # one may be ahead of what another has last said
    heartbeat(job, one.session)
    here = job.approve(reduce_only(NUMBER, server=0, target="'loss'"), one)
    there = job.approve(reduce_only(NUMBER, server=1, target="'accuracy'"), one)
    waiting = one.push(here, [1])
    job.arrived(one)
    heartbeat(job, one.session, 0, here.id)
    with pytest.raises(Diverged, match=r"round 0.*worker/task:0.*'loss'.*worker/task:1.*'accuracy'"):
        heartbeat(job, two.session, 0, there.id)
    with pytest.raises(Diverged, match=r"'loss'.*'accuracy'"):
        waiting.result(SOON)
    with pytest.raises(Diverged, match=r"'loss'.*'accuracy'"):
        heartbeat(job, one.session)
    assert set(states(job).values()) == {"failed"}


def test_a_divergence_is_told_to_everyone(job):
    """Whoever finds it says so when it leaves; the others' sessions end with the same words, also where they leave and
    have not heard of it: they did not do their part. Leaving with an error is taken as it is."""
    one, two, three = job.join(A, B, C)
    job.verbs[0].leave(one.session, "Diverged: operand 0 differs")
    for call in (
        partial(heartbeat, job, two.session),
        *[partial(job.verbs[0].leave, two.session, "")] * 2,
        partial(heartbeat, job, three.session),
    ):
        with pytest.raises(Diverged, match=r"^operand 0 differs$"):
            call()
    job.verbs[0].leave(two.session, "an error of its own")
    assert set(states(job).values()) == {"failed"}
    heartbeat(job, job.opened.session)


def test_status_tells_who_is_missed(job):
    """An open round, what it does, whom it waits for, and whether it may run. Server 0 says how long the chief is
    silent; the others cannot know."""
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
    job.servers.clock.now += 4.0
    status = job.verbs[0].status()
    assert (status.waiting, status.round, status.server, status.incarnation) == ((), 0, 0, 100)
    assert (status.chief, job.verbs[1].status().chief) == (pytest.approx(4.0), float("inf"))


def test_status_without_a_job(serve):
    """A server that nobody has used has nothing to tell, and no error."""
    status = serve(1).verbs[0].status()
    assert (status.log, status.generation, status.round, status.variables) == (0, None, -1, 0)


def test_generations_travel_whole(job):
    """Members, entry and start come back as they were."""
    one, _ = job.join(A, Task("worker", 7), replicas=3)
    generation = Generation(2, job.generation.members, "dataset:0")
    job.append(GenerationClosed(generation))
    assert [server.status().generation for server in job.verbs] == [generation, generation]
    assert generation.session(one.session).replicas == 3


# ---- Workers that join: each gets an index of its own, which is free again when its process is gone ----

ONE, OTHER, THIRD = 11, 22, 33
"""Keys of processes."""


@pytest.fixture
def grown(job):
    """A job whose cluster has two workers, of which none is there yet."""
    return begin(job, ("a:0", "b:0"), "c:0")


def begin(job, workers, chief):
    """Begins a job of such a cluster."""
    job.opened = job.open(CHIEF, 0, True)
    job.token = job.opened.token
    lives = tuple(one.incarnation for one in job.servers.cores)
    entry = JobStarted(job.token, lives, workers=workers, chief=chief)
    for server in job.verbs:
        assert server.approve(job.token, 0, [entry]) == 1
    return job


def enlist(job, key, index=None):
    """A process asks for an index; returns the one that it gets."""
    place = job.verbs[0].enlist(None if index is None else Task("worker", index), key)
    assert place.task.job == "worker"
    return place.task.index


def test_each_gets_an_index_of_its_own(grown):
    """The first above the cluster's that is free, and that no process has that was started as that task by its
    TF_CONFIG; who asks again gets the same one."""
    assert [enlist(grown, key) for key in (ONE, OTHER, ONE, THIRD, OTHER)] == [2, 3, 2, 4, 3]
    assert enlist(grown, THIRD, 4) == 4
    grown.open(Task("worker", 5))
    assert enlist(grown, 44) == 6


def test_a_place_that_nobody_keeps_is_free_again(grown):
    """After a lease, and not before."""
    assert [enlist(grown, key) for key in (ONE, OTHER)] == [2, 3]
    grown.servers.spend(LEASE / 2, grown.opened.session)
    assert enlist(grown, OTHER) == 3
    grown.servers.spend(LEASE / 2, grown.opened.session)
    assert enlist(grown, THIRD) == 2, "its process has not asked for a lease"
    assert enlist(grown, ONE) == 4, "the other one has kept its own"


def test_a_session_keeps_the_place_of_its_task(grown):
    """As long as it is open: no word is needed beside its heartbeats; then the index is free."""
    enlist(grown, ONE)
    session = grown.open(WORKERS[2]).session
    assert grown.verbs[0].enlist(WORKERS[2], ONE) == Enlisted(WORKERS[2], True)
    grown.servers.spend(2 * LEASE, grown.opened.session, session)
    assert enlist(grown, OTHER) == 3
    with pytest.raises(TaskTaken, match="/job:worker/task:2 is already in this job"):
        enlist(grown, OTHER, 2)
    grown.servers.spend(2 * LEASE, grown.opened.session, grown.open(WORKERS[0]).session)
    assert enlist(grown, THIRD) == 2, "its lease has ended"


def test_a_certain_index(grown):
    """As a certificate names one: it is given if it is free, and above the cluster's."""
    assert enlist(grown, ONE, 7) == 7
    assert enlist(grown, OTHER) == 2
    with pytest.raises(TaskTaken, match=r"end that process first.*--extra-workers"):
        enlist(grown, OTHER, 7)
    with pytest.raises(ConfigError, match=r"task:1 is one of the 2 workers of the job's cluster.*without --join"):
        enlist(grown, OTHER, 1)
    assert enlist(grown, OTHER, 3) == 3, "it gives up the one that it had"
    assert enlist(grown, THIRD) == 2


def test_another_job_knows_nobody(grown):
    """Its cluster may be another one: of one without workers the chief runs the script, and the first is worker 0."""
    enlist(grown, ONE)
    begin(grown, ("a:0", "b:0", "c:0"), "d:0")
    assert enlist(grown, OTHER) == 3
    with pytest.raises(ConfigError, match="one of the 3 workers"):
        enlist(grown, ONE, 2)
    assert enlist(begin(grown, (), "c:0"), ONE) == 0


def test_there_is_an_end_to_it(grown):
    """Whoever asks under many names fills no memory."""
    limit = grown.servers.cores[0].registry.limit
    assert [enlist(grown, key) for key in range(1, limit + 1)] == [*range(2, limit + 2)]
    with pytest.raises(ConfigError, match=f"{limit} workers are joining this job"):
        enlist(grown, limit + 1)
    assert enlist(grown, 1) == 2


def test_who_cannot_join(serve):
    """Each is told why."""
    servers = serve(2)
    with pytest.raises(InvalidRequest, match="the chief has not started a job"):
        servers.verbs[0].enlist(None, ONE)
    job = Job(servers)
    begin(job, ("a:0",), "")
    with pytest.raises(InvalidRequest, match="/job:ps/task:0 is not a worker"):
        job.verbs[0].enlist(Task("ps", 0), ONE)
    with pytest.raises(InvalidRequest, match="by a random number"):
        enlist(job, 0)
    with pytest.raises(InvalidRequest, match="does not keep the sessions"):
        job.verbs[1].enlist(None, ONE)
    job.append(Done())
    with pytest.raises(InvalidRequest, match="is over"):
        enlist(job, ONE)
