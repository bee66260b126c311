"""`tf.contrib.distribute` of r1.9, where replicas were towers: the same strategies by their first names.

distribution = contrib.DistributionStrategy(ps.MirroredStrategy(["cpu:0", "cpu:1"]))
with distribution.scope():
    losses = distribution.call_for_each_tower(tower_fn, iterator.get_next())
    loss = distribution.fetch(distribution.reduce("mean", losses, "cpu:0"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

from psclient._src import context, nest, values
from psclient._src.arraylike import Mirrored, read
from psclient._src.context import ReplicaContext
from psclient._src.data.distributed import DistributedDatasetFromFunction, DistributedIterator
from psclient._src.devices import Device, Value, to_device
from psclient._src.distribute.strategy import Strategy
from psclient._src.nest import Nest
from psclient._src.variables.variable import Variable, VariableAggregation, on_read_scope

_CPU = "/device:CPU:0"


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
        return values.per_replica(range(len(self.worker_devices)))

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
            args, kwargs: nests; of each per-device value a tower gets its own. `run_concurrently` is no argument
                of `fn`, and has no effect.

        Returns:
            The merged results, as `Strategy.run` returns them.
        """
        kwargs.pop("run_concurrently", None)
        return self.strategy.run(fn, args, kwargs)

    def unwrap(self, value: Value) -> list[Value]:
        """The list of the local towers' values; `[value]` of what is not distributed. In any context."""
        return list(self.strategy.experimental_local_results(value))

    def group(self, value: Value, name: str | None = None) -> None:
        """Waits until what was begun is done: what `unwrap` gives is then computed. In cross-tower context."""
        for leaf in nest.flatten(self.unwrap(value)):
            read(leaf)

    # ---- Values ----

    def distribute_dataset(self, dataset_fn: Callable[[], object]) -> PerDeviceDataset:
        """Each worker makes its own dataset, from which each tower takes a batch in each step. In any context.

        Args:
            dataset_fn: without arguments; returns what `experimental_distribute_datasets_from_function` takes.
        """
        dataset = self.strategy.experimental_distribute_datasets_from_function(lambda _: dataset_fn())
        return PerDeviceDataset(dataset)

    def broadcast(self, tensor: Value, destinations: object = None) -> Value:
        """Mirrors a value to a variable's locality, or to devices; by default the towers'. In cross-tower context."""
        to = self.worker_devices if destinations is None else destinations
        return self.strategy.extended.broadcast_to(tensor, to)

    def reduce(self, method_string: str, value: Value, destinations: object = None) -> Value:
        """Combines a value across all towers of all workers. In cross-tower context.

        Args:
            method_string: "sum" or "mean".
            value: one array from each tower.
            destinations: a variable, a device or a list of them; by default where `value` is.
        """
        to = value if destinations is None else destinations
        return self.strategy.extended.reduce_to(_checked(method_string), value, to)

    def batch_reduce(self, method_string: str, value_destination_pairs: Sequence[tuple[object, object]]) -> list[Value]:
        """Several `reduce` at once, of (value, destinations) pairs. In cross-tower context."""
        pairs = [(value, value if to is None else to) for value, to in value_destination_pairs]
        return self.strategy.extended.batch_reduce_to(_checked(method_string), pairs)

    def fetch(self, val: Value, destination: str = _CPU, fn: Callable[[Value], Value] = lambda x: x) -> Value:
        """Copies `fn(val)` to a device of this process; of a tower-local variable its combined value.

        In cross-tower context.

        Args:
            val: an array, a variable, or a mirrored value.
            destination: name of the device, such as "/cpu:0".
            fn: applied before the value is copied.

        Raises:
            ValueError: `val` is a per-device value, which has to be reduced first.
        """
        if isinstance(val, values.PerReplica):
            raise ValueError("fetch takes one value, and not one for each tower; combine them with reduce first")
        with self.scope():
            found = val.component(0) if isinstance(val, Mirrored) else read(val)
            return to_device(fn(found), Device.parse(destination))

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
    """

    def __init__(self, dataset: DistributedDatasetFromFunction) -> None:
        self._dataset = dataset

    def make_one_shot_iterator(self) -> PerDeviceIterator:
        """An iterator over one pass."""
        return PerDeviceIterator(iter(self._dataset))

    make_initializable_iterator = make_one_shot_iterator

    def __iter__(self) -> PerDeviceIterator:
        return self.make_one_shot_iterator()


class PerDeviceIterator:
    """One pass over a dataset; each item is a value for each tower.

    Args:
        batches: the pass over the distributed dataset.

    Attributes:
        initializer: None, as there is no session that would have to run it.
    """

    initializer = None

    def __init__(self, batches: DistributedIterator) -> None:
        self._batches = batches

    def get_next(self) -> Nest:
        """The next step's batches; raises `StopIteration` at the end of the pass."""
        return next(self._batches)

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
            return merge_fn(DistributionStrategy(strategy), *given, **named)

        merge.__qualname__ = getattr(merge_fn, "__qualname__", merge.__qualname__)  # its name in messages
        return self._replica.merge_call(merge, args, kwargs)


def get_tower_context() -> TowerContext | None:
    """The tower in whose function the calling thread is; None in cross-tower and update context."""
    replica = context.get_replica_context()
    return None if replica is None else TowerContext(replica)


def _checked(method: str) -> Literal["sum", "mean"]:
    if method not in ("sum", "mean"):
        raise ValueError(f"method {method!r} is unknown; write 'sum' or 'mean'")
    return "sum" if method == "sum" else "mean"
