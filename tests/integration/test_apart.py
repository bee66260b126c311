"""Variables with a consistency of their own as real processes: updated as updates come, beside synchronous rounds."""

from __future__ import annotations

import numpy as np

import psclient as ps
from pstesting.processes import CALM, PS0, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say


def push_both(rounds, stop):
    """Each step adds to a synchronous and to an asynchronous variable; digits of a sum count pushes by worker."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(4), name="w")
        t = ps.Variable(np.zeros(4), name="t", consistency=ps.Async())
        u = ps.Variable(np.zeros(4), name="u", consistency=ps.Async())
    mine = np.full(4, 1000.0**ME)
    for number in range(rounds):
        if [ME, number] == stop:
            say("at", number)
            gate("go")
        strategy.run(lambda: add_all([(t, mine), (w, mine), (u, mine)]))
        say("sent", number)
        say("t", float(strategy.run(lambda: t.read_value()[0])))
        strategy.run(lambda: w.read_value())
    say("done", strategy.round)
    gate("end")
    say("sums", [v.numpy().tolist() for v in (w, t, u)])


def total(*pushes):
    return [sum(count * 1000.0**worker for worker, count in enumerate(pushes))] * 4


def test_a_step_does_not_wait_for_others_where_it_need_not(tmp_path):
    """While one worker stands before its step, the other's asynchronous part is applied, and its own to be read; the
    synchronous part waits for both."""
    keys = {"ps": 2, "workers": 2, "gates": ["go", "end"], "timeouts": CALM}
    with ProcessCluster(push_both, tmp_path, (6, [1, 3]), **keys) as job:
        job.hear(W1, "at", 3)
        assert job.hear(W0, "sent", 3) == 3
        assert job.hear(W0, "t") // 1 == 4.0 + 3 * 1000.0
        with job.server(PS0) as server:
            assert server.status().round == 2
        job.open("go")
        for task in (W0, W1):
            assert job.hear(task, "done") == 6
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sums") == [total(6, 6)] * 3
        job.finish()
