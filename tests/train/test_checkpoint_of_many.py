"""Several processes save and restore one checkpoint: whose state it has, and that all of them go the same way."""

from __future__ import annotations

import json

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.processes import PS0, QUICK, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, gate, say


class Mine:
    """A state that every process has another one of."""

    def state_dict(self):
        return {"task": ME}

    def load_state_dict(self, state):
        say("loaded", state)


def saved(number=1.0):
    """A variable on each of two servers, and a checkpoint in which both are `number`."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        a, b = (ps.Variable(np.full(3, number), name=name) for name in "ab")
    assert a.devices != b.devices
    checkpoint = ps.train.Checkpoint(a=a, b=b)
    checkpoint.save("run/ckpt")
    checkpoint.sync()
    return a, b, checkpoint


def save(gates):
    """Each worker saves once; those that are named wait before."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(2), name="v")
    checkpoint = ps.train.Checkpoint(v=v, mine=Mine())
    strategy.run(lambda: v.read_value())
    v.assign(np.ones(2))
    if ME in gates:
        say("waits")
        gate("go")
    say("saves")
    say("saved", checkpoint.save("run/ckpt"))
    checkpoint.sync()
    say("complete", (DIRECTORY / "checkpoints/run/ckpt-1/manifest.json").exists())
    checkpoint.restore("run")


def state_in(directory):
    return json.loads((directory / "checkpoints/run/ckpt-1/manifest.json").read_text())["state"]


def test_the_state_is_that_of_the_process_that_saves(tmp_path):
    """Of the first, however late it comes; all restore it."""
    with ProcessCluster(save, tmp_path, ([0],), helpers=[Mine], workers=2, gates=["go"]) as job:
        job.hear(W0, "waits")
        job.hear(W1, "saves")
        job.open("go")
        job.finish()
    assert state_in(tmp_path) == {"mine": {"task": 0}}
    for task in (W0, W1):
        assert job.said(task, "complete") == [True]
        assert job.said(task, "loaded") == [{"task": 0}]


@pytest.mark.soak
def test_another_takes_its_place_if_it_dies(tmp_path):
    """The first dies before it comes to the save: nobody waits for ever, and the checkpoint has the other's state."""
    with ProcessCluster(
        save, tmp_path, ([0],), helpers=[Mine], workers=2, gates=["go"], timeouts=QUICK, chief="driver"
    ) as job:
        job.hear(W0, "waits")
        job.hear(W1, "saves")
        job.kill(W0)
        assert job.hear(W1, "complete") is True
        assert job.hear(W1, "loaded") == {"task": 1}
    assert state_in(tmp_path) == {"mine": {"task": 1}}


def save_often():
    """Saves as often as it may, and says how often it was refused."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(100_000), name="v")
    checkpoint = ps.train.Checkpoint(v=v)
    refused = []
    for _ in range(12):
        v.assign_add(np.ones(1))
        try:
            checkpoint.save("run/ckpt", ps.train.CheckpointOptions(if_busy="refuse"))
            refused.append(False)
        except ps.errors.CheckpointError as error:
            refused.append("is still being written" in str(error) or str(error))
    say("refused", refused)
    say("count", int(checkpoint.save_counter))


def test_all_processes_are_refused_alike(tmp_path):
    """Whoever has heard of the end of the save before, and whoever has not."""
    with ProcessCluster(save_often, tmp_path, workers=2) as job:
        job.finish()
    (first,), (second,) = (job.said(task, "refused") for task in (W0, W1))
    assert first == second
    assert first[0] is False
    assert job.said(W0, "count") == job.said(W1, "count") == [first.count(False)]


def restores_one_by_one():
    """Worker 1 comes to the restore when the other has long been there."""
    a, b, checkpoint = saved()
    for v in (a, b):
        v.assign(np.zeros(3))
    if ME:
        say("waits")
        gate("go")
        say("before", [a.numpy(), b.numpy()])
    checkpoint.restore("run")
    say("after", [a.numpy(), b.numpy()])


def in_a_restore(server):
    """Whether somebody waits in the round that commits one."""
    return any("restore" in one.section for one in server.status().waiting)


def test_nobody_reads_what_is_restored_before_its_own_restore(tmp_path):
    """A restore is a place of the program at which all are."""
    keys = {"helpers": [saved], "ps": 2, "workers": 2, "gates": ["go"]}
    with ProcessCluster(restores_one_by_one, tmp_path, **keys) as job, job.server(PS0) as server:
        job.hear(W1, "waits")
        job.until(lambda: in_a_restore(server))
        job.open("go")
        job.finish()
    assert job.said(W1, "before") == [[[0.0] * 3] * 2]
    assert job.said(W0, "after") == job.said(W1, "after") == [[[1.0] * 3] * 2]


@pytest.mark.soak
def test_who_dies_before_a_restore_holds_nobody_up(tmp_path):
    """The others restore without it."""
    keys = {"helpers": [saved], "ps": 2, "workers": 2, "gates": ["go"], "timeouts": QUICK, "chief": "driver"}
    with ProcessCluster(restores_one_by_one, tmp_path, **keys) as job, job.server(PS0) as server:
        job.hear(W1, "waits")
        job.until(lambda: in_a_restore(server))
        job.kill(W1)
        assert job.hear(W0, "after") == [[1.0] * 3] * 2


def falls_back():
    """The newest checkpoint is broken on one of the servers: all are told, and take the one before it."""
    a, b, checkpoint = saved()
    for v in (a, b):
        v.assign(np.full(3, 2.0))
    checkpoint.save("run/ckpt")
    checkpoint.sync()
    (shard,) = (DIRECTORY / "checkpoints/run/ckpt-2").glob("shard-00001-*")
    if ME == 0:
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    for v in (a, b):
        v.assign(np.zeros(3))
    a.numpy()
    if ME:
        gate("go")
    try:
        checkpoint.restore("run/ckpt-2")
    except ps.errors.CheckpointError as error:
        say("told", str(error))
    say("between", [a.numpy(), b.numpy()])
    shard.unlink(missing_ok=True)
    checkpoint.restore("run/ckpt-1")
    a.assign_add(np.ones(3))
    checkpoint.restore("run/ckpt-1")
    say("after", [a.numpy(), b.numpy()])


def test_all_are_told_alike_and_may_take_an_older_one(tmp_path):
    """A part that one server cannot read changes nothing on the other; who comes later is told what the first was."""
    keys = {"helpers": [saved], "ps": 2, "workers": 2, "gates": ["go"]}
    with ProcessCluster(falls_back, tmp_path, **keys) as job, job.server(PS0) as server:
        job.hear(W0, "between")
        job.until(lambda: in_a_restore(server))
        job.open("go")
        job.finish()
    (first,), (second,) = (job.said(task, "told") for task in (W0, W1))
    assert first == second
    assert first.startswith("/job:ps/task:1: ")
    assert "run/ckpt-2/shard-00001" in first
    for task in (W0, W1):
        assert job.said(task, "between") == [[[0.0] * 3] * 2]
        assert job.said(task, "after") == [[[1.0] * 3] * 2]


def raises_between(late):
    """Worker 1 fails between finding a checkpoint and taking it over, catches that, and restores again; one is late."""
    a, _, checkpoint = saved()

    def choose(reply):
        if late == ME and not chosen:
            gate("go")
        if ME == 1 and not chosen:
            chosen.append(reply.path)
            raise RuntimeError("not now")
        return {"a": a}

    chosen = []
    for _ in range(1 + ME):
        try:
            checkpoint.strategy.backend.checkpoints.restore("run", choose, False)
        except (RuntimeError, ps.errors.Diverged) as error:
            say("told", str(error))


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_who_leaves_a_restore_and_begins_another_diverges(tmp_path, late):
    """All are told, whoever comes first, and nobody waits for the other."""
    keys = {"helpers": [saved], "ps": 2, "workers": 2, "gates": ["go"]}
    with ProcessCluster(raises_between, tmp_path, (late,), **keys) as job, job.server(PS0) as server:
        job.until(lambda: in_a_restore(server))
        job.open("go")
        assert job.hear(W1, "told") == "not now"
        for task in (W0, W1):
            assert "restore 'run" in job.hear(task, "told")


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


def test_who_comes_back_restores_with_all_from_then_on(tmp_path):
    """It comes while the others restore, and has no part in that; once it is taken in it goes back as they do."""
    makes(tmp_path, a=np.full(3, 7.0))
    keys = {"workers": 2, "gates": ["go", "never"], "timeouts": QUICK, "chief": "driver"}
    with ProcessCluster(rolls_back, tmp_path, **keys) as job, job.server(PS0) as server:
        job.hear(W1, "dies")
        job.until(lambda: in_a_restore(server))
        job.kill(W1)
        job.start(W1)
        job.hear(W0, "waits")
        assert job.hear(W1, "begins") is False
        job.until(lambda: len(server.status().epoch.members) == 2)
        job.open("go")
        job.finish()
    backs = [[step, True, [7.0] * 3] for step in (10, 20, 30)]
    assert job.said(W0, "back") == backs
    assert job.said(W1, "back") == backs[1:]


def makes(directory, **values):
    """Makes a checkpoint to go back to."""
    with (
        InProcessCluster(checkpoint_root=directory / "checkpoints") as cluster,
        ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy,
        strategy.scope(),
    ):
        made = {name: ps.Variable(value, name=name) for name, value in values.items()}
        ps.train.Checkpoint(**made).save("run/ckpt")


def saves_alone():
    """Its sections are saves, and nothing else."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        checkpoint = ps.train.Checkpoint(a=ps.Variable(np.zeros(3), name="a"))
    say("comes")
    for number in range(3 if ME else 8):
        if number == 4 and ME == 0:
            say("waits")
            gate("go")
        say("saved", checkpoint.save("run/ckpt"))
    if ME and strategy.round < 8:
        gate("never")


@pytest.mark.soak
def test_who_comes_back_to_a_save_is_taken_in_there(tmp_path):
    """It knows only then how many there were, and saves with all from the next one on."""
    keys = {"workers": 2, "gates": ["go", "never"], "timeouts": QUICK, "chief": "driver"}
    with ProcessCluster(saves_alone, tmp_path, **keys) as job, job.server(PS0) as server:
        for _ in range(3):
            job.hear(W1, "saved")
        job.kill(W1)
        job.hear(W0, "waits")
        job.start(W1)
        job.hear(W1, "comes")
        job.until(lambda: len(server.status().epoch.members) == 2)
        job.open("go")
        job.finish()
    paths = [f"run/ckpt-{number}" for number in range(1, 9)]
    assert job.said(W0, "saved") == paths
    assert job.said(W1, "saved")[3:] == paths[5:]


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


def test_who_comes_back_saves_when_the_others_do(tmp_path):
    """It does not know when they did last, and the servers do; so it is when they have restored."""
    keys = {"workers": 2, "gates": ["go", "never"], "timeouts": QUICK, "chief": "driver"}
    for first, begin, saves in ((0, 0, [1, 6, 11, 16, 21]), (1, 3, [8, 13, 18, 23])):
        directory = tmp_path / str(first)
        directory.mkdir()
        if first:
            makes(directory, a=np.zeros(3), steps=np.int64(begin))
        with ProcessCluster(saves_sometimes, directory, **keys) as job, job.server(PS0) as server:
            job.hear(W1, "dies")
            job.kill(W1)
            job.hear(W0, "waits")
            job.start(W1)
            job.hear(W1, "comes", 9)
            job.until(lambda: len(server.status().epoch.members) == 2)
            job.open("go")
            job.finish()
        assert job.said(W0, "saved") == saves
        assert job.said(W1, "saved")[-2:] == saves[-2:]
