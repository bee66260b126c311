"""A whole job, simulated: servers, workers and a chief, each on a host of its own or all on one."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import mean, median

from pstesting.simulation.clients import SimulatedChief, SimulatedWorker, simulated_time
from pstesting.simulation.clusters import Cluster
from pstesting.simulation.costs import OF_FRAMES
from pstesting.simulation.host_sums import HostSums
from pstesting.simulation.machines import Host
from pstesting.simulation.scheduler import Scheduler
from pstesting.simulation.servers import SimulatedServer
from pswire.cluster import ClusterSpec, Task


@dataclass(frozen=True)
class Trained:
    """What was seen of a simulated job, once all its workers trained, and until the first of them had done its part.

    Attributes:
        rounds: for each worker the seconds from one of its rounds to the next.
        seconds: of simulated time.
        use: of each kind of resource the part of that time in which the busiest of its kind worked.
        average: the same of all of its kind, on average.
    """

    rounds: Mapping[Task, list[float]]
    seconds: float
    use: Mapping[str, float]
    average: Mapping[str, float]

    @property
    def round_seconds(self) -> float:
        """The median round of a worker, in seconds."""
        return median(each for made in self.rounds.values() for each in made)

    @property
    def rounds_per_second(self) -> float:
        """Rounds of all workers together in a second: N of them for a round that all N make together."""
        return sum(map(len, self.rounds.values())) / self.seconds

    @property
    def bottleneck(self) -> str:
        """The kind of resource that is used the most."""
        return max(self.use, key=lambda name: self.use[name])


class SimulatedJob:
    """A job; `train` lets it run.

    Args:
        cluster: where and how.
        rounds: the rounds that each worker makes.

    Attributes:
        rounds: as above.
        scheduler: its time.
        servers, workers, chief: its processes.
        times: for each worker the simulated times at which its rounds were over, in seconds.
    """

    def __init__(self, cluster: Cluster, rounds: int) -> None:
        self.cluster, self.rounds = cluster, rounds
        self.scheduler = scheduler = Scheduler()
        self.times: dict[Task, list[float]] = defaultdict(list)
        self._one = Host(scheduler, cluster.costs.cores, switch=cluster.costs.switch)
        servers = cluster.workload.servers
        self.servers = [SimulatedServer(scheduler, self._host(), index, cluster) for index in range(servers)]
        for server in self.servers:
            server.others = self.servers
        counts = {"ps": servers, "worker": cluster.workers, "chief": 1}
        spec = ClusterSpec({job: [f"{job}:1"] * count for job, count in counts.items()})
        tasks = spec.tasks("worker")
        with simulated_time(scheduler):
            self.chief = SimulatedChief(scheduler, self._host(), self.servers, cluster, spec)
            together = cluster.workers if cluster.one_host else cluster.per_host
            hosts = [self._host() for _ in tasks[::together]]
            sums = [HostSums(scheduler, cluster, 1 + number) for number in range(len(hosts))]
            self.workers = [
                SimulatedWorker(scheduler, hosts[at], self.servers, cluster, tasks, task, rounds, self._made, sums[at])
                for task in tasks
                for at in (task.index // together,)
            ]
        for index, factor in cluster.slow.items():
            self.workers[index].strand.slow = factor
        self._from = self._until = 0.0
        self._before: dict[str, list[float]] = {}
        self._after: dict[str, list[float]] = {}

    def _host(self) -> Host:
        return self._one if self.cluster.one_host else Host(self.scheduler, 0, OF_FRAMES * self.cluster.rate)

    def train(self, limit: float = inf) -> Trained:
        """Runs the job to its end.

        Args:
            limit: the most seconds of simulated time.

        Returns:
            What was seen.

        Raises:
            PSError: a worker or the chief failed with it.
            RuntimeError: the job does not end.
        """
        with closing(self.scheduler), simulated_time(self.scheduler), _without_collector():
            self.chief.begin()
            for worker in self.workers:
                worker.begin()
            for process in (*self.workers, self.chief):
                self.scheduler.run(process.has_ended, limit)
                if process.failure is not None:
                    raise process.failure
        return self._trained()

    def _made(self, task: Task) -> None:
        """A worker has made a round: the last to make its first, and the first to make its last, bound what is seen."""
        times = self.times[task]
        times.append(self.scheduler.now)
        if len(times) == 1 and len(self.times) == len(self.workers):
            self._from, self._before = self.scheduler.now, self._used()
        if len(times) == self.rounds and not self._until:
            self._until, self._after = self.scheduler.now, self._used()

    def _used(self) -> dict[str, list[float]]:
        """Returns for each kind of resource the seconds that each of them has worked so far."""
        servers, workers = self.servers, self.workers
        found = {
            "the servers' event loops": [server.loop.busy for server in servers],
            "the servers' array work": [server.arrays.busy for server in servers],
            "the workers' processors": [worker.strand.busy for worker in workers],
        }
        if self.cluster.rate < inf and not self.cluster.one_host:
            found |= {
                "the servers' links, inwards": [server.host.into.busy for server in servers],
                "the servers' links, outwards": [server.host.out.busy for server in servers],
                "the workers' links, inwards": [worker.strand.host.into.busy for worker in workers],
                "the workers' links, outwards": [worker.strand.host.out.busy for worker in workers],
            }
        if self.cluster.one_host and self.cluster.costs.cores:
            found["the host's processors"] = [sum(map(sum, found.values())) / self.cluster.costs.cores]
        return found

    def _trained(self) -> Trained:
        seconds = self._until - self._from
        worked = {
            name: [(after - before) / seconds for before, after in zip(self._before[name], found, strict=True)]
            for name, found in self._after.items()
        }
        use, average = ({name: call(found) for name, found in worked.items()} for call in (max, mean))
        seen = {
            task: [after - before for before, after in pairwise(times) if self._from <= before and after <= self._until]
            for task, times in self.times.items()
        }
        return Trained(seen, seconds, use, average)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Within it Python looks for no cycles of what is dropped: that takes half of the time, and finds little."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
