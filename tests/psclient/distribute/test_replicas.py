"""Threads of the local replicas, and how a run ends; what `run` and `merge_call` give is in strategies/."""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from psclient._src import context, values
from psclient._src.arrays.devices import Device
from psclient._src.context import ReplicaContext
from psclient._src.distribute.replicas import ReplicaRunner, RunAgain
from tests.kit.strategies import refused


@pytest.fixture(autouse=True)
def _no_hang():
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Strategy:
    """As much of a strategy as a runner needs."""

    def __init__(self, replicas: int) -> None:
        self.extended = self
        devices = [Device("cpu", index) for index in range(replicas)]
        self.runner = ReplicaRunner(self, devices, lambda: (0, replicas), lambda call: call())

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        with context.enter_cross_replica(self):
            return self.runner.run(fn, args, kwargs)


@pytest.fixture(params=[1, 2, 3])
def strategy(request):
    made = Strategy(request.param)
    yield made
    made.runner.close()


@pytest.fixture
def two():
    made = Strategy(2)
    yield made
    made.runner.close()


here = context.get_replica_context


def count(strategy: Strategy) -> int:
    return len(strategy.runner.devices)


def works(strategy: Strategy) -> bool:
    """A run with a merge_call, as a proof that the strategy is still usable."""
    answer = object()
    return strategy.run(lambda: here().merge_call(lambda s: answer)) is answer


def test_replicas_run_at_the_same_time(two):
    """Each in a thread of its own, the same ones in every run, which `close` ends; one alone in the caller's. What is
    set for the caller, such as numpy.errstate, holds in a run."""
    barrier = threading.Barrier(2, timeout=30)

    def fn() -> str:
        barrier.wait()
        return threading.current_thread().name

    names = [set(values.local_results(two.run(fn))) for _ in range(2)]
    assert len(names[0]) == 2
    assert names[0] == names[1]
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        two.run(lambda: np.ones(1) / np.zeros(1))
    only = Strategy(1)
    assert only.run(threading.current_thread) is threading.current_thread()
    before = set(threading.enumerate())  # other tests keep strategies
    made = Strategy(3)
    made.run(lambda: None)
    made.runner.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("replica") and t not in before]


def test_replicas_that_do_not_meet_are_told(two):
    """Another function would be left out in silence; arguments of another structure name the path; one that meets once
    more than the others is woken. `run` raises it, and the next run works."""
    told: list[str] = []

    def unequal() -> None:
        here().merge_call(lambda s: None)
        if here().local_replica_id == 1:
            try:
                here().merge_call(lambda s: None)
            except RuntimeError as error:
                told.append(str(error))
                raise

    for error, said, fn in (
        (RuntimeError, "different functions", lambda: here().merge_call((str, repr)[here().local_replica_id])),
        (ValueError, "differ at", lambda: here().merge_call(lambda s, *a: None, (1,) * (1 + here().local_replica_id))),
        (RuntimeError, r"made different numbers of merge_calls: local replicas \[0\] have ended", unequal),
    ):
        refused(error, said, lambda fn=fn: two.run(fn))
        assert works(two)
    assert len(told) == 1
    assert "unequal" in told[0]


def test_the_first_error_is_the_one_that_is_raised(two):
    """Others because of it do not hide it, nor can they go on by catching it; `sys.exit` ends the script."""

    def fn(error: type[BaseException]) -> None:
        if here().local_replica_id == 1:
            raise error
        for _ in range(3):
            try:
                here().merge_call(lambda s: None)
            except RuntimeError:
                pass
        raise KeyError

    for error in (ZeroDivisionError, SystemExit):
        refused(error, "", lambda error=error: two.run(fn, (error,)))
        assert works(two)


def test_a_merge_function_runs_replicas(strategy):
    """To any depth, in threads of their own, which `RunAgain` and errors leave."""

    def deeper(depth: int) -> list[int]:
        def merge(s: Strategy) -> list[int]:
            return [depth, *s.run(deeper, (depth - 1,))] if depth else []

        found: list[int] = here().merge_call(merge)
        return found

    def fail(error: BaseException) -> None:
        raise error

    assert strategy.run(deeper, (3,)) == [3, 2, 1]
    for error in (KeyError("mine"), RunAgain()):
        with pytest.raises(type(error)):
            strategy.run(lambda error=error: here().merge_call(lambda s: s.run(fail, (error,))))
    assert works(strategy)


def test_a_context_that_was_kept_is_stale(strategy):
    """After its run, in the next run, and in a thread of the replica's own, in which nothing can be run."""
    kept: list[ReplicaContext] = []
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            kept[0].merge_call(lambda s: None)
        except RuntimeError as error:
            errors.append(error)

    def runs() -> None:
        attempt()
        refused(RuntimeError, "^strategy.run was called w", lambda: strategy.run(lambda: None))

    def fn() -> None:
        if here().local_replica_id == 0:
            kept.append(here())
            with ThreadPoolExecutor(1) as pool:
                pool.submit(runs).result()

    strategy.run(fn)
    attempt()
    strategy.run(attempt)
    assert len(errors) == 2 + count(strategy)
    assert works(strategy)


def test_an_interrupt_ends_a_run(two):
    """Ctrl-C reaches the caller at once, though a replica still computes; replicas that wait are woken."""
    release, ended = threading.Event(), threading.Event()

    def fn() -> None:
        if here().local_replica_id == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            release.wait(30)
            return
        try:
            here().merge_call(lambda s: None)
        finally:
            ended.set()

    refused(KeyboardInterrupt, "", lambda: two.run(fn))
    assert ended.wait(30)
    release.set()
    assert works(two)


@pytest.mark.parametrize("answer", ["pass", "catch", "swallow", "fail"])
def test_a_run_that_is_to_be_made_again_ends_in_every_replica(strategy, answer):
    """`RunAgain` leaves their functions past all that handles errors, whatever they do on the way out. It is made again
    when none runs any more: one that takes its time would meet those of the next run."""
    ended, handled, late = [], [], threading.Event()

    def again(s: Strategy) -> None:
        raise RunAgain

    def fn() -> None:
        try:
            here().merge_call(again)
        except Exception as error:
            handled.append(error)
        except BaseException:
            if answer == "catch":
                here().merge_call(lambda s: handled.append(s))
            if answer != "swallow":
                raise
        finally:
            if here().local_replica_id == 1:
                late.wait(0.1)
            ended.append(here().local_replica_id)
            if answer == "fail":
                raise OSError("cannot close what was never opened")

    refused(RunAgain, "", lambda: strategy.run(fn))
    assert sorted(ended) == list(range(count(strategy)))
    assert not handled
    assert works(strategy)
