"""`merge_call`: where replicas meet, several times in one function, and what becomes of them when one fails."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import in_replicas, kind_of, merged, replicas, variable

here = ps.get_replica_context


def works(strategy):
    """Runs, meets and reduces, as a proof that nothing is left of what failed before."""
    total = in_replicas(strategy, lambda i: float(here().all_reduce("sum", np.float32(i))))
    return total == (float(sum(range(replicas(strategy)))),) * replicas(strategy)


def last(strategy):
    """The number of the last replica."""
    return replicas(strategy) - 1


def noted(strategy, error, replica):
    """Whether an error says in which of several replicas it was raised."""
    n = replicas(strategy)
    where = f"in replica {replica} of {n} (local replica {replica}, on cpu:{replica})"
    return getattr(error, "__notes__", []) == ([where] if n > 1 else [])


# ---- Meeting ----


def test_the_example_of_the_documents(strategy):
    """Each replica gets the sum over all, computed once where they meet, and adds its own."""
    called = []

    def merge_fn(distribution, three_plus_replica_id):
        called.append(distribution)
        return sum(distribution.experimental_local_results(three_plus_replica_id))

    def fn(three):
        context = here()
        v = three + context.replica_id_in_sync_group
        return context.merge_call(merge_fn, args=(v,)) + v

    n = replicas(strategy)
    found = strategy.experimental_local_results(strategy.run(fn, args=[3]))
    assert found == tuple(sum(range(3, 3 + n)) + 3 + i for i in range(n))
    assert called == [strategy]


def test_they_meet_as_often_as_they_like(strategy):
    """Each time for what the function says, with the values of then; each sees what was updated the times before."""
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


def test_arguments_arrive_merged_and_results_leave_unwrapped(strategy):
    """The same object plain, different ones per replica; by position and by name, and in nests."""
    shared = object()

    def merge(strategy, plain, *, mine):
        assert plain[0] is shared
        assert isinstance(mine["x"], ps.PerReplica) == (replicas(strategy) > 1)
        return {"back": mine["x"], "all": strategy.experimental_local_results(mine["x"])}

    def fn(i):
        found = here().merge_call(merge, ([shared],), {"mine": {"x": np.array(i)}})
        return int(found["back"]), [int(x) for x in found["all"]]

    n = replicas(strategy)
    assert in_replicas(strategy, fn) == tuple((i, list(range(n))) for i in range(n))


def test_replicas_meet_in_cross_replica_context(strategy):
    """In the thread that called `run`, one after another; afterwards they are replicas again."""
    seen = []

    def merge(strategy):
        seen.append((threading.get_ident(), ps.in_cross_replica_context(), here(), ps.get_strategy() is strategy))

    def fn(i):
        before = here()
        here().merge_call(merge)
        assert here() is before

    in_replicas(strategy, fn)
    assert seen == [(threading.get_ident(), True, None, True)]


def test_variables_are_created_where_replicas_meet(strategy):
    """Once for all replicas, in the strategy."""
    v = merged(strategy, lambda s: ps.Variable(np.ones(2), name=f"met-{id(object())}"))
    assert isinstance(v, ps.Variable)
    assert v.numpy().tolist() == [1.0, 1.0]
    assert strategy.extended.variable_created_in_scope(v)


def test_methods_of_variables_and_reductions_mix_with_merge_calls(strategy):
    """Whatever makes replicas meet comes in the order in which they call it."""
    n = replicas(strategy)
    v = variable(strategy, 0.0, aggregation=ps.VariableAggregation.SUM)

    def fn(i):
        v.assign_add(np.float32(i + 1))
        first = float(v)
        total = here().all_reduce("sum", np.float32(first))
        here().merge_call(lambda s: v.assign(2.0))
        return first, float(total), float(v)

    total = float(sum(range(1, n + 1)))
    assert in_replicas(strategy, fn) == ((total, total * n, 2.0),) * n


# ---- Failing ----


@pytest.mark.parametrize("meet", [0, 1, 2], ids=["before", "between", "after"])
def test_one_replica_fails_and_all_end(strategy, meet):
    """Whenever it does: the caller gets its error, with the replica named, and everything goes on working."""
    ended, wrong = [], last(strategy)

    def fn(i):
        try:
            for step in range(2):
                if (i, step) == (wrong, meet):
                    raise KeyError("mine")
                here().merge_call(lambda s: None)
            if (i, meet) == (wrong, 2):
                raise KeyError("mine")
        finally:
            ended.append(i)

    with pytest.raises(KeyError, match="mine") as caught:
        in_replicas(strategy, fn)
    assert sorted(ended) == list(range(replicas(strategy)))
    assert noted(strategy, caught.value, wrong)
    assert works(strategy)


def test_the_first_error_is_raised(strategy):
    """Not what the others raise when they are woken because of it."""

    def fn(i):
        if i == last(strategy):
            raise KeyError("first")
        with pytest.raises(RuntimeError, match=r"the run failed: KeyError\('first'\)"):
            here().merge_call(lambda s: None)
        raise IndexError

    with pytest.raises(KeyError, match="first") as caught:
        in_replicas(strategy, fn)
    assert noted(strategy, caught.value, last(strategy))
    assert works(strategy)


@pytest.mark.parametrize("caught", [False, True])
def test_what_they_met_for_fails(strategy, caught):
    """Every replica is told, none can go on by swallowing it, and the caller gets the error itself."""
    if kind_of(strategy) == "default" and caught:
        pytest.skip("the default strategy calls plain functions: what they catch is caught")
    told = []

    def fn(i):
        try:
            here().merge_call(lambda s: 1 / 0)
        except Exception as error:
            told.append(type(error))
            if not caught:
                raise

    with pytest.raises(ZeroDivisionError):
        in_replicas(strategy, fn)
    assert len(told) == replicas(strategy)
    assert works(strategy)


def test_a_failed_section_sends_nothing(strategy):
    """What was recorded for servers before the error is not done, in later runs neither."""
    if kind_of(strategy) != "embedded":
        pytest.skip("without servers an update is done at once")
    v = variable(strategy)

    def merge(strategy):
        strategy.extended.update(v, lambda v: v.assign_add(1.0))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        merged(strategy, merge)
    assert works(strategy)
    assert v.numpy().tolist() == [0.0] * 3
    v.assign_add(np.ones(3))
    assert v.numpy().tolist() == [1.0] * 3


def test_sections_before_a_failure_are_done(strategy):
    """Each is one of its own: an error does not undo those that had ended."""
    v = variable(strategy)

    def add(strategy):
        v.assign_add(np.ones(3))

    def fn(i):
        here().merge_call(add)
        if i == last(strategy):
            raise ZeroDivisionError
        here().merge_call(add)

    with pytest.raises(ZeroDivisionError):
        in_replicas(strategy, fn)
    assert v.numpy().tolist() == [1.0] * 3


def test_unequal_numbers_of_meetings_raise(strategy):
    """The error says who has ended and who waits for what; the strategy stays usable."""
    if replicas(strategy) == 1:
        pytest.skip("one replica waits for nobody")
    n = replicas(strategy)

    def meet(strategy):
        raise AssertionError("not all came")

    with pytest.raises(RuntimeError) as caught:
        in_replicas(strategy, lambda i: None if i == 0 else here().merge_call(meet))
    message = str(caught.value)
    assert "replicas make unequal numbers of merge_calls: local replicas [0] have ended" in message
    assert f"while {list(range(1, n))} wait in merge_call(" in message
    assert "meet" in message
    assert works(strategy)


def test_replicas_meet_for_one_function(strategy):
    """An all_reduce in one replica and an assignment in another are told apart."""
    if replicas(strategy) == 1:
        pytest.skip("one replica meets itself")
    v = variable(strategy, 0.0, aggregation=ps.VariableAggregation.SUM)

    def fn(i):
        if i:
            v.assign(np.float32(1.0))
        else:
            here().all_reduce("sum", 1.0)

    with pytest.raises(RuntimeError, match="replicas meet for different functions"):
        in_replicas(strategy, fn)
    assert works(strategy)
    assert float(v) == 0.0


def test_errors_of_the_house_say_where(strategy):
    """A wrong reduction in a replica's function is as much an error of that run as any other."""
    with pytest.raises(TypeError, match="cannot be reduced"):
        in_replicas(strategy, lambda i: here().merge_call(lambda s: s.reduce("mean", None, axis=None)))
    assert works(strategy)
