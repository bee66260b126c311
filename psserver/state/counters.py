"""What a server has done and heard since it was started: for its metrics, and to know whether anybody is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from psserver.plans.round import ReadyRound
from psserver.state.strands import Record
from pswire.api import Shard
from pswire.telemetry.metrics import Histogram

ROUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Upper bounds for how many rounds others make in the meantime."""


class ServerCounters:
    """Counters of one server. Guarded by the core's lock, but for what one thread alone counts: that of arrays what is
    `answering`, that of files what is written.

    They may be read without it: what is read may be one behind.

    Args:
        clock: monotonic seconds.

    Attributes:
        round: the one that was begun last, -1 before the first.
        rounds: how many there were, by how they ended: "completed" or "failed".
        left_out: contributions that rounds were completed without.
        nonfinite_contributions: those with NaN or infinity, each counted for each variable it was for.
        nonfinite_variables: how many variables have such values now.
        lost: sessions whose lease has ended.
        signs: of life that were given here: sessions opened, and beats of those that have not ended.
        waiting: seconds of rounds from their first contribution on, until they were run, and while those that stream
            waited for parts.
        applying: seconds for which they ran.
        answering: seconds from their end until their answers were handed to the lanes.
        staleness: of asynchronous rounds, how many others were made after its worker had read.
        shards: parts of checkpoints, by how their writing ended: "saved" or "failed".
        shard_bytes: of those that were saved.
        writing: seconds from the end of their round until they were written.
        restores: by how they ended: "restored" or "failed".
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.round = -1
        self.rounds = Counter[str](completed=0, failed=0)
        self.left_out = self.lost = self.signs = 0
        self.nonfinite_contributions = self.nonfinite_variables = 0
        self.waiting, self.applying, self.answering = Histogram(), Histogram(), Histogram()
        self.staleness = Histogram(ROUNDS)
        self.shards = Counter[str](saved=0, failed=0)
        self.shard_bytes = 0
        self.writing = Histogram()
        self.restores = Counter[str](restored=0, failed=0)
        self._seen: dict[int, int] = {}  # the last round that each session's oldest value had seen

    def read(self, session: int, last: int) -> None:
        """A session reads values that have seen this round, unless it has older ones."""
        self._seen.setdefault(session, last)

    def over(self, job: ReadyRound, record: Record, last: int, ran: float, now: float) -> None:
        """A round is over.

        Args:
            job: the round.
            record: what came of it.
            last: the last complete one, this one included.
            ran: for how many seconds it ran.
            now: when that was.
        """
        self.rounds["failed" if record.error else "completed"] += 1
        self.left_out += len(record.left_out)
        self.waiting.observe(max(now - job.since - ran, 0.0))
        self.applying.observe(ran)
        if job.strand is not None:
            for part in job.parts:
                self.staleness.observe(last - 1 - self._seen.get(part.member.session, last - 1))
                self._seen[part.member.session] = last

    def answered(self, over: float) -> None:
        """The members of a round that was over at `over` have their answers."""
        self.answering.observe(self.clock() - over)

    def written(self, began: float, shard: Future[Shard]) -> None:
        """A part of a checkpoint is written, or was not; its round was over at `began`."""
        self.writing.observe(self.clock() - began)
        if shard.exception():
            self.shards["failed"] += 1
        else:
            self.shards["saved"] += 1
            self.shard_bytes += shard.result().nbytes

    def forget(self) -> None:
        """A new job begins: its sessions have read nothing."""
        self.round = -1
        self.nonfinite_variables = 0
        self._seen.clear()
