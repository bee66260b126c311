"""Workers in threads of this process, which go on when a test says so, and those of a coordinator; and the script of
real ones."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

import psclient as ps
from psclient._src import values
from psclient._src.data.distributed import DistributedDataset, DistributedDatasetFromFunction
from psclient._src.options import InputContext
from psclient._src.processes.aggregation.sums import OwnPush, part_of, sum_of
from psclient._src.rounds.membership import Group
from psclient.coordinator import functions
from psclient.coordinator import worker as served
from pstesting.in_process import InProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit import internals as inside
from tests.kit.internals import ALIGN, Examples, Member, Mode, Payload, Position, RoundReply, Task, TensorSpec, Timeouts
from tests.kit.internals import ClientDevice as Device
from tests.kit.rig import SOON, WORKERS, Job


class Worker:
    """One worker of a group in this process; `do_round` is what a round of all workers does."""

    def __init__(self, first: int = 0, local: int = 1, replicas: int = 1, at: Position | None = None) -> None:
        self.devices = tuple(Device("cpu", index) for index in range(local))
        self.where = (first, replicas)
        self.at = at
        self.more = False
        self.others_more: bool | None = None
        self.empty: frozenset[int] = frozenset()
        self.fraction: Fraction | None = None
        self.next: dict[int, Position] = {}
        self.events: list[str] = []
        self.leaves_out = self.has_servers = False
        self.lookups, self.work = None, None
        self.late = self.behind = self.coordinated = False
        self.dealt: tuple[Examples, ...] = ()

    def meanwhile(self, work: Callable[[], object] | None) -> None:
        self.work = work

    def join(self, dataset: int) -> None:
        self.events.append(f"join {dataset}")

    def boundary(self, dataset: int) -> None:
        self.events.append(f"boundary {dataset}")

    def slice(self) -> tuple[int, int]:
        return self.where

    def share(self) -> tuple[int, int]:
        return self.where

    def position(self, dataset: int) -> Position | None:
        return self.at if self.at and self.at.dataset == dataset else None

    def advance(
        self,
        dataset: int,
        epoch: int,
        index: int,
        more: bool,
        empty: frozenset[int],
        fraction: Fraction | None = None,
        returned: tuple[Examples, ...] = (),
        batch: Any = None,
        source: int = 0,
    ) -> None:
        self.fraction, self.batch, self.source = fraction, batch, source
        self.next[dataset] = Position(dataset, epoch, index, returned)
        self.more, self.empty, self.others_more = more, empty, None

    def restored(self, dataset: int, source: int) -> Position | None:
        return None

    def finish(self, dataset: int) -> None:
        self.empty = frozenset()

    def made_round(self, dataset: int) -> bool:
        return self.others_more is not None

    def any_more(self, dataset: int) -> bool | None:
        return self.others_more

    def returned(self, dataset: int) -> tuple[Examples, ...]:
        at = self.next.get(dataset) or self.position(dataset)
        return at.returned if at else ()

    def excluded(self, dataset: int) -> bool:
        return self.late

    def is_behind(self, dataset: int) -> bool:
        return self.behind

    def deal(self, dataset: int, examples: Sequence[Examples]) -> None:
        self.dealt = tuple(examples)


class Apart(Worker):
    """An asynchronous worker: it shares the data with the others, and makes rounds of its own."""

    def slice(self) -> tuple[int, int]:
        return 0, len(self.devices)


def do_round(*workers: Worker) -> None:
    """Tells each worker whether any of them has a further batch."""
    more = any(worker.more for worker in workers)
    for worker in workers:
        worker.others_more = more


def rows(batch: Any) -> list[list[Any]]:
    """What each local replica got."""
    return [part.tolist() for part in values.local_results(batch)]


def distributed(dataset: Any, worker: Worker, **said: Any) -> DistributedDataset:
    """The dataset with number 0, as a worker sees it."""
    return DistributedDataset(dataset, worker, 0, **said)


def from_batches(batches: Any, worker: Worker, context: InputContext | None = None, **said: Any) -> Any:
    """The same of a dataset that a function has made, which gives these batches."""
    return DistributedDatasetFromFunction(lambda _: batches, context or InputContext(), worker, 0, **said)


def team(split: Sequence[int]) -> list[Worker]:
    """Workers with so many local replicas each."""
    return [Worker(sum(split[:index]), local, sum(split)) for index, local in enumerate(split)]


NUMBER = TensorSpec("int64", ())
SLOW = Timeouts(heartbeat_interval=60.0)


class Process:
    """One process's part of a strategy."""

    def __init__(self, job: Job, task: Any, mode: Mode, replicas: int = 1, timeouts: Timeouts = SLOW) -> None:
        devices = tuple(Device("cpu", index) for index in range(replicas))
        self.session = inside.Session(
            task, job.verbs, replicas, timeouts=timeouts, consistency=inside.Consistency(mode)
        )
        self.session.open()
        self.group = Group(self.session, devices)
        self.exchange = inside.Exchange(self.session, self.group)

    @property
    def member(self) -> Member:
        return Member(self.session.task, self.session.number, self.session.replicas, self.session.consistency)

    def create(self, name: str, server: int = 0, **more: Any) -> Any:
        spec = inside.VariableSpec(name, NUMBER, **more)
        return self.exchange.creation.create(spec, (server,), np.asarray(0), now=True)

    def add(self, plan: Any, value: int) -> None:
        self.exchange.enter(plan)
        self.exchange.send(inside.Outgoing(plan, (1.0,), (np.asarray(value),), ()))
        self.exchange.window.settle()


@contextmanager
def began(job: Job, mode: Mode, *replicas: int) -> Iterator[list[Process]]:
    """Processes that begin a job together, with these numbers of replicas."""
    found = [Process(job, task, mode, count) for task, count in zip(WORKERS, replicas, strict=False)]
    try:
        job.close([one.member for one in found])
        yield found
    finally:
        for one in found:
            one.session.leave()


SECONDS = 20.0
"""How long a strand may go on without a pause; it does so for a few milliseconds."""


class Crashed(BaseException):
    """The strand was killed where it stood. No error that the code may catch."""


class Strand:
    """Some work in a thread of its own, which stands still but within `resume`.

    Args:
        work: what it does; it calls `pause` wherever something else may happen.

    Attributes:
        over: whether the work has ended, or was killed.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.over = False
        self._work = work
        self._killed = False
        self._error: BaseException | None = None
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self, times: int = 1) -> None:
        """Lets it go on until it pauses; raises what it raised."""
        for _ in range(times):
            if self.over:
                return
            self._turn.release()
            if not self._done.acquire(timeout=SECONDS):
                self.over = True  # it is lost, and must not hold up the end of the test
                raise AssertionError(f"a strand blocks:\n{self._where()}")
            if self._error:
                raise self._error

    def kill(self) -> None:
        """Ends it where it stands: nothing that it does on its way out has an effect if it pauses first."""
        self._killed = True
        if not self.over:
            self._turn.release()
            self._thread.join(SECONDS)
            self.over = True

    def _where(self) -> str:
        """Where it stands."""
        return "".join(traceback.format_stack(sys._current_frames()[self._thread.ident or 0]))

    def pause(self) -> None:
        """Within the work: something else may happen now. Of another thread's calls it knows nothing."""
        if threading.current_thread() is not self._thread:
            return
        if self._killed:
            raise Crashed
        self._done.release()
        self._turn.acquire()
        if self._killed:
            raise Crashed

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._killed:
                self._work()
        except Crashed:
            return
        except BaseException as error:  # raised where the test is
            self._error = error
        self.over = True
        self._done.release()


Singles = list[tuple[Any, OwnPush]]
"""Contributions with the processes of the workers that made them."""


@dataclass
class Door:
    """A worker's place at its host, which takes what it would push.

    Attributes:
        host: its host.
        process: the worker.
    """

    host: ModelHost
    process: Any

    def push(self, own: OwnPush) -> Future[RoundReply]:
        """Takes a contribution."""
        if not own.plan.sums or own.said.lookups:
            return own.singly()
        self.host.take(self.process, own)
        return own.future

    def by_itself(self, push: Callable[[], Future[RoundReply]]) -> Future[RoundReply]:
        """Pushes a contribution that is in no sum."""
        return push()


class ModelHost:
    """A host.

    Args:
        number: its number.
        send: sends a sum of contributions from a task to a server.
        specs: returns the tensors of some variables.
        luck: what comes.
    """

    def __init__(
        self,
        number: int,
        send: Callable[[Task, int, inside.Contribution, Payload, Sequence[OwnPush]], Future[RoundReply]],
        specs: Callable[[Sequence[int]], list[TensorSpec]],
        luck: Random,
    ) -> None:
        self.number = number
        self.made = 0
        self._send = send
        self._specs = specs
        self._luck = luck
        self._open: dict[tuple[int, int], Singles] = defaultdict(list)
        self._decided: set[tuple[int, int]] = set()
        self._sent: list[tuple[Any, Singles]] = []

    def take(self, process: Any, own: OwnPush) -> None:
        """Takes what a worker contributes to a round."""
        key = own.server, own.said.round
        if key in self._decided:
            own.refuse()
        else:
            self._open[key].append((process, own))

    def go_on(self) -> None:
        """Some of what is there is summed, and some goes by itself; more of it may still come."""
        for key in list(self._open):
            if self._luck.randrange(8) == 0:
                self._refuse(self._open.pop(key))
            elif len(self._open[key]) > self._luck.randrange(4):
                self._decided.add(key)
                self._sum(self._open.pop(key))

    def end(self, process: Any) -> None:
        """A worker has died: what it has sent for others may still arrive, and they find out that it is gone."""
        for leader, singles in [each for each in self._sent if each[0] is process]:
            self._sent.remove((leader, singles))
            self._refuse(singles)

    def _sum(self, singles: Singles) -> None:
        living = [(process, own) for process, own in singles if process.state == "runs"]
        if len(singles) < 2 or not living:
            self._refuse(singles)
            return
        ordered = sorted(singles, key=lambda each: each[0].task)
        leader, mine = self._luck.choice(living)
        found = sum_of(mine, [own for _, own in ordered])
        if found is None:
            self._refuse(singles)
            return
        said, whole = found
        data = whole.chunks[0][1]
        cut = [(begin, data[begin : begin + ALIGN]) for begin in range(0, len(data), ALIGN)]
        self.made += 1
        self._sent.append((leader, ordered))
        pushed = self._send(leader.task, mine.server, said, Payload(cut, whole.size), [own for _, own in ordered])
        pushed.add_done_callback(partial(self._answered, self._sent[-1], mine, said.want))

    def _answered(
        self, sent: tuple[Any, Singles], mine: OwnPush, want: Sequence[int], pushed: Future[RoundReply]
    ) -> None:
        if sent not in self._sent:
            return  # who has sent it is gone
        self._sent.remove(sent)
        if pushed.exception() is not None:
            self._refuse(sent[1])
            return
        specs = [*self._specs(want), *(spec for _, spec in mine.plan.given(mine.server))]
        for process, own in sent[1]:
            if process.state == "runs":
                own.answer(part_of(pushed.result(), want, own.said.want, lambda: specs))

    def _refuse(self, singles: Singles) -> None:
        for process, own in singles:
            if process.state == "runs":
                own.refuse()


T = TypeVar("T")

PATIENT = Timeouts(
    heartbeat_interval=0.25,
    session_timeout=SOON,
    call_timeout=SOON,
    round_timeout=3 * SOON,
    first_worker_timeout=SOON,
    start_timeout=SOON,
)
"""Of workers in threads, of which none is to be taken for dead."""


def in_threads(
    make: Callable[[Any, int], T],
    workers: int = 2,
    servers: int = 2,
    cluster: InProcessCluster | None = None,
    root: str | Path = "runs",
    each: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> list[T]:
    """Runs `make(strategy, worker)` in each worker of a job; returns what each returns.

    Args:
        make: what a worker does. It may wait for another one by `meet`.
        workers, servers, root: of the cluster.
        cluster: one that is there, in place of a new one.
        each: options of the strategy of each worker alone.
        options: options of the strategies of all.
    """
    if cluster is None:
        with InProcessCluster(servers, workers, root, timeouts=PATIENT) as found:
            return in_threads(make, workers, servers, found, root, each, **options)
    there = cluster

    def work(index: int) -> T:
        own = {"timeouts": PATIENT, **options, **(each[index] if each else {})}
        with ps.ParameterServerStrategy(cluster_resolver=there.resolver(index), **own) as strategy:
            return make(strategy, index)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, index) for index in range(workers)]
        done = wait(futures, 2 * SOON, FIRST_EXCEPTION).done
        if len(done) < workers or any(future.exception() for future in done):
            there.close()  # so that nobody waits for a worker that has failed
            for future in done:
                future.result()
        return [future.result(SOON) for future in futures]


def meet(event: threading.Event) -> None:
    """Waits for what another thread sets."""
    assert event.wait(SOON), "another thread has not come so far"


def learn(rounds: int, consistency: str = "ps.Sync()", stops: Sequence[Any] = ()) -> None:
    """Adds powers of 1000 to two variables, so that digits of a sum count the rounds of each worker.

    Says "did" with the number of each round that is made, "done" with their count, and, once the gate "end" is open,
    "sums".

    Args:
        rounds: up to which number.
        consistency: of the strategy, as a script writes it.
        stops: of (worker, round, gate): before the round a worker says "at", and waits at the gate.
    """
    strategy = ps.ParameterServerStrategy(consistency=eval(consistency))
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    mine = np.full(4, 1000.0**ME)
    while strategy.round < rounds:
        for worker, number, name in stops:
            if (ME, strategy.round) == (worker, number):
                say("at", number)
                gate(name)
        strategy.run(lambda: add_all([(v, mine), (u, mine)]))
        say("did", strategy.round - 1)
    say("done", strategy.round)
    gate("end")
    say("sums", [v.numpy().tolist(), u.numpy().tolist()])


def total(*rounds: int) -> list[list[float]]:
    """The sums of `learn` after so many rounds of each worker."""
    return [[sum(count * 1000.0**worker for worker, count in enumerate(rounds))] * 4] * 2


# ---- a coordinator in the test's thread, and its workers in threads of this process ----


_made: dict[ps.ParameterServerStrategy, SimpleNamespace] = {}


def here() -> SimpleNamespace:
    """What the process that runs a function has created."""
    found: SimpleNamespace = _made[ps.get_strategy()]  # type: ignore[index]
    return found


_holds: list[threading.Event] = []


def hold() -> None:
    """Keeps its worker busy."""
    _holds[0].set()
    _holds[1].wait(SECONDS)


class Coordinated:
    """A job with a coordinator; made by `coordinated`.

    Attributes:
        coordinator: the coordinator, once it is asked for.
        mine: what its process has created.
        cluster: the servers.
    """

    def __init__(self, cluster: InProcessCluster, spec: ps.ClusterSpec, create: Callable[[], dict[str, Any]]) -> None:
        self.cluster = cluster
        self._spec, self._create = spec, create
        self._pool = ThreadPoolExecutor(8, "worker")
        self._workers: list[Future[None]] = []
        self._strategies: list[ps.ParameterServerStrategy] = []
        self._coordinator: ps.coordinator.ClusterCoordinator | None = None

    @contextmanager
    def holding(self, fn: Callable[..., Any] | None = None, *args: Any) -> Iterator[None]:
        """Within, one of the workers is busy: with a function that calls `hold`, or with that alone."""
        _holds[:] = [threading.Event(), threading.Event()]
        waits = self.coordinator.schedule(fn or hold, args)
        assert _holds[0].wait(SECONDS)
        yield
        _holds[1].set()
        waits.fetch()

    @property
    def coordinator(self) -> Any:
        if self._coordinator is None:
            self._coordinator = ps.coordinator.ClusterCoordinator(self.strategy)
        return self._coordinator

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Schedules a function, and returns its result."""
        return self.coordinator.schedule(fn, args).fetch()

    def begin(self, workers: int) -> None:
        """Starts workers, and the coordinator's script, which may wait for them."""
        for worker in range(workers):
            self.start(worker)
        self.strategy, self.mine = self._open("chief", 0)

    def start(self, worker: int) -> None:
        """Starts a worker."""
        self._workers.append(self._pool.submit(self._serve, worker))

    def lose(self) -> None:
        """Waits for a worker that ends by an error, as its test has it."""
        self._workers = [*wait(self._workers, SECONDS, FIRST_EXCEPTION).not_done]

    def _open(self, job: str, index: int) -> tuple[Any, SimpleNamespace]:
        resolver = ps.SimpleClusterResolver(self._spec, task_type=job, task_id=index)
        strategy = ps.ParameterServerStrategy(cluster_resolver=resolver, devices=["cpu:0"], consistency=ps.Async())
        with strategy.scope():
            mine = _made[strategy] = SimpleNamespace(**self._create())
        self._strategies.append(strategy)
        return strategy, mine

    def _serve(self, index: int) -> None:
        strategy, _ = self._open("worker", index)
        try:
            served.Worker(strategy).serve()
        except BaseException as error:
            strategy.__exit__(type(error), error, None)
            raise
        strategy.close()

    def close(self) -> None:
        """Ends the coordinator's script, and then its workers."""
        self.strategy.close()
        for worker in self._workers:
            worker.result(SECONDS)
        self._pool.shutdown(wait=False)
        for strategy in self._strategies:  # and no others: several jobs may be there at a time
            _made.pop(strategy, None)


@contextmanager
def coordinated(
    create: Callable[[], dict[str, Any]],
    *scheduled: Callable[..., Any],
    workers: int = 1,
    servers: int = 1,
    started: int | None = None,
    root: Path | str = "runs",
) -> Iterator[Coordinated]:
    """A job with a coordinator, while it runs.

    Args:
        create: creates in each process, in the scope of its strategy, what it has; returns it by name.
        scheduled: the functions that are registered.
        workers, servers: how many there are.
        started: how many workers come at once, if not all; the others come with `start`, and the job begins then.
        root: directory of checkpoints.
    """
    before = dict(functions._registered)
    functions._registered.clear()
    for fn in (hold, *scheduled):
        ps.coordinator.function(fn)
    try:
        with InProcessCluster(servers, checkpoint_root=root) as cluster:
            tasks = {"chief": ["chief:0"], "worker": [f"worker-{index}:0" for index in range(workers)]}
            job = Coordinated(cluster, ps.ClusterSpec({"ps": cluster.addresses, **tasks}), create)
            job.begin(workers if started is None else started)
            try:
                yield job
            finally:
                job.close()
    finally:
        functions._registered.clear()
        functions._registered.update(before)
