"""Workers die with updates of variables that each makes alone on their way, and come back: each counts once."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import PS0, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say


def push_both(rounds, stop, stays):
    """Adds to a variable of each kind on two servers; digits of a sum count contributions by worker.

    Worker 1 stands before one of its steps, and worker 0 before some of its, until the other one is back.
    """
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(4), name="w")
        t = ps.Variable(np.zeros(4), name="t", consistency=ps.Async())
        u = ps.Variable(np.zeros(4), name="u", consistency=ps.Async())
    mine = np.full(4, 1000.0**ME)
    say("came")
    while strategy.round < rounds:
        if ME == 1 and strategy.round == stop:
            say("at", strategy.round)
            gate("go")
        if ME == 0 and strategy.round in stays:
            gate(f"on{strategy.round}")
        strategy.run(lambda: add_all([(t, mine), (w, mine), (u, mine)]))
        say("sent")
        strategy.run(lambda: [t.read_value(), u.read_value()])
        say("own")
        w.numpy()
        say("made", list(strategy.last_round.contributors))
    say("done")
    gate("end")
    say("sums", [v.numpy().tolist() for v in (w, t, u)])


def sessions(server):
    """The sessions of worker 1 that are members as of now."""
    return {member.session for member in server.status().epoch.members if member.task == W1}


def comes_back(job, server, gate):
    """Kills worker 1, and starts it again; worker 0 stands until the chief has taken it in, and then goes on."""
    before = sessions(server)
    job.kill(W1)
    job.open("go")
    job.start(W1)
    job.until(lambda: sessions(server) - before)
    job.open(gate)


def check(job, lives):
    """What of worker 1 was answered counts, and of each of its lives at most one step more."""
    for task in (W0, W1):
        job.hear(task, "done")
    job.open("end")
    common, *own = job.hear(W0, "sums")
    rounds = job.said(W0, "made")
    assert common == [sum(1000.0 ** (task == str(W1)) for each in rounds for task in each)] * 4
    answered = len(job.said(W1, "own"))
    for value, *others in own:
        assert others == [value] * 3
        assert value % 1000 == len(job.said(W0, "own"))
        assert answered <= value // 1000 <= answered + lives


def test_who_dies_before_its_step_has_added_nothing_of_it(tmp_path):
    """Nobody waits for what it adds alone; in the rounds of all it is waited for until its lease ends. Started again,
    it is taken in where the others come to the same section, and adds on, by names of its own."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["go", "on12", "end"], "timeouts": QUICK}
    with ProcessCluster(push_both, tmp_path, (30, 4, [12]), **keys) as job, job.server(PS0) as server:
        job.hear(W1, "at", 4)
        for _ in range(5):
            job.hear(W0, "own")  # also that of the step before which the other one stands
        comes_back(job, server, "on12")
        check(job, 0)
        job.finish()


@pytest.mark.parametrize("after", ["sent", "own", pytest.param("made", marks=pytest.mark.soak)])
def test_who_dies_amid_its_step_counts_once_or_not_at_all(tmp_path, after):
    """On each server, whole; what was answered counts."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["go", "on20", "on40", "end"], "timeouts": QUICK}
    with ProcessCluster(push_both, tmp_path, (60, -1, [20, 40]), **keys) as job, job.server(PS0) as server:
        for gate_of in ("on20", "on40"):
            for _ in range(4):
                job.hear(W1, after)
            comes_back(job, server, gate_of)
        check(job, 2)
        job.finish()
