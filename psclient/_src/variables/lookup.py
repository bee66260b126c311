"""Rows of variables, looked up by their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from psclient._src import context
from psclient._src.arraylike import Readable, read
from psclient._src.arrays.devices import (
    AnyArray,
    Value,
    as_array,
    device_of,
    to_device,
    to_numpy,
)
from psclient._src.arrays.nest import Nest
from psclient._src.arrays.rows import add_groups, concatenate, take
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
        ids: int64[U] on the host, the places of the rows in increasing order. Of a dynamic table the keys, in its dtype
            of keys: by part of the table, and within a part in increasing order of their 64 bits as int64.
        values: (U, *row shape), the row at each of them, on the device of the replica that asked.
        places: `inverse` on the host, int64.
        _counts: int64[U] on the host, how often each of the ids was asked for.
    """

    _nest_leaf: ClassVar[bool] = True

    variable: RowReadable
    ids: Int64s
    values: AnyArray
    places: Int64s = field(repr=False)
    _counts: Int64s = field(repr=False)
    _backward: Backward | None = field(default=None, repr=False)

    @cached_property
    def inverse(self) -> AnyArray:
        """Integers of the shape of the ids: the index of each id's row in `values`; on the device of the values."""
        return to_device(self.places, device_of(self.values))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result: that of the ids, then that of a row."""
        return (*self.places.shape, *self.variable.shape[1:])

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """NumPy dtype of the rows."""
        return self.variable.dtype

    def numpy(self) -> Array:
        """Returns the row of each id, on the host."""
        return np.asarray(to_numpy(self.values)[self.places])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype=dtype)

    def gradient(self, d: Value) -> IndexedSlices:
        """Returns the gradient of the variable, with each index once; nothing is copied. In any context.

        Args:
            d: the gradient with respect to `values`, an array of their shape.

        Returns:
            `IndexedSlices` for `apply_gradients`.

        Raises:
            ValueError: `d` has another shape.
            TypeError: `d` is not an array of numbers.
        """
        array = as_array(read(d))
        if tuple(array.shape) != tuple(self.values.shape):
            raise ValueError(
                f"the gradient of {len(self.ids)} rows of {_named(self.variable)} has shape "
                f"{tuple(array.shape)}, but their values have {tuple(self.values.shape)}; if it is a "
                "gradient by values[inverse], with repeated rows, pass ps.IndexedSlices(d, ids)"
            )
        through = array if self._backward is None else self._backward(array)
        return self.variable._slices(self.ids, self._counts, through)

    def changed(self, values: AnyArray, backward: Backward) -> LookedUpRows:
        """Returns these rows with values that were made of them.

        Args:
            values: of the same shape.
            backward: makes of the gradient by those the gradient by these.
        """
        return replace(self, values=values, _backward=backward)


def gradient_of_all(lookups: Sequence[LookedUpRows], gradients: Sequence[AnyArray]) -> IndexedSlices:
    """Returns the gradient of a variable of which rows were looked up several times: of each place the sum.

    Args:
        lookups: of one variable or of tables that it stores, at least one; none of them clipped.
        gradients: of each lookup the gradient by its `values`.
    """
    if len(lookups) == 1:
        return lookups[0].gradient(gradients[0])
    v = lookups[0].variable._stored_in
    ids = np.concatenate([each.variable._check(each.ids, place_of(each.variable)) for each in lookups])
    counts = np.concatenate([each._counts for each in lookups])
    order, starts = v._group(ids)
    values = add_groups(concatenate(list(map(as_array, gradients))), order, starts)
    total = np.add.reduceat(counts[order], starts[:-1]) if len(ids) else counts
    return v._slices(v._shown(ids[order[starts[:-1]]]), total, values)


class Grouped(NamedTuple):
    """Ids, each once.

    Attributes:
        ids: int64[U], in the order in which they travel.
        places: int64[n], of each id that was asked for the place among these.
        counts: int64[U], how often each was asked for.
    """

    ids: Int64s
    places: Int64s
    counts: Int64s


NAMED = 3
"""Ids that were named and are remembered: of the batch in use, and of the two that may be known ahead."""


class RowReadable(Readable):
    """A variable, or a copy of one, of which rows can be read.

    Attributes:
        kind: what it is, in a word, for messages.
    """

    _kind: ClassVar[str] = "variable"
    name: str
    strategy: Any
    _named: tuple[tuple[Int64s, Grouped], ...] = ()
    """The ids that were named last, and those before, each in an array of their own, and how they are grouped."""

    @property
    def _stored_in(self) -> RowReadable:
        """The variable that has the rows: itself, or one that has the rows of several tables."""
        return self

    def lookup(self, ids: Nest) -> LookedUpRows:
        """Reads the rows of some ids, each once. In replica and cross-replica context.

        Args:
            ids: integers of any shape, of NumPy, CuPy or Python; may repeat. For a dynamic table, keys.

        Returns:
            The rows, as copies of their current values, with a method `gradient` for the variable's gradient. A key
            without a row in a table has its initial value.

        Raises:
            TypeError: the ids are not integers, for example floats, bools, or lists of different lengths.
            ValueError: an id is not a row of the variable, or not a key of the table's dtype (the message names the
                first); or the variable has no rows.
            RuntimeError: called in an update function.
        """
        self._tell_lookup(ids)
        return self._look_up(ids)

    def _tell_lookup(self, ids: Nest) -> None:
        """Tells the dataset whose batch is in use what is looked up, so that it may learn what to prefetch."""
        self._tell_lookup_by(self, lambda: [integers(self, read(ids))])

    def _tell_lookup_by(self, looks_up: Any, arrays: Callable[[], Sequence[Array]]) -> None:
        """Does as `_tell_lookup`, for one with several arrays of ids for this variable."""
        lookups = self.strategy.backend.group.lookups
        if lookups is not None:
            lookups.looked_up(looks_up, arrays)

    def _join(self, arrays: Iterable[tuple[int, Array]]) -> Array:
        """Returns the ids of several lookups as those of one."""
        return np.concatenate([ids.ravel() for _, ids in arrays])

    def _look_up(self, ids: Nest) -> LookedUpRows:
        """Does as `lookup`, but tells no dataset."""
        asked = self._checked_ids(ids)
        found, places, counts = self._grouped(asked.ravel())
        return LookedUpRows(self, self._shown(found), self._take_rows(found), places.reshape(asked.shape), counts)

    def sparse_read(self, indices: Nest, name: str | None = None) -> AnyArray:
        """Returns the row of each index, as an array of shape (*indices, *row) on the replica's device.

        In replica and cross-replica context. Each row is read once; the array is a copy.

        Source: `tf.Variable.sparse_read`.

        Args:
            indices: as in `lookup`.
            name: ignored.

        Raises:
            TypeError: as `lookup`.
            ValueError: as `lookup`.
            RuntimeError: as `lookup`.
        """
        rows = self.lookup(indices)
        return take(rows.values, rows.places)

    def gather(self, indices: Nest) -> AnyArray:
        """Returns the row of each index, as `sparse_read`.

        Source: `tf.gather`, with `axis=0`.
        """
        return self.sparse_read(indices)

    @property
    def _takes_hints(self) -> bool:
        """True if `prefetch_hint` is of use: this is a dynamic table whose rows lie in files on its servers."""
        return False

    def prefetch(self, *ids: Nest) -> None:
        """Requests the rows of the next lookup, to be fetched with the next round that assigns the variable.

        The lookup then makes no call of its own; it reads the variable as of that round. All other rows are fetched
        when they are looked up. In replica and cross-replica context; without effect for a variable in this process.
        `InputOptions(prefetch=...)` calls it for each batch.

        Args:
            ids: as in `lookup`; several arrays may be given.

        Raises:
            TypeError: as `lookup`.
            ValueError: as `lookup`.
            RuntimeError: as `lookup`.
        """
        self._announce(self._name(ids))

    def prefetch_hint(self, *ids: Nest) -> None:
        """Announces the rows of the lookup after the next one, so that a server reads them from its disk meanwhile.

        The hint is sent with the next round that assigns the table, and `prefetch` requests the rows one batch later.
        It does not change any result. In replica and cross-replica context; only tables with rows on disk send it, and
        `prefetch` finds the ids of all others grouped.
        `InputOptions(prefetch=...)` calls it for each batch.

        Args:
            ids: as in `lookup`; several arrays may be given.

        Raises:
            TypeError: as `lookup`.
            ValueError: as `lookup`.
            RuntimeError: as `lookup`.
        """
        named = self._name(ids)
        if self._takes_hints:
            self._announce(named, hint=True)

    def _no_rows(self) -> IndexedSlices:
        """Returns a gradient of none of its rows."""
        none = np.empty(0, np.int64)
        return self._slices(self._shown(none), none, np.empty((0, *self.shape[1:]), self.dtype))

    def _grouped(self, asked: Int64s) -> Grouped:
        """Returns how the ids of a lookup are grouped, as arrays that belong to the caller."""
        known = self._named_before(asked)
        return self._group_all(asked) if known is None else Grouped(*map(np.copy, known))

    def _name(self, ids: Sequence[Nest]) -> Int64s:
        """Returns ids that are named ahead, each once, in order; remembers how they are grouped."""
        asked = np.concatenate([self._checked_ids(each).ravel() for each in ids] or [np.empty(0, np.int64)])
        found = self._named_before(asked)
        if found is None:
            found = self._group_all(asked)
            self._named = (asked, found), *self._named[: NAMED - 1]
        return found.ids

    def _named_before(self, ids: Int64s) -> Grouped | None:
        """Returns how ids are grouped that were named; None for others."""
        # What was named is most often what is looked up next, or behind the ids of the batches after it.
        return next((found for named, found in self._named if np.array_equal(named, ids)), None)

    def _group_all(self, ids: Int64s) -> Grouped:
        order, starts = self._group(ids)
        counts, places = np.diff(starts), np.empty(ids.size, np.int64)
        places[order] = np.repeat(np.arange(counts.size), counts)
        return Grouped(ids[order[starts[:-1]]], places, counts)

    def _announce(self, ids: Int64s, hint: bool = False) -> None:
        """Does as `prefetch` or `prefetch_hint`, with int64[U], increasing."""

    def _take_rows(self, ids: Int64s) -> AnyArray:
        """Fetches rows; all reads of rows come here.

        Args:
            ids: int64[U], increasing, each a row of the variable.

        Returns:
            (U, *row shape), a copy, on the replica's device.
        """
        return take(self.read_value(), ids)

    def _checked_ids(self, ids: Nest) -> Int64s:
        """Returns ids as int64 on the host, in their shape."""
        if context.update_lift() is not None:
            raise RuntimeError(
                f"rows of {_named(self)} were looked up in an update function, which runs on a server with "
                "whole arrays; look them up before, in the function passed to strategy.run, and pass the "
                "result"
            )
        if not self.shape:
            raise ValueError(f"{_named(self)} has no dimensions and therefore no rows; read it with read_value()")
        given = integers(self, read(ids))
        return self._check(given.ravel(), place_of(self)).reshape(given.shape)

    # ---- What a row is named by: its place, but of a table a key ----

    def _check(self, ids: Array, where: str) -> Int64s:
        """Returns ids, integers of one dimension, as int64; raises `ValueError` if one is no row of the variable."""
        return check_ids(ids, self.shape[0], where)

    def _group(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Groups rows by their ids, as `pswire.model.rows.group`, in the order in which they travel."""
        return group(ids)

    def _shown(self, ids: Int64s) -> Any:
        """Returns ids as users have them."""
        return ids

    def _slices(self, shown: Any, counts: Int64s, values: AnyArray) -> IndexedSlices:
        """Returns rows of some ids, each once, in order.

        Args:
            shown: the ids, as `_shown` returns them.
            counts: how often each came.
            values: the rows.
        """
        return IndexedSlices._of_rows(Rows(shown, values), self.shape)

    def _known(self, slices: IndexedSlices) -> IndexedSlices | None:
        """Returns rows of the variable's shape if each id is known to be there once, in order; else None.

        Raises:
            ValueError: they are of another variable.
        """
        return slices if slices._each_once else None

    def _fit_slices(self, slices: IndexedSlices) -> IndexedSlices:
        """Returns rows as a reduction to the variable, or an update of it, takes them.

        Raises:
            ValueError: they are of another shape, or of another variable, or an id is no row of it.
        """
        fitted = slices._with_shape(self.shape, lambda: f"IndexedSlices for {place_of(self)}")
        if not fitted._each_once:
            fitted.rows(f"IndexedSlices for {place_of(self)}")  # here a bad id can be named with who gave it
        return fitted


def place_of(variable: RowReadable) -> str:
    """Returns a variable's name, and the replica or process that asks, for messages; the only replica has no name."""
    strategy = variable.strategy
    if context.is_default(strategy):
        return _named(variable)
    own, devices = context.local_replica(strategy), strategy.extended.worker_devices
    if own is None and len(devices) > 1:
        return f"{_named(variable)} on {devices[0].rpartition('/')[0] or 'this process'}"
    return f"{_named(variable)} on {devices[own or 0]}"


def _named(variable: RowReadable) -> str:
    return f"{variable._kind} {variable.name!r}"


def integers(variable: RowReadable, ids: Nest) -> Array:
    """Returns ids on the host in their shape; raises `TypeError` unless they are integers."""
    try:
        found = to_numpy(as_array(ids))
    except ValueError:  # NumPy's word for lists of different lengths names neither.
        raise TypeError(
            f"the row ids of {_named(variable)} are lists of different lengths; pass an array, or use "
            "ps.nn.embedding_lookup_sparse for bags of ids"
        ) from None
    if not found.size and not hasattr(ids, "dtype"):
        return found.astype(np.int64)  # NumPy makes floats of an empty list.
    if found.dtype.kind not in "iu":
        raise TypeError(f"the row ids of {_named(variable)} must be integers, not {found.dtype}")
    return found
