"""The time that a process spends between and in rounds, counted for its metrics."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from pswire.model.status import LocalProgress, Pace
from pswire.telemetry.metrics import Histogram

if TYPE_CHECKING:
    from psclient._src.telemetry.traces.worker import StepTraces


class RoundCounters:
    """Counters of one process. It waits for rounds within it, as a context; `read` may be called by any thread.

    Attributes:
        rounds: number of answered rounds by outcome: "completed" or "failed".
        steps: number of calls of `strategy.run`.
        waits: number of times that it waited for rounds.
        computing: seconds between two waits, less those of reads.
        waiting: seconds of waits for rounds.
        reading: seconds of reads that had to ask a server.
        excluded: contributions of others that rounds were completed without, on each server.
        traces: the traces of steps; None where they are off.
        exemplar: the labels that lead to the trace of the round that is waited for; None for none.
    """

    traces: StepTraces | None = None
    exemplar: Mapping[str, str] | None = None

    def __init__(self) -> None:
        self.rounds = Counter[str](completed=0, failed=0)
        self.steps = self.waits = 0
        self.computing, self.waiting, self.reading = Histogram(), Histogram(), Histogram()
        self.excluded = 0
        self._began = 0.0
        self._over: float | None = None  # when the last wait was
        self._lock = threading.Lock()  # guards what is read
        self._read = 0.0  # seconds since the last wait
        self._local: LocalProgress | None = None
        self._exchanged: float | None = None  # when the last exchange of local steps was
        self._moved = 0  # bytes before the first local step

    def __enter__(self) -> None:
        self._began = time.monotonic()
        if self._over is not None:
            # Replicas read at the same time, so that together they may have read for longer than that.
            self.computing.observe(max(self._began - self._over - self._read, 0.0), self.exemplar)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waits += 1
        self._over, self._read = time.monotonic(), 0.0
        self.waiting.observe(self._over - self._began, self.exemplar)

    def pace(self) -> Pace:
        """Returns the counts that heartbeats tell."""
        return Pace(self.steps, sum(self.rounds.values()), self.waits, local=self.local)

    @property
    def local(self) -> LocalProgress | None:
        """The local steps up to now; None if there are none."""
        local, then = self._local, self._exchanged
        return local if local is None or then is None else replace(local, seconds=time.monotonic() - then)

    def local_step(self, tokens: float | None, exchanged: bool, moved: int, rate: float) -> None:
        """Counts a local step, once it and its part of an exchange are over.

        Args:
            tokens: those of this step; None if they are not counted.
            exchanged: True if the step has ended with an exchange, of all parameters or of a fragment.
            moved: payload bytes that this process has sent and received so far.
            rate: local steps per second between the last two exchanges; 0.0 before the first one.
        """
        if self._local is None:
            self._local, self._moved = LocalProgress(), moved
        before = self._local
        self._local = LocalProgress(
            before.steps + 1,
            0 if exchanged else before.since + 1,
            tokens=before.tokens + (tokens or 0.0),
            moved=moved - self._moved,
            rate=rate,
        )
        if exchanged:
            self._exchanged = time.monotonic()

    def read(self, seconds: float) -> None:
        """Counts a read from a server."""
        with self._lock:
            self._read += seconds
            self.reading.observe(seconds, None if self.traces is None else self.traces.read(seconds))
