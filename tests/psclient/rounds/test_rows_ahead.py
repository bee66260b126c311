"""Rows that come with the round before: the calls that this saves, and the values, which are those of a read."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

import psclient as ps
from psclient._src.rounds import read_cache
from pstesting.in_process import InProcessCluster

SIZE, DIM = 40, 3


@pytest.fixture
def cluster():
    """Two servers, and one worker."""
    with InProcessCluster(2) as found:
        yield found


class Calls:
    """Counts pushes and pulls of all servers; first values are none."""

    def __init__(self, cluster):
        self.counted = Counter()
        for core in cluster.cores:
            core.stimuli.record = self._count

    def _count(self, stimulus):
        if not (stimulus.name == "push" and stimulus.args[0].first_values):
            self.counted[stimulus.name] += 1

    def since(self):
        """How many pushes and pulls there were since the last look."""
        return self.counted.pop("push", 0), self.counted.pop("pull", 0)


def opened(cluster, worker=0, **more):
    return ps.ParameterServerStrategy(devices=["cpu:0"], cluster_resolver=cluster.resolver(worker), **more)


def table(strategy, name="table"):
    with strategy.scope():
        return ps.Variable(np.arange(SIZE * DIM, dtype="float32").reshape(SIZE, DIM), name=name)


def batches(count, seed=0):
    return list(np.random.default_rng(seed).integers(0, SIZE, (count, 6)))


def step_on(v, optimizer, ids):
    """One step on some rows, of integers; returns what was looked up."""
    rows = v.lookup(ids)
    found = np.array(rows.values[rows.inverse])
    d = np.zeros_like(rows.values)
    np.add.at(d, np.asarray(rows.inverse), np.ones((len(ids), DIM), "float32"))
    optimizer.apply_gradients([(rows.gradient(d), v)])
    return found


def descended(count, ids, start=None):
    """The table after steps in NumPy."""
    found = np.arange(SIZE * DIM, dtype="float32").reshape(SIZE, DIM) if start is None else start
    np.subtract.at(found, ids, np.float32(count))
    return found


def test_a_step_is_one_push(cluster):
    """With the ids of the next batch named there is no pull but the first; the values are those of the whole."""
    calls = Calls(cluster)
    with opened(cluster) as strategy:
        v, optimizer, truth = table(strategy), ps.optimizers.SGD(1.0), descended(0, [0])
        optimizer.build([v])
        every = batches(6)

        def step(ids, ahead):
            v.look_ahead(ahead)
            return step_on(v, optimizer, ids)

        for number, (ids, ahead) in enumerate(pairwise(every)):
            found = strategy.run(step, (ids, ahead))
            np.testing.assert_array_equal(found, truth[ids])
            descended(1, ids, truth)
            if number == 1:
                v.lookup(ahead)  # waits for the round
                calls.since()
        v.lookup(every[-1])  # waits for the last round
        assert calls.since() == (3, 0)
        np.testing.assert_array_equal(v.lookup(every[-1]).numpy(), truth[every[-1]])
        assert calls.since() == (0, 0)
        np.testing.assert_array_equal(v.numpy(), truth)
        assert calls.since() == (0, 1)


def test_rows_that_were_not_named_are_pulled(cluster):
    """Some of them or all; the answer is of the same round."""
    calls = Calls(cluster)
    with opened(cluster) as strategy:
        v, optimizer = table(strategy), ps.optimizers.SGD(1.0)
        strategy.run(lambda: (v.look_ahead([3, 5, 9]), step_on(v, optimizer, [3, 3, 4]))[1])
        truth = descended(1, [3, 3, 4])
        v.lookup([3])
        calls.since()
        for ids, pulls in (([5, 3], 0), ([], 0), ([9, 9, 3, 5], 0), ([3, 4], 1), ([39], 1), ([0], 1)):
            np.testing.assert_array_equal(v.lookup(ids).numpy(), truth[np.array(ids, int)])
            assert calls.since() == (0, pulls), ids


def test_rows_of_a_variable_that_is_read_whole_are_here(cluster):
    """A lookup does not make the whole come back with each round; a read does, and then lookups cost nothing."""
    calls = Calls(cluster)
    with opened(cluster) as strategy:
        v, optimizer = table(strategy), ps.optimizers.SGD(1.0)
        v.numpy()
        strategy.run(lambda: step_on(v, optimizer, [1]))
        v.lookup([1])
        calls.since()
        for _ in range(2):
            strategy.run(lambda: step_on(v, optimizer, [1]))
        assert v.lookup([1]).numpy()[0, 0] == DIM - 3
        assert calls.since() == (2, 2)


def test_an_update_from_elsewhere_makes_rows_stale(cluster):
    """An assignment between steps is seen, with the rows that it brings; evaluation in between reads the same."""
    with opened(cluster) as strategy:
        v, optimizer = table(strategy), ps.optimizers.SGD(1.0)
        strategy.run(lambda: (v.look_ahead([1, 2]), step_on(v, optimizer, [1]))[1])
        v.assign(np.full((SIZE, DIM), 7, "float32"))
        assert v.lookup([1, 2]).numpy().tolist() == [[7.0] * DIM] * 2
        assert set(v.numpy().ravel().tolist()) == {7.0}
        strategy.run(lambda: step_on(v, optimizer, [2]))
        assert v.lookup([1, 2]).numpy()[:, 0].tolist() == [7.0, 6.0]


def test_many_rows_are_pulled_in_several_calls(cluster, monkeypatch):
    """What one call may ask for is bounded."""
    monkeypatch.setattr(read_cache, "ROWS_AT_A_TIME", 7)
    calls = Calls(cluster)
    with opened(cluster) as strategy:
        v = table(strategy)
        v.lookup([0])
        calls.since()
        ids = np.random.default_rng(0).permutation(SIZE)
        np.testing.assert_array_equal(v.lookup(ids).numpy(), descended(0, [0])[ids])
        assert calls.since() == (0, -(-SIZE // 7))


def test_more_rows_than_a_round_may_ask_for_are_pulled(cluster, monkeypatch):
    """Of all variables of a server together, since their ids are in one header; the step goes on."""
    monkeypatch.setattr(read_cache, "ROWS_AT_A_TIME", 7)
    calls = Calls(cluster)
    with opened(cluster) as strategy:
        v = table(strategy)
        with strategy.scope(), strategy.extended.colocate_vars_with(v):
            u, w = table(strategy, "u"), table(strategy, "w")
        optimizer = ps.optimizers.SGD(1.0)

        def step():
            for each, count in ((v, 5), (u, 3), (w, 2)):
                each.look_ahead(range(count))
            one = ps.IndexedSlices(np.ones((1, DIM), "float32"), [1])
            optimizer.apply_gradients([(one, v), (one, u), (one, w)])

        strategy.run(step)
        found = {each.name: (each.lookup([1]), calls.since()[1])[1] for each in (w, v, u, w)}
        assert found == {"table": 0, "u": 1, "w": 0}
        assert [each.lookup([1]).numpy()[0, 0] for each in (v, u, w)] == [DIM - 1.0] * 3
        u.look_ahead([1])
        strategy.run(lambda: optimizer.apply_gradients([(ps.IndexedSlices(np.ones((1, DIM), "float32"), [1]), u)]))
        assert u.lookup([1]).numpy()[0, 0] == DIM - 2
        strategy.run(step)  # brings none of these: what was brought before is not given again
        assert u.lookup([1]).numpy()[0, 0] == DIM - 3


@pytest.mark.parametrize(("examples", "replicas"), [(24, 1), (22, 2), (3, 2), (0, 1)])
def test_a_dataset_names_the_rows_of_its_next_batch(cluster, examples, replicas):
    """Even or not: after the first batch of all there are no pulls, and each example counts once, twice over."""
    calls = Calls(cluster)
    devices = [f"cpu:{n}" for n in range(replicas)]
    ids = np.random.default_rng(1).integers(0, SIZE, (examples, 2))
    with ps.ParameterServerStrategy(devices=devices, cluster_resolver=cluster.resolver()) as strategy:
        v, optimizer, truth = table(strategy), ps.optimizers.SGD(1.0), descended(0, [0])
        optimizer.build([v])
        v.lookup([0])
        asked = []

        def name(batch):
            asked.append(len(batch))
            return batch

        options = ps.InputOptions(lookups={v: name})
        data = strategy.experimental_distribute_dataset(ps.ArrayDataset(ids).batch(6), options)
        calls.since()
        pulls = []
        for _ in range(2):
            for batch in data:
                strategy.run(lambda batch: step_on(v, optimizer, batch.ravel()) is None, (batch,))
                pulls.append(calls.since()[1])
            descended(1, ids.ravel(), truth)
        np.testing.assert_array_equal(v.numpy(), truth)
        steps = -(-examples // 6)
        assert len(pulls) == 2 * steps
        assert [n for n in pulls if n] == [n for at, n in enumerate(pulls) if at in (0, steps)]
        assert sum(asked) >= examples - 6


def test_two_workers_look_up_what_both_have_trained(cluster):
    """Rows are as after the round, with the contributions of all."""
    every = [batches(5, seed) for seed in range(2)]
    truth, expected = descended(0, [0]), []
    for ids in zip(*every, strict=True):
        expected.append(truth.copy())
        for each in ids:
            descended(1, each, truth)

    def train(index):
        with opened(both, index) as strategy:
            v, optimizer, found = table(strategy), ps.optimizers.SGD(1.0), []
            for ids, ahead in pairwise([*every[index], [0]]):
                found.append(strategy.run(lambda ids=ids, a=ahead: (v.look_ahead(a), step_on(v, optimizer, ids))[1]))
            return found, v.numpy()

    with InProcessCluster(2, 2) as both, ThreadPoolExecutor(2) as pool:
        for index, (found, value) in enumerate(pool.map(train, range(2))):
            np.testing.assert_array_equal(value, truth)
            for ids, rows, before in zip(every[index], found, expected, strict=True):
                np.testing.assert_array_equal(rows, before[ids])


def test_an_asynchronous_worker_sees_its_own_push(cluster):
    """The rows that its round has brought are those after it; of one step only."""
    with opened(cluster, consistency=ps.Async()) as strategy:
        v, optimizer, truth = table(strategy), ps.optimizers.SGD(1.0), descended(0, [0])
        for ids, ahead in pairwise(batches(5)):
            found = strategy.run(lambda ids=ids, a=ahead: (v.look_ahead(a), step_on(v, optimizer, ids))[1])
            np.testing.assert_array_equal(found, truth[ids])
            descended(1, ids, truth)
        np.testing.assert_array_equal(v.numpy(), truth)


@pytest.mark.parametrize(
    ("ids", "error", "why"),
    [
        ([0, SIZE], ValueError, "variable 'table'.*: id 40 at place 1 is no row of 40"),
        ([-1], ValueError, "variable 'table'.*: id -1 at place 0 is no row of 40"),
        ([0.5], TypeError, "variable 'table' are integers"),
    ],
)
def test_bad_ids_are_refused_where_they_are_named(cluster, ids, error, why):
    """And the rows that were named before still come."""
    calls = Calls(cluster)
    with opened(cluster) as strategy:
        v, optimizer = table(strategy), ps.optimizers.SGD(1.0)
        v.look_ahead([1, 2])
        with pytest.raises(error, match=why):
            v.look_ahead(ids)
        with pytest.raises(error, match=why):
            strategy.run(lambda: v.lookup(ids))
        strategy.run(lambda: step_on(v, optimizer, [1]))
        v.lookup([2])
        calls.since()
        assert v.lookup([1, 2]).numpy()[0, 0] == DIM - 1
        assert calls.since() == (0, 0)


def test_options_take_functions():
    """By variable."""
    with pytest.raises(TypeError, match="give a function of a batch for each variable"):
        ps.InputOptions(lookups={ps.Variable(np.zeros((2, 2)), name="w"): [1, 2]})
    with pytest.raises(TypeError, match="give a function of a batch for each variable"):
        ps.InputOptions(lookups={"w": len})
