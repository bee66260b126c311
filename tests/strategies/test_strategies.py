"""Strategies: one of one's own, as the documents tell its author, whose logic is in a subclass of `StrategyExtended`;
one that is set without a scope; logical devices."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.strategies import by_replica, copies, in_replicas, kind_of, refused, replicas, variable

here = ps.get_replica_context


class Noted(ps.compat.v1.StrategyExtended):
    """Notes what it is asked for."""

    def __init__(self, container_strategy, backend=None):
        super().__init__(container_strategy, backend)
        self.asked = []


def noting(name):
    def method(self, *args, **keys):
        self.asked.append(name)
        return getattr(super(Noted, self), name)(*args, **keys)

    return method


for name in ("call_for_each_replica", "reduce", "batch_reduce_to", "update"):
    setattr(Noted, name, noting(name))


class Mine(ps.Strategy):
    """Only makes its own `extended`."""

    def __init__(self, backend=None):
        super().__init__(Noted(self, backend))


def test_an_author_writes_a_subclass_of_extended(strategy):
    """The strategy's own methods, its contexts and its variables go through it, wherever its variables live."""
    mine, n = Mine(strategy.backend), replicas(strategy)
    variables = []
    for device in mine.extended.parameter_devices:  # in turn they go where others have left room
        with mine.scope(), mine.extended.colocate_vars_with([device]):
            variables.append(variable(mine, aggregation=ps.VariableAggregation.SUM))
    assert {device for v in variables for device in v.devices} == set(mine.extended.parameter_devices)
    found = mine.run(lambda: here().all_reduce("sum", np.ones(3, "float32")))
    mine.run(lambda: variables[-1].assign_add(np.ones(3, "float32")))
    assert mine.reduce("mean", found, axis=0) == n
    variables[-1].assign_sub(0.5)
    assert variables[-1].numpy().tolist() == [n - 0.5] * 3
    asked = ["call_for_each_replica", "batch_reduce_to", "call_for_each_replica", "update", "reduce", "update"]
    assert mine.extended.asked == asked
    with mine.scope():
        assert ps.get_strategy() is mine is variables[0].strategy
    mine.extended._shared.runner.close()


def test_without_a_backend_an_author_s_variables_live_here():
    """On one CPU, or all GPUs; at its end the strategy is closed."""
    with Mine() as strategy:
        v = variable(strategy)
        assert v.devices == strategy.extended.worker_devices
        assert strategy.run(lambda: v.assign_add(1.0)) is v
    refused(RuntimeError, "closed", lambda: strategy.run(lambda: None))


def test_a_strategy_is_made_of_an_extended(strategy):
    """`Strategy(extended)` of another strategy is a second face of it: what either creates is in both. `unwrap` is the
    name of r1.x for `experimental_local_results`."""
    again = ps.Strategy(strategy.extended)
    n = replicas(strategy)
    assert again.extended is strategy.extended
    assert again.num_replicas_in_sync == strategy.num_replicas_in_sync
    with again.scope() if kind_of(strategy) != "default" else contextlib.nullcontext():
        v = ps.Variable(np.zeros(3, "float32"), aggregation=ps.VariableAggregation.MEAN)
        assert ps.get_strategy() is strategy
    assert again.extended.variable_created_in_scope(v)
    assert copies(again, v) == copies(strategy, v)
    again.run(lambda: v.assign_add(1.0))
    strategy.run(lambda: v.assign_add(1.0))
    assert v.numpy().tolist() == [2.0] * 3
    assert again.reduce("sum", by_replica(again, lambda i: np.float32(i)), axis=None) == sum(range(n))
    values = again.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    assert again.experimental_local_results(values) == tuple(range(n))
    assert (strategy.unwrap(values), strategy.unwrap("x")) == (tuple(range(n)), ("x",))


@pytest.mark.parametrize("kind", [ps.VariableAggregation, ps.VariableSynchronization, ps.ReduceOp])
def test_enums_have_tensorflow_s_values(kind):
    """As numbers, or as the words of reductions."""
    expected = {
        "VariableAggregation": {"NONE": 0, "SUM": 1, "MEAN": 2, "ONLY_FIRST_REPLICA": 3},
        "VariableSynchronization": {"AUTO": 0, "NONE": 1, "ON_WRITE": 2, "ON_READ": 3},
        "ReduceOp": {"SUM": "SUM", "MEAN": "MEAN"},
    }[kind.__name__]
    assert {member.name: member.value for member in kind} == expected
    assert all(kind(value) is kind[name] for name, value in expected.items())


@pytest.fixture
def unset():
    """A test that fails leaves no strategy behind."""
    yield
    if ps.has_strategy():
        ps.experimental_set_strategy(None)


def test_a_strategy_is_set_and_left(strategy, unset):
    """As within its scope, until None is set; variables are its own, and its methods are called as always. What was
    begun is done when it is left. A thread sets its own; setting leaves the one that was set, also if that is
    closed."""
    v, found = variable(strategy), []
    ps.experimental_set_strategy(strategy)
    v.assign_add(np.ones(3))
    thread = threading.Thread(target=lambda: found.append(ps.has_strategy()))
    thread.start()
    thread.join()
    ps.experimental_set_strategy(None)
    assert (found, v.numpy().tolist()) == ([False], [1.0] * 3)
    with ps.MirroredStrategy(["cpu:0"]) as other:
        for one in (other, strategy, other):
            ps.experimental_set_strategy(one)
            assert ps.get_strategy() is one
    ps.experimental_set_strategy(None)
    assert not ps.has_strategy()
    if kind_of(strategy) == "default":
        return  # it is what there is without
    ps.experimental_set_strategy(strategy)
    assert ps.in_cross_replica_context()
    v = ps.Variable(np.zeros(2, "float32"), name="set")
    assert strategy.extended.variable_created_in_scope(v)
    with strategy.scope():
        v.assign_add(np.ones(2))
    strategy.run(lambda: here().all_reduce("sum", np.ones(1)))
    ps.experimental_set_strategy(strategy)
    assert (ps.get_strategy() is strategy, v.numpy().tolist()) == (True, [1.0, 1.0])
    for _ in range(2):
        ps.experimental_set_strategy(None)
        assert not ps.has_strategy()
    assert here() is not None


def test_inside_of_a_scope_nothing_is_set(strategy, unset):
    """Nor in a replica's function: the scope that was entered otherwise has to be left first; all stays as it was."""
    if kind_of(strategy) == "default":
        pytest.skip("the default strategy's scope changes nothing")
    says = "called inside a strategy's scope; leave that scope first"
    with strategy.scope():
        for value in (strategy, None):
            with pytest.raises(RuntimeError, match=says):
                ps.experimental_set_strategy(value)
        assert ps.get_strategy() is strategy
    ps.experimental_set_strategy(strategy)
    with strategy.scope(), pytest.raises(RuntimeError, match=says):
        ps.experimental_set_strategy(None)
    refused(RuntimeError, says, lambda: strategy.run(lambda: ps.experimental_set_strategy(None)))
    assert ps.get_strategy() is strategy
    ps.experimental_set_strategy(None)
    with pytest.raises(TypeError, match="a str is not a strategy; pass a strategy, or None"):
        ps.experimental_set_strategy("mirrored")


def test_the_only_logical_device_is_the_replica_s_own(strategy):
    """The documents' examples with one device each: the same tensor comes back, in every context. Variables, lists and
    numbers have a shape too. A split has one number for each dimension, which divides it."""

    def step_fn(_):
        output = np.ones((4, 2, 8, 3)) + 1
        assigned = strategy.experimental_assign_to_logical_device(output, 0)
        split = strategy.experimental_split_to_logical_devices(assigned, [1, 1, 1, 1])
        return output is strategy.experimental_replicate_to_logical_devices(split)

    assert in_replicas(strategy, step_fn) == (True,) * replicas(strategy)
    assert step_fn(0)
    with strategy.scope():
        assert step_fn(0)
    v, split = variable(strategy), strategy.experimental_split_to_logical_devices
    assert split(v, (1,)) is v
    assert (split([[1, 2], [3, 4]], [1, 1]), split(3.0, [])) == ([[1, 2], [3, 4]], 3.0)
    for device in (1, -1, 7):
        with pytest.raises(ValueError, match=rf"logical device {device} does not exist.*TPUStrategy"):
            strategy.experimental_assign_to_logical_device(np.ones(3), device)
    for shape, parts, says in (
        ((4, 6), [1], r"must have one number for each dimension of shape \(4, 6\)"),
        ((4, 6), [1, 1, 1], r"must have one number for each dimension of shape \(4, 6\)"),
        ((), [1], r"must have one number for each dimension of shape \(\)"),
        ((4, 6), [1, 4], "a dimension of 6 cannot be split into 4 equal parts"),
        ((4, 6), [0, 1], "a dimension of 4 cannot be split into 0 equal parts"),
        ((4, 6), [2, 3], r"need 6 logical devices, but each replica has one.*TPUStrategy"),
    ):
        with pytest.raises(ValueError, match=says):
            split(np.ones(shape), parts)


def test_a_traceback_shows_the_users_lines(strategy, caplog):
    """An error of `run` has the user's frames, and of this package what they have called, and what has raised it."""
    v = variable(strategy, [1.0, 2.0])

    def step(own):
        v.assign(np.zeros(3)) if own else fails()

    def fails():
        raise LookupError("the user's")

    def frames(own):
        with pytest.raises((LookupError, ValueError)) as caught:
            strategy.run(step, (own,))
        return [entry.name for entry in caught.traceback]

    assert frames(False) == ["frames", "run", "step", "fails"]
    assert (frames(True)[:-1], len(frames(True))) == (["frames", "run", "step", "assign"], 5)
    with caplog.at_level("DEBUG", "psclient"):
        found = frames(True)
    assert len(found) > 7


def test_one_strategy_at_a_time_takes_part():
    """A second one of the same task is refused at once; once the servers have ended, the script is told why."""
    timeouts = ps.Timeouts(heartbeat_interval=0.1, session_timeout=0.5)
    with InProcessCluster(timeouts=timeouts) as cluster:

        def opened():
            return ps.ParameterServerStrategy(["cpu:0"], cluster_resolver=cluster.resolver(), timeouts=timeouts)

        with opened(), pytest.raises(ps.errors.TaskTaken, match="a strategy of this process is /job:worker/task:0"):
            opened()
        opened().close()
    with pytest.raises(ps.errors.UsageError, match="this process closed its strategy before") as caught:
        opened()
    assert not isinstance(caught.value, ConnectionError)
