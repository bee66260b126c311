"""`strategy.extended` of strategies that have dynamic tables: the difference to those that have not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

from psclient._src.context import StrategyFace
from psclient._src.distribute.backend import ServerIds
from psclient._src.distribute.sharded import ShardedExtended, ShardingBackend
from psclient._src.options import Consistency
from psclient._src.variables.consistency import is_apart
from psclient._src.variables.keys import KeySpace, starts_of
from psclient._src.variables.partitioners import PartitionFn
from psclient._src.variables.sharded import Sharding
from psclient._src.variables.tables import KeySharding, PartOfTable, TableVariable, is_slot, slot_of
from psclient._src.variables.variable import Variable, VariableAggregation
from pswire.model.plan import VariableSpec
from pswire.model.tables import MAX_COUNT, MIN_CAPACITY, ROWS, TableSpec
from pswire.model.tensor import Array, TensorSpec


class TableBackend(ShardingBackend, Protocol):
    """A backend that creates parts of dynamic tables."""

    def create_part(self, strategy: StrategyFace, spec: VariableSpec, place: ServerIds, chosen: bool) -> PartOfTable:
        """Creates a part of a table, or of what lies beside one, which begins without a value; as `create_shard`."""
        ...

    def trim(self, parts: Sequence[PartOfTable], rows: int) -> None:
        """Cuts a table, of which these are the parts, to a number of rows."""
        ...


class TableExtended(ShardedExtended):
    """The additional methods, where there are dynamic tables.

    Args:
        container_strategy, backend, partitioner: as `ShardedExtended` has them.
    """

    def __init__(
        self, container_strategy: StrategyFace, backend: TableBackend, partitioner: PartitionFn | None = None
    ) -> None:
        super().__init__(container_strategy, backend, partitioner)
        self._table_backend = backend
        self._tables: dict[str, TableVariable] = {}

    def table(
        self,
        name: str,
        table: TableSpec,
        trainable: bool,
        parts: int | None,
        consistency: Consistency | None = None,
    ) -> TableVariable:
        """Gets or creates a dynamic table, by its name. In cross-replica context.

        Args:
            name: the table's name.
            table: the table, checked.
            trainable: True if optimizers should train it.
            parts: number of parts, each on its server; where there are fewer servers, or for None, one on each.
            consistency: how updates of it by different workers relate; None for what the strategy says.

        Raises:
            ValueError: there is a table of this name, and it is another one, or another variable.
        """
        with self._cross_replica("get_variable"):
            servers = len(self.parameter_devices)
            space = KeySpace(name, table, starts_of(min(parts or servers, servers)))
            known, alone = self._tables.get(name), is_apart(self._strategy, consistency, name)
            if known is not None:
                _check_same(known, space, trainable, alone)
                return known
            if self._names.get(name):
                raise ValueError(f"a variable named {name!r} already exists and is not a table; choose another name")
            spec = VariableSpec(name, TensorSpec(table.dtype, (ROWS, *table.shape)), trainable, alone=alone)
            unplaced = KeySharding.of(space, ((),) * space.parts).parts(spec)
            sharding = KeySharding.of(space, self._table_backend.places_for(unplaced))
            made = self._create_parts(spec, sharding.parts(spec), sharding, chosen=True)
            made.consistency = consistency
            self._tables[name] = made
            self._take_names(name)
            return made

    def restrict(self, table: TableVariable, rows: int) -> None:
        """Cuts a table to a number of rows: see `TableVariable.restrict`. In cross-replica context."""
        with self._cross_replica("restrict"):
            table._check_strategy(self._strategy)
            whole = table.sharding.space.table
            if table.name != whole:
                raise ValueError(f"{table.name!r} is a slot of table {whole!r}; restrict that table instead")
            if rows and not MIN_CAPACITY <= rows <= MAX_COUNT:
                raise ValueError(
                    f"table {whole!r} cannot be restricted to {rows} rows, which are spread over its "
                    f"buckets; use 0, or {MIN_CAPACITY} to {MAX_COUNT}"
                )
            self._table_backend.trim(table.parts, rows)

    def _create_beside(
        self, spec: VariableSpec, value: Array, sharding: Sharding, aggregation: VariableAggregation
    ) -> Variable:
        if not isinstance(sharding, KeySharding):
            return super()._create_beside(spec, value, sharding, aggregation)
        if not is_slot(value, sharding.space.spec):
            return self._create_copies(spec, value, sharding, aggregation)
        slot = slot_of(sharding.space.table, spec.name, value)
        whole = replace(spec, tensor=TensorSpec(slot.dtype, (ROWS, *slot.shape)))
        return self._create_parts(whole, sharding.parts(whole, slot), sharding, chosen=False)

    def _create_parts(
        self, spec: VariableSpec, parts: Sequence[VariableSpec], sharding: KeySharding, chosen: bool
    ) -> TableVariable:
        made = []
        for part, place in zip(parts, sharding.places, strict=True):
            unique = replace(part, name=self._unique(part.name))
            made.append(self._table_backend.create_part(self._strategy, unique, place, chosen))
            self._take_names(part.name, unique.name)
        aggregation = VariableAggregation.NONE
        return TableVariable._stored(self._strategy, spec, aggregation, sharding, made, self._table_backend.reader)


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
