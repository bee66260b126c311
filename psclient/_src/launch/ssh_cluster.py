"""A cluster of processes on several hosts, each started through ssh, and ended with its connection.

A `RemoteTask` is the ssh that runs the agent of one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join as as_words

from psclient._src.config import LaunchConfig, own_environ
from psclient._src.launch.agent import LOST, MODULE, HostReport, Order
from psclient._src.launch.hosts_file import Host
from psclient._src.launch.remote_cluster import (
    SILENCE_SECONDS,
    RemoteCluster,
    Said,
    TaskLocation,
    code_of_task,
    said_to_agent,
)
from psclient._src.processes.output import Line
from pswire.cluster import Task
from pswire.errors import ConfigError

OPTIONS = (
    *("-T", "-x", "-a"),
    *("-o", "BatchMode=yes"),  # nobody is there who could type a password
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
"""Options of every ssh: no terminal, nothing forwarded, and an end where the other host is silent for 20 seconds."""


@dataclass(frozen=True)
class RemoteShell:
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

    def __init__(self, command: Sequence[str], order: Order) -> None:
        pipe = subprocess.PIPE
        super().__init__(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=own_environ(), process_group=0)
        self.say(order)

    def say(self, what: Said) -> None:
        """Sends a line to the agent. Never waits for long."""
        if self.stdin and not self.stdin.closed:
            with contextlib.suppress(OSError):  # the connection is gone: its end tells
                self.stdin.write(said_to_agent(what))

    def send_signal(self, number: int) -> None:
        """Sends a signal to the task, and not to ssh."""
        if self.poll() is None:
            self.say({"signal": number})

    def poll(self) -> int | None:
        """As of a process of this machine: less than 0 where a signal killed it."""
        code = super().poll()
        if code is not None:
            self.returncode = code_of_task(code)
        return self.returncode

    def give_up(self) -> None:
        """Kills ssh: what it runs ends by itself, since its stdin does."""
        super().send_signal(signal.SIGKILL)


class SshCluster(RemoteCluster):
    """A cluster on several hosts, which ssh reaches.

    The chief and the evaluator run on the first host.

    Args:
        hosts: the hosts, through which tasks are numbered in order.
        remote: how they are reached.
        config: as of `Cluster`; the hosts say how many servers and workers there are.
        sink: as of `Cluster`.
    """

    lost = "the ssh connection to {} was lost"

    def __init__(
        self,
        hosts: Sequence[Host],
        remote: RemoteShell,
        config: LaunchConfig,
        sink: Callable[[Line], None] | None = None,
    ) -> None:
        counts = {"ps": sum(host.ps for host in hosts), "workers": sum(host.worker for host in hosts)}
        super().__init__(config, sink, remote.silence, **counts)
        self.remote = remote
        self._where = {
            Task(job, index): host
            for job in ("ps", "worker")
            for index, host in enumerate(host for host in hosts for _ in range(host.count(job)))
        }
        self._hosts = tuple(hosts)

    def start(self) -> None:
        """Looks whether all hosts can run tasks, and starts these; returns when the servers listen.

        Raises:
            ConfigError: a host cannot be reached, or cannot run a task; it names the host. Or as of `RemoteCluster`.
            Unreachable: a server did not listen in time.
        """
        check_hosts(self._hosts, self.remote, self.config.script, self.config.timeouts.start_timeout)
        super().start()

    def place(self, task: Task) -> TaskLocation:
        """Where a task runs."""
        host = self._host(task)
        return TaskLocation(host.name, host.address, host.listen, os.getcwd(), host.ps + host.worker)

    def _host(self, task: Task) -> Host:
        return self._where.get(task, self._hosts[0])

    def _begin(self, task: Task, order: Order) -> RemoteTask:
        return RemoteTask(self.remote.command(self._host(task)), order)


def check_hosts(hosts: Sequence[Host], remote: RemoteShell, script: str, seconds: float) -> None:
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
                    f"{host.name} did not answer through ssh within {seconds:g} s (PS_START_TIMEOUT); try "
                    f"{as_words([*remote.ssh, *host.target, 'true'])}"
                ) from None
            _judge(host, remote, look.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
    finally:
        for look in looks:
            look.kill()
            look.communicate()


def _judge(host: Host, remote: RemoteShell, code: int, out: str, err: str) -> None:
    """Raises `ConfigError` if a host, which has answered so, cannot run tasks."""
    said = (err.strip().splitlines() or ["it printed nothing"])[-1]
    if code == LOST:
        raise ConfigError(
            f"cannot reach {host.name} by ssh: {said}; it needs a key and a known host, because passwords are not "
            f"supported: try {as_words([*remote.ssh, '-o', 'BatchMode=yes', *host.target, 'true'])}"
        )
    if code in (126, 127):
        raise ConfigError(
            f"{host.name} has no Python at {remote.python} ({said}); give its path with --remote-python PATH"
        )
    if "No module named" in said:
        raise ConfigError(
            f"{remote.python} on {host.name} does not have this package ({said}); install it there, or give another "
            "Python with --remote-python"
        )
    try:
        answer = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ConfigError(f"{host.name} cannot run tasks (exit code {code}): {said}") from None
    # Another version may say more.
    found = HostReport(answer["version"], answer["directory"], answer["script"])
    found.check_version(host.name, "this machine")
    if not found.directory:
        raise ConfigError(
            f"{host.name} does not have the directory {Path.cwd()}, in which tasks run; create it, or start psworker "
            "in a directory that all hosts have"
        )
    if not found.script:
        raise ConfigError(f"{host.name} has the directory {Path.cwd()}, but not the script in it; copy it there")
