"""Gathers: the arrays of all replicas of all workers, one behind the other.

A gather is made of two sums, since all processes have to know the size of a round before they make it: one of the
shapes, one of the bytes of the arrays, each at its own place among zeros. Bytes are summed as integers, so that every
value comes as it was given: -0.0, the bits of a NaN, truth values.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from psclient._src.arraylike import Readable
from psclient._src.arrays.devices import Value, to_numpy
from psclient._src.data.group import ReplicaGroup
from psclient._src.distribute.reduction import LocalRows, LocalValue, check_value
from psclient._src.values import DistributedValues, unwrap
from pswire.limits import MAX_NDIM
from pswire.model.tensor import DTYPES, Array, portable, spec_of

Total = Callable[[Array], Array]
"""Sums what each process gives, an array of the same shape and dtype, over all processes."""

_NAMES = tuple(DTYPES)
_TOKEN, _DTYPE, _NDIM, _SIZES = 0, 1, 2, 3
"""Columns of a row about one array: a number of its process's own, its dtype, its rank, and the sizes."""


def of_each(value: Any, replicas: int, host: Callable[[Any], Value]) -> Sequence[Value]:
    """Returns each local replica's array of a value that is gathered.

    Args:
        value: a value of each replica; with one replica also the value itself.
        replicas: number of local replicas.
        host: reads a value that is not an array.

    Raises:
        ValueError: it is not a per-replica value.
    """
    if isinstance(value, DistributedValues):
        return [host(own) for own in unwrap(value, replicas)]
    if replicas > 1 and not isinstance(value, Readable):
        check_value(value)
        raise ValueError(
            f"gather got a {type(value).__name__} instead of a per-replica value, with {replicas} local "
            "replicas; pass the values that strategy.run returned"
        )
    return [host(value)] * replicas


@dataclass(frozen=True)
class ReplicaPosition:
    """The place of this process among all replicas.

    Attributes:
        first: number of its first replica.
        replicas: R, the number of all replicas.
        total: sums over all processes.
    """

    first: int
    replicas: int
    total: Total

    @staticmethod
    def of(group: ReplicaGroup, total: Total) -> ReplicaPosition:
        """Returns the place of this process in its group, as of now."""
        first, replicas = group.slice()
        return ReplicaPosition(first, replicas, total)

    def gather(self, arrays: Sequence[Sequence[Array]], axis: int) -> list[Array]:
        """Concatenates the arrays of all replicas, in the order of the replicas.

        Args:
            arrays: of each value one array for each local replica.
            axis: the dimension in which the sizes may differ.

        Returns:
            Of each value an array in host memory; it has nothing of a process that was lost in the meantime.

        Raises:
            ValueError: on all processes: the arrays differ in more than the size of that dimension, or do not have it.
        """
        if not arrays:
            return []
        local = len(arrays[0])
        if self.replicas == local:
            for own in arrays:
                check_alike([_row(array) for array in own], axis)
            return [np.concatenate(own, axis=axis) for own in arrays]
        known, here, counted = self._known(arrays)
        for rows in known:
            check_alike([rows[number] for number in here], axis)
        return self._joined(known, here, arrays if counted else [()] * len(arrays), axis)

    def check_one_shape(self, values: Sequence[LocalValue], group: ReplicaGroup) -> None:
        """Raises `ValueError`, on all processes, if they reduce parts of a batch that are of different sizes.

        A round of such parts would end the job. Nothing is asked, which takes a round, where all have equally many.

        Args:
            values: this process's contributions, alike for all its replicas.
            group: knows the batch in use.
        """
        local, examples = len(group.devices), 0 if group.batch is None or group.alone else group.batch.examples
        shapes = [each.spec.shape for each in values if not isinstance(each, LocalRows)]
        arrays = [[np.broadcast_to(np.uint8(0), shape)] * local for shape in shapes if shape]
        if not arrays or self.replicas == local or not examples % self.replicas:
            return
        known, here, _ = self._known(arrays)
        for rows in known:
            shapes = [_shape(rows[number]) for number in here]
            if len(set(shapes)) > 1:
                raise ValueError(
                    f"the replicas reduce arrays of shapes {', '.join(map(str, shapes))}, because the "
                    f"current batch has {examples} examples for {len(shapes)} replicas; pass axis=0, or "
                    "drop such batches: batch(..., drop_remainder=True)"
                )

    def _known(self, arrays: Sequence[Sequence[Array]]) -> tuple[Array, list[int], bool]:
        """Returns rows about all replicas' arrays, the replicas that are here, and whether these are among them."""
        local, token = len(arrays[0]), secrets.randbits(31) + 1
        table = np.zeros((len(arrays), self.replicas, _SIZES + MAX_NDIM), np.int64)
        # A process that comes late may have no place yet; the sum that it takes part in does not count it either.
        mine, placed = slice(self.first, self.first + local), self.first + local <= self.replicas
        for rows, own in zip(table[:, mine], arrays if placed else (), strict=placed):
            for row, array in zip(rows, own, strict=True):
                row[:] = _row(array, token)
        known = self.total(table)
        here = [number for number in range(self.replicas) if known[0, number, _TOKEN]]
        return known, here, placed and bool((known[:, mine, _TOKEN] == token).all())

    def _joined(self, known: Array, here: Sequence[int], arrays: Sequence[Sequence[Array]], axis: int) -> list[Array]:
        """Sends the bytes of the arrays, and joins those of all replicas that are here both times."""
        sizes = [[_nbytes(rows[number]) for number in here] for rows in known]
        flags = np.zeros(self.replicas, np.uint8)
        parts = [np.zeros(sum(row), np.uint8) for row in sizes]
        for row, part, own in zip(sizes, parts, arrays, strict=True):
            for local, array in enumerate(own):
                at = here.index(self.first + local)
                start = sum(row[:at])
                part[start : start + row[at]] = portable(array).reshape(-1).view(np.uint8)
                flags[self.first + local] = 1
        whole = self.total(np.concatenate([flags, *parts]))
        found, start = [], self.replicas
        for rows, row in zip(known, sizes, strict=True):
            pieces = []
            for number, size in zip(here, row, strict=True):
                if whole[number]:
                    pieces.append(_array(rows[number], whole[start : start + size]))
                start += size
            found.append(np.concatenate(pieces, axis=axis))
        return found


def check_axis(axis: SupportsIndex) -> int:
    """Returns the axis of a gather as a number.

    Raises:
        TypeError: it is None, or no whole number.
        ValueError: it is negative.
    """
    try:
        number = operator.index(axis)
    except TypeError:
        raise TypeError(f"axis is {axis!r}, but gather joins arrays along one dimension; pass an integer") from None
    if number < 0:
        raise ValueError(f"axis is {number}, and must be at least 0; the first dimension is 0")
    return number


def check_dimensions(ndim: int, axis: int) -> None:
    """Raises `ValueError` if an array of so many dimensions cannot be gathered along an axis."""
    if not ndim:
        raise ValueError("scalars cannot be gathered; pass an array from each replica, such as x[None]")
    if axis >= ndim:
        raise ValueError(f"axis {axis} does not exist in an array of {ndim} dimensions; the last one is {ndim - 1}")


def check_alike(rows: Sequence[Array], axis: int) -> None:
    """Raises `ValueError` if arrays cannot be concatenated.

    Args:
        rows: about each array one.
        axis: the dimension in which they may differ.
    """
    dtypes = sorted({_NAMES[row[_DTYPE]] for row in rows})
    if len(dtypes) > 1:
        raise ValueError(
            f"the replicas gather arrays of dtypes {' and '.join(dtypes)}; use the same dtype in all replicas"
        )
    shapes = [_shape(row) for row in rows]
    for shape in shapes:
        check_dimensions(len(shape), axis)
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) > 1 or len(set(map(len, shapes))) > 1:
        raise ValueError(
            f"the replicas gather arrays of shapes {', '.join(map(str, shapes))}, which may differ only in "
            f"dimension {axis}"
        )


def host_array(value: Value) -> Array:
    """Returns what a replica gives to a gather, in host memory; raises `TypeError` if it is no array of numbers."""
    array = to_numpy(check_value(value))
    spec_of(array).check()
    return array


def _row(array: Array, token: int = 1) -> Array:
    row = np.zeros(_SIZES + MAX_NDIM, np.int64)
    row[:_SIZES] = token, _NAMES.index(spec_of(array).dtype), array.ndim
    row[_SIZES : _SIZES + array.ndim] = array.shape
    return row


def _shape(row: Array) -> tuple[int, ...]:
    return tuple(map(int, row[_SIZES : _SIZES + row[_NDIM]]))


def _nbytes(row: Array) -> int:
    return math.prod(_shape(row)) * DTYPES[_NAMES[row[_DTYPE]]].itemsize


def _array(row: Array, data: Array) -> Array:
    # A view of bytes within others need not be aligned.
    return data.copy().view(DTYPES[_NAMES[row[_DTYPE]]]).reshape(_shape(row))
