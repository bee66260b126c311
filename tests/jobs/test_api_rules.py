"""The rules of the programming interface, with an embedded server: what is refused, and what it says instead.

What holds for every kind of strategy stands in `tests/strategies`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.strategies import kinds, replicas, variable

here = ps.get_replica_context


pytestmark = kinds("embedded-1")
BOTH = kinds("embedded-1", "servers-1x2")


def ones(strategy):
    return strategy.run(lambda: np.ones(3, "float32"))


def in_thread(fn):
    """Runs a function in another thread; returns what it returned, or raised."""
    found = []

    def body():
        try:
            found.append(fn())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return found[0]


# ---- Scopes, threads, the end ----


def test_what_was_recorded_before_an_error_is_done(strategy):
    """Caught around an inner scope, or on its way out of the outermost one; an interrupt gives up what was recorded."""
    w = variable(strategy)
    with strategy.scope():
        w.assign_add(np.ones(3))
        with pytest.raises(ZeroDivisionError), strategy.scope():
            raise ZeroDivisionError
        with pytest.raises(TypeError):
            strategy.reduce("sum", {"a": "text"}, None)
    assert w.numpy().tolist() == [1.0] * 3
    kept = []

    def fail(error):
        with strategy.scope():
            ones = strategy.extended.reduce_to("sum", np.ones(3), w)
            kept.append(strategy.extended.update(w, lambda v, ones: v.assign_add(ones) + 1.0, (ones,)))
            raise error

    with pytest.raises(StopIteration):
        fail(StopIteration)
    assert w.numpy().tolist() == [2.0] * 3
    assert kept[0].numpy().tolist() == [3.0] * 3
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt)
    assert w.numpy().tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="was not computed"):
        kept[1].numpy()


def test_a_scope_may_be_entered_again(strategy):
    """Within itself too; the outermost exit ends the section."""
    w, scope = variable(strategy), strategy.scope()
    with scope:
        with scope:
            pass
        sum_into(strategy, w)
        assert in_thread(lambda: w.numpy().tolist()) == [0.0] * 3
    with scope:
        sum_into(strategy, w)
    assert w.numpy().tolist() == in_thread(lambda: w.numpy().tolist()) == [2.0] * 3


def sum_into(strategy, v):
    """Reduces ones, and adds them to a variable: in a scope the section stays open. Returns the new value + 1."""
    ones = strategy.extended.reduce_to("sum", np.ones(v.shape), v)
    return strategy.extended.update(v, lambda v, ones: v.assign_add(ones) + 1.0, (ones,))


def test_an_open_section_belongs_to_one_thread():
    """Another may read variables, as of the last round; it is told so if it updates, and disturbs nothing."""
    timeouts = ps.Timeouts(call_timeout=1.0)
    with (
        InProcessCluster() as cluster,
        ps.ParameterServerStrategy(["cpu:0"], cluster_resolver=cluster.resolver(), timeouts=timeouts) as strategy,
    ):
        w = variable(strategy)
        with strategy.scope():
            result = sum_into(strategy, w)
            assert in_thread(lambda: w.numpy().tolist()) == [0.0] * 3
            for attempt in (lambda: w.assign_add(1.0), lambda: strategy.reduce("sum", 1.0, None), result.numpy):
                error = in_thread(attempt)
                assert isinstance(error, RuntimeError)
                assert "another thread" in str(error)
            assert in_thread(lambda: strategy.run(lambda: None)) is None
        assert w.numpy().tolist() == [1.0] * 3
        assert in_thread(lambda: w.assign_add(1.0)) is w
        assert in_thread(lambda: w.numpy().tolist()) == [2.0] * 3


def test_threads_that_meet_lose_no_update(strategy):
    """Each update is applied once."""
    w = variable(strategy)

    def go(_):
        for _ in range(20):
            with strategy.scope():
                sum_into(strategy, w)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(go, range(4)))
    with strategy.scope():
        assert strategy.extended.update(w, lambda v: v + 0.0).numpy().tolist() == [80.0] * 3


def test_after_the_end_all_says_so_at_once():
    """Read before or not; an open scope may still be left."""
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    w, u = variable(strategy), variable(strategy)
    w.numpy()
    with strategy.scope():
        w.assign_add(np.ones(3))
        strategy.close()
        for attempt in (w.numpy, u.numpy, lambda: ps.Variable(1.0), lambda: u.assign(np.ones(3))):
            with pytest.raises(RuntimeError, match="this strategy is closed"):
                attempt()
    changes = lambda: strategy.set_consistency(ps.Async())  # noqa: E731
    for attempt in (lambda: strategy.run(lambda: 1), lambda: strategy.reduce("sum", 1.0, None), changes):
        with pytest.raises(RuntimeError, match="this strategy is closed"):
            attempt()
    strategy.close()


# ---- Values ----


def test_values_outlive_their_section(strategy):
    """Outside of merge_call what no program took comes here; what one took does not, and says so."""
    w, extended = variable(strategy), strategy.extended
    with strategy.scope():
        free = extended.reduce_to("sum", np.ones(3), w)
        taken = extended.reduce_to("sum", np.ones(3), w)
        result = extended.update(w, lambda v, x: v.assign_add(x) * 2, (taken,))
    assert [np.asarray(v).tolist() for v in (free, result)] == [[1.0] * 3, [2.0] * 3]
    extended.update(w, lambda v, x: v.assign(x), (free,))
    assert repr(taken) == "Located(float64[3], stayed on the servers)"
    with pytest.raises(RuntimeError, match="stayed on the servers"):
        taken.numpy()


def test_a_value_comes_back_once(strategy):
    """`reduce` receives the value and nothing else."""
    before = strategy.bytes_transferred[1]
    strategy.reduce("sum", np.ones(1024), None)
    assert strategy.bytes_transferred[1] - before == 8 * 1024


# ---- Reductions ----


@BOTH
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_half_precision_is_averaged_in_single(strategy, dtype):
    """The mean over a batch is that of float32; a sum over an axis is rounded once."""
    rows = np.full((3000, 1), 100, dtype)
    assert strategy.reduce("mean", strategy.run(lambda: rows + 0), axis=0).tolist() == [100.0]
    assert strategy.reduce("mean", strategy.run(lambda: np.ones(70000, dtype)), axis=0) == 1.0
    total = strategy.reduce("sum", strategy.run(lambda: np.ones(3000, dtype)), axis=0)
    assert (total, total.dtype) == (np.asarray(3000.0 * replicas(strategy), dtype), dtype)


@BOTH
def test_servers_are_destinations(strategy):
    """One of them, and all; not beside a worker's device."""
    extended, x = strategy.extended, ones(strategy)
    here, there = extended.worker_devices, extended.parameter_devices
    for place in ("/cpu:0", there[0], list(there)):
        assert np.asarray(extended.reduce_to("sum", x, place)).tolist() == [replicas(strategy)] * 3
    for place in ("gpu:7", [there[0], here[0]], "nowhere"):
        with pytest.raises(ValueError, match="is not a device"):
            extended.reduce_to("sum", x, place)


def test_the_words_of_mistakes(strategy):
    """A scalar has no axis, and an array no such one; a single name is no list of one."""
    for axis, array, says in (
        (5, np.ones((2, 3)), r"shape \(2, 3\) has no axis 5"),
        (0, 1.0, "axis=None for a scalar"),
    ):
        with pytest.raises(ValueError, match=says):
            strategy.reduce("mean", array, axis)
    with pytest.raises(ps.errors.ConfigError, match=r"use devices=\['cpu:0'\]"):
        ps.ParameterServerStrategy(devices="cpu:0")


class Foreign:
    """An array of another library: its dtype is its own, and NumPy can take it."""

    dtype, shape = object(), (3,)

    def __array__(self, dtype=None, copy=None):
        return np.ones(3, "float32")

    def __dlpack_device__(self):
        return 1, 0


def test_arrays_of_other_libraries_are_taken(strategy):
    """In reductions, and as arguments of updates."""
    w = variable(strategy)
    assert strategy.reduce("sum", Foreign(), None).tolist() == [1.0] * 3
    assert strategy.reduce("mean", Foreign(), 0) == 1.0
    strategy.extended.update(w, lambda v, x: v.assign(x), (Foreign(),))
    assert w.numpy().tolist() == [1.0] * 3


# ---- Variables and optimizers in replica context ----


def test_a_name_is_used_up_by_success_only(strategy):
    """What could not be created leaves its name."""
    with strategy.scope():
        with pytest.raises(ps.errors.InvalidRequest):
            ps.Variable(np.array(["x"]), name="wanted")
        with pytest.raises(ps.errors.PSError):
            ps.Variable(np.ones((1,) * 40), name="wanted")
        assert [ps.Variable(1.0, name="wanted").name for _ in range(2)] == ["wanted", "wanted_1"]


@BOTH
def test_gradients_fit_their_variables(strategy):
    """The message has the variable's name; one gradient that all replicas share counts for each of them."""
    w, optimizer = variable(strategy, name="weights"), ps.optimizers.SGD(1.0)
    for gradient in (1.0, np.ones((1, 3))):
        with pytest.raises(ValueError, match=r"'weights.*' has shape"):
            strategy.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, w)]))
    for attempt in (lambda: optimizer.apply_gradients([]), lambda: optimizer.build([])):
        with pytest.raises(ValueError, match="no variables"):
            attempt()
    strategy.run(lambda: optimizer.apply_gradients([([1.0, 1.0, 1.0], w)]))
    assert w.numpy().tolist() == [-1.0 * replicas(strategy)] * 3
