"""Propose, Watch, Approve: one log, written by the newest chief alone, read by whoever waits for it."""

from dataclasses import replace

import numpy as np
import pytest

from psserver.rounds.open_rounds import open_rounds
from tests.kit.internals import (
    Apply,
    Approved,
    Created,
    Diverged,
    Done,
    Fenced,
    Generation,
    GenerationClosed,
    Input,
    InvalidRequest,
    JobStarted,
    LocalityError,
    Node,
    Operand,
    PlacedVariable,
    Plan,
    Position,
    Program,
    ProgramError,
    Reduction,
    Ref,
    ServerLost,
    SnapshotOrder,
    Snapshotted,
    Start,
    Started,
    TensorSpec,
    VariableSpec,
)
from tests.kit.rig import CHIEF, SOON, WORKERS, adding, create, eventually, reduce_only, sum_into

A, B, C = WORKERS[:3]
NUMBER = TensorSpec("int64", ())
PAIR = TensorSpec("float64", (2,))


def log(job, server=0):
    """The whole log of a server; only server 0 has one to be watched."""
    return list(job.servers.cores[server].machine.job.log.entries)


# ---- Approve ----


def test_the_log_is_what_was_appended(job, worker):
    """Every kind of entry, in order, and back from the network as it went. With creations: all servers and chiefs know
    all variables, whoever holds them."""
    variable = job.variable(worker, np.zeros(2), (1,))
    plan = sum_into(variable)
    start = Start(2, 7, (Position(0, 1, 2), Position(1, 0, 5)))
    entries = [
        Approved(plan),
        GenerationClosed(Generation(2, (worker.member,), "plan:00ff")),
        Started(start),
        GenerationClosed(Generation(3, (worker.member,), "", Start(3, 8))),
        Snapshotted(plan.id, 7, "/tmp/x", "no space"),
    ]
    job.append(*entries)
    watched = job.verbs[0].watch(worker.session, 0, -1).result(SOON)
    assert watched.start == 0
    assert list(watched.entries) == [*log(job)[:2], Created(variable), *entries]
    assert log(job) == log(job, 1)
    assert variable == PlacedVariable(0, VariableSpec("v0", PAIR), (1,))
    assert [server.status().variables for server in job.verbs] == [1, 1]


def test_a_resent_append_changes_nothing(job, worker):
    """The index is its key: what is there already and equal counts as taken. An empty list tells how far the log goes.
    An append to another log is not taken: server 0's grows by itself, and the chief is told where to look again."""
    server, before = job.verbs[0], log(job)
    length = len(before)
    plans = [Approved(reduce_only(NUMBER, target=str(index))) for index in range(3)]
    for index, entries, whole in (
        (length, plans[:2], length + 2),
        (length, plans[:2], length + 2),
        (length + 1, plans[1:], length + 3),
        (0, before, length),
        (1, [], 1),
        (length + 9, [], length + 3),
    ):
        assert server.approve(job.token, index, entries) == whole
    assert log(job) == [*before, *plans]
    job.variable(worker, np.array(1))
    there = log(job)
    assert len(there) == length + 4
    assert server.approve(job.token, length + 3, [Approved(reduce_only(NUMBER))]) == length + 3
    assert server.approve(job.token, length + 8, [Approved(reduce_only(NUMBER))]) == length + 4
    assert log(job) == there


@pytest.mark.parametrize("server", [0, 1])
def test_an_older_chief_is_refused(job, worker, server):
    """Once there is a newer one that has spoken to a server, and never without a token."""
    newer = job.open(CHIEF, 0, True).token
    job.verbs[1].approve(newer, 0, log(job))
    plan = Approved(reduce_only(NUMBER))
    for token in (0, job.token):
        with pytest.raises(Fenced, match="newer chief"):
            job.verbs[server].approve(token, len(log(job)), [plan])
    assert plan not in log(job, server)
    assert job.verbs[server].approve(newer, len(log(job)), [plan]) == len(log(job, server))


def test_before_there_is_a_chief_no_token_counts(serve):
    """Neither that which a server begins with, nothing."""
    for server in serve(2).verbs:
        with pytest.raises(Fenced, match="newer chief"):
            server.approve(0, 0, [JobStarted(0, (100, 101))])
        assert server.status().log == 0


def test_a_new_job_drops_everything(job, worker):
    """Variables, plans and generations are gone; who was in the old one is told; who came for the new one goes on."""
    variable = job.variable(worker, np.array(1))
    plan = job.approve(reduce_only(NUMBER), worker)
    (absent,) = job.join(C)
    worker.generation = absent.generation
    other = job.open(B)
    waiting = [
        job.verbs[0].pull(worker.session, [variable.id], 5),
        job.verbs[0].watch(worker.session, len(log(job)), -1),
        worker.push(plan, [1]),
    ]
    news = job.verbs[0].watch(other.session, len(log(job)), -1)
    machine = job.servers.cores[0].machine
    old = machine.job
    eventually(lambda: old.reads.calls and len(machine.watches.news) == 2 and open_rounds(old.rounds))
    begin = job.begin()
    for future in waiting:
        with pytest.raises(ServerLost, match="job was restarted"):
            future.result(SOON)
    assert news.result(SOON).entries == (begin,)
    with pytest.raises(Fenced):
        job.verbs[0].heartbeat(worker.session, -1, b"")
    status = job.verbs[0].status()
    assert (status.log, status.variables, status.variable_bytes, status.generation, status.round) == (1, 0, 0, None, -1)
    job.verbs[0].heartbeat(other.session, -1, b"")
    assert create(job.verbs[0], other.session, 0, VariableSpec("new", PAIR)).count == 1


def test_the_same_job_is_not_begun_twice(job, worker):
    """A chief that copies the log begins nothing. A done job ends its servers when its chief has left: server 0 waits
    for that, so that the chief gets its answers."""
    job.variable(worker, np.array(1), (1,))
    for server in job.verbs:
        server.approve(job.token, 0, log(job))
    assert job.verbs[1].status().variable_bytes == 8
    job.append(Done())
    cores = job.servers.cores
    eventually(cores[1].done.done)
    assert not cores[0].done.done()
    job.verbs[0].leave(job.opened.session, "")
    assert cores[0].done.result(SOON) is None


# ---- Propose and verify ----


def test_a_proposal_waits_for_the_chief(job, worker):
    """Once, however often and by however many it is proposed; approved, it is no proposal any more."""
    plan = reduce_only(NUMBER)
    for _ in range(3):
        job.verbs[0].propose(worker.session, plan, "", None)
    seen = job.verbs[0].watch(job.opened.session, 0, 0).result(SOON)
    assert seen.plans == (plan,)
    assert not job.verbs[0].watch(worker.session, 0, -1).result(SOON).plans
    assert seen.plans[0].id == plan.id
    job.append(Approved(plan))
    job.verbs[0].propose(worker.session, plan, "", None)
    assert job.verbs[0].watch(job.opened.session, 0, -1).result(SOON).plans == ()


def bad_plans():
    """Plans that must be refused, each with the error and a word of it."""
    here, there = Reduction("sum", NUMBER, (0,)), Reduction("sum", NUMBER, (1,))
    add = adding(NUMBER)
    v, r = Ref("variable", 0), Ref("reduction", 0)

    def one(**changes):
        return replace(Plan((here,), (), (add,), (Apply(0, (0,), (v, r)),), (r,)), **changes)

    strange = replace(add, nodes=(Node("eval", (0, 1)),))
    twice = Program((Input("variable", NUMBER),), (Node("add", (0, 0)),), ((0, 1),), ())
    wide = Program((Input("variable", PAIR), Input("value", NUMBER)), (Node("add", (0, 1)),), ((0, 2),), ())
    skipped, gives = Apply(0, (0,), (v, r), optional=True), replace(add, outputs=(2,))
    unreduced = Plan(programs=(twice,), applies=(replace(skipped, args=(v,)),))
    return {
        "an unknown op": (one(programs=(strange,)), ProgramError, "unknown op 'eval'"),
        "too few arguments": (one(applies=(Apply(0, (0,), (v,)),)), ProgramError, "arguments"),
        "another shape": (one(programs=(wide,)), ProgramError, r"float64\[2\]"),
        "a value elsewhere": (one(reductions=(there,)), LocalityError, "but the update that uses it runs on server"),
        "no such variable": (one(applies=(Apply(0, (0,), (Ref("variable", 9), r)),)), InvalidRequest, "variable 9"),
        "no such program": (one(applies=(Apply(3, (0,), (v, r)),)), InvalidRequest, "does not contain"),
        "no such server": (one(reductions=(replace(here, servers=(5,)),)), InvalidRequest, "of a job with 2 servers"),
        "nowhere": (one(operands=(Operand(NUMBER, ()),)), InvalidRequest, "servers"),
        "a sum of truths": (Plan((Reduction("sum", TensorSpec("bool", ()), (0,)),)), InvalidRequest, "bool"),
        "a mean of counts": (Plan((Reduction("mean", NUMBER, (0,)),)), InvalidRequest, "not defined"),
        "a returned variable": (one(returned=(v,)), InvalidRequest, "neither reduced nor computed"),
        "a result to come": (one(applies=(Apply(0, (0,), (v, Ref("result", 0))),)), InvalidRequest, "result 0"),
        "a skipped update of no reduction": (unreduced, ProgramError, "can be skipped must take a reduction"),
        "a skipped update with results": (
            one(programs=(gives,), applies=(skipped,)),
            ProgramError,
            "cannot return results",
        ),
        "a checkpoint nowhere": (Plan(snapshot=SnapshotOrder("x", (0, 7))), InvalidRequest, "servers"),
    }


def test_a_plan_that_does_not_verify_is_refused(job, worker):
    """Its proposer is told; the chief never sees it."""
    job.variable(worker, np.array(0), (0,))
    for name, (plan, kind, words) in bad_plans().items():
        with pytest.raises(kind, match=words):
            job.verbs[0].propose(worker.session, plan, "", None)
        assert job.verbs[0].watch(job.opened.session, 0, -1).result(SOON).plans == (), name


def test_a_start_is_said_once(job, worker):
    """All older members say the same; who says otherwise has diverged."""
    job.append(GenerationClosed(Generation(2, (worker.member,), "dataset:0")))
    start = Start(2, 4, (Position(0, 0, 9),))
    for _ in range(2):
        job.verbs[0].propose(worker.session, None, "", start)
    assert log(job)[-1] == Started(start)
    assert log(job).count(Started(start)) == 1
    job.append(GenerationClosed(Generation(3, (worker.member,), "dataset:0")))
    job.verbs[0].propose(worker.session, None, "", Start(3, 5))
    assert log(job)[-1] == Started(Start(3, 5)), "another generation begins elsewhere"
    with pytest.raises(Diverged, match="generation 2 begins"):
        job.verbs[0].propose(worker.session, None, "", Start(2, 5))


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_an_generation_that_is_not_there_begins_nowhere(job, generation):
    """Neither one of before the job's first nor one that no chief has closed; who says so disturbs nobody."""
    session = job.open(B).session
    if generation != 1:
        session = job.join(A)[0].session
    before = log(job)
    with pytest.raises(InvalidRequest, match=f"generation {generation} is not known on this server"):
        job.verbs[0].propose(session, None, "", Start(generation, 4))
    assert log(job) == before
    job.verbs[0].heartbeat(session, -1, b"")


# ---- Watch ----


def watching(job, session, length, version=-1):
    """A watch that has come."""
    rows = job.servers.cores[0].machine.watches.news
    there = len(rows)
    future = job.verbs[0].watch(session, length, version)
    eventually(lambda: len(job.servers.cores[0].machine.watches.news) == there + 1)
    return future


def test_a_watch_waits_for_the_log(job, worker):
    """And gives what is new, from where the watcher stands, to each that watches; whoever goes away leaves the others
    their answer."""
    length = len(log(job))
    gone, *watches = [
        watching(job, session, length) for session in (worker.session, worker.session, job.opened.session)
    ]
    job.verbs[0].propose(worker.session, reduce_only(NUMBER), "", None)
    assert not any(each.done() for each in watches)
    gone.cancel()
    job.append(Approved(reduce_only(NUMBER)))
    for each in watches:
        watched = each.result(SOON)
        assert (watched.start, watched.entries) == (length, (Approved(reduce_only(NUMBER)),))


def test_a_long_log_arrives_whole(job, worker):
    """More than a message holds: in several answers, which the reader puts together."""
    plans = []
    for number in range(3):
        reductions = tuple(Reduction("sum", NUMBER, (0,), f"{number} {index} {'x' * 500}") for index in range(3000))
        plans.append(Plan(reductions))
    job.append(*map(Approved, plans))
    entries = []
    while len(entries) < job.verbs[0].status().log:
        watched = job.verbs[0].watch(worker.session, len(entries), 0).result(SOON)
        assert watched.start == len(entries)
        entries += watched.entries
    assert entries == log(job) == log(job, 1)
