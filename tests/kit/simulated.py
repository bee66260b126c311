"""Jobs in simulated time: the real servers, chief and workers, while a test makes them fail.

    with World(servers=3, copies=1) as job:
        job.rounds(20)           # simulated time passes until each worker has made 20 more rounds
        job.kill(PS1)
        job.until(lambda: job.gone == {1})
        job.finish()             # all end well, and every contribution that was answered has counted once

Two runs are equal; `seed` draws how long steps take, and so which messages cross.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import count
from math import inf
from random import Random
from typing import Any, Self
from unittest import mock

import numpy as np

from psclient._src.chief import standby
from psclient._src.processes import sigterm
from psclient._src.processes.sigterm import Leaving, Notice
from psserver.execution.compiled import CompiledRound
from pstesting.simulation.clients import SimulatedChief, SimulatedProcess, SimulatedWorker, simulated_time
from pstesting.simulation.clusters import Cluster
from pstesting.simulation.costs import Costs, TransportCosts
from pstesting.simulation.host_sums import HostSums
from pstesting.simulation.machines import Host
from pstesting.simulation.scheduler import Scheduler, UnlockedFuture
from pstesting.simulation.servers import SimulatedServer
from pstesting.simulation.workloads import Workload
from tests.kit import internals as inside
from tests.kit.internals import Kernels, Outgoing, Plan, PSError, ServerStatus, SnapshotOrder, Task, Timeouts
from tests.kit.programs import kept_kernels

log = logging.getLogger("psclient.chief")

US = 1e-6
FREE = Costs(
    {"tcp": TransportCosts(*[0.0] * 10)}, step=0.0, step_variable=0.0, round=0.0, round_variable=0.0, kernel_byte=0.0,
    apply_byte=0.0, row=0.0, step_row=0.0, vote=0.0, call=0.0, heartbeat=0.0,
)  # fmt: skip
"""Nothing but links takes time."""

COSTS = Costs(
    {"tcp": TransportCosts(50 * US, 0.0, 100 * US, 0.0, 40 * US, 0.0, 60 * US, 0.0, 20 * US, 30 * US)},
    step=200 * US, step_variable=0.0, round=300 * US, round_variable=0.0, kernel_byte=0.0, apply_byte=0.0,
    row=0.0, step_row=0.0, vote=20 * US, call=50 * US, heartbeat=50 * US,
)  # fmt: skip

QUICK = Timeouts(
    session_timeout=2.0,
    heartbeat_interval=0.25,
    call_timeout=60.0,
    round_timeout=120.0,
    report_interval=0.5,
    chief_timeout=120.0,
    start_timeout=120.0,
)
"""Simulated seconds."""

BASE = 1000.0
"""Worker n contributes this to the power of n: the digits of a sum count the contributions of each worker."""

SOON = 60.0
"""Simulated seconds within which all must happen that a test waits for."""

TENSOR = inside.TensorSpec("float64", (4,))
"""What lies on a server."""

_places = count()


@cache
def _kernels() -> Kernels:
    """Those of all simulated servers, for arrays of any size: rounds of small ones compile as those of large ones."""
    return kept_kernels(patience=1, smallest=0)


@cache
def _kernels_for(workers: int) -> Kernels:
    """The same, with all that rounds of so many workers need: in simulated time none would be ready."""
    kernels, plan = _kernels(), Workload(1, tensor=TENSOR).plan
    for contributors in range(1, workers + 1):
        inside.PreparedPlan(plan, 0).batches(kernels, contributors)
    kernels.compiler.wait()
    return kernels


class Told(Notice):
    """That a simulated process was told to end."""

    def told(self, grace: float) -> None:
        """SIGTERM has come."""
        self._asked_at, self._grace = sigterm.time.monotonic(), grace

    def leave(self) -> None:
        """Ends the process where it stands."""
        raise Leaving


class TrainingWorker(SimulatedWorker):
    """A worker that trains until the job says how many rounds it makes; notes what each of them has left.

    Attributes:
        made: by round, the value that all variables have after it, where it has looked.
        count, last: number of rounds that it has made; the last of them.
        joined: the round with which it began; None before.
        chief: the chief that it has become, if it has.
        left: True once it has left, as it was told to end.
        hangs: what it waits for before it contributes again; its heartbeats go on.
    """

    def __init__(self, job: World, task: Task, host: Host) -> None:
        near = HostSums(job.scheduler, job.cluster, 1)
        super().__init__(job.scheduler, host, job.servers, job.cluster, job.members, task, 0, job._made, near)
        if not job.cluster.copied:
            self.lines[0]._decides = True
        for line in self.lines:
            line._silence = job.cluster.timeouts.server_timeout
        self.made: dict[int, float] = {}
        self.count, self.last = 0, -1
        self.joined: int | None = None
        self.chief: DrivingChief | None = None
        self.hangs: Future[None] | None = None
        self.left = False
        self.group.departure.notice = self._notice = Told()
        self.group.departure.hand_over = self._hand_over
        self.session.drive = self._take_the_chief_s_place
        self._job = job

    def _script(self) -> None:
        workload, reads = self._cluster.workload, self.exchange.reads
        self.session.open()
        self.session.await_job()
        create, tensor = self.exchange.creation.create, workload.tensor
        variables = [create(spec, where, np.zeros(tensor.shape, tensor.dtype)) for spec, where in workload.created]
        self.exchange.creation.send()
        mine = np.full(tensor.shape, BASE**self.task.index, tensor.dtype)
        for variable in variables:
            reads.read(variable)
        try:
            self._train(variables, mine)
        except Leaving:
            self.left = True
        self.exchange.settle()
        self.session.leave()
        if self.chief is not None:
            if self._notice.leaving:
                self.chief.chief.steps_down.tell()
            self._job.scheduler.wait([self.chief.over])

    def _train(self, variables: Sequence[Any], mine: Any) -> None:
        job, workload, reads = self._job, self._cluster.workload, self.exchange.reads
        while self.group.round < job.last:
            self.spend(workload.step * job.luck.uniform(0.5, 1.5))
            self.exchange.begin_run()
            self.exchange.enter(workload.plan)
            if self.joined is None:
                self.joined = self.group.round
            round = self.group.round
            if round >= job.last:
                break
            if self.hangs is not None:
                job.scheduler.wait([self.hangs])
            self.exchange.send(self._outgoing(workload.plan, (mine,) * len(variables)))
            if job.looks:
                values = {float(x) for variable in variables for x in np.unique(np.asarray(reads.read(variable)))}
                assert len(values) == 1, f"round {round} counts on some variables only: {values}"
                self.made[round] = values.pop()
            self.count, self.last = self.count + 1, round
            self._made(self.task)

    def tell(self) -> None:
        """It gets SIGTERM."""
        self._notice.told(self._cluster.timeouts.termination_grace)
        for index in self.session.hosting.live:
            self._job.scheduler.spawn(partial(self.session.heartbeat_now, index))

    def _hand_over(self, path: str, state: str, returns: int) -> None:
        servers = tuple(range(len(self._job.servers)))
        self.exchange.settle()
        self._job.saves.add(self.group.round)
        plan = Plan(snapshot=SnapshotOrder(path, servers, self.group.round, state, returns))
        self.exchange.send(self._outgoing(plan, ()))

    def _outgoing(self, plan: Plan, values: Sequence[Any]) -> Outgoing:
        return Outgoing(plan, (1.0,) * len(values), tuple(values), ())

    def _take_the_chief_s_place(self) -> None:
        """As `Deputy`: server 0 says that nobody drives the job."""
        if self.chief is None:
            self.chief = DrivingChief(self._job, self.task, self.strand.host, takes_over=True)
            self.chief.begin()

    def kill(self) -> None:
        super().kill()
        if self.chief is not None:
            self.chief.kill()


class DrivingChief(SimulatedChief):
    """A chief; with `takes_over` beside the script of a worker, and with `stands_by` once nobody else drives.

    Attributes:
        over: answered once it has ended.
        drives: True while it drives, and does not stand by.
    """

    def __init__(self, job: World, task: Task, host: Host, takes_over: bool = False, stands_by: bool = False) -> None:
        super().__init__(job.scheduler, host, job.servers, job.cluster, job.spec)
        timeouts = job.cluster.timeouts
        silence = timeouts.server_timeout
        if job.cluster.copied:
            silence = min(silence, timeouts.session_timeout + 0.5)
        for line in self.lines:
            line._silence = silence
        self.chief.task = task
        self.over: Future[None] = UnlockedFuture()
        self.drives = False
        self._job, self._task, self._takes_over, self._stands_by = job, task, takes_over, stands_by

    def _script(self) -> None:
        try:
            while not self._drives():
                if standby.stand_by(self.lines, self._task, self._job.cluster.timeouts, False) == "over":
                    break
                self._takes_over, self._stands_by = True, False
        finally:
            self.over.set_result(None)

    def _drives(self) -> bool:
        """Drives the job to its end; returns False where another process does, whose end it awaits."""
        if self._stands_by:
            return False
        if self._takes_over:
            log.warning("the chief is down: %s takes over as chief", self._task)
        self.drives = True
        try:
            self.chief.drive(self._takes_over, waits=not self._takes_over)
        except inside.TaskTaken:
            self.drives = False
            if self._task.job == "chief":
                return False
            self._job.workers[self._task].chief = None
        return True


class World:
    """A job, its time, and what a test does to it; a context manager within which all happens.

    Args:
        servers, workers: how many.
        copies: servers beside the first that hold each variable.
        step: mean seconds between two rounds of a worker.
        consistency: how workers make their rounds.
        timeouts: of the job.
        slow: by worker, how many times longer its work takes.
        seed: draws how long steps take.

    Attributes:
        scheduler: the simulated time.
        servers: the newest process of each server.
        workers, chief: the newest process of each other task.
        lives: all processes of workers that there were.
        deaths: how often each task was killed.
        looks: False while workers do not look at variables between two rounds; a server that reads has no values.
        saves: the rounds that only saved what a server gets that comes back.
        compiled: how many rounds the servers have run as they were compiled, each of its own.
    """

    def __init__(
        self,
        servers: int = 2,
        workers: int = 2,
        copies: int = 1,
        step: float = 0.03,
        consistency: inside.Consistency = inside.SYNC,
        timeouts: Timeouts = QUICK,
        slow: Mapping[int, float] | None = None,
        seed: int = 0,
    ) -> None:
        workload = Workload(servers, step=step, copies=copies, tensor=TENSOR)
        self.cluster = Cluster(
            workers, workload, COSTS, consistency=consistency, timeouts=timeouts,
            root=f"memory://simulated-{next(_places)}",
        )  # fmt: skip
        self.last, self.luck = inf, Random(seed)  # as many rounds as there are until `finish`
        self.scheduler = Scheduler()
        counts = {"ps": servers, "worker": workers, "chief": 1}
        self.spec = inside.ClusterSpec({job: [f"{job}:1"] * count for job, count in counts.items()})
        self.members = self.spec.tasks("worker")
        self.lives: list[TrainingWorker] = []
        self.deaths: dict[Task, int] = defaultdict(int)
        self.workers: dict[Task, TrainingWorker] = {}
        self.saves: set[int] = set()
        self.looks = True
        self.compiled = 0
        self._slow = slow or {}
        self._stack = ExitStack()
        self._held: dict[int, list[Callable[[], object]]] = {}  # work on files that waits
        self._server_lives: dict[int, int] = defaultdict(int)

    def __enter__(self) -> Self:
        kernels = _kernels_for(len(self.members))
        self._stack.callback(self.scheduler.close)
        self._stack.enter_context(simulated_time(self.scheduler))
        self._stack.enter_context(mock.patch("secrets.randbits", self.luck.getrandbits))  # two runs are equal
        self._stack.enter_context(mock.patch("psserver.core.core.Kernels", return_value=kernels))
        self._stack.enter_context(mock.patch.object(CompiledRound, "run", self._counted(CompiledRound.run)))
        self.servers: list[SimulatedServer] = []
        for index in range(self.cluster.workload.servers):
            self.servers.append(self._server(index))
        self.chief = self._client(Task("chief", 0))
        for task in self.members:
            self._client(task)
        return self

    def __exit__(self, *rest: object) -> None:
        self._stack.close()

    def _counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(compiled: CompiledRound, *args: Any) -> Any:
            found = run(compiled, *args)
            self.compiled += found is not None
            return found

        return counted

    # ---- Processes ----

    def _host(self) -> Host:
        return Host(self.scheduler)

    def _server(self, index: int) -> SimulatedServer:
        made = SimulatedServer(self.scheduler, self._host(), index, self.cluster, self._server_lives[index])
        self._server_lives[index] += 1
        made.others = self.servers
        made.core._files = partial(self._work_on_files, made)
        return made

    def _work_on_files(self, server: SimulatedServer, piece: Callable[[], object]) -> None:
        if server.index in self._held:
            self._held[server.index].append(partial(server._files, piece))
        else:
            server._files(piece)

    def _client(self, task: Task) -> Any:
        if task.job == "chief":
            self.chief = DrivingChief(self, task, self._host())
            self.chief.begin()
            return self.chief
        worker = TrainingWorker(self, task, self._host())
        worker.strand.slow = self._slow.get(task.index, 1.0)
        self.workers[task] = worker
        self.lives.append(worker)
        worker.begin()
        return worker

    def process(self, task: Task) -> Any:
        """The newest process of a task."""
        if task.job == "ps":
            return self.servers[task.index]
        return self.chief if task.job == "chief" else self.workers[task]

    def kill(self, *tasks: Task) -> None:
        """Kills the newest process of each task, all at the same moment."""
        for task in tasks:
            self.deaths[task] += 1
            self.process(task).kill()

    def tell_to_end(self, *tasks: Task) -> None:
        """The newest process of each task gets SIGTERM."""
        for task in tasks:
            if task.job == "chief":
                self.chief.chief.steps_down.tell()
            else:
                self.workers[task].tell()

    def start(self, *tasks: Task) -> None:
        """Starts a new process of each task."""
        for task in tasks:
            if task.job == "ps":
                self.servers[task.index] = self._server(task.index)
            else:
                self._client(task)

    def pause(self, server: Task) -> None:
        """A server stands still: it is silent, and not gone."""
        self.process(server).pause()

    def resume(self, server: Task) -> None:
        """It goes on."""
        self.process(server).resume()

    def stand_by(self) -> DrivingChief:
        """Starts one more process of the chief's task, which stands by."""
        chief = DrivingChief(self, Task("chief", 0), self._host(), stands_by=True)
        chief.begin()
        return chief

    def hang(self, worker: Task) -> None:
        """A worker does not come to its next contribution any more; its heartbeats go on."""
        self.workers[worker].hangs = UnlockedFuture()

    def go_on(self, worker: TrainingWorker) -> None:
        """It does."""
        assert worker.hangs is not None
        hangs, worker.hangs = worker.hangs, None
        hangs.set_result(None)

    def hold_files(self, server: Task) -> None:
        """A server reads and writes no files, until `let_read`."""
        self._held[server.index] = []

    def let_read(self, server: Task) -> None:
        """It does."""
        for work in self._held.pop(server.index):
            work()

    def fail(self, server: Task, variable: int, always: bool = False) -> None:
        """The memory of a server fails: the next value of a variable has another bit; or every one, from now on."""
        store = self.servers[server.index].core.machine.job.store
        commit = store.commit

        def failing(values: Mapping[int, Any]) -> None:
            commit(values)
            if variable in values:
                value = store.find(variable).array.copy()
                store._values[variable] = inside.Dense(value)
                value.view("uint64")[0] ^= 1 << 40
                if not always:
                    store.commit = commit  # type: ignore[method-assign]

        store.commit = failing  # type: ignore[method-assign]

    def cut(self, one: Task, other: Task) -> None:
        """Two servers do not reach each other any more."""
        self.servers[one.index].cut(other.index)
        self.servers[other.index].cut(one.index)

    def mend(self, one: Task, other: Task) -> None:
        """They do again."""
        self.servers[one.index].mend(other.index)
        self.servers[other.index].mend(one.index)

    # ---- Time ----

    def until(self, true: Callable[[], object], limit: float = SOON) -> None:
        """Lets time pass until something is true; fails where that takes some seconds, or cannot happen any more."""
        self.scheduler.run(lambda: bool(true()), self.scheduler.now + limit)

    def wait(self, seconds: float) -> None:
        """Lets some seconds pass."""
        until = self.scheduler.now + seconds
        self.scheduler.at(until, lambda: None)
        self.until(lambda: self.scheduler.now >= until)

    def rounds(self, more: int, *tasks: Task) -> None:
        """Lets time pass until some workers, by default all that are alive, have made some more rounds."""
        living = tasks or [task for task, worker in self.workers.items() if worker.alive]
        wanted = {task: self.workers[task].count + more for task in living}
        self.until(lambda: all(self.workers[task].count >= wanted[task] for task in wanted))

    def _made(self, task: Task) -> None:
        """A worker has made a round."""

    # ---- What is seen ----

    @property
    def round(self) -> int:
        """The last round that any worker has made."""
        return max((worker.last for worker in self.lives), default=-1)

    @property
    def steps(self) -> int:
        """The training steps of a job that has ended: what a worker has contributed that was always there."""
        return int(self.last) - len(self.saves)

    def status(self, server: Task) -> ServerStatus:
        """What a server says of itself."""
        return self.servers[server.index].core.status()

    @property
    def gone(self) -> set[int]:
        """The servers without which the workers that are alive go on, as each of them knows."""
        known = [worker.session.hosting.gone for worker in self.workers.values() if worker.alive]
        return set(frozenset.intersection(*known)) if known else set()

    def is_back(self, *servers: Task) -> bool:
        """Whether all go on with servers, each of which has its variables: then others may be lost."""
        for server in servers:
            status = self.status(server)
            if server.index in self.gone or status.incarnation not in status.incarnations or status.recovering:
                return False
        processes = [worker.session for worker in self.workers.values() if worker.alive]
        processes += [self.chief.chief._session] if self.chief.alive and self.chief.drives else []
        return all(server.index not in process.hosting.gone for process in processes for server in servers)

    def failures(self) -> dict[Task, PSError]:
        """With what processes have ended that were not killed."""
        found: dict[Task, SimulatedProcess] = {**self.workers, Task("chief", 0): self.chief}
        return {task: process.failure for task, process in found.items() if process.failure is not None}

    # ---- The end ----

    def finish(self, more: int = 8, *, chief: bool = True) -> list[int]:
        """Lets the job end after some more rounds; returns how many contributions of each worker have counted.

        Every process has to end well, each round has counted on all variables or on none, and a contribution counts
        once if it was answered, and at most once if not.
        """
        self.last = min(self.last, self.round + 1 + more)
        living = [worker for worker in self.workers.values() if worker.alive]
        self.until(lambda: not any(worker.alive for worker in living))
        if chief and len(living) == len(self.members):  # else it waits for the others
            self.until(lambda: not self.chief.alive)
        assert self.failures() == {}
        return self.check()

    def check(self) -> list[int]:
        """Checks what all processes of workers have seen, and what the servers hold; see `finish`."""
        assert self.compiled, "no round was compiled, as most of a real job are"
        seen: dict[int, set[float]] = defaultdict(set)
        for worker in self.lives:
            for round, value in worker.made.items():
                seen[round].add(value)
        assert all(len(values) == 1 for values in seen.values()), "workers have seen different values of a round"
        total = max((value for values in seen.values() for value in values), default=0.0)
        for server in self.servers:
            held = [n for n, (_, where) in enumerate(self.cluster.workload.created) if server.index in where]
            status = server.core.status()
            if server.alive and not server._paused and status.incarnation in status.incarnations:
                found = {float(x) for n in held for x in np.asarray(server.core.machine.job.store.find(n).array)}
                assert found == {total}, f"server {server.index} holds {found}, and workers have seen {total}"
        counted = []
        for task in self.members:
            times = int(total // BASE**task.index % BASE)
            answered = sum(worker.count for worker in self.lives if worker.task == task)
            assert answered <= times <= answered + self.deaths[task], (task, times, answered, self.deaths[task])
            counted.append(times)
        return counted


def with_lease(lease: float, **more: float) -> Timeouts:
    """The timeouts of a job, with another lease."""
    return replace(QUICK, session_timeout=lease, **more)
