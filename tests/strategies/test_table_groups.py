"""Many small tables in one: each is used as a table of its own, and the step of all is one reduction."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import psclient as ps
from psclient._src.variables.table_views import KEY_BITS, TableView
from psclient.train.object_graph import explore
from tests.kit.strategies import by_replica, in_replicas, kinds, replicas

de = ps.dynamic_embedding
NAMES = ("user", "item", "genre")
LAST = (1 << KEY_BITS) - 1
counter = itertools.count()


pytestmark = kinds("servers-2x2", soak=["embedded-1"])


@pytest.fixture
def group(strategy):
    """Three tables of rows of two zeros, under a name that no other has."""
    with strategy.scope():
        return de.group(NAMES, dim=2, name=f"group{next(counter)}", initializer=0)


def ones(n):
    return np.ones((n, 2), "float32")


def pulls_of(strategy, calls_of):
    """The pulls that are made, one item for each."""
    return calls_of("pull", *strategy.backend.reader._reads._session.servers)


def test_it_is_a_mapping(strategy, group):
    """From names to tables, in their order; who asks for it again gets it."""
    assert list(group) == list(NAMES)
    assert len(group) == 3
    assert all(type(view) is TableView for view in group.values())
    assert [view.name for view in group.values()] == list(NAMES)
    with strategy.scope():
        assert de.group(dict.fromkeys(NAMES), dim=2, name=group.table.name, initializer=0) is group
        for other in (("item", "user", "genre"), ("user", "item")):
            with pytest.raises(ValueError, match="with the names"):
                de.group(other, dim=2, name=group.table.name, initializer=0)
        with pytest.raises(ValueError, match="shape"):
            de.group(NAMES, dim=3, name=group.table.name, initializer=0)
    assert "'user' of <ps.dynamic_embedding.Variable" in repr(group["user"])
    assert (group["user"].dim, group["user"].shape[1:], group["user"].dtype) == (2, (2,), np.float32)


def test_a_key_is_another_row_in_each(group):
    """The least and the greatest too; what is not from 0 to 2**48 - 1 is refused by name."""
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
        with pytest.raises(ValueError, match=rf"table 'item'.*key {bad[0]} at place 0 is not from 0 to 2\*\*48 - 1"):
            group["item"].lookup(bad)
    keys, rows = group.export()["item"]
    assert sorted(keys.tolist()) == [0, 7, LAST]
    assert np.unique(rows).tolist() == [2.0]
    assert group["item"].export()[0].tolist() == keys.tolist()


def test_one_call_looks_up_rows_of_all(strategy, group, calls_of):
    """For each server that has some; of each table it gives what its own lookup gives."""
    for number, view in enumerate(group.values()):
        view.scatter_add(ps.IndexedSlices(np.arange(60.0, dtype="f4").reshape(30, 2) + 100 * number, np.arange(30)))
    strategy.backend.settle()
    pulls = pulls_of(strategy, calls_of)
    asked = {"genre": [[3, 29], [3, 50]], "user": np.arange(0, 30, 3), "item": []}
    found = group.lookup(asked)
    assert len(pulls) == len(group.table.variables)
    assert list(found) == list(asked)
    for name, rows in found.items():
        own = group[name].lookup(asked[name])
        assert rows.ids.tolist() == own.ids.tolist()
        np.testing.assert_array_equal(np.asarray(rows), np.asarray(own))
    assert group.lookup({}) == {}
    with pytest.raises(KeyError):
        group.lookup({"artist": [1]})


def test_a_step_of_all_is_one_reduction(strategy, group, calls_of):
    """Of each part; each table's rows get their gradient, summed over the replicas, and counts of their keys."""
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


def test_gradients_are_plain_rows_or_per_replica_values(strategy, group):
    """As of tables of their own."""
    optimizer = ps.optimizers.SGD(1.0)
    given = {name: by_replica(strategy, lambda replica: ps.IndexedSlices(ones(3), [5, replica, 5])) for name in NAMES}
    with strategy.scope():
        optimizer.apply_gradients([(given[name], group[name]) for name in NAMES])
    count = replicas(strategy)
    for view in group.values():
        assert np.asarray(view.lookup([5, 0]))[:, 0].tolist() == [-2.0 * count, -1.0]


BAD = {
    "twice": (lambda g: [(ps.IndexedSlices(ones(1), [1]), g["user"])] * 2, "stands in several pairs"),
    "None": (lambda g: [(None, g["user"])], "table 'user' is None"),
    "an array": (lambda g: [(ones(1), g["user"])], "table 'user' is ndarray"),
    "of another": (lambda g: [(g["item"].lookup([3]).gradient(ones(1)), g["user"])], "rows of other tables"),
    "no key": (lambda g: [(ps.IndexedSlices(ones(1), [-1]), g["user"])], "key -1"),
}


@pytest.mark.parametrize("what", BAD)
def test_gradients_that_are_none(strategy, group, what):
    """Each is an error that names the table, and changes nothing."""
    make, words = BAD[what]
    with pytest.raises(ValueError, match=words):
        in_replicas(strategy, lambda replica: ps.optimizers.SGD(1.0).apply_gradients(make(group)))
    assert group.size() == 0


def test_rows_of_all_come_with_the_round_before(strategy, group, calls_of):
    """Each names its own, and keeps what the others have named."""
    group.look_ahead({"item": [4, 9], "user": [4]})
    group["genre"].look_ahead([1], [2, 1])
    group["user"].look_ahead([5, 4, LAST])
    group["user"].scatter_add(ps.IndexedSlices(ones(1), [4]))
    strategy.backend.settle()
    pulls = pulls_of(strategy, calls_of)
    assert np.asarray(group["user"].lookup([4, LAST]))[:, 0].tolist() == [1.0, 0.0]
    found = group.lookup({"item": [9, 4], "genre": [1, 2], "user": [5]})
    assert [np.asarray(rows)[:, 0].tolist() for rows in found.values()] == [[0.0, 0.0], [0.0, 0.0], [0.0]]
    assert pulls == []


def test_a_dataset_names_the_rows_of_its_next_batch(strategy, group):
    """`InputOptions(lookups=...)` takes tables of a group."""
    data = ps.ArrayDataset({"u": np.arange(12), "i": np.arange(12) % 2}).batch(4)
    lookups = {group["user"]: lambda batch: batch["u"], group["item"]: lambda batch: batch["i"]}
    optimizer = ps.optimizers.SGD(1.0)

    def step(batch):
        rows = group.lookup({"user": batch["u"], "item": batch["i"]})
        optimizer.apply_gradients([(found.gradient(ones(len(found.ids))), group[name]) for name, found in rows.items()])

    for batch in strategy.experimental_distribute_dataset(data, ps.InputOptions(lookups=lookups)):
        strategy.run(step, (batch,))
    assert np.asarray(group["user"].lookup(np.arange(13)))[:, 0].tolist() == [-1.0] * 12 + [0.0]
    assert sorted(group["item"].keys().tolist()) == [0, 1]


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


def test_a_checkpoint_tracks_the_one_table(group):
    """By the shortest path to the group, or to one of its tables."""
    assert explore({"tables": group}).variables == {"tables": group.table}
    assert explore({"model": {"user": group["user"], "item": group["item"]}}).variables == {"model/user": group.table}


def test_it_is_cut_as_a_whole(group):
    """All tables have so many rows at most together."""
    group["user"].scatter_add(ps.IndexedSlices(ones(3), [1, 2, 3]))
    group.restrict(0)
    assert group.size() == 0
