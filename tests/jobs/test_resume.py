"""Checkpoints, and where variables lie, from end to end: a new cluster goes on where the old one was, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import say
from tests.kit.internals import ServerOptions

EPOCHS, BATCHES, SAVED = 3, 5, 7
"""Passes over the data, batches of each, and after how many steps the checkpoint is saved: in a pass."""


def learn(resume, style):
    strategy = ps.ParameterServerStrategy()
    rng = np.random.default_rng(8)
    x, y = rng.normal(size=(50, 6)), rng.normal(size=(50, 2))
    with strategy.scope():
        w = ps.Variable(rng.normal(size=(6, 4)), name="w")
        u = ps.Variable(rng.normal(size=(4, 2)), name="u")
        optimizer = ps.optimizers.SGD(0.05, 0.9)
        optimizer.build([w, u])
    checkpoint = ps.train.Checkpoint(w=w, u=u, optimizer=optimizer)
    if resume:
        say("restored", checkpoint.restore(resume).assert_consumed().restored)
        tests = strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(30)).batch(12))
        say("tested", [len([*tests]) for _ in range(2)])
    say("begins", [w.numpy(), int(optimizer.iterations)])

    def step(x, y):
        h = np.tanh(x @ w.read_value())
        error = (h @ u.read_value() - y) / 12
        optimizer.apply_gradients([(x.T @ ((error @ u.read_value().T) * (1 - h * h)), w), (h.T @ error, u)])

    batches = strategy.experimental_distribute_dataset(ps.ArrayDataset((np.arange(50), x, y)).shuffle(2).batch(12))
    for epoch in batches.epochs(3) if style == "epochs" else range(3):
        for rows, *batch in batches:
            say("took", [epoch, rows])
            strategy.run(step, args=batch)
            if int(optimizer.iterations) == 7 and not resume:
                say("saved", checkpoint.save("run/ckpt"))
    say("weights", [w.numpy(), u.numpy(), int(optimizer.iterations)])
    with strategy.scope():
        say("slots", [slot.numpy() for slot in optimizer.variables[1:]])


@pytest.mark.parametrize(("servers", "style"), [(1, "epochs"), pytest.param(3, "range", marks=pytest.mark.soak)])
def test_a_new_cluster_goes_on_bit_by_bit(tmp_path, servers, style):
    """With another number of servers: the same weights, slots and step count, and each row once in each pass. A test
    set, though the script makes it first, has all of its batches."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    with ProcessCluster(learn, tmp_path / "before", ("", "epochs"), ps=2, workers=2, chief="driver") as before:
        before.finish()
    root = tmp_path / "before" / "checkpoints"
    keys = {"ps": servers, "workers": 2, "server": ServerOptions(checkpoint_root=str(root))}
    with ProcessCluster(learn, tmp_path / "after", ("run", style), **keys) as job:
        job.finish()
    for task in (W0, W1):
        assert job.said(task, "restored") == [True]
        assert job.said(task, "tested") == [[3, 3]]
        assert job.said(task, "begins")[0][1] == SAVED
        for what in ("weights", "slots"):
            assert job.said(task, what) == before.said(W0, what)
    assert before.said(W0, "weights")[0][2] == EPOCHS * BATCHES
    taken = {}
    for task in (W0, W1):
        for epoch, rows in job.said(task, "took"):
            taken[epoch] = sorted(taken.get(epoch, []) + rows)
    assert taken.keys() == {1, 2}
    assert taken[2] == list(range(50))
    done = {row for task in (W0, W1) for epoch, rows in before.said(task, "took")[:SAVED] if epoch for row in rows}
    assert taken[1] == sorted(set(range(50)) - done)
