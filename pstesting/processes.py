"""Clusters of real processes. A program is a function of a test module, and the script of each worker.

A program speaks with `say` and waits at a `gate`; its test hears with `hear` and opens gates with `open`. So
neither has to guess how long the other takes.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from psclient._src.config import child_environ
from psclient._src.launch.cluster import NAME_ONLY, Cluster
from psclient._src.launch.outcome import Outcome
from psclient._src.network.remote_server import RemoteServer
from psclient._src.processes.output import Line
from psclient._src.processes.process import Process, spawn
from pswire.cluster import Task
from pswire.limits import Timeouts
from pswire.server_options import ServerOptions

SECONDS = 180.0
"""Time limit of a test's waits: far longer than they take where twenty processes share two cores."""

LAST_WORDS = 10.0
"""Seconds until what an ended process has printed is here."""

QUICK = Timeouts(
    session_timeout=2.0,
    heartbeat_interval=0.25,
    call_timeout=60.0,
    round_timeout=120.0,
    report_interval=0.5,
    chief_timeout=120.0,
    start_timeout=120.0,
)
"""For tests that wait until a lease has ended: all other waits are far longer."""

MARGIN = 20.0
"""Seconds beside a lease, within which its end is known on a machine that others use: what has ended a wait by then is
the lease, and none of the other timeouts."""

CALM = Timeouts(
    session_timeout=60.0,
    heartbeat_interval=0.25,
    call_timeout=60.0,
    round_timeout=180.0,
    report_interval=0.5,
    chief_timeout=120.0,
    start_timeout=120.0,
)
"""For tests in which none may end: other tests share the machine."""

CHIEF = Task("chief", 0)
W0, W1, W2 = (Task("worker", index) for index in range(3))
PS0, PS1 = (Task("ps", index) for index in range(2))

_HEAD = """
from __future__ import annotations
import faulthandler
import sys
import time
sys.path += [path for path in {path!r} if path not in sys.path]
from pstesting import faults
import numpy as np
import psclient as ps
from pstesting.faults import Faults, Stall
from pstesting.script import *
faulthandler.enable()
"""


class ProcessCluster:
    """A local cluster of real processes that runs a program; a context manager that ends them all.

    Args:
        program: a function of literals; its source becomes the script of each worker. It may use the names of
            `pstesting.script`, `faults`, `np` and `ps`, and everything that its test can import.
        directory: directory for the script, its gates and its checkpoints.
        args: arguments of the program: literals.
        helpers: other functions that the program calls, also passed as source.
        gates: names of the gates at which the program waits.
        between: the addresses, in order, at which servers connect to each other, for their own `TF_CONFIG`; by default
            those at which they listen.
        servers_environ: additional environment variables of servers.
        launcher: starts the cluster, such as `functools.partial(HostCluster, hosts, where)`.
        keys: attributes of the cluster, by the names of its YAML file: `ps`, `workers`, `chief`, `restarts`,
            `transport`, `timeouts`, ...

    Attributes:
        cluster: the cluster's processes.
    """

    def __init__(
        self,
        program: Callable[..., object],
        directory: Path,
        args: Sequence[Any] = (),
        helpers: Sequence[Callable[..., object]] = (),
        gates: Collection[str] = (),
        between: Sequence[str] = (),
        servers_environ: Mapping[str, str] = MappingProxyType({}),
        launcher: Callable[..., Cluster] = Cluster,
        **keys: Any,
    ) -> None:
        sources = [textwrap.dedent(inspect.getsource(function)) for function in (*helpers, program)]
        head = _HEAD.format(path=sys.path)
        call = f"{program.__name__}(*{tuple(args)!r})\n"
        script = directory / "program.py"
        script.write_text("\n\n".join([head, *sources, call]), encoding="utf-8")
        self._gates = {name: _make_gate(directory / name) for name in gates}
        self._news = threading.Condition()  # guards the two below
        self._lines: list[Line] = []
        self._heard: dict[tuple[Task, bool], int] = {}
        root = ServerOptions(checkpoint_root=str(directory / "checkpoints"))
        given = {"script": str(script), "chief": "none", "timeouts": CALM, "server": root, **keys}
        jobs = {"ps": list(between), "worker": [NAME_ONLY]}
        config = json.dumps({"cluster": jobs, "task": {"type": "ps", "index": 0}})  # --task says which
        more = {**servers_environ, **({"TF_CONFIG": config} if between else {})}
        self.cluster = launcher(sink=self._take, **given)
        self.cluster.server_environ = more

    def __enter__(self) -> ProcessCluster:
        self.cluster.start()
        return self

    def __exit__(self, *rest: object) -> None:
        self.cluster.stop()
        for pipe in self._gates.values():
            os.close(pipe)

    @property
    def runners(self) -> list[Task]:
        """The tasks that run the program."""
        script = self.cluster.config.chief == "script"
        return [task for task in self.cluster.clients() if task.job == "worker" or script]

    def kill(self, task: Task, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a task; after SIGKILL waits for its end."""
        self.cluster.kill(task, number)

    def pause(self, task: Task) -> None:
        """Stops a task's process: it does not answer, but its connections stay open."""
        self.kill(task, signal.SIGSTOP)

    def resume(self, task: Task) -> None:
        """Continues a paused process."""
        self.kill(task, signal.SIGCONT)

    def start(self, task: Task) -> None:
        """Starts a task again after its end."""
        self.cluster.start_task(task)

    def stray(self, task: Task, **variables: str) -> Process:
        """Starts a second process of a task, with these environment variables, while the first one runs."""
        kept, self.cluster.client_environ = self.cluster.client_environ, variables
        try:
            return self.cluster._client(task)
        finally:
            self.cluster.client_environ = kept

    def join(self, task: Task, *flags: str, server: Task = PS0, **variables: str) -> None:
        """Starts one more worker, which joins the job at a server, as `psworker --join` does.

        Args:
            task: the name of the worker in the test; the servers may assign another index.
            flags: additional flags of `psworker`.
            server: the server to contact.
            variables: additional environment variables.
        """
        cluster = self.cluster
        command = [sys.executable, "-P", "-m", "psclient", "--join", cluster.addresses[server], *flags]
        told = cluster._options.variables() | variables
        environ = child_environ(cluster.config.workers + 1, cluster.config.timeouts, told)
        command += ["--", cluster.config.script, *cluster.config.args]
        cluster.processes[task] = spawn(command, environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        cluster._restarts.started(task, time.monotonic())
        cluster._listen(task)

    # ---- What its processes say ----

    def hear(self, task: Task, what: str, value: Any = None, seconds: float = SECONDS) -> Any:
        """Waits for a message of a task; earlier messages are discarded.

        Args:
            task: the task.
            what: the word of the message.
            value: the value of the message; None for any.
            seconds: time limit.

        Returns:
            The value.
        """
        return self._await(task, False, lambda line: _said(line, what, value), f"{what!r}", seconds)

    def hear_error(self, task: Task, text: str, seconds: float = SECONDS) -> str:
        """Waits until a task prints a line with this text on stderr; returns the line."""

        def match(line: Line) -> tuple[str] | None:
            return (line.text,) if line.error and text in line.text else None

        line: str = self._await(task, True, match, text, seconds)
        return line

    def said(self, task: Task, what: str) -> list[Any]:
        """Returns the values of all messages of a task with one word."""
        with self._news:
            lines = [line for line in self._lines if line.task == task]
        return [found[0] for line in lines if (found := _said(line, what, None))]

    def errors(self, task: Task) -> str:
        """Returns everything that a task has printed on stderr."""
        with self._news:
            return "\n".join(line.text for line in self._lines if line.task == task and line.error)

    def until(self, true: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Waits until a condition is true, for example one on a server's status."""
        until(true, seconds, self._transcript)

    def open(self, gate: str) -> None:
        """Opens a gate for all tasks."""
        os.write(self._gates[gate], b"." * 64)

    def _take(self, line: Line) -> None:
        with self._news:
            self._lines.append(line)
            self._news.notify_all()

    def _await(
        self, task: Task, error: bool, match: Callable[[Line], tuple[Any] | None], what: str, seconds: float
    ) -> Any:
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                ended = self.cluster.processes[task].poll() is not None
                start = self._heard.get((task, error), 0)
                for index, line in enumerate(self._lines[start:], start):
                    found = match(line) if line.task == task else None
                    if found:
                        self._heard[task, error] = index + 1
                        return found[0]
                if ended:
                    deadline = min(deadline, time.monotonic() + LAST_WORDS)
                if time.monotonic() > deadline:
                    break
                self._news.wait(0.2)
        self._abort()
        time.sleep(1)  # until the lines are here
        raise AssertionError(f"{task} did not print {what} in time, or has ended: {self._transcript()}")

    def _transcript(self) -> str:
        """What was printed last; what is said again and again is said once."""
        lines = [f"{line.task} {'E' if line.error else ' '} {line.text}" for line in self._lines]
        return "\n".join(line for line, before in list(zip(lines, ["", *lines], strict=False))[-300:] if line != before)

    def _abort(self) -> None:
        """Ends the programs that still run; each says where its threads stand."""
        for task in self.runners:
            if self.cluster.processes[task].poll() is None:
                self.kill(task, signal.SIGABRT)

    # ---- How it ends ----

    def finish(self, seconds: float = SECONDS) -> Outcome:
        """Waits until all processes have ended; fails unless each ended itself with code 0."""
        late = threading.Timer(seconds, self._abort)
        late.start()
        try:
            outcome = self.cluster.wait(seconds + LAST_WORDS)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self._transcript()}") from None
        finally:
            late.cancel()
        assert outcome == Outcome(0), f"{outcome.report}\n{self._transcript()}"
        codes = {str(task): process.returncode for task, process in self.cluster.processes.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{self._transcript()}"
        assert "did not end by itself" not in self._transcript()
        return outcome

    @contextmanager
    def server(self, task: Task) -> Iterator[RemoteServer]:
        """Returns a separate connection for the test, to read a server's status."""
        security = self.cluster.security(self.cluster.clients()[0])
        server = RemoteServer(self.cluster.addresses[task], task, security=security)
        try:
            yield server
        finally:
            server.close()

    def exited(self, task: Task, seconds: float = SECONDS) -> int:
        """Waits until a task's process has ended; returns its code."""
        return self.cluster.processes[task].wait(seconds)


def _said(line: Line, what: str, value: Any) -> tuple[Any] | None:
    if line.error or not line.text.startswith("{"):
        return None
    data = json.loads(line.text)
    return (data[what],) if what in data and value in (None, data[what]) else None


def _make_gate(path: Path) -> int:
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)


def until(true: Callable[[], bool], seconds: float, otherwise: Callable[[], str]) -> None:
    """Waits until something is true; fails with a text if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"the condition did not hold within {seconds:g} s: {otherwise()}")
        time.sleep(0.02)
