"""The backlog of a server that is back: rounds that it has agreed on with the others, and has not made yet.

Such a server takes part in rounds before it has its variables. It keeps the contributions of each, votes, and answers;
once it has read its variables it makes the rounds, in order. So the members need not wait while it reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from psserver.execution.contributions import Contributions
from psserver.plans.round import Commit, ReadyRound, ReturnedValues

BACKLOG_BYTES = 1 << 30
"""Most bytes of contributions that are kept for later; beyond them rounds wait until the variables are there."""


class Backlog:
    """The rounds that a server has put off. Guarded by the core's lock.

    Attributes:
        awaits: the generation by which its variables were handed over, while it does not have them; 0: it has them.
        behind: True while the variables are older than the last round that is over.
    """

    def __init__(self) -> None:
        self.awaits = self._read = 0
        self.behind = False
        self._waiting: ReadyRound | None = None  # until all before it are made
        self._rounds = deque[ReadyRound]()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._rounds)

    # ---- Variables ----

    def begin(self, generation: int) -> None:
        """This server is back; its variables were handed over by a generation. It may have read them already."""
        self.awaits = 0 if generation == self._read else generation
        self.behind = bool(self.awaits or self._rounds)

    def has_read(self, generation: int) -> None:
        """It has read its variables."""
        self.awaits, self._read = 0, generation
        self.behind = bool(self._rounds)

    # ---- Rounds ----

    def takes(self, job: ReadyRound) -> bool:
        """Returns whether a round can be put off: its answers need no variable, it cannot fail, and there is room.

        A round that saves, restores, or changes dynamic tables waits for those before it.
        """
        prepared, plan = job.prepared, job.plan
        if job.sequence is not None or not job.voters or plan.snapshot is not None:
            return False
        if prepared.may_refuse or prepared.tables or prepared.given_rows:
            return False
        if any(ref.kind != "reduction" for ref, _ in prepared.given):
            return False
        if any(part.said.want or part.said.lookups for part in job.parts):
            return False
        return self._nbytes + job.nbytes <= BACKLOG_BYTES

    def put(self, job: ReadyRound) -> None:
        """Adds a round that is over for its members."""
        self._rounds.append(job)
        self.behind = True
        self._nbytes += job.nbytes

    def next(self, ready: Callable[[], ReadyRound | None]) -> ReadyRound | None:
        """Returns the round to begin now: one that can be put off, for which others wait; else one that was.

        Args:
            ready: returns the next round whose contributions are there.
        """
        job, self._waiting = self._waiting or ready(), None
        if not self.behind or (job is not None and self.takes(job)):
            return job
        self._waiting = job
        return None if self.awaits or not self._rounds else self._rounds[0]

    def made(self) -> None:
        """The next round is made."""
        self._nbytes -= self._rounds.popleft().nbytes
        self.behind = bool(self.awaits or self._rounds)


def keep(job: ReadyRound) -> tuple[ReadyRound, ReturnedValues]:
    """Copies a round's contributions, and reduces what it gives back. Array work, without the lock.

    The members' memory is theirs again once they are answered.

    Args:
        job: the round, with whole contributions; see `Backlog.takes`.

    Returns:
        The round as it is made later, and the values that it gives back, on the host.
    """
    parts = tuple(replace(part, payload=part.payload.copy()) for part in job.parts)
    kept = replace(job, parts=parts, commit=Commit.ATOMIC, put_off=True)
    contributions = Contributions(kept)
    values = (contributions.value(ref.index) for ref, _ in job.prepared.given)
    return kept, ReturnedValues([np.ascontiguousarray(value) for value in values])
