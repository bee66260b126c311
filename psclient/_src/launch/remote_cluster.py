"""A cluster of processes on several hosts, each beside an agent there.

`Cluster` watches, replaces and ends them as those of this machine; a `RemoteProcess` stands for each. What starts the
agents, and where, is for subclasses.
"""

from __future__ import annotations

import abc
import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from psclient._src.config import LaunchConfig, handed_to_hosts
from psclient._src.launch.agent import LOST, Order
from psclient._src.launch.cluster import POLL_SECONDS, TERM_SECONDS, Cluster
from psclient._src.launch.outcome import TaskFailure
from psclient._src.processes.output import Line
from psclient._src.processes.process import Process, await_listening, server_arguments
from pswire.cluster import Task, check_address, join_address
from pswire.errors import ConfigError, Unreachable

HEARTBEAT_SECONDS = 5.0
"""Seconds between two signs of life that an agent gets."""

SILENCE_SECONDS = 30.0
"""Seconds without one after which an agent ends its task."""


FATAL = tuple(128 + number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE))
"""Exit codes of an agent that mean that a signal has killed its task: no script ends by itself with them."""


Said = Order | Mapping[str, int] | None
"""A line for an agent: an order, `{"signal": number}`, or None for one that only says that the launcher is there."""


@dataclass(frozen=True)
class TaskLocation:
    """Where a task runs.

    Attributes:
        name: the host's, for people.
        address: the name or address by which others reach servers there.
        listen: the address on which servers listen.
        directory: the working directory.
        tasks: how many tasks share the host's cores; of no meaning where the order says the numbers of threads.
    """

    name: str
    address: str
    listen: str
    directory: str
    tasks: int


class RemoteProcess(Process, Protocol):
    """A task on another host, through its agent. Its return code is that of the task, `LOST` where nobody knows."""

    def say(self, what: Said) -> None:
        """Sends a line to the agent. Never waits for long."""

    def give_up(self) -> None:
        """Ends what connects us with the agent, which ends its task then."""


class RemoteCluster(Cluster, abc.ABC):
    """A cluster on several hosts; a context manager that leaves nothing behind, on none of them.

    This machine has to reach the servers, too.

    Args:
        config, sink, keys: as of `Cluster`.
        silence: seconds without a word from this process after which a task is ended.
    """

    starts_early = False  # the stdin of a task is for orders to its agent

    lost = "the connection to {} was lost"
    """Why a task's code is `LOST`, with the name of the host."""

    def __init__(
        self,
        config: LaunchConfig,
        sink: Callable[[Line], None] | None = None,
        silence: float = SILENCE_SECONDS,
        **keys: Any,
    ) -> None:
        super().__init__(config, sink, **keys)
        self._agents: dict[Task, RemoteProcess] = {}
        self._silence = silence
        self._over = threading.Event()
        self._heartbeats = threading.Thread(target=self._heartbeat, name="signs of life", daemon=True)

    @abc.abstractmethod
    def place(self, task: Task) -> TaskLocation:
        """Where a task runs, or is to run."""

    @abc.abstractmethod
    def _begin(self, task: Task, order: Order) -> RemoteProcess:
        """Starts an agent in the place of a task, and gives it an order."""

    def start(self) -> None:
        """Starts every task; returns when the servers listen.

        Raises:
            ConfigError: a server refused its flags; the error names its host.
            Unreachable: a server did not listen in time.
        """
        self._heartbeats.start()
        super().start()

    def stop(self, grace: float = TERM_SECONDS, number: int = signal.SIGTERM) -> None:
        """As of `Cluster`."""
        super().stop(grace, number)
        self._over.set()

    def kill(self, task: Task, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one task; SIGKILL is waited for, as long as the connection may take to notice."""
        self.processes[task].send_signal(number)
        if number == signal.SIGKILL:
            self._end_at_last([task])

    def _heartbeat(self) -> None:
        while not self._over.wait(min(HEARTBEAT_SECONDS, self._silence / 3)):
            for agent in [*self._agents.values()]:
                agent.say(None)

    # ---- Tasks ----

    def _server(self, task: Task, port: int) -> RemoteProcess:
        arguments = server_arguments(task, self.place(task).listen, port, self.config.server)
        return self._run(task, "psserver", arguments + self._server_flags(task), self.server_environ)

    def _client(self, task: Task) -> RemoteProcess:
        return self._run(task, "psclient", self._arguments(task), {**self._told(task), **self.client_environ})

    def _run(self, task: Task, program: str, arguments: list[str], more: Mapping[str, str]) -> RemoteProcess:
        self._agents[task] = self._begin(task, self._order_of(task, program, arguments, more))
        return self._agents[task]

    def _order_of(self, task: Task, program: str, arguments: list[str], more: Mapping[str, str]) -> Order:
        security = {name: value for name, value in replace(self._options, token="").variables().items() if value}
        place = self.place(task)
        environ = handed_to_hosts(self.config.timeouts) | security | dict(more)
        token = "" if self._options.token_file else self._options.token
        return Order(program, arguments, environ, token, place.directory, place.tasks, self._silence)

    def _await_server(self, task: Task) -> str:
        try:
            return await_listening(self.processes[task], task, self.config.timeouts)
        except (ConfigError, Unreachable) as error:
            raise type(error)(f"on {self.place(task).name}: {error.message}", error.task) from error

    def _address(self, task: Task, listens: str) -> str:
        return join_address(self.place(task).address, check_address(listens, str(task))[1])

    def _name(self, task: Task) -> str:
        return join_address(self.place(task).address, 0)

    # ---- Their ends ----

    def _failure_of(self, task: Task) -> TaskFailure:
        failure = super()._failure_of(task)
        if failure.code != LOST:
            return failure
        said = [*failure.said[-1:], f"psworker: {self.lost.format(self.place(task).name)}"]
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
                self._agents[task].give_up()
                self._agents[task].wait()


def said_to_agent(what: Said) -> bytes:
    """Returns the line for an agent's stdin."""
    return b"\n" if what is None else json.dumps(what, default=vars).encode() + b"\n"


def code_of_task(code: int) -> int:
    """The return code of a task for the exit code of its agent: less than 0 where a signal killed it."""
    return 128 - code if code in FATAL else code
