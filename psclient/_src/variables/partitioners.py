"""Partitioners: into how many shards a variable is cut.

A partitioner is a function of a shape and a dtype. It returns a list with the number of parts for each axis: 1 for all,
but for the first, along which variables are cut here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from pswire.model.tensor import TensorSpec

PartitionFn = Callable[[tuple[int, ...], np.dtype[Any]], Sequence[int]]
"""Takes the shape of a variable and its dtype; returns the number of parts for each axis."""


class Partitioner:
    """Base of partitioners: a subclass returns from `__call__` the number of parts for each axis.

    Source: `tf.distribute.experimental.partitioners.Partitioner`.
    """

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of parts for each axis.

        Args:
            shape: shape of the variable, of at least one dimension.
            dtype: the variable's dtype.
            axis: the axis that is cut; strategies cut the first alone.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define how to split a variable; implement __call__(self, shape, dtype)"
        )


class FixedShardsPartitioner(Partitioner):
    """Cuts each variable into a fixed number of shards; a variable with fewer rows has one shard for each row.

    Source: `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.

    Args:
        num_shards: the number of shards.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of parts for each axis."""
        return fixed_size_partitioner(self._num_shards, axis)(shape, dtype)

    def __repr__(self) -> str:
        return f"FixedShardsPartitioner({self._num_shards})"


class MinSizePartitioner(Partitioner):
    """Cuts variables into as many shards as possible of at least a size on average.

    The number is rounded up, as in TensorFlow, so that shards may be slightly smaller.

    Source: `tf.distribute.experimental.partitioners.MinSizePartitioner`.

    Args:
        min_shard_bytes: size of a shard in bytes.
        max_shards: largest number of shards.
        bytes_per_string: ignored; variables of strings do not exist.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of parts for each axis."""
        sizes = self._min_shard_bytes, self._bytes_per_string
        return min_max_variable_partitioner(self._max_shards, axis, *sizes)(shape, dtype)

    def __repr__(self) -> str:
        return f"MinSizePartitioner({self._min_shard_bytes}, {self._max_shards})"


class MaxSizePartitioner(Partitioner):
    """Cuts variables into as few shards as possible of at most a size; rows are never cut.

    Source: `tf.distribute.experimental.partitioners.MaxSizePartitioner`.

    Args:
        max_shard_bytes: largest size of a shard in bytes.
        max_shards: largest number of shards, which then may be larger; None for no limit.
        bytes_per_string: ignored; variables of strings do not exist.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards) if max_shards else None
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of parts for each axis."""
        sizes = self._max_shard_bytes, axis, self._bytes_per_string
        return variable_axis_size_partitioner(*sizes, self._max_shards)(shape, dtype)

    def __repr__(self) -> str:
        return f"MaxSizePartitioner({self._max_shard_bytes}, {self._max_shards})"


# ---- TensorFlow 1's ----

Made = Callable[..., list[int]]
"""A partitioner: called with a shape and a dtype."""


def fixed_size_partitioner(num_shards: int, axis: int = 0) -> Made:
    """Returns a partitioner that cuts an axis into so many parts, as far as it has so many places.

    Source: `tf.compat.v1.fixed_size_partitioner`.

    Args:
        num_shards: number of parts.
        axis: the axis.
    """
    most = _positive("num_shards", num_shards)

    def partitioner(shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> list[int]:
        return _cut(shape, axis, min(most, _size(shape, axis)))

    return partitioner


def min_max_variable_partitioner(
    max_partitions: int = 1, axis: int = 0, min_slice_size: int = 256 << 10, bytes_per_string_element: int = 16
) -> Made:
    """Returns a partitioner that cuts an axis into parts of this size on average; see `MinSizePartitioner`.

    Source: `tf.compat.v1.min_max_variable_partitioner`.

    Args:
        max_partitions: greatest number of parts.
        axis: the axis.
        min_slice_size: size of a part, in bytes.
        bytes_per_string_element: has no effect: no variable is of strings.
    """
    most, least = _positive("max_partitions", max_partitions), _positive("min_slice_size", min_slice_size)

    def partitioner(shape: Sequence[int], dtype: npt.DTypeLike) -> list[int]:
        size = _size(shape, axis)
        wanted = math.prod(shape) * np.dtype(dtype).itemsize / least
        return _cut(shape, axis, max(1, min(size, most, math.ceil(wanted))))

    return partitioner


def variable_axis_size_partitioner(
    max_shard_bytes: int, axis: int = 0, bytes_per_string_element: int = 16, max_shards: int | None = None
) -> Made:
    """Returns a partitioner that cuts an axis into parts of this size at most; see `MaxSizePartitioner`.

    Source: `tf.compat.v1.variable_axis_size_partitioner`.

    Args:
        max_shard_bytes: greatest size of a part.
        axis: the axis.
        bytes_per_string_element: has no effect: no variable is of strings.
        max_shards: greatest number of parts; None for no limit.
    """
    largest = _positive("max_shard_bytes", max_shard_bytes)
    most = _positive("max_shards", max_shards) if max_shards else None

    def partitioner(shape: Sequence[int], dtype: npt.DTypeLike) -> list[int]:
        size = _size(shape, axis)
        if not math.prod(shape):
            return _cut(shape, axis, 1)
        of_slice = math.prod(shape) / size * np.dtype(dtype).itemsize
        found = math.ceil(size / max(1, math.floor(largest / of_slice)))
        return _cut(shape, axis, found if most is None else min(most, found))

    return partitioner


def _cut(shape: Sequence[int], axis: int, parts: int) -> list[int]:
    found = [1] * len(shape)
    found[axis] = parts
    return found


def _size(shape: Sequence[int], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"a variable of shape {tuple(shape)} cannot be split along axis {axis}, which it does not have"
        )
    return int(shape[axis])


def _positive(name: str, value: SupportsIndex) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; use an integer") from None
    if number < 1:
        raise ValueError(f"{name} is {number}, and must be at least 1")
    return number


# ---- What strategies and variables ask ----

Cut = PartitionFn | Literal[False] | None
"""What a variable says of how it is cut: False for not at all, None for what the strategy says."""


def check_partitioner(partitioner: object, where: str = "variable_partitioner") -> PartitionFn | None:
    """Returns a partitioner; raises `TypeError` if it is none, such as a class of them. `where` names the argument."""
    if partitioner is None:
        return None
    if isinstance(partitioner, type) or not callable(partitioner):
        raise TypeError(
            f"{where} is {partitioner!r}; pass a function of a shape and a dtype, such as "
            "ps.experimental.partitioners.FixedShardsPartitioner(2)"
        )
    return partitioner


def shards_for(partitioner: PartitionFn, name: str, spec: TensorSpec, dtype: np.dtype[Any]) -> int:
    """Returns into how many shards a partitioner cuts a variable; one without dimensions or rows is not cut.

    Raises:
        ValueError: it returns something else than one number for each axis, of which the first is from 1 to the number
            of rows, and all others 1.
    """
    if not spec.shape or not spec.shape[0]:
        return 1
    found: Any = partitioner(spec.shape, dtype)
    try:
        parts = [operator.index(n) for n in found if not isinstance(n, bool | np.bool_)]
        given = len(found)
    except TypeError:
        parts, given = [], -1
    rows = spec.shape[0]
    if given != len(spec.shape) or len(parts) != given or parts[1:] != [1] * (given - 1) or not 1 <= parts[0] <= rows:
        raise ValueError(
            f"partitioner {partitioner!r} returned {found!r} for variable {name!r} of shape {spec.shape}; "
            f"it must return {len(spec.shape)} integers, the first from 1 to {rows}, and 1 for all others, "
            "because variables are split along their first axis"
        )
    return parts[0]
