"""Dynamic tables: rows by keys, which are used as the rows of other variables are; and groups of small ones."""

from __future__ import annotations

import copy
import itertools
import threading

import numpy as np
import pytest

import psclient as ps
from psclient._src.rounds import reader
from psclient._src.variables.table_views import KEY_BITS, TableView
from psclient._src.variables.tables import TableVariable
from psclient.train.object_graph import explore
from pstesting.in_process import InProcessCluster
from tests.kit.internals import BUCKETS, MIN_CAPACITY, ROWS, hashes_of
from tests.kit.strategies import by_replica, in_replicas, kinds, merged, refused, replicas

de = ps.dynamic_embedding
OLD, NEW, BIG = -7, 3, (1 << 63) - 1
KEYS = np.array([NEW, OLD, BIG, 12])
numbers = itertools.count()


pytestmark = kinds("servers-2x2", soak=["servers-1x1", "servers-3x1"])


def made(strategy, **options):
    """A table whose name no other has; its rows begin with 0.5."""
    with strategy.scope():
        return de.get_variable(f"users{next(numbers)}", **{"dim": 2, "initializer": 0.5, **options})


@pytest.fixture
def table(strategy):
    """Four rows, of 0, 1, 2 and 3."""
    table = made(strategy)
    table.scatter_update(ps.IndexedSlices(np.repeat(np.arange(4.0, dtype="float32")[:, None], 2, axis=1), KEYS))
    return table


def numbers_of(rows):
    """The first number of each row."""
    return np.asarray(rows)[..., 0].tolist()


def test_it_is_in_parts(strategy):
    """One for each server, of contiguous buckets, named after it; it is a variable without a size. Fewer parts, by a
    number or by a partitioner, are on as many servers; more than there are servers are all of them."""
    table, servers = made(strategy, dim=(3, 2)), len(strategy.extended.parameter_devices)
    assert isinstance(table, ps.Variable)
    assert type(table) is de.Variable
    assert [v.name for v in table.variables] == [f"{table.name}/part_{n}" for n in range(servers)]
    assert sorted(v.device for v in table.variables) == sorted(strategy.extended.parameter_devices)
    parts = [v.handle.spec.part for v in table.variables]
    assert [part.first for part in parts[1:]] == [part.first + part.count for part in parts[:-1]]
    assert sum(part.count for part in parts) == BUCKETS
    assert (table.shape, table.dim, table.dtype) == ((ROWS, 3, 2), (3, 2), np.float32)
    assert (made(strategy).dim, made(strategy, dim=()).dim) == (2, ())
    assert table.key_dtype == np.int64
    assert repr(table).startswith(f"<ps.dynamic_embedding.Variable {table.name!r} float32[?, 3, 2] on /job:ps/task:0")
    fewer = ({"shards": 1}, {"partitioner": de.HashPartitioner(1)}, {"shards": BUCKETS})
    assert [len(made(strategy, **options).variables) for options in fewer] == [1, 1, servers]


def test_a_name_is_one_table(strategy):
    """Whoever asks for it again gets it, in a replica too; who asks for another one is told in what it differs.
    Replicas create one together, as they create a variable; an update creates none."""
    name, options = f"named{next(numbers)}", {"dim": 4, "eviction": de.TTL("7d"), "memory_limit": "1GiB"}
    with strategy.scope():
        table = de.get_variable(name, **options)
        assert de.get_variable(name, **options) is table
        with pytest.raises(ValueError, match="memory_limit 1073741824, not 0"):
            de.get_variable(name, **options | {"memory_limit": None})
        refused(ValueError, "trainable True, not False", lambda: de.get_variable(name, **options, trainable=False))
        v = ps.Variable(0.0, name=f"other{next(numbers)}")
        refused(ValueError, "exists and is not a table", lambda: de.get_variable(v.name, dim=4))
        assert ps.Variable(0.0, name=name).name == f"{name}_1"
    found = in_replicas(strategy, lambda replica: de.get_variable(name, **options))
    assert all(each is table for each in found)
    name = f"together{next(numbers)}"
    found = in_replicas(strategy, lambda _: de.get_variable(name, dim=2, initializer=3.0))
    assert all(each is found[0] for each in found)
    assert in_replicas(strategy, lambda _: numbers_of(found[0].lookup([5, 6]))) == ([3.0, 3.0],) * len(found)
    with pytest.raises(RuntimeError, match="cannot create tables"):
        strategy.extended.update(v, lambda v: de.get_variable("late", dim=2) and None)


WHOLE = [np.asarray, np.square, np.sum, list, len, bool, lambda t: t.numpy(), lambda t: t.read_value(), lambda t: t[3]]
WHOLE += [lambda t: t.value(), lambda t: t.assign(np.zeros(2)), lambda t: t.assign_add(1.0), lambda t: t * 2.0]
WHOLE += [lambda t: t == 3]


def test_it_is_no_array(strategy, table):
    """Whatever needs one is a TypeError that says what to do; the same of its parts, and in a replica. Rows of a part
    are looked up in the table: a part has some of the keys alone."""
    for use in (*WHOLE, copy.deepcopy, lambda t: t.strategy.buffer(t)):
        with pytest.raises(TypeError, match=r"has no size.*look up rows by their keys|buffer"):
            use(table)
    for use in WHOLE:
        with pytest.raises(TypeError, match="has no size"):
            strategy.run(lambda use=use: use(table))
    for use in (lambda part: part.numpy(), lambda part: part.assign(0.0)):
        with pytest.raises(TypeError, match="has no size"):
            use(table.variables[0])
    rows = ps.IndexedSlices(np.ones((1, 2), "float32"), [1])
    for use in (lambda v: v.lookup([1]), lambda v: v.prefetch([1]), lambda v: v.scatter_add(rows)):
        with pytest.raises(TypeError, match=f"is a part of table {table.name!r}"):
            use(table.variables[0])
    assert numbers_of(ps.nn.embedding_lookup(table.variables, KEYS)) == [0.0, 1.0, 2.0, 3.0]


def test_rows_are_looked_up_by_keys(strategy, table):
    """In any shape, each once; what has no row gives what it would begin with, and creates nothing. Bags are looked up
    as of any variable; ids below 0 are no ids where that is asked for. What is no key is refused."""
    asked = np.array([[BIG, NEW, 99], [OLD, BIG, NEW]])
    for rows in (table.lookup(asked), *in_replicas(strategy, lambda replica: table.lookup(asked))):
        assert numbers_of(rows) == [[2.0, 0.0, 0.5], [1.0, 2.0, 0.0]]
        assert sorted(rows.ids.tolist()) == [OLD, NEW, 99, BIG]
        assert rows.values.shape == (4, 2)
        assert rows.values[rows.inverse][..., 0].tolist() == numbers_of(rows)
        assert rows.shape == (2, 3, 2)
    assert numbers_of(table.sparse_read([12, 12])) == [3.0, 3.0]
    assert numbers_of(table.gather(BIG)) == 2.0
    assert table.lookup([]).values.shape == (0, 2)
    assert numbers_of(ps.nn.embedding_lookup(table, [OLD], max_norm=1.0)) == pytest.approx([0.5**0.5])
    assert table.size() == 4
    bags = ps.nn.embedding_lookup_sparse(table, [[OLD, BIG], [], [12]], None, "sum")
    assert numbers_of(bags) == [3.0, 0.0, 3.0]
    gradient = bags.gradient(np.ones((3, 2), "float32"))
    assert dict(zip(gradient.indices.tolist(), gradient.counts.tolist(), strict=True)) == {OLD: 1, BIG: 1, 12: 1}
    safe = ps.nn.safe_embedding_lookup_sparse(table, [[OLD, BIG], [-1]], default_id=12)
    assert numbers_of(safe) == [2.0, 3.0]
    for ids in ([1.5], ["a"], [[1], [2, 3]], [True]):
        said = f"the row ids of table {table.name!r} (must be integers, not|are lists of different lengths)"
        refused(TypeError, said, lambda ids=ids: table.lookup(ids))


def test_keys_of_64_bits_without_a_sign(strategy):
    """Of a table of uint64; of the other dtype's numbers those are refused that it does not have."""
    table, high = made(strategy, key_dtype="uint64"), np.array([(1 << 64) - 1, 5], np.uint64)
    table.scatter_add(ps.IndexedSlices(np.ones((2, 2), "float32"), high))
    assert numbers_of(table.lookup(high)) == [1.5, 1.5]
    assert table.keys().dtype == table.lookup(high).ids.dtype == np.uint64
    assert sorted(table.keys().tolist()) == sorted(high.tolist())
    assert numbers_of(table.lookup([[5]])) == [[1.5]]
    said = f"table {table.name!r}.*: key -1 at position 1 is not a valid uint64"
    refused(ValueError, said, lambda: table.lookup([5, -1]))
    refused(ValueError, "is not a valid int64", lambda: made(strategy).lookup(high))


def test_replicas_name_rows_at_the_same_time(monkeypatch):
    """While one cuts its keys by parts, the other hands its own to each part; both go on."""
    cutting, handed = threading.Event(), threading.Event()
    with (
        InProcessCluster(2) as cluster,
        ps.ParameterServerStrategy(["cpu:0", "cpu:1"], cluster_resolver=cluster.resolver()) as strategy,
    ):
        table = made(strategy)
        sharding = type(table.sharding)
        split, name = sharding.split_ids, type(table.parts[0]).announce_pieces

        def split_ids(self, ids):
            if ps.get_replica_context().replica_id_in_sync_group:
                cutting.set()
                assert handed.wait(60)
            return split(self, ids)

        def announce(part, pieces, hint):
            assert cutting.wait(60)
            assert len(pieces) == 1
            name(part, pieces, hint)

        def names():
            table.prefetch([NEW, OLD, BIG])
            handed.set()
            return ps.get_replica_context().replica_id_in_sync_group

        monkeypatch.setattr(sharding, "split_ids", split_ids)
        monkeypatch.setattr(type(table.parts[0]), "announce_pieces", announce)
        assert [*strategy.experimental_local_results(strategy.run(names))] == [0, 1]


def servers_of(strategy):
    return strategy.backend.reader._reads._session.servers


def test_keys_and_rows_are_exported(strategy, table):
    """All of them, in the order of the keys' hashes; in a replica, and in a merge call, behind what it has begun. Of a
    table without rows they are arrays of none."""
    keys, rows = table.export()
    expected = dict(zip(KEYS.tolist(), (0.0, 1.0, 2.0, 3.0), strict=True))
    assert dict(zip(keys.tolist(), numbers_of(rows), strict=True)) == expected
    assert (np.diff(hashes_of(keys, table.table_spec.salt).astype(object)) > 0).all()
    assert table.keys().tolist() == keys.tolist()
    assert in_replicas(strategy, lambda replica: table.size()) == (4,) * len(strategy.extended.worker_devices)

    def change(strategy):
        table.scatter_update(ps.IndexedSlices(np.full((2, 2), 9, "float32"), [99, BIG]))
        return table.size(), dict(zip(table.export()[0].tolist(), numbers_of(table.export()[1]), strict=True))

    assert merged(strategy, change) == (5, expected | {99: 9.0, BIG: 9.0})
    keys, rows = made(strategy).export()
    assert (keys.shape, rows.shape, keys.dtype, rows.dtype) == ((0,), (0, 2), np.int64, np.float32)


def test_much_is_exported_in_pages(strategy, monkeypatch, calls_of):
    """Of some buckets each, so that no answer is large; it is all there, once."""
    table = made(strategy, dim=16)
    table.scatter_add(ps.IndexedSlices(np.arange(8000 * 16, dtype="float32").reshape(8000, 16), np.arange(8000)))
    monkeypatch.setattr(reader, "PAGE_BYTES", 64 << 10)
    pulls = calls_of("pull", *servers_of(strategy))
    keys, rows = table.export()
    order = np.argsort(keys)
    assert keys[order].tolist() == list(range(8000))
    np.testing.assert_array_equal(rows[order], np.arange(8000 * 16, dtype="float32").reshape(8000, 16) + 0.5)
    asked = [question for args in pulls for question in args[4] if question.what == "rows"]
    assert sorted(bucket for each in asked for bucket in range(each.first, each.first + each.count)) == list(
        range(BUCKETS)
    )
    assert len(asked) == pytest.approx(8000 * 72 / (64 << 10), abs=len(table.variables) + 1)


def test_it_is_cut_to_a_number_of_rows(strategy, table):
    """By a round of all processes; in cross-replica context alone."""
    table.scatter_add(ps.IndexedSlices(np.ones((MIN_CAPACITY, 2), "float32"), np.arange(100, 100 + MIN_CAPACITY)))
    assert table.size() == MIN_CAPACITY + 4
    table.restrict(MIN_CAPACITY)
    assert 0.85 * MIN_CAPACITY < table.size() <= MIN_CAPACITY
    refused(RuntimeError, "restrict", lambda: strategy.run(lambda: table.restrict(0)))
    table.restrict(0)
    assert table.size() == 0
    for rows, error in ((1, ValueError), (-1, ValueError), (1 << 40, ValueError), (0.5, TypeError)):
        with pytest.raises(error):
            table.restrict(rows)


SCATTERS = {
    "scatter_add": (lambda old, given: old + given.sum(), 2),
    "scatter_sub": (lambda old, given: old - given.sum(), 2),
    "scatter_update": (lambda old, given: given[-1], 0),
    "scatter_min": (lambda old, given: min(old, given.min()), 0),
    "scatter_max": (lambda old, given: max(old, given.max()), 0),
    "scatter_mul": (lambda old, given: old * given.prod(), 0),
    "scatter_div": (lambda old, given: old / given.prod(), 0),
}


@pytest.mark.parametrize("how", SCATTERS)
def test_rows_are_changed_by_their_keys(strategy, table, how):
    """A key that comes several times, and one that has no row yet, which then has one."""
    given = np.repeat(np.array([[2.0], [4.0], [8.0], [0.25]], "float32"), 2, axis=1)
    keys = [BIG, 50, BIG, 12]
    assert getattr(table, how)(ps.IndexedSlices(given, keys)) is table
    for key, old in ((BIG, 2.0), (50, 0.5), (12, 3.0), (NEW, 0.0)):
        own = given[[k == key for k in keys], 0]
        assert numbers_of(table.lookup(key)) == (SCATTERS[how][0](old, own) if own.size else old)
    assert table.size() == 5


def test_rows_that_do_not_fit_are_refused(strategy, table):
    """Of another width, of another table, of no numbers; nothing changes. Nor are rows changed in one of several
    replicas: each may have others, and there is no aggregation."""
    other = made(strategy)
    rows = table.lookup(KEYS)
    with pytest.raises(ValueError, match=f"rows of table {table.name!r} were passed to table {other.name!r}"):
        other.scatter_add(rows.gradient(rows.values))
    with pytest.raises(ValueError, match=rf"{table.name!r}.*: each row has shape \(3,\), but must have \(2,\)"):
        table.scatter_add(ps.IndexedSlices(np.ones((1, 3), "float32"), [1]))
    refused(TypeError, "", lambda: table.scatter_add(ps.IndexedSlices(np.ones((1, 2), "complex64"), [1])))
    assert (table.size(), other.size()) == (4, 0)
    one = ps.IndexedSlices(np.ones((1, 2), "float32"), [BIG])
    if len(strategy.extended.worker_devices) > 1:
        with pytest.raises(ValueError, match=f"scatter_add of table {table.name!r} was called in replica context"):
            strategy.run(lambda: table.scatter_add(one))
    else:
        strategy.run(lambda: table.scatter_add(one))
    assert numbers_of(table.lookup(BIG)) == 3.0 - (len(strategy.extended.worker_devices) > 1)


def test_an_update_runs_on_the_rows_of_a_gradient(strategy, table):
    """Those of all replicas, with a slot beside each row; rows that no gradient has stay. A mean is over replicas."""
    count = len(strategy.extended.worker_devices)
    with strategy.scope(), strategy.extended.colocate_vars_with(table):
        slot = ps.Variable(np.full((1, 2), 0.25, "float32"), trainable=False, name=f"{table.name}/slot")
        rate = ps.Variable(np.float32(0.5), trainable=False, name=f"{table.name}/rate")
    assert type(slot) is TableVariable
    assert slot.sharding == table.sharding
    assert rate.numpy() == 0.5

    def heavy_ball(v, gradient, m, rate):
        m.assign(rate * m + gradient)
        v.assign_sub(m)
        return v

    def gradient(replica):
        return ps.IndexedSlices(np.full((3, 2), replica + 1, "float32"), [BIG, 70 + replica, BIG])

    with strategy.scope():
        reduced = strategy.extended.reduce_to("sum", by_replica(strategy, gradient), table)
        assert strategy.extended.update(table, ps.lazy_update(heavy_ball), (reduced, slot, rate)) is table
    total = 2 * sum(range(1, count + 1))
    assert numbers_of(table.lookup([BIG, NEW])) == [2.0 - (0.125 + total), 0.0]
    assert numbers_of(slot.lookup([BIG, NEW, 1000])) == [0.125 + total, 0.25, 0.25]
    assert numbers_of(table.lookup([70])) == [0.5 - (0.125 + 1)]
    assert table.size() == slot.size() == 4 + count
    ones = by_replica(strategy, lambda replica: ps.IndexedSlices(np.ones((1, 2), "float32"), [NEW]))
    with strategy.scope():
        reduced = strategy.extended.reduce_to("mean", ones, table)
        strategy.extended.update(table, lambda v, g: v.assign_add(g), (reduced,))
    assert numbers_of(table.lookup(NEW)) == 1.0


REFUSED = {
    "momentum": (lambda v, g: v.assign(0.5 * v + g), "pass ps.exact_update"),
    "the whole": (lambda v, g: v.assign_sub(g * np.sum(g)), "sum works neither elementwise"),
    "a result": (lambda v, g: np.max(g), "cannot return results"),
    "no rows": (lambda v, g: v.assign(v * 0.0), "it got none"),
}


def test_an_update_that_needs_the_whole_is_an_error(strategy, table):
    """Of other variables it makes an array, with a warning; a table has none, and says what to do. It is updated with
    what lies beside it: another table is cut into other rows. `exactly` makes up what a row has missed when it is
    looked up."""
    extended, other = strategy.extended, made(strategy)

    def given(key, value=1.0):
        rows = by_replica(strategy, lambda _: ps.IndexedSlices(np.full((1, 2), value, "float32"), [key]))
        return extended.reduce_to("sum", rows, table)

    for how, (fn, words) in REFUSED.items():
        call = (lambda v, fn=fn: fn(v, None)) if how == "no rows" else fn
        words = f"table {table.name!r} must run on the rows of one gradient.*{words}"
        with strategy.scope():
            reduced = given(NEW)
            with pytest.raises(ps.errors.ProgramError, match=words):
                extended.update(table, call, () if how == "no rows" else (reduced,))
            strategy.backend.drop()
        assert numbers_of(table.lookup(NEW)) == 0.0
    with strategy.scope():
        with pytest.raises((ValueError, ps.errors.LocalityError), match="is split differently from"):
            extended.update(table, ps.lazy_update(lambda v, g, o: v.assign_add(g * o)), (given(NEW), other))
        strategy.backend.drop()
        with extended.colocate_vars_with(table), pytest.raises(ValueError, match="is a slot of table"):
            ps.Variable(np.array([[1.0, 2.0]], "float32"), name="uneven")
    decay = ps.exact_update(lambda v, g: v.assign(0.5 * v + g))
    for key in (BIG, NEW, NEW):
        with strategy.scope():
            extended.update(table, decay, (given(key, 0.0),))
    assert numbers_of(table.lookup(BIG)) == 0.25


def test_rows_by_keys_stay_on_the_servers(strategy, table):
    """They are reduced for their table alone, and nobody can look at the sum."""
    rows = table.lookup(KEYS)
    gradient = rows.gradient(np.ones_like(rows.values))
    with strategy.scope():
        refused(
            TypeError,
            f"of table {table.name!r} can be reduced only to that table; use",
            lambda: strategy.reduce("mean", gradient, axis=None),
            lambda: strategy.extended.reduce_to("mean", gradient, strategy.extended.worker_devices[0]),
            lambda: strategy.extended.reduce_to("mean", gradient, strategy.extended.parameter_devices[0]),
        )
        reduced = strategy.extended.reduce_to("mean", gradient, table)
        refused(TypeError, "stay on its servers", lambda: np.asarray(reduced))
        strategy.backend.drop()
    with pytest.raises(TypeError, match="only to that table; use"):
        strategy.run(lambda: ps.get_replica_context().all_reduce("sum", gradient))
    with strategy.scope():
        plain = ps.Variable(np.zeros((5, 2), "float32"))
        with pytest.raises(ValueError, match=rf"{plain.name!r}.*expected an array"):
            strategy.extended.reduce_to("mean", gradient, plain)


def test_filters_count_how_often_a_key_was_asked_for(strategy):
    """Not how many processes there are, or replicas: a lookup of a key three times counts three times."""
    table = made(strategy, admission=de.CounterFilter(3), refused="zeros")
    optimizer = ps.optimizers.SGD(1.0)
    count = len(strategy.extended.worker_devices)

    def step(*keys):
        rows = table.lookup(np.array(keys))
        optimizer.apply_gradients([(rows.gradient(np.ones_like(rows.values)), table)])

    assert numbers_of(table.lookup([1, 2])) == [0.0, 0.0]
    strategy.run(step, (1, 2, 1, 1))
    assert table.keys().tolist() == [1]
    assert numbers_of(table.lookup([1, 2])) == [0.5 - count, 0.0]
    for _ in range(3):
        strategy.run(step, (2,))
    assert sorted(table.keys().tolist()) == [1, 2]


def test_a_limit_is_an_error_that_changes_nothing(strategy):
    """A round that touches more rows than the table may have is refused; the next one is made."""
    table = made(strategy, capacity=MIN_CAPACITY, eviction=de.LRU())
    with pytest.raises(ps.errors.MemoryLimit, match=r"uses \d+ rows of a table that can have 8192"):
        table.scatter_add(ps.IndexedSlices(np.ones((40_000, 2), "float32"), np.arange(40_000)))
    assert table.size() == 0
    table.scatter_add(ps.IndexedSlices(np.ones((10, 2), "float32"), np.arange(10)))
    assert table.size() == 10


def test_the_time_goes_with_updates_of_rows_that_live_for_a_time(strategy, calls_of):
    """And with nothing else. Each part makes each round, also if no key of it was given: their clocks go together."""
    mortal, immortal = made(strategy, eviction=de.TTL("7d")), made(strategy)
    told = calls_of("push", *servers_of(strategy))
    rows = ps.IndexedSlices(np.ones((1, 2), "float32"), [1])
    immortal.scatter_add(rows)
    assert {said.seconds for said, *_ in told} == {0}
    told.clear()
    mortal.scatter_add(rows)
    assert min(said.seconds for said, *_ in told) > 1_700_000_000
    assert len(told) == len(mortal.variables)
    assert {said.round for said, *_ in told} == {told[0][0].round}
    assert all(said.weights == (1.0,) * len(told) for said, *_ in told)
    assert all(sorted(said.rows) == [0] * (len(told) - 1) + [1] for said, *_ in told)


# ---- Groups: many small tables in one, each used as a table of its own ----

NAMES = ("user", "item", "genre")
LAST = (1 << KEY_BITS) - 1


@pytest.fixture
def group(strategy):
    """Three tables of rows of two zeros, under a name that no other has."""
    with strategy.scope():
        return de.group(NAMES, dim=2, name=f"group{next(numbers)}", initializer=0)


def ones(n):
    return np.ones((n, 2), "float32")


def test_a_group_is_a_mapping(strategy, group):
    """From names to tables, in their order; who asks for it again gets it. A checkpoint tracks the one table, by the
    shortest path to the group, or to one of its tables."""
    assert list(group) == list(NAMES)
    assert len(group) == 3
    assert all(type(view) is TableView for view in group.values())
    assert [view.name for view in group.values()] == list(NAMES)
    with strategy.scope():
        assert de.group(dict.fromkeys(NAMES), dim=2, name=group.table.name, initializer=0) is group
        for other in (("item", "user", "genre"), ("user", "item")):
            with pytest.raises(ValueError, match="with the names"):
                de.group(other, dim=2, name=group.table.name, initializer=0)
        refused(ValueError, "shape", lambda: de.group(NAMES, dim=3, name=group.table.name, initializer=0))
    assert "'user' of <ps.dynamic_embedding.Variable" in repr(group["user"])
    assert (group["user"].dim, group["user"].shape[1:], group["user"].dtype) == (2, (2,), np.float32)
    assert explore({"tables": group}).variables == {"tables": group.table}
    found = explore({"model": {"user": group["user"], "item": group["item"]}}).variables
    assert found == {"model/user": group.table}


def test_a_key_is_another_row_in_each(group):
    """The least and the greatest too; what is not from 0 to 2**48 - 1 is refused by name. All tables have so many rows
    at most together."""
    for number, view in enumerate(group.values()):
        view.scatter_add(ps.IndexedSlices(ones(3) * (number + 1), [0, 7, LAST]))
    for number, view in enumerate(group.values()):
        rows = view.lookup([[7, 0], [LAST, 8]])
        assert np.asarray(rows)[..., 0].tolist() == [[number + 1.0] * 2, [number + 1.0, 0.0]]
        assert sorted(rows.ids.tolist()) == [0, 7, 8, LAST]
        assert sorted(view.keys().tolist()) == [0, 7, LAST]
        assert view.size() == 3
    assert group.size() == 9
    for bad in ([-1], [LAST + 1], np.array([1 << 63], np.uint64)):
        with pytest.raises(ValueError, match=rf"table 'item'.*key {bad[0]} at position 0 is not from 0 to 2\*\*48 - 1"):
            group["item"].lookup(bad)
    keys, rows = group.export()["item"]
    assert sorted(keys.tolist()) == [0, 7, LAST]
    assert np.unique(rows).tolist() == [2.0]
    assert group["item"].export()[0].tolist() == keys.tolist()
    group.restrict(0)
    assert group.size() == 0


def test_one_call_looks_up_rows_of_all(strategy, group, calls_of):
    """For each server that has some; of each table it gives what its own lookup gives."""
    for number, view in enumerate(group.values()):
        view.scatter_add(ps.IndexedSlices(np.arange(60.0, dtype="f4").reshape(30, 2) + 100 * number, np.arange(30)))
    strategy.backend.settle()
    pulls = calls_of("pull", *servers_of(strategy))
    asked = {"genre": [[3, 29], [3, 50]], "user": np.arange(0, 30, 3), "item": []}
    found = group.lookup(asked)
    assert len(pulls) == len(group.table.variables)
    assert list(found) == list(asked)
    for name, rows in found.items():
        own = group[name].lookup(asked[name])
        assert rows.ids.tolist() == own.ids.tolist()
        np.testing.assert_array_equal(np.asarray(rows), np.asarray(own))
    assert group.lookup({}) == {}
    refused(KeyError, "", lambda: group.lookup({"artist": [1]}))


def test_a_step_of_all_is_one_reduction(strategy, group, calls_of):
    """Of each part; each table's rows get their gradient, summed over the replicas, and counts of their keys. Gradients
    are plain rows, or per-replica values in cross-replica context, as of tables of their own."""
    with strategy.scope():
        optimizer = ps.optimizers.SGD(1.0)
        dense = ps.Variable(np.zeros(2, "float32"))
        optimizer.build([group["user"], dense, group["item"]])
    sent = calls_of("send", strategy.backend._exchange)

    def step(replica):
        rows = group.lookup({"item": [4, 4, replica], "user": [4, LAST]})
        pairs = [
            (rows[name].gradient(ones(len(rows[name].ids)) * w), group[name]) for name, w in (("item", 2), ("user", 1))
        ]
        optimizer.apply_gradients([pairs[0], (ones(1)[0], dense), pairs[1]])

    in_replicas(strategy, step)
    (plan,) = {out.plan.id: out.plan for out, *_ in sent}.values()
    assert [reduction.form for reduction in plan.reductions] == ["keys"] * len(group.table.variables) + ["dense"]
    count = replicas(strategy)
    assert np.asarray(group["item"].lookup([4, 0, 9]))[:, 0].tolist() == [-2.0 * count, -2.0, 0.0]
    assert np.asarray(group["user"].lookup([4, LAST, 0]))[:, 0].tolist() == [-count, -count, 0.0]
    assert group["genre"].size() == 0
    assert dense.numpy().tolist() == [-count] * 2
    rows = by_replica(strategy, lambda replica: ps.IndexedSlices(ones(3), [5, replica + 20, 5]))
    with strategy.scope():
        optimizer.apply_gradients([(rows, group[name]) for name in NAMES])
    for view in group.values():
        assert np.asarray(view.lookup([5, 20]))[:, 0].tolist() == [-2.0 * count, -1.0]


BAD = {
    "twice": (lambda g: [(ps.IndexedSlices(ones(1), [1]), g["user"])] * 2, "several pairs"),
    "None": (lambda g: [(None, g["user"])], "table 'user' is None"),
    "an array": (lambda g: [(ones(1), g["user"])], "table 'user' is ndarray"),
    "of another": (lambda g: [(g["item"].lookup([3]).gradient(ones(1)), g["user"])], "rows of other tables"),
    "no key": (lambda g: [(ps.IndexedSlices(ones(1), [-1]), g["user"])], "key -1"),
}


@pytest.mark.parametrize("what", BAD)
def test_gradients_of_a_group_that_are_none(strategy, group, what):
    """Each is an error that names the table, and changes nothing."""
    make, words = BAD[what]
    with pytest.raises(ValueError, match=words):
        in_replicas(strategy, lambda replica: ps.optimizers.SGD(1.0).apply_gradients(make(group)))
    assert group.size() == 0


def test_a_view_is_no_array(group):
    """As a table is none; bags, and lookups by TensorFlow's names, take it."""
    for use in (np.asarray, len, lambda v: v * 2, lambda v: v.numpy()):
        with pytest.raises(TypeError, match="table 'item' has no size"):
            use(group["item"])
    group["item"].scatter_update(ps.IndexedSlices(ones(1) * 3, [4]))
    assert np.asarray(ps.nn.embedding_lookup(group["item"], [4]))[:, 0].tolist() == [3.0]
    bags = ps.nn.embedding_lookup_sparse(group["item"], [[4, 4], []], None, "sum")
    assert np.asarray(bags)[:, 0].tolist() == [6.0, 0.0]
    assert bags.gradient(ones(2)).counts.tolist() == [2]
