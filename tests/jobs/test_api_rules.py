"""The rules of the programming interface, with an embedded server: what is refused, and what it says instead.

What holds for every kind of strategy stands in `tests/strategies`.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from psclient._src.values import local_results
from pstesting.in_process import InProcessCluster
from tests.kit.strategies import replicas, variable

here = ps.get_replica_context


@pytest.fixture(scope="module")
def single():
    with ps.ParameterServerStrategy(devices=["cpu:0"]) as strategy:
        yield strategy


@contextmanager
def opened(replicas=1, **options):
    devices = [f"cpu:{index}" for index in range(replicas)]
    with (
        InProcessCluster() as cluster,
        ps.ParameterServerStrategy(devices, cluster_resolver=cluster.resolver(), **options) as strategy,
    ):
        yield strategy


@pytest.fixture(scope="module")
def two():
    with opened(2) as strategy:
        yield strategy


@pytest.fixture(params=["single", "two"])
def strategy(request):
    return request.getfixturevalue(request.param)


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


# ---- Update functions ----


def test_an_update_function_cannot_look_at_a_variable(single):
    """The error is the tracer's, at the user's line, and what was recorded before is not lost."""
    w = variable(single)
    for look in (np.asarray, float, int, bool, list, lambda w: w.numpy(), lambda w: w[0]):
        w.assign([0.0] * 3)
        with single.scope():
            single.extended.update(w, lambda v: v.assign_add(1.0))
            with pytest.raises(ps.errors.ProgramError, match=r"test_api_rules\.py"):
                single.extended.update(w, lambda v, look=look: v.assign_add(look(w)))
        assert w.numpy().tolist() == [1.0] * 3


def test_an_update_function_cannot_look_at_a_pending_value(single):
    """It is told what to write; given as an argument or by a closure the value is recorded."""
    w = variable(single)
    with single.scope():
        reduced = single.extended.reduce_to("sum", np.ones(3, "float32"), w)
        with pytest.raises(ps.errors.ProgramError, match="is not known yet"):
            single.extended.update(w, lambda v: v.assign(reduced.numpy()))
        single.extended.update(w, lambda v: v.assign(v + reduced))
    assert w.numpy().tolist() == [1.0] * 3


def test_an_update_function_cannot_end_its_section(single):
    """Half of the section would be lost in silence."""
    w = variable(single)
    with single.scope():
        single.extended.update(w, lambda v: v.assign_add(1.0))
        with pytest.raises(RuntimeError, match="ended the step"):
            single.extended.update(w, lambda v: single.backend.flush() or v.assign_add(1.0))


def test_a_variable_of_another_strategy_is_refused_by_a_closure(single, two):
    """Numbers of variables are a strategy's own: another's would be taken for one of ours."""
    w, foreign = variable(single), variable(two)
    with single.scope(), pytest.raises(ValueError, match=f"{foreign.name}.*another strategy"):
        single.extended.update(w, lambda v: v.assign(v + foreign))


# ---- Scopes, threads, the end ----


def test_what_was_recorded_before_an_error_is_done(single):
    """Caught around an inner scope, or on its way out of the outermost one; an interrupt gives up what was recorded."""
    w = variable(single)
    with single.scope():
        w.assign_add(np.ones(3))
        with pytest.raises(ZeroDivisionError), single.scope():
            raise ZeroDivisionError
        with pytest.raises(TypeError):
            single.reduce("sum", {"a": "text"}, None)
    assert w.numpy().tolist() == [1.0] * 3
    kept = []

    def fail(error):
        with single.scope():
            ones = single.extended.reduce_to("sum", np.ones(3), w)
            kept.append(single.extended.update(w, lambda v, ones: v.assign_add(ones) + 1.0, (ones,)))
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


def test_a_second_interrupt_within_a_round_ends_the_session():
    """The servers have its contribution: the next section would be taken for a resend, and its own lost."""
    with opened() as strategy:
        w = variable(strategy)
        w.assign_add(1.0)
        original = strategy._exchange._stand_in
        strategy._exchange._stand_in = lambda plan, futures: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            w.assign_add(1.0)
        strategy._exchange._stand_in = original
        with pytest.raises(ps.errors.Fenced, match="interrupted twice in round 1"):
            w.assign_add(100.0)


def test_a_merge_that_recorded_nothing_makes_no_round(single):
    """Its error is caught, and the replicas go on where they were."""
    w, before = variable(single), single.round

    def refuse(strategy):
        raise LookupError

    def step():
        with pytest.raises(LookupError):
            here().merge_call(refuse)

    with pytest.raises(LookupError):
        single.run(step)
    assert single.round == before
    w.assign_add(1.0)
    assert w.numpy().tolist() == [1.0] * 3


def test_a_scope_may_be_entered_again(single):
    """Within itself too; the outermost exit ends the section."""
    w, scope = variable(single), single.scope()
    with scope:
        with scope:
            pass
        sum_into(single, w)
        assert in_thread(lambda: w.numpy().tolist()) == [0.0] * 3
    with scope:
        sum_into(single, w)
    assert w.numpy().tolist() == in_thread(lambda: w.numpy().tolist()) == [2.0] * 3


def sum_into(strategy, v):
    """Reduces ones, and adds them to a variable: in a scope the section stays open. Returns the new value + 1."""
    ones = strategy.extended.reduce_to("sum", np.ones(v.shape), v)
    return strategy.extended.update(v, lambda v, ones: v.assign_add(ones) + 1.0, (ones,))


def test_an_open_section_belongs_to_one_thread():
    """Another may read variables, as of the last round; it is told so if it updates, and disturbs nothing."""
    with opened(timeouts=ps.Timeouts(call_timeout=1.0)) as single:
        w = variable(single)
        with single.scope():
            result = sum_into(single, w)
            assert in_thread(lambda: w.numpy().tolist()) == [0.0] * 3
            for attempt in (lambda: w.assign_add(1.0), lambda: single.reduce("sum", 1.0, None), result.numpy):
                error = in_thread(attempt)
                assert isinstance(error, RuntimeError)
                assert "another thread" in str(error)
            assert in_thread(lambda: single.run(lambda: None)) is None
        assert w.numpy().tolist() == [1.0] * 3
        assert in_thread(lambda: w.assign_add(1.0)) is w
        assert in_thread(lambda: w.numpy().tolist()) == [2.0] * 3


def test_a_second_thread_waits_until_the_first_has_sent_its_section(single):
    """Then its own is sent: none of them is told anything."""
    w, began, done = variable(single), threading.Event(), []

    def second():
        began.set()
        w.assign_add(np.ones(3))
        done.append(w.numpy().tolist())

    with single.scope():
        sum_into(single, w)
        thread = threading.Thread(target=second)
        thread.start()
        began.wait()
        time.sleep(0.2)
        assert not done
    thread.join()
    assert done == [[2.0] * 3]


def test_threads_that_meet_lose_no_update(single):
    """Each update is applied once."""
    w = variable(single)

    def go(_):
        for _ in range(20):
            with single.scope():
                sum_into(single, w)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(go, range(4)))
    with single.scope():
        assert single.extended.update(w, lambda v: v + 0.0).numpy().tolist() == [80.0] * 3


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
    for attempt in (lambda: strategy.run(lambda: 1), lambda: strategy.reduce("sum", 1.0, None)):
        with pytest.raises(RuntimeError, match="this strategy is closed"):
            attempt()
    strategy.close()


def test_a_fork_does_not_end_the_job(single):
    """`close` in it does nothing, and the parent goes on."""
    child = os.fork()
    if not child:
        single.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert single.reduce("sum", 1.0, None) == 1.0


def test_outside_of_every_scope_one_is_entered(strategy):
    """By assignments, updates, reductions and optimizers: each is a section of its own."""
    w, extended, n = variable(strategy), strategy.extended, replicas(strategy)
    gradient = ones(strategy)
    assert w.assign(np.ones(3)) is w
    assert w.numpy().tolist() == [1.0] * 3
    reduced = extended.reduce_to("sum", gradient, w)
    extended.update(w, lambda v, x: v.assign_add(x), (reduced,))
    extended.update_non_slot(extended.non_slot_devices([w]), lambda: w.assign_add(1.0))
    ps.optimizers.SGD(1.0).apply_gradients([(gradient, w)])
    assert np.asarray(reduced).tolist() == [n] * 3
    assert w.numpy().tolist() == [2.0] * 3


# ---- Values ----


def test_values_outlive_their_section(single):
    """Outside of merge_call what no program took comes here; what one took does not, and says so."""
    w, extended = variable(single), single.extended
    with single.scope():
        free = extended.reduce_to("sum", np.ones(3), w)
        taken = extended.reduce_to("sum", np.ones(3), w)
        result = extended.update(w, lambda v, x: v.assign_add(x) * 2, (taken,))
    assert [np.asarray(v).tolist() for v in (free, result)] == [[1.0] * 3, [2.0] * 3]
    extended.update(w, lambda v, x: v.assign(x), (free,))
    assert repr(taken) == "Located(float64[3], stayed on the servers)"
    with pytest.raises(RuntimeError, match="stayed on the servers"):
        taken.numpy()


def test_bringing_one_value_keeps_the_others(strategy):
    """Also in merge_call, where only what is looked at comes back."""
    w, n = variable(strategy), replicas(strategy)

    def merge(strategy, x):
        first, second, third = strategy.extended.batch_reduce_to(
            "sum", [(x, w), (x, x), (x, strategy.extended.worker_devices[0])]
        )
        strategy.extended.update(w, lambda v, y: v.assign(y), (first,))
        return [np.asarray(second).tolist(), third.tolist()]

    found = strategy.run(lambda: here().merge_call(merge, (np.ones(3, "float32"),)))
    assert [v for row in local_results(found)[0] for v in row] == [n] * 6
    assert w.numpy().tolist() == [n] * 3


def test_a_value_comes_back_once(single):
    """`reduce` receives the value and nothing else."""
    before = single.bytes_transferred[1]
    single.reduce("sum", np.ones(1024), None)
    assert single.bytes_transferred[1] - before == 8 * 1024


def test_what_lives_on_the_servers_is_used_as_an_array(single):
    """As an index, in texts, and added to an array in place; several truths are none."""
    w = variable(single, [1.0, 2.0, 3.0])
    with single.scope():
        index = ps.Variable(1)
        reduced = single.extended.reduce_to("sum", np.ones(3, "float32"), w)
    for vector in (w, reduced):
        with pytest.raises(ValueError, match="ambiguous"):
            bool(vector)
    assert ("abc"[index], f"{w}") == ("b", repr(w))
    assert not variable(single, 0)
    array = np.ones(3, "float32")
    array += w
    assert (array.tolist(), w.numpy().tolist()) == ([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])


# ---- Reductions ----


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_half_precision_is_averaged_in_single(strategy, dtype):
    """The mean over a batch is that of float32; a sum over an axis is rounded once."""
    rows = np.full((3000, 1), 100, dtype)
    assert strategy.reduce("mean", strategy.run(lambda: rows + 0), axis=0).tolist() == [100.0]
    assert strategy.reduce("mean", strategy.run(lambda: np.ones(70000, dtype)), axis=0) == 1.0
    total = strategy.reduce("sum", strategy.run(lambda: np.ones(3000, dtype)), axis=0)
    assert (total, total.dtype) == (np.asarray(3000.0 * replicas(strategy), dtype), dtype)


def test_servers_are_destinations(strategy):
    """One of them, and all; not beside a worker's device."""
    extended, x = strategy.extended, ones(strategy)
    here, there = extended.worker_devices, extended.parameter_devices
    for place in ("/cpu:0", there[0], list(there)):
        assert np.asarray(extended.reduce_to("sum", x, place)).tolist() == [replicas(strategy)] * 3
    for place in ("gpu:7", [there[0], here[0]], "nowhere"):
        with pytest.raises(ValueError, match="is not a device"):
            extended.reduce_to("sum", x, place)


def test_the_words_of_mistakes(single):
    """A scalar has no axis, and an array no such one; a single name is no list of one."""
    for axis, array, says in (
        (5, np.ones((2, 3)), r"shape \(2, 3\) has no axis 5"),
        (0, 1.0, "axis=None for a scalar"),
    ):
        with pytest.raises(ValueError, match=says):
            single.reduce("mean", array, axis)
    with pytest.raises(ps.errors.ConfigError, match=r"use devices=\['cpu:0'\]"):
        ps.ParameterServerStrategy(devices="cpu:0")


class Foreign:
    """An array of another library: its dtype is its own, and NumPy can take it."""

    dtype, shape = object(), (3,)

    def __array__(self, dtype=None, copy=None):
        return np.ones(3, "float32")

    def __dlpack_device__(self):
        return 1, 0


def test_arrays_of_other_libraries_are_taken(single):
    """In reductions, and as arguments of updates."""
    w = variable(single)
    assert single.reduce("sum", Foreign(), None).tolist() == [1.0] * 3
    assert single.reduce("mean", Foreign(), 0) == 1.0
    single.extended.update(w, lambda v, x: v.assign(x), (Foreign(),))
    assert w.numpy().tolist() == [1.0] * 3


# ---- Variables and optimizers in replica context ----


def test_a_name_is_used_up_by_success_only(single):
    """What could not be created leaves its name."""
    with single.scope():
        with pytest.raises(ps.errors.InvalidRequest):
            ps.Variable(np.array(["x"]), name="wanted")
        with pytest.raises(ps.errors.PSError):
            ps.Variable(np.ones((1,) * 40), name="wanted")
        assert [ps.Variable(1.0, name="wanted").name for _ in range(2)] == ["wanted", "wanted_1"]


def test_a_gradient_that_replicas_share_counts_for_each(strategy):
    """As in all_reduce: one object from all replicas is a gradient of each."""
    w, shared = variable(strategy), np.ones(3, "float32")
    optimizer = ps.optimizers.SGD(1.0)
    strategy.run(lambda: optimizer.apply_gradients([(shared, w)]))
    strategy.run(lambda g: optimizer.apply_gradients([(g, w)]), (shared,))
    strategy.run(lambda: optimizer.apply_gradients([([1.0, 1.0, 1.0], w)]))
    assert w.numpy().tolist() == [-3.0 * replicas(strategy)] * 3
    assert int(optimizer.iterations) == 3


def test_optimizers_check_what_they_are_given(strategy):
    """The message has the variable's name; the state is as it was."""
    w = variable(strategy, name="weights")
    frozen = variable(strategy, trainable=False)
    optimizer = ps.optimizers.Adam()
    good = np.ones(3, "float32")
    for pairs, kind, says in (
        ([(None, w)], ValueError, "'weights.*' is None"),
        ([(np.ones(4), w)], ValueError, r"'weights.*' has shape \(4,\), but the variable has \(3,\)"),
        ([(1.0, w)], ValueError, r"'weights.*' has shape \(\)"),
        ([(np.ones((1, 3)), w)], ValueError, "'weights.*' has shape"),
        ([], ValueError, "no variables"),
        ([(good, frozen)], ValueError, "not trainable"),
        ([(w, good)], TypeError, "expected a variable, but got a ndarray"),
    ):
        with pytest.raises(kind, match=says):
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
    with pytest.raises(ValueError, match="no variables"):
        optimizer.build([])
    with pytest.raises(RuntimeError, match="no state"):
        _ = optimizer.iterations
    assert w.numpy().tolist() == [0.0] * 3
