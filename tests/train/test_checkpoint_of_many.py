"""Several processes save one checkpoint: whose state it has, and that all of them go the same way."""

from __future__ import annotations

import json

import numpy as np
from inside import DIRECTORY, ME, gate, say
from jobs import QUICK, W0, W1, Job

import psclient as ps


class Mine:
    """A state that every process has another one of."""

    def state_dict(self):
        return {"task": ME}

    def load_state_dict(self, state):
        say("loaded", state)


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
    with Job(save, tmp_path, ([0],), helpers=[Mine], workers=2, gates=["go"]) as job:
        job.hear(W0, "waits")
        job.hear(W1, "saves")
        job.open("go")
        job.finish()
    assert state_in(tmp_path) == {"mine": {"task": 0}}
    for task in (W0, W1):
        assert job.said(task, "complete") == [True]
        assert job.said(task, "loaded") == [{"task": 0}]


def test_another_takes_its_place_if_it_dies(tmp_path):
    """The first dies before it comes to the save: nobody waits for ever, and the checkpoint has the other's state."""
    with Job(save, tmp_path, ([0],), helpers=[Mine], workers=2, gates=["go"], timeouts=QUICK, chief="driver") as job:
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
    with Job(save_often, tmp_path, workers=2) as job:
        job.finish()
    (first,), (second,) = (job.said(task, "refused") for task in (W0, W1))
    assert first == second
    assert first[0] is False
    assert job.said(W0, "count") == job.said(W1, "count") == [first.count(False)]
