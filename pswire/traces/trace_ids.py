"""The id of a step's trace: a function of what all members of its rounds know, so that none has to tell another."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple


class StepName(NamedTuple):
    """The name of a step, or of a section outside of any.

    Attributes:
        job: the session of the chief that began the job: no two jobs of a server 0 have the same.
        incarnations: the lives of the servers when it began.
        strand: "" for the rounds of all members; else whose own rounds they are.
        round: the next round where it begins.
        since: how many steps have begun at that round before it, without a round.
    """

    job: int
    incarnations: tuple[int, ...]
    strand: str
    round: int
    since: int


def trace_id(step: StepName) -> int:
    """Returns 128 bits that are the same in every process, and look like chance: samplers take them as such."""
    digest = blake2b(repr(tuple(step)).encode(), digest_size=16, person=b"paramserver").digest()
    return int.from_bytes(digest) or 1
