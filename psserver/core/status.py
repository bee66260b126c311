"""What a server tells of itself, collected from all that it has."""

from __future__ import annotations

from dataclasses import dataclass

from psserver.checkpoints.snapshots import Snapshots
from psserver.core.log import Log
from psserver.core.runner import Runner
from psserver.state.rounds import Rounds
from psserver.state.sessions import Membership
from psserver.state.variables import Store
from pswire.model.status import ServerStatus


@dataclass(frozen=True)
class Report:
    """Guarded by the core's lock.

    Attributes:
        incarnation: the server's life.
        store, rounds, members, log, snapshots, runner: what it has.
    """

    incarnation: int
    store: Store
    rounds: Rounds
    members: Membership
    log: Log
    snapshots: Snapshots
    runner: Runner

    def status(self, now: float) -> ServerStatus:
        """All of it, at a time of the core's clock."""
        return ServerStatus(
            self.store.server,
            self.incarnation,
            len(self.log.entries),
            self.rounds.epoch,
            self.rounds.last,
            self.rounds.positions,
            self.runner.explain(self.rounds.waiting()),
            len(self.store.variables),
            self.store.nbytes,
            self.store.memory_limit,
            self.members.chief_silent(now),
            self.rounds.places,
            held=self.snapshots.held,
            snapshot_limit=self.snapshots.limit,
            saving=self.snapshots.saving,
            sessions=self.members.states(now, drivers=True),
            incarnations=self.log.incarnations,
            over=self.log.over,
            broken=self.runner.broken.message if self.runner.broken else "",
            device=str(self.store.device),
            job=self.members.job,
        )
