"""Workers that come back to a job: each step that returned has counted, or it was said that not; values are of now."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add, gate, say

MILLION = 1_000_000
"""A replica of worker 1 adds this in a step; those of others add 1, so that the sum counts both."""

RUNS = 6
"""After how many steps of worker 1, those of both its lives, the programs end."""

GATES = ("0 at 2", "1 at 2", "0 at 4", "look")


def stop_at(n, found):
    """The places at which `come_back` holds a process after its n-th step; a later life is held at the beginning."""
    if ME == 2 or found:
        return
    if n in (2, 4):
        say("at", n)
        gate(f"{ME} at {n}")


def come_back(job):
    """Worker 1 dies after 2 steps; its next life reads after 4 of worker 0, and goes on when that has made 8."""
    job.hear(W1, "at", 2)
    job.kill(W1)
    job.open("0 at 2")
    job.hear(W0, "at", 4)
    job.start(W1)
    found = job.hear(W1, "open")
    assert found > 0
    job.open("0 at 4")
    job.hear(W0, "ran", 8)
    job.open("look")
    return found


def train(devices, million, enough):
    """Each step counts itself twice, in a variable of all and in copies of each replica's, and trains another by Adam.

    It knows what it saw, of variables and of R; copies of one more it makes itself. After the first step of all, what
    the copies hold together is saved; then worker 2 leaves.
    """
    strategy = ps.ParameterServerStrategy(devices)
    with strategy.scope():
        v = ps.Variable(np.zeros((), "int64"), name="v")
        w = ps.Variable(np.float32(8), name="w")
        adam = ps.optimizers.Adam(0.25)
        copies = {"synchronization": ps.VariableSynchronization.ON_READ, "aggregation": ps.VariableAggregation.SUM}
        steps = ps.Variable(np.zeros((), "int64"), name="steps", **copies)
    made, checkpoint = {}, ps.train.Checkpoint(v=v)
    found = int(v.numpy())
    say("open", found)
    if found:
        gate("look")

    def step():
        here = ps.get_replica_context()
        if here.local_replica_id not in made:
            made[here.local_replica_id] = ps.Variable(np.zeros((), "int64"), name="made", **copies)
        made[here.local_replica_id].assign_add(1)
        steps.assign_add(1)
        seen = [int(v.numpy()), here.num_replicas_in_sync]
        gradient = np.float32(w.numpy() * (1 + ME))
        adam.apply_gradients([(gradient, w)])
        add(v, np.int64(million if ME == 1 else 1))
        return gradient, *seen

    n = 0
    while int(v.numpy()) < enough and not (ME == 2 and n):
        stop_at(n, found)
        results = [np.asarray(strategy.experimental_local_results(each)) for each in strategy.run(step)]
        say("did", [strategy.round - 2, *results, v.numpy()])
        n += 1
        say("ran", n)
        if n == 1 and not found:
            checkpoint.save("run/ckpt")
    if ME != 2:
        say("sums", [v.numpy(), w.numpy(), steps.numpy(), strategy.extended.value_container(made[0]).numpy(), n])


def adam_of(gradients):
    """The value that Adam makes of sums of gradients, one after another."""
    w, adam = ps.Variable(np.float32(8)), ps.optimizers.Adam(0.25)
    for gradient in gradients:
        adam.apply_gradients([(gradient, w)])
    return float(w.numpy())


def test_each_run_that_returned_has_counted(tmp_path):
    """Also the first one of a worker that came back: once, computed with the values and the R of its round."""
    devices = ["cpu:0", "cpu:1"]
    keys = {"ps": 2, "workers": 3, "chief": "driver", "timeouts": QUICK, "gates": GATES}
    with ProcessCluster(train, tmp_path, (devices, MILLION, MILLION * RUNS * len(devices)), (stop_at,), **keys) as job:
        come_back(job)
        total, trained, steps, made, mine = job.hear(W1, "sums")
        assert job.hear(W0, "sums")[:4] == [total, trained, steps, made]
        job.finish()
        runs = {task: job.said(task, "did") for task in (W0, W1, W2)}
        assert len(runs[W1]) == 2 + mine == RUNS
        assert total == len(devices) * (len(runs[W0]) + len(runs[W2]) + MILLION * RUNS)
        assert steps == made == len(devices) * (len(runs[W0]) + mine)
        by_round = {}
        for task in runs:
            for round, gradients, seen, _, after in runs[task]:
                by_round.setdefault(round, []).append([gradients, set(seen), after])
        assert all(one[1:] == other[1:] for one, *others in by_round.values() for other in others)
        back = runs[W1][2]
        assert len(by_round[back[0]]) == 2
        assert set(back[3]) == {2 * len(devices)}
        sums = [sum(np.sum(np.float32(done[0])) for done in by_round[round]) for round in sorted(by_round)]
        assert trained == pytest.approx(adam_of(sums), rel=1e-6)


def look(million, enough):
    """Each step computes in a run, and makes its section outside of it."""
    import logging

    told = []
    logging.getLogger("psclient").addFilter(lambda record: told.append(record.getMessage()) or True)
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros((), "int64"), name="v")
    found = int(v.numpy())
    say("open", found)
    if found:
        gate("look")
    n = 0
    while int(v.numpy()) < enough:
        stop_at(n, found)
        value = strategy.run(lambda: v.numpy() * 0 + (million if ME == 1 else 1))
        with strategy.scope():
            total = strategy.extended.reduce_to("sum", value, v)
            strategy.extended.update(v, lambda v, total: v.assign_add(total), (total,))
            say(
                "did", [np.asarray(total), sum("was computed with old values and is excluded" in line for line in told)]
            )
        n += 1
        say("ran", n)
    say("sums", [v.numpy(), n])


def test_what_cannot_be_computed_again_is_told_before_the_look_returns(tmp_path):
    """A section outside of every run, which was computed before its worker took part, adds nothing, and says so."""
    keys = {"workers": 2, "chief": "driver", "timeouts": QUICK, "gates": GATES}
    with ProcessCluster(look, tmp_path, (MILLION, MILLION * RUNS), (stop_at,), **keys) as job:
        come_back(job)
        assert job.hear(W1, "did") == [1, 1]
        told = job.hear_error(W1, "was computed with old values and is excluded")
        assert "its gradient push for 'v'" in told
        assert "strategy.run" in told
        assert "dataset" in told
        total, mine = job.hear(W1, "sums")
        assert job.hear(W0, "sums")[0] == total
        job.finish()
        assert total == len(job.said(W0, "did")) + MILLION * (2 + mine - 1) == len(job.said(W0, "did")) + MILLION * RUNS
        assert job.errors(W1).count("was computed with old values and is excluded") == 1
        assert "was computed with old values and is excluded" not in job.errors(W0)
