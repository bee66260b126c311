"""Contexts: in which one a thread is, what may be called there, and what is said where it may not; `merge_call`, where
replicas meet, several times in one function, and what becomes of them when one fails."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import (
    KINDS,
    in_replicas,
    kind_of,
    kinds,
    merged,
    of_each,
    opened,
    refused,
    replicas,
    variable,
)

here = ps.get_replica_context
pytestmark = kinds("default", "mirrored-1", "mirrored-2", "servers-2x2", soak=KINDS)


def state():
    """What a thread is told of its context."""
    return ps.get_strategy(), ps.has_strategy(), here() is not None, ps.in_cross_replica_context()


INSIDE = ("scope", "replica", "merge", "update")


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


@pytest.mark.parametrize(
    ("where", "replica", "cross"),
    [("scope", False, True), ("replica", True, False), ("merge", False, True), ("update", False, True)],
)
def test_each_context_says_what_it_is(strategy, where, replica, cross):
    """The strategy is current in all of them; `has_strategy` knows no default one, whose scope changes nothing. The
    same strategy nests, each context stays what it is, and after an error it is left."""
    default = kind_of(strategy) == "default"
    expected = (ps.get_strategy(), False, True, False) if default and where == "scope" else None
    expected = expected or (strategy, not default, replica, cross)

    def nested():
        with strategy.scope(), strategy.scope():
            return state()

    for call in (state, nested):
        assert set(inside(strategy, where, call)) == {expected}
    refused(ZeroDivisionError, "", lambda: inside(strategy, where, lambda: 1 / 0))
    assert state() == (ps.get_strategy(), False, True, False)


def test_strategies_do_not_mix(strategy):
    """Neither their scopes nor their methods, in any context of the other; the message says what to leave. The default
    strategy's methods within another's scope are a mixture, too."""
    default, says = ps.get_strategy(), "was used in the scope of another strategy"
    if kind_of(strategy) == "default":
        with strategy.scope():
            assert default.run(lambda: 3) == 3
        return  # its context is outside of every scope: there any strategy may be entered
    with opened("mirrored-1") as other:
        w = variable(other)
        for attempt in (
            lambda: other.scope().__enter__(),
            lambda: other.run(lambda: None),
            lambda: other.reduce("mean", 1.0, None),
            lambda: other.extended.reduce_to("mean", 1.0, w),
            lambda: other.extended.update(w, lambda w: None),
        ):
            for where in INSIDE:
                with pytest.raises(RuntimeError, match=rf"{says}.*leave that scope first"):
                    inside(strategy, where, attempt)
        with strategy.scope():
            refused(RuntimeError, says, lambda: default.run(lambda: 3), default.scope().__enter__)
        assert other.reduce("mean", 1.0, None) == 1.0
        assert strategy.reduce("mean", 1.0, None) == 1.0


# ---- What may be called where ----

CROSS_REPLICA = {
    "run": lambda s: s.run(lambda: None),
    "call_for_each_replica": lambda s: s.extended.call_for_each_replica(lambda: None),
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
    "replica": r"outside of strategy\.run, or in a function passed to .*merge_call",
    "update": "outside of the function passed to update",
}


@pytest.mark.parametrize("where", REMEDY)
def test_a_cross_replica_method_elsewhere_names_the_remedy(strategy, where):
    """In replica and in update context it raises; what is said is where to call it."""
    for name, method in CROSS_REPLICA.items():
        called = name.replace("call_for_each_replica", "run")
        message = rf"^{called} needs cross-replica context but was called in {where} context; call it {REMEDY[where]}"
        with pytest.raises(RuntimeError, match=message):
            inside(strategy, where, lambda method=method: method(strategy))
    if where == "update":
        refused(RuntimeError, "cannot create variables", lambda: inside(strategy, where, lambda: ps.Variable(1.0)))


def test_a_cross_replica_method_works_in_its_context(strategy):
    """In the scope, in what replicas meet for, and outside of every scope, where it enters one by itself."""
    for name, method in CROSS_REPLICA.items():
        for where in ("scope", "outside", *(["merge"] if name not in ("run", "call_for_each_replica") else [])):
            assert len(inside(strategy, where, lambda method=method: method(strategy))) == 1
    for args in ((strategy,), [strategy]):
        assert strategy.extended.call_for_each_replica(lambda x, *, y: x is y, args, {"y": strategy}) is True


IN_REPLICA = {
    "strategy.merge_call": lambda s, c: s.merge_call(lambda s: None),
    "merge_call": lambda s, c: c.merge_call(lambda s: None),
    "all_reduce": lambda s, c: c.all_reduce("sum", 1.0),
}


@pytest.mark.parametrize("where", ["scope", "merge", "update"])
def test_a_replica_method_elsewhere_names_the_remedy(strategy, where):
    """In cross-replica and in update context there is no replica; a context that was kept from outside is stale.
    Outside of a strategy's runs the default replica is another's; within them the strategy is handed on."""
    kept = here()
    for method in IN_REPLICA.values():
        if (kind_of(strategy), where) == ("default", "scope"):
            assert len(inside(strategy, where, lambda method=method: method(strategy, here()))) == 1
        else:
            with pytest.raises(RuntimeError, match=r"strategy\.run"):
                inside(strategy, where, lambda method=method: method(strategy, kept))
    if kind_of(strategy) == "default":
        assert strategy.merge_call(lambda s: s) is strategy
    else:
        refused(RuntimeError, r"merge_call.*strategy\.run", lambda: strategy.merge_call(lambda s: s))
    assert strategy.run(lambda: strategy.merge_call(lambda s, x: (s, x), ("x",))) == (strategy, "x")


ATTRIBUTES = (
    "parameter_devices worker_devices experimental_between_graph experimental_require_static_shapes "
    "experimental_should_init should_checkpoint should_save_summary"
)
ANYWHERE = {name: lambda s, name=name: getattr(s.extended, name) for name in ATTRIBUTES.split()} | {
    "num_replicas_in_sync": lambda s: s.num_replicas_in_sync,
    "cluster_resolver": lambda s: s.cluster_resolver,
    "local_results": lambda s: s.experimental_local_results(3),
    "make_numpy_dataset": lambda s: s.experimental_make_numpy_dataset(np.zeros(4)).size,
    "distribute_dataset": lambda s: type(s.experimental_distribute_dataset([np.zeros(4)])),
    "datasets_from_function": lambda s: type(s.experimental_distribute_datasets_from_function(lambda c: [np.zeros(4)])),
    "assign_to_logical_device": lambda s: s.experimental_assign_to_logical_device(3, 0),
    "split_to_logical_devices": lambda s: s.experimental_split_to_logical_devices(3, []),
    "replicate_to_logical_devices": lambda s: s.experimental_replicate_to_logical_devices(3),
    "variable_created_in_scope": lambda s: s.extended.variable_created_in_scope(s.v),
    "non_slot_devices": lambda s: s.extended.non_slot_devices([s.v]),
    "value_container": lambda s: s.extended.value_container(s.v) is s.v,
}


def test_what_has_no_context_is_the_same_in_all(strategy):
    """Attributes, and methods that reach over no replicas."""
    for name, get in ANYWHERE.items():
        expected = get(strategy)
        for where in INSIDE:
            found = inside(strategy, where, lambda get=get: get(strategy))
            assert found == [expected] * len(found), name


def test_a_variable_may_be_read_everywhere(strategy):
    """In an update function it stands for the value at that point, which on a server is not known yet; also inside
    another strategy. Nobody can change it, and what is no variable is refused."""
    read = strategy.extended.read_var
    strategy.v.assign(np.ones(3))
    for where in ("outside", "scope", "replica", "merge"):
        found = inside(strategy, where, lambda: read(strategy.v).tolist())
        assert found == [[1.0] * 3] * len(found)
    w = variable(strategy, beside=strategy.v)
    strategy.extended.update(w, lambda w: w.assign(read(strategy.v) + 1.0))
    assert w.numpy().tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="read-only"):
        read(w)[0] = 1.0
    refused(TypeError, "read_var takes a variable", lambda: read(np.ones(3)), lambda: read(None))
    found = in_replicas(strategy, lambda _, own: read(own).tolist(), strategy.v)
    assert found == ([1.0] * 3,) * replicas(strategy)
    plain = ps.Variable([4.0])
    with ps.MirroredStrategy(["cpu:0", "cpu:1"]) as other:
        with other.scope():
            assert w.numpy().tolist() == [2.0] * 3
            if kind_of(strategy) != "default":
                refused(RuntimeError, "was used in the scope of another strategy", lambda: w.assign_add(1.0))
        assert in_replicas(other, lambda _: (float(w[0]), float(plain[0]))) == ((2.0, 4.0),) * 2


def test_a_replica_context_is_made_by_hand(strategy):
    """By its number among all replicas; within it that replica is alone, and `merge_call` runs its function at once."""
    v = variable(strategy, aggregation=ps.VariableAggregation.MEAN)
    for number in range(replicas(strategy)):
        made = ps.ReplicaContext(strategy, number)
        assert (made.strategy, made.replica_id_in_sync_group, made.local_replica_id) == (strategy, number, number)
        assert made.num_replicas_in_sync == replicas(strategy)
        with pytest.raises(RuntimeError, match="a replica context that is not current"):
            made.merge_call(lambda s: None)
        with made as entered:
            assert entered is here() is made
            assert ps.get_strategy() is strategy
            assert made.merge_call(lambda s, x: (s, x, ps.in_cross_replica_context()), (5,)) == (strategy, 5, True)
            assert float(made.all_reduce("mean", np.float32(3.0))) == 3.0
            v.assign_add(1.0)
        assert here() is not made
    assert v.numpy().tolist() == [float(replicas(strategy))] * 3
    refused(ValueError, "this process has replicas 0 to ", lambda: ps.ReplicaContext(strategy, replicas(strategy)))


def test_a_strategy_keeps_to_itself(strategy):
    """Outside of it `colocate_vars_with` raises, and so does another strategy's within; nor is it copied."""
    v, other = variable(strategy), ps.MirroredStrategy(["cpu:0"])
    if kind_of(strategy) != "default":
        refused(RuntimeError, "outside of the strategy's scope", strategy.extended.colocate_vars_with(v).__enter__)
    with other, other.scope(), pytest.raises(RuntimeError, match="outside of the strategy's scope"):
        strategy.extended.colocate_vars_with(v).__enter__()
    for how in (copy.copy, copy.deepcopy):
        with pytest.raises(RuntimeError, match="cannot be copied"):
            how(strategy)


def test_library_code_runs_unchanged(strategy):
    """It gives in every strategy, and without one, what one replica with the whole batch gets."""
    n, batch, kept = replicas(strategy), np.arange(24, dtype="float32").reshape(8, 3), variable(strategy)

    def keep(strategy, mean):
        value = strategy.experimental_local_results(mean)[0]
        strategy.extended.update(kept, lambda v, m: v.assign(v * 0.5 + m * 0.5), (value,))

    def centered(x):
        total, count = here().all_reduce("sum", (x.sum(axis=0), np.float32(len(x))))
        here().merge_call(keep, (total / count,))
        return x - total / count

    parts = of_each(strategy, np.array_split(batch, n))
    out = centered(batch) if kind_of(strategy) == "default" else strategy.run(centered, (parts,))
    np.testing.assert_allclose(np.concatenate(strategy.experimental_local_results(out)), batch - batch.mean(axis=0))
    np.testing.assert_allclose(kept.numpy(), batch.mean(axis=0) / 2)


def test_the_example_of_the_documents(strategy):
    """Each replica gets the sum over all, computed once where they meet, and adds its own. They meet in cross-replica
    context, in the thread that called `run`; afterwards they are replicas again. Arguments arrive merged, by position
    and by name, and results leave unwrapped: the same object plain, others per replica."""
    called, shared, n = [], object(), replicas(strategy)

    def merge_fn(distribution, three_plus_replica_id, *, more):
        called.append((distribution, threading.get_ident(), ps.in_cross_replica_context(), here(), ps.get_strategy()))
        assert more["plain"][0] is shared
        assert isinstance(more["mine"], ps.PerReplica) == (n > 1)
        return sum(distribution.experimental_local_results(three_plus_replica_id)), {"back": more["mine"]}

    def fn(three):
        context = here()
        v = three + context.replica_id_in_sync_group
        mine = {"plain": [shared], "mine": np.array(context.replica_id_in_sync_group)}
        total, own = context.merge_call(merge_fn, args=(v,), kwargs={"more": mine})
        assert (here(), own["back"]) == (context, context.replica_id_in_sync_group)
        return total + v

    found = strategy.experimental_local_results(strategy.run(fn, args=[3]))
    assert found == tuple(sum(range(3, 3 + n)) + 3 + i for i in range(n))
    assert called == [(strategy, threading.get_ident(), True, None, strategy)]
    v = merged(strategy, lambda s: ps.Variable(np.ones(2), name=f"met-{id(object())}"))
    assert (isinstance(v, ps.Variable), v.numpy().tolist()) == (True, [1.0, 1.0])
    assert strategy.extended.variable_created_in_scope(v)


def works(strategy):
    """Runs, meets and reduces, as a proof that nothing is left of what failed before."""
    total = in_replicas(strategy, lambda i: float(here().all_reduce("sum", np.float32(i))))
    return total == (float(sum(range(replicas(strategy)))),) * replicas(strategy)


def test_they_meet_as_often_as_they_like(strategy):
    """Each time for what the function says, with the values of then; each sees what was updated the times before.
    Whatever makes replicas meet comes in the order of the calls."""
    n, v = replicas(strategy), variable(strategy)
    met = []

    def add(strategy, x, *, step):
        met.append(step)
        strategy.extended.update(v, lambda v, t: v.assign_add(t), (strategy.extended.reduce_to("sum", x, v),))

    def fn(i):
        seen = []
        for step in range(4):
            here().merge_call(add, (np.full(3, i + 1.0, "float32"),), {"step": "step"})
            seen.append(float(v.read_value()[0]))
            seen.append(float(here().all_reduce("mean", np.float32(step))))
        return seen

    total = sum(range(1, n + 1))
    expected = [x for step in range(4) for x in (float(total * (step + 1)), float(step))]
    assert in_replicas(strategy, fn) == (expected,) * n
    assert met == ["step"] * 4
    assert v.numpy().tolist() == [4.0 * total] * 3
    w = variable(strategy, 0.0, aggregation=ps.VariableAggregation.SUM)

    def mixed(i):
        w.assign_add(np.float32(i + 1))
        first = float(w)
        reduced = here().all_reduce("sum", np.float32(first))
        here().merge_call(lambda s: w.assign(2.0))
        return first, float(reduced), float(w)

    assert in_replicas(strategy, mixed) == ((float(total), float(total * n), 2.0),) * n


@pytest.mark.parametrize("meet", [0, 1, 2], ids=["before", "between", "after"])
def test_one_replica_fails_and_all_end(strategy, meet):
    """Whenever it does: the caller gets its error, with the replica named, and not what the others raise because of it.
    Sections that had ended are done, and everything goes on working."""
    n, v, ended, others = replicas(strategy), variable(strategy), [], []

    def add(strategy):
        strategy.extended.update(v, lambda v: v.assign_add(1.0))

    def fn(i):
        try:
            for step in range(2):
                if (i, step) == (n - 1, meet):
                    raise KeyError("mine")
                here().merge_call(add)
            if (i, meet) == (n - 1, 2):
                raise KeyError("mine")
        except RuntimeError as error:
            others.append("the run failed: KeyError('mine')" in str(error))
            raise IndexError from None
        finally:
            ended.append(i)

    with pytest.raises(KeyError, match="mine") as caught:
        in_replicas(strategy, fn)
    assert sorted(ended) == list(range(n))
    assert others == [True] * (n - 1) or meet == 2
    where = f"in replica {n - 1} of {n} (local replica {n - 1}, on cpu:{n - 1})"
    assert getattr(caught.value, "__notes__", []) == [where] * (n > 1)
    assert works(strategy)
    assert v.numpy().tolist() == [float(meet)] * 3


@pytest.mark.parametrize("caught", [False, True])
def test_what_they_met_for_fails(strategy, caught):
    """Every replica is told, none can go on by swallowing it, and the caller gets the error itself. What was recorded
    for servers before the error is not done, in later runs neither."""
    if kind_of(strategy) == "default" and caught:
        pytest.skip("the default strategy calls plain functions: what they catch is caught")
    told, v = [], variable(strategy)

    def merge(strategy):
        strategy.extended.update(v, lambda v: v.assign_add(1.0))
        return 1 / 0

    def fn(i):
        try:
            here().merge_call(merge)
        except Exception as error:
            told.append(type(error))
            if not caught:
                raise

    refused(ZeroDivisionError, "", lambda: in_replicas(strategy, fn))
    assert len(told) == replicas(strategy)
    with pytest.raises(TypeError, match="cannot be reduced"):
        in_replicas(strategy, lambda i: here().merge_call(lambda s: s.reduce("mean", None, axis=None)))
    assert works(strategy)
    done = kind_of(strategy) != "embedded"  # without servers an update is done at once
    assert v.numpy().tolist() == [float(done)] * 3
    v.assign_add(np.ones(3))
    assert v.numpy().tolist() == [done + 1.0] * 3
