"""Rows of variables on every kind of strategy: lookups, and changes by their places, in each context."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import psclient as ps
from tests.kit.cases import once, pairwise
from tests.kit.strategies import USUAL, copies, in_replicas, kind_of, refused, replicas, variable

TABLE = np.arange(10, dtype="float32").reshape(5, 2)


def test_rows_are_read_in_each_context(strategy):
    """In replica context each replica looks up its own, across replicas everybody the same; outside as well. What `run`
    gives for a variable among its arguments is looked up as the variable; bags are looked up alike. A lookup after an
    update sees it."""
    v = variable(strategy, TABLE)
    found = in_replicas(strategy, lambda replica: v.lookup([replica % 5, 0]).numpy())
    assert [rows.tolist() for rows in found] == [TABLE[[n % 5, 0]].tolist() for n in range(replicas(strategy))]
    with strategy.scope():
        assert v.sparse_read([[4, 1]]).tolist() == [TABLE[[4, 1]].tolist()]
    assert v.gather(3).tolist() == TABLE[3].tolist()
    found = in_replicas(strategy, lambda replica, own: own.lookup([4, 4]).numpy(), v)
    assert [rows.tolist() for rows in found] == [TABLE[[4, 4]].tolist()] * replicas(strategy)
    look = lambda first: np.asarray(ps.nn.embedding_lookup_sparse(v, [[first, 1], []], None, "sum")).tolist()  # noqa: E731
    expected = [[(TABLE[n % 5] + TABLE[1]).tolist(), [0, 0]] for n in range(replicas(strategy))]
    assert in_replicas(strategy, lambda replica: look(replica % 5)) == tuple(expected)
    with strategy.scope():
        assert look(0) == expected[0]
    v.assign_add(np.ones((5, 2)))
    assert v.sparse_read(2).tolist() == (TABLE[2] + 1).tolist()


def test_an_id_that_is_no_row_names_who_asked(strategy):
    """The variable, and the replica's device, but where there is only one."""
    v = variable(strategy, TABLE)
    last = replicas(strategy) - 1

    def step(replica):
        if replica == last:
            v.lookup([0, 7])

    with pytest.raises(ValueError, match="id 7 at index 1 is not a row of 5") as caught:
        in_replicas(strategy, step)
    assert repr(v.name) in str(caught.value)
    assert (strategy.extended.worker_devices[last] in str(caught.value)) == (kind_of(strategy) != "default")


ROW_USES = {
    "lookup": lambda v: v.lookup([1]),
    "embedding_lookup": lambda v: ps.nn.embedding_lookup(v, [1]),
    "embedding_lookup_sparse": lambda v: ps.nn.embedding_lookup_sparse(v, [[1]], None),
    "scatter_add": lambda v: v.scatter_add(TWICE),
}


@pytest.mark.parametrize("use", ROW_USES)
def test_an_update_on_a_server_has_no_rows(strategy, use):
    """Neither of the variable itself, nor of what stands for it there; copies that are here may be read and changed."""
    for of_all in (True, False):
        v, found = variable(strategy, TABLE), []

        def update(own, v=v, found=found, of_all=of_all):
            own.assign(TABLE * 2)
            found.append(np.array(ROW_USES[use](v if of_all else own)).tolist())

        if kind_of(strategy) == "embedded":
            with pytest.raises((RuntimeError, ps.errors.ProgramError), match=r"in an update function|scatter_add"):
                strategy.extended.update(v, update)
            assert (found, v.numpy().tolist()) == ([], TABLE.tolist())
        else:
            strategy.extended.update(v, update)
            scattered = (TABLE * 2 + np.array([[0, 0]] * 4 + [[3, 3]])).tolist()
            assert found == [scattered if use == "scatter_add" else (TABLE[[1]] * 2).tolist()] * copies(strategy, v)


SCATTERED = {
    "scatter_add": [[0, 1], [2, 3], [4, 5], [6, 7], [11, 12]],
    "scatter_sub": [[0, 1], [2, 3], [4, 5], [6, 7], [5, 6]],
    "scatter_update": [[0, 1], [2, 3], [4, 5], [6, 7], [2, 2]],
    "scatter_min": [[0, 1], [2, 3], [4, 5], [6, 7], [1, 1]],
    "scatter_max": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]],
    "scatter_mul": [[0, 1], [2, 3], [4, 5], [6, 7], [16, 18]],
    "scatter_div": [[0, 1], [2, 3], [4, 5], [6, 7], [4, 4.5]],
}
"""What becomes of `TABLE` by the rows 1 and 2, in turn, for row 4."""


TWICE = ps.IndexedSlices(np.array([[1, 1], [2, 2]], "float32"), [4, 4])
"""Two rows for one place."""


def each_copy(strategy, v):
    return [np.asarray(copy).tolist() for copy in strategy.experimental_local_results(v)]


@pytest.mark.parametrize("how", SCATTERED)
def test_rows_are_scattered_across_replicas(strategy, how):
    """In the scope, or outside, which is the same; each copy gets the same; what was read stays, and is read-only.
    Within another strategy's scope it is not scattered, and nothing is changed."""
    v = variable(strategy, TABLE)
    before = v.numpy()
    with strategy.scope() if len(how) % 2 else contextlib.nullcontext():
        assert getattr(v, how)(TWICE) is v
    assert each_copy(strategy, v) == [SCATTERED[how]] * copies(strategy, v)
    assert before.tolist() == TABLE.tolist()
    assert not v.numpy().flags.writeable
    with ps.MirroredStrategy(devices=["cpu:0"]) as other, other.scope():
        if kind_of(strategy) != "default":  # whose variables may be assigned everywhere
            refused(RuntimeError, "was used in the scope of another strategy", lambda: getattr(v, how)(TWICE))
    assert v.numpy().tolist() == SCATTERED[how]


@once(strategy=("mirrored-1", "mirrored-2", "servers-2x2"), how=SCATTERED)
def test_one_replica_scatters_its_rows(strategy, how):
    """Several may differ: where the sum of rows has no meaning, and without an aggregation, they are refused."""
    v = variable(strategy, TABLE)
    if replicas(strategy) == 1:
        in_replicas(strategy, lambda replica: getattr(v, how)(TWICE))
        assert v.numpy().tolist() == SCATTERED[how]
        return
    with pytest.raises(ValueError, match=f"{how} of variable {v.name!r} was called in replica context"):
        in_replicas(strategy, lambda replica: getattr(v, how)(TWICE))
    summed = variable(strategy, TABLE, aggregation=ps.VariableAggregation.SUM)
    if how not in ("scatter_add", "scatter_sub"):
        said = "call it in cross-replica context, with rows that are the same in every process"
        refused(ValueError, said, lambda: in_replicas(strategy, lambda replica: getattr(summed, how)(TWICE)))
        assert summed.numpy().tolist() == TABLE.tolist()


@pairwise(strategy=USUAL, aggregation=["SUM", "MEAN", "ONLY_FIRST_REPLICA"], how=["scatter_add", "scatter_sub"])
def test_replicas_rows_are_aggregated(strategy, how, aggregation):
    """Each replica has a place of its own beside one that all have."""
    v = variable(strategy, TABLE, aggregation=aggregation)
    count = replicas(strategy)

    def step(replica):
        rows = np.array([[1, 1], [replica + 1, 0]], "float32")
        getattr(v, how)(ps.IndexedSlices(rows, [replica % 5, 4]))

    in_replicas(strategy, step)
    delta = np.zeros((5, 2), "float32")
    for replica in range(count if aggregation != "ONLY_FIRST_REPLICA" else 1):
        delta[replica] += 1
        delta[4, 0] += replica + 1
    delta /= (count if aggregation == "MEAN" else 1) * (1 if how == "scatter_add" else -1)
    assert each_copy(strategy, v) == [(TABLE + delta).tolist()] * copies(strategy, v)


def test_an_on_read_variable_s_replica_scatters_its_copy(strategy):
    """And looks up its rows, or those of the aggregate across replicas."""
    options = {"synchronization": ps.VariableSynchronization.ON_READ}
    v = variable(strategy, np.zeros((2, 1), "float32"), aggregation="SUM", **options)
    in_replicas(strategy, lambda r: v.scatter_add(ps.IndexedSlices(np.full((1, 1), r + 1, "float32"), [1])))
    count = replicas(strategy)
    found = in_replicas(strategy, lambda replica: v.sparse_read([1]).tolist())
    assert (found, v.sparse_read([1]).tolist()) == (tuple([[n + 1]] for n in range(count)), [[sum(range(count + 1))]])
    assert v.numpy().tolist() == [[0], [sum(range(count + 1))]]
