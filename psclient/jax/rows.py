"""Rows of embedding tables as arrays of JAX, in few shapes: each new shape is compiled anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np

from psclient._src.arrays.devices import to_numpy
from psclient._src.arrays.nest import Nest
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.lookup import LookedUpRows, RowReadable
from psclient._src.variables.table_views import TableGroup
from psclient.jax.arrays import empty, to_host, to_jax
from psclient.jax.trees import is_traced
from pswire.errors import InvalidArgument, InvalidType
from pswire.model.tensor import Array

FIRST_SIZE = 16
"""The least number of rows."""

GROWTH = 5, 4
"""The next number of rows is this fraction of the one before: 1.25 times as many."""


@dataclass(frozen=True, eq=False)
class JoinedRows:
    """Rows of a table, each once, with the index of each looked-up id.

    `rows.values[rows.inverse]` is the row of each id. Differentiate with respect to `rows.values`, and give the
    gradient to `state.apply_gradients(rows={rows: d})`.

    Attributes:
        values: (P, *row shape), the rows, each once; from row `count` on zeros, which no index refers to.
        inverse: int32 of the shape of the ids: the index of each id's row in `values`; for a group of tables a dict of
            them, by the names of the tables.
        found: the rows as they were looked up, on the host.
    """

    _nest_leaf: ClassVar[bool] = True

    values: jax.Array
    inverse: Any
    found: LookedUpRows = field(repr=False)

    @property
    def table(self) -> RowReadable:
        """The table that was looked up."""
        return self.found.variable

    @property
    def ids(self) -> Any:
        """The ids that have a row, each once, (count,), on the host."""
        return self.found.ids

    @property
    def count(self) -> int:
        """The number of rows, without padding."""
        return len(self.found.ids)

    def gradient(self, d: Any, share: float = 1.0) -> IndexedSlices:
        """Returns the table's gradient, on the host.

        Args:
            d: the gradient with respect to `values`, of their shape.
            share: a number by which it is multiplied.

        Raises:
            TypeError: `d` is traced.
            ValueError: `d` has another shape.
        """
        if is_traced(d):
            raise InvalidType(
                f"the gradient of rows of {self.table.name!r} is traced; call this function outside of jax.jit"
            )
        if tuple(np.shape(d)) != tuple(self.values.shape):
            raise InvalidArgument(
                f"the gradient of rows of {self.table.name!r} has shape {tuple(np.shape(d))}, but their "
                f"values have {tuple(self.values.shape)}; differentiate with respect to rows.values"
            )
        (whole,) = to_host([d])
        own = whole[: self.count]
        return self.found.gradient(own if share == 1.0 else (own * np.float64(share)).astype(own.dtype))


def lookup(table: Any, ids: Nest, pad: bool = True) -> JoinedRows:
    """Looks up rows of a table by their ids, as JAX arrays. In replica and cross-replica context.

    Args:
        table: a variable, a sharded variable, a dynamic table or one of a group; or a group, whose tables are looked up
            together: the ids of all are made unique once, and there is one array of rows to differentiate by.
        ids: integers of any shape, of NumPy or JAX; may repeat. For a group a dict of them, by the names of tables.
        pad: True to pad the rows with zeros to one of a few sizes, 16 and then each 1.25 times the one before, so that
            compiled functions see few shapes. False for exactly the number of different ids.

    Returns:
        The rows.

    Raises:
        TypeError: `table` is not a table; or the ids are not integers, or traced; or those of a group are not a dict.
        ValueError: an id is not a row of the table.
        KeyError: a group has no table of a name.
        RuntimeError: called in an update function.
    """
    inverse: jax.Array | dict[str, jax.Array]
    if isinstance(table, TableGroup):
        found, inverse = _of_group(table, ids)
    elif isinstance(table, RowReadable):
        found = table.lookup(_untraced(table, ids))
        inverse = _indices(found.places)
    else:
        raise InvalidType(f"rows can be looked up in a variable or a table, not in a {type(table).__name__}")
    values = to_numpy(found.values)
    return JoinedRows(to_jax(_padded(values) if pad else values), inverse, found)


def _of_group(group: TableGroup, ids: Any) -> tuple[LookedUpRows, dict[str, jax.Array]]:
    """Looks up rows of several tables of a group together; returns them, and by the table's name each id's index."""
    if not isinstance(ids, Mapping):
        raise InvalidType(
            f"the ids for the tables of {group.table.name!r} are a {type(ids).__name__}; pass a dict of ids by the "
            "names of tables"
        )
    keys = {name: group[name]._checked_ids(_untraced(group[name], own)) for name, own in ids.items()}
    for name, own in ids.items():
        group[name]._tell_lookup(own)
    found = group.table._look_up(np.concatenate([np.empty(0, np.int64), *(own.ravel() for own in keys.values())]))
    indices, end = dict[str, jax.Array](), 0
    for name, own in keys.items():
        begin, end = end, end + own.size
        indices[name] = _indices(found.places[begin:end].reshape(own.shape))
    return found, indices


def _untraced(table: RowReadable, ids: Any) -> Any:
    """Returns ids; raises `TypeError` if they are traced."""
    if is_traced(ids):
        raise InvalidType(
            f"the row ids of {table.name!r} are traced, but a lookup sends a request to a server; look rows "
            "up before, and pass rows.values and rows.inverse to the compiled function"
        )
    return ids


def _indices(places: Array) -> jax.Array:
    made = empty(places.shape, np.dtype(np.int32))
    made[...] = places
    return to_jax(made)


def _padded(values: Array) -> Array:
    count = len(values)
    made = empty((padded_size(count), *values.shape[1:]), values.dtype)
    made[:count] = values
    made[count:] = 0
    return made


def padded_size(count: int) -> int:
    """Returns the least number of rows among the sizes in use that is not less than a count."""
    size = FIRST_SIZE
    while size < count:
        size = -(-size * GROWTH[0] // GROWTH[1])
    return size
