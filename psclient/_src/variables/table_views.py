"""Many small tables in one: views, each with keys or row numbers of its own, and the group of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex, cast

import numpy as np

from psclient._src.arrays.devices import AnyArray, Value, to_numpy
from psclient._src.arrays.nest import Nest
from psclient._src.arrays.rows import concatenate
from psclient._src.values import DistributedValues, local_results, per_replica
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.keyed_slices import KeyedSlices
from psclient._src.variables.lookup import LookedUpRows, RowReadable, integers
from psclient._src.variables.tables import RowsByKeys, TableVariable
from psclient._src.variables.variable import Variable
from pswire.model.rows import Int64s, check_ids
from pswire.model.tensor import Array, TensorSpec

KEY_BITS = 48
"""Bits of a view's keys: above them the table has the view's number."""

MAX_VIEWS = 1 << (63 - KEY_BITS)
"""Most views of one table, whose keys then are int64 from 0 on."""

_KEYS = (1 << KEY_BITS) - 1


class TableView(RowsByKeys):
    """One of the tables of a `TableGroup`; lookups and gradients are those of a separate table.

    Its keys are integers from 0 to 2**48 - 1; shorten ids with more bits, such as hashes, before.

    Attributes:
        name: its name in the group.
        table: the table that stores the rows of the whole group.
        number: its number in the group, stored above the 48 bits of its keys.
        strategy: the strategy that owns the table.
    """

    def __init__(self, table: TableVariable, name: str, number: int) -> None:
        self.table = table
        self.name = name
        self.strategy = table.strategy
        self.spec = table.spec
        self.number = number
        self._base = number << KEY_BITS

    @property
    def dim(self) -> int | tuple[int, ...]:
        """The size of a row; its shape if it does not have one dimension."""
        return self.table.dim

    def keys(self) -> Array:
        """Returns its keys that have a row, (n,), as `Variable.keys`; fetches those of the whole group."""
        keys = self.table.keys()
        found: Array = self._shown(keys[self._are_own(keys)])
        return found

    def size(self) -> int:  # type: ignore[override]  # as of `TableVariable`
        """Returns the number of its rows; fetches the keys of the whole group."""
        return len(self.keys())

    def export(self) -> tuple[Array, Array]:
        """Returns its keys and rows, as `Variable.export`; fetches those of the whole group."""
        return self.of(*self.table.export())

    def of(self, keys: Array, rows: Array) -> tuple[Array, Array]:
        """Returns its own part of the group's keys and rows."""
        own = self._are_own(keys)
        return self._shown(keys[own]), rows[own]

    def _are_own(self, keys: Array) -> Array:
        found: Array = np.equal(keys >> KEY_BITS, self.number)
        return found

    def __repr__(self) -> str:
        return f"<{self.name!r} of {self.table!r}>"

    # ---- Rows by keys ----

    @property
    def _stored_in(self) -> RowReadable:
        return self.table

    @property
    def _places(self) -> range:
        """The keys of the group's table that are this table's."""
        return range(self._base, self._base + _KEYS + 1)

    def _check(self, ids: Array, where: str) -> Int64s:
        keys = ids.astype(np.int64, copy=False)  # a uint64 above those of int64 becomes negative
        wrong = (keys < 0) | (keys > _KEYS)
        if wrong.any():
            bad = int(np.argmax(wrong))
            raise ValueError(
                f"{where}: key {ids[bad]} at position {bad} is not from 0 to 2**{KEY_BITS} - 1, as the "
                "tables of a group require; create the table outside of the group, or shorten keys with key % "
                f"2**{KEY_BITS} or hash_keys(..., bits={KEY_BITS})"
            )
        return keys | self._base

    def _group(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        return self.table._group(ids)

    def _shown(self, ids: Int64s) -> Any:
        return np.bitwise_and(ids, _KEYS)

    def _slices(self, shown: Any, counts: Int64s, values: AnyArray) -> KeyedSlices:
        return self.table._slices(shown | self._base, counts, values)

    def _known(self, slices: IndexedSlices) -> IndexedSlices | None:
        known = self.table._known(slices)
        if isinstance(known, KeyedSlices) and not self._are_own(known.counted.keys).all():
            raise ValueError(f"rows of other tables of its group were passed to {self.name!r}; pass rows of this table")
        return known

    def _announce(self, ids: Int64s, hint: bool = False) -> None:
        self.table._announce_as(self.number, ids, hint)

    @property
    def _takes_hints(self) -> bool:
        """True if `prefetch_hint` is of use: rows of the group lie in files on its servers."""
        return self.table._takes_hints

    def _take_rows(self, ids: Int64s) -> AnyArray:
        return self.table._take_rows(ids)

    def _scatter_here(self, how: str, slices: IndexedSlices) -> Value:
        self.table._scatter_here(how, slices)
        return self


class StackedRows(RowReadable):
    """One of several tables of a fixed size that are stored as one variable, one behind another.

    It is read like a variable of its own. Gradients of its rows are gradients of the variable.

    Args:
        table: the variable that stores the rows of all tables.
        name: its name.
        first: its first row in the variable.
        count: number of its rows.

    Attributes:
        name: its name.
        table: the variable.
        strategy: the strategy that owns the variable.
    """

    _kind = "table"

    def __init__(self, table: Variable, name: str, first: int, count: int) -> None:
        self.table = table
        self.name = name
        self.strategy = table.strategy
        self.spec = TensorSpec(table.spec.dtype, (count, *table.shape[1:]))
        self._first = first

    def __repr__(self) -> str:
        return f"<{self.name!r}, rows {self._first} to {self._first + len(self) - 1} of {self.table!r}>"

    def __len__(self) -> int:
        return self.shape[0]

    def _fetch(self) -> Array:
        return to_numpy(self._take_rows(np.arange(self._first, self._first + len(self))))

    # ---- Rows by their places ----

    @property
    def _stored_in(self) -> RowReadable:
        return self.table

    @property
    def _places(self) -> range:
        """The rows of the variable that are this table's."""
        return range(self._first, self._first + len(self))

    def _check(self, ids: Array, where: str) -> Int64s:
        return check_ids(ids, len(self), where) + self._first

    def _group(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        return self.table._group(ids)

    def _shown(self, ids: Int64s) -> Any:
        return ids - self._first

    def _slices(self, shown: Any, counts: Int64s, values: AnyArray) -> IndexedSlices:
        return self.table._slices(shown + self._first, counts, values)

    def _take_rows(self, ids: Int64s) -> AnyArray:
        return self.table._take_rows(ids)


class TableGroup(Mapping[str, TableView]):
    """Several tables with rows of one size, stored as one table on the servers: maps their names to `TableView`s.

    The gradients of all of them in one `apply_gradients` are one reduction, and `lookup` of all makes one call to each
    server. `group` makes it.

    Args:
        table: the table that stores all rows.
        names: names of the views, in the order of their numbers.
    """

    _nest_leaf: ClassVar[bool] = True

    def __init__(self, table: TableVariable, names: Sequence[str]) -> None:
        self.table = table
        self._views = {name: TableView(table, name, number) for number, name in enumerate(names)}

    def __getitem__(self, name: str) -> TableView:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def lookup(self, ids: Mapping[str, Nest]) -> dict[str, LookedUpRows]:
        """Reads rows of several tables with one call to each server. In replica and cross-replica context.

        Args:
            ids: maps the name of each table to the ids for its `lookup`.

        Returns:
            A dict with the result of `lookup` for each table.

        Raises:
            KeyError: there is no such table.
            TypeError: as `TableView.lookup`.
            ValueError: as `TableView.lookup`.
            RuntimeError: as `TableView.lookup`.
        """
        views = sorted((self[name] for name in ids), key=lambda view: view.number)
        for view in views:
            view._tell_lookup(ids[view.name])
        asked = [view._checked_ids(ids[view.name]) for view in views]
        found = [view._grouped(own.ravel()) for view, own in zip(views, asked, strict=True)]
        pieces = self.table.sharding.space.pieces([own.ids for own in found])
        rows = self.table._take_rows(np.concatenate([found[n].ids[at] for n, at in pieces])) if pieces else None
        made = {
            view.name: LookedUpRows(view, view._shown(keys), values, places.reshape(own.shape), counts)
            for view, own, (keys, places, counts), values in zip(
                views, asked, found, _taken(rows, pieces, len(views)), strict=True
            )
        }
        return {name: made[name] for name in ids}

    def prefetch(self, ids: Mapping[str, Nest]) -> None:
        """Requests the rows of the next lookup of several tables: calls `prefetch` of each.

        Args:
            ids: maps the name of each table to the ids for its `prefetch`.
        """
        for name, own in ids.items():
            self[name].prefetch(own)

    def prefetch_hint(self, ids: Mapping[str, Nest]) -> None:
        """Announces the rows of the lookup after the next one: calls `prefetch_hint` of each table.

        Args:
            ids: as in `prefetch`.
        """
        for name, own in ids.items():
            self[name].prefetch_hint(own)

    def size(self) -> int:
        """Returns the number of rows of all tables; see `Variable.size`."""
        return self.table.size()

    def export(self) -> dict[str, tuple[Array, Array]]:
        """Returns keys and rows of each table, by its name; see `Variable.export`."""
        keys, rows = self.table.export()
        return {name: view.of(keys, rows) for name, view in self.items()}

    def restrict(self, rows: SupportsIndex) -> None:
        """Evicts rows until all tables together have at most a number of rows; see `Variable.restrict`."""
        self.table.restrict(rows)

    def __repr__(self) -> str:
        return f"<{', '.join(map(repr, self))} in {self.table!r}>"


def _taken(rows: Any, pieces: Sequence[tuple[int, slice]], views: int) -> list[AnyArray]:
    """Returns the rows of each of some views, of rows that lie one piece behind another."""
    found: list[list[AnyArray]] = [[] for _ in range(views)]
    at = 0
    for number, own in pieces:
        end = at + own.stop - own.start
        found[number].append(rows[at:end])
        at = end
    return [concatenate(each) for each in found]


def join_views(gradients: list[Value], variables: list[Any]) -> tuple[list[Value], list[Any]]:
    """Joins the gradients of tables of a group, which become one of the group's table.

    Args:
        gradients: gradients, or per-replica ones.
        variables: the variable of each, or what stands for it.

    Returns:
        Both, without views; the table of a group stands where its first view stood.

    Raises:
        ValueError: a view is given twice, or its gradient is no `IndexedSlices`, or is of another table.
    """
    if not any(isinstance(v, TableView) for v in variables):
        return gradients, variables
    groups: dict[int, list[tuple[TableView, Value]]] = {}
    for v, gradient in zip(variables, gradients, strict=True):
        if isinstance(v, TableView):
            groups.setdefault(id(v.table), []).append((v, gradient))
    found: list[Value] = []
    wholes: list[Any] = []
    for v, gradient in zip(variables, gradients, strict=True):
        if not isinstance(v, TableView):
            found.append(gradient)
            wholes.append(v)
        elif id(v.table) in groups:
            found.append(_joined(groups.pop(id(v.table))))
            wholes.append(v.table)
    return found, wholes


def _joined(given: Sequence[tuple[TableView, Value]]) -> Value:
    ordered = sorted(given, key=lambda each: each[0].number)
    if len({view.number for view, _ in ordered}) < len(ordered):
        raise ValueError(
            f"several pairs have a gradient for a table of {ordered[0][0].table.name!r}; add the gradients up first"
        )
    owns = [local_results(gradient) for _, gradient in ordered]
    counts = {len(own) for own in owns}
    if len(counts) > 1:
        raise ValueError(
            f"the tables of {ordered[0][0].table.name!r} got gradients from different numbers of replicas; pass "
            "gradients of the same replicas"
        )
    slices = [[_fitting(view, each) for each in own] for (view, _), own in zip(ordered, owns, strict=True)]
    replicas = [KeyedSlices.joined([own[n] for own in slices]) for n in range(counts.pop())]
    distributed = any(isinstance(gradient, DistributedValues) for _, gradient in ordered)
    return per_replica(replicas) if distributed else replicas[0]


def _fitting(view: TableView, gradient: Value) -> KeyedSlices:
    if not isinstance(gradient, IndexedSlices):
        raise ValueError(
            f"the gradient of table {view.name!r} is "
            f"{'None' if gradient is None else type(gradient).__name__}; pass rows.gradient(d) for rows "
            "that were looked up, or ps.IndexedSlices(rows, keys)"
        )
    return cast(KeyedSlices, view._fit_slices(gradient))


def stored_ids(tables: Sequence[RowReadable], counts: Sequence[int], ids: Array) -> Array:
    """Returns ids of several tables as those of the table that has their rows.

    Args:
        tables: views of one table, or that table itself; may repeat.
        counts: number of ids of each.
        ids: integers (n,), those of the first table first.

    Raises:
        TypeError: the ids are not integers.
        ValueError: an id is no row of its table, or no key of a view.
    """
    numbers = integers(tables[0], ids)
    views = [table for table in tables if isinstance(table, TableView | StackedRows)]
    parts = zip(tables, np.split(numbers, np.cumsum(counts)[:-1]), strict=True)
    if len(views) < len(tables):  # the table itself checks its ids when it looks them up
        return np.concatenate([own if table._stored_in is table else table._checked_ids(own) for table, own in parts])
    found = numbers.astype(np.int64, copy=False)  # what is not there becomes negative, and without a sign very large
    sizes = np.array([len(view._places) for view in views], np.uint64)
    if (found.view(np.uint64) >= np.repeat(sizes, counts)).any():
        for table, own in parts:
            table._checked_ids(own)  # raises the error of the first that has not all of these ids
    firsts = np.array([view._places.start for view in views], np.int64)
    return np.add(found, np.repeat(firsts, counts))


def table_of(variable: Any) -> Any:
    """Returns what stores the rows of a group, or of one of several tables in one; of anything else itself."""
    return variable.table if isinstance(variable, TableView | StackedRows | TableGroup) else variable


def without_views(variables: Sequence[Any]) -> list[Any]:
    """Returns variables with the table of a group, once, in place of its views."""
    found: list[Any] = []
    grouped: set[int] = set()
    for v in variables:
        whole = table_of(v)
        if whole is v or id(whole) not in grouped:
            found.append(whole)
        if whole is not v:
            grouped.add(id(whole))
    return found
