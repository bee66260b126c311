"""The end of a cluster: which task is blamed, and what it said last."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from psclient._src.launch.restarts import follows
from psclient._src.processes.process import describe_exit, exit_code
from pswire.cluster import Task
from pswire.telemetry import logging_setup

SUMMARY = 240
"""Characters of a failure in one line."""

_TRACEBACK = "Traceback (most recent call last)"
_VERDICTS = ("psworker: ", "psserver: ", _TRACEBACK)
_HEAD = re.compile(r"^psworker: \S+: (error: )?")
_LOGGED = re.compile(r"\d\d:\d\d:\d\d [DIWEC] ")


@dataclass(frozen=True)
class Outcome:
    """The end of a cluster: exit code and report.

    Attributes:
        code: exit code for the launcher: 0, the failing task's, 128 + signal where one killed it, 1 where the
            job did not end with its workers.
        task: the task that failed, None where none did.
        report: the failure, with the last traceback or line that the task printed; "" where there is none.
    """

    code: int
    task: Task | None = None
    report: str = ""

    @property
    def summary(self) -> str:
        """The failure in one line, for those who have seen what the task printed; "" where there is none."""
        heading, *said = self.report.splitlines() or [""]
        last = re.sub(_HEAD, "", said[-1]) if said else ""
        return textwrap.shorten(f"{heading} {last}", SUMMARY, placeholder=" ...") if self.report else ""


@dataclass(frozen=True)
class TaskFailure:
    """A task that failed.

    Attributes:
        task: the task that failed.
        code: its exit code; the signal's, less than 0, where one killed it.
        said: the last lines that it printed on stderr.
    """

    task: Task
    code: int
    said: Sequence[str]

    @property
    def outcome(self) -> Outcome:
        """The end of a cluster that this task is blamed for."""
        heading = f"psworker: {self.task} failed ({describe_exit(self.code)}):"
        return Outcome(exit_code(self.code), self.task, "\n".join([heading, *_last_words(self.said)]))

    @property
    def blame(self) -> tuple[bool, bool, bool]:
        """Of several failures the least is blamed: who failed by itself, before those that failed because it did."""
        killed, follows_server = self.code < 0, follows(self.task, self.code)
        return follows_server, not killed, not any(line.startswith(_TRACEBACK) for line in _plain(self.said))


def _last_words(lines: Sequence[str]) -> list[str]:
    """Returns why a process ended: its last traceback, or line of ours; the log goes on while it takes its leave."""
    said = [line for line in _plain(lines) if line.strip()]
    said = [line for line in said if not _LOGGED.match(line)] or said
    starts = [i for i, line in enumerate(said) if line.startswith(_VERDICTS)]
    if not starts:
        return said[-1:] or ["it printed nothing on stderr"]
    verdict = said[starts[-1] :]
    return verdict if verdict[0].startswith(_TRACEBACK) else verdict[:1]


def _plain(lines: Sequence[str]) -> list[str]:
    """Lines as text: of those in JSON the errors, with their tracebacks."""
    plain: list[str] = []
    for line in lines:
        said = logging_setup.read(line)
        if said is None:
            plain.append(line)
        elif said["level"] in ("error", "critical"):
            plain += str(said.get("exception") or f"psworker: {said['message']}").splitlines()
    return plain
