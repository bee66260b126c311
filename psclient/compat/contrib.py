"""`tf.contrib.distribute` of r1.9, where replicas were towers: the same strategies by their first names.

distribution = contrib.DistributionStrategy(ps.MirroredStrategy(["cpu:0", "cpu:1"]))
with distribution.scope():
    losses = distribution.call_for_each_tower(tower_fn, iterator.get_next())
    loss = distribution.fetch(distribution.reduce("mean", losses, "cpu:0"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

from psclient._src import arraylike, context, values
from psclient._src.arraylike import read
from psclient._src.arrays import nest
from psclient._src.arrays.devices import Device, Value, to_device
from psclient._src.arrays.nest import Nest
from psclient._src.context import ReplicaContext
from psclient._src.data.distributed import DistributedDatasetFromFunction
from psclient._src.data.iterators import DistributedIterator
from psclient._src.distribute.strategy import Strategy
from psclient._src.strategies.extended_v1 import StrategyExtended
from psclient._src.variables.variable import Variable, VariableAggregation, on_read_scope

_CPU = "/device:CPU:0"


class _Index:
    """A map from device to values. Its order is that of the current strategy's towers, where it has one for each."""

    values: Any
    """The values, in order."""

    def _keep(self, index: Mapping[str, object]) -> list[object]:
        kept = {Device.parse(name): (name, value) for name, value in index.items()}
        if len(kept) < len(index) or not kept:
            raise ValueError(f"a map from device to values needs different devices, but got {', '.join(index)}")
        towers = [Device.parse(name) for name in context.get_strategy().extended.worker_devices]
        order = towers if {*towers} == kept.keys() else [*kept]
        self._places = {device: place for place, device in enumerate(order)}
        self._names = [kept[device][0] for device in order]
        return [kept[device][1] for device in order]

    @property
    def devices(self) -> list[str]:
        """The devices that have a value."""
        return list(self._names)

    def on_device(self, device: str) -> bool:
        """Returns whether a device, given by a long or a short name, has a value."""
        return Device.parse(device) in self._places

    def get(self, device: str | None = None) -> Any:
        """Returns the value of a device.

        Args:
            device: its long or short name; None for that of the tower, or of the update, in whose function the thread
                is; elsewhere of mirrored values the first.

        Raises:
            ValueError: it has no value; or none is named, and the thread is in no such function.
        """
        here = context.replica_device() if device is None else Device.parse(device)
        if here is None and isinstance(self, Mirrored):
            return self.values[0]
        if here is None:
            raise ValueError(
                "get() was called in cross-tower context, where values may differ by device; pass a device"
            )
        if here not in self._places:
            raise ValueError(f"device {here} has no value; use one of {', '.join(self._names)}")
        return self.values[self._places[here]]


class PerDevice(_Index, values.PerReplica):
    """A value that may differ by device, as `call_for_each_tower` returns it.

    Source: "Wrapped values" of `tf.contrib.distribute.DistributionStrategy`.

    Args:
        index: values by device, one for each tower. Inside of a scope in any order, elsewhere in that of the towers.

    Raises:
        ValueError: there are none, or one device twice.
        ConfigError: a name is that of no device.
    """

    def __init__(self, index: Mapping[str, object]) -> None:
        super().__init__(self._keep(index))


class Mirrored(_Index, arraylike.Mirrored):
    """A value that is the same on all of its devices, as `reduce` and `broadcast` return it.

    Source: "Wrapped values" of `tf.contrib.distribute.DistributionStrategy`.

    Args:
        index: copies by device.

    Raises:
        ValueError, ConfigError: as `PerDevice`.
    """

    def __init__(self, index: Mapping[str, object]) -> None:
        super().__init__(self._keep(index))


def _mapped(value: Nest, devices: Sequence[str]) -> Nest:
    """Returns a nest whose values that have one for each of some devices are maps from device to value."""

    def made(leaf: Any) -> Any:
        kind = {values.PerReplica: PerDevice, arraylike.Mirrored: Mirrored}.get(type(leaf))
        return kind(dict(zip(devices, leaf.values, strict=True))) if kind and len(leaf.values) == len(devices) else leaf

    return nest.map_structure(made, value)


class DistributionStrategy:
    """A strategy by the names of r1.9.

    Source: `tf.contrib.distribute.DistributionStrategy`. Methods for cross-tower context enter the strategy's scope
    where there is none.

    Args:
        strategy: the strategy that has these names; by default that of the calling thread's context.
    """

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.strategy: Strategy = strategy if strategy is not None else context.get_strategy()

    # ---- What it is ----

    @property
    def is_single_tower(self) -> bool:
        """True if there is one tower in all: then `call_for_each_tower` calls its function once."""
        return self.num_towers == 1

    @property
    def num_towers(self) -> int:
        """The number of towers, for averages over them."""
        return self.strategy.num_replicas_in_sync

    @property
    def parameter_devices(self) -> list[str]:
        """The devices that hold variables."""
        return list(self.strategy.extended.parameter_devices)

    @property
    def worker_devices(self) -> list[str]:
        """The devices of the local towers."""
        return list(self.strategy.extended.worker_devices)

    @property
    def worker_device_index(self) -> Any:
        """For `call_for_each_tower`: each tower gets its number in `worker_devices`; 0 if there is one."""
        return self._towers(values.per_replica(range(len(self.worker_devices))))

    def _towers(self, value: Nest) -> Any:
        """Returns a nest in which values with one for each tower are maps from device to value."""
        return _mapped(value, self.worker_devices)

    def configure(self, session_config: object = None) -> None:
        """Does nothing: there are no sessions to configure."""

    # ---- Contexts ----

    def scope(self) -> AbstractContextManager[Strategy]:
        """Makes the strategy current: see `Strategy.scope`."""
        return self.strategy.scope()

    def colocate_vars_with(self, colocate_with_variable: Variable | Sequence[str]) -> AbstractContextManager[None]:
        """Variables created within live with a variable, or on non-slot devices. In the scope."""
        return self.strategy.extended.colocate_vars_with(colocate_with_variable)

    def tower_local_var_scope(self, reduce_method: str) -> AbstractContextManager[None]:
        """Variables created within have a value of its own in each tower, and are not trained. In the scope.

        Args:
            reduce_method: "sum" or "mean": the combination for `fetch` and checkpoints.

        Raises:
            ValueError: `reduce_method` is neither.
        """
        return on_read_scope(VariableAggregation(_checked(reduce_method)))

    # ---- Towers ----

    def call_for_each_tower(self, fn: Callable[..., object], *args: object, **kwargs: object) -> Nest:
        """Calls a function once on each local tower, in tower context. In cross-tower context.

        Args:
            fn: may call `get_tower_context`.
            args: nests; of each per-device value a tower gets its own. `run_concurrently` is no argument
                of `fn`, and has no effect.
            kwargs: see `args`.

        Returns:
            The merged results, as `Strategy.run` returns them; of towers that differ a `PerDevice`.
        """
        kwargs.pop("run_concurrently", None)
        return self._towers(self.strategy.run(fn, args, kwargs))

    def unwrap(self, value: Value) -> list[Value]:
        """The list of the local towers' values; `[value]` of what is not distributed. In any context."""
        return list(self.strategy.experimental_local_results(value))

    def group(self, value: Value, name: str | None = None) -> None:
        """Waits until what was begun is done: what `unwrap` gives is then computed. In cross-tower context."""
        for leaf in nest.flatten(self.unwrap(value)):
            read(leaf)

    # ---- Values ----

    def distribute_dataset(self, dataset_fn: Any) -> PerDeviceDataset:
        """Each worker makes its own dataset, from which each tower takes a batch in each step. In any context.

        Args:
            dataset_fn: without arguments; returns what `experimental_distribute_datasets_from_function` takes. Or that
                dataset itself, of which every worker goes through the whole.

        Raises:
            TypeError, ValueError: as `experimental_distribute_datasets_from_function`.
        """
        dataset = self.strategy.experimental_distribute_datasets_from_function(
            lambda _: dataset_fn() if callable(dataset_fn) else dataset_fn
        )
        return PerDeviceDataset(dataset, self.worker_devices)

    def broadcast(self, tensor: Value, destinations: object = None) -> Value:
        """Mirrors a value to a variable's locality, or to devices; by default the towers'. In cross-tower context."""
        to = self.worker_devices if destinations is None else destinations
        return self._placed(cast(StrategyExtended, self.strategy.extended).broadcast_to(tensor, to), to)

    def _placed(self, value: Value, destinations: object) -> Value:
        named = isinstance(destinations, list | tuple) and all(isinstance(name, str) for name in destinations)
        return _mapped(value, cast(Sequence[str], destinations)) if named else self._towers(value)

    def reduce(self, method_string: str, value: Value, destinations: object = None) -> Value:
        """Combines a value across all towers of all workers. In cross-tower context.

        Args:
            method_string: "sum" or "mean".
            value: one array from each tower.
            destinations: a variable, a device or a list of them; by default where `value` is.
        """
        to = value if destinations is None else destinations
        return self._placed(self.strategy.extended.reduce_to(_checked(method_string), value, to), to)

    def batch_reduce(self, method_string: str, value_destination_pairs: Sequence[tuple[object, object]]) -> list[Value]:
        """Several `reduce` at once, of (value, destinations) pairs. In cross-tower context."""
        pairs = [(value, value if to is None else to) for value, to in value_destination_pairs]
        reduced = self.strategy.extended.batch_reduce_to(_checked(method_string), pairs)
        return [self._placed(value, to) for value, (_, to) in zip(reduced, pairs, strict=True)]

    def fetch(self, val: Value, destination: str = _CPU, fn: Callable[[Value], Value] = lambda x: x) -> Value:
        """Copies `fn(val)` to a device of this process; of a tower-local variable its combined value.

        In cross-tower context.

        Args:
            val: an array, a variable, a mirrored value; or a per-device value, of which the device's own is taken.
            destination: name of the device, such as "/cpu:0".
            fn: applied before the value is copied.

        Raises:
            ValueError: `val` is a per-device value, and has none of that device: it has to be reduced first.
        """
        device = Device.parse(destination)
        with self.scope():
            if isinstance(val, values.PerReplica):
                found = self._of_tower(val, device)
            else:
                found = val._component(0) if isinstance(val, arraylike.Mirrored) else read(val)
            return to_device(fn(found), device)

    def _of_tower(self, value: values.PerReplica, device: Device) -> Value:
        known = self._towers(value)
        if not isinstance(known, PerDevice) or not known.on_device(str(device)):
            raise ValueError(
                f"fetch takes one value, but got one for each tower, none of which is on {device}; combine "
                "them with reduce, or pass the device of a tower"
            )
        return known.get(str(device))

    # ---- Updates ----

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """The devices for variables that serve several others. In any context."""
        return self.strategy.extended.non_slot_devices(var_list)

    def update(self, var: Variable, fn: Callable[..., object], *args: object, **kwargs: object) -> Nest:
        """Runs `fn(var, *args, **kwargs)` beside a variable: see `StrategyExtended.update`. In cross-tower context."""
        return self.strategy.extended.update(var, fn, args, kwargs)

    def update_non_slot(
        self, colocate_with: Variable | Sequence[str], fn: Callable[..., object], *args: object, **kwargs: object
    ) -> Nest:
        """Runs `fn(*args, **kwargs)` on the non-slot devices. In cross-tower context."""
        return self.strategy.extended.update_non_slot(colocate_with, fn, args, kwargs)


class PerDeviceDataset:
    """A dataset of which each tower takes a batch in each step.

    Args:
        dataset: as the strategy distributes it.
        devices: the towers'.
    """

    def __init__(self, dataset: DistributedDatasetFromFunction, devices: Sequence[str]) -> None:
        self._dataset = dataset
        self._devices = devices

    def make_one_shot_iterator(self) -> PerDeviceIterator:
        """An iterator over one pass."""
        return PerDeviceIterator(iter(self._dataset), self._devices)

    make_initializable_iterator = make_one_shot_iterator

    def __iter__(self) -> PerDeviceIterator:
        return self.make_one_shot_iterator()


class PerDeviceIterator:
    """One pass over a dataset; each item is a value for each tower.

    Args:
        batches: the pass over the distributed dataset.
        devices: the towers'.

    Attributes:
        initializer: None, as there is no session that would have to run it.
    """

    initializer = None

    def __init__(self, batches: DistributedIterator, devices: Sequence[str]) -> None:
        self._batches = batches
        self._devices = devices

    def get_next(self) -> Nest:
        """The next step's batches; raises `StopIteration` at the end of the pass."""
        return _mapped(next(self._batches), self._devices)

    __next__ = get_next

    def __iter__(self) -> PerDeviceIterator:
        return self


class TowerContext:
    """The tower whose function the thread runs.

    Source: `tf.contrib.distribute.DistributionStrategy`.

    Args:
        replica: the replica context with these methods by their newer names.
    """

    def __init__(self, replica: ReplicaContext) -> None:
        self._replica = replica

    @property
    def distribution_strategy(self) -> DistributionStrategy:
        """The strategy that runs it."""
        return DistributionStrategy(cast(Strategy, self._replica.strategy))

    @property
    def is_single_tower(self) -> bool:
        """True if there is one tower in all."""
        return self.num_towers == 1

    @property
    def num_towers(self) -> int:
        """The number of towers."""
        return self._replica.num_replicas_in_sync

    @property
    def tower_id(self) -> int:
        """This tower's number among all, from 0."""
        return self._replica.replica_id_in_sync_group

    @property
    def device(self) -> str:
        """The device on which it computes."""
        return str(self._replica.device)

    def merge_call(self, merge_fn: Callable[..., object], *args: object, **kwargs: object) -> Nest:
        """Meets the other local towers and runs `merge_fn(distribution, *args, **kwargs)` once. In tower context."""

        def merge(strategy: Strategy, *given: object, **named: object) -> Nest:
            distribution = DistributionStrategy(strategy)
            own, by_name = distribution._towers((given, named))
            return merge_fn(distribution, *own, **by_name)

        merge.__qualname__ = getattr(merge_fn, "__qualname__", merge.__qualname__)  # its name in messages
        return self._replica.merge_call(merge, args, kwargs)


def get_tower_context() -> TowerContext | None:
    """The tower in whose function the calling thread is; None in cross-tower and update context."""
    replica = context.get_replica_context()
    return None if replica is None else TowerContext(replica)


def _checked(method: str) -> Literal["sum", "mean"]:
    if method not in ("sum", "mean"):
        raise ValueError(f"method {method!r} is unknown; use 'sum' or 'mean'")
    return "sum" if method == "sum" else "mean"
