"""Contexts: in which one a thread is, what may be called there, and what is said where it may not."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import KINDS, in_replicas, kind_of, kinds, merged, opened, replicas, variable

here = ps.get_replica_context
pytestmark = kinds("default", "mirrored-1", "mirrored-2", "servers-2x2", soak=KINDS)


def state():
    """What a thread is told of its context."""
    return ps.get_strategy(), ps.has_strategy(), here() is not None, ps.in_cross_replica_context()


def inside(strategy, where, call):
    """Calls a function in a context; returns what it returned there, by each replica or copy that called it."""
    found = []

    def kept(*_):
        found.append(call())

    if where == "outside":
        kept()
    elif where == "scope":
        with strategy.scope():
            kept()
    elif where == "replica":
        strategy.run(kept)
    elif where == "merge":
        merged(strategy, kept)
    else:
        strategy.extended.update(strategy.v, kept)
    return found


@pytest.fixture(autouse=True, scope="module")
def v(strategy):
    """A variable for updates, also as an attribute of the strategy."""
    strategy.v = variable(strategy)
    yield strategy.v
    del strategy.v


# ---- Which context holds ----


@pytest.mark.parametrize(
    ("where", "replica", "cross"),
    [("scope", False, True), ("replica", True, False), ("merge", False, True), ("update", False, False)],
)
def test_each_context_says_what_it_is(strategy, where, replica, cross):
    """The strategy is current in all of them; `has_strategy` knows no default one, whose scope changes nothing."""
    default = kind_of(strategy) == "default"
    expected = (ps.get_strategy(), False, True, False) if default and where == "scope" else None
    expected = expected or (strategy, not default, replica, cross)
    assert set(inside(strategy, where, state)) == {expected}
    assert state() == (ps.get_strategy(), False, True, False)


def test_outside_of_every_scope_one_replica_is_the_only_one(strategy):
    """Whatever strategies there are: library code finds a replica context there, numbered 0 of 1."""
    context = here()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert context.strategy is ps.get_strategy()
    assert ps.get_strategy().num_replicas_in_sync == 1


def test_the_same_strategy_nests(strategy):
    """In its scope, its replicas' functions, what they meet for and its updates; each context stays what it is."""
    for where in ("scope", "replica", "merge", "update"):
        before = inside(strategy, where, state)

        def nested():
            with strategy.scope(), strategy.scope():
                return state()

        assert inside(strategy, where, nested) == before


@pytest.mark.parametrize("kind", ["mirrored-1"])
def test_strategies_do_not_mix(strategy, kind):
    """Neither their scopes nor their methods, in any context of the other; the message says what to leave."""
    if kind_of(strategy) == "default":
        pytest.skip("the default strategy's context is outside of every scope: there any strategy may be entered")
    with opened(kind) as other:
        w = variable(other)
        for attempt in (
            lambda: other.scope().__enter__(),
            lambda: other.run(lambda: None),
            lambda: other.reduce("mean", 1.0, None),
            lambda: other.extended.reduce_to("mean", 1.0, w),
            lambda: other.extended.update(w, lambda w: None),
        ):
            for where in ("scope", "replica", "merge", "update"):
                with pytest.raises(RuntimeError, match=r"two strategies are mixed.*leave that scope first"):
                    inside(strategy, where, attempt)
        assert other.reduce("mean", 1.0, None) == 1.0
        assert strategy.reduce("mean", 1.0, None) == 1.0


def test_the_default_strategy_is_for_outside_of_scopes(strategy):
    """Its methods within another's scope are a mixture, too."""
    default = ps.get_strategy()
    with strategy.scope():
        if kind_of(strategy) == "default":
            assert default.run(lambda: 3) == 3
            return
        for attempt in (lambda: default.run(lambda: 3), default.scope().__enter__):
            with pytest.raises(RuntimeError, match="two strategies are mixed"):
                attempt()


def test_a_scope_holds_in_its_own_thread(strategy):
    """Another thread is outside of every scope, and may enter the strategy's at the same time."""
    seen = []

    def other():
        seen.append(state())
        with strategy.scope():
            seen.append(ps.get_strategy())

    with strategy.scope():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [state(), strategy]


def test_threads_may_share_a_scope_object(strategy):
    """Each enters and leaves it for itself, in any order."""
    scope, entered, leave = strategy.scope(), threading.Event(), threading.Event()

    def other():
        with scope:
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with scope:
        thread.start()
        assert entered.wait(30)
    assert state() == (ps.get_strategy(), False, True, False)
    with scope:
        assert ps.get_strategy() is strategy
        leave.set()
        thread.join()
        assert ps.get_strategy() is strategy


def test_after_an_error_the_context_is_left(strategy):
    """In whatever context it was raised."""
    for where in ("scope", "replica", "merge", "update"):
        with pytest.raises(ZeroDivisionError):
            inside(strategy, where, lambda: 1 / 0)
        assert state() == (ps.get_strategy(), False, True, False)


# ---- What may be called where ----

CROSS_REPLICA = {
    "run": lambda s: s.run(lambda: None),
    "reduce": lambda s: s.reduce("mean", 1.0, axis=None),
    "experimental_distribute_values_from_function": lambda s: s.experimental_distribute_values_from_function(str),
    "reduce_to": lambda s: s.extended.reduce_to("mean", 1.0, s.extended.worker_devices[0]),
    "batch_reduce_to": lambda s: s.extended.batch_reduce_to("mean", [(1.0, s.extended.worker_devices[0])]),
    "broadcast_to": lambda s: s.extended.broadcast_to(1.0, s.extended.worker_devices[0]),
    "update": lambda s: s.extended.update(s.v, lambda v: v.assign_add(1.0)),
    "update_non_slot": lambda s: s.extended.update_non_slot(s.extended.non_slot_devices([s.v]), lambda: None),
    "experimental_run_steps_on_iterator": lambda s: s.extended.experimental_run_steps_on_iterator(print, iter(()), 0),
}
REMEDY = {
    "replica": r"outside of the function given to strategy\.run, or inside a function given to .*merge_call",
    "update": "outside of the function given to update",
}


@pytest.mark.parametrize("where", REMEDY)
def test_a_cross_replica_method_elsewhere_names_the_remedy(strategy, where):
    """In replica and in update context it raises; what is said is where to call it."""
    for name, method in CROSS_REPLICA.items():
        message = rf"^{name} needs cross-replica context, and is called in {where} context; call it {REMEDY[where]}"
        with pytest.raises(RuntimeError, match=message):
            inside(strategy, where, lambda method=method: method(strategy))


def test_a_cross_replica_method_works_in_its_context(strategy):
    """In the scope, in what replicas meet for, and outside of every scope, where it enters one by itself."""
    for name, method in CROSS_REPLICA.items():
        for where in ("scope", "outside", *(["merge"] if name != "run" else [])):
            assert len(inside(strategy, where, lambda method=method: method(strategy))) == 1


def test_call_for_each_replica_is_run(strategy):
    """By the same rules."""
    with pytest.raises(RuntimeError, match="run needs cross-replica context"):
        inside(strategy, "replica", lambda: strategy.extended.call_for_each_replica(lambda: None))
    for args in ((strategy,), [strategy]):
        assert strategy.extended.call_for_each_replica(lambda x, *, y: x is y, args, {"y": strategy}) is True
    assert in_replicas(strategy, lambda replica: replica) == tuple(range(replicas(strategy)))


IN_REPLICA = {
    "strategy.merge_call": lambda s, c: s.merge_call(lambda s: None),
    "merge_call": lambda s, c: c.merge_call(lambda s: None),
    "all_reduce": lambda s, c: c.all_reduce("sum", 1.0),
}


@pytest.mark.parametrize("where", ["scope", "merge", "update"])
def test_a_replica_method_elsewhere_names_the_remedy(strategy, where):
    """In cross-replica and in update context there is no replica; a context that was kept from outside is stale."""
    kept = here()
    for method in IN_REPLICA.values():
        if (kind_of(strategy), where) == ("default", "scope"):
            assert len(inside(strategy, where, lambda method=method: method(strategy, here()))) == 1
        else:
            with pytest.raises(RuntimeError, match=r"strategy\.run"):
                inside(strategy, where, lambda method=method: method(strategy, kept))


def test_a_strategys_merge_call_is_for_its_own_replicas(strategy):
    """Outside of its runs the default replica is another strategy's; within them the strategy is handed on."""
    if kind_of(strategy) == "default":
        assert strategy.merge_call(lambda s: s) is strategy
    else:
        with pytest.raises(RuntimeError, match=r"merge_call.*strategy\.run"):
            strategy.merge_call(lambda s: s)
    assert strategy.run(lambda: strategy.merge_call(lambda s, x: (s, x), ("x",))) == (strategy, "x")


ANYWHERE = {
    "num_replicas_in_sync": lambda s: s.num_replicas_in_sync,
    "cluster_resolver": lambda s: s.cluster_resolver,
    "experimental_local_results": lambda s: s.experimental_local_results(3),
    "experimental_make_numpy_dataset": lambda s: s.experimental_make_numpy_dataset(np.zeros(4)).size,
    "experimental_distribute_dataset": lambda s: type(s.experimental_distribute_dataset([np.zeros(4)])),
    "experimental_distribute_datasets_from_function": lambda s: type(
        s.experimental_distribute_datasets_from_function(lambda context: [np.zeros(4)])
    ),
    "experimental_assign_to_logical_device": lambda s: s.experimental_assign_to_logical_device(3, 0),
    "experimental_split_to_logical_devices": lambda s: s.experimental_split_to_logical_devices(3, []),
    "experimental_replicate_to_logical_devices": lambda s: s.experimental_replicate_to_logical_devices(3),
    "parameter_devices": lambda s: s.extended.parameter_devices,
    "worker_devices": lambda s: s.extended.worker_devices,
    "experimental_between_graph": lambda s: s.extended.experimental_between_graph,
    "experimental_require_static_shapes": lambda s: s.extended.experimental_require_static_shapes,
    "experimental_should_init": lambda s: s.extended.experimental_should_init,
    "should_checkpoint": lambda s: s.extended.should_checkpoint,
    "should_save_summary": lambda s: s.extended.should_save_summary,
    "variable_created_in_scope": lambda s: s.extended.variable_created_in_scope(s.v),
    "non_slot_devices": lambda s: s.extended.non_slot_devices([s.v]),
    "value_container": lambda s: s.extended.value_container(s.v) is s.v,
}


def test_what_has_no_context_is_the_same_in_all(strategy):
    """Attributes, and methods that reach over no replicas."""
    for name, get in ANYWHERE.items():
        expected = get(strategy)
        for where in ("scope", "replica", "merge", "update"):
            found = inside(strategy, where, lambda get=get: get(strategy))
            assert found == [expected] * len(found), name


def test_a_variable_may_be_read_everywhere(strategy):
    """In an update function it stands for the value at that point, which on a server is not known yet."""
    strategy.v.assign(np.ones(3))
    for where in ("outside", "scope", "replica", "merge"):
        found = inside(strategy, where, lambda: strategy.extended.read_var(strategy.v).tolist())
        assert found == [[1.0] * 3] * len(found)
    w = variable(strategy, beside=strategy.v)
    strategy.extended.update(w, lambda w: w.assign(strategy.extended.read_var(strategy.v) + 1.0))
    assert w.numpy().tolist() == [2.0] * 3


def test_a_merge_function_runs_replicas(strategy):
    """Once and again, whose replicas meet as well; what it began before and what they assign are in order."""
    n, v = replicas(strategy), variable(strategy, aggregation=ps.VariableAggregation.SUM)
    ones = strategy.experimental_distribute_values_from_function(lambda _: np.ones(3, "float32"))

    def inner(own):
        v.assign_add(own)
        return here().all_reduce("sum", here().merge_call(lambda s: s.run(lambda: np.float32(1.0))))

    def outer(strategy, own):
        total = strategy.extended.reduce_to("sum", own, v)
        strategy.extended.update(v, lambda v: v.assign(v * 10.0))
        found = strategy.run(inner, (own,))
        strategy.extended.update(v, lambda v, t: v.assign_add(t), (total,))
        return found

    for _ in range(2):
        found = merged(strategy, outer, ones)
        assert [float(own) for own in strategy.experimental_local_results(found)] == [n] * n
    assert v.numpy().tolist() == [2.0 * n * 11.0] * 3


def test_an_error_of_a_merge_function_s_run_reaches_the_caller(strategy):
    """As it was raised, past both runs; and both can be made again."""

    def fail():
        here().merge_call(lambda s: None)
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            merged(strategy, lambda s: s.run(fail))
    with pytest.raises(RuntimeError, match="run needs cross-replica context"):
        merged(strategy, lambda s: s.run(lambda: s.run(lambda: None)))
    assert merged(strategy, lambda s: s.run(lambda: "well")) == "well"


def test_a_replica_context_is_made_by_hand(strategy):
    """By its number among all replicas; within it that replica is alone, and `merge_call` runs its function at once."""
    v = variable(strategy, aggregation=ps.VariableAggregation.MEAN)
    for number in range(replicas(strategy)):
        made = ps.ReplicaContext(strategy, number)
        assert (made.strategy, made.replica_id_in_sync_group, made.local_replica_id) == (strategy, number, number)
        assert made.num_replicas_in_sync == replicas(strategy)
        with pytest.raises(RuntimeError, match="not, or no longer, the current one"):
            made.merge_call(lambda s: None)
        with made as entered:
            assert entered is here() is made
            assert ps.get_strategy() is strategy
            assert made.merge_call(lambda s, x: (s, x, ps.in_cross_replica_context()), (5,)) == (strategy, 5, True)
            assert float(made.all_reduce("mean", np.float32(3.0))) == 3.0
            v.assign_add(1.0)
        assert here() is not made
    assert v.numpy().tolist() == [float(replicas(strategy))] * 3
    with pytest.raises(ValueError, match="is none of this process"):
        ps.ReplicaContext(strategy, replicas(strategy))


def test_colocation_is_for_the_strategy_s_scope(strategy):
    """Outside of it `colocate_vars_with` raises, as does another strategy's within."""
    v, other = variable(strategy), ps.MirroredStrategy(["cpu:0"])
    if kind_of(strategy) != "default":
        with pytest.raises(RuntimeError, match="outside of its scope"):
            strategy.extended.colocate_vars_with(v).__enter__()
    with other, other.scope(), pytest.raises(RuntimeError, match="outside of its scope"):
        strategy.extended.colocate_vars_with(v).__enter__()


def test_a_strategy_is_not_copied(strategy):
    """Both ways to copy raise: the copy would be the same strategy, and make the same rounds."""
    for how in (copy.copy, copy.deepcopy):
        with pytest.raises(RuntimeError, match="cannot be copied"):
            how(strategy)


def test_a_context_is_of_use_while_its_function_runs(strategy):
    """After its run, and in a later one, a kept context raises, and so does its all_reduce."""
    if kind_of(strategy) == "default":
        pytest.skip("the default context never ends")
    kept = in_replicas(strategy, lambda replica: here())

    def stale(call):
        with pytest.raises(RuntimeError, match="not, or no longer, the current one"):
            call(kept[0])

    for call in (lambda c: c.merge_call(lambda s: None), lambda c: c.all_reduce("sum", 1.0)):
        stale(call)
        in_replicas(strategy, lambda replica, call=call: stale(call))
    assert [context.replica_id_in_sync_group for context in kept] == list(range(replicas(strategy)))


# ---- Library code ----


def normalized(x):
    """Library code as one writes it: centers a batch over all replicas, counts its calls, keeps a running mean."""
    context = here()
    total, count = context.all_reduce("sum", (x.sum(axis=0), np.float32(len(x))))
    mean = total / count

    def keep(strategy, mean):
        value = strategy.experimental_local_results(mean)[0]
        strategy.extended.update(LIBRARY["mean"], lambda v, m: v.assign(v * 0.5 + m * 0.5), (value,))
        return strategy.num_replicas_in_sync

    calls = context.merge_call(keep, (mean,))
    LIBRARY["calls"].assign_add(np.float32(1.0))
    return x - mean, calls


LIBRARY = {}


@pytest.mark.parametrize("how", ["run", "call"])
def test_library_code_runs_unchanged(strategy, how):
    """all_reduce, merge_call and variables give in every strategy what one replica with the whole batch gets."""
    if (kind_of(strategy) != "default") and how == "call":
        pytest.skip("only the default strategy's replica runs without `run`")
    n = replicas(strategy)
    batch = np.arange(24, dtype="float32").reshape(8, 3)
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: np.array_split(batch, n)[context.replica_id_in_sync_group]
    )
    LIBRARY["mean"] = variable(strategy)
    LIBRARY["calls"] = variable(strategy, 0.0, aggregation=ps.VariableAggregation.MEAN)
    out, calls = strategy.run(normalized, (parts,)) if how == "run" else normalized(batch)
    rows = np.concatenate(strategy.experimental_local_results(out))
    np.testing.assert_allclose(rows, batch - batch.mean(axis=0))
    assert calls == n
    np.testing.assert_allclose(LIBRARY["mean"].numpy(), batch.mean(axis=0) / 2)
    assert float(LIBRARY["calls"]) == 1.0
