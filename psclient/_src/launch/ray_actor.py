"""One task of a cluster on Ray: the actor beside it, and what stands for it in the driver.

Ray ends actors with their driver, and with their node. The actor holds the pipes of an agent, which ends its task with
them: so a task never outlives the driver.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from psclient._src.launch.agent import LOST, MODULE, HostReport, Order, found_here
from psclient._src.launch.remote_cluster import Said, code_of_task, said_to_agent
from pswire.errors import ConfigError, PSError


@dataclass(frozen=True)
class NodeReport(HostReport):
    """The report of a node of Ray.

    Attributes:
        host, address: its name, and its address.
        port: a port that is free there.
        where: the directory in which tasks run.
    """

    host: str
    address: str
    port: int
    where: str


READ_BYTES = 1 << 16
"""Bytes of output that one call brings."""


def ray_package() -> Any:
    """Returns the package Ray, which is an extra; raises `ConfigError` if it is not installed."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError("Ray is not installed; in the clone: pip install -e '.[ray]'") from error
    return ray


class AgentActor:
    """Runs an agent on its node, and hands on what both say. Ray calls it in several threads at once."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._begun = threading.Event()

    def look(self, directory: str, script: str) -> NodeReport:
        """Tells where this is, and what is there.

        Args:
            directory: that of the driver.
            script: the path of what tasks run.

        Returns:
            The report, for the directory of Ray's `working_dir` if the script is there, else for the driver's.
        """
        own = os.getcwd()
        where = own if script and os.path.exists(os.path.join(own, script)) else directory
        address = ray_package().util.get_node_ip_address()
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        return NodeReport(
            **vars(found_here(where, script)), host=socket.gethostname(), address=address, port=port, where=where
        )

    def begin(self, order: Order) -> int:
        """Starts the agent with its order; returns the number of its process."""
        pipe = subprocess.PIPE
        command = [sys.executable, "-P", "-m", MODULE]
        self._agent = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)
        self._write(said_to_agent(order))
        self._begun.set()
        return self._agent.pid

    def say(self, line: bytes) -> None:
        """Hands a line on to the agent; before it is there, waits for it."""
        self._begun.wait()
        self._write(line)

    def _write(self, line: bytes) -> None:
        assert self._agent is not None
        assert self._agent.stdin is not None
        try:
            self._agent.stdin.write(line)
        except OSError:
            pass  # it has ended, which `hear` tells

    def hear(self) -> tuple[bytes, bytes, int | None]:
        """Waits until the task prints something, or ends.

        Returns:
            What it printed on stdout and on stderr, and the agent's exit code once it has ended.
        """
        self._begun.wait()
        agent = self._agent
        assert agent is not None
        open_pipes = [pipe for pipe in (agent.stdout, agent.stderr) if pipe and not pipe.closed]
        if not open_pipes:
            return b"", b"", agent.wait()
        ready, _, _ = select.select(open_pipes, [], [])
        said = {agent.stdout: b"", agent.stderr: b""}
        for pipe in ready:
            said[pipe] = os.read(pipe.fileno(), READ_BYTES)
            if not said[pipe]:
                pipe.close()
        return said[agent.stdout], said[agent.stderr], None


Prepared = tuple[Any, Order]
"""The handle of an `AgentActor`, and the order of its agent."""


class RayTask:
    """A task that runs beside an actor, with the face of a process. `poll` and the like may be called in any thread.

    Args:
        prepare: makes the actor, which nobody else uses afterwards; called in another thread with a function that
            tells whether nobody waits for it any more. The order has the token: it travels through Ray, as arguments of
            calls do.
        lost: what to say of an actor that is lost, before Ray's reason.
    """

    stdin: IO[bytes] | None = None

    def __init__(self, prepare: Callable[[Callable[[], bool]], Prepared], lost: Callable[[], str]) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._prepare, self._lost = prepare, lost
        self._actor: Any = None
        self._given_up, self._ended = threading.Event(), threading.Event()
        pipes = os.pipe(), os.pipe()
        self.stdout, self.stderr = (os.fdopen(reads, "rb", 0) for reads, _ in pipes)
        self._writes = tuple(writes for _, writes in pipes)
        threading.Thread(target=self._follow, name="a task on Ray", daemon=True).start()

    def poll(self) -> int | None:
        """Its return code; None as long as it runs, or waits for a place."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; raises `subprocess.TimeoutExpired` after so many seconds."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a task on Ray", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        """Sends a signal to the task; one that is not there yet will not come."""
        if self._actor is None:
            self._given_up.set()
        self.say({"signal": number})

    def say(self, what: Said) -> None:
        """Sends a line to the agent."""
        if self._actor is not None and self.returncode is None:
            self._actor.say.remote(said_to_agent(what))

    def give_up(self) -> None:
        """Ends the actor, and with it the agent and its task."""
        self._given_up.set()
        if self._actor is not None:
            ray_package().kill(self._actor)

    def _follow(self) -> None:
        """Starts the agent, and hands on what the task prints until it has ended; whatever fails, it has an end."""
        ray, code = ray_package(), None
        try:
            self._actor, order = self._prepare(self._given_up.is_set)
            self.pid = ray.get(self._actor.begin.remote(order))
            while code is None:
                out, err, code = ray.get(self._actor.hear.remote())
                self._print(out, err)
        except (ray.exceptions.RayError, PSError) as error:
            self._print(b"", f"psworker: {self._lost()}: {last_line(error)}\n".encode())
        finally:
            self._end(LOST if code is None else code)

    def _end(self, code: int) -> None:
        for pipe in self._writes:
            os.close(pipe)
        try:
            if self._actor is not None:
                ray_package().kill(self._actor)  # its resources are free for the next one
        finally:
            self.returncode = code_of_task(code)
            self._ended.set()

    def _print(self, *said: bytes) -> None:
        for pipe, data in zip(self._writes, said, strict=True):
            try:
                while data:
                    data = data[os.write(pipe, data) :]
            except OSError:
                pass  # nobody reads it any more


def last_line(error: Exception) -> str:
    """The last line of an error: Ray's begin with traces of other processes."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
