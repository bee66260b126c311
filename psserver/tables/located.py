"""Where keys were found that were looked up: workers send gradients next for what they have looked up last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from psserver.tables.contents import Contents
from pswire.model.hashing import Hashes
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

Found = tuple[Hashes, Int64s]
"""The hash of each key, and its entry in the index."""

MOST = 64
"""Most lookups that are remembered; more workers than that find their keys anew."""


class LocatedKeys:
    """The entries of keys that were looked up since an entry has changed last. Used by one thread at a time.

    Args:
        contents: the table's.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._known: list[tuple[Array, Found]] = []
        self._changes = -1

    def look_up(self, keys: Array) -> Int64s:
        """Returns the entry of each key, and remembers it. Raises as `Contents.find`."""
        if self._changes != self._contents.changes:
            self._known, self._changes = [], self._contents.changes
        found = self._contents.find(keys)
        if len(self._known) < MOST:
            self._known.append((keys, found))
        return found[1]

    def locate(self, keys: Array, sizes: Sequence[int]) -> Found:
        """Returns hashes and entries of the keys that a round has, as new arrays. Raises as `Contents.find`.

        Args:
            keys: [n], the keys of all contributions.
            sizes: number of the keys of each, one behind another; empty if it is not known.
        """
        known, self._known = self._known, []
        if not known or not len(sizes) or self._changes != self._contents.changes:
            return self._contents.find(keys)
        parts = [keys[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
        found = [_known_of(part, known) or self._contents.find(part) for part in parts]
        return np.concatenate([hashes for hashes, _ in found]), np.concatenate([entries for _, entries in found])


def _known_of(keys: Array, known: Sequence[tuple[Array, Found]]) -> Found | None:
    same = (found for others, found in known if others.size == keys.size and (others == keys).all())
    return next(same, None)
