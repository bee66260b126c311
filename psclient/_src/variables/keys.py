"""Keys of dynamic tables: checked, grouped, and cut by the part of the table that has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.rows import Int64s
from pswire.model.tables import TableSpec
from pswire.model.tensor import Array


class CountedKeys(NamedTuple):
    """Keys, each once, in canonical order: by part, within a part by increasing 64 bits as int64.

    Attributes:
        keys: int64[n], their bits.
        counts: int64[n], how often each came.
    """

    keys: Int64s
    counts: Int64s


@dataclass(frozen=True)
class KeySpace:
    """All keys of a dynamic table, and the part of the table in which each of them is.

    Attributes:
        table: the table's name.
        spec: the table.
        starts: the first bucket of each part, and the end.
    """

    table: str
    spec: TableSpec
    starts: tuple[int, ...]

    @cached_property
    def _part_of_bucket(self) -> npt.NDArray[np.uint64]:
        sizes = [end - first for first, end in pairwise(self.starts)]
        return np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.starts) - 1

    def check(self, keys: Array, where: str) -> Int64s:
        """Returns the bits of keys as int64, contiguous.

        Args:
            keys: integers, of one dimension.
            where: what they belong to, for messages.

        Raises:
            ValueError: one of them is no number of the table's dtype of keys; the first such key is named.
        """
        signed = self.spec.key_dtype == "int64"
        wrong = None
        if signed and keys.dtype == np.uint64:
            wrong = keys > np.uint64(np.iinfo(np.int64).max)
        elif not signed and keys.dtype.kind == "i":
            wrong = keys < 0
        if wrong is not None and wrong.any():
            bad = int(np.argmax(wrong))
            raise ValueError(
                f"{where}: key {keys[bad]} at position {bad} is not a valid {self.spec.key_dtype}; use keys of "
                "that type"
            )
        return np.ascontiguousarray(keys.astype(self.spec.key_dtype, copy=False)).view(np.int64)

    def shown(self, keys: Int64s) -> Array:
        """Returns keys in the dtype that users have them in."""
        return keys.view(self.spec.key_dtype)

    def group(self, keys: Int64s) -> tuple[Int64s, Int64s]:
        """Groups rows by key, in canonical order; as `pswire.model.rows.group`, for any 64 bits.

        Args:
            keys: int64[n], the key of each row.

        Returns:
            order: int64[n], the rows by key, then by their order.
            starts: int64[k + 1], the index in `order` of each key's first row, and the end.
        """
        parts = self._parts_of(keys) if self.parts > 1 else None
        order = _order(keys, parts, (self.parts - 1).bit_length())
        ordered = keys[order]
        first = np.ones(keys.size, bool)
        np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
        return order, np.append(np.flatnonzero(first), keys.size)

    def _parts_of(self, keys: Int64s) -> npt.NDArray[np.uint64]:
        return self._part_of_bucket[buckets_of(hashes_of(keys, self.spec.salt))]

    def cut(self, keys: Int64s) -> list[slice]:
        """Returns for each part which of some keys in canonical order it has."""
        if self.parts == 1:
            return [slice(0, len(keys))]
        at = np.searchsorted(self._parts_of(keys), np.arange(self.parts + 1)).tolist()
        return [slice(first, end) for first, end in pairwise(at)]

    def pieces(self, some: Sequence[Int64s]) -> list[tuple[int, slice]]:
        """Returns how keys are joined of which all of an item are less than those of the next item.

        Args:
            some: keys, each item in canonical order.

        Returns:
            In the order of all of them: the number of an item, and which of its keys.
        """
        cuts = [self.cut(keys) for keys in some]
        return [(number, cut[part]) for part in range(self.parts) for number, cut in enumerate(cuts)]


def starts_of(parts: int) -> tuple[int, ...]:
    """Returns the first bucket of each of some parts of a table, and the end; the first have a bucket more."""
    least, more = divmod(BUCKETS, parts)
    return tuple(min(part, more) + part * least for part in range(parts + 1))


def _order(keys: Int64s, parts: npt.NDArray[np.uint64] | None, width: int) -> Int64s:
    """Returns the order of keys by their parts, then by themselves, then by their places.

    Args:
        keys: int64[n].
        parts: the part of each; None where there is one.
        width: bits of a part.
    """
    # Part, key and place packed into one number are sorted in half the time of a stable sort of keys alone. Where that
    # has no room for all of a key, its low bits are left out, and it is tested whether they were needed.
    bits = max(keys.size - 1, 0).bit_length()
    room = 64 - bits - width
    numbers = keys.view(np.uint64) ^ np.uint64(1 << 63)
    least = int(numbers.min()) if keys.size else 0
    packed, used = numbers - np.uint64(least), (int(numbers.max(initial=0)) - least).bit_length()
    if used > room:
        packed, used = _squeezed(numbers)
    if used > room:
        packed = numbers >> np.uint64(64 - room)
    packed <<= np.uint64(bits)
    if parts is not None:
        packed |= parts << np.uint64(64 - width)
    packed |= np.arange(keys.size, dtype=np.uint64)
    packed.sort()
    order = (packed & np.uint64((1 << bits) - 1)).view(np.int64)
    if used <= room:
        return order
    ordered = keys[order]
    less = ordered[1:] < ordered[:-1]
    if parts is not None:
        less &= parts[order[1:]] == parts[order[:-1]]
    return order if not less.any() else np.lexsort((keys, parts) if parts is not None else (keys,))


def _squeezed(numbers: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], int]:
    """Returns numbers without bits that are alike in all of them, in the same order, and how many bits are left.

    The highest such bits are left out, and the longest row of others: keys of a group of tables have the number of
    their table far above their other bits.
    """
    differ = f"{int(np.bitwise_or.reduce(numbers ^ numbers[0])):b}"
    gap = max(differ.split("1"), key=len)
    low = len(differ) - differ.index(gap) - len(gap)
    high = numbers & np.uint64((1 << len(differ)) - 1)
    high >>= np.uint64(low + len(gap))
    high <<= np.uint64(low)
    high |= numbers & np.uint64((1 << low) - 1)
    return high, len(differ) - len(gap)
