"""One parameter server as a state machine: each stimulus is a method that changes its state and returns effects.

It has no lock, no thread and no clock, and does no array work: `Core` passes one stimulus at a time with the time it
came, and carries out the effects. Two machines that are given the same stimuli reach the same state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from psserver.checkpoints.bases import Bases
from psserver.checkpoints.handover import Handover
from psserver.checkpoints.restores import Restores
from psserver.checkpoints.snapshots import Snapshots
from psserver.config import ServerConfig
from psserver.core.admission import Admission
from psserver.core.chunks import ChunkStimuli
from psserver.core.closures import ClosureStimuli
from psserver.core.creation import VariableCreation
from psserver.core.joins import Indices, JoinStimuli
from psserver.core.links import Links
from psserver.core.log import Log
from psserver.core.peers import PeerStimuli
from psserver.core.places import PlaceStimuli
from psserver.core.status import Looks
from psserver.core.waiting import HeldCall, Owed, Read, Waiters, Watch
from psserver.effects import Await, Effect, Fail, Outcome, Reply, Work
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from psserver.registry import Registry
from psserver.rounds.digests import Digests
from psserver.rounds.nonfinite import NonfiniteVariables
from psserver.rounds.rounds import Rounds
from psserver.rounds.runner import Runner
from psserver.state.closures import Closures
from psserver.state.counters import ServerCounters
from psserver.state.first_values import FirstValueUploads
from psserver.state.sessions import DRAWN, Membership
from psserver.state.standbys import Standbys
from psserver.state.variables import FirstValue, Store
from psserver.tables.native import Native
from psserver.tiers.tier import Tier
from pswire.api import (
    WATCHED,
    ApproveRequest,
    Begun,
    Contribution,
    CreateBatchReply,
    CreateBatchRequest,
    HeartbeatRequest,
    LeaveRequest,
    Opened,
    OpenRequest,
    ProposeRequest,
    PullReply,
    PullRequest,
    RoundReply,
    Watched,
    WatchRequest,
)
from pswire.checkpoint.storage import storage_at
from pswire.errors import Diverged, Fenced, InvalidRequest, NewcomerDiverged, PSError, ServerLost
from pswire.limits import WINDOW
from pswire.model.log import Member
from pswire.model.plan import PlacedVariable
from pswire.model.saved import RestoreReply, Shard
from pswire.network.payload import Payload
from pswire.servers.checkpoints import RestoreRequest, SnapshotRequest

log = logging.getLogger("psserver")

UNCHANGED: list[Effect] = []
"""The effects of a stimulus after which nothing has become possible that was not before. It stays empty."""

Batch = tuple[PlacedVariable, ...]
"""Variables that are created together."""


def _tier_of(config: ServerConfig) -> Tier | None:
    """Returns where rows of dynamic tables lie; None for memory. Raises `ConfigError` if they cannot lie there."""
    return Tier(config.tier_path, config.tier_memory) if config.tier_path else None


class Machine(Looks, PeerStimuli, PlaceStimuli, ClosureStimuli, ChunkStimuli, JoinStimuli):
    """All state of a server. Each stimulus takes the time first, in monotonic seconds; a `PSError` refuses it.

    Args:
        config: the server's configuration.
        incarnation: this process's incarnation, 64 random bits: no clock can give one twice.
        kernels: run update programs.
        clock: measures how long rounds take; no decision depends on it.

    Attributes:
        began: the time at which it was made, in monotonic seconds.
        done: answered once the job has ended and everybody has left, or goes on without this server.
        left: answered in the second case.
        registry: its sessions, which the rims may look up.
        store, rounds, members, closures, log, waiters, runner, snapshots, restores, tally: its parts.
    """

    def __init__(self, config: ServerConfig, incarnation: int, kernels: Kernels, clock: Callable[[], float]) -> None:
        self.task, self.server = config.task, config.task.index
        self.incarnation = incarnation
        self._domain = config.domain
        self.done: Future[None] = Future()
        self.left: Future[None] = Future()
        root, timeouts = storage_at(config.checkpoint_root), config.timeouts
        native = Native(kernels.on_host.compiler, _tier_of(config))
        self.store = Store(self.server, kernels.device, config.memory_limit, native)
        self.rounds = Rounds(lambda plan_id: self.log.describe(plan_id), self.server)
        self.first_values = FirstValueUploads(self.store)
        self.tally = ServerCounters(clock)
        self.registry = Registry(self.task, config.max_sessions)
        self.members = Membership(
            self.registry,
            timeouts.session_timeout,
            timeouts.heartbeat_interval,
            incarnation,
            lambda: self.rounds.generation,
            self._holds_job,
            lambda: self.rounds.generations,
        )
        bases = Bases()
        self.restores = Restores(self.store, bases, root, self.tally)
        self.snapshots = Snapshots(
            self.store, self.rounds, self.restores, bases, root, config.snapshot_limit, self.tally
        )
        self.log = Log(self.store, self.rounds, self.snapshots, incarnation, config.addresses)
        self._handover = Handover(self.store, self.restores, root, self.rounds, self._cannot_read)
        self.closures = Closures()
        self._creation = VariableCreation(self.store, self.log, self.restores)
        self._indices = Indices(timeouts.session_timeout, config.max_sessions)
        self.waiters = Waiters(self.log, self.members, self.store, self.rounds, self._reply)
        nonfinite = self._nonfinite = NonfiniteVariables(self.store, self.tally)
        self.digests = Digests(self.store, self.tally, nonfinite)
        participants = nonfinite, self.restores, self.snapshots, self.digests
        self.runner = Runner(self.store, self.rounds, kernels, self.tally, self.waiters.hold, participants)
        self._admission = Admission(self.task, self.registry, self.members, self.rounds, self.runner, self.log)
        self._links = Links(self.task, self.rounds)
        self._standbys = Standbys(self.task, self.log.moved)
        self._token = self._job = 0
        self.began = self._ticked = clock()

    def progress(self, now: float) -> list[Effect]:
        """Returns the effects that have become possible: answers and rounds. Called after every stimulus."""
        effects: list[Effect] = []
        if self._admission.changed():  # else no session has ended, and who pushes is looked at when it does
            for session in {*self.rounds.sessions(), *self.first_values.sessions(), *self.closures.sessions}:
                if (error := self._admission.ended(session)) is not None:
                    effects += self._heard(self.rounds.fail_session(session, error))
                    effects += self.first_values.fail(session, error)
                    effects += self.closures.end(session, error)
            self._admission.stop_clocks()
        effects += self.first_values.next()
        effects += self.waiters.due(self._admission.ended, self._admission.seen)  # before a round lends what they hold
        effects += self.runner.next()
        effects += self.waiters.answers(now, self._admission.ended, self._admission.ends)
        effects += self.snapshots.hopeless()
        if self._is_done:
            effects.append(Reply(self.done, None))
        return effects

    def look(self, now: float) -> Outcome[None]:
        """Looks again: a payload has arrived up to an awaited offset."""
        return None, []

    def worked(self, now: float, work: Work, result: object, error: PSError | None) -> Outcome[None]:
        """Takes the result or error of work that is over."""
        return None, [] if work.then is None else work.then(result, error, now)

    def asked(self, now: float, work: Work, *args: object) -> Outcome[Any]:
        """Answers a question of running work."""
        if work.asks is None:
            raise ValueError("this work asks nothing")
        answer, more = work.asks(*args)
        return answer, self.progress(now) if more else []

    def _heard(self, effects: list[Effect]) -> list[Effect]:
        """Ends all sessions if one of these effects shows that members run different programs; returns the effects."""
        for effect in effects:
            error = effect.error if isinstance(effect, Fail) else None
            if isinstance(error, Diverged) and not isinstance(error, NewcomerDiverged):
                self.members.fail_all(error)
        return effects

    # ---- Sessions ----

    def open(self, now: float, asked: OpenRequest, drawn: int) -> Outcome[Opened]:
        """Opens a task's session on the server that keeps the log; on others registers one that was opened there.

        A chief opens it here as well where the server that kept the log is lost, which this one does not know yet: its
        token is above all that were given.

        `drawn` is a random number of `DRAWN` bits, for the token.
        """
        session, drives, job, term = asked.session, asked.drives, asked.job, asked.term
        opens = Member(asked.task, 0, asked.replicas, asked.consistency)
        if self.log.keeps:
            session, token = self.members.open(opens, drives, session, now, job, term, drawn)
        else:
            self.registry.enter(session, opens.task)
            self.members.know(replace(opens, session=session), drives, job, now)
            token = max(self.members.term, self._token >> DRAWN, term) + 1 << DRAWN | drawn if drives else 0
        self.tally.signs += 1
        seen = max(self.members.term, self._token >> DRAWN)
        here, tiers = str(self.store.device), self.store.native.tier is not None
        return Opened(session, self.incarnation, token, self.server, here, seen, WINDOW, self._domain, tiers), []

    def _holds_job(self) -> bool:
        """Returns True if there is a job with variables that is not over."""
        return bool(self.log.entries and self.store.variables) and not self.log.over

    def heartbeat(self, now: float, asked: HeartbeatRequest) -> Outcome[bool | PSError]:
        """Renews a session's lease and notes what it says of itself.

        Answers whether its process is to drive the job, or with the error that ended the session.
        """
        session, pace = asked.session, asked.pace
        error = self._admission.ended(session)
        if error is None and self.log.keeps:
            self.members.heartbeat(session, (asked.round, asked.plan_id), now, self.log.describe, pace)
            error = self._admission.ended(session)
        elif error is None:
            self.members.touch(session, now, pace)
        if error is None and pace is not None:
            self.rounds.clocks.tell(session, asked.clock)
        self.tally.signs += error is None
        drives = self.log.keeps and self.log.lost is None and self.members.is_to_drive(session, now)
        return error or drives, UNCHANGED if pace is None else []

    def leave(self, now: float, asked: LeaveRequest) -> Outcome[None]:
        """Ends a process's session, cleanly or with an error."""
        self.members.leave(asked.session, asked.error)
        return None, self._left(asked.session, asked.error)

    def tick(self, now: float) -> Outcome[None]:
        """Ends the sessions whose lease is over."""
        # While this process stood still it could hear nobody: that time counts for no lease.
        gap, self._ticked = now - self._ticked, now
        if gap > self.members.lease / 4:
            self.members.forgive(gap)
        for task in self.members.expire(now) if self.log.keeps else ():
            self.tally.lost += 1
            log.warning("removed %s: no heartbeat for %.0f s (PS_SESSION_TIMEOUT)", task, self.members.lease)
        return None, []

    # ---- Variables ----

    def create_batch(self, now: float, asked: CreateBatchRequest) -> Outcome[tuple[CreateBatchReply, Batch, int]]:
        """Creates or finds several variables, up to the first that is refused.

        Answers with what is known of them, with those that need a first value here, and with the job.
        """
        self._admission.check(asked.session, now)
        reply, needing = self._creation.create_batch(self.registry.task(asked.session), asked.variables)
        return (reply, needing, self._job), []

    def initialize_batch(
        self, now: float, variables: Batch, job: int, saved: Mapping[int, FirstValue], error: PSError | None
    ) -> Outcome[CreateBatchReply]:
        """Gives variables of a job the values that a checkpoint has for them, by number."""
        self._check_job(job)
        return self._creation.initialize_batch(variables, saved, error), []

    def _check_job(self, job: int) -> None:
        if job != self._job:
            raise ServerLost("the job was restarted; restart this process", str(self.task))

    def pull(self, now: float, asked: PullRequest, future: Future[PullReply]) -> Outcome[None]:
        """Adds a read of variables, and of rows, after a round. Readers without a session may call it as well."""
        self._admission.check_reader(asked.session, now)
        self.waiters.add(Read(asked.session, future, asked))
        self.tally.read(asked.session, self.rounds.last)
        return None, []

    # ---- The log ----

    def propose(self, now: float, asked: ProposeRequest, prepared: PreparedPlan | None) -> Outcome[PSError | None]:
        """Takes a session's plan, the join point at which it waits, or the round in which new members begin.

        Answers why the session has ended, None if it has not.
        """
        session, start = asked.session, asked.start
        self._admission.check(session, now)
        if prepared is not None or start is not None:
            self.members.check_part(session)
        if prepared is not None and self.log.propose(prepared, asked.trace):
            self.members.version += 1
        if asked.join_point:
            self.members.enter(session, asked.join_point)
        try:
            if start is not None:
                self.log.start(start)
                self.members.take_part(self.rounds.generations[start.generation].members, start.round)
        except Diverged as error:
            self.members.fail_all(error)
        return self._admission.ended(session), []

    def watch(self, now: float, asked: WatchRequest, future: Future[Watched]) -> Outcome[None]:
        """Adds a watch of the log and the sessions. Readers without a session may call it as well."""
        self._admission.check_reader(asked.session, now)
        kind = HeldCall if asked.version in WATCHED else Watch
        self.waiters.add(kind(asked.session, future, asked.after, asked.version))
        return None, []

    def part(self, now: float, session: int) -> Outcome[None]:
        """Notes that a watching connection was cut: maybe its process has ended."""
        self.members.part(session, now)
        return None, []

    def holds(self, now: float, token: int) -> Outcome[None]:
        """Checks a chief's token."""
        self._check_token(token)
        return None, []

    def approve(self, now: float, asked: ApproveRequest, prepared: Mapping[bytes, PreparedPlan]) -> Outcome[int]:
        """Appends entries of the chief's log; answers with the length up to which the two logs agree."""
        token, index, entries = asked.token, asked.index, asked.entries
        self._check_token(token)
        effects = self._restart() if self.log.begins_anew(entries) else []
        self._admission.check_unbroken()
        if ends := self._left_behind(now, index, entries):
            return index, effects + ends
        kept = self.log.keeps
        agreed, follows = self.log.append(index, entries, prepared)
        effects += [*self._heard(follows), *self._handover.follow(self.log.entries, now)]
        if self.log.keeps and not kept:
            self.members.take_over(token, now)
        for vote in self.rounds.votes.unopened(self.rounds.strands[None].last):
            self.rounds.open(vote, now)
        if (generation := self.rounds.generation) is not None and generation.start is not None:
            self.members.take_part(generation.members, -1)
        if generation is not None and generation.members:
            self.members.move(generation.members[0])
        self.members.exclude(self.rounds.fenced)
        if self.log.lost is not None:
            self.members.fail_all(self.log.lost)
        return agreed, effects

    def _check_token(self, token: int) -> None:
        # Server 0 gives the tokens; the other servers learn a new one from the new chief.
        # One that is new, and has given none, is told by the log that another one does.
        gives = self.log.keeps and (self.members.token or self.log.entries)
        newest = self.members.token if gives else max(self._token, token)
        if token != newest or token == 0:
            raise Fenced("a newer chief has taken over the job, so this chief must end")
        self._token = token

    def _restart(self) -> list[Effect]:
        """Begins a new job: drops the state of the last one, and fails the calls that still wait in it."""
        error = ServerLost("the job was restarted; restart this process", str(self.task))
        ended = {member.session for member in self.rounds.generation.members} if self.rounds.generation else set()
        effects = self._abandon(error, lambda session: session in ended)
        self._job += 1
        self.members.begin_anew(ended)
        parts = self.log, self.store, self.rounds, self.runner, self._links, self.closures, self._indices
        for part in (*parts, self.digests, self._nonfinite):
            part.clear()
        return effects

    # ---- Rounds ----

    def push(
        self, now: float, contribution: Contribution, payload: Payload, begun: Begun | None, future: Future[RoundReply]
    ) -> Outcome[None]:
        """Takes a contribution to a round, or a resend of one."""
        whole = payload.whole  # else it may become so unseen before somebody waits for it
        self._admission.check(contribution.session, now)
        if contribution.first_values:
            return None, self.first_values.push(contribution.session, contribution.first_values, payload, future)
        record, effects = self.rounds.recorded(contribution), list[Effect]()
        if record is not None:
            self.waiters.add(Owed(contribution.session, future, record, contribution))
        elif len(set(contribution.want)) != len(contribution.want):
            raise InvalidRequest("a variable is requested twice")
        else:
            reads = (*contribution.lookups, *contribution.hints)
            if reads:
                self.store.check_rows(contribution.lookups, contribution.hints)
                effects += self.store.read_ahead(contribution.lookups)  # at once: the round may wait for others
            effects += self._heard(self.rounds.push(contribution, payload, future, now))
            if not any(isinstance(each, Fail) and each.future is future for each in effects):
                if begun is not None:
                    effects += self.runner.listen(contribution, future, begun)
                if reads:
                    effects += self.store.read_ahead(contribution.hints, hint=True)  # behind the round
        return None, effects if whole else [*effects, Await(payload, payload.size)]

    def _reply(self, owed: Owed) -> list[Effect]:
        return self.runner.replies(owed.record, [(owed.said, owed.future)])

    # ---- Checkpoints ----

    def snapshot(self, now: float, asked: SnapshotRequest, future: Future[Shard]) -> Outcome[None]:
        """Answers the chief once this server's shard of a checkpoint is written, or, if it sent one, the manifest."""
        self._check_token(asked.token)
        return None, self.snapshots.ask(asked.plan_id, asked.manifest, future)

    def restore(self, now: float, asked: RestoreRequest, future: Future[RestoreReply]) -> Outcome[Future[RestoreReply]]:
        """Begins a stage of a restore; answers with the future of its reply."""
        self._admission.check(asked.session, now)
        if self.log.keeps and asked.order.stage != "look":
            self.members.check_part(asked.session)
        return self.restores.ask(asked.session, asked.path, asked.turn, asked.order, future)

    # ---- The end ----

    def close(self, now: float) -> Outcome[None]:
        """Fails all calls that wait. Answered calls lose nothing."""
        return None, self._abandon(ServerLost("the server is shutting down", str(self.task)), lambda session: True)

    def _abandon(self, error: PSError, watches: Callable[[int], bool]) -> list[Effect]:
        """Fails all calls that wait; a watch only if `watches` holds for its session."""
        waiting: list[Future[Any]] = [*self.waiters.drop(watches), *self.snapshots.clear(), *self.restores.clear()]
        parts = (self.rounds, self.first_values, self.closures)
        return [effect for part in parts for effect in part.abandon(error)] + [Fail(f, error) for f in waiting]
