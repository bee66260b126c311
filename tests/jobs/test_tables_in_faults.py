"""Dynamic tables while workers die and calls are lost: each key counts as often as it came, and each gradient once."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.faults import Faults
from pstesting.processes import PS0, QUICK, SECONDS, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say

ROUNDS = 8


def learn(rounds, stops, rates, momentum):
    """Each worker adds a power of 100 to rows of keys that it has with others, one of them twice; some come ahead."""
    if rates:
        faults.use(Faults(3 + ME, rates))
    de = ps.dynamic_embedding
    strategy = ps.ParameterServerStrategy(devices=["cpu:0", "cpu:1"])
    with strategy.scope():
        table = de.get_variable("table", dim=2, value_dtype="float64", initializer=ps.initializers.Zeros())
        rare = de.get_variable("rare", dim=2, initializer=ps.initializers.Zeros(), admission=de.CounterFilter(6))
        dense = ps.Variable(np.zeros(3), name="dense")
        optimizer = ps.optimizers.SGD(1.0, momentum=momentum)
    while strategy.round < rounds:
        if [ME, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"{ME} at {strategy.round}")

        def step(round=strategy.round):
            table.look_ahead([round - 3, 1 << 62])
            slices = ps.IndexedSlices(np.full((3, 2), -(100.0**ME)), [-7, round - 3, -7])
            few = ps.IndexedSlices(np.ones((1, 2), "float32"), [round // 2])
            optimizer.apply_gradients([(np.full(3, -(100.0**ME)), dense), (slices, table), (few, rare)])

        strategy.run(step)
    keys, rows = table.export()
    order = np.argsort(keys)
    say("sums", [keys[order].tolist(), rows[order, 0].tolist(), dense.numpy(), int(optimizer.iterations)])
    say("rare", sorted(rare.keys().tolist()))


def trained(gradient, rounds, momentum):
    """What a row is after each worker's rounds, of two replicas each, if it is there from the first one on."""
    value, velocity = 0.0, 0.0
    for round in range(ROUNDS):
        given = sum(2 * 100.0**worker * gradient(round) for worker, own in enumerate(rounds) if round in own)
        velocity = momentum * velocity + given
        value = value + velocity
    return value


def check_sums(said, *rounds, momentum):
    keys, rows, dense, steps = said
    assert keys == sorted({-7, *range(-3, ROUNDS - 3)})
    expected = {key: trained(lambda round, key=key: float(round - 3 == key), rounds, momentum) for key in keys}
    expected[-7] = trained(lambda round: 2.0, rounds, momentum)
    assert rows == [expected[key] for key in keys]
    assert (dense[0], steps) == (trained(lambda _: 1.0, rounds, momentum), ROUNDS)


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.soak), 0.5])
def test_a_worker_that_is_killed_has_counted_exactly(tmp_path, momentum):
    """Its rounds count on both parts of the table, and no key of another; a filter counts what has counted."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["1 at 3"]}
    with ProcessCluster(learn, tmp_path, (ROUNDS, [[1, 3]], {}, momentum), **keys) as job:
        job.hear(W1, "at", 3)
        job.kill(W1)
        check_sums(job.hear(W0, "sums"), range(ROUNDS), range(3), momentum=momentum)
        # Key n comes in rounds 2n and 2n + 1, twice from each worker that is there: 8 times, then 6, then 4.
        assert job.hear(W0, "rare") == [0, 1]
        assert job.exited(W0) == 0


@pytest.mark.parametrize("momentum", [0.0, pytest.param(0.5, marks=pytest.mark.soak)])
def test_tables_are_exact_whatever_the_network_does(tmp_path, momentum):
    """Answers are lost and pushes repeated: every row has the exact sum, and every key came as often as it did."""
    rates = {"drop": 0.08, "repeat": 0.08, "twice": 0.05, "lose": 0.12, "late": 0.05, "cut": 0.03}
    with ProcessCluster(learn, tmp_path, (ROUNDS, [], rates, momentum), ps=2, workers=2) as job:
        for task in (W0, W1):
            check_sums(job.hear(task, "sums"), range(ROUNDS), range(ROUNDS), momentum=momentum)
            assert job.hear(task, "rare") == [0, 1, 2, 3]
        job.finish()
        assert job.exited(PS0) == 0


def churn(rounds, rates, lost):
    """Keys come and go in a table that is smaller than all of them; what is left is told in one word.

    With `lost` rounds, a checkpoint is saved in the middle, and restored after so many rounds more, which are undone.
    """
    import hashlib  # a program of its own is made of this function

    if rates:
        faults.use(Faults(5 + ME, rates))
    de = ps.dynamic_embedding
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        table = de.get_variable(
            "table", dim=2, capacity=16_384, admission=de.CounterFilter(2), eviction=de.LFU(decay=0.9)
        )
        optimizer = ps.optimizers.Adagrad(0.5)
    checkpoint = ps.train.Checkpoint(table=table, optimizer=optimizer)

    def train(numbers):
        for number in numbers:
            rng = np.random.default_rng([ME, number])
            strategy.run(step, ((rng.pareto(0.4, 3000) * 100).astype(np.int64) % 200_000,))

    def step(keys):
        rows = table.lookup(keys)
        optimizer.apply_gradients([(rows.gradient(np.sign(rows.values + rows.ids[:, None] % 7 - 3)), table)])

    def told():
        found = hashlib.sha256()
        for array in table.export():
            found.update(array.tobytes())
        return [table.size(), found.hexdigest()]

    train(range(rounds // 2))
    if lost:
        path = checkpoint.save("run/ckpt")
        saved = told()
        train(range(rounds, rounds + lost))
        undone = told()
        checkpoint.restore(path).assert_consumed()
        say("restored", [saved, undone, told()])
    train(range(rounds // 2, rounds))
    say("table", told())


@pytest.mark.parametrize(("rounds", "lost"), [(24, 3), pytest.param(10_000, 50, marks=pytest.mark.soak)])
def test_two_clusters_have_equal_tables(tmp_path, rounds, lost):
    """One whose calls are lost and repeated, and that goes back to a checkpoint in the middle, makes the rows that an
    undisturbed one makes, and evicts the same ones.
    """
    found = []
    rates = {"drop": 0.05, "repeat": 0.05, "twice": 0.05, "lose": 0.05}
    for name, faulty, undone in (("one", {}, 0), ("other", rates, lost)):
        (tmp_path / name).mkdir()
        with ProcessCluster(churn, tmp_path / name, (rounds, faulty, undone), ps=2, workers=2) as job:
            if undone:
                saved, later, restored = job.hear(W0, "restored", seconds=SECONDS + rounds)
                assert saved == restored != later
            found.append(job.hear(W0, "table", seconds=SECONDS + rounds))
            job.finish()
    assert found[0] == found[1]
    assert found[0][0] > 1000
