"""Dynamic tables: variables whose rows are named by keys, and created and evicted on servers.

A table's parts are variables on servers, and what is done with the whole is cut by `KeySharding`, as with partitioned
variables. What needs an array of the whole does not exist.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex

import numpy as np

from psclient._src import context
from psclient._src.arrays.devices import AnyArray, Value
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.keyed_slices import KeyedSlices
from psclient._src.variables.keys import CountedKeys, KeySpace
from psclient._src.variables.kinds import ServerVariable
from psclient._src.variables.lookup import place_of
from psclient._src.variables.scatter import SCATTERS, RowWritable, combine_rows
from psclient._src.variables.sharded import CutVariable, Sharding
from pswire.model.plan import VariableSpec
from pswire.model.rows import Int64s
from pswire.model.tables import MAX_COUNT, MIN_CAPACITY, SlotTensor, TablePart, TableSpec
from pswire.model.tensor import Array, TensorSpec


@dataclass(frozen=True)
class KeySharding(Sharding):
    """A dynamic table's rows, cut into parts: each has the keys of some buckets.

    Attributes:
        starts: the first bucket of each part, and the end.
        places: the server of each part.
        space: the table's keys.
    """

    space: KeySpace

    @classmethod
    def of(cls, space: KeySpace, places: Sequence[tuple[int, ...]]) -> KeySharding:
        """Makes one of a table's keys, with the server of each part."""
        return cls(space.starts, tuple(places), space)

    def cuts(self, shape: tuple[int, ...], like: tuple[int, ...]) -> bool:
        """Returns False: no array has the rows of a table."""
        return False

    def tensors(self, whole: TensorSpec) -> list[TensorSpec]:
        """Returns dtype and shape of what each part has of rows: those of the whole, which has no size."""
        return [whole] * len(self.places)

    def parts(self, spec: VariableSpec, slot: SlotTensor | None = None) -> list[VariableSpec]:
        """Returns the parts of the table, or of a tensor beside its rows, as they are created, but for their names."""
        made = [TablePart(self.space.table, self.space.spec, b.start, b.stop - b.start, slot) for b in self.bounds]
        return [
            VariableSpec(f"{spec.name}/part_{number}", part.tensor, spec.trainable, part=part, alone=spec.alone)
            for number, part in enumerate(made)
        ]

    def split_ids(self, ids: Int64s) -> list[tuple[slice, Int64s]]:
        """Cuts keys in canonical order: which of them are in each part, and these."""
        return [(at, ids[at]) for at in self.space.cut(ids)]

    def split_rows(self, slices: IndexedSlices) -> list[IndexedSlices]:
        """Cuts rows by the parts that have their keys; nothing is copied."""
        return [*slices.cut()] if isinstance(slices, KeyedSlices) else super().split_rows(slices)


def refuse_whole(name: str) -> NoReturn:
    """Raises `TypeError`: there is no array of a table."""
    raise TypeError(
        f"table {name!r} has no size and cannot be read as an array; look up rows by their keys, or call export()"
    )


class PartOfTable(ServerVariable):
    """The rows of some buckets of a table, on a server. What can be done with them is done with the table."""

    _kind = "part of a table"

    def _fetch(self) -> Array:
        refuse_whole(self.whole.name)

    def _check(self, ids: Array, where: str) -> Int64s:
        raise TypeError(
            f"{self.name!r} is a part of table {self.whole.name!r}; look up rows by their keys in that table"
        )

    def _assign(self, how: str, value: Value) -> Value:
        if context.update_lift() is None:
            refuse_whole(self.whole.name)
        return super()._assign(how, value)

    def announce_pieces(self, pieces: Sequence[Int64s], hint: bool) -> None:
        """Rounds that assign the table bring the rows of these keys, int64[U] each and increasing, or hint at them."""
        (self._reader.hint if hint else self._reader.prefetch)(self.handle, *pieces)

    @property
    def _takes_hints(self) -> bool:
        return self._reader._takes_hints(self.handle)


class RowsByKeys(RowWritable):
    """Rows that are named by keys; there is no whole of them."""

    _kind = "table"

    def _fetch(self) -> Array:
        refuse_whole(self.name)

    def __len__(self) -> int:
        refuse_whole(self.name)

    def _fit_slices(self, slices: IndexedSlices) -> IndexedSlices:
        """Returns rows by keys, each key once; see `RowReadable._fit_slices`."""
        return combine_rows("scatter_add", self, slices, f"IndexedSlices for {place_of(self)}")


class TableVariable(RowsByKeys, CutVariable):  # type: ignore[metaclass]  # As of `Variable`.
    """A dynamic table: a variable with a row for each key that was trained. `get_variable` makes one.

    A key is any 64-bit integer. Its row is created by its first gradient. A lookup before that returns the initial
    value of the row and creates nothing. Lookups, `apply_gradients`, reductions, updates and `scatter_*` take keys
    where other variables take row indices. A table has no dense array: reads, assignments and arithmetic raise
    `TypeError`.

    Variables with one row that are created in `colocate_vars_with(table)`, with as many dimensions as the table, get a
    value for each row of the table, which starts with the value of that row and must be one number everywhere: slots of
    optimizers are such variables. Other variables have a copy beside each part.

    Source: `dynamic_embedding.Variable` of TensorFlow Recommenders Addons.

    Attributes:
        sharding: the buckets of each part, and its server.

    Examples:
        >>> import numpy as np
        >>> import psclient as ps
        >>> strategy = ps.ParameterServerStrategy()
        >>> with strategy.scope():
        ...     users = ps.dynamic_embedding.get_variable("users", dim=2, initializer=0.0)
        ...     optimizer = ps.optimizers.SGD(0.5)
        >>> def step(ids):
        ...     rows = users.lookup(ids)
        ...     gradient = np.ones_like(rows.values)
        ...     optimizer.apply_gradients([(rows.gradient(gradient), users)])
        >>> strategy.run(step, args=(np.array([3, 5, 3]),))
        >>> users.size()
        2
        >>> users.gather([3, 17])
        array([[-0.5, -0.5],
               [ 0. ,  0. ]], dtype=float32)
        >>> strategy.close()
    """

    sharding: KeySharding
    views: Any = None
    """The `TableGroup` of which it has all rows; None for a table of its own."""

    _announced: Mapping[bool, dict[int, list[Int64s]]] = {False: {}, True: {}}
    """Rows of the next lookup, and those of the one after it (True), by who looks them up: for each part its own."""

    # ---- What it is ----

    @property
    def table_spec(self) -> TableSpec:
        """The description of the table that servers have."""
        return self.sharding.space.spec

    @property
    def dim(self) -> int | tuple[int, ...]:
        """The size of a row; its shape if it does not have one dimension."""
        return self.shape[1] if self.ndim == 2 else self.shape[1:]

    @property
    def parts(self) -> list[PartOfTable]:
        """The parts, in the order of their buckets; the same as `variables`."""
        return [part for part in self._shards if isinstance(part, PartOfTable)]

    @property
    def key_dtype(self) -> np.dtype[np.generic]:
        """The dtype of keys: int64 or uint64."""
        return np.dtype(self.table_spec.key_dtype)

    def __repr__(self) -> str:
        row = ", ".join(["?", *map(str, self.shape[1:])])
        return f"<ps.dynamic_embedding.Variable {self.name!r} {self.spec.dtype}[{row}] on {', '.join(self.devices)}>"

    # ---- Its rows ----

    def size(self) -> int:  # type: ignore[override]  # of an array, which this has not; the name is TFRA's
        """Returns the number of rows, as of the last round of this process. In any context except an update function.

        Processes may call it independently. With asynchronous workers it is the current number.
        """
        return sum(part.size for part in self._content("size"))

    def keys(self) -> Array:
        """Returns the keys that have a row, (n,), in the order of their hashes, on the host; as `size`."""
        return self.sharding.space.shown(np.concatenate([part.keys for part in self._content("keys")]))

    def export(self) -> tuple[Array, Array]:
        """Returns keys and rows, (n,) and (n, *row shape), in the order of the keys' hashes, on the host; as `size`.

        Pieces of about 4 MiB are fetched from all servers at once; the result is held in memory. With asynchronous
        workers others may change the table between two pieces.
        """
        found = self._content("rows")
        keys = self.sharding.space.shown(np.concatenate([part.keys for part in found]))
        return keys, np.concatenate([part.rows for part in found])

    def restrict(self, rows: SupportsIndex) -> None:
        """Evicts rows until the table has at most a number of rows.

        In cross-replica context, or outside of every scope. It is a round, which every process makes in the same way.
        Each of the table's 1024 buckets keeps its share. The eviction policy chooses the rows; without a policy the
        least recently updated rows are evicted.

        Source: `restrict` of TensorFlow Recommenders Addons' variables.

        Args:
            rows: 0, or at least 16,384.

        Raises:
            TypeError: `rows` is not an integer.
            ValueError: `rows` is another number; or this is a variable beside a table.
            RuntimeError: called in replica or update context.
        """
        number, whole = operator.index(rows), self.sharding.space.table
        with context.across_replicas(self.strategy, "restrict"):
            if self.name != whole:
                raise ValueError(f"{self.name!r} is a slot of table {whole!r}; restrict that table instead")
            if number and not MIN_CAPACITY <= number <= MAX_COUNT:
                raise ValueError(
                    f"table {whole!r} cannot be restricted to {number} rows, which are spread over its "
                    f"buckets; use 0, or {MIN_CAPACITY} to {MAX_COUNT}"
                )
            self.strategy.backend.trim(self.parts, number)

    def _content(self, what: Any) -> Any:
        if context.update_lift() is not None:
            self._refuse_update()
        return self._reader.read_tables([part.handle for part in self._shards], what)

    # ---- What there is not ----

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        refuse_whole(self.name)

    def _assign(self, how: str, value: Value) -> Value:
        if context.update_lift() is not None:
            self._refuse_update()
        refuse_whole(self.name)

    # ---- Rows by keys ----

    def _check(self, ids: Array, where: str) -> Int64s:
        return self.sharding.space.check(ids, where)

    def _group(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        return self.sharding.space.group(ids)

    def _shown(self, ids: Int64s) -> Any:
        return self.sharding.space.shown(ids)

    def _slices(self, shown: Any, counts: Int64s, values: AnyArray) -> KeyedSlices:
        return KeyedSlices(self.sharding.space, CountedKeys(shown.view(np.int64), counts), values, self.shape)

    def _known(self, slices: IndexedSlices) -> IndexedSlices | None:
        if not isinstance(slices, KeyedSlices):
            return None
        if slices.space != self.sharding.space:
            raise ValueError(
                f"rows of table {slices.space.table!r} were passed to table {self.sharding.space.table!r}; pass "
                "rows of the same table"
            )
        return slices

    def _announce_as(self, number: int, ids: Int64s, hint: bool) -> None:
        """As `prefetch` or `prefetch_hint`, for one of several who look up rows; each replaces what it has named.

        Args:
            number: its own; all keys that it names are less than those of any with a greater one.
            ids: int64[U], in canonical order.
            hint: True for the rows of the lookup after the next one.
        """
        self._tell_parts({**self._announced[hint], number: [own for _, own in self.sharding.split_ids(ids)]}, hint)

    def _announce(self, ids: Int64s, hint: bool = False) -> None:
        self._tell_parts({0: [own for _, own in self.sharding.split_ids(ids)]}, hint)

    def _tell_parts(self, announced: dict[int, list[Int64s]], hint: bool) -> None:
        # Replicas in threads may name rows at the same time: each goes on with its own dict, and the last one holds.
        self._announced = {**self._announced, hint: announced}
        for number, part in enumerate(self.parts):
            if part._takes_hints or not hint:
                part.announce_pieces([announced[each][number] for each in sorted(announced)], hint)

    @property
    def _takes_hints(self) -> bool:
        """True if `prefetch_hint` is of use: rows of it lie in files on its servers."""
        return any(part._takes_hints for part in self.parts)

    def _scatter_here(self, how: str, slices: IndexedSlices) -> Value:
        replica = None if context.crosses_replicas() else context.get_replica_context()
        if replica is not None and context.has_strategy() and replica.num_replicas_in_sync > 1:
            raise ValueError(
                (
                    f"{how} of table {self.name!r} was called in replica context, where each of "
                    f"{replica.num_replicas_in_sync} replicas may have different rows; call it in cross-replica "
                    "context, with rows that are the same in every process"
                )
                + (", or sum them with strategy.extended.reduce_to" if SCATTERS[how].assign else "")
            )
        return super()._scatter_here(how, slices)


@dataclass(frozen=True)
class OneRow:
    """One row of a table in place of the table, for those who ask what a variable's slot begins with.

    Attributes:
        name: the table's name.
        shape: (1, *row shape).
        dtype: the table's dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @classmethod
    def of(cls, table: TableVariable) -> OneRow:
        """Returns a row of a table."""
        return cls(table.name, (1, *table.shape[1:]), table.dtype)


def slot_of(table: str, name: str, value: Array) -> SlotTensor:
    """Returns the tensor beside a table's rows that is created by a value of one row.

    Raises:
        ValueError: the row has different values.
    """
    row = value[0]
    first = row.reshape(-1)[0]
    if not (row == first).all():
        raise ValueError(
            f"{name!r} is a slot of table {table!r}, so all its initial values must be equal; pass an array "
            "with the same value everywhere"
        )
    return SlotTensor(name, value.dtype.name, row.shape, float(first))


def is_slot(value: Array, table: TableSpec) -> bool:
    """Returns whether a first value is that of a tensor beside a table's rows: one row, of as many dimensions."""
    return value.ndim == 1 + len(table.shape) and value.shape[0] == 1
