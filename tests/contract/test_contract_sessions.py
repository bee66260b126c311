"""Open, Heartbeat, Leave, Enlist: who is there, how a session ends, and which index a worker gets that joins."""

import pytest

from tests.kit import internals as inside
from tests.kit.rig import CHIEF, HEARTBEAT, SOON, WORKERS, Job, core, create, eventually, reduce_only
from tests.kit.strategies import refused

NUMBER = inside.TensorSpec("int64", ())
A, B, C = WORKERS[:3]
LEASE = 12
"""Seconds after which a place that nobody keeps is free: more than a lease."""


def test_every_open_is_a_new_session(job):
    """Server 0 counts; the others take its number; each says who it is. Each chief's token is larger than all before;
    no other session has one. A worker and a chief of one task stand beside each other."""
    first, second = job.verbs[0].open(A, 2, 0, False), job.verbs[0].open(B, 1, 0, False)
    assert inside.count_of(second.session) == inside.count_of(first.session) + 1
    assert (first.server, first.incarnation, first.token, first.device) == (0, 100, 0, "cpu")
    other = job.verbs[1].open(A, 2, first.session, False)
    assert (other.session, other.server, other.incarnation) == (first.session, 1, 101)
    tokens = [job.open(task, 0, True).token for task in (CHIEF, CHIEF, A)]
    assert [job.token, *tokens] == sorted({job.token, *tokens})
    job.verbs[0].heartbeat(first.session, -1, b"")


def test_a_process_that_goes_away_is_noticed(serve):
    """By the call that it held, which ends with its connection: its task may be taken a heartbeat later, and not
    before."""
    servers = serve(1)
    verb, clock = servers.verbs[0], servers.clock
    session = verb.open(A, 1, 0, False).session
    held = verb.watch(session, 0, inside.UNTIL_ENDED)
    eventually(lambda: len(servers.cores[0].machine.watches.ends) == 1)
    if servers.remote:
        verb.close()  # type: ignore[attr-defined]
    else:
        held.cancel()
    core = servers.cores[0]
    eventually(lambda: core.machine.members._sessions[session].parted is not None)
    clock.now += HEARTBEAT - 0.1
    refused(inside.TaskTaken, "", lambda: core.open(A, 1, 0, False))
    clock.now += 0.2
    assert core.open(A, 1, 0, False).session > session


def test_a_new_first_server_is_no_obstacle(serve):
    """It knows nothing of the chiefs that others remember, and no clock says which life came later."""
    servers = serve(2)
    job = Job(servers)
    for _ in range(3):
        job.begin()
    fresh = core(0, 50, root=servers.root, clock=servers.clock)
    session = inside.Session(CHIEF, [fresh, servers.verbs[1]], 0, True, inside.Timeouts(heartbeat_interval=60.0))
    session.open()
    begun = inside.JobStarted(session.number, session.incarnations)
    for server in session.servers:
        assert server.approve(session.token, 0, [begun]) == 1
    session.leave()
    fresh.close()


def test_a_lost_server_is_told_to_everyone(job):
    """By the chief, in server 0's log: whoever is there learns it at once. Who comes for the next job is let in."""
    one, two = job.join(A, B)
    held = [job.verbs[0].watch(worker.session, 0, inside.UNTIL_ENDED) for worker in (one, two)]
    job.verbs[0].approve(job.token, job.verbs[0].status().log, [inside.Lost(1, "was lost; restart")])
    for future in held:
        with pytest.raises(inside.ServerLost, match="was lost; restart") as told:
            future.result(SOON)
        assert told.value.task == "/job:ps/task:1"
    refused(inside.ServerLost, "", lambda: job.verbs[0].heartbeat(one.session, -1, b""))
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
        lambda: verb.restore(77, "x", inside.Turn()).result(SOON),
    ):
        with pytest.raises(inside.Fenced, match="restart the process"):
            call()
    job.verbs[0].leave(77, "")


def test_an_generation_fences_whom_it_leaves_out(job):
    """On every server, in every verb; its waiting push is told, its contribution counts."""
    out, stays = job.join(A, B)
    plan = job.approve(reduce_only(NUMBER, server=1), out)
    waiting = out.push(plan, [5], server=1)
    job.arrived(out, server=1)
    job.close([stays.member])
    for server, why in zip(job.verbs, ("held up a round", "new generation"), strict=True):
        with pytest.raises(inside.Fenced, match=why):
            server.heartbeat(out.session, -1, b"")
    refused(inside.Fenced, "new generation", lambda: waiting.result(SOON))
    refused(inside.Fenced, "", lambda: out.push(plan, [5], server=1).result(SOON))
    reply = stays.push(plan, [2], server=1).result(SOON)
    assert reply.excluded == ()
    assert int(reply.payload.tensors([NUMBER])[0]) == 7


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
    entry = inside.JobStarted(job.token, lives, workers=workers, chief=chief)
    for server in job.verbs:
        assert server.approve(job.token, 0, [entry]) == 1
    return job


def enlist(job, key, index=None):
    """A process asks for an index; returns the one that it gets."""
    place = job.verbs[0].enlist(None if index is None else inside.Task("worker", index), key)
    assert place.task.job == "worker"
    return place.task.index


def test_each_gets_an_index_of_its_own(grown):
    """The first above the cluster's that is free, and that no process has that was started as that task by its
    TF_CONFIG; who asks again gets the same one."""
    assert [enlist(grown, key) for key in (ONE, OTHER, ONE, THIRD, OTHER)] == [2, 3, 2, 4, 3]
    assert enlist(grown, THIRD, 4) == 4
    grown.open(inside.Task("worker", 5))
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
    assert grown.verbs[0].enlist(WORKERS[2], ONE) == inside.Enlisted(WORKERS[2], True)
    grown.servers.spend(2 * LEASE, grown.opened.session, session)
    assert enlist(grown, OTHER) == 3
    refused(inside.TaskTaken, "/job:worker/task:2 is already in this job", lambda: enlist(grown, OTHER, 2))
    grown.servers.spend(2 * LEASE, grown.opened.session, grown.open(WORKERS[0]).session)
    assert enlist(grown, THIRD) == 2, "its lease has ended"


def test_a_certain_index(grown):
    """As a certificate names one: it is given if it is free, and above the cluster's."""
    assert enlist(grown, ONE, 7) == 7
    assert enlist(grown, OTHER) == 2
    refused(inside.TaskTaken, r"end that process first.*--extra-workers", lambda: enlist(grown, OTHER, 7))
    said = "task:1 is one of the 2 workers of the job's cluster.*without --join"
    refused(inside.ConfigError, said, lambda: enlist(grown, OTHER, 1))
    assert enlist(grown, OTHER, 3) == 3, "it gives up the one that it had"
    assert enlist(grown, THIRD) == 2


def test_another_job_knows_nobody(grown):
    """Its cluster may be another one: of one without workers the chief runs the script, and the first is worker 0."""
    enlist(grown, ONE)
    begin(grown, ("a:0", "b:0", "c:0"), "d:0")
    assert enlist(grown, OTHER) == 3
    refused(inside.ConfigError, "one of the 3 workers", lambda: enlist(grown, ONE, 2))
    assert enlist(begin(grown, (), "c:0"), ONE) == 0


def test_there_is_an_end_to_it(grown):
    """Whoever asks under many names fills no memory."""
    limit = grown.servers.cores[0].registry.limit
    assert [enlist(grown, key) for key in range(1, limit + 1)] == [*range(2, limit + 2)]
    refused(inside.ConfigError, f"{limit} workers are joining this job", lambda: enlist(grown, limit + 1))
    assert enlist(grown, 1) == 2


def test_who_cannot_join(serve):
    """Each is told why."""
    servers = serve(2)
    refused(inside.InvalidRequest, "the chief has not started a job", lambda: servers.verbs[0].enlist(None, ONE))
    job = Job(servers)
    begin(job, ("a:0",), "")
    with pytest.raises(inside.InvalidRequest, match="/job:ps/task:0 is not a worker"):
        job.verbs[0].enlist(inside.Task("ps", 0), ONE)
    refused(inside.InvalidRequest, "by a random number", lambda: enlist(job, 0))
    refused(inside.InvalidRequest, "does not keep the sessions", lambda: job.verbs[1].enlist(None, ONE))
    job.append(inside.Done())
    refused(inside.InvalidRequest, "is over", lambda: enlist(job, ONE))
