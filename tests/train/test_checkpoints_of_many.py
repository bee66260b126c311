"""Several processes save and restore one checkpoint: whose state it has, and that all of them go the same way."""

from __future__ import annotations

import json

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.processes import PS0, QUICK, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, gate, say


def made_by(directory, servers=1, saves=1, **values):
    """Makes checkpoints in `run`, in which each value is that given, and one more in each that follows."""
    with (
        InProcessCluster(servers, checkpoint_root=directory / "checkpoints") as cluster,
        ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy,
        strategy.scope(),
    ):
        made = {name: ps.Variable(value, name=name) for name, value in values.items()}
        manager = ps.train.CheckpointManager(ps.train.Checkpoint(**made), "run", 9)
        for _ in range(saves):
            manager.save()
            for v in made.values():
                v.assign_add(np.ones_like(v.numpy()))


def in_a_restore(server):
    """Whether somebody waits in the round that commits one."""
    return any("restore" in one.section for one in server.status().waiting)


class Mine:
    """A state that every process has another one of."""

    def state_dict(self):
        return {"task": ME}

    def load_state_dict(self, state):
        say("loaded", state)


def refusal(call):
    """What a call is refused with."""
    try:
        call()
    except (ps.errors.CheckpointError, ps.errors.Diverged, RuntimeError) as error:
        return str(error)


def saves_and_restores():
    """Does so in several ways; worker 0 comes late to the first save, worker 1 to two restores."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        a, b, large = (ps.Variable(np.full(size, 1.0), name=name) for name, size in (("a", 3), ("b", 3), ("c", 10**5)))
        count = ps.Variable(0, name="count", synchronization="on_read", aggregation="sum")
    assert a.devices != b.devices
    checkpoint = ps.train.Checkpoint(a=a, b=b, large=large, count=count, mine=Mine())

    def assign(value, n):
        for v in (a, b):
            v.assign(np.full(3, value))
        strategy.run(lambda: count.assign(n))

    def values():
        return [v.numpy().tolist() for v in (a, b)]

    assign(1.0, 7 * ME)
    say("impossible", refusal(lambda: checkpoint.save("/abs/ckpt")))
    if ME == 0:
        say("waits")
        gate("save")
    say("saves")
    checkpoint.save("run/ckpt")
    checkpoint.sync()
    say("complete", (DIRECTORY / "checkpoints/run/ckpt-1/manifest.json").exists())
    assign(0.0, 0)
    if ME == 1:
        say("waits")
        gate("restore")
        say("before", values())
    checkpoint.restore("run")
    say("after", values())
    (mine,) = strategy.experimental_local_results(count)
    say("counts", [int(mine.numpy()), int(count)])
    # The newest is broken on one of the servers: all are told, and take the one before it.
    assign(2.0, 0)
    checkpoint.save("run/ckpt")
    checkpoint.sync()
    (shard,) = (DIRECTORY / "checkpoints/run/ckpt-2").glob("shard-00001-*")
    if ME == 0:
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assign(0.0, 0)
    a.numpy()
    if ME:
        gate("older")
    say("broken", refusal(lambda: checkpoint.restore("run/ckpt-2")))
    say("between", values())
    shard.unlink(missing_ok=True)
    checkpoint.restore("run/ckpt-1")
    a.assign_add(np.ones(3))
    checkpoint.restore("run/ckpt-1")
    say("older", values())
    # Saves as often as it may.
    refused, busy = [], ps.train.CheckpointOptions(if_busy="refuse")
    for _ in range(12):
        large.assign_add(np.ones(1))
        told = refusal(lambda: checkpoint.save("often/ckpt", busy))
        refused.append("is still being written" in told if told else False)
    say("refused", refused)
    say("count", int(checkpoint.save_counter))
    # Takes a part of what is there.
    ps.train.CheckpointManager(ps.train.Checkpoint(a=a), "often", 3).restore_or_initialize()
    for _ in range(2):
        strategy.run(lambda: a.read_value())
        a.assign_add(np.ones(3))


KEYS = {"helpers": [Mine, refusal], "ps": 2, "workers": 2, "gates": ["save", "restore", "older"]}


def test_all_go_the_same_way(tmp_path):
    """Whoever comes late, to a save or to a restore; a restore is a place of the program at which all are."""
    with ProcessCluster(saves_and_restores, tmp_path, **KEYS) as job, job.server(PS0) as server:
        job.hear(W0, "waits")
        job.hear(W1, "saves")
        job.open("save")
        job.hear(W1, "waits")
        job.until(lambda: in_a_restore(server))
        job.open("restore")
        job.hear(W0, "between")
        job.until(lambda: in_a_restore(server))
        job.open("older")
        job.finish()

    def said(name):
        ((first,), (second,)) = (job.said(task, name) for task in (W0, W1))
        return first, second

    assert said("impossible")[0] == said("impossible")[1]
    assert "'/abs/ckpt-1'" in said("impossible")[0]
    manifest = json.loads((tmp_path / "checkpoints/run/ckpt-1/manifest.json").read_text())
    assert manifest["state"] == {"mine": {"task": 0}}, "of the first, however late it comes"
    assert said("complete") == (True, True)
    for task in (W0, W1):
        assert job.said(task, "loaded") == [{"task": 0}] * 3
    assert job.said(W1, "before") == [[[0.0] * 3] * 2], "nobody reads what is restored before its own restore"
    assert said("after") == ([[1.0] * 3] * 2,) * 2
    assert said("counts") == ([4, 7], [3, 7]), "the process with replica 0 has what the division leaves over"
    first, second = said("broken")
    assert first == second
    assert first.startswith("/job:ps/task:1: ")
    assert "run/ckpt-2/shard-00001" in first
    assert said("between") == ([[0.0] * 3] * 2,) * 2, "a part that one server cannot read changes nothing on another"
    assert said("older") == ([[1.0] * 3] * 2,) * 2
    first, second = said("refused")
    assert first == second
    assert first[0] is False
    assert said("count") == (1 + first.count(False),) * 2
    differ = [job.errors(task).count("and this program differ") for task in (W0, W1)]
    assert differ == [1, 0], "what a restore did not find one process says"


# ---- Who comes back ----

BACK = {"workers": 2, "gates": ["go", "never"], "timeouts": QUICK, "chief": "driver"}


def rolls_back():
    """Goes back to the checkpoint in every tenth step; the steps themselves are no part of it."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        a, steps = ps.Variable(np.zeros(3), name="a"), ps.Variable(np.int64(0), name="steps")
    checkpoint = ps.train.Checkpoint(a=a)
    first = checkpoint.restore("run").restored
    say("begins", first)
    while (step := int(steps)) < 40:
        if step == 10 and ME == 1 and first:
            say("dies")
            gate("never")
        if step == 12 and ME == 0:
            say("waits")
            gate("go")
        if step and step % 10 == 0:
            say("back", [step, checkpoint.restore("run").restored, a.numpy()])
        a.assign_add(np.ones(3))
        steps.assign_add(1)


def goes_on_with_both(job, server):
    """Worker 1 is taken in while worker 0 waits."""
    job.until(lambda: len(server.status().generation.members) == 2)
    job.open("go")
    job.finish()


def test_who_comes_back_restores_with_all_from_then_on(tmp_path):
    """It comes while the others restore, and has no part in that; once it is taken in it goes back as they do."""
    made_by(tmp_path, a=np.full(3, 7.0))
    with ProcessCluster(rolls_back, tmp_path, **BACK) as job, job.server(PS0) as server:
        job.hear(W1, "dies")
        job.until(lambda: in_a_restore(server))
        job.kill(W1)
        job.start(W1)
        job.hear(W0, "waits")
        assert job.hear(W1, "begins") is False
        goes_on_with_both(job, server)
    backs = [[step, True, [7.0] * 3] for step in (10, 20, 30)]
    assert job.said(W0, "back") == backs
    assert job.said(W1, "back") == backs[1:]


def saves_sometimes():
    """A checkpoint in every fifth step, as often as the manager finds that due."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        a, steps = ps.Variable(np.zeros(3), name="a"), ps.Variable(np.int64(0), name="steps")
    checkpoint = ps.train.Checkpoint(a=a, steps=steps)
    manager = ps.train.CheckpointManager(checkpoint, "run", 3, step_counter=steps, checkpoint_interval=5)
    manager.restore_or_initialize()
    say("comes", int(steps))
    while (step := int(steps)) < 24:
        if step == 8 and ME == 1:
            say("dies")
            gate("never")
        if step == 9 and ME == 0:
            say("waits")
            gate("go")
        a.assign_add(np.ones(3))
        steps.assign_add(1)
        if manager.save():
            say("saved", int(steps))


@pytest.mark.parametrize(
    ("begin", "saves"), [(None, [1, 6, 11, 16, 21]), (3, [8, 13, 18, 23])], ids=["anew", "restored"]
)
def test_who_comes_back_saves_when_the_others_do(tmp_path, begin, saves):
    """It does not know when they did last, and the servers do; so it is when they have restored."""
    if begin:
        made_by(tmp_path, a=np.zeros(3), steps=np.int64(begin))
    with ProcessCluster(saves_sometimes, tmp_path, **BACK) as job, job.server(PS0) as server:
        job.hear(W1, "dies")
        job.kill(W1)
        job.hear(W0, "waits")
        job.start(W1)
        job.hear(W1, "comes", 9)
        goes_on_with_both(job, server)
    assert job.said(W0, "saved") == saves
    assert job.said(W1, "saved")[-2:] == saves[-2:]
