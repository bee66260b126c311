"""The tensors of a table as they were between two rounds, in the order of the hashes of their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from psserver.tables.frozen import NEEDLESS, PIECE_BYTES, Bools, FrozenRows, Shown
from psserver.tables.rows import HASH, LAST, WORDS, RowTensors
from psserver.tiers.mapped import Use
from pswire.model.hashing import Hashes
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

PIECE_SLOTS = 1 << 16
"""Slots that are looked at at a time."""

Flush = Callable[[list[Array], Int64s], list[Array]]
"""Applies deferred updates: takes copies of some slots' rows, of all tensors, and the slots; returns the rows as they
are with all updates."""


class FrozenTensors(FrozenRows):
    """The rows of a table as they were when this was made.

    `load` comes first, then each tensor is read, in any order.

    Args:
        rows: the rows. What is known of them is the last of the arrays.
        since: rows that were changed after this round alone are read; -1 for all.
        flush: applies the updates of rows that are deferred; None where there are none.

    Attributes:
        tensors: number of the tensors.
        slots: after `load`, the slots of the rows in the order of their hashes.
    """

    def __init__(self, rows: RowTensors, since: int, flush: Flush | None) -> None:
        # Arrays may grow or move later; what they show now is not written any more then.
        super().__init__([Shown(each.array) for each in rows.arrays])
        self._tensors = dict(enumerate(rows.tensors))
        self.tensors = len(rows.tensors)
        self.slots: Int64s = np.empty(0, np.int64)
        self._after = max(since, 0)
        self._flush = flush
        self._books: Array | None = rows.books
        self._ranks: npt.NDArray[np.uint32] | None = None  # where each slot is among `slots`, once these are known
        self._flushed: dict[int, Array] = {}
        self._expected = rows.used

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are not read yet; of what has changed, at most, before `load`."""
        with self._lock:
            rows = self._expected if self._ranks is None else len(self.slots)
            return sum(rows * self.row_bytes(n) for n in range(self.tensors) if self._arrays[n] is not None)

    def _is_needed(self, rows: Int64s, read: int) -> Bools:
        if self._ranks is None:
            assert self._books is not None
            return np.asarray(self._books[rows, LAST] > self._after)
        ranks = self._ranks[rows]
        return np.asarray((ranks != NEEDLESS) & (ranks >= read))

    def load(self) -> tuple[Hashes, Array]:
        """Finds the rows, and what is known of each.

        Returns:
            hashes: uint64[n], in order.
            books: uint32[n, WORDS], of the same rows.
        """
        found = [self._load(first) for first in range(0, len(self._places), PIECE_SLOTS)]
        slots = np.concatenate([np.empty(0, np.int64), *(slots for slots, _ in found)])
        books = np.concatenate([np.empty((0, WORDS), np.uint32), *(books for _, books in found)])
        hashes = books[:, HASH].copy().view(np.uint64)[:, 0]
        order = np.argsort(hashes)
        ranks = np.full(len(self._places), NEEDLESS, np.uint32)
        self.slots = slots[order]
        ranks[self.slots] = np.arange(order.size)
        with self._lock:
            self._ranks, self._books = ranks, None
        self.let_go(self.tensors)
        return hashes[order], books[order]

    def _load(self, first: int) -> tuple[Int64s, Array]:
        """Returns the slots with rows, of some that follow one another, and their books."""
        with self._lock:
            kept = self._aside[self.tensors]
            assert self._books is not None
            assert kept is not None
            places = self._places[first : first + PIECE_SLOTS]
            is_wanted = (self._books[first : first + PIECE_SLOTS, LAST] > self._after) & (places == 0)
            there, aside = np.flatnonzero(is_wanted), np.flatnonzero((places != 0) & (places != NEEDLESS))
            slots = np.concatenate([there, aside])
            return first + slots, np.concatenate([self._books[first + there], kept.array[places[aside] - 1]])

    def pieces(self, number: int = 0) -> Iterator[Array]:
        """Yields a tensor's rows as they were, in the order of `slots`, as new arrays of some rows; lets go of them."""
        if number in self._flushed:
            yield self._flushed.pop(number)
            return
        numbers = [number] if self._flush is None else range(self.tensors)
        step = max(1, PIECE_BYTES // max(map(self.row_bytes, numbers)))
        for first in range(0, max(len(self.slots), 1), step):
            yield self._piece(number, self.slots[first : first + step], first, numbers)
        for each in numbers:
            self.let_go(each)
            del self._tensors[each]

    def _piece(self, number: int, slots: Int64s, first: int, numbers: Sequence[int]) -> Array:
        stop = first + len(slots)
        for each in self._tensors.keys() & numbers:
            self._tensors[each].touch(slots, Use.PASS)
        found = [self.take(each, slots, stop) for each in numbers]
        if self._flush is None:
            return found[0]
        # Updates are applied to all tensors together. The others are kept until their turn: to apply them again takes
        # longer than to read them.
        found = self._flush(found, slots)
        for each, rows in zip(numbers, found, strict=True):
            if each != number:
                shape = (len(self.slots), *rows.shape[1:])
                self._flushed.setdefault(each, np.empty(shape, rows.dtype))[first:stop] = rows
        return found[number]
