"""Plans a cluster: simulates a job with more and more servers, and says how many it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from pstesting.planner.tables import INDEX_BYTES
from pstesting.simulation.clusters import PATIENT, Cluster
from pstesting.simulation.costs import Costs
from pstesting.simulation.jobs import SimulatedJob
from pstesting.simulation.workloads import Workload
from pswire.errors import ConfigError
from pswire.limits import Timeouts
from pswire.model.consistency import Consistency
from pswire.network.traffic import TransportName

ROUNDS = 6
"""Rounds that are simulated; the first one is not looked at."""

MOST_PAIRS = 40_000
"""Workers times servers of the largest job that is simulated: it takes minutes."""

DAY = 86400.0

SLOW = 1.5
"""By how much one worker is slower, where it is asked what a backup worker gives."""


@dataclass(frozen=True)
class Question:
    """A job of which it is asked how many servers it needs.

    Attributes:
        costs: of the machines.
        workers: number of workers.
        dense: bytes of all dense variables.
        variables: their number.
        rows: rows of all tables.
        dimension: numbers of a row, of four bytes.
        ids: ids of a worker's batch, each once.
        rate: bytes per second of each host's network, each way.
        step: seconds that a worker computes between two rounds.
        slots: slot variables of each variable: 2 for Adam, 0 for SGD.
        memory: bytes that a server may hold; 0 for as many as are needed.
        copies: True if each variable has a copy on another server.
        transport: by which pushes travel.
        worth: the part of a step that twice as many servers have to save.
        between_failures: mean seconds until a host fails; infinite for hosts that never do.
        save_every: seconds between two checkpoints.
        restart: seconds until a job that was started again trains.
        per_host: workers that share a host, and its network.
        compressed: the part of the bytes of dense variables that gradients take.
    """

    costs: Costs
    workers: int
    dense: float = 0.0
    variables: int = 1
    rows: float = 0.0
    dimension: int = 0
    ids: int = 0
    rate: float = inf
    step: float = 0.0
    slots: int = 0
    memory: float = 0.0
    copies: bool = False
    transport: TransportName = "tcp"
    worth: float = 0.1
    between_failures: float = inf
    save_every: float = 600.0
    restart: float = 60.0
    per_host: int = 1
    compressed: float = 1.0

    def __post_init__(self) -> None:
        if self.transport not in self.costs.transports:
            raise ConfigError(
                f"the cost model has no transport {self.transport}, only {', '.join(self.costs.transports) or 'none'}; "
                f"measure it with psctl calibrate --transport {self.transport}"
            )
        if self.workers < 1:
            raise ConfigError("a job needs at least one worker; give --workers")
        if not (self.dense or (self.rows and self.ids)):
            raise ConfigError("a job needs variables; give --parameters, or --rows and --ids")

    @property
    def sums(self) -> bool:
        """True if it is known what it takes that workers of a host sum what they contribute; rows are never summed."""
        return self.per_host > 1 and self.workers > 1 and not self.ids and self.costs.prices_sums

    def held(self, servers: int) -> float:
        """Returns the bytes that one of so many servers holds: variables, slots, copies and the index of tables."""
        dense = self.dense * (1 + self.slots)
        tables = self.rows * (4 * self.dimension * (1 + self.slots) + INDEX_BYTES)
        return (dense + tables) * (1 + self.copies) / servers

    @property
    def least_servers(self) -> int:
        """The servers whose memory is enough."""
        servers = 1 + self.copies
        while self.memory and self.held(servers) > self.memory:
            servers += 1
        return servers

    def lost(self, servers: int, step: float) -> Lost:
        """Returns the time that hosts which fail cost a day, where a step takes so many seconds."""
        lease, many = Timeouts().session_timeout, DAY / self.between_failures
        noticed = lease + 0.5 + step  # and the step is made again
        server = noticed if self.copies and servers > 1 else self.save_every / 2 + self.restart
        return Lost(self.workers * many * (lease + step), servers * many * server)


@dataclass(frozen=True)
class Lost:
    """The time in which a synchronous job does not train, since hosts fail, in seconds a day.

    Attributes:
        workers: all wait a lease for one that is gone.
        servers: with copies all wait as long; without, the job goes back to its checkpoint.
    """

    workers: float
    servers: float


CALM = replace(PATIENT, session_timeout=600.0)
"""Nobody is lost in what is planned, however long a heartbeat waits behind the pushes of its host."""


@dataclass(frozen=True)
class Prediction:
    """What a job does with a number of servers.

    Attributes:
        servers: their number.
        step_seconds: from one step of a worker to the next.
        round_seconds: of these what it does not compute.
        bottleneck: what is used most.
        use: of each kind of resource the part of the time in which it works.
        held_bytes: of each server.
        lost: what hosts that fail cost.
    """

    servers: int
    step_seconds: float
    round_seconds: float
    bottleneck: str
    use: Mapping[str, float]
    held_bytes: float
    lost: Lost


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        chosen: with as many servers as it needs.
        tried: with other numbers, in order.
        one_more: with one more.
        other_copies: with copies if there are none, and without them if there are.
        slow, backed: with one worker that is slower by `SLOW`; the same with a backup worker. None for one worker.
        summed: with `local_reduction=True`, and as many servers as are worth it then; None where no workers share a
            host, with rows, and where sums have no price.
    """

    chosen: Prediction
    tried: tuple[Prediction, ...]
    one_more: Prediction
    other_copies: Prediction | None
    slow: Prediction | None
    backed: Prediction | None
    summed: Prediction | None


def predict(
    question: Question, servers: int, backup_workers: int = 0, slow: float = 1.0, local_reduction: bool = False
) -> Prediction:
    """Simulates a job.

    Args:
        question: the job.
        servers: number of servers.
        backup_workers: as of `ps.Sync`.
        slow: by how much worker 0 is slower.
        local_reduction: True if workers of a host sum what they contribute.

    Raises:
        ConfigError: it is too large to be simulated.
    """
    if question.workers * servers > MOST_PAIRS:
        raise ConfigError(
            f"{question.workers} workers with {servers} servers are too many to simulate; the limit is {MOST_PAIRS} "
            "connections"
        )
    workload = Workload(
        servers,
        question.dense,
        question.variables,
        question.ids,
        question.dimension,
        question.step,
        int(question.copies and servers > 1),
        question.compressed,
    )
    cluster = Cluster(
        question.workers,
        workload,
        question.costs.between_hosts,
        question.transport,
        question.rate,
        per_host=question.per_host,
        local_reduction=local_reduction,
        consistency=Consistency(backup_workers=backup_workers),
        slow={0: slow} if slow != 1.0 else {},
        timeouts=CALM,
    )
    seen = SimulatedJob(cluster, ROUNDS).train()
    step = seen.round_seconds
    round = max(step - question.step, 0.0)
    lost = question.lost(servers, step)
    return Prediction(servers, step, round, seen.bottleneck, dict(seen.use), question.held(servers), lost)


def plan(question: Question) -> Plan:
    """Finds the number of servers beyond which twice as many save too little.

    Raises:
        ConfigError: it would be too large to be simulated.
    """
    chosen, tried = _chosen(question, local_reduction=False)
    servers = chosen.servers
    other = replace(question, copies=not question.copies)
    several = question.workers > 1
    return Plan(
        chosen,
        tuple(tried[number] for number in sorted(tried)),
        tried.get(servers + 1) or predict(question, servers + 1),
        predict(other, servers) if servers > 1 else None,
        predict(question, servers, slow=SLOW) if several else None,
        predict(question, servers, backup_workers=1, slow=SLOW) if several else None,
        _chosen(question, local_reduction=True)[0] if question.sums else None,
    )


def _chosen(question: Question, local_reduction: bool) -> tuple[Prediction, dict[int, Prediction]]:
    """Returns what a job does with as many servers as are worth it, and all that was tried, by their number."""
    servers = question.least_servers
    tried = {servers: predict(question, servers, local_reduction=local_reduction)}
    while True:
        twice = tried[2 * servers] = predict(question, 2 * servers, local_reduction=local_reduction)
        if twice.step_seconds > tried[servers].step_seconds * (1 - question.worth):
            return tried[servers], tried
        servers *= 2
