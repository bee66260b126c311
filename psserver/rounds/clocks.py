"""Clocks: how far each worker with bounded staleness is, and whose answer has to wait for the others.

The clock of a worker is its last round of which this server has all that comes here, without the rounds that only save.
The answer of clock c waits until every other clock that counts is at least c - k. Who rests, has left or is lost does
not count. A plain state machine without clock of its own, network or array work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pswire.api import RESTS
from pswire.model.log import Generation, Member


class Clocks:
    """The clocks of the workers of one server, by session. Guarded by the core's lock; empty in other modes.

    Attributes:
        bound: k, the most rounds that an answered worker may be ahead of another one.
        version: changes where an answer that waits may have to wait no longer.
    """

    def __init__(self) -> None:
        self.bound = self.version = 0
        self._members: dict[int, Member] = {}
        self._at: dict[int, int] = {}
        self._resting: set[int] = set()
        self._saves: dict[int, int] = {}
        self._counts: dict[int, int] = {}  # by clock, how many of those that count are there

    def close_generation(self, before: Generation | None, generation: Generation) -> None:
        """Enters a new generation.

        Who is in the first one counts at once, from before its first round. Who comes later counts from what it tells
        before its first round, so that nobody waits for it while it starts.
        """
        members = {member.session: member for member in generation.members if member.consistency.mode == "bounded"}
        for session in self._members.keys() - members.keys():
            self.leave(session)
        for session, member in members.items():
            if session in self._members:
                continue
            self.bound = member.consistency.staleness
            self._members[session] = member
            self._at[session] = generation.start.round - 1 if generation.start else -1
            if before is None:
                self._count(session)
            else:
                self._resting.add(session)

    def tell(self, session: int, next: int) -> None:
        """A worker tells the next round of which something may come here, or that it `RESTS`.

        One that rested counts again: from the least of the others' clocks, if that is later.
        """
        if session not in self._members:
            return
        if next == RESTS:
            self._discount(session)
            self._resting.add(session)
        else:
            self._reach(session, next - 1)

    def over(self, session: int, round: int, saves: bool) -> None:
        """A round of a worker is over here; `saves` if it only orders a checkpoint, which is no tick."""
        if session in self._members:
            self._saves[session] = self._saves.get(session, 0) + saves
            self.version += saves
            self._reach(session, self._clock(session, round))

    def _reach(self, session: int, clock: int) -> None:
        least = self._least if session in self._resting else None
        self._discount(session)
        self._at[session] = max(self._at[session], clock, clock if least is None else least)
        self._resting.discard(session)
        self._count(session)

    def leave(self, session: int) -> None:
        """A worker has left, or is lost: nobody waits for it any more."""
        self._discount(session)
        self._members.pop(session, None)
        self._at.pop(session, None)
        self._saves.pop(session, None)
        self._resting.discard(session)

    def _count(self, session: int) -> None:
        at = self._at[session]
        self._counts[at] = self._counts.get(at, 0) + 1

    def _discount(self, session: int) -> None:
        """A clock changes, or counts no longer, if it did."""
        if session not in self._at or session in self._resting:
            return
        at = self._at[session]
        self._counts[at] -= 1
        if not self._counts[at]:
            self.version += at == self._least
            del self._counts[at]

    @property
    def sessions(self) -> tuple[int, ...]:
        """All sessions that are known here."""
        return tuple(self._members)

    def begins(self, session: int, round: int) -> bool:
        """Returns whether a round may be applied: the answer of the round before it need not wait."""
        return self.answers(session, round - 1)

    def answers(self, session: int, round: int) -> bool:
        """Returns whether the answer of a round may go; of a session without a clock it always may."""
        if session not in self._members:
            return True
        least = self._clock(session, round) - self.bound
        behind = sum(count for at, count in self._counts.items() if at < least)
        return behind == (session not in self._resting and self._at[session] < least)  # it does not wait for itself

    def behind(self, session: int, round: int) -> list[Member]:
        """Returns for whom the answer of a round waits."""
        if session not in self._members:
            return []
        least = self._clock(session, round) - self.bound
        return [self._members[other] for other, at in self.counted.items() if other != session and at < least]

    def _clock(self, session: int, round: int) -> int:
        return round - self._saves.get(session, 0)

    @property
    def _least(self) -> int | None:
        """The least clock that counts."""
        return min(self._counts, default=None)

    @property
    def counted(self) -> Mapping[int, int]:
        """The clocks that count, by session."""
        return {session: at for session, at in self._at.items() if session not in self._resting}

    @property
    def all(self) -> Iterable[tuple[Member, int]]:
        """All clocks, with their members."""
        return [(self._members[session], at) for session, at in self._at.items()]

    @property
    def gap(self) -> int:
        """Rounds between the foremost and the hindmost clock that count; 0 where there are none."""
        return max(self._counts, default=0) - min(self._counts, default=0)
