"""The kinds of variables, by where their values are.

ServerVariable       on parameter servers: one value that all replicas see
LocalVariable        in this process: the default strategy's
MirroredVariable     a copy on each device of this process, kept equal
SyncOnReadVariable   a copy for each replica, combined when it is read in cross-replica context
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NoReturn

import numpy as np

from psclient._src import context
from psclient._src.arraylike import Mirrored, Readable, read
from psclient._src.arrays.devices import AnyArray, Device, Value, as_array, device_scope, namespace, to_device, to_numpy
from psclient._src.context import StrategyFace
from psclient._src.values import Component, DistributedValues, container
from psclient._src.variables.device_copies import DeviceCopy
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.scatter import RowWritable, change
from psclient._src.variables.server_reader import ServerReader
from psclient._src.variables.variable import Variable, VariableAggregation, VariableSynchronization
from pswire.model.plan import PlacedVariable as Handle
from pswire.model.plan import VariableSpec
from pswire.model.rows import Int64s, Rows
from pswire.model.tensor import DTYPES, Array, TensorSpec


class ServerVariable(Variable):
    """A variable on parameter servers.

    Args:
        strategy, spec, aggregation: as `PlacedVariable` has them.
        handle: its number, and the servers that hold it.
        reader: reads its value, and rows of it, from there.

    Attributes:
        whole: the partitioned variable of which it is a shard; None for a variable of its own.
    """

    whole: Any = None

    def __init__(
        self,
        strategy: StrategyFace,
        spec: VariableSpec,
        aggregation: VariableAggregation,
        handle: Handle,
        reader: ServerReader,
    ) -> None:
        self._describe(strategy, spec, aggregation)
        self.handle = handle
        self.place = handle.servers
        self._reader = reader
        self._copies: dict[Device, DeviceCopy] = {}  # made by `DeviceCopies`

    def _fetch(self) -> Array:
        value = self._reader.kept(self.handle)
        return self._reader.read(self.handle) if value is None else value

    def _announce(self, ids: Int64s, hint: bool = False) -> None:
        self._reader.prefetch(self.handle, ids)

    def _take_rows(self, ids: Int64s) -> AnyArray:
        return on_replica(self._reader.read_rows(self.handle, ids))

    def _taken(self, how: str, value: Any) -> Any:
        if isinstance(value, Variable) and value.strategy is not self.strategy:
            return value  # which is refused later, with a word
        if isinstance(value, Readable) or not isinstance(value, DistributedValues):
            check_fits(self.name, self.spec, how, value)
        # A value crosses servers by way of this process.
        place = getattr(value, "place", None) if isinstance(value, Readable) else None
        return value if place is None or set(self.place) <= set(place) else value.numpy()

    def _copy_on(self, device: Device) -> AnyArray:
        if device.kind == "cpu":
            return self._fetch()
        # What was read is the same object until a round changes it: so long its copy serves as well.
        value, copy = self._fetch(), self._copies.get(device)
        if copy is None or copy.host is not value:
            copy = self._reader.copy_to(device, self, value)
        return copy.there.array()


def on_replica(array: AnyArray) -> AnyArray:
    """Returns an array on the device of the replica whose function runs; outside of one as it is."""
    device = context.replica_device()
    return array if device is None else to_device(array, device)


def check_fits(name: str, spec: TensorSpec, how: str, value: Any) -> None:
    """Raises what `Cell.write` raises, where a variable's value is not here."""
    held = DTYPES[spec.dtype]
    if type(value) in (bool, int, float, complex):
        dtype, shape = np.result_type(held, value), ()
    else:
        try:
            array = value if isinstance(value, Readable) else as_array(value)
        except TypeError as error:
            raise TypeError(f"variable {name!r}: {error}") from error
        dtype, shape = array.dtype, tuple(array.shape)
    if how != "assign" and dtype.kind not in "OUSMm":
        dtype = np.result_type(held, dtype)
    if not np.can_cast(dtype, held, "same_kind"):
        raise _miscast(name, dtype, held)
    try:
        fits = np.broadcast_shapes(spec.shape, shape) == spec.shape
    except ValueError:
        fits = False
    if not fits:
        raise _misfit(name, spec, shape)


def _miscast(name: str, dtype: Any, held: Any) -> TypeError:
    return TypeError(f"variable {name!r}: {dtype} cannot be assigned to {held}; use value.astype({held.name!r})")


def _misfit(name: str, spec: TensorSpec, shape: tuple[int, ...]) -> ValueError:
    return ValueError(f"variable {name!r} has shape {spec.shape}; a value of shape {shape} cannot be assigned to it")


class Cell:
    """An array on a device that is replaced, never changed: readers keep the array that they have read. For any thread.

    Attributes:
        foreign: True if others write it as well, without a word.

    Args:
        name: name of the variable, for messages.
        spec: dtype and shape.
        device: the device that holds it.
        value: the first value, of that dtype and shape.
    """

    foreign = False

    def __init__(self, name: str, spec: TensorSpec, device: Device, value: AnyArray) -> None:
        self.device = device
        self._name = name
        self._spec = spec
        self._lock = threading.Lock()  # guards the array between its reading and its replacement
        self.array: AnyArray = None
        self.write("assign", value)

    def write(self, how: str, value: object) -> None:
        """Gives it a value, adds or subtracts one: "assign", "assign_add" or "assign_sub".

        Raises:
            TypeError: the value's dtype is of another kind.
            ValueError: its shape does not fit.
        """
        taken = read(value)
        with self._lock, device_scope(self.device):
            fitting = self.fit(taken if how == "assign" else self._changed(how, taken))
            self._hold(namespace(self.device).array(fitting, DTYPES[self._spec.dtype]))

    def scatter(self, how: str, rows: Rows) -> None:
        """Changes rows by one of `SCATTERS`, each place once; they are of a dtype that fits."""
        with self._lock, device_scope(self.device):
            xp = namespace(self.device)
            at = xp.asarray(rows.ids)
            whole = self.array.copy()
            whole[at] = change(how, whole[at], to_device(rows.values, self.device), xp).astype(whole.dtype)
            self._hold(whole)

    def _hold(self, array: AnyArray) -> None:
        if self.device.kind == "cpu":
            array.flags.writeable = False
        self.array = array

    def _changed(self, how: str, delta: object) -> AnyArray:
        """Returns the array plus or minus a value, in NumPy's dtype: the result is rounded once, as on servers."""
        check_fits(self._name, self._spec, how, delta)
        weak = isinstance(delta, bool | int | float | complex) and not isinstance(delta, np.generic)
        delta = delta if weak else to_device(as_array(delta), self.device)
        return self.array + delta if how == "assign_add" else self.array - delta

    def fit(self, value: Value) -> AnyArray:
        """The value cast within its kind and broadcast, as NumPy does in place, and as update programs do.

        Raises:
            TypeError, ValueError: as `write`.
        """
        dtype = DTYPES[self._spec.dtype]
        if isinstance(value, bool | int | float | complex):
            value = np.asarray(value, np.result_type(dtype, value))
        value = to_device(as_array(value), self.device)
        if not np.can_cast(value.dtype, dtype, "same_kind"):
            raise _miscast(self._name, value.dtype, dtype)
        try:
            return namespace(self.device).broadcast_to(value.astype(dtype), self._spec.shape)
        except ValueError:
            raise _misfit(self._name, self._spec, tuple(value.shape)) from None


class LocalVariable(Variable):
    """A variable of the default strategy: one value, that every thread may read and assign in any context."""

    place = (0,)

    def __init__(
        self,
        strategy: StrategyFace,
        spec: VariableSpec,
        aggregation: VariableAggregation,
        synchronization: VariableSynchronization,
        device: Device,
        value: Array,
    ) -> None:
        self._describe(strategy, spec, aggregation)
        self.synchronization = synchronization
        self.cell = Cell(self.name, self.spec, device, value)

    @property
    def devices(self) -> tuple[str, ...]:
        names: tuple[str, ...] = self.strategy.extended.parameter_devices
        return names

    def _fetch(self) -> Array:
        return to_numpy(self.cell.array)

    def _assign(self, how: str, value: Value) -> Value:
        lift = context.update_lift()
        if lift is not None:
            lift(self)  # raises: it is no part of what the servers update
        self.cell.write(how, value)
        return self

    def _scatter_here(self, how: str, slices: IndexedSlices) -> Value:
        self.cell.scatter(how, slices.rows())
        return self

    def __repr__(self) -> str:
        return _show(self.name, self.spec, self.cell.array)


class ReplicaCopy(Component, RowWritable):
    """One replica's copy of a variable; its name and whether it is trained are the variable's.

    Attributes:
        distributed_container: the variable whose copy this is.
    """

    def __init__(self, container: CopiedVariable, device: Device, value: Array) -> None:
        self.distributed_container: CopiedVariable = container
        self.spec = container.spec
        self.name = container.name
        self.strategy = container.strategy
        self.trainable = container.trainable
        self.synchronization = container.synchronization
        self.aggregation = container.aggregation
        self.cell = Cell(container.name, container.spec, device, value)

    @property
    def device(self) -> str:
        """The device that holds the copy."""
        whole = self.distributed_container
        return whole.devices[next(index for index, own in enumerate(whole.values) if own is self)]

    def _fetch(self) -> Array:
        return to_numpy(self.cell.array)

    def _copy_on(self, device: Device) -> AnyArray:
        return to_device(self.cell.array, device)

    def value(self) -> Value:
        return self.read_value()

    def assign(self, value: Value) -> Value:
        """In an update function, or of an ON_READ variable, assigns this copy; else the variable."""
        return self.distributed_container.assign_copy(self, "assign", value)

    def assign_add(self, delta: Value) -> Value:
        """Adds to the copy, under the rules of `assign`."""
        return self.distributed_container.assign_copy(self, "assign_add", delta)

    def assign_sub(self, delta: Value) -> Value:
        """Subtracts from the copy, under the rules of `assign`."""
        return self.distributed_container.assign_copy(self, "assign_sub", delta)

    def _scatter_here(self, how: str, slices: IndexedSlices) -> Value:
        on_read = self.synchronization is VariableSynchronization.ON_READ
        if not (on_read or context.in_update()):
            return self.distributed_container._scatter_here(how, slices)
        self.cell.scatter(how, slices.rows())
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        whole = container(deepcopy(self.distributed_container, memo))
        return whole._component(next(i for i, own in enumerate(self.distributed_container.values) if own is self))

    def __repr__(self) -> str:
        return _show(self.name, self.spec, self.cell.array)


class CopiedVariable(Variable, DistributedValues):
    """Base of variables with a copy for each local replica, on its device.

    Args:
        strategy, spec, aggregation: as `PlacedVariable` has them.
        place: the parameter devices to which other variables are colocated with it.
        devices: the local replicas', in order.
        value: of each copy at first.
    """

    def __init__(
        self,
        strategy: StrategyFace,
        spec: VariableSpec,
        aggregation: VariableAggregation,
        place: tuple[int, ...],
        devices: Sequence[Device],
        value: Array,
    ) -> None:
        self._describe(strategy, spec, aggregation)
        self.place = place
        DistributedValues.__init__(self, [ReplicaCopy(self, device, value) for device in devices])

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of its copies."""
        names: tuple[str, ...] = self.strategy.extended.worker_devices
        return names

    def contents(self) -> list[tuple[Cell, AnyArray]]:
        """Returns the places of its copies, each with its array of now, which nothing changes: it can be put back."""
        return [(copy.cell, copy.cell.array) for copy in self.values]

    def assign_copy(self, copy: ReplicaCopy, how: str, value: Value) -> Value:
        """An assignment through one copy."""
        raise NotImplementedError

    def _scatter(self, how: str, slices: IndexedSlices) -> None:
        self.strategy.extended.update(self, lambda copy: copy.cell.scatter(how, slices.rows()))

    def _mine(self) -> ReplicaCopy | None:
        """The copy of the replica or of the update in whose function the calling thread is."""
        index = context.local_replica(self.strategy)
        copy: ReplicaCopy | None = None if index is None else self._component(index)
        return copy

    def __repr__(self) -> str:
        return DistributedValues.__repr__(self)


class MirroredVariable(CopiedVariable):
    """A variable with a copy on each device of this process, kept equal by making the same updates everywhere."""

    def _fetch(self) -> Array:
        return to_numpy(self._array())

    def _copy_on(self, device: Device) -> AnyArray:
        return to_device(self._array(), device)

    def _array(self) -> AnyArray:
        mine = self._mine()
        return (self._component(0) if mine is None else mine).cell.array

    def _assign(self, how: str, value: Value) -> Value:
        mine = self._mine()
        if mine is not None and context.in_update():
            return self.assign_copy(mine, how, value)
        return super()._assign(how, value)

    def _scatter_here(self, how: str, slices: IndexedSlices) -> Value:
        mine = self._mine()
        if mine is not None and context.in_update():
            return mine._scatter_here(how, slices)
        return super()._scatter_here(how, slices)

    def assign_copy(self, copy: ReplicaCopy, how: str, value: Value) -> Value:
        if not context.in_update():
            return self._assign(how, value)
        copy.cell.write(how, value)
        return copy


class SyncOnReadVariable(CopiedVariable):
    """A variable of which each replica assigns a copy of its own; read in cross-replica context it is the aggregate.

    Source: `tf.compat.v1.distribute.StrategyExtended`, "Sync on read variables".

    Attributes:
        saved: on servers, the aggregate as of the last checkpoint, or of now where workers are asynchronous; of a
            local strategy None.
        parts: hands in what the copies have where workers are asynchronous: `distribute.on_read.Copies`, or None.
    """

    saved: Any = None
    parts: Any = None
    synchronization = VariableSynchronization.ON_READ

    def _fetch(self) -> Array:
        mine = self._mine()
        if mine is not None:
            return to_numpy(mine.cell.array)
        self._check_aggregation("read")
        if self.is_shared:
            (whole,) = self.parts.read([self])
            return whole  # type: ignore[no-any-return]
        value: Array = self.strategy.extended._aggregate(self.aggregation, self, None)
        return value.astype(DTYPES[self.spec.dtype], copy=False)  # A mean of half precision comes in single.

    def _copy_on(self, device: Device) -> AnyArray:
        mine = self._mine()
        return to_device(self._fetch() if mine is None else mine.cell.array, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        made = super().__deepcopy__(memo)
        for own, new in zip(self.values, container(made).values, strict=True):
            new.cell.write("assign", own.cell.array)
        return made

    def _first(self) -> Array:
        return to_numpy(self._component(0).cell.array)

    def assign_copy(self, copy: ReplicaCopy, how: str, value: Value) -> Value:
        copy.cell.write(how, value)
        return copy

    def _assign(self, how: str, value: Value) -> Value:
        mine = self._mine()
        if mine is not None:
            return self.assign_copy(mine, how, value)
        self.strategy.backend.check_open()
        if how != "assign" and self.aggregation not in (
            VariableAggregation.MEAN,
            VariableAggregation.ONLY_FIRST_REPLICA,
        ):
            raise self._across_replicas(how)
        if isinstance(value, DistributedValues) and not isinstance(value, Mirrored | Variable):
            raise ValueError(
                f"a per-replica value was assigned to {self.name!r} in cross-replica context; assign one value"
            )
        self._check_aggregation("assigned")
        value = value._component(0) if isinstance(value, Mirrored) else read(value)
        if self.is_shared:
            self.parts.hand_in()
        self._spread(value, how)
        if self.is_shared:
            self.handed_in()
            self.parts.assign(self, how, value)
        return self

    def _scatter_here(self, how: str, slices: IndexedSlices) -> Value:
        mine = self._mine()
        if mine is not None:
            return mine._scatter_here(how, slices)
        raise self._across_replicas(how)

    def _across_replicas(self, how: str) -> ValueError:
        return ValueError(
            f"{how} of {self.name!r} was called in cross-replica context, but an ON_READ variable has a "
            f"value for each replica; call {how} in the function passed to strategy.run, or assign the "
            "whole value"
        )

    def _refuse_update(self) -> NoReturn:
        """Raises `ValueError`: the copies of what is updated would not stay equal."""
        raise ValueError(
            f"{self.name!r} is an ON_READ variable, which has a value for each replica; read it before, in "
            "cross-replica context, and pass its value"
        )

    def share_out(self, value: object) -> None:
        """Gives each copy its share of a saved aggregate: of a sum over R replicas an R-th, else the value itself.

        What an integer sum leaves over is replica 0's, so that the sum is what was saved.
        """
        rest = self._spread(value)
        if rest is not None and self.strategy.backend.group.slice()[0] == 0:
            self._component(0).cell.write("assign_add", rest)

    def _spread(self, value: object, how: str = "assign") -> Array | None:
        """As `share_out`; what an integer sum leaves over is given back, and nobody has it."""
        rest = None
        if self.aggregation is VariableAggregation.SUM:
            whole = to_numpy(self._component(0).cell.fit(value))
            value, rest = _share(whole, self.strategy.num_replicas_in_sync)
        for copy in self.values:
            copy.cell.write(how, value)
        return rest

    # ---- Where workers are asynchronous ----

    @property
    def is_shared(self) -> bool:
        """True where servers have the aggregate of now, since workers are asynchronous."""
        return self.parts is not None and self.parts.active

    def copies(self) -> list[Array]:
        """Returns the copies of now, on the host."""
        return [to_numpy(copy.cell.array) for copy in self.values]

    def is_ahead(self, ends: bool) -> bool:
        """Returns whether a copy was changed since `handed_in`; `ends` to look at those that others write as well."""
        return any(
            copy.cell.array is not before and (not copy.cell.foreign or (ends and not _alike(copy.cell.array, before)))
            for copy, before in zip(self.values, self._handed_in, strict=True)
        )

    def changes(self) -> list[Array]:
        """Returns by how much each copy has grown since `handed_in`."""
        before = map(to_numpy, self._handed_in)
        return [now - then for now, then in zip(self.copies(), before, strict=True)]

    def handed_in(self) -> None:
        """Servers have what the copies are now."""
        self._handed_in = [copy.cell.array for copy in self.values] if self.is_shared else []

    def take_over(self, value: Array) -> None:
        """Gives each copy a value, of which there is nothing to be handed in."""
        for copy in self.values:
            copy.cell.write("assign", value)
        self.handed_in()

    def _check_aggregation(self, what: str) -> None:
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{self.name!r} is {what} in cross-replica context, where it has a value for each replica, "
                "and has no aggregation; create it with aggregation=ps.VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA, or use strategy.experimental_local_results"
            )


def _alike(array: AnyArray, other: AnyArray) -> bool:
    return bool(np.array_equal(to_numpy(array), to_numpy(other), equal_nan=array.dtype.kind in "fc"))


def read_together(variables: Sequence[Variable]) -> list[Array] | None:
    """Returns what all have made of ON_READ variables of asynchronous workers, asked for at once; None of others."""
    shared = [each for each in variables if isinstance(each, SyncOnReadVariable) and each.is_shared]
    if not shared or len(shared) < len(variables):
        return None
    found: list[Array] = shared[0].parts.read(shared)
    return found


def _share(whole: Array, replicas: int) -> tuple[Array, Array | None]:
    """An R-th of a sum; of an integer one its fraction is cut off, as in TensorFlow, and what that leaves over."""
    if whole.dtype.kind not in "iu":
        return np.true_divide(whole, replicas), None
    rest = np.fmod(whole, replicas)
    return (whole - rest) // replicas, rest


def _show(name: str, spec: TensorSpec, array: AnyArray) -> str:
    host = to_numpy(array)
    shown = np.array2string(host, threshold=20, separator=", ") if host.ndim else str(host[()])
    return f"<ps.Variable {name!r} shape={spec.shape} dtype={spec.dtype}, numpy={shown}>"
