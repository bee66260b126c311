"""Workers whose data end in different steps, in a job that makes rounds in some steps only."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, add, say


def accumulate(every, lengths):
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(1), name="v")
    batches = strategy.experimental_distribute_datasets_from_function(lambda _: [np.ones(2)] * lengths[ME])
    held, steps = 0.0, []
    for _ in range(2):
        steps.append(0)
        for batch in batches:
            steps[-1] += 1
            held += batch.sum()
            if steps[-1] % every == 0:
                strategy.run(lambda held=held: add(v, np.full(1, held)))
                held = 0.0
        strategy.run(lambda held=held: add(v, np.full(1, held)))
        held = 0.0
    say("ended", [steps, float(v[0]), strategy.round])


@pytest.mark.parametrize(
    "every", [pytest.param(2, marks=pytest.mark.soak), 3, pytest.param(50, marks=pytest.mark.soak)]
)
def test_accumulating_workers_end_in_the_same_step(tmp_path, every):
    """Nobody hangs or diverges; what a worker held back counts, even if its batch in use has no examples."""
    with ProcessCluster(accumulate, tmp_path, (every, [2, 5]), workers=2, chief="driver", timeouts=QUICK) as job:
        job.finish()
    (first,), (second,) = job.said(W0, "ended"), job.said(W1, "ended")
    assert first == second
    assert first[:2] == [[5, 5], 28.0]
