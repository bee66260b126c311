"""Digests: servers that hold the same variables tell each other from time to time what rounds have made of these.

With copies a variable lies on two servers, and non-slot variables on more. All of them compute the same. If one of them
does not, its values differ from then on, and nobody sees it before the other one is lost. So in each span of `ROUNDS`
rounds every pair of servers compares hashes, which travel with their next votes: in the first round of the span that
both take part in, of all variables that both hold and that rounds have assigned since the last time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from psserver.effects import Effect, Work
from psserver.execution.execution import Execution
from psserver.execution.hashing import hash_rows, hash_wholes
from psserver.plans.prepared import PreparedPlan
from psserver.rounds.nonfinite import NonfiniteVariables
from psserver.rounds.participants import RoundParticipant
from psserver.state.counters import ServerCounters
from psserver.state.variables import Store
from pswire.cluster import Task
from pswire.errors import PSError
from pswire.model.rows import Int64s
from pswire.model.status import Difference
from pswire.servers.votes import Digest

log = logging.getLogger("psserver")

ROUNDS = 64
"""Rounds of a span, in which each pair of servers compares its values once."""

MAX_NAMES = 8
"""Most names of variables that are told of a difference."""


@dataclass
class _Pair:
    """What is known of another server that holds some of the same variables.

    Attributes:
        life: how often the other server was lost before.
        span: the span of the last digest, or of the first round that both have made.
        plans: plans of the rounds since then that both have made, by id.
        rows: of each variable of which rounds since then have updated rows the last of these rows.
        untold: the last digest of this server; None once the other server was told of it.
        mine: the same; None once it was compared.
        theirs: the last digest of the other server.
        agreed: how often the two were equal.
        warned: True if the log tells that the two differ.
        difference: what they differ in, as the last comparison has found; None for nothing.
    """

    life: int
    span: int
    plans: dict[bytes, PreparedPlan] = field(default_factory=dict)
    rows: dict[int, Int64s] = field(default_factory=dict)
    untold: Digest | None = None
    mine: Digest | None = None
    theirs: Digest | None = None
    agreed: int = 0
    warned: bool = False
    difference: Difference | None = None


@dataclass(frozen=True)
class _Asked:
    """The variables of a digest: those that are hashed as a whole, and rows of others."""

    whole: frozenset[int]
    rows: Mapping[int, Int64s]


class Digests(RoundParticipant):
    """The comparisons of this server with all others. Guarded by the core's lock.

    Both servers of a pair decide by the rounds that they have made together, and so hash the same.

    Args:
        store: the variables.
        tally: counts comparisons.
        nonfinite: the variables with NaN, of which processors may make one in several ways.
    """

    def __init__(self, store: Store, tally: ServerCounters, nonfinite: NonfiniteVariables) -> None:
        self._store = store
        self._nonfinite = nonfinite
        self._tally = tally
        self._pairs: dict[int, _Pair] = {}
        self._inexact = set[int]()

    def _pair(self, server: int) -> _Pair | None:
        """Returns what is known of a server as it is now; None if it is gone, or has made no round since it is back."""
        pair = self._pairs.get(server)
        known = pair is not None and pair.life == self._store.losses.count(server)
        return pair if known and server not in self._store.gone else None

    # ---- This server's ----

    def closes(self, execution: Execution) -> Work | None:
        """A round is over that several servers may have made; hashes what is due, before the next one writes it."""
        job, store = execution.job, self._store
        if not store.copied or len(job.voters) < 2:
            return None
        self._inexact |= job.prepared.inexact
        touched, span = _owned(execution.touched), job.round // ROUNDS
        due: list[tuple[int, _Pair]] = []
        for server in set(job.voters) - {store.server} - store.gone.keys():
            pair = self._pair(server)
            if pair is None:
                pair = self._pairs[server] = _Pair(store.losses.count(server), span)
            pair.plans[job.plan.id] = job.prepared
            pair.rows |= touched
            if span > pair.span:
                pair.span = span
                due.append((server, pair))
        if not due:
            return None
        asked = [(pair, self._asked(server, pair)) for server, pair in due]
        then = partial(self._hashed, job.round, asked)
        return Work("arrays", self._hash, ([one for _, one in asked],), then=then)

    def _asked(self, server: int, pair: _Pair) -> _Asked:
        """Returns what is hashed for a server, and begins to gather what will be the next time."""
        plans, rows = pair.plans, pair.rows
        pair.plans, pair.rows = {}, {}
        assigned = rows.keys() | {id for prepared in plans.values() for id in prepared.replaces}
        shared = {id for id in assigned if {server, self._store.server} <= set(self._store.variables[id].servers)}
        shared -= self._inexact | self._nonfinite.ids
        return _Asked(frozenset(shared - rows.keys()), {id: rows[id] for id in shared & rows.keys()})

    def _hash(self, asked: Sequence[_Asked]) -> list[dict[int, int]]:
        """Hashes variables for several servers; array work, without the lock."""
        began = self._tally.clock()
        whole = frozenset[int]().union(*(one.whole for one in asked))
        rows = {id: ids for one in asked for id, ids in one.rows.items()}
        wholes = hash_wholes(self._store, self._store.device, sorted(whole))
        parts = hash_rows(self._store, self._store.device, rows)
        self._tally.hashing += self._tally.clock() - began
        return [
            {id: wholes[id] for id in one.whole if id in wholes} | {id: parts[id] for id in one.rows if id in parts}
            for one in asked
        ]

    def _hashed(
        self,
        round: int,
        asked: Sequence[tuple[_Pair, object]],
        found: Sequence[dict[int, int]] | None,
        error: PSError | None,
        now: float,
    ) -> list[Effect]:
        """Takes the hashes for some servers."""
        if found is None:
            log.warning(
                "%s could not compute checksums of its variables after round %d: %s", self._store.task, round, error
            )
        for (pair, _), hashes in zip(asked, found or (), strict=False):
            ids = sorted(hashes)
            pair.mine = pair.untold = Digest(round, tuple(ids), tuple(hashes[id] for id in ids))
        for server in sorted(self._pairs):
            self._compare(server)
        return []

    def tells(self, servers: Sequence[int]) -> dict[int, Digest]:
        """Returns what some servers are to be told with a vote, once: votes are said until they are heard."""
        said: dict[int, Digest] = {}
        for server, pair in self._pairs.items():
            if pair.untold is not None and server in servers and self._pair(server) is not None:
                said[server], pair.untold = pair.untold, None
        return said

    # ---- The others' ----

    def hear(self, server: int, digest: Digest) -> None:
        """Takes another server's digest, which may have been said before."""
        pair = self._pair(server)
        if pair is not None and (pair.theirs is None or digest.round > pair.theirs.round):
            pair.theirs = digest
            self._compare(server)

    def _compare(self, server: int) -> None:
        """Compares two digests, once both are there, in the variables that both have."""
        pair = self._pair(server)
        if pair is None or pair.mine is None or pair.theirs is None or pair.mine.round != pair.theirs.round:
            return
        mine, theirs = (dict(zip(one.variables, one.hashes, strict=True)) for one in (pair.mine, pair.theirs))
        names = [self._store.variables[id].spec.name for id, hash in mine.items() if theirs.get(id, hash) != hash]
        round = pair.mine.round
        pair.mine = None  # each is compared once
        self._tally.digests["different" if names else "equal"] += 1
        if names:
            self._differ(server, pair, names, round)
            return
        pair.agreed += 1
        if pair.difference is not None:
            log.info("%s and %s have the same values again after round %d", self._store.task, Task("ps", server), round)
        pair.difference = None

    def _differ(self, server: int, pair: _Pair, names: Sequence[str], round: int) -> None:
        first = round if pair.difference is None else pair.difference.round
        pair.difference = Difference(server, first, tuple(names[:MAX_NAMES]), len(names[MAX_NAMES:]), pair.agreed)
        if not pair.warned:
            pair.warned = True
            log.warning(
                "%s and its copy on %s have different values of %s after round %d. The two machines compute "
                "differently, or one has faulty memory",
                self._store.task,
                Task("ps", server),
                pair.difference.told,
                round,
            )

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The servers that have other values, in order."""
        pairs = (self._pair(server) for server in sorted(self._pairs))
        return tuple(pair.difference for pair in pairs if pair is not None and pair.difference is not None)


def _owned(touched: Mapping[int, Int64s]) -> Mapping[int, Int64s]:
    """Returns rows in arrays that hold nothing else: what lies behind a view may be several times as large."""
    copies = {id(ids): ids if ids.base is None else ids.copy() for ids in touched.values()}
    return {number: copies[id(ids)] for number, ids in touched.items()}
