"""Updates of rows of tables that are deferred until a row is touched or read.

An update with the gradient of some rows would change all others as well, as momentum does. Instead the numbers that the
update takes are kept, and it is counted for each row which updates it has had. So the value of a row is a function of
its array, of that count, and of what is kept; applying deferred updates changes no value.

By a closed form the last bits depend on when updates are applied. The rounds alone say that, so values are the same
wherever the same rounds are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from psserver.programs.kernels.replay import Replay
from psserver.tables.reserved import ReservedArray
from pswire.model.program import Program
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

RING = 1 << 16
"""Updates whose numbers are kept. Before these are full each row has had them, a few rows with each update."""

FIRST = 1 << 8
"""Updates that there is room for at first."""

PIECE = 1 << 16
"""Rows of a whole table to which updates are applied at a time."""


class DeferredUpdates:
    """The updates that rows of the tables of one program lack. Used by one thread at a time.

    Args:
        replay: applies updates.
        program: the updates' program.
        tables: numbers of the variables, in the order of the replay's tables.
        size: rows of each table.
        most: most rows that a table may grow to without a copy; 0 if it does not grow.

    Attributes:
        count: updates since the first that is kept.
        last: uint32[size], how many of these each row has had.
    """

    def __init__(self, replay: Replay, program: Program, tables: tuple[int, ...], size: int, most: int = 0) -> None:
        self.program = program
        self.tables = tables
        self.count = 0
        self._memory = ReservedArray((), np.dtype(np.uint32), max(size, most))
        self._memory.resize(size)
        self.last: npt.NDArray[np.uint32] = self._memory.array
        self._replay = replay
        self._kept: list[Array] = []
        self._hand = 0

    def copy(self) -> DeferredUpdates:
        """Returns another one, which changes by itself."""
        found = DeferredUpdates(self._replay, self.program, self.tables, 0)
        found.count, found.last, found._hand = self.count, self.last.copy(), self._hand
        found._kept = list(self._kept)  # what is kept of an update never changes
        return found

    def is_of(self, program: Program, tables: tuple[int, ...], closed: bool) -> bool:
        """Returns True if it is of this program, applied to these variables, and of closed forms or not."""
        same = program is self.program or program == self.program
        return same and tables == self.tables and closed == self._replay.closed

    @property
    def behind(self) -> bool:
        """True if some row lacks an update."""
        return bool(self.count) and int(self.last.min(initial=self.count)) < self.count

    def have_all(self, ids: Int64s) -> bool:
        """Returns True if some rows lack no update."""
        return bool((self.last[ids] == self.count).all())

    # ---- Updates ----

    def note(self, scalars: Sequence[Any], ids: Int64s) -> None:
        """An update was made, of these rows, which lacked none.

        Args:
            scalars: the numbers that it took, in the order of `RowUpdate.scalars`.
            ids: the rows, each once.
        """
        numbers = [np.asarray(scalar.get() if hasattr(scalar, "get") else scalar) for scalar in scalars]
        if not self.count:
            self._kept = [np.empty(FIRST, number.dtype) for number in numbers]
        if self._kept and self.count == len(self._kept[0]):
            self._kept = [np.concatenate([kept, np.empty(len(kept), kept.dtype)]) for kept in self._kept]
        for kept, number in zip(self._kept, numbers, strict=True):
            kept[self.count] = number.reshape(())
        self.count += 1
        self.last[ids] = self.count

    def begin(self, ids: Int64s, size: int) -> None:
        """Rows were made, which lack nothing.

        Args:
            ids: the rows.
            size: rows of the tables from now on.
        """
        if size != len(self.last):
            first = len(self.last)
            self._memory.resize(size)
            self.last = self._memory.array
            self.last[first:] = self.count
        self.last[ids] = self.count

    def take_back(self, ids: Int64s) -> None:
        """The last update is undone: the rows are as they were before it."""
        self.count -= 1
        self.last[ids] = self.count

    # ---- Application ----

    def apply(self, arrays: Sequence[Any], ids: Int64s) -> None:
        """Applies all updates that rows lack, in place.

        Args:
            arrays: the tables, in order.
            ids: the rows, each once.
        """
        first = self.last[ids]
        behind = first < self.count
        if not behind.any():
            return
        if not behind.all():
            ids, first = ids[behind], first[behind]
        self._replay.run(arrays, self._kept, ids, first.astype(np.int64), self.count)
        self.last[ids] = self.count

    def apply_all(self, apply: Callable[[Int64s], object]) -> None:
        """Calls a function that applies updates to rows with all rows, some at a time."""
        for at in range(0, len(self.last), PIECE):
            apply(np.arange(at, min(at + PIECE, len(self.last))))

    def make_room(self) -> Int64s:
        """Makes room for one more update: forgets those that no row lacks.

        Returns:
            A few rows, to which updates have to be applied as well. Each row's turn comes in half of the updates that
            are kept.
        """
        if self.count >= RING:
            done = int(self.last.min(initial=self.count))
            self._kept = [np.concatenate([kept[done:], np.empty(done, kept.dtype)]) for kept in self._kept]
            self.last -= np.uint32(done)
            self.count -= done
        rows = -(-len(self.last) // (RING // 2))
        turn = np.arange(self._hand, min(self._hand + rows, len(self.last)))
        self._hand = self._hand + rows if self._hand + rows < len(self.last) else 0
        return turn

    def applied(self, rows: Sequence[Any], ids: Int64s) -> list[Any]:
        """Returns rows of all tables with all updates, as new arrays.

        Args:
            rows: the rows of each table as they are, in order.
            ids: their numbers, each once.
        """
        return self._replay.rows(rows, self._kept, np.arange(len(ids)), self.last[ids].astype(np.int64), self.count)

    def rows(self, arrays: Sequence[Any], place: int, ids: Int64s) -> Any:
        """Returns rows of one table with all updates, as a new array on its device; the table stays.

        Args:
            arrays: the tables, in order.
            place: which of them.
            ids: the rows, in any order, also several times.
        """
        places, inverse = np.unique(ids, return_inverse=True)
        first = self.last[places].astype(np.int64)
        xp = self._replay.xp
        found = self._replay.rows(arrays, self._kept, places, first, self.count)[place]
        return xp.take(found, xp.asarray(inverse), axis=0)

    def wholes(self, reads: Sequence[Callable[[int, int], Any]]) -> list[Any]:
        """Returns copies of all tables with all updates; `reads` return rows of each, from one to before another."""
        size, found = len(self.last), list[Any]()
        for at in range(0, max(size, 1), PIECE):
            ids = np.arange(at, min(at + PIECE, size))
            own = [read(at, at + len(ids)) for read in reads]
            first = self.last[ids].astype(np.int64)
            made = self._replay.rows(own, self._kept, ids - at, first, self.count)
            if size <= PIECE:
                return made
            for place, rows in enumerate(made):
                if not at:
                    found.append(self._replay.xp.empty((size, *rows.shape[1:]), dtype=rows.dtype))
                found[place][at : at + len(ids)] = rows
        return found
