"""The spans of a server: `round` in the trace of the step that it is of, and below it what its time went to.

Times are noted while the round runs, and told once its answers have left. The round has a span for each contribution
that came with one: its parent is the first member's, and it links to the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from psserver.plans.round import Key, ReadyRound, Record
from psserver.state.counters import RoundTrace
from pswire.traces.traceparent import labels_of
from pswire.traces.tracer import Attributes, SpanTracer, wall_clock

Stretch = tuple[float, float]
"""When something began and ended, in monotonic seconds."""


@dataclass
class _Times:
    """The times of the round that runs.

    Attributes:
        of: the round's sequence and number.
        steps: when steps of its execution ran.
        sums: when contributions were summed apart from kernels.
        votes: when this server had voted, and the round was decided.
    """

    of: tuple[Key, int]
    steps: list[Stretch] = field(default_factory=list)
    sums: list[Stretch] = field(default_factory=list)
    votes: list[Stretch] = field(default_factory=list)


class RoundTraces:
    """The traces of a server's rounds. Guarded by the core's lock, but for `ran`, which the running round calls.

    Args:
        tracer: makes spans.
        task: the task that the server is.
        clock: monotonic seconds.
    """

    def __init__(self, tracer: SpanTracer, task: str, clock: Callable[[], float]) -> None:
        self._tracer = tracer
        self._task = task
        self._clock = clock
        self._times: _Times | None = None

    def _of(self, job: ReadyRound) -> _Times | None:
        """Returns where the times of a round are noted; None where nobody traces it."""
        of = job.sequence, job.round
        if self._times is None or self._times.of != of:
            self._times = _Times(of)
        return self._times if any(part.said.trace for part in job.parts) else None

    def timer(self, job: ReadyRound) -> Callable[[float], None] | None:
        """Returns what is told when a sum apart from kernels began, and has ended now; None for nothing."""
        times = self._of(job)
        return None if times is None else lambda began: times.sums.append((began, self._clock()))

    def ran(self, job: ReadyRound, began: float, ended: float) -> None:
        """A step of a round has run."""
        if (times := self._of(job)) is not None:
            times.steps.append((began, ended))

    def voted(self, job: ReadyRound, began: float, ended: float) -> Mapping[str, str] | None:
        """A round is decided, or votes again; returns the labels of an exemplar that leads to it, None for none."""
        if (times := self._of(job)) is None:
            return None
        times.votes.append((began, ended))
        return labels_of(next(part.said.trace for part in job.parts if part.said.trace))

    def over(self, job: ReadyRound, record: Record, outcome: str, now: float) -> RoundTrace | None:
        """A round is over; returns its trace, None where nobody traces it."""
        times, self._times = self._of(job), None
        if times is None:
            return None
        said: Attributes = {
            "paramserver.task": self._task,
            "paramserver.round": job.round,
            "paramserver.plan": job.plan.id.hex()[:16],
            "paramserver.generation": job.generation,
            "paramserver.contributions": sum(not part.said.observes for part in job.parts),
            "paramserver.excluded": len(record.excluded),
            "paramserver.bytes": sum(part.payload.size for part in job.parts),
            "paramserver.outcome": outcome,
        }
        texts = [part.said.trace for part in job.parts if part.said.trace]
        return _Told(self._tracer, self._clock, times, texts, said, record.error, job.since, now)


class _Told(RoundTrace):
    """The trace of a round that is over, until its answers have left. Holds no contribution."""

    def __init__(
        self,
        tracer: SpanTracer,
        clock: Callable[[], float],
        times: _Times,
        texts: list[str],
        said: Attributes,
        error: BaseException | None,
        since: float,
        over: float,
    ) -> None:
        self.labels = labels_of(texts[0])
        self._tracer, self._clock = tracer, clock
        self._times, self._texts = times, texts
        self._said, self._error = said, error
        self._since, self._over = since, over

    def answered(self, now: float) -> None:
        times, (parent, *others) = self._times, self._texts
        at = wall_clock(self._clock)
        round = self._tracer.begin("round", self._said, parent, kind="server", links=others, at=at(self._since))
        if self._error is not None:
            round.fail(self._error)

        def tell(name: str, stretch: Stretch, above: str, said: Attributes | None = None) -> str:
            span = self._tracer.begin(name, said or {}, above, at=at(stretch[0]))
            span.end(at(stretch[1]))
            return span.text

        if round.text:
            began = min((first for first, _ in (*times.steps, *times.votes)), default=self._over)
            tell("gather", (self._since, began), round.text)
            for first, last in times.steps:
                sums = [sum for sum in times.sums if first <= sum[0] <= last]
                busy = {"paramserver.sums": len(sums)}
                above = tell("program", (first, last), round.text, busy)
                if sums:
                    tell("sum", (sums[0][0], sums[-1][1]), above, busy)
            for vote in times.votes:
                tell("vote", vote, round.text)
            tell("answer", (self._over, now), round.text)
        round.end(at(now))
