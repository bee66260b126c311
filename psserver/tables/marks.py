"""Marks the rows that a round touches, and keeps what was known of them: by NumPy, and by a function for Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from psserver.programs.kernels.compiler import NumbaKernel, Tools
from psserver.tables.rows import COUNT, LAST, WORDS
from pswire.model.rows import Int64s
from pswire.model.tensor import Array, address_of

AHEAD = 16
"""Rows between a prefetch and its use."""


def mark(books: Array, round: int, slots: Int64s, times: Int64s, function: NumbaKernel | None = None) -> Array:
    """Marks rows as touched in a round; each counts as often as its key came.

    Args:
        books: uint32[slots, WORDS], what is known of each slot.
        round: the round.
        slots: int64[n], slots of rows; may repeat.
        times: int64[n], how often each key came.
        function: `marking`, compiled; None for NumPy.

    Returns:
        uint32[n, WORDS], what was known of each before.
    """
    if function is None:
        saved: Array = books.take(slots, axis=0)
        np.add.at(books[:, COUNT].view(np.float32), slots, times.astype(np.float32))
        books[slots, LAST] = round
        return saved
    saved = np.empty((slots.size, WORDS), np.uint32)
    given = map(address_of, (slots, np.ascontiguousarray(times), books, books, saved))
    function(slots.size, len(books), round, *given)
    return saved


def marking(tools: Tools) -> Callable[..., None]:
    """Returns `mark(n, size, round, slots, times, books, counts, saved)` for Numba: the same as `mark`."""
    carray, fetch = tools.carray, tools.fetch
    words, last, count = WORDS, LAST, COUNT

    def mark(
        n: Any, size: Any, round: Any, p_slots: Any, p_times: Any, p_books: Any, p_counts: Any, p_saved: Any
    ) -> None:
        slots, times, saved = carray(p_slots, n), carray(p_times, n), carray(p_saved, n * words)
        books, counts = carray(p_books, size * words), carray(p_counts, size * words)
        for i in range(min(AHEAD, n)):
            fetch(books, slots[i] * words)
        for i in range(n):
            if i + AHEAD < n:
                fetch(books, slots[i + AHEAD] * words)
            at = slots[i] * words
            for word in range(words):
                saved[i * words + word] = books[at + word]
        now = np.uint32(round)
        for i in range(n):  # only now: a slot may come several times
            at = slots[i] * words
            counts[at + count] += np.float32(times[i])
            books[at + last] = now

    return mark
