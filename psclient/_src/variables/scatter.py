"""Rows of variables that are changed by their places: `scatter_add` and the like."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from psclient._src import context
from psclient._src.arraylike import Mirrored
from psclient._src.arrays.devices import AnyArray, to_numpy
from psclient._src.arrays.rows import add_groups, take
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.lookup import RowReadable, place_of


@dataclass(frozen=True)
class _Scatter:
    """One way to change rows.

    Attributes:
        op: the function of NumPy that makes the new row of the old one and what is given; "" takes what is given.
        of_equal: the function that makes one of rows for the same place, in turn; "" takes the last of them.
        kinds: of the dtypes that it is for; bfloat16's is V.
        assign: the method that does it to a whole array, of what is zero elsewhere; "" if there is none.
    """

    op: str
    of_equal: str
    kinds: str
    assign: str = ""


SCATTERS = {
    "scatter_add": _Scatter("add", "add", "iufcV", "assign_add"),
    "scatter_sub": _Scatter("subtract", "add", "iufcV", "assign_sub"),
    "scatter_update": _Scatter("", "", "biufcV"),
    "scatter_min": _Scatter("minimum", "minimum", "iufV"),
    "scatter_max": _Scatter("maximum", "maximum", "iufV"),
    "scatter_mul": _Scatter("multiply", "multiply", "iufcV"),
    "scatter_div": _Scatter("divide", "multiply", "fcV"),
}
"""The methods, by name."""


def combine_rows(how: str, variable: RowReadable, slices: IndexedSlices, where: str) -> IndexedSlices:
    """Returns rows with each place once, those of the same place combined as the method would one after another.

    Args:
        how: a key of `SCATTERS`.
        variable: the variable whose rows they are.
        slices: the rows.
        where: what they belong to, for messages.

    Raises:
        ValueError: an index is no row of the variable; rows of another shape, or of another table.
    """
    of_equal = SCATTERS[how].of_equal
    slices = slices._with_shape(variable.shape, lambda: where)
    if (known := variable._known(slices)) is not None:
        return known
    ids = variable._check(to_numpy(slices.indices), where)
    order, starts = variable._group(ids)
    places = ids[order[starts[:-1]]]
    if not of_equal:
        values = take(slices.values, order[starts[1:] - 1])
    elif len(places) == len(ids):
        values = take(slices.values, order)
    elif of_equal == "add":
        values = add_groups(slices.values, order, starts)
    else:  # On the host: CuPy has no reduceat.
        values = getattr(np, of_equal).reduceat(to_numpy(slices.values)[order], starts[:-1], axis=0)
    return variable._slices(variable._shown(places), np.diff(starts), values)


def change(how: str, old: AnyArray, given: AnyArray, xp: ModuleType) -> AnyArray:
    """Returns new rows, of old ones and of those that are given, on one device."""
    op = SCATTERS[how].op
    return getattr(xp, op)(old, given) if op else given


class RowWritable(RowReadable):
    """A variable, or a copy of one, of which rows can be changed. The methods have the names of `tf.Variable`'s.

    All other rows stay. In cross-replica context, which is entered where there is no scope, each is an update of its
    own, with rows that every process has alike. In replica context there is one replica in sync; of several,
    `scatter_add` and `scatter_sub` alone have a meaning, and combine the replicas' rows as `aggregation` says. A
    replica of an ON_READ variable changes its own copy.
    """

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Adds to some rows; an index that is repeated adds each time.

        Source: `tf.Variable.scatter_add`.

        Args:
            sparse_delta: the rows, and the index of each.
            use_locking: ignored; each assignment is atomic.
            name: ignored.

        Returns:
            The variable.

        Raises:
            TypeError: `sparse_delta` is not an `IndexedSlices`, or its dtype does not fit.
            ValueError: an index is not a row of the variable; rows of another shape; in replica context several
                replicas without an aggregation.
            RuntimeError: called in an update function that runs on a server.
        """
        return _scattered(self, "scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Subtracts from some rows; arguments, result and errors are those of `scatter_add`.

        Source: `tf.Variable.scatter_sub`.
        """
        return _scattered(self, "scatter_sub", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Assigns some rows; of repeated indices the last counts. As `scatter_add`, with one replica only.

        Source: `tf.Variable.scatter_update`.
        """
        return _scattered(self, "scatter_update", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Sets some rows to the minimum of their values and the given ones. As `scatter_add`, with one replica only.

        Source: `tf.Variable.scatter_min`.
        """
        return _scattered(self, "scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Sets some rows to the maximum of their values and the given ones. As `scatter_add`, with one replica only.

        Source: `tf.Variable.scatter_max`.
        """
        return _scattered(self, "scatter_max", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Multiplies some rows, once for each time an index is given. As `scatter_add`, with one replica only.

        Source: `tf.Variable.scatter_mul`.
        """
        return _scattered(self, "scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Divides some rows of floats, once for each time an index is given. As `scatter_add`, with one replica only.

        Source: `tf.Variable.scatter_div`.
        """
        return _scattered(self, "scatter_div", sparse_delta)

    def _scatter_here(self, how: str, slices: IndexedSlices) -> Any:
        """Changes rows as the calling thread's context says.

        Args:
            how: a key of `SCATTERS`.
            slices: rows of the variable's shape, each place once, of a dtype that fits.

        Returns:
            The variable, as the context sees it.
        """
        raise NotImplementedError


def _scattered(variable: Any, how: str, delta: Any) -> Any:
    if not isinstance(variable, RowWritable):  # as `assign`: what stands for the variable in an update says why
        return getattr(variable, how)(delta)
    if context.update_lift() is not None:
        raise RuntimeError(
            f"{how} of variable {variable.name!r} was called in an update function, which works on whole "
            "arrays; call it in cross-replica context, or pass the rows to the update and use "
            "v.assign_add(rows)"
        )
    if isinstance(delta, Mirrored):
        delta = delta._component(context.local_replica(variable.strategy) or 0)
    if not isinstance(delta, IndexedSlices):
        raise TypeError(
            f"{how} of variable {variable.name!r} needs ps.IndexedSlices, not {type(delta).__name__}; use "
            "ps.IndexedSlices(rows, ids)"
        )
    where = f"{how} of {place_of(variable)}"
    if not variable.shape:
        raise ValueError(
            f"{where}, which has no dimensions and therefore no rows; use assign, assign_add or assign_sub"
        )
    return variable._scatter_here(how, combine_rows(how, variable, _fitting(variable, how, delta), where))


def _fitting(variable: RowWritable, how: str, slices: IndexedSlices) -> IndexedSlices:
    """Returns rows of the dtype in which they are combined; raises `TypeError` if it is none for the variable."""
    held, scatter = variable.dtype, SCATTERS[how]
    if held.kind not in scatter.kinds:
        raise TypeError(
            f"{how} does not support {held}, the dtype of variable {variable.name!r}; read the variable and "
            "assign the result"
        )
    common = np.result_type(held, slices.dtype) if scatter.op else slices.dtype
    if not np.can_cast(common, held, "same_kind"):
        raise TypeError(
            f"variable {variable.name!r}: {how} of rows of {slices.dtype} gives {common}, which cannot be "
            f"assigned to {held}; use rows.astype({held.name!r})"
        )
    if slices.dtype == common:
        return slices
    # Sums and products of rows for one place might not fit into the dtype of the rows.
    values = slices.values.astype(common)
    return (
        slices._with_values(values) if slices._each_once else IndexedSlices(values, slices.indices, slices.dense_shape)
    )
