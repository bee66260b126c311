"""`ClusterCoordinator`: schedules functions, which the workers of a job run, and waits for them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from psclient._src.arrays import nest
from psclient._src.arrays.nest import Nest
from psclient._src.cluster_resolver.base import ClusterResolver
from psclient._src.config import task_config
from psclient._src.network.session import Session
from psclient._src.options import InputContext
from psclient._src.strategies.parameter_server import ParameterServerStrategy
from psclient.coordinator import functions
from psclient.coordinator.content import decode, encode
from psclient.coordinator.pieces import error_of, pieces_of, result_of, wait
from psclient.coordinator.values import LIVING, PerWorkerValues
from pswire.cluster import Task
from pswire.errors import ClosureError, ConfigError, RoundTimeout
from pswire.model.closures import ClosureOrder, ClosureQueue

log = logging.getLogger("psclient")

HOW = "run the script with psworker --standalone --chief-runs-script SCRIPT, or let the cluster's chief task run it"


def is_coordinator(cluster_resolver: ClusterResolver | None = None) -> bool:
    """Returns True in the process that coordinates (the chief), False in a worker.

    Without a cluster it is True; `ClusterCoordinator` then explains in its error how to start one.

    Args:
        cluster_resolver: finds the cluster and this process's task; by default from `TF_CONFIG`.
    """
    if cluster_resolver is not None:
        return cluster_resolver.task_type == "chief"
    config = task_config()
    return config is None or config.task.job == "chief"


class RemoteValue:
    """The future result of a scheduled function.

    It may be an argument of another scheduled function: the result then goes from server 0 to the worker. Server 0
    keeps the result as long as this object exists.

    Source: `tf.distribute.coordinator.RemoteValue`.
    """

    _nest_leaf: ClassVar[bool] = True

    def __init__(self, number: int, session: Session, look: Callable[[], object], dropped: deque[int]) -> None:
        self._number = number
        self._session = session
        self._look = look
        self._lock = threading.Lock()
        self._content: bytearray | None = None
        self._ending = weakref.finalize(self, dropped.append, number)
        self._ending.atexit = False

    def fetch(self) -> Any:
        """Waits for the result and returns it: a nest of arrays on the host, numbers and strings. In any context.

        Raises:
            ClosureError: the function has raised an error.
            ClosureCancelled: the function was not run, because another one had failed.
            ServerLost: a server was lost.
        """
        with self._lock:
            if self._content is None:
                self._content = result_of(self._session, self._number, self._look)
            return decode(self._content)

    def get(self) -> Any:
        """Returns the result, as `fetch`."""
        return self.fetch()

    def __repr__(self) -> str:
        return f"RemoteValue(closure {self._number})"


class ClusterCoordinator:
    """Schedules functions on the workers of a job, each on any worker that is free. Only in the chief.

    A scheduled function runs once, and its updates count once, also if workers are lost: another worker then runs the
    function again from its beginning, and for each update the first result that reaches a server counts. The second run
    may read newer values. A result comes from the worker that has finished the function.

    At most 1024 functions wait for a worker; then `schedule` blocks. A function that raises an error cancels the
    waiting ones, and the next `schedule`, `join` or `done` raises it as `ClosureError`; after that functions can be
    scheduled again.

        @ps.coordinator.function                                    # in every process
        def train_step(iterator):
            return strategy.run(step, args=(next(iterator),))

        coordinator = ps.coordinator.ClusterCoordinator(strategy)   # in the chief: ps.coordinator.is_coordinator()
        iterator = iter(coordinator.create_per_worker_dataset(make_dataset))
        results = [coordinator.schedule(train_step, args=(iterator,)) for _ in range(100)]
        coordinator.join()
        losses = coordinator.fetch(results)

    Any thread may call the methods.

    Source: `tf.distribute.coordinator.ClusterCoordinator`.

    Args:
        strategy: a strategy with `consistency=ps.Async()`, in the chief of a cluster with workers.

    Raises:
        TypeError: `strategy` is not a `ParameterServerStrategy`.
        ConfigError: this process is not a chief, the job is not asynchronous, there are no workers, or they have
            registered other functions.
    """

    _made = False

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """Returns the coordinator of a strategy: there is one."""
        found = strategy._coordinator if isinstance(strategy, ParameterServerStrategy) else None
        return found if isinstance(found, cls) else super().__new__(cls)

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if self._made:
            return
        if not isinstance(strategy, ParameterServerStrategy):
            raise TypeError(f"ClusterCoordinator takes a ParameterServerStrategy, not {type(strategy).__name__}")
        task, resolver = strategy.task, strategy.cluster_resolver
        if resolver is None:
            raise ConfigError(f"ClusterCoordinator needs a cluster whose workers run the scheduled functions; {HOW}")
        if task.job != "chief":
            raise ConfigError(
                (
                    f"{task} is not the coordinator: the chief schedules functions and the workers run them. "
                    "Create ClusterCoordinator below `if ps.coordinator.is_coordinator():`, and "
                )
                + HOW
            )
        check_asynchronous(strategy)
        self._workers = len(resolver.cluster_spec().tasks("worker"))
        if not self._workers:
            raise ConfigError("the cluster has no workers to run scheduled functions; add workers", str(task))
        if not functions.registry():
            raise ConfigError(
                "no function is registered; decorate functions to be scheduled with @ps.coordinator.function"
            )
        self._strategy = strategy
        self._session: Session = strategy._session
        self._lock = threading.Lock()  # guards the three below, and keeps closures in order
        self._next, self._unsure = 1, False
        self._held: dict[int, object] = {}  # what the arguments of each closure refer to, until it is over
        self._told = 0
        self._dropped: deque[int] = deque()
        self._idle = 0.0
        state = self._ask(ClosureOrder(functions=functions.registry()))
        self._next, self._told = state.number + 1, state.failures
        strategy._exchange.creation.send()
        strategy._exchange.creation.by_name = strategy._exchange.group.coordinated = True
        self._made, strategy._coordinator = True, self

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The constructor's strategy."""
        return self._strategy

    # ---- Functions ----

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Schedules a function, and returns at once unless the queue is full. In any context.

        On a worker it runs in cross-replica context, as within `strategy.scope()`: it may call `strategy.run` and
        optimizers. It uses variables that every process has created. Variables that functions create, such as the state
        of an optimizer in its first step, are found by name in all processes.

        Args:
            fn: a function registered by `ps.coordinator.function`.
            args: positional arguments: nests of numbers, strings, arrays, `RemoteValue` and `PerWorkerValues`; copied.
                The function gets the value of a `RemoteValue`, and its worker's value of a `PerWorkerValues`.
            kwargs: keyword arguments, likewise.

        Returns:
            A `RemoteValue` for the function's result, a nest of numbers, strings and arrays.

        Raises:
            ClosureError: an earlier function has failed; the waiting ones are cancelled, and this one is not scheduled.
            TypeError: the function is not registered, or an argument is code or another value that cannot be sent.
            MemoryLimit: server 0 does not have enough memory for the arguments.
            ConfigError: a worker has registered other functions.
            ServerLost: a server was lost.
        """
        name, refers = functions.name_of(fn), _References(self._session)
        if not isinstance(args, tuple | list):
            raise TypeError(f"args must be a tuple or a list, not {type(args).__name__}; use args=(value,)")
        given = (tuple(args), dict(kwargs or {}), LIVING.told())
        content = encode(given, f"args of {name}", refers.refer)
        with self._lock:
            self._settle()
            number, self._unsure = self._next, True
            order = ClosureOrder(number, name, tuple(sorted(refers.needs)))
            for piece in pieces_of(content):
                state = self._ask(replace(order, arguments=piece))
                if state.number < number:
                    self._raise(state)
            self._next, self._unsure = number + 1, False
            self._held[number] = refers.held
        return RemoteValue(number, self._session, self._look, self._dropped)

    def _settle(self) -> None:
        """Lets go of the closure whose scheduling was cut short by an error or an interrupt, if one was."""
        if self._unsure:
            self._next = self._ask(ClosureOrder(dropped=(self._next,))).number + 1
            self._unsure = False

    def join(self) -> None:
        """Waits until all scheduled functions have finished. In any context.

        Raises:
            ClosureError: a function has failed; no function is running any more.
            RoundTimeout: there was no worker for `PS_ROUND_TIMEOUT`.
            ServerLost: a server was lost.
        """
        with self._lock:
            self._settle()
        state = self._ask(ClosureOrder(joins=True))
        if state.failure is not None:
            self._raise(state)

    def done(self) -> bool:
        """Returns whether all scheduled functions have finished, without waiting. In any context.

        Raises:
            ClosureError: as in `join`, after the running functions have finished.
        """
        state = self._ask(ClosureOrder())
        if state.failure is not None:
            self._raise(state)
        return not (state.queued or state.running)

    def fetch(self, val: Nest) -> Nest:
        """Waits for the `RemoteValue`s in a nest, and returns the nest with their results. In any context.

        Raises:
            ClosureError: as in `RemoteValue.fetch`.
            ClosureCancelled: as in `RemoteValue.fetch`.
            ServerLost: as in `RemoteValue.fetch`.
        """
        return nest.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset_fn: Callable[..., Any]) -> PerWorkerValues:
        """Makes a dataset on each worker, by a function that the worker calls when it needs it. In any context.

        Args:
            dataset_fn: a function registered by `ps.coordinator.function`. It takes no arguments, or an `InputContext`
                with the worker's number, and returns an iterable, such as a `ps.ArrayDataset`.

        Returns:
            The dataset of each worker; `iter` of it is an iterator for each worker, an argument for `schedule`.

        Raises:
            TypeError: the function is not registered, or a dataset is given instead; datasets are never sent.
        """
        context = InputContext(self._workers, 0, self._strategy.num_replicas_in_sync)
        return PerWorkerValues("dataset", functions.name_of(dataset_fn, "create_per_worker_dataset"), context=context)

    # ---- Server 0 ----

    def _ask(self, order: ClosureOrder) -> ClosureQueue:
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        order = replace(order, told=self._told, dropped=tuple(dropped))
        self._idle = 0.0
        session = self._session
        state = wait(session, session.log_server.schedule(session.number, order), self._look)
        for number in [number for number in list(self._held) if number < state.settled]:
            self._held.pop(number, None)
        return state

    def _raise(self, state: ClosureQueue) -> None:
        """Raises the error of a function that has failed, once no function runs any more."""
        if state.queued or state.running:
            state = self._ask(ClosureOrder(joins=True))
        failure, self._told = state.failure, state.failures
        raise error_of(failure) if failure is not None else ClosureError("a function has failed", str(self._task))

    @property
    def _task(self) -> Task:
        return self._session.task

    def _look(self) -> None:
        """Raises if no worker has been there for too long; called every `Timeouts.report_interval` of a wait."""
        session = self._session
        future = session.log_server.schedule(session.number, ClosureOrder(told=self._told))
        state = wait(session, future, lambda: None)
        self._idle = 0.0 if state.workers else self._idle + session.timeouts.report_interval
        if self._idle > session.timeouts.round_timeout:
            raise RoundTimeout(
                f"{self._task} waits for {state.queued + state.running} closures, but no worker was "
                f"connected for {self._idle:.0f} s; restart the workers"
            )
        log.log(
            logging.INFO if state.workers else logging.WARNING,
            "%s waits for %d closures, of which %d are run, by %d workers",
            *(self._task, state.queued + state.running, state.running, state.workers),
        )


class _References:
    """The values elsewhere that the arguments of one closure refer to.

    Attributes:
        needs: numbers of the closures whose results are among them.
        held: what must live as long as the closure is not over.
    """

    def __init__(self, session: Session) -> None:
        self.needs: set[int] = set()
        self.held: list[object] = []
        self._session = session

    def refer(self, value: object) -> Mapping[str, Any] | None:
        if isinstance(value, RemoteValue):
            if value._session is not self._session:
                raise TypeError(f"{value!r} belongs to another job; create it in this job")
            self.needs.add(value._number)
            self.held.append(value)
            return {"remote": value._number}
        if isinstance(value, PerWorkerValues):
            self.held.append(value)
            return {"per worker": value._reference()}
        return None


def check_asynchronous(strategy: ParameterServerStrategy) -> None:
    """Raises `ConfigError` unless the workers of a strategy make rounds of their own."""
    if strategy.consistency.mode != "async":
        raise ConfigError(
            "closures need workers that do not wait for each other; use "
            "ps.ParameterServerStrategy(consistency=ps.Async()) in every process",
            str(strategy.task),
        )
