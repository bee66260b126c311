"""Runs a function once for each local replica, and lets the replicas meet in `merge_call`.

With one local replica all happens in the calling thread. With more, each replica has a thread, and the
caller's thread waits for them: it runs what they meet for, so that cross-replica code has one thread.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from psclient._src import context, values
from psclient._src.arrays.devices import Device, device_scope
from psclient._src.arrays.nest import Nest
from psclient._src.context import ReplicaContext, StrategyFace
from psclient._src.interpreter.interrupts import call, waits

CrossReplica = Callable[[Callable[[], Nest]], Nest]
"""Runs a section: opens it, calls what it is given, flushes, and returns what the call returned; or `RunAgain`."""


class RunAgain(BaseException):
    """Ends a run whose replicas computed with what is out of date, so that they can run once more.

    No `Exception`: what a replica catches and handles are errors, and this is none.
    """


@dataclass(frozen=True)
class _MergeRequest:
    """One replica's `merge_call`."""

    fn: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]

    @property
    def name(self) -> str:
        return getattr(self.fn, "__qualname__", type(self.fn).__qualname__)


class ReplicaRunner:
    """Runs functions on the local replicas of one strategy.

    Args:
        strategy: handed to merge functions.
        devices: one for each local replica.
        slice: tells the number of this process's first replica among all, and R.
        cross_replica: runs what a merge function does; the strategy opens and flushes its section there.
    """

    def __init__(
        self,
        strategy: StrategyFace,
        devices: Sequence[Device],
        slice: Callable[[], tuple[int, int]],
        cross_replica: CrossReplica,
    ) -> None:
        self.devices = tuple(devices)
        self._strategy = strategy
        self._slice = slice
        self._cross_replica = cross_replica
        # Held while a run is under way, and never waited for; a merge function of the run may run replicas as well.
        self._busy = threading.RLock()
        self._running = 0  # runs, each within a merge call of the one before; guarded by being busy
        self._pools: list[ThreadPoolExecutor] = []  # threads for each of them, since those of the outer ones wait

    def run(
        self, fn: Callable[..., object], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Nest:
        """Calls `fn` once for each local replica, in replica context; called in the strategy's cross-replica context.

        Args:
            fn: called with the arguments as its replica sees them.
            args: nests; of each distributed value in them a replica gets its component.
            kwargs: as `args`.

        Returns:
            The merged results, as `values.regroup_results` says.

        Raises:
            RuntimeError: another thread runs replicas, or the replicas made unequal numbers of merge calls.
            TypeError: `args` is no tuple or list.
            ValueError: a distributed argument is of another number of replicas.
            Exception: the first that a replica or a merge function raised, with a note that names the
                replica.
            RunAgain: a section did; all replicas have ended.
        """
        before, mine = self._running, False
        try:
            mine = self._busy.acquire(blocking=False)
            if not mine:
                raise RuntimeError(
                    "strategy.run was called while another run of this strategy is active; call it from "
                    "one thread at a time"
                )
            self._running = before + 1
            self._slice()  # It may have to wait for other processes: better here than in each replica.
            count, own = len(self.devices), context.arguments("run", args, kwargs)
            given = values.unwrap(own, count) if args or kwargs else [own] * count
            alone = count == 1
            results = [self._run_here(fn, *given[0])] if alone else self._run_threads(fn, given)
        finally:
            if mine:
                self._running = before
                self._busy.release()
        return values.regroup_results(results)

    def close(self) -> None:
        """Ends the replicas' threads; waits for those that still run."""
        for pool in self._pools:
            pool.shutdown()

    def _call(self, replica: int, merge: context.MergeCall, fn: Callable[..., object], given: Nest) -> Nest:
        args, kwargs = given
        device = self.devices[replica]
        here = ReplicaContext(self._strategy, replica, device, merge, self._slice)
        with context.enter_replica(here):
            if device.kind == "cpu":
                return call(fn, *args, **kwargs)
            with device_scope(device):
                return call(fn, *args, **kwargs)

    def _run_here(self, fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Nest:
        failures: list[Exception | RunAgain] = []

        def merge(merge_fn: Callable[..., Nest], args: tuple[Nest, ...], kwargs: dict[str, Nest]) -> Nest:
            # A failed section ends the run, even if the replica swallows the error: as with more replicas.
            if failures:
                raise _given_up(failures[0]) from failures[0]
            try:
                return values.select(self._make(merge_fn, [(args, kwargs)]), 0)
            except (Exception, RunAgain) as error:
                failures.append(error)
                raise

        try:
            result = self._call(0, merge, fn, (args, kwargs))
        except Exception:
            if failures and isinstance(failures[0], RunAgain):
                raise failures[0] from None  # What failed on the way out of it is done again as well.
            raise
        if failures:
            raise failures[0]
        return result

    def _run_threads(self, fn: Callable[..., object], given: Sequence[Nest]) -> list[Nest]:
        meeting = _Meeting(len(given))
        futures: list[Future[object]] = []
        try:
            for replica, own in enumerate(given):
                futures.append(self._start(meeting, replica, fn, own))
            while (calls := meeting.gather()) is not None:
                meeting.answer(self._merge(calls))
        except BaseException as error:
            meeting.fail(error)
            # After an interrupt the replicas are not waited for: they end at their next merge_call.
            if isinstance(error, Exception | RunAgain):
                wait(futures)
            raise
        return [future.result() for future in futures]

    def _start(self, meeting: _Meeting, replica: int, fn: Callable[..., object], given: Nest) -> Future[Nest]:
        def merge(*call: Nest) -> Nest:
            return meeting.call(replica, _MergeRequest(*call))

        def body() -> Nest:
            try:
                result = self._call(replica, merge, fn, given)
            except BaseException as error:  # all are raised again in the caller's thread
                meeting.fail(error, f"in {self._describe(replica)}")
                return None
            meeting.end(replica)
            return result

        # The copy takes over what is set for the caller, such as numpy.errstate.
        return self._pool.submit(contextvars.copy_context().run, body)

    @property
    def _pool(self) -> ThreadPoolExecutor:
        """The threads of the run that is under way."""
        if len(self._pools) < self._running:
            self._pools.append(ThreadPoolExecutor(len(self.devices), thread_name_prefix="replica"))
        return self._pools[self._running - 1]

    def _describe(self, replica: int) -> str:
        first, count = self._slice()
        return f"replica {first + replica} of {count} (local replica {replica}, on {self.devices[replica]})"

    def _merge(self, calls: Sequence[_MergeRequest]) -> list[Nest]:
        """Runs the function that the replicas met for; returns what each of them gets."""
        if len(calls) > 1 and len({call.name for call in calls}) > 1:
            raise RuntimeError(
                "the replicas called merge_call with different functions: "
                + ", ".join(f"{call.name} in local replica {i}" for i, call in enumerate(calls))
            )
        result = self._make(calls[0].fn, [(call.args, call.kwargs) for call in calls])
        return [values.select(result, replica) for replica in range(len(calls))]

    def _make(self, fn: Callable[..., Nest], given: Sequence[Nest]) -> Nest:
        """Calls a function once, with the merged arguments of all replicas."""
        args, kwargs = values.regroup(given)
        with context.enter_cross_replica(self._strategy):
            return self._cross_replica(partial(fn, self._strategy, *args, **kwargs))


def _given_up(failure: BaseException) -> BaseException:
    """Returns what a replica's `merge_call` raises once something has ended the run."""
    if isinstance(failure, RunAgain):
        return RunAgain()
    return RuntimeError(f"merge_call was cancelled, because the run failed: {failure!r}")


class _Meeting:
    """The point where the replicas of one run meet. A replica runs, waits in a merge_call, or has ended.

    `call`, `end` and `fail` are for the replicas' threads; `gather`, `answer` and `fail` for the
    caller's. Once something has failed nobody waits any longer.
    """

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()  # guards all below
        self._running = set(range(count))
        self._calls: dict[int, _MergeRequest] = {}
        self._answers: dict[int, object] = {}
        self._ended: set[int] = set()
        self._failure: BaseException | None = None

    def call(self, replica: int, call: _MergeRequest) -> Nest:
        """Waits for the others, and for the answer; raises once the run has failed, see `_given_up`."""
        with self._changed:
            if self._failure is None:
                self._calls[replica] = call
                self._stop(replica)
                self._changed.wait_for(lambda: replica in self._answers or self._failure is not None)
            if self._failure is not None:
                raise _given_up(self._failure)
            return self._answers.pop(replica)

    def end(self, replica: int) -> None:
        """Notes that a replica's function has returned."""
        with self._changed:
            self._ended.add(replica)
            self._stop(replica)

    def fail(self, error: BaseException, where: str = "") -> None:
        """Fails the run; the first error counts."""
        with self._changed:
            if self._failure is None:
                self._failure = error
                if where:
                    error.add_note(where)
            self._changed.notify_all()

    @waits
    def gather(self) -> list[_MergeRequest] | None:
        """Waits until all replicas wait, or all have ended.

        Returns:
            The calls, in the order of the replicas; None if all have ended.

        Raises:
            RuntimeError: some wait for others that have ended.
            BaseException: the error that made the run fail.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            if self._calls and self._ended:
                raise RuntimeError(
                    "the replicas made different numbers of merge_calls: local replicas "
                    f"{sorted(self._ended)} have ended, but {sorted(self._calls)} wait in "
                    f"merge_call({self._calls[min(self._calls)].name}); call it in every replica"
                )
            return [self._calls[replica] for replica in sorted(self._calls)] or None

    def answer(self, answers: Sequence[object]) -> None:
        """Lets the replicas go on, each with its own answer."""
        with self._changed:
            self._answers = dict(enumerate(answers))
            self._running = set(self._answers)
            self._calls = {}
            self._changed.notify_all()

    def _stop(self, replica: int) -> None:
        self._running.discard(replica)
        self._changed.notify_all()
