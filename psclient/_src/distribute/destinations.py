"""Where reduced values are: on workers' devices, beside a variable on servers, or beside the shards of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from psclient._src.arraylike import LazyArray, LazyCopy, Mirrored, read, reduced_array
from psclient._src.arrays.devices import Device, Value
from psclient._src.distribute.reduction import LocalKeys, LocalValue
from psclient._src.variables.feedback import Feedback
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.sharded import ShardedValue, Sharding, VariableOfShards
from psclient._src.variables.variable import Variable
from pswire.model.tensor import Array

ServerIds = tuple[int, ...]
"""Parameter devices, by number."""

Bring = Callable[[Sequence[object]], list[Array]]
"""Brings values to this process, in one round."""


@dataclass(frozen=True)
class ValueHome:
    """The servers that keep a reduced value.

    Attributes:
        place: the parameter devices.
        label: name of the variable that it is beside, for messages, or "".
        feedback: what compression leaves over of contributions to that variable; None where they travel as they are.
        alone: True if that variable is updated by each worker alone: the value is then of this one's contributions.
    """

    place: ServerIds
    label: str = ""
    feedback: Feedback | None = None
    alone: bool = False

    def plain(self) -> ValueHome:
        """Returns the same, to which contributions travel as they are."""
        return replace(self, feedback=None)

    def cut(self, local: LocalValue) -> list[tuple[LocalValue, ValueHome | None]]:
        """Returns what is reduced, and where it stays, for a contribution that is reduced to here.

        Raises:
            TypeError: rows by keys are for something else than their table.
        """
        return [(local.unkeyed(), self)]

    def joined(self, parts: Sequence[Value], local: LocalValue, bring: Bring) -> Value:
        """Returns the value that was reduced in parts, as `cut` made them of a contribution."""
        return parts[0]


@dataclass(frozen=True)
class Uncompressed:
    """A destination like a variable, to which contributions travel as they are.

    Attributes:
        variable: the variable.
    """

    variable: Variable


@dataclass(frozen=True, kw_only=True)
class BesideShards(ValueHome):
    """The servers that keep a value reduced to a partitioned variable.

    Attributes:
        sharding: how the variable is cut.
        shape: the variable's.
        feedbacks: of each shard, as `feedback`.
    """

    sharding: Sharding
    shape: tuple[int, ...]
    feedbacks: tuple[Feedback | None, ...]

    def plain(self) -> BesideShards:
        """Returns the same, to which contributions travel as they are."""
        return replace(self, feedbacks=(None,) * len(self.feedbacks))

    def cut(self, local: LocalValue) -> list[tuple[LocalValue, ValueHome | None]]:
        """Returns the rows of each shard, and where they stay; a value of other rows is one for all shards."""
        if not (isinstance(local, LocalKeys) or self.sharding.cuts(local.spec.shape, self.shape)):
            return [(local, self)]
        each = zip(local.cut(self.sharding), self.sharding.places, self.feedbacks, strict=True)
        return [(part, ValueHome(servers, self.label, feedback, self.alone)) for part, servers, feedback in each]

    def joined(self, parts: Sequence[Value], local: LocalValue, bring: Bring) -> Value:
        """Returns a value in shards; of a single one that itself."""
        return parts[0] if len(parts) == 1 else ShardedValue(parts, self.sharding, local.spec, bring)


@dataclass(frozen=True)
class OnWorkers:
    """Devices of this process.

    Attributes:
        devices: the devices.
    """

    devices: Sequence[Device]

    def plain(self) -> OnWorkers:
        """Returns itself: what comes here is not compressed."""
        return self

    def cut(self, local: LocalValue) -> list[tuple[LocalValue, ValueHome | None]]:
        """Returns the contribution; raises `TypeError` for rows by keys, which are for their table alone."""
        return [(local.unkeyed(), None)]

    def joined(self, parts: Sequence[Value], local: LocalValue, bring: Bring) -> Value:
        """Returns the value on the devices."""
        return to_devices(parts[0], self.devices)


Destination = ValueHome | OnWorkers


def home_of(variable: Variable) -> ValueHome:
    """Returns where a value is that was reduced to a variable on servers."""
    if not isinstance(variable, VariableOfShards):
        return ValueHome(variable.place, repr(variable.name), variable.feedback, variable._alone)
    return BesideShards(
        variable.place,
        repr(variable.name),
        alone=variable._alone,
        sharding=variable.sharding,
        shape=variable.shape,
        feedbacks=tuple(shard.feedback for shard in variable.variables),
    )


def to_devices(value: object, devices: Sequence[Device]) -> Value:
    """Copies a value to worker devices: returns an array for one device, else a mirrored value.

    One that comes to CPUs is there when it is looked at.
    """
    if isinstance(value, IndexedSlices):
        if len(devices) == 1:
            return value
        # On CPUs all may share it: nobody can change it.
        on_host = all(device.kind == "cpu" for device in devices)
        return Mirrored([value if on_host else value._on(device) for device in devices])
    if isinstance(value, LazyArray) and all(device.kind == "cpu" for device in devices):
        return value if len(devices) == 1 else Mirrored([LazyCopy(value) for _ in devices])
    array = read(value)
    copies = [reduced_array(array, device) for device in devices]
    return copies[0] if len(copies) == 1 else Mirrored(copies)
