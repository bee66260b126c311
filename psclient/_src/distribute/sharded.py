"""`strategy.extended` of strategies that cut variables into shards: the difference to those that do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from psclient._src import context
from psclient._src.arrays import nest
from psclient._src.arrays.devices import Value
from psclient._src.arrays.nest import Nest
from psclient._src.context import StrategyFace
from psclient._src.distribute import extended_v1
from psclient._src.distribute.backend import Backend, ServerIds, ValueHome
from psclient._src.distribute.extended import Colocation, Destination
from psclient._src.distribute.reduction import LocalKeys, LocalRows, LocalValue, refuse_keys
from psclient._src.distribute.template import HostValue
from psclient._src.values import container
from psclient._src.variables.compression import Compressed
from psclient._src.variables.feedback import Feedback
from psclient._src.variables.kinds import ServerVariable
from psclient._src.variables.partitioners import Cut, PartitionFn, shards_for
from psclient._src.variables.sharded import (
    CutVariable,
    ShardCopies,
    ShardedValue,
    ShardedVariable,
    Sharding,
    ShardReader,
    VariableOfShards,
)
from psclient._src.variables.variable import Variable, VariableAggregation
from pswire.model.plan import Reduction, VariableSpec
from pswire.model.tensor import DTYPES, Array, TensorSpec


class ShardingBackend(Backend, Protocol):
    """A backend that creates shards."""

    @property
    def reader(self) -> ShardReader:
        """Reads variables."""
        ...

    def places_for(self, specs: Sequence[VariableSpec]) -> list[ServerIds]:
        """Returns the servers for the shards of one variable."""
        ...

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which updates are of one round, as in a merge call; all of them are made, or none."""
        ...

    def create_shard(
        self, strategy: StrategyFace, spec: VariableSpec, value: Array, place: ServerIds, chosen: bool
    ) -> ServerVariable:
        """Creates a variable on servers that are known; `chosen` if `places_for` has found them."""
        ...


class ShardedExtended(extended_v1.StrategyExtended):
    """The additional methods, where variables may be in shards.

    A variable is cut when it is created, by the partitioner; not beside another one, where it is cut as that one is. A
    reduction to a partitioned variable is one for each shard, and an update runs once beside each.

    Args:
        container_strategy, backend: as `extended.StrategyExtended` has them.
        partitioner: says into how many shards a variable is cut; None for one.
    """

    def __init__(
        self, container_strategy: StrategyFace, backend: ShardingBackend, partitioner: PartitionFn | None = None
    ) -> None:
        super().__init__(container_strategy, backend)
        self._sharding_backend = backend
        self._partitioner = partitioner

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
        """Gets or creates a variable, in shards where a partitioner says so, or that beside which it is created.

        Its own partitioner wins over the strategy's.
        """
        cut = self._partitioner if partitioner is None else partitioner
        if on_read or not (isinstance(place, Sharding) or (cut and not place)):
            servers = place.place if isinstance(place, Sharding) else place
            return super().create_variable(spec, value, servers, on_read, aggregation, compression)
        unique = replace(spec, name=self._unique(spec.name))
        if isinstance(place, Sharding):
            made = self._create_beside(unique, value, place, aggregation)
        else:
            count = shards_for(cast(PartitionFn, cut), unique.name, spec.tensor, DTYPES[spec.tensor.dtype])
            if count == 1:
                return super().create_variable(spec, value, place, on_read, aggregation, compression)
            starts = Sharding.starts_of(value.shape[0], count)
            places = self._sharding_backend.places_for(Sharding(starts, ((),) * count).specs(unique))
            made = self._create_cut(unique, value, Sharding(starts, tuple(places)), aggregation, chosen=True)
        self._take_names(spec.name, unique.name)
        self._backend.compress(made, compression, self._names)
        return made

    def _create_beside(
        self, spec: VariableSpec, value: Array, sharding: Sharding, aggregation: VariableAggregation
    ) -> Variable:
        if value.shape[:1] == (sharding.rows,):
            return self._create_cut(spec, value, sharding, aggregation, chosen=False)
        return self._create_copies(spec, value, sharding, aggregation)

    def _create_copies(
        self, spec: VariableSpec, value: Array, sharding: Sharding, aggregation: VariableAggregation
    ) -> Variable:
        saved_as = spec.name if spec.saved_as is None else spec.saved_as
        others = (
            replace(spec, name=f"{spec.name}/copy_{n}", saved_as=saved_as) for n in range(1, len(sharding.places))
        )
        made = self._create_each([spec, *others], [value] * len(sharding.places), sharding, chosen=False)
        return ShardCopies._stored(self._strategy, spec, aggregation, sharding, made, self._sharding_backend.reader)

    def _create_cut(
        self, spec: VariableSpec, value: Array, sharding: Sharding, aggregation: VariableAggregation, chosen: bool
    ) -> Variable:
        values = [value[rows] for rows in sharding.bounds]
        made = self._create_each(sharding.specs(spec), values, sharding, chosen)
        return ShardedVariable._stored(self._strategy, spec, aggregation, sharding, made, self._sharding_backend.reader)

    def _create_each(
        self, specs: Sequence[VariableSpec], values: Sequence[Array], sharding: Sharding, chosen: bool
    ) -> list[ServerVariable]:
        made = []
        for spec, value, place in zip(specs, values, sharding.places, strict=True):
            unique = replace(spec, name=self._unique(spec.name))
            made.append(self._sharding_backend.create_shard(self._strategy, unique, value, place, chosen))
            if spec is not specs[0] or unique.shard is not None:  # of copies the first has the name of all
                self._take_names(spec.name, unique.name)
        return made

    def _take_names(self, *names: str) -> None:
        for taken in set(names):
            self._names[taken] = self._names.get(taken, 0) + 1

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable | Sequence[str]) -> Iterator[None]:
        """Variables created within live on the same devices; see `extended.StrategyExtended.colocate_vars_with`.

        Beside a partitioned variable those with as many rows are cut as it is, shard beside shard. Others have a copy
        beside each shard: what an update assigns to them has to be the same for all shards.
        """
        whole = container(colocate_with_variable)
        with super().colocate_vars_with(colocate_with_variable):
            if not isinstance(whole, VariableOfShards):
                yield
                return
            token = self._colocated.set(whole.sharding)
            try:
                yield
            finally:
                self._colocated.reset(token)

    # ---- Reductions ----

    def _reduced(self, pairs: Sequence[tuple[LocalValue, Destination]]) -> list[Value]:
        cut = [_cut_to(local, place) for local, place in pairs]
        found = iter(super()._reduced([pair for each in cut for pair in each]))
        return [self._joined([next(found) for _ in each], *pair) for each, pair in zip(cut, pairs, strict=True)]

    def _joined(self, parts: Sequence[Value], local: LocalValue, place: Destination) -> Value:
        if not isinstance(place, BesideShards) or len(parts) == 1:
            return parts[0]
        return ShardedValue(parts, place.sharding, local.spec, self._backend.bring)

    def _destination(self, destinations: object, value: object) -> Destination:
        found = super()._destination(destinations, value)
        if isinstance(destinations, VariableOfShards) and isinstance(found, ValueHome):
            feedbacks = tuple(shard.feedback for shard in destinations.variables)
            return BesideShards(
                found.place,
                found.label,
                alone=found.alone,
                sharding=destinations.sharding,
                shape=destinations.shape,
                feedbacks=feedbacks,
            )
        return found

    def contributions(
        self, values: Sequence[Value], variables: Sequence[Variable], reductions: Sequence[Reduction]
    ) -> list[LocalValue | HostValue]:
        """Returns this process's contributions to sums like earlier ones; see `extended.StrategyExtended`."""
        if not any(isinstance(v, CutVariable) for v in variables):
            return super().contributions(values, variables, reductions)
        found: list[LocalValue | HostValue] = []
        rest = list(reductions)
        for value, v in zip(values, variables, strict=True):
            count = len(v.sharding.places) if isinstance(v, CutVariable) else 1
            mine, rest = rest[:count], rest[count:]
            if len(mine) < count:
                return []
            if isinstance(v, CutVariable):
                found += self._contributions_to(value, v, mine)
            else:
                found += super().contributions([value], [v], mine)
        return [] if rest else found

    def _contributions_to(
        self, value: Value, v: CutVariable, reductions: Sequence[Reduction]
    ) -> list[LocalValue | HostValue]:
        """Returns the contributions to the sums of a partitioned variable's shards."""
        whole = Reduction("sum", TensorSpec(reductions[0].tensor.dtype, v.shape), (), repr(v.name), reductions[0].form)
        found: list[LocalValue | HostValue] = []
        for local in super().contributions([value], [v], [whole]):
            if isinstance(local, HostValue):
                array = cast(Array | None, local.array)
                cut = [None if array is None else array[rows] for rows in v.sharding.bounds]
                found += [HostValue(local.weight, part) for part in cut]
            else:
                found += _cut(local, v.sharding)
        return found

    # ---- Updates ----

    def update(
        self,
        var: Variable,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> Nest:
        """Runs an update function beside a variable: see `extended.StrategyExtended.update`.

        Of a partitioned variable `fn` runs once beside each shard, with the shard in its place. Of the arguments, what
        is cut alike gives its shard, and `IndexedSlices` and arrays with as many rows and dimensions give their rows;
        all else is as it is. So `fn` has to compute each row by itself. The results are joined: shards are the variable
        that they are of; of another value there is a list with that of each shard.
        """
        whole = container(var)
        if not isinstance(whole, VariableOfShards):
            return super().update(var, fn, _here(args), _here(kwargs), group)
        with self._cross_replica("update"):
            whole._check_strategy(self._strategy)
            own, named = context.arguments("update", args, kwargs)
            self._check_variables(own, named, False)
            cut: list[Any] = whole.sharding.split_all((tuple(own), dict(named)), whole)
            update = super().update
            with self._sharding_backend.together():
                results = [update(shard, fn, *each) for shard, each in zip(whole.variables, cut, strict=True)]
            return nest.map_structure(lambda *leaves: _merged(leaves) if group else list(leaves), *results)


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


def _cut_to(local: LocalValue, place: Destination) -> list[tuple[LocalValue, Destination]]:
    """Returns what is reduced for a destination: for a partitioned variable, or a table, the rows of each shard.

    Raises:
        TypeError: rows by keys are for something else than their table.
    """
    keyed = isinstance(local, LocalKeys)
    if isinstance(place, BesideShards) and (keyed or place.sharding.cuts(local.spec.shape, place.shape)):
        each = zip(_cut(local, place.sharding), place.sharding.places, place.feedbacks, strict=True)
        return [(part, ValueHome(servers, place.label, feedback, place.alone)) for part, servers, feedback in each]
    if isinstance(local, LocalKeys):
        refuse_keys(local.space.table)
    return [(local, place)]


def _cut(local: LocalValue, sharding: Sharding) -> list[LocalValue]:
    specs = sharding.tensors(local.spec)
    if isinstance(local, LocalRows):
        each = zip(sharding.split_ids(local.ids), specs, strict=True)
        return [local.part(at, own, spec) for (at, own), spec in each]
    return [replace(local, spec=spec, total=local.total[b]) for spec, b in zip(specs, sharding.bounds, strict=True)]


def _here(args: Any) -> Any:
    """Returns arguments of an update of a whole variable: a value in shards comes by way of this process."""
    if not any(isinstance(leaf, ShardedValue) for leaf in nest.flatten(args)):
        return args
    return nest.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, ShardedValue) else leaf, args)


def _merged(results: Sequence[Any]) -> Any:
    """Returns the results of an update for all shards as one."""
    wholes = [result.whole if isinstance(result, ServerVariable) else None for result in results]
    if wholes[0] is not None and all(whole is wholes[0] for whole in wholes):
        return wholes[0]
    return None if all(result is None for result in results) else list(results)
