"""A whole cluster of real processes on this machine.

`start_server` starts one server; `Cluster` starts servers and all others, and ends them. A
process that we start never outlives us: servers end when their stdin does, the others are killed by
the kernel when their parent dies.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psclient._src.config import LaunchConfig, child_environ, job_from
from psclient._src.launch.outcome import Outcome, TaskFailure
from psclient._src.launch.restarts import Replacement, Restarts
from psclient._src.processes.local_clusters import register
from psclient._src.processes.output import Line, Relay
from psclient._src.processes.process import (
    Process,
    address_in,
    await_listening,
    describe_exit,
    send,
    spawn_client,
    spawn_server,
    start_server,
    tell_cluster,
)
from psclient._src.processes.shutdown import NOT_SAVED
from pswire.cluster import Task, tf_config_for
from pswire.errors import PSError
from pswire.limits import Timeouts
from pswire.security.identity import TOKEN_BYTES, Security
from pswire.security.names import task_name
from pswire.telemetry import logging_setup
from pswire.telemetry.reminder import Reminder
from pswire.variables import JOB, LOCAL_REDUCTION, REPLICATION_FACTOR, SCRIPT_ERROR, TF_CONFIG, TRANSPORT

if TYPE_CHECKING:
    from pswire.model.status import ServerStatus

__all__ = ["Cluster", "start_server"]

EVALUATOR = Task("evaluator", 0)
"""It has no part in the training, and may go on after it."""

NAME_ONLY = "127.0.0.1:0"
"""The address of a task that does not listen."""

LEAVE_SECONDS = 10.0
"""Seconds that servers and the chief may take to end by themselves after the last worker."""

TERM_SECONDS = 5.0
"""Seconds that a process may take to end after SIGTERM."""

SETTLE_SECONDS = 0.5
"""Seconds after a failure in which others are looked at: the one that failed first may end last."""

ASK_SECONDS = 0.2
"""Seconds after the last worker after which servers that still run are asked whether there has been a job."""

POLL_SECONDS = 0.05

log = logging.getLogger("psworker")


class Cluster:
    """Servers, workers, a chief and an evaluator on this machine; a context manager that leaves nothing behind.

    Used by one thread, which must live as long as the cluster: the kernel ends what it started with it.

    Args:
        config: the tasks to start, and their options.
        sink: called with each line that a process prints, in another thread; None only keeps them.
        keys: attributes of `LaunchConfig` that win over `config`.

    Attributes:
        client_environ: environment variables of workers and the chief, beside those of this process.
        server_environ: environment variables of servers, likewise. Both are set before `start`.
    """

    starts_early = True
    """Whether other tasks start beside the servers, and hear later where these listen."""

    def __init__(
        self,
        config: LaunchConfig | None = None,
        sink: Callable[[Line], None] | None = None,
        **keys: Any,
    ) -> None:
        self.config = dataclasses.replace(config or LaunchConfig(), **keys)
        self.config.check()
        self.processes: dict[Task, Process] = {}
        self.addresses: dict[Task, str] = {}
        self._options = self.config.security
        if not (self._options.token or self._options.token_file):
            # Others on this machine are not let in.
            self._options = dataclasses.replace(self._options, token=secrets.token_hex(TOKEN_BYTES))
        self.job = job_from() or secrets.token_hex(4)
        """The identity of the job."""
        self._sink = sink
        self.client_environ: Mapping[str, str] = {}
        self.server_environ: Mapping[str, str] = {}
        self._relay: Relay | None = None
        self._file: Path | None = None  # tells psctl of this cluster
        self._heard: set[Task] = set()
        self._ended: list[Task] = []
        self._lost: list[Task] = []
        self._restarts = Restarts(self.config.restarts)
        self._signals: list[int] = []

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts every process; returns when the servers listen.

        Raises:
            ConfigError: a server refused its flags.
            Unreachable: a server did not listen in time.
        """
        self._relay = Relay(self._sink)
        try:
            servers = self.servers()
            for task in servers:
                self.processes[task] = self._server(task, 0)
            if self.starts_early:
                self.processes |= {task: self._client(task) for task in self.clients()}
            for task in servers:
                line = self._await_server(task)
                self.addresses[task] = self._address(task, address_in(line))
                self._tell(task, line, error=False)
                self._listen(task)
            self._file = register(self.config.script, *self._told_to_user())
            for task in self.clients():
                self.start_task(task)
        except BaseException:
            self.stop(grace=0.0)
            raise

    def servers(self) -> list[Task]:
        """Every server."""
        return [Task("ps", index) for index in range(self.config.ps)]

    def clients(self) -> list[Task]:
        """Every task but the servers."""
        chief = [] if self.config.chief == "none" else [Task("chief", 0)]
        workers = [Task("worker", index) for index in range(self.config.workers)]
        evaluator = [EVALUATOR] * self.config.evaluator
        return chief + workers + evaluator if self.config.script else []

    def start_task(self, task: Task) -> None:
        """Starts a task, or starts it again after its end; a server gets the port that it had."""
        if task.job == "ps":
            self.processes[task] = self._server(task, int(self.addresses[task].rpartition(":")[2]))
        elif not (self.starts_early and tell_cluster(self.processes.get(task), self.tf_config(task))):
            self.processes[task] = self._client(task)
        self._restarts.started(task, time.monotonic())
        self._listen(task)

    def tf_config(self, task: Task) -> str:
        """The value of TF_CONFIG for one task."""
        config = self.config
        jobs = {"ps": [self.addresses[task] for task in sorted(self.addresses)]}
        workers = [self._name(Task("worker", index)) for index in range(config.workers)]
        jobs |= {"worker": workers} if workers else {}
        jobs |= {} if config.chief == "none" else {"chief": [self._name(Task("chief", 0))]}
        return tf_config_for(jobs, task)

    def security(self, task: Task) -> Security:
        """Returns what a task of this cluster shows to the servers; raises `ConfigError` as `SecurityOptions.read`."""
        return self._options.read(task_name(task))

    def output(self, task: Task, error: bool = False) -> list[str]:
        """The last lines that a task printed on stdout, or with `error` on stderr."""
        return self._relay.lines(task, error) if self._relay else []

    def kill(self, task: Task, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one task; SIGKILL is waited for."""
        self.processes[task].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[task].wait()

    def interrupt(self, number: int) -> None:
        """Asks `wait` to end the cluster with a signal; at the second one it kills. For signal handlers."""
        self._signals.append(number)

    def wait(self, timeout: float | None = None) -> Outcome:
        """Waits until workers and evaluator have ended, a failure, or an interruption; then ends everything.

        Args:
            timeout: seconds after which the cluster is ended and TimeoutError raised; None for none.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        scripts = self._scripts() or list(self.processes)
        running, told = scripts, False
        reminder = Reminder(self.config.timeouts.report_interval, lambda: self._say_who_runs(running))
        while True:
            if self._signals:
                return self._interrupted()
            failed = self._failed()
            if failed and not self._replaced(failed):
                return self._failure()
            running = [task for task in scripts if self.processes[task].poll() not in (0, NOT_SAVED)]
            if not failed and not running:
                break
            if len(running) == len(scripts) or running == [EVALUATOR]:
                reminder.begin()
            reminder.look()
            if running == [EVALUATOR] and not told:
                told = True
                self._tell(EVALUATOR, f"psworker: all workers have ended; waiting for {EVALUATOR}, or press Ctrl-C")
            if deadline is not None and time.monotonic() > deadline:
                late = [str(task) for task, process in self.processes.items() if process.poll() is None]
                self.stop()
                raise TimeoutError(f"these tasks still run after {timeout:g} s: {', '.join(late)}")
            time.sleep(POLL_SECONDS)
        return self._end()

    def stop(self, grace: float = TERM_SECONDS, number: int = signal.SIGTERM) -> None:
        """Ends every process that still runs: clients first, so that they can take leave of servers.

        Args:
            grace: seconds until those that do not end are killed.
            number: the signal that asks them to end.
        """
        clients = [task for task in self.processes if task.job != "ps"]
        # At SIGTERM alone a worker would first finish its step, and leave.
        at_once = signal.SIGHUP if number == signal.SIGTERM else number
        for tasks, first in ((clients, at_once), (list(self.processes), signal.SIGTERM)):
            self._send(tasks, first)
            self._await(tasks, grace)
            self._send(tasks, signal.SIGKILL)
        for task, process in self.processes.items():
            process.wait()
            for pipe in (process.stdin, *([] if task in self._heard else (process.stdout, process.stderr))):
                if pipe:
                    pipe.close()
        if self._relay:
            self._relay.close()
        if self._file:
            self._file.unlink(missing_ok=True)

    def _told_to_user(self) -> tuple[list[str], dict[str, list[str]], dict[str, str]]:
        """Returns the servers' addresses, the cluster, and how it is secured, for psctl in any directory."""
        servers = [self.addresses[task] for task in sorted(self.addresses)]
        cluster = json.loads(self.tf_config(Task("ps", 0)))["cluster"]
        secured = {name: value for name, value in self._options.variables().items() if value}
        paths = {name: os.path.abspath(path) for name, path in secured.items() if name != "PS_TOKEN"}
        return servers, cluster, secured | paths

    # ---- On this machine; a cluster on others starts its tasks, and names them, in another way ----

    def _server(self, task: Task, port: int) -> Process:
        config, more = self.config, {**self._options.variables(), **self.server_environ}
        flags, tasks = self._server_flags(task), config.ps + config.workers
        return spawn_server(task, port, config.server, config.timeouts, flags, subprocess.PIPE, tasks, more)

    def _client(self, task: Task) -> Process:
        more = {**self._told(task), **self._options.variables(), **self.client_environ}
        environ = child_environ(self.config.ps + self.config.workers, self.config.timeouts, more)
        return spawn_client(self._arguments(task), environ, early=not self.addresses)

    def _await_server(self, task: Task) -> str:
        return await_listening(self.processes[task], task, self.config.timeouts)

    def _address(self, task: Task, listens: str) -> str:
        """The address by which others reach a server that listens at one."""
        return listens

    def _name(self, task: Task) -> str:
        """The address of a task that does not listen."""
        return NAME_ONLY

    def _server_flags(self, task: Task) -> list[str]:
        return self._flags(task) + ["--until-done"] * bool(self.config.script)

    def _arguments(self, task: Task) -> list[str]:
        """The arguments of `psworker` for a task that is no server."""
        return self._flags(task) + client_arguments(self.config, task)

    def _told(self, task: Task) -> dict[str, str]:
        """The variables that such a task gets, beside those of security."""
        sums, copies = str(int(self.config.local_reduction)), str(self.config.replication_factor)
        how = {TRANSPORT: self.config.transport, LOCAL_REDUCTION: sums, REPLICATION_FACTOR: copies}
        how |= {SCRIPT_ERROR: "leave"} if self.config.restarts else {}
        return {**how, JOB: self.job, TF_CONFIG: self.tf_config(task)}

    def _flags(self, task: Task) -> list[str]:
        """Returns what every process is told of its log and its metrics."""
        return shown_flags(self.config, [*self.servers(), *self.clients()].index(task))

    def _listen(self, task: Task) -> None:
        process, relay = self.processes[task], self._relay
        self._heard.add(task)
        if relay and process.stdout and process.stderr:
            relay.watch(process.stdout, task, error=False)
            relay.watch(process.stderr, task, error=True)

    def _scripts(self) -> list[Task]:
        return [t for t in self.clients() if t.job != "chief" or self.config.chief == "script"]

    def _failed(self) -> list[Task]:
        """Tasks that failed, in the order in which that was seen; one that has only not saved stops nobody."""
        failed = [task for task, process in self.processes.items() if process.poll() not in (None, 0, NOT_SAVED)]
        if self.config.replication_factor > 1:
            failed = self._beside_lost(failed)
        self._ended += [task for task in failed if task not in self._ended]
        return [task for task in self._ended if task in failed]

    def _beside_lost(self, failed: list[Task]) -> list[Task]:
        """Returns the failures that are more than the loss of a server, without which the job goes on.

        Where there are restarts left, it is started again, and the job readmits it. Before the job has begun it waits
        for all servers: a loss without restarts ends it.
        """
        for task in failed:
            if task.job == "ps" and task not in self._lost:
                code = self.processes[task].poll() or 0
                text = f"psworker: {task} was lost ({describe_exit(code)})"
                if self._restarts.spend({task: code}, (), time.monotonic()):
                    self._tell(task, f"{text}; restarted, {self._restarts.left} restarts left")
                    self.start_task(task)
                elif self._job_began():
                    self._lost.append(task)
                    self._tell(task, f"{text}; the job goes on with copies")
        return [task for task in failed if task not in self._lost and self.processes[task].poll() is not None]

    def _replaced(self, failed: list[Task]) -> bool:
        """Starts tasks again, if there are restarts for those of them that failed by themselves."""
        codes = {task: self.processes[task].returncode for task in failed}
        client = self._restarts.unexplained(codes)
        silent = [task for task in sorted(self.addresses) if self._ask(task) is None] if client else []
        found = silent or ([client] if client else [])
        replacements = self._restarts.spend(codes, found, time.monotonic())
        for each in replacements:
            task = each.task
            self._tell(task, _why(each, self.processes[task].poll(), self._restarts.left))
            if self.processes[task].poll() is None:
                self.kill(task)
            if task in self._ended:
                self._ended.remove(task)
            self.start_task(task)
        return bool(replacements)

    def _say_who_runs(self, running: list[Task]) -> None:
        names = ", ".join(map(str, running))
        self._tell(running[0], f"psworker: waiting for {names} to end; all other scripts have ended")

    def _tell(self, task: Task, text: str, error: bool = True) -> None:
        if error and logging_setup.structured():
            log.warning("%s", text.removeprefix("psworker: "))
        elif self._sink:
            self._sink(Line(task, error, text))

    def _end(self) -> Outcome:
        """After the last worker the others end by themselves, but for those that wait for a job that nobody begins.

        If they do not, a job has not come to its end.
        """
        self._await(list(self.processes), ASK_SECONDS)
        began = self._job_began()
        self._await(list(self.processes), LEAVE_SECONDS if began else 0.0)
        running = [task for task, process in self.processes.items() if process.poll() is None]
        for task in running if began else ():
            self._tell(task, f"psworker: {task} did not end after the last worker, and was stopped")
        if self._failed():
            return self._failure()
        unsaved = [task for task, process in self.processes.items() if process.poll() == NOT_SAVED]
        if unsaved:
            self.stop()
            return self._failure_of(unsaved[0]).outcome
        if running and self._signals:
            return self._interrupted()
        self.stop()
        return Outcome(1, None, _unfinished(running)) if running and began else Outcome(0)

    def _job_began(self) -> bool:
        """Returns whether workers may have taken part in a job: a script may do without one."""
        left = next((task for task in self.addresses if self.processes[task].poll() is None), None)
        status = None if left is None else self._ask(left)
        return status is None or status.generation is not None

    def _ask(self, task: Task) -> ServerStatus | None:
        """Returns what a server says of itself; None where it does not answer."""
        from psclient._src.network.remote_server import RemoteServer  # with gRPC and NumPy, seldom needed here

        security = self.security(self.clients()[0])
        server = RemoteServer(self.addresses[task], task, Timeouts(call_timeout=TERM_SECONDS), security=security)
        with closing(server), suppress(PSError):
            return server.status()
        return None

    def _failure(self) -> Outcome:
        """Ends the cluster; who failed by itself is blamed before those that failed because it did."""
        self._await(list(self.processes), SETTLE_SECONDS)
        failed = self._failed()
        self.stop()
        return min(map(self._failure_of, failed), key=lambda failure: failure.blame).outcome

    def _failure_of(self, task: Task) -> TaskFailure:
        return TaskFailure(task, self.processes[task].poll() or 0, self.output(task, error=True))

    def _interrupted(self) -> Outcome:
        number = self._signals[0]
        self.stop(number=number)
        return Outcome(128 + number)

    def _send(self, tasks: list[Task], number: int) -> None:
        for task in tasks:
            if self.processes[task].poll() is None:
                send(self.processes[task], number)

    def _await(self, tasks: list[Task], seconds: float) -> None:
        """Waits until the processes have ended; a second interruption ends the waiting."""
        deadline = time.monotonic() + seconds
        while any(self.processes[task].poll() is None for task in tasks):
            if time.monotonic() > deadline or len(self._signals) > 1:
                return
            time.sleep(POLL_SECONDS)


def client_arguments(config: LaunchConfig, task: Task) -> list[str]:
    """Returns the arguments of `psworker` for a task that is no server, after those of `shown_flags`."""
    runs = task.job != "chief" or config.chief == "script"
    module = ["--module", config.module] if config.module and task.job == "worker" else []
    flags = ["--save-on-sigterm"] * config.save_on_sigterm + module
    return flags + (["--", config.script, *config.args] if runs else [])


def shown_flags(config: LaunchConfig, place: int) -> list[str]:
    """Returns what a process is told of its log and its metrics; `place` is its number among all tasks."""
    flags = ["--debug"] * config.debug + ["--log-format", config.log_format, "--traces", config.traces]
    flags += ["--log-level", config.log_level] if config.log_level else []
    if config.metrics_port is not None:
        port = config.metrics_port + place if config.metrics_port else 0
        flags += ["--metrics-port", str(port), "--metrics-host", config.metrics_host]
    return flags


def _why(replacement: Replacement, code: int | None, left: int) -> str:
    how = "it does not answer" if code is None else describe_exit(code)
    if not replacement.counts:
        return (
            f"psworker: {replacement.task} ended because a server was lost ({how}); restarted, without using a restart"
        )
    return f"psworker: {replacement.task} failed ({how}); restarted, {left} restarts left"


def _unfinished(running: list[Task]) -> str:
    return (
        f"psworker: {', '.join(map(str, running))} was stopped {LEAVE_SECONDS:g} s after the last worker, because a "
        "worker did not leave the job cleanly"
    )
