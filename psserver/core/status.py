"""A server's status, collected from all parts of its state."""

from __future__ import annotations

from dataclasses import replace

from psserver.checkpoints.snapshots import Snapshots
from psserver.core.links import Links
from psserver.core.log import Log
from psserver.core.waiting import Waiters
from psserver.plans.round import SessionSequence
from psserver.rounds.digests import Digests
from psserver.rounds.rounds import Rounds
from psserver.rounds.runner import Blocked, Runner
from psserver.state.counters import ServerCounters
from psserver.state.sessions import STILL_SECONDS, Membership
from psserver.state.standbys import Standbys
from psserver.state.variables import Store
from pswire.model.places import Moved
from pswire.model.status import OpenRound, ServerStatus


def _explained(rounds: Rounds, runner: Runner, waiters: Waiters) -> tuple[OpenRound, ...]:
    """Returns the open rounds, that one of them waits for a checkpoint, and the answers that are held."""
    phase, why = runner.phase, "waits until more of a checkpoint is written"
    blocked = phase.job if isinstance(phase, Blocked) else None
    held = blocked.round if blocked is not None and not isinstance(blocked.strand, SessionSequence) else None
    waiting = [replace(w, section=f"{w.section}; {why}") if w.round == held else w for w in rounds.waiting()]
    return (*waiting, *waiters.held)


class Looks:
    """The part of a server's state machine that takes no stimuli."""

    incarnation: int
    tally: ServerCounters
    store: Store
    rounds: Rounds
    members: Membership
    log: Log
    snapshots: Snapshots
    runner: Runner
    digests: Digests
    waiters: Waiters
    _domain: str
    _links: Links
    _standbys: Standbys
    _ticked: float

    def status(self, now: float) -> ServerStatus:
        """Returns the server's status: its state, and the open rounds with the members they wait for."""
        store, rounds, log, members, snapshots = self.store, self.rounds, self.log, self.members, self.snapshots
        broken, tables, tier = self.runner.broken or log.lost, store.tables(), store.native.tier
        return ServerStatus(
            server=store.server,
            incarnation=self.incarnation,
            log=len(log.entries),
            generation=rounds.generation,
            round=rounds.last,
            positions=rounds.positions,
            waiting=_explained(rounds, self.runner, self.waiters),
            variables=len(store.variables),
            variable_bytes=store.nbytes,
            memory_limit=store.memory_limit,
            chief=members.chief_silent(now) if log.keeps else float("inf"),
            places=rounds.places,
            snapshot_bytes=snapshots.held,
            snapshot_limit=snapshots.limit,
            saving=snapshots.saving,
            sessions=members.states(now, drivers=True) if log.keeps else (),
            incarnations=log.incarnations,
            over=log.over,
            broken=broken.message if broken else "",
            device=str(store.device),
            job=members.job,
            missed=self._links.missed(now),
            gap=rounds.clocks.gap,
            gone=tuple(sorted(log.gone)),
            losses=tuple(log.losses),
            standbys=self._standbys.waiting(now),
            moved=tuple(Moved(server, address) for server, address in sorted(log.moved.items())),
            domain=self._domain,
            differences=self.digests.differences,
            phases=self.tally.phases,
            table_rows={one.part.table: len(one.table) for one in tables},
            table_bytes={one.part.table: one.table.nbytes for one in tables},
            recovering=rounds.backlog.behind,
            tier_bytes=tier.nbytes if tier else 0,
            tier_resident_bytes=tier.resident if tier else 0,
            tier_memory=tier.memory if tier else 0,
        )

    @property
    def _is_done(self) -> bool:
        """True once the job has ended, and the chief has told everybody."""
        return self.log.over and (not self.log.keeps or self.members.chief_left())

    def well(self, now: float) -> bool:
        """Returns True if the server is healthy: leases are checked in time, and no round has failed halfway."""
        return now - self._ticked < STILL_SECONDS and self.runner.broken is None

    def leaving(self, now: float) -> bool | None:
        """Returns True while a process of the job leaves that was told to end; None while one may be told so yet."""
        return False if self._is_done else self.members.leave_now(now)

    def untold(self, now: float) -> bool:
        """Returns True while a process waits for a place that does not know yet that the job is over."""
        return self._is_done and self._standbys.untold(now)
