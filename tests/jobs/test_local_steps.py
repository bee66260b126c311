"""Workers that make local steps, as real processes: one is killed, and its task comes back ten exchanges later."""

from __future__ import annotations

import numpy as np

import psclient as ps
from pstesting.processes import PS0, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say


def exchange(end, stop):
    """Local steps until fragment 0 was exchanged so often; the first worker waits at a gate after `stop` exchanges."""
    from tests.kit.local_steps import LocalWorker

    strategy = ps.ParameterServerStrategy()
    made = LocalWorker(strategy, ME, lambda: ps.optimizers.SGD(0.7, momentum=0.9, nesterov=True), 4, 2, 1)
    say("open")
    count = 0
    while count < end:
        made.step()
        if made.steps.step % 4 == 1 and made.steps.step > 1:  # fragment 0 is merged
            count = int(made.steps.fragments[0].rule.iterations)
            say("count", count)
            if count == stop and ME == 0:
                gate("go")
    say("end", [p.tolist() for p in made.outer()])


def test_a_task_that_comes_back_begins_with_the_outer_parameters(tmp_path):
    """It waits for the others' next exchange, adds nothing to that, and exchanges the same fragments from then on."""
    end, stop = 30, 14
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["go"]}
    with ProcessCluster(exchange, tmp_path, (end, stop), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "count", 3)
        job.kill(W1)
        job.hear(W0, "count", stop)
        job.start(W1)
        job.hear(W1, "open")
        with job.server(PS0) as server:
            job.until(lambda: any(s.member.task == W1 and s.join_point for s in server.status().sessions))
        job.open("go")
        job.finish()
        ends = [np.concatenate([np.ravel(p) for p in job.said(task, "end")[-1]]) for task in (W0, W1)]
        assert (ends[0] == ends[1]).all()
        counts = job.said(W0, "count")
        assert counts == [*range(1, end + 1)], "no exchange was lost or made twice"
        assert job.said(W1, "count")[-1] == end
        assert "computed with old values" not in job.errors(W1)
