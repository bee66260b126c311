"""Names that TensorFlow gave to the same things before and after: each does what the other does."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import kind_of, replicas, variable


def test_unwrap_gives_local_results(strategy):
    """The name of r1.x: a tuple of the replicas' values, or of the value."""
    n = replicas(strategy)
    value = strategy.experimental_distribute_values_from_function(lambda c: np.float32(c.replica_id_in_sync_group))
    assert strategy.unwrap(value) == strategy.experimental_local_results(value) == tuple(map(float, range(n)))
    assert strategy.unwrap("x") == ("x",)


def test_a_function_distributes_datasets_by_its_newer_name(strategy):
    """The name of r2.4: one dataset of this worker, a batch for each replica, options included."""
    n = replicas(strategy)
    told = []

    def dataset_fn(context):
        told.append(context)
        return ps.ArrayDataset(np.arange(4.0 * n)).batch(2)

    data = strategy.distribute_datasets_from_function(dataset_fn, options=ps.InputOptions())
    found = [[x.tolist() for x in strategy.experimental_local_results(batch)] for batch in data]
    assert found == [[[2.0 * (n * k + i), 2.0 * (n * k + i) + 1] for i in range(n)] for k in range(2)]
    assert told == [ps.InputContext(1, 0, n)]


# ---- experimental_set_strategy ----


@pytest.fixture
def unset():
    """A test that fails leaves no strategy behind."""
    yield
    if ps.has_strategy():
        ps.experimental_set_strategy(None)


def test_a_strategy_is_set_and_left(strategy, unset):
    """As within its scope, until None is set; variables are its own, and its methods are called as always."""
    if kind_of(strategy) == "default":
        pytest.skip("the default strategy is what there is without")
    ps.experimental_set_strategy(strategy)
    assert ps.get_strategy() is strategy
    assert ps.in_cross_replica_context()
    v = ps.Variable(np.zeros(2, "float32"), name="set")
    assert strategy.extended.variable_created_in_scope(v)
    with strategy.scope():
        v.assign_add(np.ones(2))
    strategy.run(lambda: ps.get_replica_context().all_reduce("sum", np.ones(1)))
    ps.experimental_set_strategy(strategy)
    assert (ps.get_strategy() is strategy, v.numpy().tolist()) == (True, [1.0, 1.0])
    ps.experimental_set_strategy(None)
    assert not ps.has_strategy()
    ps.experimental_set_strategy(None)
    assert ps.get_replica_context() is not None


def test_what_was_begun_is_done_when_it_is_left(strategy, unset):
    """As at the end of a scope: an update that nobody has looked at is there."""
    v = variable(strategy)
    ps.experimental_set_strategy(strategy)
    v.assign_add(np.ones(3))
    ps.experimental_set_strategy(None)
    assert v.numpy().tolist() == [1.0] * 3


def test_one_strategy_after_another(strategy, unset):
    """Setting leaves the one that was set."""
    with ps.MirroredStrategy(["cpu:0"]) as other:
        ps.experimental_set_strategy(other)
        ps.experimental_set_strategy(strategy)
        assert ps.get_strategy() is strategy
        ps.experimental_set_strategy(other)
        assert ps.get_strategy() is other
        ps.experimental_set_strategy(None)
        assert not ps.has_strategy()


def test_a_thread_sets_its_own(strategy, unset):
    """Scopes are per thread, and so is this."""
    ps.experimental_set_strategy(strategy)
    found = []
    thread = threading.Thread(target=lambda: found.append(ps.has_strategy()))
    thread.start()
    thread.join()
    assert found == [False]
    ps.experimental_set_strategy(None)


def test_inside_of_a_scope_nothing_is_set(strategy, unset):
    """Nor in a replica's function: the scope that was entered otherwise has to be left first; all stays as it was."""
    if kind_of(strategy) == "default":
        pytest.skip("the default strategy's scope changes nothing")
    says = "called inside of a strategy's scope; leave that scope first"
    with strategy.scope():
        for value in (strategy, None):
            with pytest.raises(RuntimeError, match=says):
                ps.experimental_set_strategy(value)
        assert ps.get_strategy() is strategy
    ps.experimental_set_strategy(strategy)
    with strategy.scope(), pytest.raises(RuntimeError, match=says):
        ps.experimental_set_strategy(None)
    with pytest.raises(RuntimeError, match=says):
        strategy.run(lambda: ps.experimental_set_strategy(None))
    assert ps.get_strategy() is strategy
    ps.experimental_set_strategy(None)
    with pytest.raises(TypeError, match="a str is no strategy; give one, or None"):
        ps.experimental_set_strategy("mirrored")


def test_a_strategy_that_is_closed_can_be_left(unset):
    """Its end does not take the thread's way out."""
    strategy = ps.MirroredStrategy(["cpu:0"])
    ps.experimental_set_strategy(strategy)
    strategy.close()
    ps.experimental_set_strategy(None)
    assert not ps.has_strategy()
