"""The rows that a table has dropped lately, for deltas."""

from __future__ import annotations

from bisect import bisect_right

from pswire.model.hashing import Hashes


class Deletions:
    """The rows that were dropped since a round. Used by one thread at a time.

    Args:
        most: most deletions that are remembered; with more the older half is forgotten.

    Attributes:
        known_after: the round after which all deletions are known.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hashes: list[Hashes] = []
        self._rounds: list[int] = []
        self._size = 0
        self.known_after = 0

    def add(self, round: int, hashes: Hashes) -> None:
        """Remembers that rows were dropped in a round."""
        if hashes.size:
            self._hashes.append(hashes)
            self._rounds.append(round)
            self._size += hashes.size
            while self._size > self._most:
                self.forget(self._rounds[0])

    def forget(self, round: int) -> None:
        """Forgets the deletions of a round, and of those before it: nobody asks for what has changed since earlier."""
        self.known_after = max(self.known_after, round)
        while self._rounds and self._rounds[0] <= round:
            self._size -= self._hashes.pop(0).size
            self._rounds.pop(0)

    def knows(self, round: int) -> bool:
        """Returns True if all deletions since a round are known."""
        return round >= self.known_after

    def since(self, round: int) -> list[Hashes]:
        """Returns the hashes of rows that were dropped after a round; nobody changes these arrays."""
        return self._hashes[bisect_right(self._rounds, round) :]
