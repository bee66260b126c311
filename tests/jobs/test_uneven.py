"""Workers whose data end in different steps, in a job that makes rounds in some steps only."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.script import add
from tests.kit.workers import in_threads


@pytest.mark.parametrize(
    "every", [pytest.param(2, marks=pytest.mark.soak), 3, pytest.param(50, marks=pytest.mark.soak)]
)
def test_accumulating_workers_end_in_the_same_step(every):
    """Nobody hangs or diverges; what a worker held back counts, even if its batch in use has no examples."""

    def accumulate(strategy, worker):
        with strategy.scope():
            v = ps.Variable(np.zeros(1), name="v")
        mine = [np.ones(2)] * (2, 5)[worker]
        batches = strategy.experimental_distribute_datasets_from_function(lambda _: mine)
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
        return steps, float(v[0]), strategy.round

    first, second = in_threads(accumulate, servers=1)
    assert first == second
    assert first[:2] == ([5, 5], 28.0)
