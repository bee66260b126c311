"""`ParameterServerStrategy`: where a training script begins."""

from __future__ import annotations

import _thread
import gc
import json
import logging
import os
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np

from psclient._src import context, values
from psclient._src.arrays.devices import local_devices
from psclient._src.chief.driver import Chief
from psclient._src.chief.standby import Deputy, taken_over_by
from psclient._src.cluster_resolver.base import ClusterResolver
from psclient._src.cluster_resolver.tf_config import TFConfigClusterResolver, task_of
from psclient._src.config import (
    check_transport,
    ends_with_script,
    job_from,
    local_reduction_from,
    refused_from,
    replication_factor_from,
    saves_on_sigterm,
    security_from,
    timeouts_from,
    transport_from,
)
from psclient._src.distribute.strategy import Strategy
from psclient._src.interpreter.interrupts import INTERRUPTS
from psclient._src.interpreter.lifetimes import weakly
from psclient._src.network.remote_server import RemoteServer, connect
from psclient._src.network.session import Session
from psclient._src.options import Consistency, ReduceOp, Round, Sync
from psclient._src.processes import shutdown
from psclient._src.processes.blas import share_cores
from psclient._src.processes.embedded_server import EmbeddedServer
from psclient._src.processes.sigterm import NOTICE, Leaving
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.rounds.membership import Group
from psclient._src.rounds.placement import Placement, PsStrategy, check_ps_strategy
from psclient._src.rounds.rounds import Exchange
from psclient._src.strategies.consistency import (
    change,
    check_copied,
    check_deterministic,
    check_place,
    check_workers,
    consistency_of,
    is_apart,
    meet,
    value_of,
)
from psclient._src.strategies.extended_v1 import StrategyExtended
from psclient._src.telemetry.exporter import Exporter
from psclient._src.variables.compression import Compression, check_compression
from psclient._src.variables.partitioners import PartitionFn, check_partitioner
from pswire.cluster import ClusterSpec, Task, TaskConfig
from pswire.errors import (
    CheckpointError,
    ConfigError,
    PSError,
    ScriptFailed,
    ServerGone,
    ServerLost,
    TaskTaken,
    Unreachable,
    UsageError,
)
from pswire.limits import Timeouts
from pswire.network.traffic import TransportName
from pswire.security.identity import Security
from pswire.security.names import task_name

OF_SIGNALS = 128
"""Exit codes above are those of processes that a signal ended."""

BY_NAMES = json.dumps({"objects": {}, "state": {}, "delete": [], "latest": True})
"""The order of a checkpoint of all variables by their names."""

SHOWN_CHARACTERS = 160
"""Of an error that ended a script, for the other workers."""

log = logging.getLogger("psclient")

_open: weakref.WeakSet[ParameterServerStrategy] = weakref.WeakSet()
_joined: set[tuple[Task, *tuple[str, ...]]] = set()
"""The task and the addresses of the servers of each job in which this process has taken part."""


class ParameterServerStrategy(Strategy):
    """Trains with variables on parameter servers, as `tf.distribute` does.

    Every process of the job runs the same script. Without a cluster, the strategy starts one local server.

    Calls send their rounds and return at once. Reading a value waits until it has arrived, see `blocking_waits`.

    One thread at a time may run replicas, reduce, update, create variables and save. Another thread that calls one of
    these waits until the first thread's work is sent, at the latest when its scope ends, and raises an error after
    `PS_CALL_TIMEOUT`. All threads may read variables; a thread that makes no rounds reads the newest values. A fork of
    the process does not take part in the job: it may only use values that were read before.

    Args:
        devices: devices of the local replicas, such as `["cpu:0", "cpu:1"]` or `["gpu:0"]`; by default all GPUs, or one
            CPU.
        consistency: `Sync()`, the default, `Quorum(size)`, `BoundedStaleness(k)` or `Async()`; the same in all
            processes. `set_consistency` changes it while the job runs.
        cluster_resolver: finds the cluster and the task of this process; by default `TFConfigClusterResolver()`.
        timeouts: time limits; by default those of the environment, such as `PS_SESSION_TIMEOUT`.
        ps_strategy: how to choose the server for a variable that is not colocated with another; the same in all
            processes. "greedy" chooses the server with the fewest bytes, "round_robin" the next in turn, as TensorFlow
            does by default. Both skip servers whose memory limit the variable would exceed.
        transport: the fastest transport to use: "shm", "tcp" or "grpc". If it does not work, the next slower one is
            used. By default `PS_TRANSPORT`, else the fastest that works.
        deterministic: True to require bit-identical results from each run of the same job, on any number of servers:
            contributions are summed in task order, and batches are those of the checkpoint. Every `Sync()` job whose
            workers stay computes such results. `Quorum(size)`, `BoundedStaleness(k)`, `Async()` and backup workers
            raise `ConfigError`.
        variable_partitioner: cuts variables into shards, which are placed on the servers in turn: a function of a shape
            and a dtype that returns the number of parts for each axis, such as one of `ps.experimental.partitioners`;
            the same in all processes. A variable with more than one shard is a `ps.ShardedVariable`. None for no
            shards.
        local_reduction: True to sum the gradients of all workers on a host in shared memory, so that one worker sends
            the sum; for synchronous rounds. By default `PS_LOCAL_REDUCTION`, else False.
        compression: compresses gradients of trained floating-point variables that do not set it themselves: one of
            `ps.compression`, the same in all processes. None for no compression. See `docs/compression.md`.

    Raises:
        TaskTaken: a strategy of this process, or another process, has this task of the job.
        ConfigError: `TF_CONFIG`, a device, `ps_strategy`, `transport`, a certificate or the token is wrong; another
            process uses another consistency or another `k`; `deterministic` with a consistency other than `Sync()` or
            with `backup_workers`; not more workers than `backup_workers`, or fewer than a quorum.
        TypeError: `compression` is not one of `ps.compression`.
        Unreachable: a server does not answer.
        UsageError: it does not answer, and this process closed a strategy of this job before.
        ChiefLost: no chief started the job in time.

    Examples:
        >>> import numpy as np
        >>> import psclient as ps
        >>> strategy = ps.ParameterServerStrategy()  # without TF_CONFIG: one local server
        >>> with strategy.scope():
        ...     w = ps.Variable(np.zeros(2, np.float32))
        ...     optimizer = ps.optimizers.SGD(learning_rate=0.5)
        >>> def step(x):
        ...     gradient = w.numpy() - x
        ...     optimizer.apply_gradients([(gradient, w)])
        >>> strategy.run(step, args=(np.ones(2, np.float32),))
        >>> w.numpy()
        array([0.5, 0.5], dtype=float32)
        >>> strategy.close()
    """

    extended: StrategyExtended

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        consistency: Consistency | None = None,
        cluster_resolver: ClusterResolver | None = None,
        timeouts: Timeouts | None = None,
        ps_strategy: PsStrategy = "greedy",
        transport: TransportName | None = None,
        deterministic: bool = False,
        variable_partitioner: PartitionFn | None = None,
        compression: Compression | None = None,
        local_reduction: bool | None = None,
    ) -> None:
        self._coordinator: object = None  # the `ClusterCoordinator`, once there is one
        check_ps_strategy(ps_strategy)
        self._given = consistency or Sync()
        self._deterministic = deterministic
        check_deterministic(deterministic, self._given)
        self._transport = transport_from() if transport is None else check_transport(transport)
        self._local_reduction = local_reduction_from() if local_reduction is None else local_reduction
        self._ps_strategy = ps_strategy
        self._partitioner = check_partitioner(variable_partitioner)
        self._compression = check_compression(compression, "ParameterServerStrategy") or None
        INTERRUPTS.guard()
        resolver = cluster_resolver or TFConfigClusterResolver()
        config = task_of(resolver)
        self._timeouts = _limits(config, timeouts or timeouts_from())
        check_workers(self._given, config)
        self._devices = local_devices(devices)  # after the resolver, which may say which GPUs are this task's
        self._resolver = resolver if config else None
        self._embedded = EmbeddedServer(timeouts=self._timeouts) if config is None else None
        self._config = config or _embedded_config(self._embedded)
        share_cores(self._config.cluster, self._config.task)
        self._servers: list[RemoteServer] = []
        self._chief: Chief | None = None
        self._deputy: Deputy | None = None
        self._exporter: Exporter | None = None
        self._owner = os.getpid()
        self._closing = threading.Lock()
        # The process, its signals and its threads do not keep a strategy that nobody has any more: see `__del__`.
        self._closes, self._told = weakly(self._close_at_end), weakly(self._told_to_end)
        self._closed = False
        self._failed = False
        self._raised: BaseException | None = None  # what has left its `with` block
        self._undone: PSError | None = None
        self._at_end = False
        self._last_error = _last_error()
        try:
            self._connect()
        except BaseException as error:
            self._failed = True
            self.close()
            _explain(error, self._config)
            raise
        shutdown.register(self._closes)
        _take_part(self)

    def _connect(self) -> None:
        cluster, task = self._config.cluster, self._config.task
        security = self._embedded.security if self._embedded else security_from(task_name(task))
        self._exporter = Exporter(task, security)
        job, refused, copied = job_from(), refused_from(), replication_factor_from() > 1 and self._embedded is None
        if copied:
            check_copied(self._given)
        self._servers = connect(cluster, self._timeouts, self._transport, security, refused=refused, copied=copied)
        self._session = Session(
            task,
            self._servers,
            len(self._devices),
            timeouts=self._timeouts,
            consistency=value_of(self._given),
            job=job,
            # Server 0 hears a farewell; no call waits any longer for the others, one of which may be lost.
            broken=weakly(self._fail_calls),
            copied=copied,
        )
        runs_script = task.job == "chief"
        if runs_script or (not cluster.tasks("chief") and task == Task("worker", 0)):
            self._begin_to_drive(partial(self._make_chief, security, runs_script))
        if task.job == "worker" and self._embedded is None:
            self._deputy = Deputy(task, partial(weakly(self._make_chief), security), weakly(self._drives))
            self._session.drive = self._deputy.told
        self._session.open()
        self._session.await_job()
        self._expected = [*cluster.tasks("worker"), *([task] if task.job == "chief" else [])]
        self._exchange = Exchange(self._session, Group(self._session, self._devices, self._expected))
        if self._local_reduction and self._embedded is None:
            self._exchange.join_host()
        self._exporter.add_worker(self._exchange, self._servers)
        self._exchange.group.departure.save = weakly(self._save_to_leave)
        if task.job == "worker":
            NOTICE.take_part(self._told, self._timeouts.termination_grace, saves_on_sigterm())
        placement = Placement(self._ps_strategy, [*map(_memory_limit, self._servers)], self._session.begun.copies)
        self._remote = RemoteBackend(self._exchange, placement, self.consistency.nonfinite, self._partitioner)
        self._remote.variables.residuals.default = self._compression
        self._remote.variables.consistencies = weakly(self._is_apart)
        super().__init__(StrategyExtended(self, self._remote))

    def _is_apart(self, consistency: Consistency, name: str) -> bool:
        """Returns whether each worker updates a variable alone: see `consistency.is_apart`."""
        return is_apart(consistency, name, self.consistency, self._deterministic, self._session, self._given)

    def _make_chief(self, security: Security, runs_script: bool = False) -> Chief:
        cluster, task = self._config.cluster, self._config.task
        servers = connect(
            cluster, self._timeouts, security=security, drives=True, refused=refused_from(), copied=self._session.copied
        )
        ends, copied = self._session.end, self._session.copied
        return Chief(task, servers, cluster, self._timeouts, runs_script, ends, job_from(), copied)

    def _begin_to_drive(self, make: Callable[[], Chief]) -> None:
        """Drives the job beside the script, unless another process has taken that over from this task."""
        chief = make()
        try:
            chief.start(waits=False)
        except TaskTaken:
            other = taken_over_by(self._session.log_server, self.task)
            if other is not None:
                log.warning("%s is the chief instead of %s", other, self.task)
                chief.close()
                return
            chief.start()
        self._drives(chief)

    def _drives(self, chief: Chief) -> bool:
        """Takes a chief that drives beside the script; returns False for a strategy that is closed."""
        with self._closing:
            if self._closed:
                return False
            self._chief = chief
        if self._exporter is not None:
            self._exporter.add_chief(chief)
        return True

    def _fail_calls(self, error: PSError) -> None:
        """The session is over: no call waits any longer for servers, but that which says farewell to one of them."""
        for index, server in enumerate(self._servers):
            if index != self._session.hosting.keeper:
                server.fail(error)

    # ---- What it is ----

    def scope(self) -> AbstractContextManager[Strategy]:
        """As `Strategy.scope`.

        Raises:
            PSError: this process is a fork of the one that created the strategy.
        """
        self._remote.check_process()
        return super().scope()

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster and of this process's task; None if this process started its own server."""
        return self._resolver

    @property
    def consistency(self) -> Consistency:
        """The current consistency, as set last by `set_consistency`. In any context."""
        change = self._session.change
        return self._given if change is None else consistency_of(change)

    @property
    def local_rank(self) -> int:
        """As `Strategy.local_rank`; in a worker that joined later, the number of the cluster's workers on its host."""
        return sum(task < self.task for task in self._config.cluster.at_host_of(self.task) if task in self._expected)

    def _meet(self) -> None:
        group = self._remote.group
        if group.alone:
            meet(group, self._coordinator is not None, self.consistency, self.set_consistency)
        elif not group.outside:
            float(self.reduce(ReduceOp.SUM, values.per_replica([np.float32(0)] * len(self._devices))))

    def __repr__(self) -> str:
        how = self.consistency if hasattr(self, "extended") else self._given
        where = f"{self.task} of {self._config.cluster.describe()}, {how}, devices={[*map(str, self._devices)]}"
        return f"{type(self).__name__}({where}{', closed' * self._closed})"

    def set_consistency(self, consistency: Consistency) -> None:
        """Changes how updates of different workers relate, while the job runs. In cross-replica context, or outside.

        Every process calls it at the same place of the script with the same value. It waits until all processes have
        called it and all their gradients are applied. Afterwards all processes read the same values and continue with
        the same `round`. Variables, slots, tables and datasets stay. Setting the current consistency does nothing and
        does not wait.

        A process that joins or restarts gets the current consistency of the others; if its script reaches a call that
        the others have already made, that call does nothing. Therefore let the call depend on shared state, as in `if
        strategy.round < n: strategy.set_consistency(...)` before a loop up to n.

        Args:
            consistency: `Sync()`, `BoundedStaleness(k)` or `Async()`, with any of their arguments.

        Raises:
            Diverged: another process has called it with another value, makes a round first, or has not called it within
                `PS_ROUND_TIMEOUT`.
            RuntimeError: called in a replica function, or during a pass over a distributed dataset.
            ConfigError: the consistency does not work with `deterministic`, `PS_REPLICATION_FACTOR=2`, the number of
                workers, a `ClusterCoordinator` or the consistency of a variable; or a server's version does not support
                it; a quorum is to begin or to end.
            TypeError: `consistency` is not a consistency.
        """
        if not isinstance(consistency, Consistency):
            raise TypeError(
                f"{consistency!r} is not a consistency; use ps.Sync(), ps.Quorum(n), ps.BoundedStaleness(k), ps.Async()"
            )
        self._remote.check_open()
        check_place(self._remote, self.consistency, consistency, self._coordinator is not None)
        check_deterministic(self._deterministic, consistency)
        if self._session.copied:
            check_copied(consistency)
        check_workers(consistency, self._config)
        change(self._remote, self.consistency, consistency)

    @property
    def last_round(self) -> Round | None:
        """The last completed round: its members and the excluded ones. None before the first round. Does not wait."""
        return self._exchange.window.last_round

    @property
    def round(self) -> int:
        """The number of the next round. A process that restarts begins with the current number of the job."""
        return self._remote.group.round

    @property
    def blocking_waits(self) -> int:
        """The number of times that this process has waited for rounds. In any context.

        Sending a round does not wait. These calls wait: reading a value of a round in progress, such as `float(loss)`
        or a variable that it assigns; starting a batch, a save or a restore while rounds are in progress; the first
        round of each new plan; a round that may reject a value or that sends more than 4 MiB to a server.
        """
        return self._exchange.measures.waits

    @property
    def task(self) -> Task:
        """The task of this process."""
        return self._config.task

    @property
    def bytes_transferred(self) -> tuple[int, int]:
        """Payload bytes sent and received so far, in bytes."""
        return self._exchange.bytes_transferred

    # ---- The end ----

    def _told_to_end(self) -> None:
        """SIGTERM has come: all servers are told at once, and by the one that keeps the sessions the chief."""
        for wake in self._session.wakes:
            wake.set()

    def _save_to_leave(self) -> None:
        """Saves a checkpoint as the script's manager does; without one at `sigterm/ckpt-<round>`, by names."""
        try:
            if self._remote.checkpoints.saver is not None:
                self._remote.checkpoints.saver()
                return
            with self.scope(), context.enter_cross_replica(self):
                self._remote.checkpoints.save(f"sigterm/ckpt-{self.round}", BY_NAMES)
        except CheckpointError as error:
            log.error("%s could not save a checkpoint before leaving: %s", self.task, error)

    @property
    def _has_failed(self) -> bool:
        # The interpreter notes the last error before it runs exit functions. A notebook's was that of an earlier cell.
        at_end = self._at_end and not hasattr(sys, "ps1")
        return self._failed or (at_end and _last_error() is not self._last_error)

    @property
    def _alone(self) -> bool:
        """True if no other worker waits for what this one contributes."""
        return not hasattr(self, "extended") or self._remote.group.alone

    def close(self) -> None:
        """Leaves the job. Called when the process ends, if it was not called before.

        A clean end reports to the others that this process has finished. In a fork of the process it does nothing.

        Raises:
            CheckpointError: the last checkpoint could not be written; everything else is done.
            PSError: the last rounds, for which the script did not wait, failed.
        """
        if os.getpid() != self._owner:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        _open.discard(self)
        NOTICE.has_left(self._told)
        shutdown.unregister(self._closes)
        error = _failure_of(self)
        if not error and hasattr(self, "extended"):
            error = self._flush_last()
        if hasattr(self, "extended"):
            super().close()
        if hasattr(self, "_exchange") and self._exchange.pushes.near is not None:
            self._exchange.pushes.near.close()
        if hasattr(self, "_session"):
            # Only the servers may know that the job cannot go on, and that its end need not be waited for.
            error = self._session.leave(error)
        if self._deputy is not None and not (error or (self._chief and self._chief.is_driving)):
            self._chief = self._deputy.look(self._servers[0], self._timeouts) or self._chief
        if self._chief:
            self._chief.stop(abandon=bool(error), steps_down=NOTICE.leaving)
        for server in self._servers:
            server.close()
        if hasattr(self, "_session"):
            self._session.close()  # else the log would ask it where this process stands, and keep all of this
        if self._exporter:
            self._exporter.stop()
        if self._embedded:
            self._embedded.stop()
        if self._undone is not None:
            raise self._undone

    def _close_at_end(self) -> None:
        self._at_end = True
        self.close()

    def __del__(self) -> None:
        # Closing waits for servers, which whoever collects garbage shall not; and nothing here may take a lock.
        if not getattr(self, "_closed", True) and os.getpid() == self._owner and not sys.is_finalizing():
            _thread.start_new_thread(_close_dropped, (self,))

    def _flush_last(self) -> str:
        # What ends a script's last rounds is raised by nothing else.
        untold = self._exchange.busy and not self._session.told
        try:
            # A script that has caught why its session ended does not leave cleanly either.
            self._session.check()
            self._remote.parts.hand_in(ends=False)
            self._remote.settle()
            self._wait_saved()
        except PSError as error:
            log.error("%s ended with unfinished work: %s", self.task, error)
            self._undone = error if untold else None
            return str(error)
        return ""

    def _wait_saved(self) -> None:
        """Waits until the last checkpoint is complete; keeps its failure for the end of `close`, as all leave then."""
        try:
            self._remote.checkpoints.saved()
        except CheckpointError as error:
            self._undone = CheckpointError(f"the last {error.message}", str(self.task))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._failed = self._failed or not (kind is None or issubclass(kind, Leaving))
        self._raised = rest[0] if rest and isinstance(rest[0], BaseException) else None
        super().__exit__(kind, *rest)


def _failure_of(strategy: ParameterServerStrategy) -> str:
    """Returns why this process leaves, if its script has failed: "" if not.

    The others would train on without its part. So the job ends with it, unless it will be started again.
    """
    if not strategy._has_failed:
        return ""
    error = strategy._raised or _last_error()
    ours = isinstance(error, PSError | KeyboardInterrupt | GeneratorExit | None) and not isinstance(error, UsageError)
    told = isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > OF_SIGNALS
    ends = strategy.task.job == "worker" and ends_with_script() and not (ours or told or strategy._alone)
    if not ends:
        return "the script failed"
    what = textwrap.shorten(f"{type(error).__name__}: {error}", SHOWN_CHARACTERS, placeholder=" ...")
    return f"{ScriptFailed.__name__}: the script of {strategy.task} ended with {what}"


def _close_dropped(strategy: ParameterServerStrategy) -> None:
    """Closes a strategy to which nothing refers any more."""
    try:
        strategy.close()
    except PSError as error:
        log.error("a strategy was dropped without close() and ended with unfinished work: %s", error)


def open_strategies() -> list[ParameterServerStrategy]:
    """Returns the strategies of this process that are not closed; of a fork none."""
    return [strategy for strategy in _open if strategy._owner == os.getpid()]


def _place_of(config: TaskConfig) -> tuple[Task, *tuple[str, ...]]:
    return (config.task, *map(config.cluster.address, config.cluster.tasks("ps")))


def _is_open(place: tuple[Task, *tuple[str, ...]]) -> bool:
    """Returns whether this process takes part at a place."""
    return any(_place_of(one._config) == place and one._session.ended_by() is None for one in open_strategies())


def _take_part(strategy: ParameterServerStrategy) -> None:
    _open.add(strategy)
    _joined.add(_place_of(strategy._config))


def _explain(error: BaseException, config: TaskConfig) -> None:
    """Raises `UsageError` where servers do not answer a process that has taken part in their job before."""
    if _place_of(config) in _joined and isinstance(error, Unreachable | ServerLost):
        raise UsageError(
            "the servers have ended, as this process closed its strategy before, and servers that psworker starts end "
            f"with their job; use one strategy in the whole script ({error})"
        ) from None


def _limits(config: TaskConfig | None, timeouts: Timeouts) -> Timeouts:
    """Returns the time limits of a new strategy.

    Where this process has taken part before, the servers have started: it would wait for them in vain.

    Args:
        config: the task of this process; None where it has no cluster.
        timeouts: what is asked for.

    Raises:
        ConfigError: they do not go together.
        TaskTaken: this process takes part as that task.
    """
    timeouts.check()
    if config is None:
        return timeouts
    place = _place_of(config)
    if _is_open(place):
        gc.collect()  # a strategy that nobody has any more is closed
    if _is_open(place):
        raise TaskTaken(
            f"a strategy of this process is {config.task} already; use that one in the whole script, or close it "
            "before you create another one"
        )
    if place not in _joined:
        return timeouts
    return replace(timeouts, start_timeout=min(timeouts.start_timeout, timeouts.session_timeout))


def _memory_limit(server: RemoteServer) -> int:
    """The memory limit of a server in bytes; 0 for none, and where the job goes on without the server."""
    try:
        return server.status().memory_limit
    except ServerGone:
        return 0


def _embedded_config(embedded: EmbeddedServer | None) -> TaskConfig:
    if embedded is None:
        raise ConfigError("the process has neither a cluster nor an embedded server")
    cluster = ClusterSpec({"ps": (embedded.address,), "worker": ("127.0.0.1:0",)})
    return TaskConfig(cluster, Task("worker", 0))


def _last_error() -> BaseException | None:
    return getattr(sys, "last_value", None)
