"""One process of a local cluster: how it is started, heard of, and ended."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Protocol

from psclient._src.config import LOCAL_HOST, child_environ
from pswire.cluster import Task
from pswire.errors import ConfigError, Unreachable
from pswire.limits import Timeouts
from pswire.options import flag_name
from pswire.security.identity import SecurityOptions
from pswire.server_options import ServerOptions
from pswire.telemetry import logging_setup
from pswire.variables import TF_CONFIG

log = logging.getLogger("psclient")

popen: type[subprocess.Popen[bytes]] = subprocess.Popen
"""Starts a process. `pstesting.forks` has another one, which tests put here."""


class Process(Protocol):
    """A process that we have started: one of this machine (`subprocess.Popen`), or what stands for one elsewhere."""

    @property
    def pid(self) -> int:
        """Its number, on the machine where it runs."""

    @property
    def returncode(self) -> int | None:
        """As `poll` found it last."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """The pipe to its stdin, if there is one."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """The pipe from its stdout, if there is one."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """The pipe from its stderr, if there is one."""

    def poll(self) -> int | None:
        """Its exit code, less than 0 where a signal killed it; None as long as it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; raises `subprocess.TimeoutExpired` after so many seconds."""

    def send_signal(self, number: int, /) -> None:
        """Sends a signal to it, if it still runs."""


def start_server(
    task: int = 0,
    port: int = 0,
    options: ServerOptions | None = None,
    *,
    until_done: bool = True,
    timeouts: Timeouts | None = None,
    flags: Sequence[str] = (),
    stderr: int | None = None,
    security: SecurityOptions | None = None,
) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a server on this machine and waits until it listens.

    It ends when its stdin is closed, which the death of this process does.

    Args:
        task: index of the ps task.
        port: port to listen on; 0 picks one.
        options: flags that are not arguments here.
        until_done: True if the server ends with the job.
        timeouts: time limits that it is started with; None leaves the environment's.
        flags: more flags of `psserver`.
        stderr: as in `subprocess.Popen`.
        security: certificate and token that it is started with; None leaves the environment's.

    Returns:
        The process, with pipes as stdin and stdout, and its `host:port`.

    Raises:
        ConfigError: the server refused its flags.
        Unreachable: the server did not listen in time.
    """
    flags = [*flags, "--until-done"] if until_done else flags
    more = security.variables() if security else None
    process = spawn_server(Task("ps", task), port, options or ServerOptions(), timeouts, flags, stderr, more=more)
    try:
        return process, address_in(await_listening(process, Task("ps", task), timeouts or Timeouts()))
    except BaseException:
        process.kill()
        process.wait()
        raise


def spawn_server(
    task: Task,
    port: int,
    options: ServerOptions,
    timeouts: Timeouts | None,
    flags: Sequence[str],
    stderr: int | None,
    tasks: int = 1,
    more: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a server that ends with its stdin; `-P` keeps the user's files from shadowing modules."""
    command = [sys.executable, "-P", "-m", "psserver", *server_arguments(task, LOCAL_HOST, port, options), *flags]
    return spawn(command, child_environ(tasks, timeouts, more), stdin=subprocess.PIPE, stderr=stderr)


def spawn_client(arguments: Sequence[str], environ: Mapping[str, str], early: bool) -> subprocess.Popen[bytes]:
    """Starts a task that is no server; it ends with the thread that calls this.

    Args:
        arguments: of `psworker`.
        environ: its environment.
        early: True for one that imports what it needs and waits for `tell_cluster`, since no server listens yet.
    """
    command = [sys.executable, "-P", "-m", "psclient", "--die-with-parent", str(os.getpid())]
    known = {name: value for name, value in environ.items() if name != TF_CONFIG or not early}
    stdin = subprocess.PIPE if early else subprocess.DEVNULL
    return spawn([*command, *(["--early"] if early else []), *arguments], known, stdin=stdin, stderr=subprocess.PIPE)


def tell_cluster(process: Process | None, tf_config: str) -> bool:
    """Gives a process that was started early the value of `TF_CONFIG`; returns False if it does not wait for one."""
    if process is None or not process.stdin or process.stdin.closed:
        return False
    with suppress(OSError), process.stdin:  # it may have ended, which `Cluster.wait` notices
        process.stdin.write(f"{tf_config}\n".encode())
    return True


def server_arguments(task: Task, host: str, port: int, options: ServerOptions) -> list[str]:
    """Returns the arguments of `psserver` for a server that ends with its stdin."""
    return ["--task", str(task.index), *_arguments(host, port, options)]


def waiting_server_arguments(servers: Sequence[str], host: str, port: int, options: ServerOptions) -> list[str]:
    """Returns the arguments of `psserver` for one that waits for the place of a server, and ends with its stdin.

    Args:
        servers: the addresses of the job's servers, in their order.
        host: the address that it listens on.
        port: the port that it listens on.
        options: its other options.
    """
    return ["--join", ",".join(servers), *_arguments(host, port, options)]


def _arguments(host: str, port: int, options: ServerOptions) -> list[str]:
    arguments = ["--lifeline", "--host", host, "--port", str(port)]
    for name, value in vars(options).items():
        arguments += [flag_name(name), str(value)]
    return arguments


def spawn(command: list[str], environ: dict[str, str], stdin: int, stderr: int | None) -> subprocess.Popen[bytes]:
    """A process group for each process: Ctrl-C reaches them through us, once, and strays die with them."""
    return popen(command, bufsize=0, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, env=environ, process_group=0)


def await_listening(process: Process, task: Task, timeouts: Timeouts) -> str:
    """Reads and returns the line that a server prints when it listens.

    Raises:
        ConfigError: the server ended instead.
        Unreachable: the server did not print the line in time.
    """
    assert process.stdout is not None  # we asked for the pipe
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    deadline = time.monotonic() + timeouts.start_timeout
    while not poll.poll(1000 * max(min(deadline - time.monotonic(), timeouts.report_interval), 0.0)):
        if time.monotonic() >= deadline:
            raise Unreachable(
                f"the server did not listen within {timeouts.start_timeout:g} s (PS_START_TIMEOUT), though its process "
                "runs; if the machine is busy, raise the limit, else read the server's output",
                str(task),
            )
        log.warning("waiting for %s to listen", task)
    line = process.stdout.readline().decode()
    if not line:
        code = process.wait()
        said = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
        last = said.splitlines()[-1] if said else "see its output"
        why = str((logging_setup.read(last) or {"message": last.removeprefix("psserver: error: ")})["message"])
        raise ConfigError(f"the server did not start ({describe_exit(code)}): {why}", str(task))
    return line.rstrip()


def address_in(line: str) -> str:
    """The `host:port` in the line that a server prints when it listens."""
    return line.split(" listening on ")[1].split()[0]


def send(process: Process, number: int) -> None:
    """Sends a signal; SIGKILL to all that the process has started, too."""
    if number != signal.SIGKILL:
        process.send_signal(number)
        return
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def exit_code(returncode: int) -> int:
    """A shell's exit code for a process's return code: 128 + signal where one killed it."""
    return 128 - returncode if returncode < 0 else returncode


def describe_exit(returncode: int) -> str:
    """In words: `exit code 3`, `killed by SIGKILL`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
