"""The variables of a strategy on servers: whole, in shards, with a copy beside each shard of another, or by keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from psclient._src.arrays.devices import AnyArray
from psclient._src.context import StrategyFace
from psclient._src.distribute.backend import Names, NewVariable
from psclient._src.distribute.destinations import ServerIds
from psclient._src.distribute.on_read import Copies
from psclient._src.distribute.replicas import RunAgain
from psclient._src.distribute.residuals import Residuals
from psclient._src.options import Consistency
from psclient._src.rounds.creation import NO_VALUE
from psclient._src.rounds.placement import Placement
from psclient._src.rounds.reader import VariableReader
from psclient._src.rounds.rounds import Exchange
from psclient._src.variables.keys import KeySpace, starts_of
from psclient._src.variables.kinds import Cell, ServerVariable, SyncOnReadVariable
from psclient._src.variables.partitioners import PartitionFn, shards_for
from psclient._src.variables.sharded import ShardCopies, ShardedVariable, Sharding, VariableOfShards
from psclient._src.variables.tables import KeySharding, PartOfTable, TableVariable, is_slot, slot_of
from psclient._src.variables.variable import Variable, VariableAggregation
from pswire.model.plan import VariableSpec
from pswire.model.tables import ROWS, TableSpec
from pswire.model.tensor import DTYPES, Array, TensorSpec


class ServerVariables:
    """Creates variables on servers. Used by the thread that creates them.

    Args:
        exchange: the rounds of this process.
        placement: chooses the servers of new variables.
        reader: reads variables.
        parts: the ON_READ variables of asynchronous workers.
        check_open: raises an error if the strategy is closed.
        partitioner: says into how many shards a variable is cut; None for one.

    Attributes:
        consistencies: says of a consistency that was given for a variable, and the variable's name, whether each
            worker updates that alone; raises `ConfigError` for one that it cannot have.
        residuals: what compression leaves over of this process's contributions.
        copied: ON_READ variables, with a copy for each replica.
        before: in a run that may have to be made again, the replicas' copies of variables as they were before it.
    """

    before: list[tuple[Cell, AnyArray]] | None = None

    def __init__(
        self,
        exchange: Exchange,
        placement: Placement,
        reader: VariableReader,
        parts: Copies,
        check_open: Callable[[], None],
        partitioner: PartitionFn | None,
    ) -> None:
        self.consistencies: Callable[[Consistency, str], bool] = lambda consistency, name: False
        self.copied: list[SyncOnReadVariable] = []
        self._group, self._servers = exchange.group, len(exchange.session.devices)
        self._creation, self._placement, self._reader, self._parts = exchange.creation, placement, reader, parts
        self._check_open, self._partitioner = check_open, partitioner
        self._names = Names()
        self._tables: dict[str, TableVariable] = {}
        self.residuals = Residuals(self._group, reader, self._create_on, self._names, self._creation.was_restored)

    def create(self, new: NewVariable) -> Variable:
        """Gets or creates a variable: see `Backend.create`. One in shards is cut as that beside which it is created."""
        self._check_open()
        given, place = new.spec, new.place
        new = replace(new, spec=replace(given, name=self._names.unique(given.name)))
        if isinstance(place, Sharding) and not new.on_read:
            made: Variable = self._create_beside(new, place)
        else:
            servers, count = place.place if isinstance(place, Sharding) else place, 1
            cut = self._partitioner if new.cut is None else new.cut
            if cut and not (new.on_read or servers):
                count = shards_for(cut, new.spec.name, given.tensor, DTYPES[given.tensor.dtype])
            if count == 1:
                made = self._create_whole(new, servers)
            else:
                starts = Sharding.starts_of(new.value.shape[0], count)
                places = self._placement.in_turn(Sharding(starts, ((),) * count).specs(new.spec))
                made = self._create_cut(new, Sharding(starts, tuple(places)), chosen=True)
        self._names.take(given.name, new.spec.name)
        self.residuals.compress(made, new.compression)
        return made

    @contextmanager
    def kept_for_again(self) -> Iterator[None]:
        """A context manager: copies that replicas assign within become what they were if it is left by `RunAgain`."""
        self.before = [content for variable in self.copied for content in variable.contents()]
        try:
            yield
        except RunAgain:
            for cell, array in self.before:
                cell.array = array
            raise
        finally:
            self.before = None

    def _create_whole(self, new: NewVariable, place: ServerIds) -> Variable:
        """Gets or creates it on the servers once somebody needs it; an ON_READ variable has there what was saved of it.

        What needs its value now, or has no room there, is sent at once.
        """
        spec, how = new.spec, new.how
        none = new.on_read and how is VariableAggregation.NONE
        if none:  # Copies that are never combined begin anew: a checkpoint would have another job's beginning.
            spec = replace(spec, saved_as="")
        owner = new.strategy, spec, how
        servers = self._placement.with_copies(place) or self._placement.choose(spec)
        now = new.on_read or not self._placement.has_room(servers, spec)
        handle = self._creation.create(spec, servers, new.value, now, chosen=not place)
        self._placement.created(handle, chosen=not place)
        if not new.on_read:
            return ServerVariable._stored(*owner, handle, self._reader)
        restored = self._creation.was_restored(handle.id)
        # A process that comes back to a running job begins anew: servers have an aggregate of the other workers. An
        # asynchronous worker adds to a sum, and goes on from a mean.
        anew = self._group.late
        if self._group.alone and not none:
            anew = how is VariableAggregation.SUM and not restored
        first = new.value if anew else self._reader.read(handle)
        variable = SyncOnReadVariable._stored(*owner, handle.servers, self._group.devices, first)
        variable.saved = ServerVariable._stored(*owner, handle, self._reader)
        if restored:
            variable.share_out(first)
        self._parts.add(variable)
        self.copied.append(variable)
        if self.before is not None:
            self.before += variable.contents()
        return variable

    # ---- In shards ----

    def _create_beside(self, new: NewVariable, sharding: Sharding) -> VariableOfShards:
        spec, value = new.spec, new.value
        if isinstance(sharding, KeySharding) and is_slot(value, sharding.space.spec):
            slot = slot_of(sharding.space.table, spec.name, value)
            whole = replace(spec, tensor=TensorSpec(slot.dtype, (ROWS, *slot.shape)))
            return self._create_parts(new.strategy, whole, sharding, sharding.parts(whole, slot), chosen=False)
        if not isinstance(sharding, KeySharding) and value.shape[:1] == (sharding.rows,):
            return self._create_cut(new, sharding, chosen=False)
        saved_as, count = spec.name if spec.saved_as is None else spec.saved_as, len(sharding.places)
        others = [replace(spec, name=f"{spec.name}/copy_{n}", saved_as=saved_as) for n in range(1, count)]
        made = self._create_each(new.strategy, [spec, *others], [value] * count, sharding, chosen=False)
        return ShardCopies._stored(new.strategy, spec, new.how, sharding, made, self._reader)

    def _create_cut(self, new: NewVariable, sharding: Sharding, chosen: bool) -> ShardedVariable:
        values = [new.value[rows] for rows in sharding.bounds]
        made = self._create_each(new.strategy, sharding.specs(new.spec), values, sharding, chosen)
        return ShardedVariable._stored(new.strategy, new.spec, new.how, sharding, made, self._reader)

    def _create_parts(
        self,
        strategy: StrategyFace,
        spec: VariableSpec,
        sharding: KeySharding,
        parts: Sequence[VariableSpec],
        chosen: bool,
    ) -> TableVariable:
        made = self._create_each(strategy, parts, [NO_VALUE] * len(parts), sharding, chosen)
        return TableVariable._stored(strategy, spec, VariableAggregation.NONE, sharding, made, self._reader)

    def _create_each(
        self,
        strategy: StrategyFace,
        specs: Sequence[VariableSpec],
        values: Sequence[Array],
        sharding: Sharding,
        chosen: bool,
    ) -> list[ServerVariable]:
        made = []
        for spec, value, place in zip(specs, values, sharding.places, strict=True):
            unique = replace(spec, name=self._names.unique(spec.name))
            made.append(self._create_on(strategy, unique, value, place, chosen))
            if spec is not specs[0] or unique.shard or unique.part:  # the first copy has the name of all
                self._names.take(spec.name, unique.name)
        return made

    def _create_on(
        self, strategy: StrategyFace, spec: VariableSpec, value: Array, place: ServerIds, chosen: bool = False
    ) -> ServerVariable:
        """Creates a variable on servers that are known; `chosen` if they were chosen for it."""
        place = self._placement.with_copies(place)
        handle = self._creation.create(spec, place, value, not self._placement.has_room(place, spec), chosen)
        self._placement.created(handle, chosen)
        kind = ServerVariable if spec.part is None else PartOfTable
        return kind._stored(strategy, spec, VariableAggregation.NONE, handle, self._reader)

    # ---- By keys ----

    def table(
        self,
        strategy: StrategyFace,
        name: str,
        table: TableSpec,
        trainable: bool,
        parts: int | None,
        consistency: Consistency | None = None,
    ) -> TableVariable:
        """Gets or creates a dynamic table, by its name. In cross-replica context.

        Args:
            strategy: the strategy that owns it.
            name: the table's name.
            table: the table, checked.
            trainable: True if optimizers should train it.
            parts: number of parts, each on its server; where there are fewer servers, or for None, one on each.
            consistency: how updates of it by different workers relate; None for what the strategy says.

        Raises:
            ValueError: there is a table of this name, and it is another one, or another variable.
        """
        space = KeySpace(name, table, starts_of(min(parts or self._servers, self._servers)))
        known, alone = self._tables.get(name), consistency is not None and self.consistencies(consistency, name)
        if known is not None:
            _check_same(known, space, trainable, alone)
            return known
        if self._names.get(name):
            raise ValueError(f"a variable named {name!r} already exists and is not a table; choose another name")
        spec = VariableSpec(name, TensorSpec(table.dtype, (ROWS, *table.shape)), trainable, alone=alone)
        unplaced = KeySharding.of(space, ((),) * space.parts).parts(spec)
        sharding = KeySharding.of(space, self._placement.in_turn(unplaced))
        made = self._create_parts(strategy, spec, sharding, sharding.parts(spec), chosen=True)
        made.consistency = consistency
        self._tables[name] = made
        self._names.take(name)
        return made


def _check_same(known: TableVariable, space: KeySpace, trainable: bool, alone: bool) -> None:
    """Raises `ValueError`, which says in what they differ, if a table of this name is another one."""
    own: dict[str, Any] = {"trainable": known.trainable, "shards": known.sharding.space.parts}
    asked: dict[str, Any] = {"trainable": trainable, "shards": space.parts}
    if known._alone != alone:
        own["consistency"], asked["consistency"] = ("Async()" if each else None for each in (known._alone, alone))
    for field in fields(TableSpec):
        own[field.name] = getattr(known.table_spec, field.name)
        asked[field.name] = getattr(space.spec, field.name)
    other = [f"{name} {own[name]!r}, not {asked[name]!r}" for name in own if own[name] != asked[name]]
    if other:
        raise ValueError(f"table {known.name!r} already exists with {'; '.join(other)}; choose another name")
