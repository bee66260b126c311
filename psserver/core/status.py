"""A server's status, collected from all parts of its state."""

from __future__ import annotations

from dataclasses import replace

from psserver.core.job import Job
from psserver.plans.round import SessionSequence
from psserver.rounds.open_rounds import open_rounds
from psserver.rounds.runner import Blocked
from psserver.state.counters import ServerCounters
from psserver.state.sessions import Membership
from pswire.model.places import Moved, Standby
from pswire.model.status import OpenRound, ServerStatus


def status_of(
    incarnation: int,
    domain: str,
    tally: ServerCounters,
    members: Membership,
    job: Job,
    standbys: tuple[Standby, ...],
    now: float,
) -> ServerStatus:
    """Returns a server's status; `now` is a time of the core's clock, in seconds."""
    store, rounds, log, snapshots, runner = job.store, job.rounds, job.log, job.snapshots, job.runner
    broken, tables, tier = runner.broken or log.lost, store.tables(), store.native.tier
    return ServerStatus(
        server=store.server,
        incarnation=incarnation,
        log=len(log.entries),
        generation=rounds.generation,
        round=rounds.last,
        positions=rounds.positions,
        waiting=_explained(job, now),
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
        missed=job.peers.missed(now),
        gap=rounds.clocks.gap,
        gone=tuple(sorted(log.gone)),
        losses=tuple(log.losses),
        standbys=standbys,
        moved=tuple(Moved(server, address) for server, address in sorted(log.moved.items())),
        domain=domain,
        differences=job.digests.differences,
        phases=tally.phases,
        table_rows={one.part.table: len(one.table) for one in tables},
        table_bytes={one.part.table: one.table.nbytes for one in tables},
        recovering=rounds.backlog.behind,
        tier_bytes=tier.nbytes if tier else 0,
        tier_resident_bytes=tier.resident if tier else 0,
        tier_memory=tier.memory if tier else 0,
    )


def _explained(of: Job, now: float) -> tuple[OpenRound, ...]:
    """Returns the open rounds, that one of them waits for a checkpoint, and the answers that are held."""
    phase, why = of.runner.phase, "waits until more of a checkpoint is written"
    blocked = phase.job if isinstance(phase, Blocked) else None
    held = blocked.round if blocked is not None and not isinstance(blocked.sequence, SessionSequence) else None
    waiting = [replace(w, section=f"{w.section}; {why}") if w.round == held else w for w in open_rounds(of.rounds, now)]
    return (*waiting, *of.late.held(now))
