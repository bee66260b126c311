"""Contexts: which one holds, and what may be called in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

import psclient as ps
from psclient._src import context
from psclient._src.context import ReplicaContext
from psclient._src.devices import CPU


class Strategy:
    pass


def replica_of(strategy: Any) -> ReplicaContext:
    return ReplicaContext(strategy, 1, CPU, lambda fn, args, kwargs: fn(strategy, *args, **kwargs), lambda: (2, 5))


def state() -> tuple[Any, bool, bool, bool, bool]:
    return (
        context.get_strategy(),
        context.has_strategy(),
        context.get_replica_context() is not None,
        context.in_cross_replica_context(),
        context.in_merge_call(),
    )


DEFAULT = (ps.get_strategy(), False, True, False, False)


def test_each_context_says_what_it_is() -> None:
    """Entering and leaving: default, cross-replica, replica, cross-replica again, update."""
    s = Strategy()
    assert state() == DEFAULT
    with context.enter_strategy_scope(s):
        assert state() == (s, True, False, True, False)
        with context.enter_replica(replica_of(s)):
            assert state() == (s, True, True, False, False)
            with context.enter_cross_replica(s):
                assert state() == (s, True, False, True, True)
                with context.enter_strategy_scope(s):
                    assert state() == (s, True, False, True, True)
                with context.enter_update(s):
                    assert state() == (s, True, False, False, False)
            assert state() == (s, True, True, False, False)
    assert state() == DEFAULT


def test_a_context_is_left_after_an_error() -> None:
    """Whatever is raised inside."""
    with pytest.raises(KeyError), context.enter_strategy_scope(Strategy()):
        raise KeyError
    assert state() == DEFAULT


def test_the_same_strategy_nests_and_changes_nothing() -> None:
    """Its scope inside its own replica context is no way into cross-replica context."""
    s = Strategy()
    with context.enter_strategy_scope(s), context.enter_strategy_scope(s):
        assert context.in_cross_replica_context()
    inner = replica_of(s)
    with context.enter_replica(inner), context.enter_strategy_scope(s):
        assert context.get_replica_context() is inner
    assert state() == DEFAULT


def test_strategies_do_not_mix() -> None:
    """Another strategy's scope, or a method of another strategy, raises."""
    s, other = Strategy(), Strategy()
    with context.enter_strategy_scope(s):
        with pytest.raises(RuntimeError, match="mixed"), context.enter_strategy_scope(other):
            pass
        with pytest.raises(RuntimeError, match="mixed"):
            context.require_cross_replica(other, "reduce")
        assert context.get_strategy() is s


def test_a_scope_is_of_the_moment_it_is_entered() -> None:
    """Made in one context and entered in another, it goes by the other."""
    s = Strategy()
    with context.enter_strategy_scope(s):
        made = context.enter_strategy_scope(s)
    with made:
        assert state() == (s, True, False, True, False)


def test_scopes_are_per_thread() -> None:
    """A new thread begins without a strategy."""
    seen: list[Any] = []
    with context.enter_strategy_scope(Strategy()):
        thread = threading.Thread(target=lambda: seen.append(state()))
        thread.start()
        thread.join()
    assert seen == [DEFAULT]


@pytest.mark.parametrize(
    ("enter", "message"),
    [
        (lambda s: context.enter_replica(replica_of(s)), "in replica context; .*outside of the function given to"),
        (lambda s: context.enter_update(s), "in update context; .*given to update"),
        (lambda s: contextlib.nullcontext(), "in default context; .*with strategy.scope"),
    ],
)
def test_wrong_contexts_name_the_remedy(enter: Callable[[Any], Any], message: str) -> None:
    """A cross-replica method in any other context says what to do."""
    s = Strategy()
    with enter(s), pytest.raises(RuntimeError, match=f"reduce needs cross-replica context, .*{message}"):
        context.require_cross_replica(s, "reduce")


def test_what_needs_a_replica_says_so() -> None:
    """In cross-replica and update context there is none; the default context is one."""
    s = Strategy()
    for entered in (context.enter_strategy_scope(s), context.enter_update(s)):
        with entered, pytest.raises(RuntimeError, match=r"all_gather needs replica context.*strategy.run"):
            context.require_replica("all_gather")
    assert context.require_replica("all_gather").num_replicas_in_sync == 1


def test_a_replica_context_follows_the_group() -> None:
    """Numbers are those of now: they change where an epoch of membership does."""
    where = [(2, 5)]
    replica = ReplicaContext(Strategy(), 1, CPU, lambda *_: None, lambda: where[0])
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (3, 5)
    where[0] = (0, 2)
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (1, 2)
    assert replica.devices == ("cpu:0",)


def test_merge_call_on_another_context_raises() -> None:
    """A context is of use in its own thread, while its function runs."""
    s = Strategy()
    replica = replica_of(s)
    for entered in (context.enter_strategy_scope(s), context.enter_replica(replica_of(s))):
        with entered, pytest.raises(RuntimeError, match="not, or no longer, the current one"):
            replica.merge_call(lambda strategy: None)
    with context.enter_replica(replica):
        assert replica.merge_call(lambda strategy, a, b: (strategy, a, b), (1,), {"b": 2}) == (s, 1, 2)


def test_the_default_context_is_one_replica() -> None:
    """Its `merge_call` runs at once, in cross-replica context, with the default strategy."""
    replica, default = context.get_replica_context(), ps.get_strategy()
    assert replica is not None
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync, replica.strategy) == (0, 1, default)
    merged = replica.merge_call(lambda strategy, x: (strategy, x, context.in_cross_replica_context()), (3,))
    assert merged == (default, 3, True)
    assert replica.all_reduce("sum", {"a": 1}) == {"a": 1}
    given = object()
    assert replica.all_reduce("sum", given) is given


def test_contexts_are_left_in_order() -> None:
    """An outer one that is left first is told, and does not stay behind."""
    s = Strategy()
    outer, inner = context.enter_strategy_scope(s), context.enter_update(s)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="left before"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert state() == DEFAULT
