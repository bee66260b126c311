"""`ParameterServerStrategy`: where a training script begins."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np

from psclient import context, values
from psclient.arrays import local_devices
from psclient.chief import Chief
from psclient.config import task_config, timeouts_from
from psclient.consistency import Sync
from psclient.data import ArrayDataset, DistributedDataset, DistributedDatasetFromFunction, InputContext, Passes
from psclient.embedded import EmbeddedServer
from psclient.exchange import Exchange
from psclient.extended import StrategyExtended
from psclient.group import Group
from psclient.reduce_op import ReduceOp
from psclient.replicas import ReplicaRunner
from psclient.rpc import RemoteServer, connect
from psclient.session import Session
from psclient.variables import Variable
from pswire.cluster import ClusterSpec, Task, TaskConfig
from pswire.errors import ConfigError, PSError
from pswire.limits import Timeouts
from pswire.spec import Snapshotted
from pswire.tensor import Array

log = logging.getLogger("psclient")


class ParameterServerStrategy:
    """Trains with variables on parameter servers, synchronously, as `tf.distribute` does.

    Every process of the job runs the same script. Without a cluster, one local server is started for it.

    One thread at a time runs replicas, reduces, updates, creates variables and saves; it is refused to another as
    long as what the first has recorded is not sent, at the end of its scope at the latest. All threads may read
    variables. A fork of the process has no part in the job: it may only compute with what was read before.

    Args:
        devices: the local replicas' devices, such as `["cpu:0", "cpu:1"]` or `["gpu:0"]`; by default all GPUs,
            or one CPU.
        consistency: `Sync()`.
        cluster: the cluster and this process's task; by default what `TF_CONFIG` says.
        timeouts: by default what `PS_TIMEOUT_*` say.

    Raises:
        ConfigError: `TF_CONFIG` or a device is wrong.
        Unreachable: a server does not answer.
        ChiefLost: no chief began the job in time.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        consistency: Sync | None = None,
        cluster: TaskConfig | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.consistency = consistency or Sync()
        self._timeouts = timeouts or timeouts_from()
        self._devices = local_devices(devices)
        config = cluster or task_config()
        self._embedded = EmbeddedServer(timeouts=self._timeouts) if config is None else None
        self._config = config or _embedded_config(self._embedded)
        self._servers: list[RemoteServer] = []
        self._chief: Chief | None = None
        self._owner = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._failed = False
        self._last_error = _last_error()
        try:
            self._connect()
        except BaseException:
            self._failed = True
            self.close()
            raise
        atexit.register(self.close)

    def _connect(self) -> None:
        cluster, task = self._config.cluster, self._config.task
        if task.job not in ("worker", "chief"):
            raise ConfigError(f"a {task.job} task runs no training script; start it with psserver", str(task))
        self._servers = connect(cluster, self._timeouts)
        self._session = Session(task, self._servers, len(self._devices), timeouts=self._timeouts)
        runs_script = task.job == "chief"
        if runs_script or (not cluster.tasks("chief") and task == Task("worker", 0)):
            servers = connect(cluster, self._timeouts)
            self._chief = Chief(task, servers, cluster, self._timeouts, runs_script, self._session.end)
            self._chief.start()
        self._session.open()
        self._session.await_job()
        expected = [*cluster.tasks("worker"), *([task] if task.job == "chief" else [])]
        self._group = Group(self._session, self._devices, expected)
        self._exchange = Exchange(self._session, self._group)
        self.extended = StrategyExtended(
            self,
            self._exchange,
            self._session.devices,
            tuple(device.full_name(task) for device in self._devices),
        )
        self._runner = ReplicaRunner(self, self._devices, self._group.slice, self._in_section)
        self._datasets = 0
        self._saves: Variable | None = None
        self._passes = Passes()

    # ---- Contexts ----

    def scope(self) -> AbstractContextManager[None]:
        """Makes this strategy current in the calling thread: variables created within live on the servers.

        Entering it enters cross-replica context; leaving it ends the open section.
        """
        return _Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls a function once on each local replica, in replica context.

        Args:
            fn: gets, for each per-replica value among the arguments, its own component.
            args, kwargs: nests of arrays and distributed values.
            options: ignored.

        Returns:
            The merged results: what is the same object from every replica comes back itself, all else, and Python
            numbers always, as a per-replica value; with one local replica what `fn` returned.

        Raises:
            RuntimeError: called inside a run, or after `close`.
        """
        with self.scope():
            context.require_cross_replica(self, "run")
            self.extended.check_open()
            self.extended.flush()
            return self._runner.run(fn, args, kwargs)

    def _in_section(self, call: Callable[[], Any]) -> Any:
        """Runs what `merge_call` was given: a section of its own, sent when it returns."""
        try:
            result = call()
        except BaseException:
            # The other processes make this section's round. This one has left it out, and is told so if it goes on.
            self.extended.drop()
            self._group.skip_round()
            raise
        self.extended.flush(returned=result)
        return result

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None) -> Array:
        """Combines a value across all replicas of all workers, and gives it to each. In cross-replica context.

        Args:
            reduce_op: SUM or MEAN, also as a string in any case.
            value: a per-replica value, such as `run` returned.
            axis: also reduced within each replica's array, usually the batch's; MEAN then divides by the true
                number of elements. None reduces across replicas only.

        Returns:
            An array, the same on every process.

        Raises:
            ValueError: shapes that differ without an axis; SUM of a plain value with several local replicas.
            RuntimeError: called in replica context.
        """
        with self.scope():
            context.require_cross_replica(self, "reduce")
            return self.extended.reduce(ReduceOp.parse(reduce_op), value, axis)

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """`get_replica_context().merge_call`, for code that has the strategy at hand. In replica context."""
        return context.require_replica("merge_call").merge_call(merge_fn, args, kwargs)

    # ---- Values and data ----

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of the local replicas: a tuple, `(value,)` of what is not distributed."""
        return values.local_results(value)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> ArrayDataset:
        """A dataset over a nest of NumPy arrays, an example for each row; `batch` it, then distribute it."""
        return ArrayDataset(numpy_input)

    def experimental_distribute_dataset(self, dataset: ArrayDataset, options: Any = None) -> DistributedDataset:
        """Splits each global batch evenly over all replicas of all workers.

        Args:
            dataset: batched by the global batch size.
            options: ignored.

        Returns:
            An iterable of per-replica values, on the replicas' devices.

        Raises:
            ValueError: the dataset is not batched.
        """
        return DistributedDataset(dataset, self._group, self._number_dataset(), self._passes)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> DistributedDatasetFromFunction:
        """Each worker makes its own dataset, whose batches are per replica.

        Args:
            dataset_fn: called once, with an `InputContext`; returns an iterable of nests of arrays.
            options: ignored.
        """
        place, count = self._group.pipeline
        told = InputContext(count, place, self._group.replicas)
        return DistributedDatasetFromFunction(dataset_fn, told, self._group, self._number_dataset(), self._passes)

    def _number_dataset(self) -> int:
        self._datasets += 1
        return self._datasets - 1

    # ---- What it is ----

    @property
    def num_replicas_in_sync(self) -> int:
        """R: the replicas of all workers that take part. Changes only when a new epoch is taken in.

        A process that comes late reads here, until it takes part, what those saw that began together: a
        batch size that the script computes from it is then the same everywhere.
        """
        return self._group.replicas

    @property
    def round(self) -> int:
        """The number of the next round; a process that comes back starts at the group's."""
        return self._group.round

    @property
    def task(self) -> Task:
        """Which task this process is."""
        return self._config.task

    @property
    def traffic(self) -> tuple[int, int]:
        """Payload bytes sent and received so far, in bytes."""
        return sum(s.bytes_sent for s in self._servers), sum(s.bytes_received for s in self._servers)

    # ---- Checkpoints: what `Checkpoint` calls ----

    @property
    def saves(self) -> Variable:
        """How many checkpoints were ordered, those before a restore included: a variable, saved with the others."""
        if self._saves is None:
            # Its place is said, so that it does not advance the turn of the user's variables.
            with self.scope(), self.extended.colocate_vars_with(self.extended.parameter_devices[:1]):
                self._saves = Variable(np.int64(0), False, "checkpoint/saves")
        return self._saves

    def save_section(self, path: str, saves: Variable) -> Snapshotted:
        """Ends the open section with a checkpoint, one more in `saves`; waits until it is complete, or failed."""
        with self.scope():
            context.require_cross_replica(self, "save")
            saves.assign_add(1)
            return self.extended.snapshot(path)

    def restore_variables(self, path: str) -> bool:
        """Has the servers read a checkpoint; see `Checkpoint.restore`."""
        with self.scope():
            context.require_cross_replica(self, "restore")
            self.extended.flush()
            if self._group.late:
                log.info("%s comes back to a running job: its variables stay as they are", self.task)
                return False
            self._group.begin_at(self._exchange.restore(path))
            return True

    # ---- The end ----

    def close(self) -> None:
        """Leaves the job; called at the end of the process if it is not called before.

        A clean end tells the others that this process has done its part. Does nothing in a fork of the process.
        """
        if os.getpid() != self._owner:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        # What nobody caught is remembered by the interpreter before it runs what is registered for its exit.
        failed = self._failed or _last_error() is not self._last_error
        error = "the script failed" if failed else ""
        if not error and hasattr(self, "extended"):
            error = self._flush_last()
        if hasattr(self, "_runner"):
            self.extended.close()
            self._runner.close()
        if hasattr(self, "_session"):
            self._session.leave(error)
        if self._chief:
            self._chief.stop(abandon=bool(error))
        for server in self._servers:
            server.close()
        if self._embedded:
            self._embedded.stop()

    def _flush_last(self) -> str:
        try:
            # A script that has caught why its session ended does not leave cleanly either.
            self._session.check()
            self.extended.flush()
        except PSError as error:
            log.error("%s does not leave cleanly: %s", self.task, error)
            return str(error)
        return ""

    def __enter__(self) -> ParameterServerStrategy:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._failed = self._failed or kind is not None
        self.close()


class _Scope:
    """`with strategy.scope()`: leaving the outermost one ends the open section. It may be entered again."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = strategy
        self._entered: list[tuple[AbstractContextManager[None], bool]] = []

    def __enter__(self) -> None:
        outermost = not context.has_strategy()
        entered = context.enter_strategy_scope(self._strategy)
        entered.__enter__()
        self._entered.append((entered, outermost))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered, outermost = self._entered.pop()
        try:
            if outermost and kind is None:
                self._strategy.extended.flush()
            elif outermost:
                self._strategy.extended.drop()
        finally:
            entered.__exit__(kind, error, trace)


def _embedded_config(embedded: EmbeddedServer | None) -> TaskConfig:
    if embedded is None:
        raise ConfigError("there is neither a cluster nor an embedded server")
    cluster = ClusterSpec({"ps": (embedded.address,), "worker": ("127.0.0.1:0",)})
    return TaskConfig(cluster, Task("worker", 0))


def _last_error() -> BaseException | None:
    return getattr(sys, "last_value", None)
