"""Commands as a user types them: real processes in a session of their own, of which none may be left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pstesting.forks import NAME, Forked

PROGRAMS = {
    "psworker": [sys.executable, "-P", "-m", "psclient"],
    "psctl": [sys.executable, "-P", "-m", "psclient.psctl"],
    "psserver": [sys.executable, "-P", "-m", "psserver"],
    "python": [sys.executable],
}

SECONDS = 120.0
"""How long a command may take that has no deadline of its own: far longer than it does."""


@dataclass(frozen=True)
class Done:
    """A command that has ended.

    Attributes:
        code: its exit code.
        out, err: what it printed.
        seconds: how long it took.
        left: processes of its session that outlived it.
    """

    code: int
    out: str
    err: str
    seconds: float
    left: tuple[str, ...]

    @property
    def errors(self) -> list[str]:
        """The lines on stderr that our programs head with their names."""
        return [line for line in self.err.splitlines() if line.startswith(("psworker: ", "psserver: "))]


def shell(words: Sequence[str], cwd: Path, seconds: float = SECONDS, *, fork: bool = True, **environ: str) -> Done:
    """Runs a command to its end.

    Args:
        words: a key of `PROGRAMS`, then its arguments.
        cwd: where it runs.
        seconds: after which it is killed.
        fork: False where it matters that Python itself starts, and imports.
        environ: environment variables, beside this process's.
    """
    began = time.monotonic()
    popen: type[subprocess.Popen[str]] = Forked if fork else subprocess.Popen
    process = popen(
        [*PROGRAMS[words[0]], *words[1:]],
        cwd=cwd,
        env={**{name: value for name, value in os.environ.items() if name != "TF_CONFIG"}, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        left = _end_session(process.pid)
    return Done(process.returncode, out, err, time.monotonic() - began, left)


def _end_session(leader: int) -> tuple[str, ...]:
    """Kills what is left of a session; says what it was."""
    left = [process for process in psutil.process_iter(["cmdline", "name"]) if _session(process.pid) == leader]
    for process in left:
        with suppress(psutil.NoSuchProcess):  # it ends by itself
            process.kill()
    outlived = [process.info for process in left if process.pid != leader and process.info["name"] != NAME]
    return tuple(" ".join(info["cmdline"] or ["?"]) for info in outlived)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1
