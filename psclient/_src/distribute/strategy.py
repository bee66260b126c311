"""`Strategy`: what one trains with, whatever its variables and reductions are made of."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex, TypeVar, cast

import numpy as np

from psclient._src import context, values
from psclient._src.arraylike import HostArray
from psclient._src.arrays import nest
from psclient._src.arrays.devices import Value
from psclient._src.arrays.nest import Nest
from psclient._src.cluster_resolver.base import ClusterResolver
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.data.distributed import DistributedDataset, DistributedDatasetFromFunction
from psclient._src.data.dynamic import DynamicDataset
from psclient._src.data.group import Passes
from psclient._src.distribute.backend import Backend
from psclient._src.distribute.extended import StrategyExtended
from psclient._src.interpreter.interrupts import INTERRUPTS
from psclient._src.interpreter.lifetimes import Unpicklable
from psclient._src.interpreter.tracebacks import fold
from psclient._src.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    ReduceOp,
    ReduceOpName,
    RunOptions,
    ValueContext,
)
from psclient._src.processes import shutdown
from psclient._src.variables.variable import Variable

T = TypeVar("T")


class Strategy(Unpicklable):
    """A policy that distributes state and computation over a list of devices.

    Methods for cross-replica context enter the strategy's scope themselves where there is none.

    Source: `tf.distribute.Strategy`.

    Args:
        extended: the implementation, made for this strategy; or that of another strategy: then both share it, and it
            owns what this one creates.

    Attributes:
        extended: additional methods, for algorithms that need to know how values are distributed.
        backend: stores the variables and carries reductions.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self.extended = extended
        self.backend: Backend = extended._shared.backend
        self._datasets = 0
        self._passes = Passes(make_round=self._make_round)
        self._step_ends: list[tuple[bool, Callable[[], object]]] = []  # (the step has begun, call)
        self._process = os.getpid()
        self._container = cast(Strategy, extended._shared.container)
        """The strategy that `extended` was made with: usually this one."""

    # ---- What it is ----

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated, those of all workers. In any context.

        It changes only when members join or leave. A process that joins late reads the number that the initial
        processes read, until it takes part: a batch size that the script computes from it is then the same everywhere.
        In asynchronous mode it is the number of this worker's replicas.
        """
        return self.backend.group.replicas

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster and of this process's task; None without a cluster. In any context."""
        return None

    @property
    def rank(self) -> int:
        """The number of this process among those that run the script, from 0, in task order. In any context.

        A chief that runs the script comes before the workers. On parameter servers, reading it waits until all initial
        processes are connected. It changes when a process with a lower rank leaves the job or comes back.

        Source: `torch.distributed.get_rank`.
        """
        return self.backend.group.pipeline[0]

    @property
    def world_size(self) -> int:
        """The number of processes that run the script; see `num_replicas_in_sync` for replicas. In any context.

        Reading it waits as `rank` does. It changes when processes join or leave.

        Source: `torch.distributed.get_world_size`.
        """
        return self.backend.group.pipeline[1]

    @property
    def local_rank(self) -> int:
        """The number of this process among the workers on its host, from 0, for example to choose a GPU.

        In any context. Hosts are distinguished by their addresses in the cluster. Reading it does not wait, and it
        never changes.
        """
        return 0

    @property
    def is_main_process(self) -> bool:
        """True in exactly one of the processes that run the script: use it to log, save or download once.

        This is the process with rank 0. If it is lost, another one becomes the main process. In any context.
        """
        return self.backend.group.leads

    def barrier(self) -> None:
        """Waits until each process that runs the script has called it as often. In cross-replica context.

        All processes call it at the same place of the script. Synchronous workers make a round for it, which counts in
        `round`. A process that joins a running job does not wait at barriers that the others have passed.

        Raises:
            RuntimeError: called in replica or update context, or by asynchronous workers during a pass over a
                distributed dataset.
            PSError: the session has ended, or another process makes other calls.
        """
        with self.scope():
            context.require_cross_replica(self._container, "barrier")
            self._meet()

    def _meet(self) -> None:
        """Waits for the other processes."""

    # ---- Running ----

    def scope(self) -> AbstractContextManager[Strategy]:
        """Makes this strategy current in the calling thread, so that it owns the variables created within.

        Entering it enters cross-replica context. Leaving the outermost scope sends what was begun in it, also when an
        error leaves it. It may be entered in the default context, and again within itself.

        Raises:
            RuntimeError: on entering, another strategy is current.

        Examples:
            >>> import psclient as ps
            >>> strategy = ps.MirroredStrategy()
            >>> with strategy.scope():
            ...     w = ps.Variable([1.0, 2.0])
            >>> w.strategy is strategy
            True
        """
        return _Scope(self._container)

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> T:
        """Calls a function once on each local replica, in replica context. In cross-replica context.

        A process that joins a running job may call the function a second time, if it becomes a member at the first
        round of this run: its first computation used older values. The first call leaves the strategy's variables
        unchanged; all other side effects, such as the state of a random generator, happen twice.

        Args:
            fn: the function. For each per-replica value among the arguments it gets the component of its replica.
            args: positional arguments: nests of arrays and distributed values.
            kwargs: keyword arguments, likewise.
            options: see `RunOptions`; has no effect here.

        Returns:
            The merged results. With one local replica, what `fn` returned. With several, an object that is the same in
            all replicas is returned itself, as are equal Python numbers; everything else is a per-replica value. The
            declared type is that of one replica's result.

        Raises:
            RuntimeError: called in replica or update context, while another thread runs replicas, or after `close`.
            TypeError: `args` is not a tuple or list.
            ValueError: a distributed argument has another number of replicas.

        Examples:
            >>> import psclient as ps
            >>> strategy = ps.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def step(x):
            ...     replica = ps.get_replica_context().replica_id_in_sync_group
            ...     return x + replica
            >>> strategy.experimental_local_results(strategy.run(step, args=(10,)))
            (10, 11)

        Tracebacks of errors omit this package's inner frames, unless the logger `psclient` has the level `DEBUG`
        (`psworker --log-level debug`).
        """
        depth = context.depth()
        try:
            found: T = self.extended.call_for_each_replica(fn, args, kwargs)
            return found
        except Exception as error:
            fold(error)
            raise
        finally:
            context.leave_to(depth)

    def _after_step(self, call: Callable[[], object]) -> None:
        """Calls a function once, when the next step is over. In any context.

        What follows a `run` belongs to its step, such as updates with the gradients that it has returned: the step is
        over when `run` is called again, or the strategy is closed, or the process ends.
        """
        container = self._container
        shutdown.unregister(container._end_step)
        shutdown.register(container._end_step)
        container._step_ends.append((False, call))

    def _begin_step(self) -> None:
        """Ends the step before, if there was one: see `_after_step`."""
        if self._step_ends:
            over = [call for begun, call in self._step_ends if begun]
            self._step_ends = [(True, call) for begun, call in self._step_ends if not begun]
            for call in over:
                call()

    def _end_step(self) -> None:
        """Ends the last step: see `_after_step`. Does nothing in a fork of the process."""
        shutdown.unregister(self._end_step)
        waiting, self._step_ends = self._step_ends, []
        if os.getpid() == self._process:
            for _, call in waiting:
                call()

    def reduce(
        self, reduce_op: ReduceOp | ReduceOpName, value: Any, axis: int | Sequence[int] | None = None
    ) -> HostArray:
        """Combines a value across all replicas of all workers, and returns it to each. In cross-replica context.

        Args:
            reduce_op: SUM or MEAN, also as a string in any case.
            value: a per-replica value, such as `run` returned, or a nest of them.
            axis: one axis or several to reduce within each replica's array as well, usually that of the batch; MEAN
                then divides by the true number of elements. None reduces across replicas only.

        Returns:
            A host array, the same on every process, with a method `numpy()`; for a nest, a nest of arrays. With
            parameter servers the call returns at once, and the first use of the array waits for its value. The script
            may change `value` after the call.

        Raises:
            ValueError: shapes differ and no axis is given; SUM of a plain value with several local replicas, or of a
                mirrored value.
            RuntimeError: called in replica context.

        Examples:
            >>> import psclient as ps
            >>> strategy = ps.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def step():
            ...     return float(ps.get_replica_context().replica_id_in_sync_group)
            >>> losses = strategy.run(step)
            >>> float(strategy.reduce("sum", losses)), float(strategy.reduce("mean", losses))
            (1.0, 0.5)
        """
        with self.scope():
            return cast(HostArray, self.extended.reduce(ReduceOp.parse(reduce_op), value, axis))

    def buffer(self, variable: Variable) -> Any:
        """Returns an array in which to compute a variable's next contribution to a reduction, such as its gradient.

        A value computed there is not copied: on the shm transport it is sent from where it is, and on the others the
        call does not wait until a large value is sent. The array has the dtype and shape of the variable, and undefined
        content at first. The same array is returned until it is given to a reduction. From then on it is read-only, and
        the next call returns another one: two arrays alternate, and if both are in rounds in progress, the call waits
        for the older round. With several local replicas, whose values are summed first, it is an ordinary array. For
        many small variables, request the buffers in the order in which the gradients are reduced: then they are
        adjacent and sent as one.

        Args:
            variable: a variable of this strategy.

        Returns:
            A NumPy array, in pinned memory if the replica's device is a GPU. In replica context the array of the
            replica, in cross-replica context a per-replica value.

        Raises:
            TypeError: `variable` is not a variable.
            ValueError: the variable belongs to another strategy.
            PSError: the session has ended.
        """
        if not isinstance(variable, Variable):
            raise TypeError(f"buffer takes a variable, not {type(variable).__name__}")
        variable._check_strategy(self._container)
        replica = context.local_replica(self._container)
        if replica is not None:
            return self.backend.buffer(variable, replica)
        return values.per_replica(
            [self.backend.buffer(variable, number) for number in range(len(self.backend.worker_devices))]
        )

    def gather(self, value: Any, axis: SupportsIndex) -> Any:
        """Concatenates arrays across all replicas of all workers, for each worker. In cross-replica context.

        Values arrive bit by bit as they were given. Workers agree on sizes in one round and send their arrays in a
        second one; a worker lost between the two is left out. In replica context use `all_gather`.

        Args:
            value: a per-replica value, such as `run` returned, or a nest of them; with one local replica a plain array.
                All arrays have one dtype and one shape, except for the size of `axis`.
            axis: the dimension to concatenate along, from 0.

        Returns:
            A read-only host array with the replicas' arrays in the order of the replicas, the same on every process;
            for a nest, a nest of arrays.

        Raises:
            ValueError: arrays differ in more than the size of `axis`, or do not have it, such as scalars; a negative
                axis; a plain value with several local replicas.
            TypeError: the axis is None, or the value is not an array of numbers.
            RuntimeError: called in replica or update context.
        """
        with self.scope():
            return self.extended.gather(value, axis)

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Calls `get_replica_context().merge_call`. In replica context."""
        return context.require_replica("merge_call", self._container).merge_call(merge_fn, args, kwargs)

    # ---- Values ----

    def experimental_local_results(self, value: Nest) -> tuple[Nest, ...]:
        """Returns the values of the local replicas as a tuple; `(value,)` if it is not distributed. In any context."""
        return values.local_results(value)

    def unwrap(self, value: Nest) -> tuple[Nest, ...]:
        """The name of `experimental_local_results` in TensorFlow 1. In any context."""
        return self.experimental_local_results(value)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], object]) -> Nest:
        """Makes a per-replica value from one value for each local replica. In cross-replica context.

        Args:
            value_fn: called once for each local replica with its `ValueContext`; returns a nest of arrays or numbers.

        Returns:
            A nest of per-replica values for `run` and `reduce`; with one local replica what `value_fn` returned.

        Raises:
            ValueError: `value_fn` returns distributed values.
        """
        with self.scope():
            context.require_cross_replica(self._container, "experimental_distribute_values_from_function")
            first, replicas = self.backend.group.slice()
            mine = range(first, first + len(self.backend.group.devices))
            found = [value_fn(ValueContext(replica, replicas)) for replica in mine]
            if any(isinstance(leaf, values.DistributedValues) for leaf in nest.flatten(found)):
                raise ValueError("value_fn returned a distributed value; return the value of one replica")
            return nest.map_structure(lambda *leaves: values.per_replica(leaves), *found)

    # ---- Data ----

    def experimental_make_numpy_dataset(self, numpy_input: object) -> ArrayDataset:
        """Makes a dataset from a nest of NumPy arrays, with one example for each row. In any context.

        Args:
            numpy_input: arrays with the same first dimension; a list is stacked into one array.

        Returns:
            A dataset of examples. `batch` it by the global batch size, then distribute it.
        """
        return ArrayDataset(numpy_input)

    def experimental_distribute_dataset(
        self, dataset: object, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Splits each global batch evenly over all replicas of all workers. In any context.

        With `AutoShardPolicy.DYNAMIC` each batch is assigned to one worker, whichever asks next. Workers that run the
        functions of a coordinator do not share batches: each of them gets all batches for its own replicas.

        Args:
            dataset: an iterable of global batches (nests of arrays) that starts again each time it is iterated: an
                `ArrayDataset`, grain's `MapDataset` or `IterDataset`, a PyTorch `DataLoader`, a list of batches.
            options: the device for batches, and how they are shared; None for the defaults.

        Returns:
            An iterable of per-replica values, on the replicas' devices.

        Raises:
            ValueError: the dataset is not batched; the policy shards by files; or DYNAMIC with synchronous workers.
            TypeError: the kind of the dataset is not known, or its batches cannot be assigned by number.
            ConfigError: the policy is DYNAMIC, and the version of server 0 does not support it.

        Examples:
            >>> import numpy as np
            >>> import psclient as ps
            >>> strategy = ps.MirroredStrategy()
            >>> dataset = ps.ArrayDataset(np.arange(6)).batch(4)
            >>> for batch in strategy.experimental_distribute_dataset(dataset):
            ...     print(strategy.run(lambda x: int(x.sum()), args=(batch,)))
            6
            9
        """
        group, container = self.backend.group, self._container
        given = dataset, group, container._number_dataset(), container._passes, options
        if options is not None and options.auto_shard_policy is AutoShardPolicy.DYNAMIC:
            return DynamicDataset(*given)
        return DistributedDataset(*given)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> DistributedDatasetFromFunction:
        """Makes a separate dataset on each worker, with batches for one replica. In any context.

        Args:
            dataset_fn: called with an `InputContext`, once; or again in a coordinator's worker if its place in the job
                has changed. Returns a dataset as `experimental_distribute_dataset` takes it, with batches of the size
                for one replica.
            options: the device for batches; None for the defaults.

        Returns:
            An iterable of per-replica values, on the replicas' devices.
        """
        group, container = self.backend.group, self._container
        place, count = group.pipeline
        told, number = InputContext(count, place, group.replicas), container._number_dataset()
        return DistributedDatasetFromFunction(dataset_fn, told, group, number, container._passes, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> DistributedDatasetFromFunction:
        """The name of `experimental_distribute_datasets_from_function` since TensorFlow 2.4. In any context."""
        return self.experimental_distribute_datasets_from_function(dataset_fn, options)

    def _make_round(self) -> None:
        """Makes a round that says only whether this worker has data left."""
        nothing = values.per_replica([np.float32(0)] * len(self.extended.worker_devices))
        with self.backend.group.holding_back():
            float(self.reduce(ReduceOp.SUM, nothing, axis=None))

    def _number_dataset(self) -> int:
        self._datasets += 1
        return self._datasets - 1

    # ---- Logical devices: each replica of ours has one ----

    def experimental_assign_to_logical_device(self, tensor: T, logical_device_id: int) -> T:
        """Returns the tensor itself: a replica has one logical device, number 0. In any context, usually a replica's.

        Args:
            tensor: any value.
            logical_device_id: 0.

        Raises:
            ValueError: another device is given; only TPUs have several for one replica.
        """
        if logical_device_id != 0:
            raise ValueError(
                f"logical device {logical_device_id!r} does not exist: each replica has one device, number "
                "0. Only TPUStrategy supports model parallelism over logical devices"
            )
        return tensor

    def experimental_split_to_logical_devices(self, tensor: Value, partition_dimensions: Sequence[int]) -> Value:
        """Returns the tensor itself: a replica has one logical device. In any context, usually a replica's.

        Args:
            tensor: a NumPy or CuPy array.
            partition_dimensions: the number of parts for each dimension; here all 1.

        Raises:
            ValueError: the length is not the tensor's rank, a number does not divide its dimension, or the product is
                not 1.
        """
        shape = tuple(tensor.shape) if hasattr(tensor, "shape") else np.shape(tensor)
        parts = list(partition_dimensions)
        if len(parts) != len(shape):
            raise ValueError(f"partition_dimensions {parts} must have one number for each dimension of shape {shape}")
        for size, part in zip(shape, parts, strict=True):
            if part < 1 or size % part:
                raise ValueError(f"a dimension of {size} cannot be split into {part} equal parts: {parts} of {shape}")
        if math.prod(parts) != 1:
            raise ValueError(
                f"partition_dimensions {parts} need {math.prod(parts)} logical devices, but each replica "
                "has one. Only TPUStrategy supports model parallelism over logical devices"
            )
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: T) -> T:
        """Returns the tensor itself: a replica has one logical device. In any context, usually a replica's."""
        return tensor

    # ---- The end ----

    def close(self) -> None:
        """Ends the strategy: later calls that need its replicas or servers raise an error. In any context."""
        self._container._end_step()
        self.backend.close()
        self.extended._shared.runner.close()

    _pickle_remedy = (
        "use only arrays in that process, or create a strategy in it; do not send functions or datasets "
        "that refer to this strategy"
    )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(devices={list(self.backend.worker_devices)})"

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "a strategy cannot be copied, because both copies would take part in the same rounds; create another one"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close()


class _Scope(threading.local):
    """`with strategy.scope()`: leaving the outermost one ends the open section. Any thread may enter it, and again."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._entered: list[tuple[int, bool]] = []  # how deep the thread stood before, and if it was in no scope

    def __enter__(self) -> Strategy:
        INTERRUPTS.guard()
        self._entered.append(context.enter_scope(self._strategy))
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            _, outermost = self._entered[-1]
            if outermost and (kind is None or issubclass(kind, Exception)):
                # What was recorded before an error is done, as on other processes; an interrupt waits for nobody.
                self._flush(error)
            elif outermost:
                self._strategy.backend.drop()
        finally:
            context.leave_scope(self._entered.pop()[0])

    def _flush(self, error: BaseException | None) -> None:
        try:
            self._strategy.backend.flush()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"operations recorded before this error were not executed: {failure}")
            self._strategy.backend.drop()


class _Set(threading.local):
    """The scope that the calling thread entered by `experimental_set_strategy`, and how deep it stands."""

    scope: AbstractContextManager[Strategy] | None = None
    depth = 0


_set = _Set()


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy current in the calling thread until the next call, as if all later code were in its scope.

    In the default context, or in cross-replica context of the strategy that the last call has set.

    Source: `tf.distribute.experimental_set_strategy`.

    Args:
        strategy: the strategy. The scope that the last call entered is left first; None for the default strategy.

    Raises:
        RuntimeError: called within a scope that was entered in another way, or in a replica or update function.
        TypeError: `strategy` is not a strategy.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(
            f"a {type(strategy).__name__} is not a strategy; pass a strategy, or None for the default strategy"
        )
    if context.depth() != (_set.depth if _set.scope else 0):
        raise RuntimeError("experimental_set_strategy was called inside a strategy's scope; leave that scope first")
    entered, _set.scope = _set.scope, None
    if entered is not None:
        entered.__exit__(None, None, None)
    if strategy is not None:
        scope = strategy.scope()
        scope.__enter__()
        _set.scope, _set.depth = scope, context.depth()
