"""Runs a worker that has joined a job in a process of its own, and starts that again where it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from psclient._src.config import child_environ
from psclient._src.launch.joining import JobIsOver, Joined, Joiner
from psclient._src.launch.script import say
from psclient._src.processes import process as starts
from psclient._src.processes.process import describe_exit, exit_code
from psclient._src.processes.shutdown import NOT_SAVED
from pswire.variables import SCRIPT_ERROR

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that are for the script's process: Ctrl-C reaches it through us, once."""

FINAL = (0, 2, NOT_SAVED)
"""Exit codes after which another attempt is of no use: its script is done, or would end in the same way."""


class _Child:
    """The process that runs the script now. Used by the main thread, and by its signal handlers."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = False

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Starts it, and waits for its end; returns its return code. A process group of its own, and no input."""
        self._starts = True
        self._process = process = starts.popen(command, stdin=subprocess.DEVNULL, env=environ, process_group=0)
        self._starts = False
        for number in self.told:
            process.send_signal(number)
        process.wait()
        self._process = None
        return process.returncode

    def tell(self, number: int, frame: FrameType | None) -> None:
        """Hands a signal on; ends this process where there is none that it could be for."""
        self.told.append(number)
        if self._starts:
            return  # it is told once it is there
        if self._process is None:
            raise SystemExit(128 + number)
        self._process.send_signal(number)


def supervise(joiner: Joiner, joined: Joined, arguments: Sequence[str], restarts: int) -> int:
    """Runs a script as a worker, and again as the same one, as often as it fails and restarts are left.

    Args:
        joiner: keeps the place meanwhile.
        joined: the place.
        arguments: of `psworker`, for the process that runs the script.
        restarts: number of failures after which it is started again.

    Returns:
        The exit code of the last process.

    Raises:
        PSError: there is no place any more for another attempt.
    """
    child = _Child()
    for number in FORWARDED:
        signal.signal(number, child.tell)
    while True:
        code = _run(child, joined, arguments)
        if code in FINAL or child.told or not restarts:
            return exit_code(code)
        restarts -= 1
        say(joined.task, f"failed ({describe_exit(code)}); restarting, {restarts} restarts left")
        try:
            joined = joiner.take()
        except JobIsOver as error:
            say(joined.task, f"not restarted: {error}")
            return exit_code(code)


def _run(child: _Child, joined: Joined, arguments: Sequence[str]) -> int:
    """Runs the script once; returns the process's return code."""
    command = [sys.executable, "-P", "-m", "psclient", "--die-with-parent", str(os.getpid()), *arguments]
    here = len(joined.cluster.at_host_of(joined.task))
    return child.run(command, child_environ(here, None, {**joined.variables(), SCRIPT_ERROR: "leave"}))
