"""A cluster of processes on several hosts, each started through ssh, and ended with its connection.

`Cluster` watches, replaces and ends them as those of this machine; a `RemoteTask` is the ssh that runs one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join as as_words
from typing import Any

from psclient._src.config import LaunchConfig, handed_to_hosts, own_environ
from psclient._src.launch.agent import LOST, MODULE, package_version
from psclient._src.launch.cluster import POLL_SECONDS, TERM_SECONDS, Cluster
from psclient._src.launch.hosts_file import Host
from psclient._src.launch.outcome import Failure
from psclient._src.processes.output import Line
from psclient._src.processes.process import await_listening, server_arguments
from pswire.cluster import Task, check_address, join_address
from pswire.errors import ConfigError, Unreachable

OPTIONS = (
    *("-T", "-x", "-a"),
    *("-o", "BatchMode=yes"),  # nobody is there who could type a password
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
"""Options of every ssh: no terminal, nothing forwarded, and an end where the other host is silent for 20 seconds."""

BEAT_SECONDS = 5.0
"""Seconds between two signs of life that an agent gets."""

SILENCE_SECONDS = 30.0
"""Seconds without one after which an agent ends its task."""

FATAL = tuple(128 + number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE))
"""Exit codes that mean that a signal has killed a task: no script ends by itself with them."""


@dataclass(frozen=True)
class Remote:
    """How hosts are reached.

    Attributes:
        ssh: the command, with its options.
        python: the Python that runs the tasks there, in whose environment this package is.
        silence: seconds without a word from the launcher after which a task is ended.
    """

    ssh: tuple[str, ...] = ("ssh",)
    python: str = sys.executable
    silence: float = SILENCE_SECONDS

    def command(self, host: Host) -> list[str]:
        """The command that runs an agent on a host."""
        return [*self.ssh, *OPTIONS, *host.target, as_words(["exec", self.python, "-P", "-m", MODULE])]


class RemoteTask(subprocess.Popen[bytes]):
    """The ssh that runs a task on another host. Its return code is that of the task.

    Args:
        command: the command line of ssh.
        order: the agent's order; with the token, which goes through the pipe.
    """

    def __init__(self, command: Sequence[str], order: Mapping[str, Any]) -> None:
        pipe = subprocess.PIPE
        super().__init__(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=own_environ(), process_group=0)
        self.say(order)

    def say(self, what: Mapping[str, Any] | None) -> None:
        """Sends a line to the agent; None for one that only says that we are there. Never waits for long."""
        if self.stdin and not self.stdin.closed:
            with contextlib.suppress(OSError):  # the connection is gone: its end tells
                self.stdin.write(b"\n" if what is None else json.dumps(what).encode() + b"\n")

    def send_signal(self, number: int) -> None:
        """Sends a signal to the task, and not to ssh."""
        if self.poll() is None:
            self.say({"signal": number})

    def poll(self) -> int | None:
        """As of a process of this machine: less than 0 where a signal killed it."""
        code = super().poll()
        if code in FATAL:
            self.returncode = 128 - code
        return self.returncode

    def end_ssh(self) -> None:
        """Kills ssh: what it runs ends by itself, since its stdin does."""
        super().send_signal(signal.SIGKILL)


class SshCluster(Cluster):
    """A cluster on several hosts; a context manager that leaves nothing behind, on none of them.

    The chief and the evaluator run on the first host. This machine has to reach the servers, too.

    Args:
        hosts: the hosts, through which tasks are numbered in order.
        remote: how they are reached.
        config: as of `Cluster`; the hosts say how many servers and workers there are.
        sink, more, servers_more: as of `Cluster`.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        remote: Remote,
        config: LaunchConfig,
        sink: Callable[[Line], None] | None = None,
        more: Mapping[str, str] | None = None,
        servers_more: Mapping[str, str] | None = None,
    ) -> None:
        counts = {"ps": sum(host.ps for host in hosts), "workers": sum(host.worker for host in hosts)}
        super().__init__(config, sink, more, servers_more, **counts)
        self.remote = remote
        self._where = {
            Task(job, index): host
            for job in ("ps", "worker")
            for index, host in enumerate(host for host in hosts for _ in range(host.count(job)))
        }
        self._hosts = tuple(hosts)
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="signs of life", daemon=True)

    def start(self) -> None:
        """Looks whether all hosts can run tasks, and starts these; returns when the servers listen.

        Raises:
            ConfigError: a host cannot be reached, or cannot run a task; it names the host. Or as of `Cluster`.
            Unreachable: a server did not listen in time.
        """
        check_hosts(self._hosts, self.remote, self.config.script, self.config.timeouts.start)
        self._beats.start()
        super().start()

    def stop(self, grace: float = TERM_SECONDS, number: int = signal.SIGTERM) -> None:
        """As of `Cluster`."""
        super().stop(grace, number)
        self._over.set()

    def host(self, task: Task) -> Host:
        """The host that runs a task."""
        return self._where.get(task, self._hosts[0])

    def kill(self, task: Task, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one task; SIGKILL is waited for, as long as the connection may take to notice."""
        self.processes[task].send_signal(number)
        if number == signal.SIGKILL:
            self._end_at_last([task])

    def _beat(self) -> None:
        while not self._over.wait(min(BEAT_SECONDS, self.remote.silence / 3)):
            for process in [*self.processes.values()]:
                _remote(process).say(None)

    # ---- Tasks ----

    def _server(self, task: Task, port: int) -> subprocess.Popen[bytes]:
        arguments = server_arguments(task, self.host(task).listen, port, self.config.server)
        return self._run(task, "psserver", arguments + self._server_flags(task), self._servers_more)

    def _client(self, task: Task) -> subprocess.Popen[bytes]:
        return self._run(task, "psclient", self._arguments(task), self._told(task) | self._more)

    def _run(self, task: Task, program: str, arguments: list[str], more: Mapping[str, str]) -> RemoteTask:
        security = {name: value for name, value in replace(self._options, token="").variables().items() if value}
        host = self.host(task)
        order = {
            "program": program,
            "arguments": arguments,
            "environ": handed_to_hosts(self.config.timeouts) | security | dict(more),
            "token": "" if self._options.token_file else self._options.token,
            "directory": os.getcwd(),
            "tasks": host.ps + host.worker,
            "silence": self.remote.silence,
        }
        return RemoteTask(self.remote.command(host), order)

    def _await_server(self, task: Task) -> str:
        try:
            return await_listening(self.processes[task], task, self.config.timeouts)
        except (ConfigError, Unreachable) as error:
            raise type(error)(f"on {self.host(task).name}: {error.message}", error.task) from error

    def _address(self, task: Task, listens: str) -> str:
        return join_address(self.host(task).address, check_address(listens, str(task))[1])

    def _name(self, task: Task) -> str:
        return join_address(self.host(task).address, 0)

    # ---- Their ends ----

    def _failure_of(self, task: Task) -> Failure:
        failure = super()._failure_of(task)
        if failure.code != LOST:
            return failure
        said = [*failure.said[-1:], f"psworker: the ssh connection to {self.host(task).name} was lost"]
        return replace(failure, said=[f"psworker: {': '.join(line.removeprefix('psworker: ') for line in said[::-1])}"])

    def _send(self, tasks: list[Task], number: int) -> None:
        for task in tasks:
            self.processes[task].send_signal(number)
        if number == signal.SIGKILL:
            self._end_at_last(tasks)

    def _end_at_last(self, tasks: list[Task]) -> None:
        """Waits for the ends of tasks that were killed; whose host does not answer is left to its agent."""
        until = time.monotonic() + TERM_SECONDS
        while any(self.processes[task].poll() is None for task in tasks) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        for task in tasks:
            if self.processes[task].poll() is None:
                _remote(self.processes[task]).end_ssh()
                self.processes[task].wait()


def _remote(process: subprocess.Popen[bytes]) -> RemoteTask:
    assert isinstance(process, RemoteTask)  # nothing else is started here
    return process


def check_hosts(hosts: Sequence[Host], remote: Remote, script: str, seconds: float) -> None:
    """Looks whether each host can run tasks, all at once.

    Args:
        hosts: the hosts.
        remote: how they are reached.
        script: path of the script that they run, "" for none.
        seconds: how long the slowest may take.

    Raises:
        ConfigError: one cannot be reached; has no such Python, working directory or script; or has not the version of
            this package that is here. It names the host, and says what to do.
    """
    order = json.dumps({"check": True, "directory": os.getcwd(), "script": script}).encode() + b"\n"
    pipe = subprocess.PIPE
    try:
        looks = [
            subprocess.Popen(
                remote.command(host), stdin=pipe, stdout=pipe, stderr=pipe, env=own_environ(), process_group=0
            )
            for host in hosts
        ]
    except OSError as error:
        raise ConfigError(f"cannot run {remote.ssh[0]}: {error.strerror}; install OpenSSH, or correct --ssh") from error
    until = time.monotonic() + seconds
    try:
        for host, look in zip(hosts, looks, strict=True):
            try:
                out, err = look.communicate(order, timeout=max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                raise ConfigError(
                    f"{host.name} did not answer through ssh within {seconds:g} s (PS_TIMEOUT_START); try "
                    f"{as_words([*remote.ssh, *host.target, 'true'])}"
                ) from None
            _judge(host, remote, look.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
    finally:
        for look in looks:
            look.kill()
            look.communicate()


def _judge(host: Host, remote: Remote, code: int, out: str, err: str) -> None:
    """Raises `ConfigError` if a host, which has answered so, cannot run tasks."""
    said = (err.strip().splitlines() or ["it says nothing"])[-1]
    if code == LOST:
        raise ConfigError(
            f"cannot reach {host.name} by ssh: {said}; no password is asked for here: it needs a key, and a known "
            f"host: try {as_words([*remote.ssh, '-o', 'BatchMode=yes', *host.target, 'true'])}"
        )
    if code in (126, 127):
        raise ConfigError(f"{host.name} has no Python at {remote.python} ({said}); say where with --remote-python PATH")
    if "No module named" in said:
        raise ConfigError(
            f"{remote.python} on {host.name} lacks this package ({said}); install it there, or say with "
            "--remote-python which Python has it"
        )
    try:
        found = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ConfigError(f"{host.name} cannot run tasks (exit code {code}): {said}") from None
    if found["version"] != package_version():
        raise ConfigError(
            f"{host.name} has paramserver {found['version']}, and this machine {package_version()}; install the same "
            "version on both"
        )
    if not found["directory"]:
        raise ConfigError(
            f"{host.name} has no directory {Path.cwd()}, in which psworker runs here, and tasks there; make it, or "
            "start psworker in one that all hosts have"
        )
    if not found["script"]:
        raise ConfigError(f"{host.name} has the directory {Path.cwd()}, and not the script in it; copy it there")
