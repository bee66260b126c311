"""Simulated workers and chiefs: their own code, which stands still where it waits."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from psclient._src.arrays.devices import Device
from psclient._src.chief import checkpoints, driver, hung_members, losses, returns, standby
from psclient._src.chief.driver import Chief
from psclient._src.network import hosting, lease, patience
from psclient._src.network.patience import Deadline, Patience, until_free
from psclient._src.network.session import Session
from psclient._src.processes import sigterm
from psclient._src.rounds import counters, creation, first_values, read_cache, rounds
from psclient._src.rounds.membership import Group
from psclient._src.rounds.rounds import Exchange, Outgoing
from psserver.core import core
from psserver.programs.kernels import compiler
from pstesting.simulation.clusters import Cluster
from pstesting.simulation.host_sums import HostSums
from pstesting.simulation.machines import Host, Strand
from pstesting.simulation.scheduler import Process, Scheduler, UnlockedFuture
from pstesting.simulation.servers import RESET_SECONDS, Line, SimulatedServer
from pstesting.simulation.workloads import TINY
from pswire.api import Opened
from pswire.cluster import ClusterSpec, Task
from pswire.errors import PSError
from pswire.network.futures import settle
from pswire.telemetry import reminder

T = TypeVar("T")

TIMED = (
    *(counters, checkpoints, creation, driver, first_values, hosting, hung_members, losses, patience, read_cache),
    *(lease, reminder, returns, sigterm, standby),
)
"""Modules that look at the clock."""

WAITING = (checkpoints, driver, hosting, lease, returns, rounds)
"""Modules that wait for futures."""

CONNECTED = {
    hosting: ("RemoteServer", "elsewhere", "expect", "look_again", "follow_moves"),
    returns: ("elsewhere", "expect"),
    losses: ("elsewhere",),
    driver: ("expect",),
    standby: ("expect", "look_again", "follow_moves"),
}
"""Modules that handle connections, and what they do with them."""

THREADED = (driver, lease)
"""Modules that make calls in threads."""


def _look_again(line: Line) -> None:
    if line.failed:
        line.begin_anew()
        line.expect()


CONNECTIONS: dict[str, Any] = {
    "RemoteServer": Line,
    "elsewhere": lambda line, address, call=None: line.elsewhere(address),
    "expect": Line.expect,
    "look_again": _look_again,
    "follow_moves": lambda servers, moved: [],
}
"""The same, done with `Line`; servers of a simulation do not move."""


class SimulatedThreads:
    """Stands for `Threads`: each call is a process of the simulation."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler = scheduler

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """As `Threads.submit`."""
        future: Future[T] = UnlockedFuture()
        self._scheduler.spawn(partial(settle, future, work))
        return future

    def close(self) -> None:
        """Does nothing."""


@contextmanager
def simulated_time(scheduler: Scheduler) -> Iterator[None]:
    """Within it the code of clients and chiefs sees the simulation's clock, and waits in its processes."""
    clock = types.SimpleNamespace(
        monotonic=lambda: scheduler.now,
        perf_counter=lambda: scheduler.now,
        time=lambda: scheduler.now,
        sleep=scheduler.sleep,
    )
    with ExitStack() as stack:
        # Compilers work beside it, in threads, and arrays are tiny.
        stack.enter_context(mock.patch.object(compiler, "MAX_KERNELS", 0))
        stack.enter_context(mock.patch.object(core, "Future", UnlockedFuture))
        for module in TIMED:
            stack.enter_context(mock.patch.object(module, "time", clock))
        for module in WAITING:
            stack.enter_context(mock.patch.object(module, "wait", scheduler.wait))
        for module, names in CONNECTED.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, CONNECTIONS[name]))
        for module in THREADED:
            stack.enter_context(mock.patch.object(module, "Threads", lambda name: SimulatedThreads(scheduler, name)))
        yield


class SimulatedSession(Session):
    """A session of a simulated process: it stands still where it waits, and its heartbeats are events."""

    def __init__(self, scheduler: Scheduler, process: SimulatedProcess, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._scheduler, self._process = scheduler, process
        self._patience = Patience(
            self.timeouts.session_timeout, self.timeouts.heartbeat_interval, lambda: scheduler.now
        )
        self._standing: set[Process] = set()
        self._broken.add_done_callback(self._wake)

    def _wake(self, _: Future[None]) -> None:
        """Tells those that wait that the session has ended."""
        for process in self._standing:
            process.wake()

    def end(self, error: PSError) -> None:
        """As `Session.end`, which may ask servers: in a process of its own where none runs."""
        if self._scheduler.runs:
            super().end(error)
        else:
            self._scheduler.spawn(partial(super().end, error))

    def _start_beating(self, index: int) -> None:
        self._patience.heard(index)
        life, number = self.hosting.life(index), self.number

        def heartbeat() -> None:
            while self._process.alive and index not in self.hosting.gone and self._is_now(index, life, number):
                self._scheduler.sleep(self.timeouts.heartbeat_interval)
                try:
                    self.heartbeat_now(index)
                    self._patience.heard(index)
                except PSError as error:
                    if self._is_now(index, life, number):
                        self._unheard(index, error)

        self._scheduler.spawn(heartbeat)

    def heartbeat_now(self, index: int, by_itself: bool = False) -> None:
        """As `Session.heartbeat_now`: a process that stands still in it keeps its lock."""
        while self._beating[index].locked():
            self._scheduler.sleep(self.timeouts.heartbeat_interval / 100)
        super().heartbeat_now(index, by_itself)

    def _open_first(self, key: int) -> Opened:
        ended: Any = types.SimpleNamespace(wait=self._scheduler.sleep)
        return until_free(partial(self._open_at, self.log_server, key), self.timeouts, ended)

    def wait(
        self,
        future: Future[T],
        deadline: Deadline,
        late: Callable[[], PSError],
        word: Callable[[], str],
        needs_chief: Callable[[], bool] = lambda: True,
    ) -> T:
        """As `Session.wait`, without words."""
        process = self._scheduler.current
        while not future.done():
            self.check()
            until = self._scheduler.now + self.timeouts.report_interval
            self._standing.add(process)
            process.stand(until, (future,))
            self._standing.discard(process)
            if self._scheduler.now >= until and deadline.left() <= 0:
                raise late()
            self.hosting.look_for_returns(self._threads, self.job, self.take_back)
        return self._take(future)


class SimulatedProcess:
    """A client process.

    Attributes:
        strand: its thread.
        alive: True until it is killed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        host: Host,
        servers: Sequence[SimulatedServer],
        decides: bool = False,
        silence: float = inf,
    ) -> None:
        self.scheduler = scheduler
        self.strand = Strand(host, self)
        self.lines: list[Any] = [Line(server, host, self.strand, decides, silence) for server in servers]
        self.failure: PSError | None = None
        self._process: Process | None = None

    @property
    def alive(self) -> bool:
        """True until it ends or is killed."""
        return self.strand.alive

    def has_ended(self) -> bool:
        """Returns True once it has ended or was killed."""
        return not self.strand.alive

    def begin(self) -> None:
        """Starts it."""
        self._process = self.scheduler.spawn(self._run)

    def kill(self) -> None:
        """Ends it where it stands; whoever waits for it is not told."""
        self.strand.stop()
        self._part()
        if self._process is not None:
            self._process.kill()

    def _run(self) -> None:
        try:
            self._script()
        except PSError as error:
            self.failure = error
            self._part()
        self.strand.alive = False

    def _part(self) -> None:
        """Its connections end."""
        for line in self.lines:
            self.scheduler.after(RESET_SECONDS, line.end)

    def _script(self) -> None:
        raise NotImplementedError

    def spend(self, seconds: float) -> None:
        """Computes for some seconds."""
        done: Future[None] = UnlockedFuture()
        self.strand.do(seconds, done.set_result, None)
        self.scheduler.wait([done])


class SimulatedWorker(SimulatedProcess):
    """A worker that trains for a number of rounds.

    Args:
        scheduler, host, servers: as of `SimulatedProcess`.
        cluster: the cluster.
        members: all workers of the job, in order.
        task: the worker's.
        rounds: the rounds that it makes.
        made: called with its task when a round is over for it.
        near: the workers of its host.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        host: Host,
        servers: Sequence[SimulatedServer],
        cluster: Cluster,
        members: Sequence[Task],
        task: Task,
        rounds: int,
        made: Callable[[Task], object],
        near: HostSums,
    ) -> None:
        super().__init__(scheduler, host, servers)
        self.task, self._cluster = task, cluster
        self._rounds, self._made = rounds, made
        self.session = SimulatedSession(
            scheduler,
            self,
            task,
            self.lines,
            1,
            False,
            cluster.timeouts,
            cluster.consistency,
            copied=cluster.copied,
        )
        self.group = Group(self.session, (Device.parse("cpu:0"),), members)
        self.exchange = Exchange(self.session, self.group)
        if cluster.local_reduction:
            self.exchange.sum_with(near.join(self.strand, self.exchange))  # type: ignore[arg-type]

    def _script(self) -> None:
        self.session.open()
        self.session.await_job()
        create, workload, costs = self.exchange.creation.create, self._cluster.workload, self._cluster.costs
        variables = [create(spec, where, np.zeros(TINY.shape, TINY.dtype)) for spec, where in workload.created]
        self.exchange.creation.send()
        outgoing = Outgoing(workload.plan, (1.0,) * len(variables), workload.contributions, ())
        compute = workload.step + costs.step + workload.variables * costs.step_variable
        if workload.ids:
            compute += costs.step_table + workload.ids * costs.step_row
        reads = self.exchange.reads
        for variable in variables:
            reads.read(variable)
        while self.group.round < self._rounds:
            self.spend(compute)
            self.exchange.enter(workload.plan)
            self.exchange.send(outgoing)
            for variable in variables:
                reads.read(variable)
            self._made(self.task)
        self.exchange.settle()
        self.session.leave()


class SimulatedChief(SimulatedProcess):
    """A chief that only drives.

    Args:
        scheduler, host, servers: as of `SimulatedProcess`.
        cluster: the cluster.
        spec: its tasks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        host: Host,
        servers: Sequence[SimulatedServer],
        cluster: Cluster,
        spec: ClusterSpec,
    ) -> None:
        super().__init__(scheduler, host, servers, decides=True)
        owner = self

        class Driving(Chief):
            """A chief whose sessions are simulated."""

            def _begin(self) -> None:
                super()._begin()
                self._returns._clock = self._differences._clock = lambda: scheduler.now

            def _new_session(self) -> Session:
                return SimulatedSession(
                    scheduler,
                    owner,
                    self.task,
                    self._servers,
                    0,
                    True,
                    self._timeouts,
                    job=self._job,
                    copied=self._copied,
                )

        self.chief = Driving(Task("chief", 0), self.lines, spec, cluster.timeouts, copied=cluster.copied)

    def _script(self) -> None:
        self.chief.drive()
