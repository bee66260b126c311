"""Rows of variables, looked up by their ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from psclient._src import context
from psclient._src.arraylike import Readable, read
from psclient._src.devices import AnyArray, Value, as_array, device_of, device_scope, namespace, to_device, to_numpy
from psclient._src.nest import Nest
from psclient._src.variables.indexed_slices import IndexedSlices
from pswire.model.rows import Int64s, Rows, check_ids, group
from pswire.model.tensor import Array

Backward = Callable[[AnyArray], AnyArray]
"""Returns the gradient by a variable's rows, given that by what was made of them."""


@dataclass(frozen=True, eq=False)
class LookedUpRows:
    """Rows of a variable, each once, and the place of each among the ids that were asked for.

    `rows.values[rows.inverse]` is what `tf.nn.embedding_lookup` returns, and `np.asarray(rows)` is that on the host.
    `rows.values` is what to differentiate by: `rows.gradient(d)` makes the variable's gradient of it.

    Attributes:
        variable: the variable that was read.
        ids: int64[U] on the host, the places of the rows in increasing order.
        values: (U, *row shape), the row at each of them, on the device of the replica that asked.
        places: `inverse` on the host, int64.
    """

    nest_leaf: ClassVar[bool] = True

    variable: RowReadable
    ids: Int64s
    values: AnyArray
    places: Int64s = field(repr=False)
    _backward: Backward | None = field(default=None, repr=False)

    @cached_property
    def inverse(self) -> AnyArray:
        """Integers of the shape of the ids that were asked for: the place of each in `values`; on their device."""
        return to_device(self.places, device_of(self.values))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what was asked for: that of the ids, then that of a row."""
        return (*self.places.shape, *self.variable.shape[1:])

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the rows, as NumPy has it."""
        return self.variable.dtype

    def numpy(self) -> Array:
        """The row of each id that was asked for, on the host."""
        return np.asarray(to_numpy(self.values)[self.places])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype=dtype)

    def gradient(self, d: Value) -> IndexedSlices:
        """Returns the gradient of the variable, with each place once; nothing is copied. In any context.

        Args:
            d: the gradient by `values`, an array of their shape.

        Raises:
            ValueError: it has another shape.
            TypeError: it is no array of numbers.
        """
        array = as_array(read(d))
        if tuple(array.shape) != tuple(self.values.shape):
            raise ValueError(
                f"the gradient of {len(self.ids)} rows of {_named(self.variable)} has shape {tuple(array.shape)}, and "
                f"their values {tuple(self.values.shape)}; of a gradient by values[inverse], in which a row may come "
                "several times, make ps.IndexedSlices(d, ids)"
            )
        through = array if self._backward is None else self._backward(array)
        return IndexedSlices.of_rows(Rows(self.ids, through), self.variable.shape)

    def changed(self, values: AnyArray, backward: Backward) -> LookedUpRows:
        """Returns these rows with values that were made of them.

        Args:
            values: of the same shape.
            backward: makes of the gradient by those the gradient by these.
        """
        return replace(self, values=values, _backward=backward)


class RowReadable(Readable):
    """A variable, or a copy of one, of which rows can be read."""

    name: str
    strategy: Any

    def lookup(self, ids: Nest) -> LookedUpRows:
        """Reads the rows of some ids, each once. In replica and cross-replica context.

        Args:
            ids: integers of any shape, of NumPy, CuPy or Python; may repeat.

        Returns:
            The rows, of which the gradient can be made. They are copies, as of now.

        Raises:
            TypeError: the ids are no integers, such as floats, bools, or lists of different lengths.
            ValueError: an id is no row of the variable; the first is named. Or the variable has no rows.
            RuntimeError: called in an update function.
        """
        asked = self._checked_ids(ids)
        order, starts = group(asked.ravel())
        found = asked.ravel()[order[starts[:-1]]]
        inverse = np.empty(asked.size, np.int64)
        inverse[order] = np.repeat(np.arange(len(found)), np.diff(starts))
        return LookedUpRows(self, found, self._take_rows(found), inverse.reshape(asked.shape))

    def sparse_read(self, indices: Nest, name: str | None = None) -> AnyArray:
        """Returns the row of each index: an array of their shape, then that of a row, on the replica's device.

        In replica and cross-replica context. Each row is read once; the array is a copy.

        Source: `tf.Variable.sparse_read`.

        Args:
            indices: as in `lookup`.
            name: ignored.

        Raises:
            TypeError, ValueError, RuntimeError: as `lookup`.
        """
        rows = self.lookup(indices)
        with device_scope(device_of(rows.values)):
            return rows.values[rows.inverse]

    def gather(self, indices: Nest) -> AnyArray:
        """Returns the row of each index, as `sparse_read`.

        Source: `tf.gather`, with `axis=0`.
        """
        return self.sparse_read(indices)

    def look_ahead(self, *ids: Nest) -> None:
        """Says which rows will be looked up next, so that they come with the next round that assigns the variable.

        The lookup then waits for no call of its own; it sees the variable as of that round. What was not named is
        fetched when it is looked up. In replica and cross-replica context; a variable in this process has nothing to
        fetch. `InputOptions(lookups=...)` calls it for each batch.

        Args:
            ids: as of `lookup`, each.

        Raises:
            TypeError, ValueError, RuntimeError: as `lookup`.
        """
        asked = np.concatenate([self._checked_ids(each).ravel() for each in ids] or [np.empty(0, np.int64)])
        order, starts = group(asked)
        self._look_ahead(asked[order[starts[:-1]]])

    def _look_ahead(self, ids: Int64s) -> None:
        """Does as `look_ahead`, with int64[U], increasing."""

    def _take_rows(self, ids: Int64s) -> AnyArray:
        """Fetches rows; all reads of rows come here.

        Args:
            ids: int64[U], increasing, each a row of the variable.

        Returns:
            (U, *row shape), a copy, on the replica's device.
        """
        whole = self.read_value()
        device = device_of(whole)
        with device_scope(device):
            return whole[namespace(device).asarray(ids)]

    def _checked_ids(self, ids: Nest) -> Int64s:
        """Returns ids as int64 on the host, in their shape."""
        if context.update_lift() is not None:
            raise RuntimeError(
                f"rows of {_named(self)} are looked up in an update function, which runs on a server with whole "
                "arrays; look them up before, in the function given to strategy.run, and pass what is made of them"
            )
        if not self.shape:
            raise ValueError(f"{_named(self)} has no dimensions, hence no rows; read it with read_value()")
        given = _integers(self, read(ids))
        return check_ids(given.ravel(), self.shape[0], place_of(self)).reshape(given.shape)


def place_of(variable: RowReadable) -> str:
    """Returns a variable's name, and the replica that asks, for messages; the only replica has no name."""
    strategy = variable.strategy
    if context.is_default(strategy):
        return _named(variable)
    own = context.local_replica(strategy) or 0
    return f"{_named(variable)} on {strategy.extended.worker_devices[own]}"


def _named(variable: RowReadable) -> str:
    return f"variable {variable.name!r}"


def _integers(variable: RowReadable, ids: Nest) -> Array:
    """Returns ids on the host in their shape; raises `TypeError` unless they are integers."""
    try:
        found = to_numpy(as_array(ids))
    except ValueError:  # NumPy's word for lists of different lengths names neither.
        raise TypeError(
            f"the ids of rows of {_named(variable)} are lists of different lengths; give an array, or take "
            "ps.nn.embedding_lookup_sparse for bags of ids"
        ) from None
    if not found.size and not hasattr(ids, "dtype"):
        return found.astype(np.int64)  # NumPy makes floats of an empty list.
    if found.dtype.kind not in "iu":
        raise TypeError(f"the ids of rows of {_named(variable)} are integers, and not {found.dtype}")
    return found
