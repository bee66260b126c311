"""What all benchmarks tell: how far figures spread, what a process has used, and how a program has ended."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from psclient._src.processes.process import describe_exit
from pstesting.processor_time import await_rest, processor_seconds

T = TypeVar("T")


class Failed(Exception):
    """A system's program did not end well; says why."""


def check_exit(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """Raises `Failed` if a program that has ended did not end well, with the last line that it wrote to `errors`."""
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip()
    if process.returncode:
        raise Failed(f"{describe_exit(process.returncode)}: {said.splitlines()[-1] if said else 'it said nothing'}")


def read_share(share: type[T], text: str) -> T:
    """Returns what a process of clients is told, of the dataclass whose fields its launcher wrote as JSON."""
    said = json.loads(text)
    return share(**{**said, "mine": tuple(said["mine"])})


def quantile(values: Sequence[float], fraction: float) -> float:
    """The smallest of the values that is not below this fraction of them."""
    return sorted(values)[min(int(fraction * len(values)), len(values) - 1)]


def spread(values: Sequence[float], scale: float) -> dict[str, float]:
    """Least, median and 90th percentile, each times `scale`."""
    found = {"min": min(values), "median": statistics.median(values), "p90": quantile(values, 0.9)}
    return {name: scale * value for name, value in found.items()}


@dataclass(frozen=True)
class Cost:
    """What a process has used so far, or between two moments; Linux tells.

    Attributes:
        seconds: of processor time, which does not depend on who else uses the machine.
        rss: resident bytes; memory that it shares with others counts.
        threads: how many it has.
    """

    seconds: float
    rss: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Cost:
        """As it is now."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return cls(processor_seconds(pid), int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), int(fields[17]))

    def since(self, before: Cost) -> Cost:
        """What has come since an earlier moment."""
        return Cost(self.seconds - before.seconds, self.rss - before.rss, self.threads - before.threads)


def at_rest(pids: Sequence[int]) -> list[Cost]:
    """What each process has used once all rest: kernels that are compiled in the background are no part of a round."""
    await_rest(pids)
    return list(map(Cost.of, pids))
