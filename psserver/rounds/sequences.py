"""Sequences: open rounds that gather contributions, the last complete round, and the answers that are kept.

In synchronous mode all members share one; beside it a session has one of its own for variables that are `alone`. In
asynchronous mode each task has its own, and each closure that is run: whichever worker makes a closure's n-th round, it
is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from psserver.effects import Effect, Fail
from psserver.plans.round import Key, Record, SessionSequence
from psserver.rounds.pending_round import PendingRound, Push, Waiter
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.errors import InvalidRequest, PSError, PushAgain
from pswire.limits import WINDOW
from pswire.model.log import Generation, Member, Position
from pswire.model.status import OpenRound, WorkerProgress

T = TypeVar("T")

RESENDS = 8
"""Most attempts at one contribution that are kept while its generation is not known here."""

RECORDS = WINDOW + 1
"""Rounds of a sequence whose answers are kept for resends."""

PATIENCE, FORGETTING = 1.5, 0.99
"""How much longer than before a session may compute before it is reported, and the part of that time that counts a
round later."""

BEHIND = 64
"""Rounds that a member may be left out of, one after the other; their answers are kept for it as well."""


def kept(generation: Generation | None) -> int:
    """Returns how many rounds of a sequence have their answers kept."""
    return RECORDS + BEHIND if generation is not None and generation.leaves_out else RECORDS


class Parked:
    """Pushes for a generation that is not known here yet. They belong to no round of this server so far."""

    def __init__(self) -> None:
        self._pushes: dict[tuple[int, bool], list[Push]] = {}  # of a session those to rounds of all, and its own

    def put(self, push: Push) -> list[Effect]:
        """Keeps a push; fails the oldest of too many attempts.

        Raises:
            InvalidRequest: its session waits in too many other rounds already.
        """
        name = push.said.session, push.said.alone
        round, parked = push.said.round, self._pushes.get(name, [])
        check_window({other.said.round for other in parked}, round)
        effects: list[Effect] = []
        attempts = [other for other in parked if other.said.round == round]
        if len(attempts) >= RESENDS:
            # Its sender, on a network that loses answers, has sent it again and waits for later attempts.
            parked = [other for other in parked if other is not attempts[0]]
            effects.append(Fail(attempts[0].future, InvalidRequest(f"round {round} was sent {RESENDS} more times")))
        self._pushes[name] = [*parked, push]
        return effects

    def take(self) -> list[Push]:
        """Removes and returns all pushes, the attempts of a session in order."""
        pushes, self._pushes = self._pushes, {}
        return [push for each in pushes.values() for push in each]

    def fail_session(self, session: int, error: PSError) -> list[Effect]:
        """Fails the pushes of one session."""
        found = [push for alone in (False, True) for push in self._pushes.pop((session, alone), [])]
        return [Fail(push.future, error) for push in found]

    @property
    def waiting(self) -> tuple[OpenRound, ...]:
        """The rounds of the pushes, for people; as `shared_rounds`."""
        shared = [pushes for (_, alone), pushes in self._pushes.items() if not alone]
        rounds = [round for each in shared for round in sorted({push.said.round for push in each})]
        return tuple(
            OpenRound(round, "a step of a generation that is not known here yet", (), False) for round in rounds
        )


def check_window(under_way: Set[int], round: int) -> None:
    """Raises `InvalidRequest` if a session that has these rounds under way begins one too many."""
    if round not in under_way and len(under_way) >= WINDOW:
        raise InvalidRequest(
            f"{len(under_way)} rounds of this session are open, from round {min(under_way)} on, so it cannot begin "
            f"round {round}"
        )


@dataclass
class RoundSequence:
    """A sequence of rounds, one after the other.

    Attributes:
        last: the last complete round, -1 before the first.
        settled: positions of the members' datasets after the last complete round.
        records: answers of the last rounds, by number, for resends.
        open: open rounds, by number.
        pushed: the newest round that each session has pushed to this server.
        turn: its place in the line of those that have open rounds: see `FairQueue`.
        arrived: the time at which each session has pushed its newest round, in monotonic seconds.
        longest: the longest time for which each session has computed between two rounds, of the last hundred or so.
    """

    last: int = -1
    settled: tuple[Position, ...] = ()
    records: dict[int, Record] = field(default_factory=dict)
    open: dict[int, PendingRound] = field(default_factory=dict)
    pushed: dict[int, int] = field(default_factory=dict)
    turn: int = -1
    arrived: dict[int, float] = field(default_factory=dict)
    longest: dict[int, float] = field(default_factory=dict)

    def came(self, said: Contribution, now: float) -> None:
        """Notes that a session has come to a round, which may be over, at a time."""
        session = said.session
        before = self.pushed.get(session, -1)
        if said.round <= before:
            return
        if before >= 0:
            self.longest[session] = max(now - self._began(session), FORGETTING * self.longest.get(session, 0.0))
        self.pushed[session], self.arrived[session] = said.round, now

    def _began(self, session: int) -> float:
        """Returns since when a session that has pushed computes: since its last push, or the end of that round."""
        record = self.records.get(self.pushed[session])
        arrived = self.arrived[session]
        return arrived if record is None else max(arrived, record.over)

    def computes(self, session: int, now: float) -> bool:
        """Returns whether a session that has not pushed may well compute: not much longer than it has done before."""
        return session in self.longest and now - self._began(session) <= PATIENCE * self.longest[session]

    def is_near(self, session: int) -> bool:
        """Returns whether a member may be left out of one more round: it is not too far behind, and has begun."""
        pushed = self.pushed.get(session)
        return pushed is not None and sum(number > pushed for number in self.records) < BEHIND

    def lacks(self, number: int) -> bool:
        """Returns whether an open round waits for the first push of some of its members."""
        pending = self.open.get(number)
        return pending is not None and not pending.attempt and len(pending.parts) < len(pending.members)

    def record_of(self, said: Contribution, member: Member | None) -> Record | None:
        """Returns the record of the round of a contribution of a member; None while it is not over.

        With a quorum, where that is forgotten, of the newest round of the same plan.
        """
        found = self.records.get(said.round)
        if found is None and member and member.consistency.quorum and said.round <= self.last:
            numbers = (number for number, record in self.records.items() if record.plan_id == said.plan_id)
            found = self.records.get(max(numbers, default=-1))
        return found

    def refusal(self, said: Contribution) -> PSError:
        """Returns the error of a push to a round that is over."""
        if said.closure is not None:  # another worker has made it meanwhile, and its answer is this one's
            return PushAgain(f"another worker has completed round {said.round} of closure {said.closure.number}")
        return InvalidRequest(f"round {said.round} is over; this server is at {self.last}")

    def under_way(self, session: int) -> set[int]:
        """Returns the open rounds to which a session has contributed."""
        return {number for number, pending in self.open.items() if session in pending.parts}

    @property
    def newest(self) -> int:
        """The last round with a contribution, complete or not."""
        return max([self.last, *self.open])

    @property
    def positions(self) -> tuple[Position, ...]:
        """Positions of its members' datasets, from the newest round that has some."""
        found = (self.open[number].positions for number in sorted(self.open, reverse=True))
        return next(filter(None, found), self.settled)

    def begin_at(self, round: int) -> None:
        """Takes part from this round on; what is open of those before was made without this server."""
        self.last = round - 1
        for number in [number for number in self.open if number < round]:
            del self.open[number]

    def close(self, number: int, record: Record, kept: int) -> list[Waiter]:
        """Ends a round; returns its waiters.

        Args:
            number: the number of the round.
            record: its answer.
            kept: number of answers to keep.
        """
        self.last = max(self.last, number)
        self.records[number] = record
        for old in sorted(self.records)[:-kept]:
            del self.records[old]
        pending = self.open.pop(number)
        self.settled = pending.positions or self.settled
        return pending.waiters


class FairQueue:
    """The sequences with open rounds: first that whose last round was over the longest ago.

    So a fast worker does not keep the others from their turn, and a slow one, for which others may wait, is not kept
    waiting by a burst of theirs.
    """

    def __init__(self) -> None:
        self._line: list[tuple[int, Key]] = []  # a heap; of a sequence whose turn is another one now it is out of date
        self._order = count()

    def come(self, key: Key, sequence: RoundSequence) -> None:
        """A sequence gets an open round: it stands in the line from its first one on."""
        if sequence.turn < 0:
            sequence.turn = next(self._order)
        if not sequence.open:
            heappush(self._line, (sequence.turn, key))

    def over(self, key: Key, sequence: RoundSequence) -> None:
        """A round of a sequence is over: it goes to the end."""
        sequence.turn = next(self._order)
        if sequence.open:
            heappush(self._line, (sequence.turn, key))

    def first(
        self, sequences: Mapping[Key, RoundSequence], ready: Callable[[Key, RoundSequence], T | None]
    ) -> T | None:
        """Returns what a function returns for the first sequence for which it is not None; it may end open rounds."""
        found, passed = None, list[tuple[int, Key]]()
        while self._line and found is None:
            turn, key = heappop(self._line)
            sequence = sequences.get(key)
            if sequence is None or sequence.turn != turn:
                continue
            found = ready(key, sequence)
            if sequence.open:
                passed.append((turn, key))
        for each in passed:
            heappush(self._line, each)
        return found


def shared_rounds(sequences: Mapping[Key, RoundSequence]) -> list[tuple[int, PendingRound]]:
    """Returns the open rounds for which anybody may wait, by number; not those of one worker beside those of all."""
    found = (sequence.open.items() for key, sequence in sequences.items() if not isinstance(key, SessionSequence))
    return sorted((item for items in found for item in items), key=lambda item: item[0])


def forget_own(sequences: MutableMapping[Key, RoundSequence], fenced: Set[int]) -> None:
    """Forgets the own rounds of sessions that have ended, but for those that are open: what is whole still counts."""
    for key in [key for key in sequences if isinstance(key, SessionSequence) and key.session in fenced]:
        if not sequences[key].open:
            del sequences[key]


def places_of(
    sequences: Mapping[Key, RoundSequence], clocks: Iterable[tuple[Member, int]]
) -> tuple[WorkerProgress, ...]:
    """Returns the progress of each task that makes rounds of its own, or has a clock, in task order."""
    own = {key: sequence for key, sequence in sequences.items() if isinstance(key, Task)}
    at = {member.task: at for member, at in clocks}
    none = RoundSequence()  # of who has a clock alone
    found = [(task, own.get(task, none)) for task in sorted(own.keys() | at.keys(), key=Task.order)]
    return tuple([WorkerProgress(task, one.newest, one.positions, at.get(task, -1) + 1) for task, one in found])
