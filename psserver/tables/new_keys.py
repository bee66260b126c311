"""The keys of a round that have no row, each once: by NumPy, and by a function for Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from psserver.programs.kernels.compiler import NumbaKernel, Tools
from pswire.model.hashing import Hashes
from pswire.model.rows import Int64s
from pswire.model.tensor import address_of


class NewKeys(NamedTuple):
    """Keys, each once, in the order in which they came first.

    Attributes:
        first: int64[m], the index at which each came first.
        counts: int64[m], how often each came.
        numbers: int64[n], the number of the key at each index.
    """

    first: Int64s
    counts: Int64s
    numbers: Int64s


def each_once(hashes: Hashes, times: Int64s, function: NumbaKernel | None = None) -> NewKeys:
    """Finds out which keys are the same.

    Args:
        hashes: uint64[n], the hashes of the keys.
        times: int64[n], how often each came.
        function: `counting`, compiled; None for NumPy.
    """
    n = hashes.size
    if function is None:
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        order = np.argsort(first)
        ranks = np.empty_like(order)
        ranks[order] = np.arange(order.size)
        counts, numbers = np.zeros(order.size, np.int64), ranks[inverse]
        np.add.at(counts, numbers, times)
        return NewKeys(first[order], counts, numbers)
    bits = (2 * n).bit_length()
    room = np.empty(3 * n + (1 << bits) + 1, np.int64)
    function(n, bits, *map(address_of, (np.ascontiguousarray(hashes), np.ascontiguousarray(times), room)))
    count = int(room[-1])
    return NewKeys(room[:count], room[n : n + count], room[2 * n : 3 * n])


def counting(tools: Tools) -> Callable[..., None]:
    """Returns `count(n, bits, hashes, times, room)` for Numba: the same as `each_once`.

    It has the number of each key in a table of open addressing, of `1 << bits` places.
    """
    carray = tools.carray

    def count(n: Any, bits: Any, p_hashes: Any, p_times: Any, p_room: Any) -> None:
        size = 1 << bits
        hashes, times, room = carray(p_hashes, n), carray(p_times, n), carray(p_room, 3 * n + size + 1)
        first, counts, numbers = room[:n], room[n : 2 * n], room[2 * n : 3 * n]
        known, mask = room[3 * n : 3 * n + size], np.uint64(size - 1)
        known[:] = -1
        found = 0
        for i in range(n):
            h = hashes[i]
            at = h & mask
            number = known[at]
            while number >= 0 and hashes[first[number]] != h:
                at = (at + np.uint64(1)) & mask
                number = known[at]
            if number < 0:
                number = known[at] = found
                first[found], counts[found] = i, 0
                found += 1
            counts[number] += times[i]
            numbers[i] = number
        room[3 * n + size] = found

    return count
