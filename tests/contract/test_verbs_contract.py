"""The contract of all other verbs: sessions, variables, the log, checkpoints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rig import CHIEF, SOON, WORKERS, Job, checkpoint, eventually, reduce_only, serving, sum_into, together

from pswire.api import RestoreReply
from pswire.errors import (
    CheckpointError,
    Diverged,
    Fenced,
    InvalidRequest,
    LocalityError,
    MemoryLimit,
    NoCheckpoint,
    ProgramError,
    ServerLost,
    VariableMismatch,
)
from pswire.program import Node, Program
from pswire.spec import Apply, Approved, Done, JobStarted, Plan, Position, Reduction, Ref, Snapshotted, Start, VariableSpec
from pswire.tensor import TensorSpec

ROW = TensorSpec("float32", (3,))


# ---- Sessions ----


def test_a_task_that_opens_again_ends_its_session(job):
    """A fast restart: the session before is refused, with the reason."""
    (a,) = job.join(WORKERS[0])
    again = job.open(WORKERS[0])
    assert again.session > a.session
    assert again.begun
    with pytest.raises(Fenced, match="started again"):
        job.verbs[0].beat(a.session, -1, b"")
    job.verbs[0].beat(again.session, -1, b"")


def test_a_silent_session_is_lost(job):
    """After its lease, and not before; a sign of life renews it."""
    a, b = job.join(*WORKERS[:2])
    for _ in range(5):
        job.servers.clock.now += 2.1
        job.verbs[0].beat(a.session, -1, b"")
        job.servers.tick()
    with pytest.raises(Fenced, match="lease"):
        job.verbs[0].beat(b.session, -1, b"")
    states = job.verbs[0].watch(a.session, 0, 0).result(SOON).sessions
    assert {s.member.task: s.state for s in states} == {a.task: "open", b.task: "lost"}


def test_leaving_twice_is_leaving_once(job):
    """And what comes afterwards is refused."""
    (a,) = job.join(WORKERS[0])
    for _ in range(2):
        job.verbs[0].leave(a.session, "")
    with pytest.raises(Fenced, match="left"):
        job.verbs[0].beat(a.session, -1, b"")


def test_an_unknown_session_is_refused(job):
    """On every verb that needs one."""
    server = job.verbs[0]
    for call in (
        lambda: server.beat(999, -1, b""),
        lambda: server.create(999, 0, -1, VariableSpec("w", ROW), (), None),
        lambda: server.propose(999, None, "dataset:0", None),
        lambda: server.watch(999, 0, 0).result(SOON),
        lambda: server.pull(999, [], -1).result(SOON),
        lambda: server.restore(999, "x").result(SOON),
    ):
        with pytest.raises(Fenced):
            call()


def test_two_that_wait_for_each_other_are_found_out_by_their_beats(job):
    """Different plans in one round, on servers that never meet: everybody is told both."""
    a, b = job.join(*WORKERS[:2])
    one, other = reduce_only(ROW, target="'w1'"), reduce_only(ROW, server=1, target="'w2'")
    for plan in (one, other):
        job.approve(plan, a)
    waiting = a.push(one, [[1, 1, 1]])
    job.verbs[0].beat(a.session, 0, one.id)
    with pytest.raises(Diverged, match=r"(?s)'w1'.*'w2'"):
        job.verbs[0].beat(b.session, 0, other.id)
    with pytest.raises(Diverged, match=r"(?s)'w1'.*'w2'"):
        waiting.result(SOON)


def test_a_divergence_that_one_reports_ends_all(job):
    """A server that is not server 0 cannot tell the others; who was told does."""
    a, b = job.join(*WORKERS[:2])
    job.verbs[0].leave(a.session, "Diverged: at different sections")
    with pytest.raises(Diverged, match="at different sections"):
        job.verbs[0].beat(b.session, -1, b"")


# ---- Variables ----


def test_the_first_value_wins(job):
    """Created by two, with two values: both read the first one's."""
    a, b = job.join(*WORKERS[:2])
    v = job.variable(a, np.array([1, 2, 3], "float32"), name="w")
    again = job.verbs[0].create(b.session, 0, -1, v.spec, (), None)
    assert (again.id, again.servers, again.initialized) == (v.id, (0,), True)
    from pswire.tensor import Payload

    job.verbs[0].create(b.session, 0, v.id, v.spec, v.servers, Payload.pack([np.zeros(3, "float32")]))
    np.testing.assert_array_equal(job.value(b, v), [1, 2, 3])


def test_servers_take_turns_and_colocated_ones_do_not_advance_it(job):
    """Round-robin in creation order."""
    (a,) = job.join(WORKERS[0])
    server = job.verbs[0]
    placed = [
        server.create(a.session, i, -1, VariableSpec(f"v{i}", ROW), where, None).servers
        for i, where in enumerate([(), (), (1,), (0, 1), (), ()])
    ]
    assert placed == [(0,), (1,), (1,), (0, 1), (0,), (1,)]


@pytest.mark.parametrize(
    ("ordinal", "spec"),
    [(0, VariableSpec("w", TensorSpec("float32", (4,)))), (0, VariableSpec("u", ROW)), (1, VariableSpec("w", ROW))],
    ids=["another shape", "another name", "another order"],
)
def test_who_creates_something_else_is_told_both_sides(job, ordinal, spec):
    """The error names both tasks and both variables."""
    a, b = job.join(*WORKERS[:2])
    job.variable(a, np.zeros(3, "float32"), name="w")
    with pytest.raises(VariableMismatch, match=r"(?s)worker/task:1.*worker/task:0"):
        job.verbs[0].create(b.session, ordinal, -1, spec, (), None)


def test_a_server_out_of_memory_says_what_it_holds(tmp_path):
    """What does not fit is refused before a byte of it is sent; what is there stays."""
    for kind in ("core", "grpc"):
        with serving(kind, 1, tmp_path, memory_limit=100) as servers:
            job = Job(servers)
            (a,) = job.join(WORKERS[0])
            v = job.variable(a, np.zeros(20, "float32"))
            with pytest.raises(MemoryLimit, match=r"'big'.*80 bytes.*100 bytes.*--memory-limit") as caught:
                job.verbs[0].create(a.session, 1, -1, VariableSpec("big", TensorSpec("float32", (6,))), (), None)
            assert caught.value.task == "/job:ps/task:0"
            assert job.value(a, v).shape == (20,)


def test_a_variable_without_a_value_is_not_read(job):
    """Until its first value is there."""
    (a,) = job.join(WORKERS[0])
    job.verbs[0].create(a.session, 0, -1, VariableSpec("w", ROW), (), None)
    with pytest.raises(InvalidRequest, match="no value"):
        job.verbs[0].pull(a.session, [0], -1).result(SOON)


# ---- The log ----


def test_approving_again_changes_nothing(job):
    """A resend is told the same; entries that stand in their place are kept."""
    (a,) = job.join(WORKERS[0])
    server, plan = job.verbs[0], reduce_only(ROW)
    length = server.status().log
    for _ in range(2):
        assert server.approve(job.token, length, [Approved(plan)]) == length + 1
    assert server.approve(job.token, length, [Approved(reduce_only(ROW, "mean"))]) == length
    assert server.approve(job.token, length + 5, [Done()]) == length + 1
    assert server.status().log == length + 1
    assert a.session


def test_an_older_chief_is_refused_on_every_server(job):
    """Once a newer one has spoken."""
    newer = job.open(CHIEF, 0, True)
    assert newer.token > job.token
    log = job.verbs[0].watch(newer.session, 0, 0).result(SOON).entries
    for server in job.verbs:
        server.approve(newer.token, 0, log)
    for server in job.verbs:
        with pytest.raises(Fenced, match="newer chief"):
            server.approve(job.token, len(log), [Done()])
        with pytest.raises(Fenced, match="newer chief"):
            server.snapshot(job.token, b"x" * 32, "").result(SOON)
    with pytest.raises(Fenced):
        job.verbs[0].approve(0, len(log), [Done()])


def test_a_watch_waits_for_news(job):
    """Of the log alone, or of everything that a chief may have to act on."""
    (a,) = job.join(WORKERS[0])
    server = job.verbs[0]
    now = server.watch(a.session, 0, 0).result(SOON)
    length = now.start + len(now.entries)
    entries, news = server.watch(a.session, length, -1), server.watch(a.session, length, now.version)
    assert not entries.done()
    assert not news.done()
    plan = reduce_only(ROW)
    server.propose(a.session, plan, "", None)
    assert news.result(SOON).plans == (plan,)
    assert not entries.done()
    job.append(Approved(plan))
    assert entries.result(SOON).entries == (Approved(plan),)
    assert server.watch(a.session, 0, 0).result(SOON).plans == ()


def test_where_new_members_begin_is_said_once(job):
    """Those who say the same are heard; another word is a divergence."""
    a, b = job.join(*WORKERS[:2])
    start = Start(1, 5, (Position(0, 1, 2),))
    for worker in (a, b):
        job.verbs[0].propose(worker.session, None, "", start)
    with pytest.raises(Diverged):
        job.verbs[0].propose(b.session, None, "", Start(1, 6))


def test_a_plan_that_cannot_run_is_refused_to_its_proposer(job):
    """Values that would cross servers, unknown ops, wrong shapes, servers and variables that are not there."""
    (a,) = job.join(WORKERS[0])
    v, u = job.variable(a, np.zeros(3, "float32")), job.variable(a, np.zeros(3, "float32"), servers=(1,))
    good = sum_into(v)
    crossing = Apply(0, (0,), (Ref("variable", v.id), Ref("reduction", 0)))
    program = good.programs[0]
    bad = {
        LocalityError: Plan((Reduction("sum", ROW, (1,)),), (), (program,), (crossing,)),
        ProgramError: Plan(good.reductions, (), (Program(program.inputs, (Node("eval", (0,)),), (), ()),), (crossing,)),
        InvalidRequest: Plan((Reduction("sum", ROW, (7,)),)),
    }
    for error, plan in bad.items():
        with pytest.raises(error):
            job.verbs[0].propose(a.session, plan, "", None)
    assert u.servers == (1,)
    assert job.verbs[0].watch(a.session, 0, 0).result(SOON).plans == ()


def test_a_new_job_drops_all_that_was_there(job):
    """Who still waits in the old one is told; who came for the new one goes on."""
    a, b = job.join(*WORKERS[:2])
    v = job.variable(a, np.int64(0))
    plan = job.approve(sum_into(v), a)
    waiting = a.push(plan, [1])
    newcomer, chief = job.open(WORKERS[2]), job.open(CHIEF, 0, True)
    news = job.verbs[0].watch(newcomer.session, job.verbs[0].status().log, -1)
    begin = JobStarted(chief.token, tuple(core.incarnation for core in job.servers.cores))
    for server in job.verbs:
        assert server.approve(chief.token, 0, [begin]) == 1
    with pytest.raises(ServerLost, match="anew"):
        waiting.result(SOON)
    assert news.result(SOON).entries == (begin,)
    assert job.verbs[0].status().variables == 0
    with pytest.raises(Fenced):
        job.verbs[0].beat(b.session, -1, b"")


def test_servers_end_when_all_is_done(job):
    """The others with the log's last entry, server 0 when the chief has left."""
    (a,) = job.join(WORKERS[0])
    job.verbs[0].leave(a.session, "")
    job.append(Done())
    eventually(lambda: job.servers.cores[1].done.done())
    assert not job.servers.cores[0].done.done()
    job.verbs[0].leave(job.opened.session, "")
    eventually(lambda: job.servers.cores[0].done.done())


# ---- Checkpoints ----


def save(job, worker, path="run/ckpt-1"):
    plan = job.approve(checkpoint(path, (0, 1)), worker)
    together(*[worker.push(plan, server=s, positions=(Position(0, 1, 2),)) for s in (0, 1)])
    worker.round += 1
    shards = [server.snapshot(job.token, plan.id, "").result(SOON) for server in job.verbs]
    manifest = {
        "format": 1,
        "round": shards[0].round,
        "positions": [vars(p) for p in shards[0].positions],
        "tensors": {name: {"file": shard.file} for shard in shards for name, _ in shard.tensors},
    }
    job.verbs[0].snapshot(job.token, plan.id, json.dumps(manifest)).result(SOON)
    job.append(Snapshotted(plan.id, shards[0].round, path))
    return plan, shards


def test_a_checkpoint_holds_one_round_and_comes_back(job):
    """Over both servers; later updates do not reach it; variables that are created later get their value."""
    (a,) = job.join(WORKERS[0])
    v, u = job.variable(a, np.int64(1)), job.variable(a, np.int64(2), servers=(1,))
    _, shards = save(job, a)
    assert [[name for name, _ in shard.tensors] for shard in shards] == [["v0"], ["v1"]]
    plan = job.approve(sum_into(v, u), a)
    together(*[a.push(plan, [10, 10], server=s) for s in (0, 1)])
    found = [server.restore(a.session, "run").result(SOON) for server in job.verbs]
    assert found == [RestoreReply("run/ckpt-1", (Position(0, 1, 2),))] * 2
    assert (job.value(a, v), job.value(a, u)) == (1, 2)
    assert [server.restore(a.session, "run").result(SOON) for server in job.verbs] == found


def test_without_a_manifest_there_is_no_checkpoint(job):
    """And none outside of the root, whatever the path says."""
    (a,) = job.join(WORKERS[0])
    job.variable(a, np.int64(1))
    save(job, a)
    root = job.servers.root
    (root / "out").symlink_to("/tmp")
    for path in ("../run", "/etc", "out/x", "", "a\0b"):
        with pytest.raises(CheckpointError):
            job.verbs[0].restore(a.session, path).result(SOON)
    (root / "run/ckpt-1/manifest.json").unlink()
    with pytest.raises(NoCheckpoint):
        job.verbs[0].restore(a.session, "run").result(SOON)


def test_a_broken_checkpoint_names_its_file(job):
    """A shard that is gone, and one that is cut; the variables keep what they had."""
    (a,) = job.join(WORKERS[0])
    v = job.variable(a, np.arange(3.0))
    _, shards = save(job, a)
    file = job.servers.root / "run/ckpt-1" / shards[0].file
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=shards[0].file):
        job.verbs[0].restore(a.session, "run").result(SOON)
    file.unlink()
    with pytest.raises(CheckpointError, match=shards[0].file):
        job.verbs[0].restore(a.session, "run").result(SOON)
    np.testing.assert_array_equal(job.value(a, v), np.arange(3.0))


def test_a_snapshot_waits_for_its_round(job):
    """The chief may ask before the workers have come to it."""
    (a,) = job.join(WORKERS[0])
    job.variable(a, np.int64(1))
    plan = job.approve(checkpoint("run/c", (0, 1)), a)
    waiting = job.verbs[0].snapshot(job.token, plan.id, "")
    assert not waiting.done()
    a.push(plan).result(SOON)
    assert waiting.result(SOON).round == 0
