"""Workers that make local steps, as real processes: one that is killed, and comes back; and a server that is killed."""

from __future__ import annotations

import pytest

import psclient as ps
from pstesting.processes import CHIEF, PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say
from tests.kit.references import simulated

KEYS = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["go"]}


def exchange(end, stop):
    """Local steps until fragment 0 was exchanged so often; the first worker waits at a gate after `stop` exchanges."""
    from tests.kit.references import LocalWorker, sgd

    strategy = ps.ParameterServerStrategy()
    made = LocalWorker(strategy, ME, sgd, 4, 2, 1)
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


@pytest.mark.ci
def test_a_task_that_comes_back_begins_with_the_outer_parameters(tmp_path):
    """It waits for two exchanges of the others, adds nothing to the second, and then exchanges the same fragments."""
    end, stop = 19, 14  # it comes back after more than ten exchanges
    with ProcessCluster(exchange, tmp_path, (end, stop), **KEYS) as job:
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
        assert job.said(W0, "end") == job.said(W1, "end")
        counts = job.said(W0, "count")
        assert counts == [*range(1, end + 1)], "no exchange was lost or made twice"
        assert job.said(W1, "count")[-1] == end
        assert stop + 3 in job.said(W1, "count")
        assert "computed with old values" not in job.errors(W1)


def test_no_step_is_lost_with_a_server_that_has_copies(tmp_path):
    """Workers end with the bits of a job in which no server is lost."""
    end, stop = 8, 3
    with ProcessCluster(exchange, tmp_path, (end, stop), **KEYS, replication_factor=2) as job:
        job.hear(W0, "count", stop)
        job.kill(PS1)
        job.hear_error(CHIEF, f"goes on without {PS1}")
        job.open("go")
        ends = [job.hear(task, "end") for task in (W0, W1)]
        assert {job.exited(task) for task in (W0, W1, CHIEF, PS0)} == {0}
    _, outer = simulated(2, 4 * end + 1, 4, 2, 1)
    assert ends == [[p.tolist() for p in outer]] * 2
