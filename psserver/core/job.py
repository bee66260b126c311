"""Job: all that a server knows of one job, and forgets with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from psserver.checkpoints.bases import Bases
from psserver.checkpoints.handover import Handover
from psserver.checkpoints.restores import Restores
from psserver.checkpoints.snapshots import Snapshots
from psserver.config import ServerConfig
from psserver.core.creation import VariableCreation
from psserver.core.peers import VotingPeers
from psserver.core.reads import Reads
from psserver.effects import Effect
from psserver.plans.round import Record
from psserver.programs.kernels.kernels import Kernels
from psserver.registry import Registry
from psserver.rounds.digests import Digests
from psserver.rounds.late_answers import LateAnswers
from psserver.rounds.nonfinite import NonfiniteVariables
from psserver.rounds.pending_round import Waiter
from psserver.rounds.rounds import Rounds
from psserver.rounds.runner import Runner
from psserver.rounds.votes import Votes
from psserver.services.chunks import ChunkQueue
from psserver.services.closures import Closures
from psserver.services.joining import JoiningWorkers
from psserver.services.log import Log
from psserver.services.service import Service
from psserver.state.counters import ServerCounters
from psserver.state.first_values import FirstValueUploads
from psserver.state.sessions import Membership
from psserver.state.variables import Store
from psserver.tables.native import Native
from pswire.checkpoint.storage import storage_at
from pswire.errors import PSError


class Job:
    """The state of a job on one server. Guarded by the core's lock. A new job is a new object: nothing is left of it.

    What outlives a job is the machine's: sessions, watches, counters, and processes that wait for a server's place.

    Args:
        config: the server's configuration.
        incarnation: this server's life.
        kernels, native: run update programs, and what is compiled for dynamic tables.
        registry, members: the sessions.
        tally: counts what happens.
        give_up: ends this server, which cannot read its variables, given the time and the error; returns the effects.
        before: the job before, whose servers may have voted in this one already; None for none.

    Attributes:
        number: of the jobs that this server has had, counted from 0.
        store, votes, rounds, first_values, restores, snapshots, log, handover, creation, reads, late, digests, runner,
            peers: its parts.
        services: its services.
    """

    def __init__(
        self,
        config: ServerConfig,
        incarnation: int,
        kernels: Kernels,
        native: Native,
        registry: Registry,
        members: Membership,
        tally: ServerCounters,
        give_up: Callable[[float, PSError], list[Effect]],
        before: Job | None,
    ) -> None:
        self.number: int = 0 if before is None else before.number + 1
        server, root, bases = config.task.index, storage_at(config.checkpoint_root), Bases()
        self.store = store = Store(server, kernels.device, config.memory_limit, native)
        self.votes: Votes = Votes(server, None if before is None else before.votes)
        batches = ChunkQueue(self._contributes)
        self.rounds = rounds = Rounds(self._describe, self.votes, batches.applied)
        self.first_values = FirstValueUploads(store)
        self.restores = Restores(store, bases, root, tally)
        self.snapshots = Snapshots(store, rounds, self.restores, bases, root, config.snapshot_limit, tally)
        self.log = Log(store, rounds, self.snapshots, incarnation, config.addresses)
        self.handover = Handover(store, self.restores, root, rounds, give_up)
        self.creation = VariableCreation(store, self.log, self.restores)
        self.reads = Reads(store, rounds)
        self.late = LateAnswers(store, rounds, self._describe, self._reply)
        nonfinite = NonfiniteVariables(store, tally)
        self.digests = Digests(store, tally, nonfinite)
        participants = nonfinite, self.restores, self.snapshots, self.digests
        self.runner = Runner(store, rounds, kernels, tally, self.late.hold, participants)
        self.peers = VotingPeers(store, self.log, rounds, self.digests, registry, tally)
        joining = JoiningWorkers(config.task, config.timeouts.session_timeout, config.max_sessions, members, self.log)
        self.services: tuple[Service, ...] = Closures(rounds.learn), batches, joining, self.peers
        self._parts = *self.services, rounds, self.first_values, self.reads.calls, self.late

    def _describe(self, plan_id: bytes) -> str:
        return self.log.describe(plan_id)

    def _contributes(self, session: int) -> bool:
        return self.rounds.contributes(session)

    def _reply(self, record: Record, waiters: Sequence[Waiter]) -> list[Effect]:
        return self.runner.replies(record, waiters)

    def progress(self, now: float) -> list[Effect]:
        """Returns the effects that have become possible: answers and rounds. Looks only at what has something to do."""
        late, effects = self.late, list[Effect]()
        self.rounds.now = now
        if self.first_values.arrivals:
            effects += self.first_values.next()
        if late.owed.waiting or late.ahead.waiting:
            effects += late.due()  # before a round lends what they hold
        effects += self.runner.next()
        if self.rounds.late.waiting:
            effects += self.rounds.late.copies(late.add)
        if late.owed.waiting or late.ahead.waiting:
            effects += late.due()
        if self.reads.calls.waiting:
            effects += self.reads.answers()
        if self.snapshots.saves:
            effects += self.snapshots.hopeless()
        return effects

    def session_ended(self, session: int, error: PSError) -> list[Effect]:
        """A session has ended: its calls fail, and what was assigned to it is assigned again."""
        return [effect for part in self._parts for effect in part.session_ended(session, error)]

    def abandon(self, error: PSError, sessions: Iterable[int]) -> list[Effect]:
        """Fails all calls that wait, of these sessions and of the chief."""
        ends = [effect for session in sessions for effect in self.session_ended(session, error)]
        return [*ends, *self.snapshots.abandon(error), *self.restores.abandon(error)]
