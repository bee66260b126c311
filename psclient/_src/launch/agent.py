"""The process that runs one task of a cluster on another host, for `psworker --hosts`: `python -m` runs it there.

ssh starts it. It gets its order as a line of JSON on stdin, and further lines with signals for the task, or without
anything: the launcher is still there. Once stdin ends, or nothing has come for too long, it ends the task. So nothing
stays behind when the connection is lost, or the launcher is killed. What the task prints goes to ssh as it is.

The token of the job comes with the order, and goes on in a file without a name: neither a command line nor an
environment has it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psclient._src.config import child_environ
from psclient._src.processes.process import exit_code
from pswire.encoding.protocol import PROTOCOL
from pswire.errors import ConfigError
from pswire.process import version

MODULE = "psclient._src.launch.agent"
"""Its name for `python -m`."""

TERM_SECONDS = 5.0
"""Seconds that a task may take to end after the connection was lost."""

LOST = 255
"""The exit code of ssh itself, which no task may have."""

HIGH = 254
"""The exit code of a task that ended with `LOST`."""


@dataclass(frozen=True)
class Order:
    """The task that an agent runs.

    Attributes:
        program: the module that is the task: `psserver` or `psclient`.
        arguments: its arguments.
        variables: environment variables that it gets, beside those of the host.
        token: the job's token; "" where a file has it.
        directory: the working directory.
        tasks: how many tasks share the host's cores.
        silence: seconds without a word from the launcher after which the task is ended.
    """

    program: str
    arguments: Sequence[str]
    variables: Mapping[str, str]
    token: str
    directory: str
    tasks: int
    silence: float


@dataclass(frozen=True)
class HostReport:
    """The facts of a host that a launcher asks for before it starts a task there.

    Attributes:
        version: version of this package there, as `package_version` gives it.
        directory: True if the working directory of tasks is there.
        script: True if what they run is there, or they run nothing.
    """

    version: str
    directory: bool
    script: bool

    def check_version(self, host: str, here: str) -> None:
        """Raises `ConfigError` if the host has another version of this package than the launcher, which is `here`."""
        if self.version != package_version():
            raise ConfigError(
                f"{host} has paramserver {self.version}, but {here} has {package_version()}; install the same version "
                "on both"
            )


def main() -> int:
    """Does what the first line on stdin orders; returns the exit code."""
    lines = _Input()
    order = lines.first()
    if order is None:
        return HIGH
    if order.get("check"):
        sys.stdout.write(json.dumps(vars(found_here(order["directory"], order["script"]))) + "\n")
        return 0
    return _run(Order(**order), lines)


def package_version() -> str:
    """Returns the version of this package and the number of its protocol, which all hosts have in common."""
    return f"{version('paramserver')}, protocol {PROTOCOL}"


def found_here(directory: str, script: str) -> HostReport:
    """The report of this host.

    Args:
        directory: the working directory of tasks.
        script: the path of what they run, "" for nothing.
    """
    there = not script or Path(directory, script).exists()
    return HostReport(package_version(), Path(directory).is_dir(), there)


class _Input:
    """The lines on stdin.

    Attributes:
        ended: True once there will be no more.
        heard: when something came last, in monotonic seconds.
    """

    def __init__(self) -> None:
        self.ended = False
        self.heard = time.monotonic()
        self._rest = b""

    def first(self) -> dict[str, Any] | None:
        """Waits for the first line; returns None where there is none."""
        while not self.ended:
            for line in self.read():
                return line
        return None

    def read(self) -> Iterator[dict[str, Any]]:
        """Reads what is there, at least one byte, and yields the lines that say something."""
        data = os.read(sys.stdin.fileno(), 1 << 16)
        self.ended, self.heard = not data, time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from [json.loads(line) for line in lines if line]


def _run(order: Order, lines: _Input) -> int:
    """Runs a task until it ends, or the launcher is gone."""
    told = dict(order.variables)
    kept = []
    if order.token:
        kept.append(_token_file(order.token))
        told["PS_TOKEN_FILE"] = f"/proc/self/fd/{kept[0]}"
    command = [sys.executable, "-P", "-m", order.program]
    server = order.program == "psserver"
    if not server:
        command += ["--die-with-parent", str(os.getpid())]
    try:
        process = subprocess.Popen(
            [*command, *order.arguments],
            stdin=subprocess.PIPE if server else subprocess.DEVNULL,  # a server ends with it
            env=child_environ(order.tasks, None, told),
            cwd=order.directory,
            pass_fds=kept,
            process_group=0,
        )
    except OSError as error:
        sys.stderr.write(f"psworker: error: cannot start the task: {error}\n")
        return 2
    _attend(process, lines, order.silence)
    if process.poll() is None:
        _end(process, signal.SIGTERM if server else signal.SIGHUP)
    _kill_group(process)  # what it has started holds ssh's pipes open
    code = exit_code(process.wait())
    return HIGH if code == LOST else code


def _token_file(token: str) -> int:
    file = os.memfd_create("token")
    os.write(file, token.encode("ascii"))
    return file


def _attend(process: subprocess.Popen[bytes], lines: _Input, silence: float) -> None:
    """Hands signals on; returns when the task has ended, or the launcher is gone or silent for so many seconds."""
    ended = os.pidfd_open(process.pid)
    try:
        while not lines.ended and time.monotonic() - lines.heard < silence:
            left = max(lines.heard + silence - time.monotonic(), 0.0)
            ready, _, _ = select.select([sys.stdin.fileno(), ended], [], [], left)
            if ended in ready:
                return
            for line in lines.read() if ready else ():
                _hand_on(process, line["signal"])
    finally:
        os.close(ended)


def _hand_on(process: subprocess.Popen[bytes], number: int) -> None:
    if number == signal.SIGKILL:
        _kill_group(process)
    else:
        process.send_signal(number)


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    """Ends a task: by a signal, and after a while by another one."""
    process.send_signal(number)
    try:
        process.wait(TERM_SECONDS)
    except subprocess.TimeoutExpired:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main())
