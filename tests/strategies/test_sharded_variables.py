"""Partitioned variables: whatever is done with one is what is done with a plain one."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import SHARDS, by_replica, in_replicas, kinds, merged, refused

P = ps.experimental.partitioners
ROWS = 10
FIRST = np.arange(2 * ROWS, dtype="float32").reshape(ROWS, 2)

pytestmark = kinds("sharded-2x2", soak=["sharded-1x1", "sharded-3x1"])


@pytest.fixture
def table(strategy):
    with strategy.scope():
        return ps.Variable(FIRST, name="table", aggregation=ps.VariableAggregation.SUM)


def same(found, expected):
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_it_is_in_shards(strategy, table):
    """Named after it, of "div"'s sizes, on the servers in turn. A copy is cut alike. What the partitioner leaves whole,
    what has no rows, copies of replicas, and all without servers, is plain."""
    assert isinstance(table, ps.ShardedVariable)
    assert isinstance(table, ps.Variable)
    assert [v.name for v in table.variables] == [f"{table.name}/part_{n}" for n in range(SHARDS)]
    assert [v.shape for v in table.variables] == [(4, 2), (3, 2), (3, 2)]
    servers = len(strategy.extended.parameter_devices)
    taken = Counter(v.device for v in table.variables)
    assert (len(taken), sum(taken.values()), max(taken.values())) == (servers, SHARDS, -(-SHARDS // servers))
    same(np.concatenate([v.numpy() for v in table.variables]), FIRST)
    assert (table.shape, table.dtype, table.ndim, table.size) == ((ROWS, 2), np.float32, 2, 2 * ROWS)
    assert (table.trainable, table.aggregation) == (True, ps.VariableAggregation.SUM)
    assert strategy.extended.variable_created_in_scope(table)
    assert set(table.devices) == set(taken)
    made = copy.deepcopy(table)
    assert made.sharding == table.sharding
    same(made, FIRST)
    two, mirrored = P.FixedShardsPartitioner(2), ps.MirroredStrategy(["cpu:0"])
    with strategy.scope(), strategy.extended.colocate_vars_with(strategy.extended.parameter_devices[0]):
        beside = ps.Variable(FIRST)  # else the turn would advance, and slots would lie elsewhere
    with strategy.scope():
        plain = [ps.Variable(np.zeros((4, 2))), ps.Variable(1.0)]
        plain.append(ps.Variable(np.zeros(ROWS), synchronization="on_read", aggregation="sum"))
    with mirrored.scope():
        whole = ps.Variable(FIRST, partitioner=two)
    local = ps.Variable(FIRST, partitioner=two)
    assert not any(isinstance(v, ps.ShardedVariable) for v in (*plain, beside, whole, local))
    for each in (whole, local):
        same(each, FIRST)


def test_a_variable_has_a_partitioner_of_its_own(strategy):
    """It wins over the strategy's; False leaves whole what that would cut. Names are unique: of the whole,
    and of shards where somebody has taken such a name."""
    value = np.arange(16.0, dtype="float32").reshape(8, 2)
    with strategy.scope():
        own = ps.Variable(value, name="own", partitioner=P.FixedShardsPartitioner(4))
        whole = ps.Variable(FIRST, name="uncut", partitioner=False)
        optimizer = ps.optimizers.Adam(0.1)
    assert [isinstance(v, ps.ShardedVariable) for v in (own, whole)] == [True, False]
    assert [v.shape for v in own.variables] == [(2, 2)] * 4
    assert len({v.device for v in own.variables}) == len(strategy.extended.parameter_devices)
    same(own, value)
    same(whole, FIRST)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones((8, 2), "float32"), own)]))
    np.testing.assert_allclose(own.numpy(), value - np.float32(0.1), rtol=1e-5, atol=1e-6)
    with strategy.scope():
        taken = ps.Variable(1.0, name="names/part_1")
        first, second = (ps.Variable(FIRST, name="names") for _ in range(2))
        later = ps.Variable(1.0, name="names/part_0")
    names = [v.name for v in (taken, first, second, later, *first.variables, *second.variables)]
    assert len(set(names)) == len(names)
    assert (first.name, second.name) == ("names", "names_1")


def test_partitioners_that_make_no_sense_are_refused(strategy, table):
    """With the argument's name, and before anything is created."""
    two = P.FixedShardsPartitioner(2)
    with strategy.scope():
        with pytest.raises(TypeError, match=r"partitioner is True; pass a function of a shape"):
            ps.Variable(FIRST, partitioner=True)
        with pytest.raises(ValueError, match="ON_READ has a value for each replica and is never split"):
            ps.Variable(FIRST, partitioner=two, synchronization="on_read", aggregation="sum")
        with strategy.extended.colocate_vars_with(table):
            refused(
                ValueError, "split like the variable it is placed with", lambda: ps.Variable(FIRST, partitioner=two)
            )
        with pytest.raises(ValueError, match=r"returned \[1, 2\] for variable 'odd'"):
            ps.Variable(FIRST, name="odd", partitioner=lambda shape, dtype: [1, 2])
        with pytest.raises(ValueError, match=r"'wrong' of shape \(4, 2\).*from 1 to 4"):
            ps.Variable(np.zeros((4, 2)), name="wrong", partitioner=lambda shape, dtype: [1, 2])
    with pytest.raises(TypeError, match="variable_partitioner"):
        ps.ParameterServerStrategy(variable_partitioner=P.FixedShardsPartitioner)


KEYS = [3, -1, np.int64(9), slice(3, 7), slice(-2, None), slice(None), slice(None, None, -1), slice(8, 2, -3)]
KEYS += [slice(5, 5), slice(0, 4), slice(4, 7), slice(6, 3, -1), slice(2, 100, 4), (slice(1, 3), 1), (-2, slice(1, 2))]
KEYS += [(slice(9, None, -9), 0), None, ..., [1, 8], np.arange(10) > 4, (), (..., 1), slice(2, None, -1), True]


def test_it_reads_as_an_array(strategy, table):
    """And is indexed as one, in cross-replica context and in each replica."""
    for found, expected in ((table.numpy(), FIRST), (table.read_value(), FIRST), (table * 2 + table, FIRST * 3)):
        same(found, expected)
    same(np.square(table), FIRST**2)
    same(np.sum(table, axis=0), FIRST.sum(axis=0))
    same(list(table), FIRST)
    same(table.astype("float64"), FIRST.astype("float64"))
    same(ps.convert_to_tensor(table), FIRST)
    assert len(table) == ROWS
    assert table.numpy() is table.numpy()  # as long as nothing has changed it
    assert not table.numpy().flags.writeable
    for key in KEYS:
        same(table[key], FIRST[key])
        for found in in_replicas(strategy, lambda replica, key=key: np.asarray(table[key])):
            same(found, FIRST[key])
    refused(IndexError, "", lambda: table[ROWS])


def test_a_slice_asks_only_the_servers_that_have_it(strategy, table, calls_of):
    """And a lookup only those with an id."""
    asked = calls_of("ask", strategy.backend._reads._pulls)
    one, two, three = (v.name for v in table.variables)
    same(table[5:7], FIRST[5:7])
    same(table.lookup([0, 9, 0]).numpy(), FIRST[[0, 9, 0]])
    assert [ask.named.spec.name for (asks,) in asked for ask in asks] == [two, one, three]


def test_it_is_assigned(strategy, table):
    """By arrays, numbers, what is broadcast, variables, values of servers, and a replica's buffer. What does not fit is
    refused. Replicas' values are combined as its aggregation says."""
    table.assign(FIRST * 2)
    same(table, FIRST * 2)
    table.assign_add(1.0)
    table.assign_sub(np.ones(2, "float32"))
    same(table, FIRST * 2)
    table.assign([[1.0, 2.0]])
    same(table, np.broadcast_to(np.float32([1, 2]), FIRST.shape))
    with strategy.scope():
        other = ps.Variable(FIRST + 5)
        plain = ps.Variable(np.float32([3, 4]))
    table.assign(other)
    same(table, FIRST + 5)
    table.assign_add(table)
    same(table, 2 * (FIRST + 5))
    table.assign(plain)
    same(table, np.broadcast_to(np.float32([3, 4]), FIRST.shape))
    plain.assign(table[0])
    table.assign(strategy.reduce("sum", by_replica(strategy, lambda replica: FIRST.copy()), axis=None))
    same(table, FIRST * len(strategy.extended.worker_devices))
    count = len(strategy.extended.worker_devices)
    for value, error in ((np.zeros((3, 2), "float32"), ValueError), (FIRST + 1j, TypeError), ("word", TypeError)):
        with pytest.raises(error):
            table.assign(value)
    same(table, FIRST * count)
    in_replicas(strategy, lambda replica: table.assign_add(FIRST + replica))
    same(table, FIRST * count + sum(FIRST + replica for replica in range(count)))
    in_replicas(strategy, lambda replica: table.assign(np.float32(replica + 1)))
    total = sum(range(1, count + 1))
    same(table, np.full_like(FIRST, total))

    def step(replica):
        buffer = strategy.buffer(table)
        assert buffer.shape == table.shape
        buffer[:] = replica + 1
        table.assign_add(buffer)

    in_replicas(strategy, step)
    same(table, np.full_like(FIRST, 2 * total))


def test_rows_are_changed_by_their_places(strategy, table):
    """As those of a variable of this process; a shard of which no row is given stays."""
    with strategy.scope():
        truth = ps.Variable(np.zeros((ROWS, 1), bool))
    assert isinstance(truth, ps.ShardedVariable)
    truth.scatter_update(ps.IndexedSlices(np.ones((2, 1), bool), [0, 9]))
    same(np.flatnonzero(truth), [0, 9])
    local = ps.Variable(FIRST)
    for how in ("add", "sub", "update", "min", "max", "mul", "div"):
        for ids in ([0], [9, 3, 3, 4], [5, 5], []):
            values = np.arange(2, 2 + 2 * len(ids), dtype="float32").reshape(-1, 2)
            for v in (local, table):
                getattr(v, f"scatter_{how}")(ps.IndexedSlices(values, np.asarray(ids, "int64")))
            same(table, local.numpy())


def test_rows_are_looked_up(strategy, table):
    """Each once, with the gradient, everywhere; bags too. TensorFlow's `params` is a list of shards, in order."""

    def check(replica, ids):
        rows = table.lookup(ids)
        same(rows.ids, np.unique(ids))
        same(rows.numpy(), FIRST[ids])
        same(table.sparse_read(ids), FIRST[ids])
        same(table.gather(ids), FIRST[ids])
        same(ps.nn.embedding_lookup(table, ids).numpy(), FIRST[ids])
        gradient = rows.gradient(np.ones_like(rows.values))
        assert gradient.shape == FIRST.shape
        same(gradient.indices, rows.ids)

    for given in ([0], [9, 0, 9], [[4, 6], [7, 3]], [], range(ROWS)):
        ids = np.asarray(given, np.int64)
        check(0, ids)
        in_replicas(strategy, partial(check, ids=ids))
    same(ps.nn.embedding_lookup(table.variables, [9, 1]).numpy(), FIRST[[9, 1]])
    refused(ValueError, "shards", lambda: ps.nn.embedding_lookup(table.variables[::-1], [9, 1]))
    refused(ValueError, "mod", lambda: ps.nn.embedding_lookup(table, [9, 1], partition_strategy="mod"))
    bags = ps.nn.embedding_lookup_sparse(table, [[0, 9], [], [5]], None, "sum")
    same(bags, [FIRST[0] + FIRST[9], [0, 0], FIRST[5]])
    same(ps.nn.safe_embedding_lookup_sparse(table, [[-1], [9]], default_id=5), [FIRST[5], FIRST[9]])
    for bad in (-1, ROWS):
        with pytest.raises(ValueError, match=rf"{table.name}'.*{bad}|{bad}.*{table.name}'"):
            table.lookup([0, bad])


def test_a_reduction_to_it_has_its_locality(strategy, table):
    """Of arrays and of rows: an update takes it, and a look, or a merge call, gives the whole."""
    count = len(strategy.extended.worker_devices)
    dense = by_replica(strategy, lambda replica: FIRST + replica)
    rows = by_replica(strategy, lambda replica: ps.IndexedSlices(np.ones((2, 2), "float32"), [replica, 9]))
    expected = np.zeros_like(FIRST)
    for replica in range(count):
        np.add.at(expected, [replica, 9], np.float32(1))
    extended = strategy.extended
    same(extended.reduce_to("mean", dense, table), sum(FIRST + n for n in range(count)) / np.float32(count))
    same(extended.reduce_to("sum", rows, table), expected)
    found = merged(strategy, lambda s, g: s.extended.reduce_to("sum", g, table), dense)
    for one in strategy.experimental_local_results(found):
        same(one, sum(FIRST + n for n in range(count)))
    with strategy.scope():
        plain = ps.Variable(np.zeros(3, "float32"))
        more = by_replica(strategy, lambda replica: np.ones(3, "float32"))
        pairs = [(dense, table), (more, plain), (rows, table)]
        one, two, three = extended.batch_reduce_to("sum", pairs)
    assert extended.update(table, lambda v, g, h: v.assign(g + h), (one, three)) is table
    same(two, np.full(3, count))
    same(table, sum(FIRST + n for n in range(count)) + expected)


def test_an_update_runs_beside_each_shard(strategy, table):
    """What is cut alike gives its shard, arrays of its rows their rows; all else is as it is. A lazy update is of the
    given rows; a shard is an ordinary variable, which is updated alone."""
    extended = strategy.extended
    with strategy.scope(), extended.colocate_vars_with(table):
        slot = ps.Variable(FIRST + 1, trainable=False)
        by_row = ps.Variable(np.arange(ROWS, dtype="float32")[:, None])
        count = ps.Variable(np.int64(0))
    assert [v.place for v in slot.variables] == [v.place for v in table.variables]
    assert isinstance(by_row, ps.ShardedVariable)
    other = np.arange(ROWS, dtype="float32")[:, None]

    def fn(v, slot, by_row, count, array, vector, number, names):
        count.assign_add(1)
        v.assign(v + slot * number + by_row + array + vector)
        slot.assign(slot * 2)
        return {"sum": np.sum(v), "v": v, "nothing": None}

    args = (slot, by_row, count, other, np.float32([1, 2]), 3.0, ("a",))
    found = extended.update(table, fn, args)
    expected = FIRST + (FIRST + 1) * 3 + 2 * other + np.float32([1, 2])
    same(table, expected)
    same(slot, (FIRST + 1) * 2)
    assert int(count) == 1
    assert found["v"] is table
    assert found["nothing"] is None
    same([float(part) for part in found["sum"]], [part.sum() for part in np.split(expected, [4, 7])])
    parts = extended.update(table, lambda v: np.sum(v), group=False)
    assert len(parts) == SHARDS
    momentum = slot.assign(np.ones_like(FIRST))
    table.assign(FIRST)

    def heavy_ball(v, gradient, m):
        m.assign(0.5 * m + gradient)
        v.assign_sub(m)

    gradient = ps.IndexedSlices(np.ones((2, 2), "float32"), [3, 4])
    extended.update(table, ps.lazy_update(heavy_ball), (gradient, momentum))
    moved = np.isin(np.arange(ROWS), [3, 4])[:, None]
    same(momentum, np.where(moved, np.float32(1.5), np.float32(1)) * np.ones_like(FIRST))
    expected = FIRST - np.where(moved, np.float32(1.5), np.float32(0))
    same(table, expected)
    extended.update(table.variables[1], lambda v: v.assign(v * 0))
    expected[4:7] = 0
    same(table, expected)


def test_what_cannot_be_is_told(strategy, table):
    """A shard's update sees nothing of others: the whole by closure, variables that are cut in another way."""
    extended = strategy.extended
    with strategy.scope():
        plain = ps.Variable(np.zeros(2, "float32"))
        twice = ps.Variable(np.zeros((ROWS, 2), "float32"))
    with pytest.raises(ValueError, match=f"'{table.name}' has 3 shards"):
        extended.update(plain, lambda v, t: v.assign(t[0]), (table,))
    refused(ValueError, f"'{table.name}' has 3 shards", lambda: extended.update(table, lambda v: v.assign(v + table)))
    refused((ValueError, ps.errors.LocalityError, ps.errors.PSError), "", lambda: table.variables[0].assign(twice))
    with ps.MirroredStrategy() as elsewhere, pytest.raises(ValueError, match="another strategy"):
        elsewhere.extended.update(table, lambda v: v)


def test_shards_are_made_by_a_partitioner():
    """TensorFlow's constructor, of a list of variables, would stack them: the error names what makes shards."""
    with pytest.raises(TypeError, match=r"ShardedVariable cannot be created directly; .*partitioner"):
        ps.ShardedVariable([ps.Variable(np.ones((1, 2))), ps.Variable(np.ones((1, 2)))])
