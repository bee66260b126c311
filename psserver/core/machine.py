"""One parameter server as a state machine: each stimulus is a method that changes its state and returns effects.

It has no lock, no thread and no clock, and does no array work: `Core` passes one stimulus at a time with the time it
came, and carries out the effects. Two machines that are given the same stimuli reach the same state.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from psserver.config import ServerConfig
from psserver.core.admission import Admission
from psserver.core.job import Job
from psserver.core.service_verbs import ServiceVerbs
from psserver.core.status import status_of
from psserver.effects import Await, Effect, Fail, Outcome, Reply, Work
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from psserver.registry import Registry
from psserver.rounds.pending_round import Push
from psserver.rounds.rounds import place_of
from psserver.services.standbys import Standbys
from psserver.services.watches import Watches
from psserver.state.counters import ServerCounters
from psserver.state.sessions import DRAWN, STILL_SECONDS, Membership
from psserver.state.variables import FirstValue
from psserver.tables.native import Native
from psserver.tiers.tier import Tier
from pswire.api import (
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
from pswire.errors import Diverged, Fenced, InvalidRequest, NewcomerDiverged, PSError, ServerGone, ServerLost
from pswire.limits import WINDOW
from pswire.model.log import Member
from pswire.model.plan import PlacedVariable
from pswire.model.saved import RestoreReply, Shard
from pswire.model.status import ServerStatus
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


class Machine:
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
        outlived: why the job goes on without this server; None if it does not.
        registry: its sessions, which the rims may look up.
        job: the state of the job; a new one with each job.
        members, watches, tally: what outlives jobs: sessions, the calls that watch them, counters.
    """

    def __init__(self, config: ServerConfig, incarnation: int, kernels: Kernels, clock: Callable[[], float]) -> None:
        self.task, self.server = config.task, config.task.index
        self.incarnation = incarnation
        self.outlived: ServerLost | None = None
        self._domain = config.domain
        self.done: Future[None] = Future()
        self.left: Future[None] = Future()
        self._config, self._kernels = config, kernels
        self._native = Native(kernels.on_host.compiler, _tier_of(config))
        self.tally = ServerCounters(clock)
        self.registry = Registry(self.task, config.max_sessions)
        held, pauses = self._holds_job, (config.timeouts.session_timeout, config.timeouts.heartbeat_interval)
        generation, generations = lambda: self.job.rounds.generation, lambda: self.job.rounds.generations
        self.members = Membership(self.registry, *pauses, incarnation, generation, held, generations)
        self.watches = Watches(self.members)
        self.standbys = Standbys(self.task, lambda: self.job.log, self._check_token, self._go)
        self.job: Job = self._new_job(None)
        self._admission = Admission(self.task, self.registry, self.members, self.job)
        self._verbs = ServiceVerbs(
            self.task, self.registry, self._admission, lambda: (*self.job.services, self.standbys)
        )
        self._token = 0
        self._looked = (-1, 0)  # the version of the sessions, and the length of the log, at the last look for news
        self.began = self._ticked = clock()

    def _new_job(self, before: Job | None) -> Job:
        outlive = self._kernels, self._native, self.registry, self.members, self.tally
        return Job(self._config, self.incarnation, *outlive, self._cannot_read, before)

    def progress(self, now: float) -> list[Effect]:
        """Returns the effects that have become possible: answers and rounds. Called after every stimulus."""
        effects: list[Effect] = []
        for session, error in self._admission.ends():
            effects += [*self.job.session_ended(session, error), *self.watches.session_ended(session, error)]
        effects += self.job.progress(now)
        look = self.members.version, len(self.job.log.entries)
        if look != self._looked:
            self._looked = look
            effects += self.watches.answers(self.job.log, now)
            if self._is_done:
                effects.append(Reply(self.done, None))
        return effects

    def verb(self, name: str) -> Callable[..., Outcome[Any]]:
        """Returns the stimulus of a name: the machine's method, or the verb of a service."""
        found: Callable[..., Outcome[Any]] = getattr(self, name, None) or self._verbs.stimuli[name]
        return found

    # ---- Time and work ----

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
        if self.job.log.keeps:
            session, token = self.members.open(opens, drives, session, now, job, term, drawn)
        else:
            self.registry.enter(session, opens.task)
            self.members.know(replace(opens, session=session), drives, job, now)
            token = max(self.members.term, self._token >> DRAWN, term) + 1 << DRAWN | drawn if drives else 0
        self.tally.signs += 1
        seen = max(self.members.term, self._token >> DRAWN)
        here, tiers = str(self._kernels.device), self._native.tier is not None
        return Opened(session, self.incarnation, token, self.server, here, seen, WINDOW, self._domain, tiers), []

    def _holds_job(self) -> bool:
        """Returns True if there is a job with variables that is not over."""
        return bool(self.job.log.entries and self.job.store.variables) and not self.job.log.over

    def heartbeat(self, now: float, asked: HeartbeatRequest) -> Outcome[bool | PSError]:
        """Renews a session's lease and notes what it says of itself.

        Answers whether its process is to drive the job, or with the error that ended the session.
        """
        session, pace = asked.session, asked.pace
        error = self._admission.ended(session)
        if error is None and self.job.log.keeps:
            self.members.heartbeat(session, (asked.round, asked.plan_id), now, self.job.log.describe, pace)
            error = self._admission.ended(session)
        elif error is None:
            self.members.touch(session, now, pace)
        if error is None and pace is not None:
            self.job.rounds.clocks.tell(session, asked.clock)
        self.tally.signs += error is None
        drives = self.job.log.keeps and self.job.log.lost is None and self.members.is_to_drive(session, now)
        return error or drives, UNCHANGED if pace is None else []

    def leave(self, now: float, asked: LeaveRequest) -> Outcome[None]:
        """Ends a process's session, cleanly or with an error."""
        self.members.leave(asked.session, asked.error)
        return None, [] if asked.error else self._verbs.task_left(asked.session)

    def tick(self, now: float) -> Outcome[None]:
        """Ends the sessions whose lease is over."""
        # While this process stood still it could hear nobody: that time counts for no lease.
        gap, self._ticked = now - self._ticked, now
        if gap > self.members.lease / 4:
            self.members.forgive(gap)
        for task in self.members.expire(now) if self.job.log.keeps else ():
            self.tally.lost += 1
            log.warning("removed %s: no heartbeat for %.0f s (PS_SESSION_TIMEOUT)", task, self.members.lease)
        return None, []

    # ---- Variables ----

    def create_batch(self, now: float, asked: CreateBatchRequest) -> Outcome[tuple[CreateBatchReply, Batch, int]]:
        """Creates or finds several variables, up to the first that is refused.

        Answers with what is known of them, with those that need a first value here, and with the job.
        """
        self._admission.check(asked.session, now)
        reply, needing = self.job.creation.create_batch(self.registry.task(asked.session), asked.variables)
        return (reply, needing, self.job.number), []

    def initialize_batch(
        self, now: float, variables: Batch, job: int, saved: Mapping[int, FirstValue], error: PSError | None
    ) -> Outcome[CreateBatchReply]:
        """Gives variables of a job the values that a checkpoint has for them, by number."""
        if job != self.job.number:
            raise self._restarted()
        return self.job.creation.initialize_batch(variables, saved, error), []

    def _restarted(self) -> ServerLost:
        return ServerLost("the job was restarted; restart this process", str(self.task))

    def pull(self, now: float, asked: PullRequest, future: Future[PullReply]) -> Outcome[None]:
        """Adds a read of variables, and of rows, after a round. Readers without a session may call it as well."""
        self._admission.check_reader(asked.session, now)
        effects = self.job.reads.add(asked, future)
        self.tally.read(asked.session, self.job.rounds.last)
        return None, effects

    # ---- The log ----

    def propose(self, now: float, asked: ProposeRequest, prepared: PreparedPlan | None) -> Outcome[PSError | None]:
        """Takes a session's plan, the join point at which it waits, or the round in which new members begin.

        Answers why the session has ended, None if it has not.
        """
        session, start = asked.session, asked.start
        self._admission.check(session, now)
        if prepared is not None or start is not None:
            self.members.check_part(session)
        if prepared is not None and self.job.log.propose(prepared, asked.trace):
            self.members.version += 1
        if asked.join_point:
            self.members.enter(session, asked.join_point)
        try:
            if start is not None:
                self.job.log.start(start)
                self.members.take_part(self.job.rounds.generations[start.generation].members, start.round)
        except Diverged as error:
            self.members.fail_all(error)
        return self._admission.ended(session), []

    def watch(self, now: float, asked: WatchRequest, future: Future[Watched]) -> Outcome[None]:
        """Adds a watch of the log and the sessions. Readers without a session may call it as well."""
        self._admission.check_reader(asked.session, now)
        return None, self.watches.add(asked, future, self.job.log, now)

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
        effects = self._restart() if self.job.log.begins_anew(entries) else []
        self._admission.check_unbroken()
        if reason := self.job.log.removed_by(index, entries):  # the chief tells one that answers still
            why = f"the job goes on without this server, because it {reason}"
            return index, effects + self.outlive(now, ServerGone(why, str(self.task)))[1]
        kept = self.job.log.keeps
        agreed, follows = self.job.log.append(index, entries, prepared)
        effects += [*self._heard(follows), *self.job.handover.follow(self.job.log.entries, now)]
        if self.job.log.keeps and not kept:
            self.members.take_over(token, now)
        for vote in self.job.rounds.votes.unopened(self.job.rounds.sequences[None].last):
            self.job.rounds.open(vote, now)
        if (generation := self.job.rounds.generation) is not None and generation.start is not None:
            self.members.take_part(generation.members, -1)
        if generation is not None and generation.members:
            self.members.move(generation.members[0])
        self.members.exclude(self.job.rounds.fenced)
        if self.job.log.lost is not None:
            self.members.fail_all(self.job.log.lost)
        return agreed, effects

    def _check_token(self, token: int) -> None:
        # Server 0 gives the tokens; the other servers learn a new one from the new chief.
        # One that is new, and has given none, is told by the log that another one does.
        gives = self.job.log.keeps and (self.members.token or self.job.log.entries)
        newest = self.members.token if gives else max(self._token, token)
        if token != newest or token == 0:
            raise Fenced("a newer chief has taken over the job, so this chief must end")
        self._token = token

    def _restart(self) -> list[Effect]:
        """Begins a new job: drops the state of the last one, and fails the calls that still wait in it."""
        error, generation = self._restarted(), self.job.rounds.generation
        ended = {member.session for member in generation.members} if generation else set[int]()
        effects = self.job.abandon(error, self._admission.admitted)
        effects += [effect for session in ended for effect in self.watches.session_ended(session, error)]
        self.job.runner.drop()
        self.tally.forget()
        self.members.begin_anew(ended)
        held = bool(self.job.store.variables)
        self.job = self._admission.job = self._new_job(self.job)
        if held:
            gc.collect()  # the new one needs the memory of the old one, whose parts hold each other
        return effects

    # ---- A job that goes on without this server ----

    def outlive(self, now: float, error: ServerGone) -> Outcome[None]:
        """The job goes on without this server, which was paused, or cut off: nothing that it has is of use."""
        log.error("%s ends: %s", self.task, error.message)
        self.outlived = self.job.runner.broken = ServerLost(error.message, str(self.task))
        return None, self._go()

    def _go(self) -> list[Effect]:
        """The job goes on without this server."""
        return [Reply(self.left, None), Reply(self.done, None)]

    def _cannot_read(self, now: float, error: PSError) -> list[Effect]:
        """Ends this server, which the others count on, and which could not read its variables."""
        why = f"it could not read its variables: {error.message}"
        return self.outlive(now, ServerGone(why, str(self.task)))[1]

    # ---- Rounds ----

    def push(
        self, now: float, contribution: Contribution, payload: Payload, begun: Begun | None, future: Future[RoundReply]
    ) -> Outcome[None]:
        """Takes a contribution to a round, or a resend of one."""
        whole = payload.whole  # else it may become so unseen before somebody waits for it
        said, job, effects = contribution, self.job, list[Effect]()
        self._admission.check(said.session, now)
        if said.first_values:
            return None, job.first_values.push(said.session, said.first_values, payload, future)
        place = place_of(said, job.rounds.generations)
        if (record := job.rounds.recorded(said, place)) is not None:
            taken = job.rounds.late.take(Push(said, payload, now, future), place[1], place[2], record)
            if taken is None:
                job.late.add(said, future, record)
            else:
                effects += taken
        elif len(set(said.want)) != len(said.want):
            raise InvalidRequest("a variable is requested twice")
        else:
            reads = said.lookups or said.hints
            if reads:
                job.store.check_rows(said.lookups, said.hints)
                effects += job.store.read_ahead(said.lookups)  # at once: the round may wait for others
            pushed = job.rounds.push(said, payload, future, now, place)
            effects += self._heard(pushed) if pushed else pushed
            if not (pushed and any(isinstance(each, Fail) and each.future is future for each in pushed)):
                if begun is not None:
                    effects += job.runner.listen(said, future, begun)
                if reads:
                    effects += job.store.read_ahead(said.hints, hint=True)  # behind the round
        if not whole:
            effects.append(Await(payload, payload.size))
        return None, effects if effects or not job.rounds.lacks(said, place) else UNCHANGED

    # ---- Checkpoints ----

    def snapshot(self, now: float, asked: SnapshotRequest, future: Future[Shard]) -> Outcome[None]:
        """Answers the chief once this server's shard of a checkpoint is written, or, if it sent one, the manifest."""
        self._check_token(asked.token)
        return None, self.job.snapshots.ask(asked.plan_id, asked.manifest, future)

    def restore(self, now: float, asked: RestoreRequest, future: Future[RestoreReply]) -> Outcome[Future[RestoreReply]]:
        """Begins a stage of a restore; answers with the future of its reply."""
        self._admission.check(asked.session, now)
        if self.job.log.keeps and asked.order.stage != "look":
            self.members.check_part(asked.session)
        return self.job.restores.ask(asked.session, asked.path, asked.turn, asked.order, future)

    # ---- What is there, and the end; looks change nothing ----

    @property
    def _is_done(self) -> bool:
        """True once the job has ended, and the chief has told everybody."""
        return self.job.log.over and (not self.job.log.keeps or self.members.chief_left())

    def well(self, now: float) -> bool:
        """Returns True if the server is healthy: leases are checked in time, and no round has failed halfway."""
        return now - self._ticked < STILL_SECONDS and self.job.runner.broken is None

    def leaving(self, now: float) -> bool | None:
        """Returns True while a process of the job leaves that was told to end; None while one may be told so yet."""
        return False if self._is_done else self.members.leave_now(now)

    def untold(self, now: float) -> bool:
        """Returns True while a process waits for a place that does not know yet that the job is over."""
        return self._is_done and self.standbys.untold(now)

    def status(self, now: float) -> ServerStatus:
        """Returns the server's status: its state, and the open rounds with the members they wait for."""
        standbys = self.standbys.waiting(now)
        return status_of(self.incarnation, self._domain, self.tally, self.members, self.job, standbys, now)

    def close(self, now: float) -> Outcome[None]:
        """Fails all calls that wait. Answered calls lose nothing."""
        error = ServerLost("the server is shutting down", str(self.task))
        return None, self.job.abandon(error, self._admission.admitted) + self.watches.fail_all(error)
