"""The calls of a process: variables are created in batches, and rows come with the round before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from inspect import currentframe
from itertools import pairwise

import numpy as np
import pytest

import psclient as ps
from psclient._src.network.session import Session
from psclient._src.rounds import creation, read_cache
from pstesting.in_process import InProcessCluster
from pstesting.script import add_all
from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tensor import TensorSpec
from tests.kit.strategies import refused

COUNT = 120


@pytest.fixture
def cluster():
    """Two servers, and one worker."""
    with InProcessCluster(2) as found:
        yield found


class Calls:
    """Counts what a cluster's servers were asked for, by server and verb."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self.counted: Counter[tuple[int, str]] = Counter()
        for core in cluster.cores:
            core.stimuli.record = lambda stimulus, server=core.server: self._count(server, stimulus)

    def _count(self, server, stimulus):
        first_values = stimulus.name == "push" and stimulus.args[0].first_values
        self.counted[server, "first values" if first_values else stimulus.name] += 1

    def rounds(self) -> tuple[int, int]:
        """How many pushes and pulls there were on all servers since the last look; first values are none."""
        return sum(self.of("push")), sum(self.of("pull"))

    def of(self, verb: str) -> list[int]:
        """How often each server was asked for this, since the last look."""
        return [self.counted.pop((server, verb), 0) for server in range(2)]


@pytest.fixture
def calls(cluster):
    return Calls(cluster)


def test_many_variables_cost_a_call_of_each_kind(cluster, calls, monkeypatch):
    """For each server one batch, one push of first values and one pull, however many variables it holds."""
    monkeypatch.setattr(creation, "KEPT_SECONDS", float("inf"))  # on a busy machine too
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(), ps_strategy="round_robin") as strategy:
        with strategy.scope():
            variables = [ps.Variable(np.full(3, index, "float32")) for index in range(COUNT)]
            assert calls.of("create_batch") == [0, 0]
        assert (calls.of("create_batch"), calls.of("first values")) == ([1, 1], [1, 1])
        assert [v.numpy()[0] for v in variables] == list(range(COUNT))
        assert calls.of("pull") == [1, 1]
        adam = ps.optimizers.Adam(0.5)
        strategy.run(lambda: adam.apply_gradients([(np.ones(3, "float32"), v) for v in variables]))
        assert calls.of("create_batch") == [1, 1]
        assert calls.of("first values") == [1, 2], "its slots, and a copy of the count of steps"
        assert [round(float(v.numpy()[0]), 3) for v in variables[:3]] == [-0.5, 0.5, 1.5]
        assert calls.of("pull") == [1, 0], "for that copy"
        assert [core.status().variables for core in cluster.cores] == [COUNT * 3 + 1] * 2


@pytest.mark.parametrize("elements", [10, PART_BYTES // 4 + 1], ids=["small", "large"])
def test_a_variable_begins_with_what_its_array_was_then(cluster, elements):
    """The script may change the array afterwards, before anything is sent."""
    value = np.ones(elements, "float32")
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy, strategy.scope():
        v = ps.Variable(value)
        value[:] = 2
        assert set(v.numpy().tolist()) == {1.0}


def test_little_is_kept(cluster, calls, monkeypatch):
    """What would take too much memory is sent before the next is recorded; a large value is never kept."""
    monkeypatch.setattr(creation, "KEPT_BYTES", 5000)
    monkeypatch.setattr(creation, "KEPT_SECONDS", float("inf"))
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy, strategy.scope():
        for _ in range(12):
            ps.Variable(np.zeros(250, "float32"))
        assert calls.of("create_batch")[0] == 2
        ps.Variable(np.zeros(PART_BYTES // 4, "float32"))
        assert calls.of("create_batch")[0] == 1


def test_who_waits_for_a_first_value_does_not_wait_for_long(cluster, calls, monkeypatch):
    """A script that takes its time sends what it has created with the next one."""
    monkeypatch.setattr(creation, "KEPT_SECONDS", -1.0)
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy, strategy.scope():
        ps.Variable(1.0)
        assert calls.of("create_batch")[0] == 1


def test_few_bytes_are_read_that_nobody_asked_for(cluster, calls, monkeypatch):
    """Those that come with others count as long as they are not read; then more may come."""
    monkeypatch.setattr(read_cache, "AHEAD_BYTES", 4000)
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy, strategy.scope():
        first = ps.Variable(np.zeros(250, "float32"))
        with strategy.extended.colocate_vars_with(first):
            others = [ps.Variable(np.zeros(250, "float32")) for _ in range(19)]
        others[18].numpy()
        assert calls.of("pull")[0] == 1
        for v in (first, *others[:3]):  # these came with it
            v.numpy()
        assert calls.of("pull")[0] == 0
        for v in others[3:8]:
            v.numpy()
        assert calls.of("pull")[0] == 1
        for v in (others[17], others[16], others[8]):
            v.numpy()
        assert calls.of("pull")[0] == 2, "the first of these came with four, which left no room for more"


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_loses_nothing(cluster, monkeypatch):
    """What could not be sent is sent when it is needed again; what the script did not get may be created again."""
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        with strategy.scope():
            first = ps.Variable(1.0, name="first")
            with monkeypatch.context() as patch:
                patch.setattr(Session, "wait", interrupted)
                refused(KeyboardInterrupt, "", lambda: ps.Variable(np.zeros(PART_BYTES, "int8"), name="second"))
            second = ps.Variable(np.ones(PART_BYTES, "int8"), name="second")
        assert float(first.numpy()) == 1
        assert second.name == "second"
        assert second.numpy()[0] in (0, 1)


def test_no_room_is_told_where_the_variable_is_created():
    """At once, with its line, and the script may go on with a smaller one."""
    with InProcessCluster() as cluster:
        machine = cluster.cores[0].machine
        machine._config = replace(machine._config, memory_limit=1000)
        with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy, strategy.scope():
            first = ps.Variable(np.zeros(200, "float32"))
            line = f"{__file__}:{currentframe().f_lineno + 2}"
            with pytest.raises(ps.errors.MemoryLimit, match="--memory-limit") as told:
                ps.Variable(np.zeros(300, "float32"), name="v")
            assert line in str(told.value)
            second = ps.Variable(np.zeros(50, "float32"), name="v")
            assert (first.numpy().sum(), second.numpy().sum(), second.name) == (0, 0, "v")


@pytest.mark.parametrize("where", ["read", "end"])
def test_a_batch_that_failed_is_over(cluster, where):
    """Later variables have no numbers: to create or read any says why, again. The error names the line that created the
    variable, and not the line that read another one, or left the scope."""
    taken = PlacedVariable(0, VariableSpec("taken", TensorSpec("int8", (7,))), (0,))
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        assert cluster.cores[0].create_batch(strategy._session.number, [taken]).error is None

        def create():
            with strategy.scope():
                made.append(ps.Variable(1.0))
                made.append(ps.Variable(2.0))
                if where == "read":
                    made[1].numpy()

        made, line = [], create.__code__.co_firstlineno + 2
        refused(ps.errors.VariableMismatch, rf"'taken'.*\(created at {__file__}:{line}\)", create)
        v, w = made
        for work in (v.numpy, w.numpy, lambda: strategy.run(lambda: add_all([(v, 3.0)]))):
            refused(ps.errors.VariableMismatch, "'taken'", work)
        with pytest.raises(ps.errors.VariableMismatch, match="'taken'"), strategy.scope():
            ps.Variable(1.0)


SIZE, DIM = 40, 3


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


def test_a_step_is_one_push(cluster, calls):
    """With the ids of the next batch named there is no pull but the first; the values are those of the whole."""
    with opened(cluster) as strategy:
        v, optimizer, truth = table(strategy), ps.optimizers.SGD(1.0), descended(0, [0])
        optimizer.build([v])
        every = batches(6)

        def step(ids, ahead):
            v.prefetch(ahead)
            return step_on(v, optimizer, ids)

        for number, (ids, ahead) in enumerate(pairwise(every)):
            found = strategy.run(step, (ids, ahead))
            np.testing.assert_array_equal(found, truth[ids])
            descended(1, ids, truth)
            if number == 1:
                v.lookup(ahead)  # waits for the round
                calls.rounds()
        v.lookup(every[-1])  # waits for the last round
        assert calls.rounds() == (3, 0)
        np.testing.assert_array_equal(v.lookup(every[-1]).numpy(), truth[every[-1]])
        assert calls.rounds() == (0, 0)
        np.testing.assert_array_equal(v.numpy(), truth)
        assert calls.rounds() == (0, 1)


def test_rows_that_were_not_named_are_pulled(cluster, calls):
    """Some of them or all; the answer is of the same round."""
    with opened(cluster) as strategy:
        v, optimizer = table(strategy), ps.optimizers.SGD(1.0)
        strategy.run(lambda: (v.prefetch([3, 5, 9]), step_on(v, optimizer, [3, 3, 4]))[1])
        truth = descended(1, [3, 3, 4])
        v.lookup([3])
        calls.rounds()
        for ids, pulls in (([5, 3], 0), ([], 0), ([9, 9, 3, 5], 0), ([3, 4], 1), ([39], 1), ([0], 1)):
            np.testing.assert_array_equal(v.lookup(ids).numpy(), truth[np.array(ids, int)])
            assert calls.rounds() == (0, pulls), ids


def test_rows_of_a_variable_that_is_read_whole_are_here(cluster, calls):
    """A lookup does not make the whole come back with each round; a read does, and then lookups cost nothing."""
    with opened(cluster) as strategy:
        v, optimizer = table(strategy), ps.optimizers.SGD(1.0)
        v.numpy()
        strategy.run(lambda: step_on(v, optimizer, [1]))
        v.lookup([1])
        calls.rounds()
        for _ in range(2):
            strategy.run(lambda: step_on(v, optimizer, [1]))
        assert v.lookup([1]).numpy()[0, 0] == DIM - 3
        assert calls.rounds() == (2, 2)


def test_an_update_from_elsewhere_makes_rows_stale(cluster):
    """An assignment between steps is seen, with the rows that it brings; evaluation in between reads the same."""
    with opened(cluster) as strategy:
        v, optimizer = table(strategy), ps.optimizers.SGD(1.0)
        strategy.run(lambda: (v.prefetch([1, 2]), step_on(v, optimizer, [1]))[1])
        v.assign(np.full((SIZE, DIM), 7, "float32"))
        assert v.lookup([1, 2]).numpy().tolist() == [[7.0] * DIM] * 2
        assert set(v.numpy().ravel().tolist()) == {7.0}
        strategy.run(lambda: step_on(v, optimizer, [2]))
        assert v.lookup([1, 2]).numpy()[:, 0].tolist() == [7.0, 6.0]


def test_many_rows_are_pulled_in_several_calls(cluster, calls, monkeypatch):
    monkeypatch.setattr(read_cache, "ROWS_AT_A_TIME", 7)
    with opened(cluster) as strategy:
        v = table(strategy)
        v.lookup([0])
        calls.rounds()
        ids = np.random.default_rng(0).permutation(SIZE)
        np.testing.assert_array_equal(v.lookup(ids).numpy(), descended(0, [0])[ids])
        assert calls.rounds() == (0, -(-SIZE // 7))


def test_more_rows_than_a_round_may_ask_for_are_pulled(cluster, calls, monkeypatch):
    """Of all variables of a server together, since their ids are in one header; the step goes on."""
    monkeypatch.setattr(read_cache, "ROWS_AT_A_TIME", 7)
    with opened(cluster) as strategy:
        v = table(strategy)
        with strategy.scope(), strategy.extended.colocate_vars_with(v):
            u, w = table(strategy, "u"), table(strategy, "w")
        optimizer = ps.optimizers.SGD(1.0)

        def step():
            for each, count in ((v, 5), (u, 3), (w, 2)):
                each.prefetch(range(count))
            one = ps.IndexedSlices(np.ones((1, DIM), "float32"), [1])
            optimizer.apply_gradients([(one, v), (one, u), (one, w)])

        strategy.run(step)
        found = {each.name: (each.lookup([1]), calls.rounds()[1])[1] for each in (w, v, u, w)}
        assert found == {"table": 0, "u": 1, "w": 0}
        assert [each.lookup([1]).numpy()[0, 0] for each in (v, u, w)] == [DIM - 1.0] * 3
        u.prefetch([1])
        strategy.run(lambda: optimizer.apply_gradients([(ps.IndexedSlices(np.ones((1, DIM), "float32"), [1]), u)]))
        assert u.lookup([1]).numpy()[0, 0] == DIM - 2
        strategy.run(step)  # brings none of these: what was brought before is not given again
        assert u.lookup([1]).numpy()[0, 0] == DIM - 3


@pytest.mark.parametrize("found_out", [False, True])
@pytest.mark.parametrize(("examples", "replicas"), [(24, 1), (22, 2), (3, 2), (0, 1)])
def test_a_dataset_names_the_rows_of_its_next_batch(cluster, calls, examples, replicas, found_out):
    """Even or not: after the first batch of all, or the second where it finds them out, there are no pulls, and each
    example counts once, twice over."""
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

        options = ps.InputOptions(prefetch=None if found_out else {v: name})
        data = strategy.experimental_distribute_dataset(ps.ArrayDataset(ids).batch(6), options)
        calls.rounds()
        pulls = []
        for _ in range(2):
            for batch in data:
                strategy.run(lambda batch: step_on(v, optimizer, batch.ravel()) is None, (batch,))
                pulls.append(calls.rounds()[1])
            descended(1, ids.ravel(), truth)
        np.testing.assert_array_equal(v.numpy(), truth)
        steps = -(-examples // 6)
        assert len(pulls) == 2 * steps
        expected = {0, steps, 1} if found_out else {0, steps}
        assert {at for at, n in enumerate(pulls) if n} == expected & {*range(2 * steps)}
        assert found_out or sum(asked) >= examples - 6


def test_an_asynchronous_worker_sees_its_own_push(cluster):
    """The rows that its round has brought are those after it; of one step only."""
    with opened(cluster, consistency=ps.Async()) as strategy:
        v, optimizer, truth = table(strategy), ps.optimizers.SGD(1.0), descended(0, [0])
        for ids, ahead in pairwise(batches(5)):
            found = strategy.run(lambda ids=ids, a=ahead: (v.prefetch(a), step_on(v, optimizer, ids))[1])
            np.testing.assert_array_equal(found, truth[ids])
            descended(1, ids, truth)
        np.testing.assert_array_equal(v.numpy(), truth)


def test_bad_ids_are_refused_where_they_are_named(cluster, calls):
    """And the rows that were named before still come."""
    why = "variable 'table'.*: id 40 at index 1 is not a row of 40"
    with opened(cluster) as strategy:
        v, optimizer = table(strategy), ps.optimizers.SGD(1.0)
        v.prefetch([1, 2])
        refused(ValueError, why, lambda: v.prefetch([0, SIZE]))
        refused(ValueError, why, lambda: strategy.run(lambda: v.lookup([0, SIZE])))
        strategy.run(lambda: step_on(v, optimizer, [1]))
        v.lookup([2])
        calls.rounds()
        assert v.lookup([1, 2]).numpy()[0, 0] == DIM - 1
        assert calls.rounds() == (0, 0)


def test_options_take_functions():
    with pytest.raises(TypeError, match="pass a function of a batch for each variable"):
        ps.InputOptions(prefetch={ps.Variable(np.zeros((2, 2)), name="w"): [1, 2]})
    refused(TypeError, "pass a function of a batch for each variable", lambda: ps.InputOptions(prefetch={"w": len}))
