"""Where a simulated job runs, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from pstesting.simulation.costs import Costs, TransportCosts
from pstesting.simulation.workloads import Workload
from pswire.limits import Timeouts
from pswire.model.consistency import SYNC, Consistency
from pswire.server_options import ServerOptions

PATIENT = Timeouts(round_timeout=3600.0, start_timeout=3600.0)
"""Nobody is given up because a round of many members takes long."""


@dataclass(frozen=True)
class Cluster:
    """A cluster, and the job that trains on it.

    Attributes:
        workers: number of workers.
        workload: a training step; it says how many servers there are.
        costs: of the machines.
        transport: by which pushes travel: "shm", "tcp" or "grpc".
        rate: bytes per second of each host's network, each way.
        one_host: True if all processes share one host and its cores.
        per_host: workers that share a host where not all do.
        local_reduction: True if workers of a host sum what they contribute.
        consistency: how workers make their rounds.
        slow: by worker, how many times longer its work takes than that of others.
        timeouts: of the job.
        root: where servers save checkpoints, and what is handed over to one that comes back.
    """

    workers: int
    workload: Workload
    costs: Costs
    transport: str = "tcp"
    rate: float = inf
    one_host: bool = False
    per_host: int = 1
    local_reduction: bool = False
    consistency: Consistency = SYNC
    slow: Mapping[int, float] = field(default_factory=dict)
    timeouts: Timeouts = PATIENT
    root: str = ServerOptions.checkpoint_root

    @property
    def transport_costs(self) -> TransportCosts:
        """What pushes cost on its transport."""
        return self.costs.transports[self.transport]

    @property
    def copied(self) -> bool:
        """True if variables have copies."""
        return self.workload.copies > 0
