"""This process's contribution to a reduction: its replicas' values, combined where they lie."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, SupportsIndex, cast

import numpy as np

from psclient._src.arrays.devices import (
    AnyArray,
    Pending,
    Value,
    add,
    as_array,
    device_of,
    device_scope,
    for_host,
    namespace,
    to_device,
)
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.keyed_slices import KeyedSlices
from psclient._src.variables.keys import KeySpace
from psclient._src.variables.sharded import Sharding
from pswire.model.plan import Form, ReduceOp
from pswire.model.rows import Int64s, Rows, group, row_specs, sum_groups
from pswire.model.tensor import DTYPES, Array, TensorSpec, can_travel


class SentRows(NamedTuple):
    """Rows as they travel.

    Attributes:
        ids: int64[n], on the host; of a dynamic table int64[2, n], the keys, then how often each came.
        values: the rows, on the host, or on their way there.
    """

    ids: Int64s
    values: Array | Pending

    @property
    def number(self) -> int:
        """How many rows there are."""
        return int(self.ids.shape[-1])


@dataclass(frozen=True)
class Absent:
    """A value that this process does not have, among those that are summed: its contribution has no weight.

    Attributes:
        like: a value of the dtype, shape and form that the others have.
    """

    _nest_leaf: ClassVar[bool] = True

    like: Any


EVERYONE: frozenset[int] = frozenset()
"""No replica is left out."""


@dataclass(frozen=True)
class LocalValue:
    """This process's contribution to a reduction.

    Attributes:
        op: "sum" or "mean".
        weight: number of replicas, or of examples along the axis, that it combines; 0 if no local replica has examples.
        spec: dtype and shape of a contribution and of the reduced value.
        total: the local replicas' sum, on the first one's device; of no meaning where the weight is 0.
    """

    op: ReduceOp
    weight: float
    spec: TensorSpec
    total: AnyArray

    form: ClassVar[Form] = "dense"

    @property
    def array(self) -> Array | Pending | SentRows | None:
        """The sum as it travels, contiguous on the host; None where the weight is 0. From a GPU a copy to begin."""
        if not self.weight:
            return None
        return for_host(self.total, DTYPES[self.spec.dtype], self.spec.shape)

    def kept(self) -> LocalValue:
        """Returns a copy with memory of its own, independent of the caller's buffers."""
        with device_scope(device_of(self.total)):
            return replace(self, total=self.total.copy())

    def cut(self, sharding: Sharding) -> Sequence[LocalValue]:
        """Returns the contribution to each shard, of one to a partitioned variable or a table."""
        parts = zip(sharding.tensors(self.spec), sharding.bounds, strict=True)
        return [replace(self, spec=spec, total=self.total[rows]) for spec, rows in parts]

    def unkeyed(self) -> Self:
        """Returns itself; raises `TypeError` for rows by keys, which are reduced to their table alone."""
        return self

    def alone(self) -> Any:
        """Returns the reduced value if no other process contributes, on the device of the sum; NaN for an empty mean.

        A copy that nobody can change: the sum may be the array of a replica, and all replicas may share the value.
        """
        device = device_of(self.total)
        with device_scope(device):
            value = namespace(device).array(self.total, DTYPES[self.spec.dtype])
            if not self.weight:
                value.fill(0)
            if self.op == "mean":
                with np.errstate(divide="ignore", invalid="ignore"):
                    value /= value.dtype.type(self.weight)
        if device.kind == "cpu":
            value.flags.writeable = False
        return value


@dataclass(frozen=True)
class LocalRows(LocalValue):
    """This process's contribution to a reduction, as rows.

    Attributes:
        ids: int64[n], the place of each row, each once, in increasing order.
        total: the rows; of the local replicas' rows for one place the sum.
    """

    ids: Int64s

    form: ClassVar[Form] = "rows"

    @property
    def array(self) -> SentRows | None:
        """The rows as they travel; None where the weight is 0. From a GPU they are copies to begin."""
        if not self.weight:
            return None
        _, spec = row_specs(self.spec, len(self.ids))
        return SentRows(self.ids, for_host(self.total, DTYPES[spec.dtype], spec.shape))

    def kept(self) -> LocalRows:
        """Returns a copy with memory of its own."""
        return replace(cast(LocalRows, super().kept()), ids=self.ids.copy())

    def alone(self) -> IndexedSlices:
        """Returns the reduced value if no other process contributes."""
        return IndexedSlices._of_rows(Rows(self.ids, super().alone()), self.spec.shape)

    def cut(self, sharding: Sharding) -> Sequence[LocalRows]:
        """Returns the rows of each shard."""
        parts = zip(sharding.tensors(self.spec), sharding.split_ids(self.ids), strict=True)
        return [self._part(at, ids, spec) for spec, (at, ids) in parts]

    def _part(self, at: slice, ids: Int64s, spec: TensorSpec) -> LocalRows:
        return replace(self, spec=spec, ids=ids, total=self.total[at])


@dataclass(frozen=True)
class LocalKeys(LocalRows):
    """This process's contribution to a reduction to a dynamic table.

    Attributes:
        ids: int64[n], the key of each row, each once, in canonical order.
        counts: int64[n], how often each key came.
        space: the table's keys.
    """

    counts: Int64s
    space: KeySpace

    form: ClassVar[Form] = "keys"

    @property
    def array(self) -> SentRows | None:
        """Keys, counts and rows as they travel."""
        rows = super().array
        return None if rows is None else SentRows(np.stack([self.ids, self.counts]), rows.values)

    def kept(self) -> LocalKeys:
        """Returns a copy with memory of its own."""
        return replace(cast(LocalKeys, super().kept()), counts=self.counts.copy())

    def unkeyed(self) -> NoReturn:
        """Raises `TypeError`."""
        refuse_keys(self.space.table)

    def _part(self, at: slice, ids: Int64s, spec: TensorSpec) -> LocalKeys:
        return replace(cast(LocalKeys, super()._part(at, ids, spec)), counts=self.counts[at])


def refuse_keys(table: str) -> NoReturn:
    """Raises `TypeError`: rows by keys are reduced to somewhere else than their table."""
    raise TypeError(
        f"rows of table {table!r} can be reduced only to that table; use strategy.extended.reduce_to(op, "
        "rows, table), then update the table with the result"
    )


def combine(
    op: ReduceOp,
    values: Sequence[object],
    empty: frozenset[int],
    axis: int | Sequence[int] | None,
) -> LocalValue:
    """Combines the local replicas' values into what this process contributes.

    Args:
        op: "sum" or "mean"; in a mean integers become float64, float16 and bfloat16 float32.
        values: an array or a Python number from each local replica, in order.
        empty: replicas without examples, whose value does not count.
        axis: reduced within each replica's array, one or several; or None.

    Raises:
        ValueError: the shapes differ; where batches may be ragged, reduce over their axis. Or there is no such axis.
        TypeError: a value is no array of numbers, or an axis is no number.
    """
    axes = _checked_axes(axis)
    if isinstance(values[0], Absent):
        return replace(combine(op, [values[0].like], empty, axis), weight=0.0)
    if any(isinstance(value, KeyedSlices) for value in values):
        return combine_keys(op, values, empty, bool(axes))
    if all(isinstance(value, IndexedSlices) for value in values) and not axes:
        return combine_rows(op, cast(Sequence[IndexedSlices], values), empty)
    values = [value.numpy() if isinstance(value, IndexedSlices) else value for value in values]
    taken = [_over(axes, check_value(value)) for value in values]
    common = taken[0].dtype if len(taken) == 1 else np.result_type(*(array.dtype for array in taken))
    sum_dtype, dtype = _sum_dtypes(op, common, bool(axes))
    weight = 0.0
    total: AnyArray = None
    for replica, value in enumerate(taken):
        if axes:
            with device_scope(device_of(value)):
                count, value = float(math.prod(value.shape[n] for n in axes)), value.sum(axis=axes, dtype=sum_dtype)
        else:
            count = float(replica not in empty)
            if value.dtype != sum_dtype:
                with device_scope(device_of(value)):
                    value = value.astype(sum_dtype)
        if total is None:
            total = value
        elif total.shape != value.shape:
            raise ValueError(
                f"the replicas reduce arrays of shapes {total.shape} and {value.shape}; pass the batch "
                "axis, such as axis=0, to reduce batches of different sizes"
            )
        elif count:
            total = value if not weight else add(total, value)
        weight += count
    return LocalValue(op, weight, _spec(dtype, tuple(total.shape)), total)


def combine_rows(op: ReduceOp, values: Sequence[IndexedSlices], empty: frozenset[int]) -> LocalRows:
    """Combines the local replicas' rows into what this process contributes, each place once.

    Args:
        op: as in `combine`, or "first".
        values: of each local replica, in order; their shape is known.
        empty: replicas without examples, whose rows do not count.

    Raises:
        ValueError: the shapes differ, or an index is no row of the whole.
    """
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise ValueError(
            f"the replicas reduce IndexedSlices of shapes {' and '.join(map(str, sorted(shapes)))}; use the "
            "same shape in all replicas"
        )
    counted = [value.rows() for replica, value in enumerate(values) if replica not in empty]
    ids, rows = counted[0] if counted else values[0]._none()
    common = np.result_type(*(value.dtype for value in values))
    sum_dtype, dtype = _sum_dtypes(op, common, False)
    with device_scope(device_of(rows)):
        xp = namespace(device_of(rows))
        rows = xp.ascontiguousarray(rows, sum_dtype)
        if len(counted) > 1:
            ids = np.concatenate([one.ids for one in counted])
            others = (to_device(one.values, device_of(rows)).astype(sum_dtype, copy=False) for one in counted[1:])
            order, starts = group(ids)
            rows = sum_groups(xp.concatenate([rows, *others]), order, starts, xp)
            ids = ids[order[starts[:-1]]]
    return LocalRows(op, float(len(counted)), _spec(dtype, values[0].shape), rows, ids)


def combine_keys(op: ReduceOp, values: Sequence[object], empty: frozenset[int], over_axis: bool = False) -> LocalKeys:
    """Combines the local replicas' rows by keys into what this process contributes, each key once.

    Args:
        op: as of `combine_rows`.
        empty: as of `combine_rows`.
        values: of each local replica, in order.
        over_axis: True if an axis is to be reduced within each, which has no meaning.

    Raises:
        TypeError: some replicas have other values, or rows of another table; an axis is to be reduced.
    """
    given = [value for value in values if isinstance(value, KeyedSlices)]
    space = given[0].space
    if over_axis or len(given) < len(values) or any(each.space != space for each in given):
        refuse_keys(space.table)
    counted = [value for replica, value in enumerate(given) if replica not in empty]
    first = counted[0] if counted else given[0].without_rows()
    sum_dtype, dtype = _sum_dtypes(op, np.result_type(*(value.dtype for value in given)), False)
    (keys, counts), device = first.counted, device_of(first.values)
    with device_scope(device):
        xp = namespace(device)
        rows = xp.ascontiguousarray(first.values, sum_dtype)
        if len(counted) > 1:
            others = (to_device(each.values, device).astype(sum_dtype, copy=False) for each in counted[1:])
            all_keys = np.concatenate([each.counted.keys for each in counted])
            order, starts = space.group(all_keys)
            rows = sum_groups(xp.concatenate([rows, *others]), order, starts, xp)
            keys = all_keys[order[starts[:-1]]]
            counts = np.add.reduceat(np.concatenate([each.counted.counts for each in counted])[order], starts[:-1])
    return LocalKeys(op, float(len(counted)), _spec(dtype, first.shape), rows, keys, counts, space)


def _checked_axes(axis: SupportsIndex | Sequence[SupportsIndex] | None) -> tuple[int, ...]:
    """Returns the axes that are reduced within each replica's array; none for None."""
    try:
        if axis is None:
            return ()
        return tuple(map(operator.index, axis if isinstance(axis, Sequence) else (axis,)))
    except TypeError:
        raise TypeError(f"axis is {axis!r}; use an integer, usually 0 for the batch axis, or None") from None


def check_value(value: Value) -> AnyArray:
    """The array or the number that a replica gives, as an array; raises `TypeError` for all else."""
    array = as_array(value)
    if can_travel(array.dtype):
        return array
    if array.dtype.kind not in "OUSTMm":  # numbers, or records of them
        raise TypeError(f"arrays of dtype {array.dtype} cannot be sent; supported are {', '.join(DTYPES)}")
    raise TypeError(
        f"a {type(value).__name__} cannot be reduced; pass an array or a number from each replica. Reduce a "
        "nested structure leaf by leaf, or with get_replica_context().all_reduce"
    )


def _over(axes: tuple[int, ...], array: AnyArray) -> AnyArray:
    """The array; raises `ValueError` if it does not have these axes, or has one of them twice."""
    for axis in axes:
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(f"an array of shape {tuple(array.shape)} has no axis {axis}; use axis=None for a scalar")
    if len({axis % array.ndim for axis in axes}) < len(axes):
        raise ValueError(f"axis {axes} names a dimension of an array of shape {tuple(array.shape)} twice")
    return array


# A step reduces values of the same few dtypes and shapes as the one before it.


@lru_cache(maxsize=1024)
def _spec(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(dtype.name, shape).check()


@lru_cache(maxsize=1024)
def _sum_dtypes(
    op: ReduceOp, dtype: np.dtype[np.generic], over_axis: bool
) -> tuple[np.dtype[np.generic], np.dtype[np.generic]]:
    """Returns the dtype in which this process sums, and the dtype in which its sum travels.

    Half precision cannot count a batch: there means are float32, and sums over an axis are rounded once.
    """
    if dtype.kind == "b":
        dtype = np.dtype(np.int64)
    if op == "mean" and dtype.kind in "iu":
        dtype = np.dtype(np.float64)
    if dtype.name not in ("float16", "bfloat16"):
        return dtype, dtype
    single = np.dtype(np.float32)
    if op == "mean":
        return single, single
    return (single if over_axis else dtype), dtype
