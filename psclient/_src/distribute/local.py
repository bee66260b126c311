"""A backend without servers: variables live in this process, and nothing travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from psclient._src import context, values
from psclient._src.arrays import nest
from psclient._src.arrays.devices import Device, Value, as_array, device_scope, to_device, to_numpy
from psclient._src.arrays.nest import Leaf, Nest
from psclient._src.context import StrategyFace
from psclient._src.data.group import ReplicaGroup
from psclient._src.distribute.backend import LocalContributions, Names, NewVariable
from psclient._src.distribute.destinations import ServerIds, ValueHome
from psclient._src.distribute.host_buffers import HostBuffers
from psclient._src.distribute.reduction import LocalValue
from psclient._src.distribute.row_updates import update_rows
from psclient._src.options import Consistency
from psclient._src.tracing.diagnostics import refuse_result
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.kinds import CopiedVariable, LocalVariable, MirroredVariable, SyncOnReadVariable
from psclient._src.variables.sparse_updates import SparseUpdate
from psclient._src.variables.variable import Variable, VariableSynchronization
from pswire.cluster import Task
from pswire.model.plan import Nonfinite, VariableSpec
from pswire.model.tensor import Array

if TYPE_CHECKING:
    from psclient._src.distribute.prepared_step import PreparedStep
    from psclient._src.tracing.symbolic_numbers import Number

T = TypeVar("T")

LOCALHOST = Task("localhost", 0)
"""The task of a process that is in no cluster."""


class LocalBackend:
    """Variables in this process, mirrored on the replicas' devices.

    Args:
        devices: the devices of the local replicas.

    Attributes:
        between_graph: False: no other process runs the script.
        nonfinite: updates are applied with NaN and infinity, too.
        first_value: what a restored checkpoint has for a variable that is created later, None for nothing.
    """

    between_graph = False
    nonfinite: Nonfinite = "apply"

    def __init__(self, devices: tuple[Device, ...]) -> None:
        self.group = ReplicaGroup(devices)
        self._reduced = False
        self._closed = False
        self._names = Names()
        self.first_value: Callable[[VariableSpec], Array | None] = lambda spec: None
        self._restored = list[Variable]()
        self._buffers = HostBuffers()
        self.worker_devices = self.parameter_devices = tuple(map(self.full_name, devices))

    def is_apart(self, consistency: Consistency, name: str) -> bool:
        """Returns False: there is nobody whom an update could wait for."""
        return False

    def buffer(self, variable: Variable, replica: int) -> Array:
        """Returns an array of memory of its own."""
        return self._buffers.give(variable, replica, self.group.devices[replica])

    def full_name(self, device: Device) -> str:
        """Returns the device's name, `/job:localhost/task:0/device:CPU:0`."""
        return device.full_name(LOCALHOST)

    def close(self) -> None:
        """Closes the strategy: no replica can run any more."""
        self._closed = True

    def check_open(self) -> None:
        """Raises `RuntimeError` once the strategy is closed."""
        if self._closed:
            raise RuntimeError("this strategy is closed; create a new one")

    def create(self, new: NewVariable) -> Variable:
        """Creates a variable with a copy on each device; one of the default strategy has a single value, and its name.

        It is neither cut, as there is one place, nor is anything compressed, as nothing travels.
        """
        given, spec, unique = new.spec.name, new.spec, not context.is_default(new.strategy)
        spec = replace(spec, name=self._names.unique(given)) if unique else spec
        saved = self.first_value(spec)
        made = self._make(new, spec, new.value if saved is None else saved)
        if unique:
            self._names.take(given, spec.name)
        if saved is not None:
            self._restored.append(made)
            if isinstance(made, SyncOnReadVariable):
                made.share_out(saved)
        return made

    def _make(self, new: NewVariable, spec: VariableSpec, value: Array) -> Variable:
        devices, owner = self.group.devices, (new.strategy, spec, new.how)
        if context.is_default(new.strategy):
            synchronization = VariableSynchronization.ON_READ if new.on_read else VariableSynchronization.ON_WRITE
            return LocalVariable._stored(*owner, synchronization, devices[0], value)
        kind: type[CopiedVariable] = SyncOnReadVariable if new.on_read else MirroredVariable
        return kind._stored(*owner, tuple(range(len(devices))), devices, value)

    def was_restored(self, variable: Variable) -> bool:
        """Returns whether a variable's first value was a restored checkpoint's."""
        return any(variable is other for other in self._restored)

    def restored_names(self) -> frozenset[str]:
        """Returns the names of the variables of which `was_restored` holds."""
        return frozenset(variable.name for variable in self._restored)

    def reduce(self, contributions: Sequence[tuple[LocalValue, ValueHome | None]]) -> list[Value]:
        """Returns the value of the local replicas, which are all."""
        self._reduced = True
        return [local.alone() for local, _ in contributions]

    def apply(
        self,
        strategy: StrategyFace,
        place: ServerIds,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> list[Nest]:
        """Calls the function for each copy, with the copies that are there."""
        return apply_to_copies(strategy, [(index, self.group.devices[index]) for index in place], fn, args, kwargs)

    def repeat(
        self,
        prepared: PreparedStep,
        key: object,
        numbers: list[Number],
        local: LocalContributions,
        record: Callable[[], list[Value]],
        extras: int = 0,
    ) -> list[Value]:
        """Runs `record`: nothing travels, so that there is nothing to prepare."""
        return record()

    def bring(self, values: Sequence[object]) -> list[Array]:
        """Returns host arrays of the values, which are all in this process."""
        return [to_numpy(as_array(value)) for value in values]

    def together(self) -> AbstractContextManager[None]:
        """Does nothing: updates are made at once."""
        return nullcontext()

    def section(self, call: Callable[[], T]) -> T:
        """Runs it; what it reduced was its round."""
        try:
            return call()
        finally:
            self.flush()

    def run(self, replicas: Callable[[], T]) -> T:
        """Runs them, once."""
        self.flush()
        return replicas()

    def flush(self) -> None:
        """Ends the round, if anything was reduced. Nothing else waits: all that was asked for is done."""
        if self._reduced:
            self._reduced = False
            passed = self.group.sent()
            if passed is not None:
                passed.any_more = False

    def drop(self) -> None:
        """Does nothing but `flush`: here nothing is held back."""
        self.flush()


def apply_to_copies(
    strategy: StrategyFace,
    copies: Sequence[tuple[int, Device]],
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> list[Nest]:
    """Calls an update function once for each copy of the variables among its arguments, on its device.

    Args:
        strategy: the strategy that owns the variables.
        copies: local replicas, with their devices.
        fn: the function.
        args: its positional arguments; for each distributed value it gets the copy on its device.
        kwargs: its keyword arguments, likewise.

    Raises:
        ValueError: there is a per-replica value among the arguments.
    """
    if any(isinstance(leaf, values.PerReplica) for leaf in nest.flatten((tuple(args), dict(kwargs)))):
        raise ValueError(
            "update does not take per-replica values; reduce them first with reduce_to(op, value, variable)"
        )
    results = []
    for index, device in copies:
        own_args, own_kwargs = values.select((tuple(args), dict(kwargs)), index)
        with context.enter_update_copy(strategy, index, device), device_scope(device):
            if isinstance(fn, SparseUpdate) and fn.sparse == "lazy" and (fn.needs_rows or _holds_rows(own_args)):
                results.append(update_rows(fn.fn, own_args, own_kwargs, device))
                continue
            whole = nest.map_structure(partial(_whole, device=device), (own_args, own_kwargs))
            results.append(fn(*whole[0], **whole[1]))
        refuse_result(fn, results[-1])
    return results


def _holds_rows(args: object) -> bool:
    return any(isinstance(leaf, IndexedSlices) for leaf in nest.flatten(args))


def _whole(leaf: Leaf, device: Device) -> Leaf:
    """Returns `IndexedSlices` as an update function takes them: as a whole array."""
    return to_device(leaf.numpy(), device) if isinstance(leaf, IndexedSlices) else leaf
