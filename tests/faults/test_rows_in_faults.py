"""Rows while workers die and calls are lost: each gradient counts once and whole, with ids that come twice."""

from __future__ import annotations

import numpy as np

import psclient as ps
from pstesting import faults
from pstesting.faults import Faults
from pstesting.processes import PS0, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say

SIZE, ROUNDS = 50, 8


def learn(rounds, stops, rates):
    """Each worker adds a power of 100 to rows of its own choice, one of them twice; ids of the next come ahead."""
    if rates:
        faults.use(Faults(3 + ME, rates))
    strategy = ps.ParameterServerStrategy(devices=["cpu:0", "cpu:1"])
    with strategy.scope():
        tables = [ps.Variable(np.zeros((50, 2)), name=f"table {n}") for n in range(2)]
        dense = ps.Variable(np.zeros(3), name="dense")
        optimizer = ps.optimizers.SGD(1.0)
    wrong = []
    while strategy.round < rounds:
        if [ME, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"{ME} at {strategy.round}")

        def step(round=strategy.round):
            pairs = [(np.full(3, -(100.0**ME)), dense)]
            for table in tables:
                table.look_ahead([round % 50, 7])
                rows = np.full((3, 2), -(100.0**ME))
                pairs.append((ps.IndexedSlices(rows, [7, round % 50, 7]), table))
            optimizer.apply_gradients(pairs)

        before = strategy.round
        strategy.run(step)
        found = [table.lookup([7, before % 50]).numpy() for table in tables]
        wholes = [table.numpy()[[7, before % 50]] for table in tables]
        if not all((one == other).all() and (one == found[0]).all() for one, other in zip(found, wholes, strict=True)):
            wrong.append(before)
        say("did", strategy.round - 1)
    say("wrong", wrong)
    say("sums", [[table.numpy()[:, 0] for table in tables], dense.numpy(), int(optimizer.iterations)])


def table_of(*rounds):
    """What a table is after each worker's rounds, of two replicas each."""
    found = np.zeros(SIZE)
    for worker, own in enumerate(rounds):
        for round in own:
            np.add.at(found, [7, round % SIZE, 7], 2 * 100.0**worker)
    return found.tolist()


def test_a_worker_that_is_killed_has_counted_exactly(tmp_path):
    """Its rounds count on both servers, and no part of another; whoever is left goes on with rows as before."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["1 at 3"]}
    with ProcessCluster(learn, tmp_path, (ROUNDS, [[1, 3]], {}), **keys) as job:
        job.hear(W1, "at", 3)
        job.kill(W1)
        assert job.hear(W0, "wrong") == []
        tables, dense, steps = job.hear(W0, "sums")
        assert tables == [table_of(range(ROUNDS), range(3))] * 2
        assert (dense, steps) == ([2.0 * (ROUNDS + 3 * 100)] * 3, ROUNDS)
        assert job.exited(W0) == 0


def test_rows_are_exact_whatever_the_network_does(tmp_path):
    """Answers are lost and pushes repeated: every row has the exact sum, and lookups are those of the whole."""
    rates = {"drop": 0.08, "repeat": 0.08, "twice": 0.05, "lose": 0.12, "late": 0.05, "cut": 0.03}
    with ProcessCluster(learn, tmp_path, (ROUNDS, [], rates), ps=2, workers=2) as job:
        for task in (W0, W1):
            assert job.hear(task, "wrong") == []
            tables, dense, steps = job.hear(task, "sums")
            assert tables == [table_of(range(ROUNDS), range(ROUNDS))] * 2
            assert (dense, steps) == ([2.0 * ROUNDS * 101] * 3, ROUNDS)
        job.finish()
        assert job.exited(PS0) == 0
