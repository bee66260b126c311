"""Backup workers as real processes: rounds wait for no straggler, and each example counts once all the same."""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CALM, PS0, PS1, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say


def learn(rows, batch, passes, slow, backup):
    """Adds up the squares of a dataset's rows, on two variables. Worker 2 is slow with each batch that it has."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=backup))
    with strategy.scope():
        v = ps.Variable(np.zeros(()), name="v")
        u = ps.Variable(np.zeros(rows), name="u")
        steps = ps.Variable(0.0, name="steps")
    dataset = ps.ArrayDataset(np.arange(rows)).shuffle(3).batch(batch)
    data = strategy.experimental_distribute_dataset(dataset)
    left = 0
    for number in range(passes):
        began = time.monotonic()
        for mine in data:
            if len(mine):
                time.sleep(slow * (4 if ME == 2 else 1))
            visits = np.bincount(mine, minlength=rows).astype(float)
            strategy.run(lambda visits=visits, mine=mine: add_all([(v, float((mine**2).sum())), (u, visits), (steps, float(ME == 0))]))
            last = strategy.last_round
            left += strategy.task.index in [2] and bool(last and str(strategy.task) in last.left_out)
        say("pass", [number, strategy.round, time.monotonic() - began])
        say("sums", [float(v.numpy()), u.numpy().tolist()])
    say("left out", left)
