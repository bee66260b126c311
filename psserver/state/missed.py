"""Updates that rows of tables have missed, and that are made up when a row is touched or read.

An update with the gradient of some rows would change all others as well, as momentum does. Instead the numbers that the
update takes are kept, and it is counted for each row which updates it has had. So the value of a row is a function of
its array, of that count, and of what is kept; who makes updates up changes no value.

By a closed form the last bits depend on when updates are made up. The rounds alone say that, so values are the same
wherever the same rounds are made.

    MissedUpdates  what rows of some tables have missed
    Unsettled      a variable as it is with all updates, for whoever reads it later
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from psserver.programs.kernels.replay import Replay
from psserver.state.held import HeldTable
from psserver.tables.reserved import ReservedArray
from pswire.model.program import Program
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

RING = 1 << 16
"""Updates whose numbers are kept. Before these are full each row has been made up, a few of them with each update."""

FIRST = 1 << 8
"""Updates that there is room for at first."""

PIECE = 1 << 16
"""Rows of a whole table that are made up at a time."""


class MissedUpdates:
    """What rows of the tables of one program have missed. Used by one thread at a time.

    Nothing of it changes while somebody else holds one of the arrays: then it is copied, with them.

    Args:
        replay: makes updates up.
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

    def copy(self) -> MissedUpdates:
        """Returns another one, which changes by itself."""
        found = MissedUpdates(self._replay, self.program, self.tables, 0)
        found.count, found.last, found._hand = self.count, self.last.copy(), self._hand
        found._kept = list(self._kept)  # what is kept of an update never changes
        return found

    def is_of(self, program: Program, tables: tuple[int, ...], closed: bool) -> bool:
        """Returns True if it is of this program, applied to these variables, and of closed forms or not."""
        same = program is self.program or program == self.program
        return same and tables == self.tables and closed == self._replay.closed

    @property
    def behind(self) -> bool:
        """True if some row has missed an update."""
        return bool(self.count) and int(self.last.min(initial=self.count)) < self.count

    # ---- Updates ----

    def note(self, scalars: Sequence[Any], ids: Int64s) -> None:
        """An update was made, of these rows, which had missed none.

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
        """Rows were made, which have missed nothing.

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

    # ---- Making them up ----

    def make_up(self, arrays: Sequence[Any], ids: Int64s) -> None:
        """Makes rows have all updates, in place.

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

    def make_up_all(self, arrays: Sequence[Any]) -> None:
        """Makes all rows have all updates, in place."""
        for at in range(0, len(self.last), PIECE):
            self.make_up(arrays, np.arange(at, min(at + PIECE, len(self.last))))

    def make_room(self) -> Int64s:
        """Makes room for one more update: forgets those that no row has missed.

        Returns:
            A few rows, which have to be made up as well. Each row's turn comes in half of the updates that are kept.
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

    def settled(self, rows: Sequence[Any], ids: Int64s) -> list[Any]:
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

    def wholes(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns copies of all tables with all updates; a `HeldTable` is read by that."""
        size, found = len(self.last), list[Any]()
        for at in range(0, max(size, 1), PIECE):
            ids = np.arange(at, min(at + PIECE, size))
            own = [a.read(at, at + len(ids)) if isinstance(a, HeldTable) else a[at : at + len(ids)] for a in arrays]
            first = self.last[ids].astype(np.int64)
            made = self._replay.rows(own, self._kept, ids - at, first, self.count)
            if size <= PIECE:
                return made
            for place, rows in enumerate(made):
                if not at:
                    found.append(self._replay.xp.empty((size, *rows.shape[1:]), dtype=rows.dtype))
                found[place][at : at + len(ids)] = rows
        return found


class DeferredUpdates:
    """The tables of some missed updates as they are at one time, for who reads them later.

    Args:
        missed: what their rows have missed; nobody changes it.
        arrays: the tables, in order: arrays that do not change as long as they are held, or `HeldTable`s.
    """

    def __init__(self, missed: MissedUpdates, arrays: Sequence[Any]) -> None:
        self.missed = missed
        self.arrays = tuple(arrays)
        self._wholes: dict[int, Any] | None = None

    def whole(self, place: int) -> Any:
        """Returns one of the tables with all updates; computes all of them with the first, and lets each go once."""
        if self._wholes is None or place not in self._wholes:
            self._wholes = dict(enumerate(self.missed.wholes(self.arrays)))
            self.arrays = tuple(array for array in self.arrays if not isinstance(array, HeldTable))
        return self._wholes.pop(place)


class Unsettled:
    """A variable of which rows have missed updates.

    Args:
        group: its table and those beside it.
        place: which of them it is.

    Attributes:
        shape, dtype, nbytes: the variable's.
    """

    def __init__(self, group: DeferredUpdates, place: int) -> None:
        self._group = group
        self._place = place

        array = group.arrays[place]
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: np.dtype[Any] = array.dtype
        self.nbytes = int(array.nbytes)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays that it holds."""
        return self._group.arrays

    def whole(self) -> Any:
        """Returns the variable with all updates, on its device."""
        return self._group.whole(self._place)

    def rows(self, ids: Int64s) -> Any:
        """Returns rows with all updates, on their device."""
        return self._group.missed.rows(self._group.arrays, self._place, ids)


def arrays(value: Any) -> tuple[Any, ...]:
    """Returns the arrays, and the `HeldTable`s, that a variable's value holds."""
    return value.arrays if isinstance(value, Unsettled) else (value,)


def pieces(value: Any) -> Iterator[Any]:
    """Yields a variable's value, on its device, in pieces one behind another; a `HeldTable` is read by that."""
    if isinstance(value, HeldTable):
        yield from value.pieces()
    else:
        yield whole(value)


def whole(value: Any) -> Any:
    """Returns a variable's array, on its device."""
    return value.whole() if isinstance(value, Unsettled) else value
