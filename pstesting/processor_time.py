"""Processor time of processes, as Linux tells it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

REST_SECONDS = 0.2
"""Between two looks at processes that come to rest."""

MOST_SECONDS = 10.0
"""Until processes count as resting that always do something, as a server does that many idle workers heartbeat at."""


def processor_seconds(pid: int) -> float:
    """Returns the seconds of processor time that a process has used, whoever else uses the machine."""
    # What clock_getcpuclockid(3) makes of a process: /proc counts in hundredths of seconds, which is too coarse.
    return time.clock_gettime((~pid << 3) | 2)


def await_rest(pids: Sequence[int]) -> list[float]:
    """Waits until processes rest, as servers do once their kernels are compiled; returns what each has used by then."""
    used, until = list(map(processor_seconds, pids)), time.monotonic() + MOST_SECONDS
    while True:
        time.sleep(REST_SECONDS)
        before, used = used, list(map(processor_seconds, pids))
        rest = all(now - then < REST_SECONDS / 10 for now, then in zip(used, before, strict=True))
        rest = rest and not any(map(_would_run, pids))
        if rest or time.monotonic() > until:
            return used


def _would_run(pid: int) -> bool:
    """Returns whether a process runs, or waits for nothing but a processor, which others may have for long."""
    states = [each.read_text().rpartition(")")[2].split()[0] for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    return "R" in states
