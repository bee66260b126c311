"""Learns which arrays of a dataset's batches are ids of rows, so that rows are fetched one batch ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
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
        """Announces the rows of the lookup after the next one."""

    def _join(self, arrays: Sequence[tuple[int, Array]]) -> Array:
        """Returns ids for `prefetch`, of arrays and the number of each among those of a lookup."""


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

    def ids(self, batch: Nest) -> Array:
        """Returns the ids in a batch."""
        array, (first, stop) = to_numpy(nest.flatten(batch)[self.leaf]), self.columns
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


class _Learned:
    """What is known of the lookups of one table.

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

    def prefetch(self, parts: Sequence[Nest], name: Callable[[Array], None]) -> None:
        """Names the rows that a batch ahead will look up, of which the parts of all replicas are given."""
        arrays = [(i, each.ids(part)) for part in parts for i, own in enumerate(self.places) for each in sorted(own)]
        # An id that is no row is reported by the lookup of the batch that has it.
        with suppress(ValueError, TypeError):
            name(self.table._join(arrays))


class LearnedLookups:
    """The tables whose ids are arrays of a dataset's batches, or columns of one. Used by one thread at a time.

    A wrong guess costs bytes, and changes no result: rows that were not prefetched are fetched when they are looked up.
    """

    def __init__(self) -> None:
        self._tables: dict[int, _Learned] = {}
        self._parts: Sequence[Nest] = ()

    @property
    def takes_hints(self) -> bool:
        """True if the batch behind the next one is of use."""
        return any(each.table._takes_hints for each in self._tables.values() if not each.lost)

    def begin_batch(self, parts: Sequence[Nest], ahead: Iterable[Sequence[Nest]]) -> None:
        """A batch comes into use: the lookups before this call were of the one before.

        Args:
            parts: the batches of the local replicas.
            ahead: the same of the next batch, and of the one behind it, as far as they are known.
        """
        self._parts = parts
        for each in self._tables.values():
            each.end_batch()
        found = [each for each in self._tables.values() if each.places and not each.lost]
        for number, coming in enumerate(islice(ahead, 2) if found else ()):
            for each in found:
                if not number:
                    each.prefetch(coming, each.table.prefetch)
                elif each.table._takes_hints:
                    each.prefetch(coming, each.table.prefetch_hint)

    def looked_up(self, table: LooksUp, arrays: Callable[[], Sequence[Array]]) -> None:
        """A table was looked up.

        Args:
            table: the table.
            arrays: returns its ids, as many arrays each time; called as long as there is something to learn.
        """
        key = id(table)
        if key not in self._tables:
            self._tables[key] = _Learned(table)
        known = self._tables[key]
        known.used = True
        if known.learning and not known.lost:
            known.look(arrays(), self._parts)
