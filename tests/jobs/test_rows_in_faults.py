"""Rows and dynamic tables while calls are lost: each gradient, and each key, counts once and whole."""

from __future__ import annotations

import time

import numpy as np

import psclient as ps
from pstesting import faults
from pstesting.faults import Faults
from pstesting.processes import PS0, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say

SIZE, ROUNDS, HELD = 50, 8, 3

LOSSES = {"drop": 0.08, "repeat": 0.08, "twice": 0.05, "lose": 0.12, "late": 0.05, "cut": 0.03}

EVERYWHERE = [7, 20, 40]
"""A row of each of three shards, of which the second lies on the second server."""


def learn(rounds, held, rates):
    """Each worker adds a power of 100 to rows of all kinds, some of them twice; ids of the next come ahead.

    Of the round that is held, worker 1's push to server 0 waits for the test: the other server has all of it.
    """
    from concurrent.futures import ThreadPoolExecutor

    faults.use(Faults(3 + ME, rates))
    de, zeros = ps.dynamic_embedding, ps.initializers.Zeros()
    strategy = ps.ParameterServerStrategy(
        devices=["cpu:0", "cpu:1"],
        variable_partitioner=lambda shape, dtype: [3 if shape == (50, 3) else 1, *(1,) * (len(shape) - 1)],
    )
    with strategy.scope():
        shards = ps.Variable(np.zeros((50, 3)), name="shards")
    with strategy.scope():
        tables = [ps.Variable(np.zeros((50, 2)), name=f"table {n}") for n in range(2)]
        dynamic = de.get_variable("dynamic", dim=2, value_dtype="float64", initializer=zeros)
        rare = de.get_variable("rare", dim=2, initializer=zeros, admission=de.CounterFilter(6))
        dense = ps.Variable(np.zeros(3), name="dense")
        optimizer = ps.optimizers.SGD(1.0)
    assert len(shards.variables) == 3
    (late, other), pool = strategy._servers, ThreadPoolExecutor(1)
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

    def step(round):
        def added(keys, width=2):
            return ps.IndexedSlices(np.full((len(keys), width), -(100.0**ME)), keys)

        for table in tables:
            table.prefetch([round % 50, 7])
        shards.prefetch([7, 20, 40])
        dynamic.prefetch([round - 3, 1 << 62])
        pairs = [(added([7, round % 50, 7]), table) for table in tables]
        pairs += [(added([40, 7, 20, 7, 40, 20, 21 + round], 3), shards), (added([-7, round - 3, -7]), dynamic)]
        pairs += [(np.full(3, -(100.0**ME)), dense), (ps.IndexedSlices(np.ones((1, 2), "float32"), [round // 2]), rare)]
        optimizer.apply_gradients(pairs)

    wrong = []
    while strategy.round < rounds:
        before = strategy.round
        strategy.run(step, (before,))
        found = [table.lookup([7, before % 50]).numpy() for table in tables]
        wholes = [table.numpy()[[7, before % 50]] for table in tables]
        same = shards.lookup([7, 20, 40]).numpy()
        if not (
            all((one == found[0]).all() for one in (*found, *wholes))
            and all((rows == same[0]).all() for rows in (same, shards[7:41][[0, 13, 33]]))
        ):
            wrong.append(before)
    say("wrong", wrong)
    keys, rows = dynamic.export()
    order = np.argsort(keys)
    columns = [table.numpy()[:, 0] for table in (*tables, shards)]
    say("sums", [*columns, keys[order].tolist(), rows[order, 0].tolist(), dense.numpy(), int(optimizer.iterations)])
    say("rare", sorted(rare.keys().tolist()))


def trained(gradient):
    """What a variable is after all rounds of both workers, of two replicas each, by whole gradients."""
    return (2 * (1 + 100.0) * sum(map(gradient, range(ROUNDS)))).tolist()


def check_sums(said):
    """What a worker says at the end is what the rounds make, row by row and key by key."""

    def rows_of(own, *ids):
        return trained(lambda round: np.bincount([*ids, own(round)], minlength=SIZE))

    *tables, shards, keys, rows, dense, steps = said
    assert tables == [rows_of(lambda round: round % SIZE, 7, 7)] * 2
    assert shards == rows_of(lambda round: 21 + round, *EVERYWHERE * 2)
    assert keys == [-7, *range(-3, ROUNDS - 3)]
    counts = [lambda _: np.array(2), *(lambda round, key=key: np.array(round - 3 == key) * 1 for key in keys[1:])]
    assert rows == [trained(count) for count in counts]
    assert (dense, steps) == (trained(lambda _: np.ones(3)), ROUNDS)


def test_rows_are_exact_whatever_the_network_does(tmp_path):
    """Answers are lost, pushes repeated, and one comes late to one server: every row has the exact sum.

    Lookups are those of the whole, and every key has come as often as it did.
    """
    args = (ROUNDS, HELD, LOSSES)
    with ProcessCluster(learn, tmp_path, args, ps=2, workers=2, gates=["push"]) as job:
        assert job.hear(W1, "holds") == HELD
        job.open("push")
        for task in (W0, W1):
            assert job.hear(task, "wrong") == []
            check_sums(job.hear(task, "sums"))
            assert job.hear(task, "rare") == [0, 1, 2, 3]
        job.finish()
        assert job.exited(PS0) == 0
