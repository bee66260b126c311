"""The checkpoints to which this server could save what has changed in its dynamic tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

KEPT = 16
"""Checkpoints that are remembered, the newest; others are no bases."""


class Bases:
    """The rounds of dynamic tables that checkpoints have. Guarded by the core's lock."""

    def __init__(self) -> None:
        self._rounds: dict[str, dict[str, int]] = {}

    def note(self, path: str, rounds: Mapping[str, int]) -> None:
        """Remembers a checkpoint that is complete, with the round of each table on this server."""
        path = str(PurePosixPath(path))
        self._rounds.pop(path, None)
        self._rounds[path] = dict(rounds)
        while len(self._rounds) > KEPT:
            del self._rounds[next(iter(self._rounds))]

    def forget(self, path: str) -> None:
        """Forgets a checkpoint: nobody knows what is there now."""
        self._rounds.pop(str(PurePosixPath(path)), None)

    def restart(self, table: str) -> None:
        """Forgets a table in all checkpoints: it has become another one."""
        for rounds in self._rounds.values():
            rounds.pop(table, None)

    def since(self, path: str, table: str) -> int:
        """Returns the round of a table in a checkpoint; -1 where it is not known."""
        return self._rounds.get(str(PurePosixPath(path)), {}).get(table, -1)

    def least(self, table: str, now: int) -> int:
        """Returns the earliest round since which changes of a table may be asked for, at most a given one."""
        return min((rounds[table] for rounds in self._rounds.values() if table in rounds), default=now)
