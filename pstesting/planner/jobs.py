"""Real jobs on this machine, whose rounds are timed: what the cost model is fitted to, and compared with."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from pstesting.hosts import Host, HostCluster, Hosts
from pstesting.processes import CALM, ProcessCluster
from pstesting.processor_time import await_rest, processor_seconds
from pstesting.simulation.workloads import Workload
from pswire.cluster import Task
from pswire.limits import Timeouts
from pswire.network.traffic import TransportName

ROUND_BYTES = 4e8
"""Bytes of contributions that the timed rounds of a worker have in all, about."""

MOST_ROUNDS, LEAST_ROUNDS = 400, 20

WARM_ROUNDS = 300
"""Rounds before those that are timed, of small workloads: servers compile kernels for what comes often."""


@dataclass(frozen=True)
class Cell:
    """A job whose rounds are timed, all of it on this machine.

    Attributes:
        transport: by which its pushes travel.
        workers: number of workers.
        workload: a training step.
        rate: bytes per second, each way, of the network of hosts of which each process has one; infinite for processes
            that share one host.
        local_reduction: True if its workers, which share a host, sum what they contribute.
    """

    transport: TransportName
    workers: int
    workload: Workload
    rate: float = inf
    local_reduction: bool = False

    @property
    def rounds(self) -> int:
        """How many rounds are timed."""
        return int(min(max(ROUND_BYTES / max(self.workload.on(0).pushed, 1.0), LEAST_ROUNDS), MOST_ROUNDS))


@dataclass(frozen=True)
class Timed:
    """What a round of a cell took, in seconds.

    Attributes:
        wall: the median round, as worker 0 saw it.
        server: processor time of the busiest server.
        worker: processor time of a worker, on average.
    """

    wall: float
    server: float
    worker: float


def _rounds_of(strategy: Any, name: str, dense: float, count: int, ids: int, width: int) -> Callable[[int], float]:
    """Creates what the rounds of a cell update; returns what makes one, and tells the seconds that it took."""
    import numpy as np

    import psclient as ps

    shape = (int(dense / max(count, 1) / 4),)
    variables = [ps.Variable(np.zeros(shape, "float32"), name=f"{name}_{number}") for number in range(count)]
    gradient, of_rows = np.full(shape, 2.0**-10, "float32"), np.full((ids, width), 2.0**-10, "float32")
    optimizer = ps.optimizers.SGD(0.125)
    table = ps.Variable(np.zeros((8 * ids, width), "float32"), name=f"{name}_table") if ids else None
    batches = [np.random.default_rng(number).permutation(8 * ids)[:ids] for number in range(8)]

    def step(turn: int) -> None:
        pairs: list[Any] = [(gradient, variable) for variable in variables]
        if table is not None:
            pairs.append((table.lookup(batches[turn % 8]).gradient(of_rows), table))
        optimizer.apply_gradients(pairs)

    def make_round(turn: int) -> float:
        following = batches[(turn + 1) % 8]
        if table is not None:
            table.prefetch(following)
        begun = time.perf_counter()
        strategy.run(step, args=(turn,))
        for variable in variables:
            variable.numpy()
        if table is not None:
            table.lookup(following)
        return time.perf_counter() - begun

    return make_round


def _train(cells: list[tuple[float, int, int, int, int, int]], local_reduction: bool) -> None:
    """The script of each worker: makes the rounds of one cell after the other, each once all are there."""
    import psclient as ps
    from pstesting.script import gate, say

    with ps.ParameterServerStrategy(["cpu:0"], local_reduction=local_reduction) as strategy, strategy.scope():
        for number, (dense, count, ids, width, warm, rounds) in enumerate(cells):
            make_round = _rounds_of(strategy, f"cell{number}", dense, count, ids, width)
            for turn in range(warm):
                make_round(turn)
            say("ready", number)
            gate(f"go{number}")
            before = time.process_time()
            seconds = [make_round(turn) for turn in range(rounds)]
            say("took", [sorted(seconds)[rounds // 2], (time.process_time() - before) / rounds])


def _hosts_of(cell: Cell, stack: ExitStack) -> tuple[Hosts, dict[Task, str]]:
    """Makes a host for each process of a cell; returns them, and which is whose. The chief's has no limit."""
    jobs = {"ps": cell.workload.servers, "worker": cell.workers}
    where = {Task(job, index): f"{job}{index}" for job, number in jobs.items() for index in range(number)}
    limited = [Host(name, 8 * cell.rate) for name in where.values()]
    hosts = stack.enter_context(Hosts([*limited, Host("chief")]))
    return hosts, where | {Task("chief", 0): "chief"}


def time_cells(cells: Sequence[Cell]) -> list[Timed]:
    """Times cells that differ by their workloads alone, in one job.

    Raises:
        PSError: a process failed.
        HostsUnavailable: the cells have a network, and this machine cannot make hosts.
    """
    first = cells[0]
    servers = first.workload.servers
    jobs = {(c.transport, c.workers, c.workload.servers, c.workload.copies, c.rate, c.local_reduction) for c in cells}
    if len(jobs) > 1:
        raise ValueError(
            "all cells of a job must have the same transport, network, local_reduction, and numbers of workers, "
            "servers and copies"
        )
    said = [
        (
            cell.workload.dense,
            cell.workload.variables,
            cell.workload.ids,
            cell.workload.dimension,
            WARM_ROUNDS if cell.workload.dense < 1e6 else 10,
            cell.rounds,
        )
        for cell in cells
    ]
    found: list[Timed] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="calibrate-")))
        keys: dict[str, Any] = {
            "ps": servers,
            "workers": first.workers,
            "chief": "driver",
            "transport": first.transport,
            "timeouts": replace(CALM, report_interval=Timeouts().report_interval),
        }
        keys["replication_factor"] = 1 + first.workload.copies
        if first.rate < inf:
            keys["launcher"] = partial(HostCluster, *_hosts_of(first, stack))
        helpers = (_rounds_of,)
        gates = [f"go{number}" for number in range(len(cells))]
        args = said, first.local_reduction
        job = stack.enter_context(ProcessCluster(_train, directory, args, helpers, gates=gates, **keys))
        workers = [Task("worker", index) for index in range(first.workers)]
        pids = [job.cluster.processes[Task("ps", index)].pid for index in range(servers)]
        for number, cell in enumerate(cells):
            for worker in workers:
                job.hear(worker, "ready", number)
            before = await_rest(pids)
            job.open(f"go{number}")
            took = [job.hear(worker, "took") for worker in workers]
            used = [after - start for after, start in zip(map(processor_seconds, pids), before, strict=True)]
            found.append(Timed(took[0][0], max(used) / cell.rounds, sum(each for _, each in took) / len(took)))
    return found
