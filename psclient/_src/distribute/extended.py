"""`strategy.extended`: what library code such as optimizers uses, mostly in cross-replica context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from psclient._src import context
from psclient._src.arraylike import HostArray, LazyArray, Mirrored, Readable, read
from psclient._src.arrays import nest
from psclient._src.arrays.devices import Coming, Device, Value, is_array, local_devices, to_numpy
from psclient._src.arrays.nest import Nest
from psclient._src.context import StrategyFace
from psclient._src.distribute.backend import Backend, Colocation, NewVariable
from psclient._src.distribute.destinations import (
    Destination,
    OnWorkers,
    ServerIds,
    Uncompressed,
    ValueHome,
    home_of,
    to_devices,
)
from psclient._src.distribute.gathering import ReplicaPosition, check_axis, host_array, of_each
from psclient._src.distribute.local import LocalBackend, apply_to_copies
from psclient._src.distribute.prepared_step import OwnContributions
from psclient._src.distribute.reduction import EVERYONE, Absent, LocalValue, combine
from psclient._src.distribute.replica_values import Fit, of_replicas, own_value
from psclient._src.distribute.replicas import ReplicaRunner
from psclient._src.options import ReduceOp, ReduceOpName
from psclient._src.values import DistributedValues, container, local_results, merge_copies
from psclient._src.variables.compression import Compressed
from psclient._src.variables.consistency import created_beside
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.kinds import CopiedVariable, LocalVariable, SyncOnReadVariable
from psclient._src.variables.partitioners import Cut
from psclient._src.variables.sharded import CutVariable, ShardedValue, VariableOfShards, whole_of
from psclient._src.variables.variable import Variable, VariableAggregation
from pswire.model.plan import Reduction, VariableSpec
from pswire.model.tensor import DTYPES, Array, TensorSpec


@dataclass(frozen=True)
class _Shared:
    """What all `StrategyExtended` of one strategy have in common.

    Attributes:
        container: the strategy.
        backend: what does what they say.
        runner: runs the local replicas.
        colocated: where the calling thread's `colocate_vars_with` places variables.
    """

    container: StrategyFace
    backend: Backend
    runner: ReplicaRunner
    colocated: ContextVar[Colocation]

    @classmethod
    def of(cls, strategy: StrategyFace, backend: Backend | None) -> _Shared:
        """The state of a strategy that is being made."""
        backend = LocalBackend(local_devices(None)) if backend is None else backend
        runner = ReplicaRunner(strategy, backend.group.devices, backend.group.slice, backend.section)
        return cls(strategy, backend, runner, ContextVar("colocated", default=()))


_PLAIN = (np.ndarray, HostArray)
"""Types of arrays that travel as they are: another class of the user's may mean something else."""


class StrategyExtended:
    """Additional methods for algorithms that need to be distribution-aware.

    Methods for cross-replica context may also be called outside of every scope: they enter the strategy's scope.

    Who writes a strategy puts what is special about it into a subclass, of which the strategy is made: the strategy's
    own methods, its contexts and its variables call `call_for_each_replica`, `reduce`, `batch_reduce_to`, `update` and
    `create_variable`.

        class MyStrategy(ps.Strategy):
            def __init__(self):
                super().__init__(MyExtended(self))

    Source: `tf.distribute.StrategyExtended`.

    Args:
        container_strategy: whose methods these are. Where it has such methods already, these share their state.
        backend: where its variables live, and how a reduction travels; by default this process, on all GPUs or one CPU.
    """

    def __init__(self, container_strategy: StrategyFace, backend: Backend | None = None) -> None:
        self._strategy = container_strategy
        others = vars(container_strategy).get("extended")
        shared = _Shared.of(container_strategy, backend) if others is None else others._shared
        self._shared = shared
        self._backend, self._colocated = shared.backend, shared.colocated

    # ---- What it is ----

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables; on servers such as `/job:ps/task:0/device:CPU:0`. In any context."""
        return self._backend.parameter_devices

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this process's replicas, in order. In any context."""
        return self._backend.worker_devices

    @property
    def experimental_between_graph(self) -> bool:
        """Whether every worker runs the whole script: True on parameter servers, else False. In any context."""
        return self._backend.between_graph

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: arrays may have any shape; a reduction of a new shape makes a new plan. In any context."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """True in exactly one of the processes that run the script: the first in task order. In any context."""
        return self._backend.group.leads

    @property
    def should_checkpoint(self) -> bool:
        """True in exactly one of the processes that run the script: the first in task order. In any context.

        This is the chief if it runs the script, else worker 0, or the first remaining worker if worker 0 has left.
        """
        return self._backend.group.leads

    @property
    def should_save_summary(self) -> bool:
        """True in exactly one of the processes that run the script: the first in task order. In any context."""
        return self._backend.group.leads

    # ---- Replicas ----

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs a function on each local replica, as `strategy.run`, which calls this. In cross-replica context."""
        with context.across_replicas(self._strategy, "run"):
            if not context.in_merge_call():
                self._strategy._begin_step()
            return self._backend.run(partial(self._shared.runner.run, fn, args, kwargs))

    # ---- Variables ----

    def create_variable(
        self,
        spec: VariableSpec,
        value: Array,
        place: Colocation,
        on_read: bool,
        aggregation: VariableAggregation,
        compression: Compressed = None,
        partitioner: Cut = None,
    ) -> Variable:
        """Gets or creates a variable. `Variable` calls it, and a restore for checkpoints with another variable name.

        `Variable` gives a `compression` and a `partitioner` only if its caller has given one. Its own partitioner wins
        over the strategy's. Without servers variables are not cut into shards.
        """
        how = on_read, aggregation, compression, partitioner
        return self._backend.create(NewVariable(self._strategy, spec, value, place, *how))

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Returns whether a variable was created while this strategy's scope was active. In any context."""
        whole = container(v)
        return isinstance(whole, Variable) and whole.strategy is self._strategy

    @property
    def _colocation(self) -> Colocation:
        """The place of variables that the thread creates in `colocate_vars_with`; empty outside of it."""
        return self._colocated.get()

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable | Sequence[str]) -> Iterator[None]:
        """Places variables created within on the same devices. In replica and cross-replica context of the scope.

        Variables beside a variable also have its consistency, unless they set another one. Beside a partitioned
        variable those with as many rows are cut as it is, shard beside shard. Others have a copy beside each shard:
        what an update assigns to them has to be the same for all shards.

        Args:
            colocate_with_variable: a variable of this strategy, or what `non_slot_devices` returned.

        Raises:
            ValueError: it is a variable of another strategy, or not a parameter device.
            RuntimeError: on entering, outside of the strategy's scope.
        """
        place = self._placed(colocate_with_variable)
        if context.get_strategy() is not self._strategy:
            raise RuntimeError(
                "colocate_vars_with was called outside of the strategy's scope; enter strategy.scope() first"
            )
        whole = container(colocate_with_variable)
        token = self._colocated.set(whole.sharding if isinstance(whole, VariableOfShards) else place)
        try:
            with created_beside(whole) if isinstance(whole, Variable) else contextlib.nullcontext():
                yield
        finally:
            self._colocated.reset(token)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """Returns the devices for variables that belong to several others, such as a step count. In any context.

        Such a variable is mirrored on every server that holds one of `var_list`, so that each update that reads it
        finds it on its server.

        Args:
            var_list: the variables being optimized; empty for all parameter devices.

        Returns:
            Devices, for `colocate_vars_with` and `update_non_slot`.

        Raises:
            TypeError: an element is not a variable.
            ValueError: a variable was created in the scope of another strategy.
        """
        variables = [container(variable) for variable in var_list]
        for variable in variables:
            if not isinstance(variable, Variable):
                raise TypeError(f"non_slot_devices takes a list of variables, not a {type(variable).__name__}")
            variable._check_strategy(self._strategy)
        place = sorted({device for variable in variables for device in variable.place})
        return tuple([self.parameter_devices[device] for device in place]) or tuple(self.parameter_devices)

    def _placed(self, where: Variable | Sequence[str]) -> ServerIds:
        whole = container(where)
        if isinstance(whole, Variable):
            whole._check_strategy(self._strategy)
            return whole.place
        known = self.parameter_devices
        devices = [where] if isinstance(where, str) else where if isinstance(where, list | tuple) else []
        unknown = [device for device in devices if not (isinstance(device, str) and device in known)]
        if unknown or not devices:
            raise ValueError(
                f"{unknown or where!r} is not a parameter device; pass a variable, or the result of non_slot_devices"
            )
        return tuple(sorted(known.index(device) for device in devices))

    # ---- Reductions ----

    def reduce_to(
        self, reduce_op: ReduceOp | ReduceOpName, value: Value, destinations: object, experimental_hints: object = None
    ) -> Value:
        """Combines a value across all replicas of all workers. In cross-replica context.

        Args:
            reduce_op: SUM or MEAN, also as a string in any case.
            value: a per-replica value with an array from each local replica; with one local replica also a plain array,
                this worker's contribution.
            destinations: a variable or parameter devices, such as `non_slot_devices` returned: the result stays there,
                for `update` and `update_non_slot`. Or worker devices: one, a list, or a per-replica value, also `value`
                itself: the result is sent to these devices, or to those of its replicas.
            experimental_hints: ignored.

        Returns:
            A lazy value with the variable's locality, or an array, or a mirrored value. Each may be used as an array,
            and has `numpy()`.

        Raises:
            ValueError: SUM of a plain value with several local replicas, or of a mirrored value; shapes differ; a
                variable of another strategy, or a device of another process.
            TypeError: the value is not an array of numbers, or the destination is not one of these.
            RuntimeError: called in replica or update context.
        """
        (reduced,) = self._reduce_to("reduce_to", reduce_op, [(value, destinations)])
        return reduced

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | ReduceOpName,
        value_destination_pairs: Iterable[tuple[Value, object]],
        experimental_hints: object = None,
    ) -> list[Value]:
        """Combines several values at once, as several calls of `reduce_to`. In cross-replica context.

        Args:
            reduce_op: as in `reduce_to`.
            value_destination_pairs: (value, destinations) pairs, for example from `zip`.
            experimental_hints: ignored.

        Returns:
            A list of the results of `reduce_to`.
        """
        return self._reduce_to("batch_reduce_to", reduce_op, value_destination_pairs)

    def _aggregate(self, aggregation: VariableAggregation, value: object, destination: Variable | None) -> Value:
        """Reduces like `reduce_to`, by a variable's aggregation, ONLY_FIRST_REPLICA included.

        Args:
            aggregation: any except NONE.
            value: a per-replica value, or a value that is the same in all replicas.
            destination: the variable beside which the result stays; None for a host array in this process.
        """
        with context.across_replicas(self._strategy, "aggregate"):
            first = aggregation is VariableAggregation.ONLY_FIRST_REPLICA
            local = self._first(value) if first else self._local(ReduceOp.parse(aggregation.name), value, None)
            if destination is None:
                return self._brought(local)
            # A value that is assigned is no contribution, to which what was left over of others could be added.
            return self._reduced([(local, self._destination(Uncompressed(destination), None))])[0]

    def reduce(self, op: ReduceOp, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Reduces a value and returns it to every process; see `Strategy.reduce`."""
        with context.across_replicas(self._strategy, "reduce"):
            local = nest.map_leaves(lambda leaf: self._local(op, leaf, axis), value)
            if axis is None:
                self._place().check_one_shape(local, self._backend.group)
            return nest.pack_sequence_as(value, list(map(_reduced_here, self._here(local))))

    def gather(self, value: Nest, axis: SupportsIndex) -> Any:
        """Concatenates a value's arrays over all replicas of all workers; see `Strategy.gather`."""
        with context.across_replicas(self._strategy, "gather"):
            number = check_axis(axis)
            local = len(self.worker_devices)
            arrays = nest.map_leaves(lambda leaf: [*map(host_array, of_each(leaf, local, own_value))], value)
            found = self._place().gather(arrays, number)
            return nest.pack_sequence_as(value, list(map(_read_only, found)))

    def _place(self) -> ReplicaPosition:
        return ReplicaPosition.of(self._backend.group, self._total)

    def _total(self, array: Array) -> Array:
        """Sums what each process gives. Replicas without examples give theirs; what others hold back is no part."""
        with self._backend.group.holding_back():
            return self._brought(combine("sum", [array], EVERYONE, None))

    def _all_gather(self, value: Nest, axis: SupportsIndex) -> Any:
        """As `gather`, but returns to each local replica the result on its device."""
        found = self.gather(value, axis)
        return nest.map_structure(lambda array: to_devices(array, self._backend.group.devices), found)

    def _here(self, local: Sequence[LocalValue]) -> list[Value]:
        return self._backend.reduce([(each.unkeyed(), None) for each in local]) if local else []

    def _brought(self, local: LocalValue) -> Array:
        return to_numpy(read(self._here([local])[0]))

    def _reduce_to(
        self, what: str, reduce_op: ReduceOp | ReduceOpName, pairs: Iterable[tuple[Value, object]], weight: float = 1.0
    ) -> list[Value]:
        with context.across_replicas(self._strategy, what):
            op, pairs = ReduceOp.parse(reduce_op), list(pairs)
            # A look at a value ends the section: all are looked at before the first reduction is recorded.
            places = [self._destination(place, value) for value, place in pairs]
            local = [self._local(op, value, None, _fit_of(place), weight) for value, place in pairs]
            return self._reduced(list(zip(local, places, strict=True)))

    def _reduced(self, pairs: Sequence[tuple[LocalValue, Destination]]) -> list[Value]:
        cut = [place.cut(local) for local, place in pairs]
        found = iter(self._backend.reduce([part for each in cut for part in each]))
        bring = self._backend.bring
        return [
            place.joined([next(found) for _ in each], local, bring)
            for each, (local, place) in zip(cut, pairs, strict=True)
        ]

    def _local(
        self,
        op: ReduceOp,
        value: object,
        axis: int | Sequence[int] | None,
        fit: Fit | None = None,
        weight: float = 1.0,
    ) -> LocalValue:
        """Returns this process's contribution, each of its replicas with a weight; see `of_replicas`."""
        replicas = of_replicas(op, value, len(self.worker_devices), fit)
        # A variable's copies count, whatever their replicas' batches are.
        empty = frozenset() if isinstance(value, Variable) else self._backend.group.empty
        found = combine(op.wire, replicas, empty, axis)
        return found if weight == 1.0 else replace(found, weight=found.weight * weight)

    def _first(self, value: object) -> LocalValue:
        """Returns the value of this process's first replica; of all processes' values the first one there counts."""
        return combine("first", [own_value(local_results(value)[0])], EVERYONE, None)

    def _destination(self, destinations: object, value: object) -> Destination:
        """Returns where a reduced value shall be: beside a variable on servers, or on devices of this process."""
        devices = self._backend.group.devices
        if isinstance(destinations, Uncompressed):
            return self._destination(destinations.variable, value).plain()
        if isinstance(destinations, Variable):
            destinations._check_strategy(self._strategy)
            if isinstance(destinations, CopiedVariable | LocalVariable):
                return OnWorkers(devices)
            return home_of(destinations)
        if destinations is value or isinstance(destinations, DistributedValues | Readable) or is_array(destinations):
            return OnWorkers(devices)
        names = [destinations] if isinstance(destinations, str) else destinations
        if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
            if set(names) <= set(self.parameter_devices) - set(self.worker_devices):
                return ValueHome(self._placed(names))
            return OnWorkers([self._worker_device(name) for name in names])
        raise TypeError(
            f"{destinations!r} is not a destination; pass a variable, a worker device such as "
            f"{self.worker_devices[0]!r}, or the value itself"
        )

    def _worker_device(self, name: str) -> Device:
        full = self._backend.full_name(Device.parse(name)) if not name.startswith("/job:") else name
        if full not in self.worker_devices:
            raise ValueError(f"{name!r} is not a device of this process, which has {', '.join(self.worker_devices)}")
        return self._backend.group.devices[self.worker_devices.index(full)]

    # ---- Updates ----

    def update(
        self,
        var: Variable,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> Nest:
        """Runs `fn(var, *args, **kwargs)` where a variable is, in update context. In cross-replica context.

        A variable on servers has one copy: there the function is traced and runs on the server, see
        `docs/architecture.md`. For a variable with copies in this process the function is called once for each copy, on
        its device. It may assign `var` and the other variables among its arguments.

        For a partitioned variable `fn` runs once beside each shard, with the shard in its place. Of the arguments, what
        is cut alike gives its shard, and `IndexedSlices` and arrays with as many rows and dimensions give their rows;
        all else is as it is. So `fn` has to compute each row by itself. The results are joined: shards are the variable
        that they are of; of another value there is a list with that of each shard.

        Args:
            var: the variable to update.
            fn: called with the variable, or in a trace with a stand-in for it, and the arguments.
            args: positional arguments: variables and values with the locality of `var`; mirrored values, which are
                unwrapped; arrays and numbers that are the same in every process. No per-replica values.
            kwargs: keyword arguments, likewise.
            group: False returns a nest with a list of each copy's result at each leaf; a variable on several servers
                has a copy on each.

        Returns:
            What `fn` returns, merged over the copies; with servers a lazy value.

        Raises:
            TypeError: `var` is not a variable, or `args` not a tuple.
            ProgramError: `fn` cannot be traced.
            ValueError: a per-replica value, or a variable of another strategy, is among the arguments.
            LocalityError: an argument is on another server.
            RuntimeError: called in replica or update context.
        """
        with context.across_replicas(self._strategy, "update"):
            var = container(var)
            if not isinstance(var, Variable):
                raise TypeError(f"update takes a variable, not a {type(var).__name__}; use update_non_slot for devices")
            var._check_strategy(self._strategy)
            own, named = _arguments("update", self._strategy, var, args, kwargs)
            if not isinstance(var, VariableOfShards):
                return self._update(var, fn, own, named, group)
            cut: list[Any] = var.sharding.split_all((own, named), var)
            with self._backend.together():
                found = [self._update(v, fn, *each) for v, each in zip(var.variables, cut, strict=True)]
            return nest.map_structure(lambda *leaves: _joined(leaves) if group else list(leaves), *found)

    def _update(
        self,
        var: Variable,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        group: bool = True,
    ) -> Nest:
        if isinstance(var, CopiedVariable):
            copies = list(enumerate(self._backend.group.devices))
            return _merged(apply_to_copies(self._strategy, copies, fn, (var, *args), kwargs), group)
        return _merged(self._backend.apply(self._strategy, var.place, fn, (var, *args), kwargs), group, len(var.place))

    def update_non_slot(
        self,
        colocate_with: Sequence[str] | Variable,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> Nest:
        """Runs `fn(*args, **kwargs)` on the non-slot devices, in update context. In cross-replica context.

        Args:
            colocate_with: the result of `non_slot_devices`.
            fn: as in `update`; it may use variables of these devices by closure.
            args: as in `update`.
            kwargs: as in `update`.
            group: as in `update`.

        Returns:
            What `fn` returns, merged over the devices; with servers a lazy value.
        """
        with context.across_replicas(self._strategy, "update_non_slot"):
            place = self._placed(colocate_with)
            own, named = _arguments("update_non_slot", self._strategy, None, args, kwargs)
            return _merged(self._backend.apply(self._strategy, place, fn, own, named), group, len(place))


def contributions(
    extended: StrategyExtended,
    values: Sequence[Value],
    variables: Sequence[Variable],
    riding: Sequence[Array],
    weight: float | None,
    reductions: Sequence[Reduction],
) -> OwnContributions | None:
    """Returns this process's contributions to reductions like earlier ones; None if they do not fit.

    In cross-replica context. A value that travels as it is costs no call.

    Args:
        extended: of the strategy.
        values: as in `batch_reduce_to`, to be summed or averaged.
        variables: the variables beside which the sums stay, one for each value.
        riding: arrays whose reductions come before those of the values.
        weight: by how much this process counts in averages; None for sums.
        reductions: the earlier reductions.
    """
    whole = len(extended._backend.worker_devices) == 1 and not extended._backend.group.empty
    op, unit = (ReduceOp.SUM, 1.0) if weight is None else (ReduceOp.MEAN, weight)
    weights, arrays = [1.0] * len(riding), list[Any](riding)
    at, end = len(riding), len(reductions)
    for value, v in zip(values, variables, strict=True):
        cut = v.sharding if isinstance(v, CutVariable) else None
        first, at = at, at + (1 if cut is None else len(cut.places))
        if at > end:
            return None
        asked = reductions[first]
        dtype, shape = asked.tensor.dtype, asked.tensor.shape if cut is None else v.shape
        if (
            whole
            and type(value) in _PLAIN
            and asked.form == "dense"
            and value.shape == shape
            and value.dtype == DTYPES[dtype]
            and value.flags.c_contiguous
        ):
            if cut is None:
                weights.append(unit)
                arrays.append(value)
            else:
                weights += [unit] * len(cut.places)
                arrays += [value[rows] for rows in cut.bounds]
        elif whole and cut is None and isinstance(value, Absent | Coming):
            coming = isinstance(value, Coming)
            weights.append(unit if coming else 0.0)
            arrays.append(value if coming else None)
        else:
            local = extended._local(op, value, None, v._fit_slices, unit)
            if (local.spec, local.form) != (TensorSpec(dtype, shape), asked.form):
                return None
            parts = [local] if cut is None else local.cut(cut)
            weights += [part.weight for part in parts]
            arrays += [part.array for part in parts]
    return OwnContributions(weights, arrays) if len(arrays) == len(reductions) else None


def _fit_of(destination: object) -> Fit | None:
    """Returns what makes rows fit a variable for which they are reduced, and checks them; None for no variable."""
    whole = destination.variable if isinstance(destination, Uncompressed) else destination
    return whole._fit_slices if isinstance(whole, Variable) else None


def _read_only(array: Array) -> HostArray:
    array.flags.writeable = False
    return array.view(HostArray)


def _reduced_here(value: Value) -> Value:
    return value if isinstance(value, LazyArray | IndexedSlices) else to_numpy(value).view(HostArray)


def _merged(results: Sequence[Nest], group: bool, copies: int = 1) -> Nest:
    """Merges the results of an update, one for each updated copy; on servers, which trace it once, one for all."""
    if group:
        return merge_copies(results, Mirrored)
    each = results if len(results) > 1 else [*results] * copies
    return nest.map_structure(lambda *leaves: list(leaves), *each)


def _arguments(
    what: str,
    strategy: StrategyFace,
    var: Variable | None,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
) -> Nest:
    """Returns the checked arguments of an update; a value in shards comes by way of this process to a whole one."""
    given: Nest = context.arguments(what, args, kwargs)
    leaves = nest.flatten(given)
    for leaf in leaves:
        if isinstance(leaf, Variable):
            leaf._check_strategy(strategy)
        if isinstance(leaf, SyncOnReadVariable) and not isinstance(var, SyncOnReadVariable):
            leaf._refuse_update()
    if isinstance(var, VariableOfShards) or not any(isinstance(leaf, ShardedValue) for leaf in leaves):
        return given
    return nest.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, ShardedValue) else leaf, given)


def _joined(results: Sequence[Any]) -> Any:
    """Returns the results of an update for all shards as one."""
    wholes = [whole_of(result) for result in results]
    if wholes[0] is not results[0] and all(whole is wholes[0] for whole in wholes):
        return wholes[0]
    return None if all(result is None for result in results) else list(results)
