"""A coordinator in the test's thread, and its workers in threads of this process.

What a function is scheduled with is the same for all; what each process has of its own, its variables and optimizers,
the function takes from `here()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psclient as ps
from psclient.coordinator import functions
from psclient.coordinator.worker import Worker
from pstesting.in_process import InProcessCluster

SECONDS = 20.0

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
        return strategy, mine

    def _serve(self, index: int) -> None:
        strategy, _ = self._open("worker", index)
        try:
            Worker(strategy).serve()
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
        _made.clear()
