"""Rows that are fetched one batch ahead: a script names their ids, or the lookups of the first batches show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np

from psclient._src.arrays import nest
from psclient._src.arrays.devices import to_numpy
from psclient._src.arrays.nest import Nest
from pswire.model.tensor import Array

LEARNING = 3
"""Batches in which a lookup must find its ids in the same place before it is taken to do so in all."""


class LooksUp(Protocol):
    """Looks rows up by several arrays of ids."""

    @property
    def _takes_hints(self) -> bool:
        """True if `prefetch_hint` is of use."""

    def prefetch(self, *ids: Any) -> None:
        """Requests the rows of the next lookup, to be fetched with the next round; ids are as `_join` returns them."""

    def prefetch_hint(self, *ids: Any) -> None:
        """Announces the rows of the lookup after the next one, and groups their ids."""

    def _join(self, arrays: Iterable[tuple[int, Array]]) -> Array:
        """Returns ids for `prefetch`, of arrays and the number of each among those of a lookup."""


def takes_hints(looks_up: object) -> bool:
    """Returns whether the rows of the lookup after the next one are worth a hint."""
    return getattr(looks_up, "_takes_hints", False)


def prefetch_ahead(
    wanted: Mapping[Any, Callable[[Nest], Any]], ahead: Iterator[Sequence[Nest]]
) -> Callable[[], None] | None:
    """Names the rows that the next batch will look up, and hints at those of the one behind it.

    Args:
        wanted: maps what looks rows up to a function that takes one replica's batch and returns the ids.
        ahead: the batches ahead, as far as they are known: of each those of the replicas. Read only as far as needed.

    Returns:
        A function that groups the ids of the batch behind, to be called while a round is waited for. Once the next
        batch is in use it has no use, and may fail. None if there is nothing to do.
    """
    if not wanted:
        return None
    _name(wanted, next(ahead, ()), hint=False)

    def name_behind() -> None:
        _name(wanted, next(ahead, ()), hint=True)

    if any(map(takes_hints, wanted)):
        name_behind()  # before the round that takes the hints, so that servers read rows in time
        return None
    return name_behind


def _name(wanted: Mapping[Any, Callable[[Nest], Any]], parts: Sequence[Nest], hint: bool) -> None:
    for looks_up, ids in wanted.items() if parts else ():
        (looks_up.prefetch_hint if hint else looks_up.prefetch)(*map(ids, parts))


@dataclass(frozen=True, order=True)
class Place:
    """Where ids are in a batch.

    Attributes:
        leaf: the number of an array among those of the batch.
        columns: the first one and the one after the last; the whole array if they are equal.
        dtype: dtype of the ids.
    """

    leaf: int
    columns: tuple[int, int]
    dtype: np.dtype[Any] = field(compare=False)

    def ids(self, leaves: Sequence[Any]) -> Array:
        """Returns the ids in a batch of these arrays."""
        array, (first, stop) = to_numpy(leaves[self.leaf]), self.columns
        with np.errstate(invalid="ignore"):  # ids in an array of floats, of which one is NaN: its lookup fails
            return (array if first == stop else array[:, first:stop]).astype(self.dtype, copy=False)


def places_of(ids: Array, batch: Nest) -> Iterator[Place]:
    """Yields all places of a batch that have these ids, in their order."""
    for number, leaf in enumerate(map(to_numpy, nest.flatten(batch))):
        if leaf.dtype.kind not in "iuf" or not leaf.ndim or not leaf.size:
            continue
        if leaf.size == ids.size and np.array_equal(leaf.ravel(), ids.ravel()):
            yield Place(number, (0, 0), ids.dtype)
        elif leaf.ndim == 2 and leaf.size > ids.size and not ids.size % len(leaf):
            rows = ids.reshape(len(leaf), -1)
            for first in np.flatnonzero(leaf[0] == rows[0, 0]):
                columns = int(first), int(first) + rows.shape[1]
                if np.array_equal(leaf[:, slice(*columns)], rows):
                    yield Place(number, columns, ids.dtype)


Found = list[tuple[int, Array]]
"""Arrays of ids in a batch, each with its number among those of a lookup."""


class Learned:
    """The lookups of one table, as far as they are known. `prefetch_ahead` requests rows by it.

    Attributes:
        places: of each array of a lookup the places that had its ids in all batches so far.
        learning: batches in which this is still looked at.
        used: True if the table was looked up in the batch in use.
        lost: True once its ids were in no place of a batch, or it is not looked up any more.
    """

    def __init__(self, table: LooksUp) -> None:
        self.table = table
        self.places: list[set[Place]] = []
        self.learning, self.used, self.lost = LEARNING, False, False
        self._now: list[set[Place]] = []

    def look(self, arrays: Sequence[Array], parts: Sequence[Nest]) -> None:
        """Looks for the ids of a lookup in the batch in use."""
        found = [{place for part in parts for place in places_of(ids, part)} for ids in arrays if ids.size]
        if len(found) == len(arrays):  # without examples there is nothing to be learned
            self._now = [a | b for a, b in zip(self._now, found, strict=True)] if self._now else found

    def end_batch(self) -> None:
        """Takes what the batch in use has shown."""
        if self._now:
            self.places = [a & b for a, b in zip(self.places, self._now, strict=True)] if self.places else self._now
            self.learning, self._now = self.learning - 1, []
        self.lost |= not (all(self.places) and (self.used or self.learning > 0))
        self.used = False

    def find(self, batch: Nest) -> Found:
        """Returns the ids that one replica's batch will look up."""
        leaves = nest.flatten(batch)
        return [(number, each.ids(leaves)) for number, own in enumerate(self.places) for each in sorted(own)]

    @property
    def _takes_hints(self) -> bool:
        return self.table._takes_hints

    def prefetch(self, *found: Found) -> None:
        """Requests the rows that were found in the batches of the replicas."""
        self._name(self.table.prefetch, found)

    def prefetch_hint(self, *found: Found) -> None:
        """Announces these rows."""
        self._name(self.table.prefetch_hint, found)

    def _name(self, name: Callable[[Array], None], found: Sequence[Found]) -> None:
        # An id that is no row is reported by the lookup of the batch that has it.
        with suppress(ValueError, TypeError):
            name(self.table._join(chain(*found)))


class LearnedLookups:
    """The tables whose ids are arrays of a dataset's batches, or columns of one. Used by one thread at a time.

    A wrong guess costs bytes, and changes no result: rows that were not prefetched are fetched when they are looked up.
    """

    def __init__(self) -> None:
        self._tables: dict[int, Learned] = {}
        self._parts: Sequence[Nest] = ()

    @property
    def wanted(self) -> dict[Learned, Callable[[Nest], Found]]:
        """The lookups that are known, as `prefetch_ahead` takes them."""
        return {each: each.find for each in self._tables.values() if each.places and not each.lost}

    def begin_batch(self, parts: Sequence[Nest]) -> None:
        """A batch comes into use, of which the local replicas have `parts`; lookups so far were of the one before."""
        self._parts = parts
        for each in self._tables.values():
            each.end_batch()

    def looked_up(self, table: LooksUp, arrays: Callable[[], Sequence[Array]]) -> None:
        """A table was looked up.

        Args:
            table: the table.
            arrays: returns its ids, as many arrays each time; called as long as there is something to learn.
        """
        key = id(table)
        if key not in self._tables:
            self._tables[key] = Learned(table)
        known = self._tables[key]
        known.used = True
        if known.learning and not known.lost:
            known.look(arrays(), self._parts)
