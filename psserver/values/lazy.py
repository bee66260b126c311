"""Arrays of which rows may lack updates that are deferred; see `deferred`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from psserver.values.deferred import DeferredUpdates
from psserver.values.dense import Dense, FrozenDense
from psserver.values.value import Memo, Value
from pswire.model.rows import Int64s


class LazyGroup:
    """Arrays that one program updates together, such as a table and its momentum.

    Nothing of it changes while somebody else holds one of the arrays: then a step copies it as a whole.

    Args:
        updates: what is deferred.
        parts: the arrays, in the order of its `tables`.

    Attributes:
        wholes: the arrays with all updates, for a reader.
    """

    def __init__(self, updates: DeferredUpdates, parts: Sequence[Dense]) -> None:
        self.updates = updates
        self.parts = list(parts)
        self.wholes = Wholes(updates, self.parts)

    @property
    def arrays(self) -> list[Any]:
        """The arrays as they lie there."""
        return [part.array for part in self.parts]

    def values(self) -> dict[int, Lazy]:
        """Returns its values, by the numbers of their variables."""
        return {id: Lazy(self, place) for place, id in enumerate(self.updates.tables)}

    def copied(self) -> LazyGroup:
        """Returns a copy, which changes by itself."""
        return LazyGroup(self.updates.copy(), [Dense(array.copy()) for array in self.arrays])

    def apply(self, rows: Int64s) -> None:
        """Applies the deferred updates of some rows, each given once, in place."""
        for part in self.parts:
            part.set_aside(rows)
        self.updates.apply(self.arrays, rows)


class Wholes:
    """The arrays of a group with all updates, for a reader.

    Args:
        updates: what is deferred; nobody changes it.
        parts: the arrays, which nobody changes, or frozen views of them.
    """

    def __init__(self, updates: DeferredUpdates, parts: Sequence[Dense | FrozenDense]) -> None:
        self._updates = updates
        self.parts = parts
        self._made: dict[int, Any] = {}

    def take(self, place: int) -> Any:
        """Returns one of the arrays; computes all others with the first, and lets each go once."""
        if place not in self._made:
            self._made = dict(enumerate(self._updates.wholes([part.read for part in self.parts])))
        return self._made.pop(place)


class Lazy(Value):
    """One array of a group; see `Value`.

    Args:
        group: the group.
        place: which of its arrays.
    """

    is_plain = False

    def __init__(self, group: LazyGroup, place: int) -> None:
        self.group: LazyGroup = group
        self._place = place
        self.shape, self.dtype = self._part.shape, self._part.dtype

    @property
    def _part(self) -> Dense:
        return self.group.parts[self._place]

    @property
    def array(self) -> Any:
        return self._part.array

    def check_rows(self, ids: Int64s, name: str, task: str) -> None:
        self._part.check_rows(ids, name, task)

    # ---- Readers ----

    def view(self, memo: Memo) -> Dense | Lazy:
        if not self.group.updates.behind:
            return Dense(self.array)
        if self.group not in memo:
            memo[self.group] = LazyGroup(self.group.updates, [Dense(array) for array in self.group.arrays])
        return Lazy(memo[self.group], self._place)

    def whole(self) -> Any:
        return self.group.wholes.take(self._place)

    def rows(self, ids: Int64s, xp: Any) -> Any:
        updates = self.group.updates
        if updates.have_all(ids):
            return self._part.rows(ids, xp)
        return updates.rows(self.group.arrays, self._place, ids)

    def freeze(self, by_rows: bool, memo: Memo) -> Dense | FrozenDense | FrozenLazy:
        if not self.group.updates.behind:
            return self._part.freeze(by_rows, memo)
        if self.group not in memo:
            parts = [part.freeze(by_rows, memo) for part in self.group.parts]
            memo[self.group] = Wholes(self.group.updates.copy(), parts)
        return FrozenLazy(memo[self.group], self._place)

    # ---- Steps ----

    @property
    def is_frozen(self) -> bool:
        return self._part.is_frozen

    def set_aside(self, rows: Int64s) -> None:
        self._part.set_aside(rows)

    def apply(self, rows: Int64s) -> None:
        self.group.apply(rows)

    def replaced(self, array: Any) -> Lazy:
        # The group is a copy of the step.
        self.group.parts[self._place] = Dense(array)
        return self


class FrozenLazy:
    """One array of a group as it was after a round.

    Args:
        wholes: the group's arrays.
        place: which of them.
    """

    def __init__(self, wholes: Wholes, place: int) -> None:
        part = wholes.parts[place]
        self.shape, self.dtype, self.nbytes = part.shape, part.dtype, part.nbytes
        self._wholes, self._place = wholes, place

    def pieces(self) -> Iterator[Any]:
        """Yields it, on its device, in pieces of some rows one behind another."""
        yield self._wholes.take(self._place)

    def memory(self) -> Mapping[int, int]:
        """Returns the bytes that it holds, by the identities of arrays and of what was set aside."""
        return {key: nbytes for part in self._wholes.parts for key, nbytes in part.memory().items()}


FrozenValue = Dense | FrozenDense | FrozenLazy
"""A value as it was after a round, for one thread that reads it once while rounds go on."""
