"""What all benchmarks tell: how far figures spread, what a process has used, and how a program has ended."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from psclient._src.config import child_environ
from psclient._src.launch.cluster import Cluster
from psclient._src.processes.output import Line
from psclient._src.processes.process import describe_exit, send, spawn
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


def wake_ups(pid: int) -> int:
    """How often threads of a process have waited so far, as far as they live: voluntary context switches."""
    statuses = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status"))
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in statuses)


# ---- Systems that train ----


class Watch:
    """Looks at the processes of a system when its first worker says that the measured steps begin, and end.

    A system prints lines of JSON: `pids`, the numbers of processes by their names, if it is not a cluster of ours;
    `now` as "begin" and "end" around the measured steps; and what else there is to tell.

    Args:
        steps: how many are measured.

    Attributes:
        pids: the numbers of its processes, by names such as "worker 0".
        said: all that it has told.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.pids: dict[str, int] = {}
        self.said: dict[str, Any] = {}
        self._before: dict[str, Cost] = {}
        self._used: dict[str, float] = {}

    def hear(self, text: str) -> None:
        """Takes a line of what is printed; passes over all but lines of JSON."""
        with suppress(json.JSONDecodeError):
            said = json.loads(text)
            self.pids |= said.get("pids", {})
            if said.get("now") == "begin":
                self._before = {name: Cost.of(pid) for name, pid in self.pids.items()}
            if said.get("now") == "end":
                self._used = {name: Cost.of(self.pids[name]).since(cost).seconds for name, cost in self._before.items()}
            self.said |= said

    def used_per_step(self) -> dict[str, float]:
        """Returns the processor time of each process for a step, in seconds; raises `Failed` if no end was heard."""
        if self.said.get("now") != "end":
            raise Failed("its first worker said nothing of its end")
        return {name: used / self.steps for name, used in self._used.items()}


def run_cluster(watch: Watch, seconds: float, **options: Any) -> None:
    """Has a cluster of ours train, without a chief.

    Args:
        watch: hears its first worker.
        seconds: how long it may take.
        options: of `Cluster`.

    Raises:
        Failed: it did not end well.
    """

    def hear(line: Line) -> None:
        kinds = {"ps": "server", "worker": "worker"}
        watch.pids = {f"{kinds[task.job]} {task.index}": each.pid for task, each in cluster.processes.items()}
        if line.task.job == "worker" and line.task.index == 0 and not line.error:
            watch.hear(line.text)

    cluster = Cluster(sink=hear, chief="none", **options)
    with cluster:
        outcome = cluster.wait(seconds)
    if outcome.code:
        raise Failed(str(outcome.report))


def run_program(watch: Watch, command: Sequence[str], processes: int, seconds: float) -> None:
    """Has another program train, which says the numbers of its processes.

    Args:
        watch: hears it.
        command: the program.
        processes: how many share the cores of this machine.
        seconds: how long it may take.

    Raises:
        Failed: it did not end well.
    """
    with tempfile.TemporaryFile() as errors:
        process = spawn(list(command), child_environ(processes, None), subprocess.DEVNULL, errors.fileno())
        deadline = time.monotonic() + seconds
        try:
            assert process.stdout
            for line in process.stdout:
                watch.hear(line.decode())
                if time.monotonic() > deadline:
                    raise Failed(f"took more than {seconds} s")
            process.wait(seconds)
        finally:
            send(process, signal.SIGKILL)
            process.wait()
        check_exit(process, errors)
