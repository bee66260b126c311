"""Changes of consistency: a join point that all members come to, and that says how they make rounds from there on."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import cast, get_args

from pswire.model.consistency import FORM, Consistency
from pswire.model.log import Generation, Member
from pswire.model.plan import Nonfinite

_FORM = re.compile(rf"change:(\d{{1,10}}):(\d{{1,18}}):({FORM}):({'|'.join(get_args(Nonfinite))})", re.ASCII)


@dataclass(frozen=True)
class Change:
    """Another consistency for a job that runs.

    Attributes:
        number: the changes that the job has made before.
        round: the next round of the process that asks for it; in a generation the first round that is made so.
        consistency: how rounds are made from there on.
        nonfinite: what becomes of updates if a contribution has NaN or infinity.
    """

    number: int
    round: int
    consistency: Consistency
    nonfinite: Nonfinite = "apply"

    def __str__(self) -> str:
        return f"change:{self.number}:{self.round}:{self.consistency.packed()}:{self.nonfinite}"

    @classmethod
    def parse(cls, join_point: str) -> Change | None:
        """Returns what a join point says; None for another kind of join point."""
        found = _FORM.fullmatch(join_point)
        if found is None:
            return None
        number, round, consistency, nonfinite = found.groups()
        return cls(int(number), int(round), Consistency.unpacked(consistency), cast(Nonfinite, nonfinite))

    def same(self, other: Change) -> bool:
        """Returns whether another process asks for the same, wherever it is."""
        return replace(self, round=0) == replace(other, round=0)

    def moved(self, member: Member) -> Member:
        """Returns a member as it makes rounds from this change on."""
        return replace(member, consistency=self.consistency)

    @property
    def said(self) -> str:
        """What a script says to have it, `ps.BoundedStaleness(2)`."""
        return self.consistency.words(self.nonfinite)


def change_of(generation: Generation) -> Change | None:
    """Returns the change that a generation begins with; None if it keeps the consistency of the one before."""
    return Change.parse(generation.join_point)
