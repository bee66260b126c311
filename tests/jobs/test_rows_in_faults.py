"""Rows while workers die and calls are lost: each gradient counts once and whole, with ids that come twice."""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.faults import Faults
from pstesting.processes import PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say

SIZE, ROUNDS = 50, 8


def learn(rounds, stops, rates, momentum):
    """Each worker adds a power of 100 to rows of its own choice, one of them twice; ids of the next come ahead."""
    if rates:
        faults.use(Faults(3 + ME, rates))
    strategy = ps.ParameterServerStrategy(devices=["cpu:0", "cpu:1"])
    with strategy.scope():
        tables = [ps.Variable(np.zeros((50, 2)), name=f"table {n}") for n in range(2)]
        dense = ps.Variable(np.zeros(3), name="dense")
        optimizer = ps.optimizers.SGD(1.0, momentum=momentum)
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


def trained(gradient, rounds, momentum):
    """What a variable is after each worker's rounds, of two replicas each, by whole gradients."""
    value, velocity = 0.0, 0.0
    for round in range(ROUNDS):
        given = sum(2 * 100.0**worker * gradient(round) for worker, own in enumerate(rounds) if round in own)
        velocity = momentum * velocity + given
        value = value + velocity
    return value.tolist()


def rows_of(round):
    found = np.zeros(SIZE)
    np.add.at(found, [7, round % SIZE, 7], 1)
    return found


def check_sums(said, *rounds, momentum):
    tables, dense, steps = said
    assert tables == [trained(rows_of, rounds, momentum)] * 2
    assert (dense, steps) == (trained(lambda _: np.ones(3), rounds, momentum), ROUNDS)


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.soak), 0.5])
def test_a_worker_that_is_killed_has_counted_exactly(tmp_path, momentum):
    """Its rounds count on both servers, and no part of another; whoever is left goes on with rows as before.

    With momentum, rows that a round does not have are made up later.
    """
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["1 at 3"]}
    with ProcessCluster(learn, tmp_path, (ROUNDS, [[1, 3]], {}, momentum), **keys) as job:
        job.hear(W1, "at", 3)
        job.kill(W1)
        assert job.hear(W0, "wrong") == []
        check_sums(job.hear(W0, "sums"), range(ROUNDS), range(3), momentum=momentum)
        assert job.exited(W0) == 0


@pytest.mark.parametrize("momentum", [0.0, pytest.param(0.5, marks=pytest.mark.soak)])
def test_rows_are_exact_whatever_the_network_does(tmp_path, momentum):
    """Answers are lost and pushes repeated: every row has the exact sum, and lookups are those of the whole."""
    rates = {"drop": 0.08, "repeat": 0.08, "twice": 0.05, "lose": 0.12, "late": 0.05, "cut": 0.03}
    with ProcessCluster(learn, tmp_path, (ROUNDS, [], rates, momentum), ps=2, workers=2) as job:
        for task in (W0, W1):
            assert job.hear(task, "wrong") == []
            check_sums(job.hear(task, "sums"), range(ROUNDS), range(ROUNDS), momentum=momentum)
        job.finish()
        assert job.exited(PS0) == 0


# ---- A table in shards ----

LOSSES = {"drop": 0.05, "repeat": 0.08, "twice": 0.05, "lose": 0.1, "late": 0.05, "cut": 0.03}
EVERYWHERE = [7, 20, 40]
"""A row of each of the three shards, of which the second lies on the second server."""


def share(rounds, held, lags, rates):
    """Each worker adds a power of 100 to rows of all shards, each twice, and to one that differs by round.

    Of the round that is held, worker 1's push to one server waits for the test: the other server has all of it.
    """
    from concurrent.futures import ThreadPoolExecutor

    faults.use(Faults(3 + ME, rates))
    partitioner = ps.experimental.partitioners.FixedShardsPartitioner(3)
    strategy = ps.ParameterServerStrategy(devices=["cpu:0", "cpu:1"], variable_partitioner=partitioner)
    with strategy.scope():
        table = ps.Variable(np.zeros((50, 2)), name="table")
        optimizer = ps.optimizers.SGD(1.0)
    late, other, pool = strategy._servers[lags], strategy._servers[1 - lags], ThreadPoolExecutor(1)
    push = late.push

    def has(said):
        status = other.status()
        return status.round >= said.round or any(
            open.round == said.round and strategy.task not in open.missing for open in status.waiting
        )

    def hold(said, payload):
        while not has(said):
            time.sleep(0.01)
        say("holds", said.round)
        gate("push")
        return push(said, payload).result()

    late.push = lambda said, payload: (
        pool.submit(hold, said, payload) if (ME, said.round) == (1, held) else push(said, payload)
    )
    wrong = []
    while strategy.round < rounds:

        def step(round=strategy.round):
            table.look_ahead([7, 20, 40])
            gradient = ps.IndexedSlices(np.full((7, 2), -(100.0**ME)), [40, 7, 20, 7, 40, 20, 21 + round])
            optimizer.apply_gradients([(gradient, table)])

        before = strategy.round
        strategy.run(step)
        found = table.lookup([7, 20, 40]).numpy()
        if not ((found == found[0]).all() and (table[7:41][[0, 13, 33]] == found).all()):
            wrong.append([before, found])
        say("did", before)
    say("wrong", wrong)
    say("sums", table.numpy()[:, 0])


def check_shards(sums, *rounds):
    """Each worker has two replicas."""
    expected = np.zeros(SIZE)
    for worker, own in enumerate(rounds):
        expected[EVERYWHERE] += 4 * 100.0**worker * len(own)
        expected[[21 + round for round in own]] += 2 * 100.0**worker
    assert sums == expected.tolist()


@pytest.mark.parametrize("lags", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_shards_are_exact_where_a_worker_dies_in_its_push(tmp_path, lags):
    """One server has its rows, the other has not, and calls are lost: its round counts on neither, those before do."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["push"]}
    with ProcessCluster(share, tmp_path, (ROUNDS, 3, lags, LOSSES), **keys) as job:
        assert job.hear(W1, "holds") == 3
        job.kill(W1)
        assert job.hear(W0, "wrong") == []
        check_shards(job.hear(W0, "sums"), range(ROUNDS), range(3))
        assert [job.exited(task) for task in (W0, PS0, PS1)] == [0, 0, 0]


@pytest.mark.parametrize("lags", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_shards_are_exact_whatever_the_network_does(tmp_path, lags):
    """Answers are lost, pushes repeated, and one comes late to one server: rows of all shards have the exact sums."""
    with ProcessCluster(share, tmp_path, (ROUNDS, 3, lags, LOSSES), ps=2, workers=2, gates=["push"]) as job:
        job.hear(W1, "holds")
        job.open("push")
        for task in (W0, W1):
            assert job.hear(task, "wrong") == []
            check_shards(job.hear(task, "sums"), range(ROUNDS), range(ROUNDS))
        job.finish()
        assert job.exited(PS0) == 0
