"""Contributions of workers: rows, and what they cost in calls; rows that are none, NaN and infinity.

The worker is told, and nothing of it is applied. Or all of it is, where that is asked for.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.cases import pairwise
from tests.kit.workers import in_threads

SHAPE = (50, 4)
SIZE, WIDTH = 6, 2
LARGE = 700_000
"""Elements of a variable of which a round streams."""


# ---- Rows ----


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_step_is_one_round_trip(environ, transport):
    """Lookup and push: the rows of a batch come with the round before, as they are after it."""
    environ["PS_TRANSPORT"] = transport
    users = np.arange(60) * 7 % 50
    data = ps.ArrayDataset({"user": users}).batch(10)
    with InProcessCluster(2) as cluster, ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        with strategy.scope():
            table = ps.Variable(np.zeros(SHAPE, "float32"), name="users")
            optimizer = ps.optimizers.SGD(0.5)
        expected = np.zeros(SHAPE, "float32")
        counted = Counter[str]()  # how often the servers are asked for what
        for core in cluster.cores:
            core.stimuli.record = lambda stimulus: counted.update([stimulus.name])

        def step(batch):
            rows = table.lookup(batch["user"])
            assert np.array_equal(rows.values, expected[rows.ids])
            optimizer.apply_gradients([(rows.gradient(np.ones_like(rows.values)), table)])
            expected[rows.ids] -= 0.5

        options = ps.InputOptions(prefetch={table: lambda batch: batch["user"]})
        for number, batch in enumerate(strategy.experimental_distribute_dataset(data, options)):
            strategy.run(step, args=(batch,))
            if number == 2:
                counted.clear()
        assert counted["pull"] == 0
        assert np.array_equal(table.numpy(), expected)


def test_ids_that_are_no_rows_are_refused_by_servers_too():
    """A client that does not check them."""
    with InProcessCluster(1) as cluster, ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        with strategy.scope():
            table = ps.Variable(np.zeros(SHAPE, "float32"), name="table")
        table.assign_add(np.ones(SHAPE))
        with pytest.raises(ps.errors.InvalidRequest, match="id 50 is not a row of variable 'table'"):
            strategy.backend.reader.read_rows(table.handle, np.array([3, 50]))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_two_processes_add_up_repeated_rows(transport):
    """Exactly, and both see the same: each worker adds to some rows, some of which the other one has as well."""
    steps = 8

    def add_rows(strategy, worker):
        with strategy.scope():
            table = ps.Variable(np.zeros((50, 4), "float32"), name="table")
            optimizer = ps.optimizers.SGD(1.0)

        def step(number):
            ids = np.array([number, number + worker, number, 7])
            table.prefetch(ids)
            optimizer.apply_gradients([(ps.IndexedSlices(np.full((4, 4), worker + 1, "float32"), ids), table)])
            rows = table.lookup(ids)
            assert rows.values.shape == (len(rows.ids), 4)

        for number in range(steps):
            strategy.run(step, args=(number,))
        return table.numpy().sum(axis=1).tolist()

    expected = np.zeros(50)
    for number, me in np.ndindex(steps, 2):
        for id in (number, number + me, number, 7):
            expected[id] -= 4 * (me + 1)
    assert in_threads(add_rows, servers=1, transport=transport) == [expected.tolist()] * 2


# ---- Rows that cannot be ----

BAD = {
    "an id too large": (np.ones((1, WIDTH), "float32"), [SIZE], "id 6 at index 0 is not a row of 6"),
    "an id below 0": (np.ones((1, WIDTH), "float32"), [-1], "id -1 at index 0 is not a row of 6"),
    "a row too wide": (np.ones((1, 3), "float32"), [1], r"each row has shape \(3,\), but must have \(2,\)"),
}
EMPTY = ps.IndexedSlices(np.empty((0, WIDTH), "float32"), [])


def tables_of(strategy):
    with strategy.scope():
        emb = ps.Variable(np.zeros((SIZE, WIDTH), "float32"), name="emb")
        users = ps.dynamic_embedding.get_variable("users", dim=WIDTH, initializer=0)
        return emb, users, ps.optimizers.SGD(1.0)


def rows(value=1.0, ids=(1, 1)):
    """Rows with an id twice."""
    return ps.IndexedSlices(np.full((len(ids), WIDTH), value, "float32"), list(ids))


@pytest.mark.parametrize("bad", BAD)
def test_the_worker_is_told_and_the_round_has_what_it_gives_then(bad):
    """The error names the variable and the worker; whoever gives right rows afterwards has missed nothing."""
    values, ids, words = BAD[bad]

    def make(strategy, worker):
        emb, users, optimizer = tables_of(strategy)

        def step(some):
            optimizer.apply_gradients([(rows(ids=[0]), users), (some, emb)])

        if worker == 1:
            with pytest.raises(ValueError, match=rf"'emb' on /job:worker/task:1.*{words}"):
                strategy.run(lambda: step(ps.IndexedSlices(values, ids)))
        strategy.run(lambda: step(rows()))
        return emb.numpy()[:, 0].tolist(), users.lookup([0]).numpy().tolist(), int(optimizer.iterations)

    assert in_threads(make) == [([0, -4.0, 0, 0, 0, 0], [[-2.0, -2.0]], 1)] * 2


@pytest.mark.parametrize("which", ["emb", "users"])
def test_rows_that_are_nan_are_refused_for_all(which):
    """With nonfinite="raise": both workers are told whose rows they are, and no row, key or count changes."""

    def make(strategy, worker):
        emb, users, optimizer = tables_of(strategy)
        given = {"emb": rows(), "users": rows(ids=[7])}
        if worker == 1:
            given[which] = rows(np.nan, [3])
        with pytest.raises(ps.errors.NonfiniteError, match=r"/job:worker/task:1.*" + which):
            strategy.run(lambda: optimizer.apply_gradients([(given[v.name], v) for v in (emb, users)]))
        assert not emb.numpy().any()
        return users.size(), int(optimizer.iterations)

    assert in_threads(make, consistency=ps.Sync(nonfinite="raise")) == [(0, 0)] * 2


def test_empty_rows_are_fine():
    """As an empty list of ids is; repeated and unsorted ids count each time."""

    def make(strategy, worker):
        emb, users, optimizer = tables_of(strategy)
        some = EMPTY if worker else rows(ids=[5, 0, 5])
        strategy.run(lambda: optimizer.apply_gradients([(some, emb), (some, users)]))
        return emb.numpy()[:, 0].tolist(), users.lookup([0, 5]).numpy()[:, 0].tolist()

    assert in_threads(make) == [([-1.0, 0, 0, 0, 0, -2.0], [-1.0, -2.0])] * 2


# ---- NaN and infinity ----


def train(strategy, bad, size, dtype):
    """Three steps of Adam on two variables; in the second, one gradient has a bad value.

    Returns, after each step, an element of each variable, of each slot, and the count of steps; and the errors.
    """
    after, errors = [], []
    with strategy.scope():
        variables = [ps.Variable(np.zeros(size, dtype), name=name) for name in "wv"]
        optimizer = ps.optimizers.Adam(0.5)
    for step in range(3):
        gradients = [np.full(size, step + 1.0, dtype) for _ in variables]
        gradients[0][-1] = bad if step == 1 else gradients[0][-1]
        try:
            strategy.run(lambda g: optimizer.apply_gradients(list(zip(g, variables, strict=True))), (gradients,))
        except ps.errors.NonfiniteError as error:
            errors.append(error.message)
        seen = [
            np.asarray(each.numpy(), "float64") for each in (*variables, *optimizer.variables, optimizer.iterations)
        ]
        after.append([float(value.reshape(-1)[0]) for value in seen])
    return after, errors


def trained(servers, consistency, bad, size=3, dtype="float32"):
    (found,) = in_threads(lambda s, _: train(s, bad, size, dtype), 1, servers, consistency=consistency)
    return found


@pairwise(
    choice=["skip", "raise"],
    kind=[ps.Sync, ps.Async],
    bad=[np.nan, np.inf, -np.inf],
    servers=[1, 2],
    dtype=["float32", "float16", "float64"],
    size=[3, LARGE],
)
def test_a_skipped_or_refused_round_changes_nothing(choice, kind, bad, servers, dtype, size):
    """Neither the variable with the bad gradient, nor another one, nor a slot, nor the count; then all goes on.

    The error names the variable and the worker, and can be caught.
    """
    after, errors = trained(servers, kind(nonfinite=choice), bad, size, dtype)
    assert after[1] == after[0]
    assert after[2][-1] == 2
    assert all(np.isfinite(after[2]))
    assert after[2] != after[1]
    assert len(errors) == (choice == "raise")
    for message in errors:
        assert [word in message for word in ("'w'", "/job:worker/task:0", "'v'")] == [True, True, False]


def test_a_round_is_applied_unless_something_else_is_asked_for():
    """The default: the variable is spoilt, the other one is updated."""
    after, errors = trained(1, ps.Sync(), np.nan)
    assert errors == []
    assert after[1] != after[0]
    assert after[2][-1] == 3


@pytest.mark.parametrize(
    "wrong",
    [lambda: ps.Sync(nonfinite="ignore"), lambda: ps.Async(nonfinite=None)],
)
def test_impossible_choices_are_refused(wrong):
    """Before anything is connected."""
    with pytest.raises(ValueError, match="nonfinite"):
        wrong()


@pytest.mark.parametrize("choice", ["skip", "raise"])
def test_every_process_is_told(choice, caplog):
    """Two servers and two workers: nothing of the round is applied anywhere, and both learn whose fault it was."""

    def poisoned(strategy, worker):
        """Worker 1 contributes NaN in the second step."""
        with strategy.scope():
            v, u = ps.Variable(np.zeros(3), name="v"), ps.Variable(np.zeros(3), name="u")
            optimizer = ps.optimizers.SGD(1.0)
        assert strategy.last_round is None
        errors = []
        for step in range(3):
            gradient = np.full(3, np.nan if (worker, step) == (1, 1) else 1.0)
            try:
                strategy.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, v), (np.ones(3), u)]))
            except ps.errors.NonfiniteError as error:
                errors.append(error.message)
            last = strategy.last_round
        assert (last.contributors, last.excluded) == (("/job:worker/task:0", "/job:worker/task:1"), ())
        return [float(v.numpy()[0]), float(u.numpy()[0])], errors

    found = in_threads(poisoned, consistency=ps.Sync(nonfinite=choice))
    warned = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    for values, errors in found:
        assert values == [-4.0, -4.0]
        told = errors if choice == "raise" else warned
        assert len(errors) == (choice == "raise")
        assert all("'v'" in words and "/job:worker/task:1" in words for words in told)
    assert choice == "raise" or len(warned) >= 2
