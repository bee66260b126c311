"""First values of variables in real processes: who gives them, who waits for whom, and who does not."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import PS0, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say


def begin(mode):
    """Worker 0 comes last; the others create `alone` before the first round, worker 0 after it.

    `large` is sent only where it is wanted.
    """
    strategy = ps.ParameterServerStrategy(consistency=ps.Async() if mode == "async" else ps.Sync())

    def create(name, size):
        with strategy.scope():
            return ps.Variable(np.full(size, 10.0 + ME), name=name)

    if ME == 0:
        gate("create")
    found = [create("small", 2), create("large", 1 << 18)]
    say("first", [v.numpy()[0] for v in found])
    if ME:
        say("alone", create("alone", 2).numpy()[0])
    strategy.run(lambda: add_all([(found[0], np.zeros(2))]))
    if ME == 0:
        gate("later")
        say("alone", create("alone", 2).numpy()[0])
    say("later", create("later", 2).numpy()[0])
    gate("end")


KEYS = {"ps": 2, "workers": 3, "gates": ["create", "later", "end"], "timeouts": QUICK}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_all_begin_with_those_of_the_lowest_task(tmp_path, mode):
    """Whoever comes first, however large. Later in the job nobody waits; nor for who does not create the variable."""
    with ProcessCluster(begin, tmp_path, (mode,), **KEYS) as job:
        for task in (W1, W2):
            job.hear_error(task, f"{task} waits for {W0} to give variable 'small' its first value")
        job.open("create")
        assert [job.hear(task, "first") for task in (W0, W1, W2)] == [[10, 10]] * 3
        assert [job.hear(task, "alone") for task in (W1, W2)] == [11] * 2
        first = job.hear(W1, "later")
        assert first in (11, 12)
        assert job.hear(W2, "later") == first
        job.open("later")
        assert (job.hear(W0, "alone"), job.hear(W0, "later")) == (11, first)
        job.open("end")
        job.finish()


def test_who_dies_gives_none(tmp_path):
    """The next one in task order gives its own, once the lease of the lowest is over."""
    with ProcessCluster(begin, tmp_path, ("sync",), **KEYS, chief="driver") as job:
        job.hear_error(W1, f"{W1} waits for {W0} to give variable 'small'")
        job.kill(W0)
        assert [job.hear(task, "first") for task in (W1, W2)] == [[11, 11]] * 2
        with job.server(PS0) as server:
            assert server.status().variables >= 3
        job.open("later")
        job.open("end")
        assert [job.exited(task) for task in (W1, W2)] == [0, 0]
