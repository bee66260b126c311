"""How updates of different workers relate: one value, which all processes of a job have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Literal, cast, get_args

from pswire.errors import InvalidRequest

Mode = Literal["sync", "async", "bounded"]
"""The relation between updates of different workers: rounds that all make together, or rounds of each worker alone."""


@dataclass(frozen=True)
class Consistency:
    """How the rounds of a job are made.

    Attributes:
        mode: the relation between updates of different workers.
        backup_workers: in the mode "sync" members without whose contributions a round may be made.
        staleness: in the mode "bounded" the most rounds that a worker may be ahead of another one when it is answered.
        quorum: in the mode "sync" the number of members that suffice for a round; what the others send later is merged
            into the next round. 0 where a round waits for all, or has backup workers.
        grace: with a quorum the seconds for which a round that has it waits for the others.
    """

    mode: Mode = "sync"
    backup_workers: int = 0
    staleness: int = 0
    quorum: int = 0
    grace: float = 0.0

    @cached_property
    def own_rounds(self) -> bool:
        """True if each worker makes rounds of its own."""
        return self.mode != "sync"

    @cached_property
    def leaves_out(self) -> bool:
        """True if a round may be made without members that live."""
        return bool(self.backup_workers or self.quorum)

    @cached_property
    def drops(self) -> bool:
        """True if what comes late is dropped, and its examples are assigned again; with a quorum it is merged."""
        return bool(self.backup_workers)

    def packed(self) -> str:
        """Returns its fields as text of the form `FORM`, but for those of a quorum, to which no job can change."""
        return f"{self.mode}:{self.backup_workers}:{self.staleness}"

    @classmethod
    def unpacked(cls, text: str) -> Consistency:
        """Returns what `packed` has made into a text."""
        mode, *numbers = text.split(":")
        return cls(cast(Mode, mode), *map(int, numbers))

    def check(self) -> Consistency:
        """Returns it; raises `InvalidRequest` for a number that its mode does not have."""
        apart = ((self.backup_workers, "sync"), (self.staleness, "bounded"), (self.quorum, "sync"))
        if any(number and self.mode != mode for number, mode in apart) or (self.backup_workers and self.quorum):
            raise InvalidRequest(
                f"a consistency of mode {self.mode!r} has backup_workers={self.backup_workers}, "
                f"staleness={self.staleness} and quorum={self.quorum}"
            )
        if not (isfinite(self.grace) and self.grace >= 0) or (self.grace and not self.quorum):
            raise InvalidRequest(f"a consistency with quorum={self.quorum} has grace={self.grace}")
        return self

    def __str__(self) -> str:
        """What a script says to have it, `ps.BoundedStaleness(2)`."""
        return self.words()

    def words(self, nonfinite: str = "apply") -> str:
        """Returns what a script says for it, with what becomes of updates with NaN or infinity."""
        name = {"async": "Async", "bounded": "BoundedStaleness"}.get(self.mode, "Quorum" if self.quorum else "Sync")
        given = [str(self.staleness)] if self.mode == "bounded" else []
        given += [str(self.quorum), f"grace={self.grace:g}"] if self.quorum else []
        given += [f"nonfinite={nonfinite!r}"] if nonfinite != "apply" else []
        given += [f"backup_workers={self.backup_workers}"] if self.backup_workers else []
        return f"ps.{name}({', '.join(given)})"


FORM = rf"(?:{'|'.join(get_args(Mode))})(?::\d{{1,10}}){{2}}"
"""A regular expression of a mode and its numbers, as `Consistency.packed` writes them."""

SYNC, ASYNC = Consistency(), Consistency("async")
