"""Counters of a server since its start: for its metrics, and to decide whether any process is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol

from psserver.plans.round import ReadyRound, Record
from pswire.cluster import Task
from pswire.model.saved import Shard
from pswire.telemetry.metrics import Histogram

ROUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Upper bounds of the staleness histogram: rounds of others in the meantime."""


class RoundTrace(ABC):
    """The trace of a round that is over, until its answers have left.

    Attributes:
        labels: the labels of an exemplar that leads to it.
    """

    labels: Mapping[str, str]

    @abstractmethod
    def answered(self, now: float) -> None:
        """Its answers have left."""


class Traces(Protocol):
    """What is told of rounds for their traces, where these are on."""

    def timer(self, job: ReadyRound) -> Callable[[float], None] | None:
        """Returns what is told when a sum apart from kernels began, and has ended now; None for nothing."""

    def ran(self, job: ReadyRound, began: float, ended: float) -> None:
        """A step of a round has run."""

    def voted(self, job: ReadyRound, began: float, ended: float) -> Mapping[str, str] | None:
        """A round is decided, or votes again; returns the labels of an exemplar that leads to it, None for none."""

    def over(self, job: ReadyRound, record: Record, outcome: str, now: float) -> RoundTrace | None:
        """A round is over; returns its trace, None where nobody traces it."""


class ServerCounters:
    """Counters of one server. Guarded by the core's lock, but for those of one thread alone.

    The thread for arrays counts `answering`, the thread for files shards. Reads need no lock: a value may be one
    behind.

    Args:
        clock: monotonic seconds.

    Attributes:
        round: the round begun last, -1 before the first.
        rounds: number of rounds by outcome: "completed", "failed", or "skipped": over, and not applied.
        excluded: contributions that rounds were completed without.
        nonfinite_contributions: contributions with NaN or infinity, each counted once per reduction.
        nonfinite_variables: number of variables that have such values now.
        lost: sessions whose lease has ended.
        signs: signs of life: opened sessions, and heartbeats of sessions that have not ended.
        waiting: seconds of a round from its first contribution to its end, less those for which it ran.
        applying: seconds for which rounds ran.
        answering: seconds from a round's end until its answers were handed to the transports.
        staleness: of an asynchronous round, the number of others' rounds since its worker's read.
        shards: this server's shards of checkpoints by outcome: "saved" or "failed".
        shard_bytes: bytes of saved shards.
        writing: seconds from the end of a shard's round until it was written.
        restores: number of restores by outcome: "restored" or "failed".
        votes: votes on whose contributions a round has, by direction: "sent" or "received".
        voting: seconds from a server's vote until a round was decided.
        digests: digests of values that were compared with another server's, by outcome: "equal" or "different".
        hashing: seconds for which values were hashed for them.
        traces: is told of rounds; None where nobody traces them.
    """

    traces: Traces | None = None

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.round = -1
        self.rounds = Counter[str](completed=0, failed=0, skipped=0)
        self.excluded = self.lost = self.signs = 0
        self.nonfinite_contributions = self.nonfinite_variables = 0
        self.waiting, self.applying, self.answering = Histogram(), Histogram(), Histogram()
        self.staleness = Histogram(ROUNDS)
        self.shards = Counter[str](saved=0, failed=0)
        self.shard_bytes = 0
        self.writing = Histogram()
        self.restores = Counter[str](restored=0, failed=0)
        self.votes = Counter[str](sent=0, received=0)
        self.voting = Histogram()
        self.digests = Counter[str](equal=0, different=0)
        self.hashing = 0.0
        self._seen: dict[int, int] = {}  # the last round in the oldest values of each session

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of all rounds so far, by phase."""
        return {
            "waiting": self.waiting.total,
            "applying": self.applying.total,
            "answering": self.answering.total,
        }

    def read(self, session: int, last: int) -> None:
        """Notes that a session reads values as of this round, unless it holds older ones."""
        self._seen.setdefault(session, last)

    def timer(self, job: ReadyRound) -> Callable[[float], None] | None:
        """Returns what is told of a round's sums: see `Traces`; None for nothing."""
        return None if self.traces is None else self.traces.timer(job)

    def ran(self, job: ReadyRound, began: float) -> float:
        """Returns the seconds for which a step of a round ran, which has ended now."""
        ended = self.clock()
        if self.traces is not None:
            self.traces.ran(job, began, ended)
        return ended - began

    def voted(self, job: ReadyRound, began: float) -> None:
        """Counts a vote that is decided; `began` is when this server had voted."""
        ended = self.clock()
        self.voting.observe(ended - began, None if self.traces is None else self.traces.voted(job, began, ended))

    def void(self, job: ReadyRound, record: Record, last: int) -> None:
        """Counts a round that is over and has changed nothing; as `over`."""
        now = self.clock()
        traced = self.over(job, record, last, 0.0, now)
        if traced is not None:
            traced.answered(now)

    def over(self, job: ReadyRound, record: Record, last: int, ran: float, now: float) -> RoundTrace | None:
        """Counts a round that is over; returns its trace, None where nobody traces it.

        Args:
            job: the round.
            record: its record.
            last: the last complete round, this one included.
            ran: seconds for which it ran.
            now: the time of its end.
        """
        outcome = "failed" if record.error else "skipped" if job.skipped else "completed"
        traced = None if self.traces is None else self.traces.over(job, record, outcome, now)
        labels = None if traced is None else traced.labels
        self.rounds[outcome] += 1
        self.excluded += len(record.excluded)
        self.waiting.observe(max(now - job.since - ran, 0.0), labels)
        self.applying.observe(ran, labels)
        if isinstance(job.sequence, Task | int):
            for part in job.parts:
                seen = self._seen.get(part.member.session, last - 1)  # later where a change has set the number back
                self.staleness.observe(max(last - 1 - seen, 0))
                self._seen[part.member.session] = last
        return traced

    def answered(self, over: float, traced: RoundTrace | None = None) -> None:
        """Counts the answers of a round that ended at time `over`, which have left."""
        now = self.clock()
        self.answering.observe(now - over, None if traced is None else traced.labels)
        if traced is not None:
            traced.answered(now)

    def written(self, began: float, shard: Future[Shard]) -> None:
        """Counts a shard that was written, or has failed; `began` is the end of its round."""
        self.writing.observe(self.clock() - began)
        if shard.exception():
            self.shards["failed"] += 1
        else:
            self.shards["saved"] += 1
            self.shard_bytes += shard.result().nbytes

    def forget(self) -> None:
        """Clears the state of the last job: no session of the new one has read anything."""
        self.round = -1
        self.nonfinite_variables = 0
        self._seen.clear()
