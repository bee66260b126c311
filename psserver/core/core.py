"""One parameter server, without its network: the `ParameterServer` of a process.

The core holds the one lock. Under it the state machines decide (membership, log, rounds, store); array
work and answers happen outside of it. The clock is an argument.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from psserver.checkpoints.restores import Restores
from psserver.checkpoints.snapshots import Snapshots
from psserver.core.log import Log
from psserver.core.runner import Runner
from psserver.core.status import status_of
from psserver.core.waiting import Read, Resend, Waiters, Watch
from psserver.devices import Device, owned
from psserver.effects import Answer, Submit, answering, do, failing
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from psserver.registry import Registry
from psserver.state.counters import ServerCounters
from psserver.state.rounds import Rounds
from psserver.state.sessions import DRAWN, STILL_SECONDS, Membership
from psserver.state.variables import Store
from pswire.api import (
    ALL,
    Begun,
    Contribution,
    CreateReply,
    Opened,
    PullReply,
    RestoreOrder,
    RestoreReply,
    RoundReply,
    Shard,
    Watched,
)
from pswire.checkpoint.storage import storage_at
from pswire.cluster import Task
from pswire.errors import Diverged, Fenced, InvalidRequest, NewcomerDiverged, PSError, ServerLost
from pswire.limits import MAX_SESSIONS, MAX_VARIABLES, Timeouts
from pswire.model.log import Approved, LogEntry, Mode, Start
from pswire.model.plan import PlacedVariable, Plan, Turn, VariableSpec
from pswire.model.status import ServerStatus
from pswire.telemetry import logging_setup
from pswire.transport.payload import Payload

log = logging.getLogger("psserver")

NUMBERS = 20
"""Bits of a session's number that count within one life of server 0; those above are of its incarnation."""


class Core:
    """A server's state and verbs. May be called from any thread.

    Args:
        server: the number of this server; server 0 also keeps the log and the sessions.
        incarnation: this process's life, 64 bits drawn by lot: no clock can give one twice.
        device: where variables live, "cpu" or "gpu:0".
        memory_limit: bytes of variables, 0 for no limit.
        checkpoint_root: the directory or URL below which checkpoints are written and read.
        timeouts: the lease is what counts here.
        clock: monotonic seconds.
        submit: runs array work, one piece after another.
        threads: that run one update program.
        snapshot_limit: bytes of old values that checkpoints hold while they are written, 0 for no limit.
        files: runs work on files, one piece after another, beside the array work; None: as array work.
        max_sessions: that may be open at a time.

    Attributes:
        done: answered when the job has ended and everybody has left.
        kernels, tally: what its metrics tell of.
        registry: its sessions, which the rims may look up.
    """

    def __init__(
        self,
        server: int,
        incarnation: int,
        device: str,
        memory_limit: int,
        checkpoint_root: str | os.PathLike[str],
        timeouts: Timeouts,
        clock: Callable[[], float],
        submit: Submit,
        threads: int = 1,
        snapshot_limit: int = 0,
        files: Submit | None = None,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        self.server = server
        self.task = Task("ps", server)
        self.incarnation = incarnation
        self.device = Device.parse(device)
        self.done: Future[None] = Future()
        self._clock = clock
        self._submit = submit
        self.kernels = Kernels(self.device, threads)
        self._lock = threading.Lock()
        # All below is guarded by the lock.
        self._store = Store(server, self.device, memory_limit)
        self._rounds = Rounds(lambda plan_id: self._log.describe(plan_id))
        self.tally = ServerCounters(clock, self._lock, self._rounds)
        # Other servers may remember the numbers of an earlier life.
        first = incarnation >> NUMBERS << NUMBERS
        self.registry = Registry(self.task, max_sessions)
        self._members = Membership(
            self.registry, timeouts.lease, timeouts.beat, first, lambda: self._rounds.epoch, self._holds_job
        )
        root, files = storage_at(checkpoint_root), files or submit
        self._restores = Restores(self.task, self._lock, self._store, root, files, self.tally)
        self._snapshots = Snapshots(
            self.task,
            self._lock,
            self._store,
            self._rounds,
            self._restores,
            root,
            snapshot_limit,
            files,
            self._progress,
            self.tally,
        )
        self._log = Log(self.task, self._store, self._rounds, self._snapshots)
        self._token = 0
        self._job = 0
        self._ticked = clock()
        self._waiters = Waiters(self._log, self._members, self._store, self._rounds, submit, self._reply)
        self._runner = Runner(
            self._lock,
            self._store,
            self._rounds,
            self._snapshots,
            self._restores,
            self.kernels,
            submit,
            self._progress,
            self.tally,
        )

    # ---- Sessions ----

    def open(
        self,
        task: Task,
        replicas: int,
        session: int,
        drives: bool,
        mode: Mode = "sync",
        job: str = "",
        term: int = 0,
    ) -> Opened:
        with self._lock:
            token = 0
            if self.server == 0:
                session, token = self._members.open(task, replicas, drives, session, self._clock(), mode, job, term)
            else:
                self.registry.enter(session, task)
            seen = max(self._members.term, self._token >> DRAWN)
            self.tally.signs += 1
            answers = self._progress()
        do(answers)
        return Opened(session, self.incarnation, token, self.server, str(self.device), seen)

    def _holds_job(self) -> bool:
        """Returns whether there is a job, with variables, that is not over."""
        return bool(self._log.entries and self._store.variables) and not self._log.over

    def beat(self, session: int, round: int, plan_id: bytes) -> None:
        with self._lock:
            error = self._ended(session)
            if error is None and self.server == 0:
                self._members.beat(session, (round, plan_id), self._clock(), self._log.describe)
                error = self._ended(session)
            self.tally.signs += error is None
            answers = self._progress()
        do(answers)
        if error is not None:
            raise error

    def leave(self, session: int, error: str) -> None:
        with self._lock:
            self._members.leave(session, error)
            answers = self._progress()
        do(answers)

    def tick(self, now: float) -> None:
        """Ends the sessions whose lease is over. To be called a few times per lease."""
        with self._lock:
            # While this process stood still it could hear nobody: that time counts for no lease.
            gap, self._ticked = now - self._ticked, now
            if gap > self._members.lease / 4:
                self._members.forgive(gap)
            for task in self._members.expire(now):
                self.tally.lost += 1
                log.warning("lost %s: no sign of life for %.0f s", task, self._members.lease)
            answers = self._progress()
        do(answers)

    def well(self) -> bool:
        """Returns whether it does what it is there for: leases are looked at, and no round has failed halfway."""
        return self._clock() - self._ticked < STILL_SECONDS and self._runner.broken is None

    def _check(self, session: int) -> None:
        logging_setup.SESSION.set(session)
        error = self._ended(session)
        if error is not None:
            raise error
        self._members.touch(session, self._clock())

    def _check_reader(self, session: int) -> None:
        """As `_check`; who only looks has no session, 0."""
        if session:
            self._check(session)
        else:
            self._check_unbroken()

    def _ended(self, session: int) -> PSError | None:
        """Returns why a session may do nothing here; None if it may."""
        try:
            if self.server == 0:
                self._members.check(session)
            else:
                self.registry.check(session, self._rounds.epoch)
            self._rounds.check(session)
            self._check_unbroken()
        except PSError as error:
            return error
        return None

    def _check_unbroken(self) -> None:
        """Raises `ServerLost` if a round has failed halfway: nobody may compute on a mixture."""
        if self._runner.broken:
            raise ServerLost(self._runner.broken.message, str(self.task))

    # ---- Variables ----

    def create(
        self,
        session: int,
        ordinal: int,
        id: int,
        spec: VariableSpec,
        servers: tuple[int, ...],
        value: Payload | None,
    ) -> CreateReply:
        with self._lock:
            self._check(session)
            if id < 0 and self.server == 0:
                variable = self._log.name(self.registry.task(session), ordinal, spec, servers)
            else:
                variable = PlacedVariable(id, spec, servers)
                known = MAX_VARIABLES if self.server else len(self._store.variables)
                if self.server not in servers or not 0 <= id < known:
                    raise InvalidRequest(f"variable {spec} was not placed on this server", str(self.task))
                self._store.declare(variable)
            here = self.server in variable.servers
            needed, job = here and not self._store.initialized(variable.id), self._job
        if needed:
            # Outside of the lock: this may read a file, copy, or move to a device.
            array = saved = self._restores.first_value(variable)
            if array is None and value is not None:
                array = self.device.put(owned(value.tensors([spec.tensor])[0]))
            with self._lock:
                self._check_job(job)
                if array is not None and self._store.initialize(variable.id, array) and saved is not None:
                    self._restores.begun.add(variable.id)
        with self._lock:
            initialized = here and self._store.initialized(variable.id)
            restored = variable.id in self._restores.begun
            answers = self._progress()
        do(answers)
        return CreateReply(variable.id, variable.servers, initialized, restored)

    def _check_job(self, job: int) -> None:
        """Raises `ServerLost` if what was begun in one job ends in another."""
        if job != self._job:
            raise ServerLost("the job was started anew; restart the process", str(self.task))

    def pull(self, session: int, variables: Sequence[int], after: int) -> Future[PullReply]:
        future: Future[PullReply] = Future()
        with self._lock:
            self._check_reader(session)
            self._waiters.add(Read(session, future, tuple(variables), after))
            self.tally.read(session, self._rounds.last)
            answers = self._progress()
        do(answers)
        return future

    # ---- The log ----

    def propose(self, session: int, plan: Plan | None, join_point: str, start: Start | None) -> None:
        prepared = None if plan is None else self._prepared(plan)
        with self._lock:
            self._check(session)
            if plan is not None or start is not None:
                self._members.check_part(session)
            if prepared is not None and self._log.propose(prepared):
                self._members.version += 1
            if join_point:
                self._members.enter(session, join_point)
            try:
                if start is not None:
                    self._log.start(start)
                    self._members.take_part(self._rounds.members(start.epoch), start.round)
            except Diverged as error:
                self._members.fail_all(error)
            answers = self._progress()
            ended = self._ended(session)
        do(answers)
        if ended is not None:
            raise ended

    def _prepared(self, plan: Plan) -> PreparedPlan:
        """A plan as this server would run it; made outside of the lock."""
        return PreparedPlan(plan, self.server, self._store.memory_limit > 0)

    def watch(self, session: int, after: int, version: int) -> Future[Watched]:
        future: Future[Watched] = Future()
        with self._lock:
            self._check_reader(session)
            self._waiters.add(Watch(session, future, after, version))
            answers = self._progress()
        do(answers)
        future.add_done_callback(partial(self._part, session))
        return future

    def _part(self, session: int, watch: Future[Watched]) -> None:
        """Who waited for news has gone away: maybe its process has ended."""
        if watch.cancelled():
            with self._lock:
                self._members.part(session, self._clock())

    def approve(self, token: int, index: int, entries: Sequence[LogEntry]) -> int:
        with self._lock:
            self._check_token(token)
        prepared = {entry.plan.id: self._prepared(entry.plan) for entry in entries if isinstance(entry, Approved)}
        with self._lock:
            self._check_token(token)
            answers = self._restart() if self._log.begins_anew(entries) else []
            self._check_unbroken()
            agreed = self._log.append(index, entries, prepared)
            if (epoch := self._rounds.epoch) is not None and epoch.start is not None:
                self._members.take_part(epoch.members, -1)
            self._members.exclude(self._rounds.fenced)
            if self._log.lost is not None:
                self._members.fail_all(self._log.lost)
            answers += self._progress()
        do(answers)
        return agreed

    def _check_token(self, token: int) -> None:
        # Server 0 has given it; the others hear of a new one from the new chief.
        newest = self._members.token if self.server == 0 else max(self._token, token)
        if token != newest or token == 0:
            raise Fenced("there is a newer chief, whose token alone counts; this one has to end")
        self._token = token

    def _restart(self) -> list[Answer]:
        """A new job: drops all that the last one left, and tells those who still wait in it."""
        error = ServerLost("the job was started anew; restart the process", str(self.task))
        ended = {member.session for member in self._rounds.epoch.members} if self._rounds.epoch else set()
        answers = self._abandon(error, lambda session: session in ended)
        self._job += 1
        self._members.begin_anew(ended)
        self._log.clear()
        self._store.clear()
        self._rounds.clear()
        self._runner.clear()
        return answers

    # ---- Rounds ----

    def push(self, contribution: Contribution, payload: Payload, begun: Begun | None = None) -> Future[RoundReply]:
        future: Future[RoundReply] = Future()
        answers: list[Answer] = []
        whole = payload.whole  # else it may become so unseen before somebody waits for it
        with self._lock:
            self._check(contribution.session)
            record = self._rounds.recorded(contribution)
            if record is not None:
                self._waiters.add(Resend(contribution.session, future, record, contribution))
            elif len(set(contribution.want)) != len(contribution.want):
                raise InvalidRequest("a variable is wanted twice")
            else:
                try:
                    self._rounds.push(contribution, payload, future, self._clock())
                except PSError as error:
                    answers.append(failing(future, error))
                else:
                    if begun is not None:
                        answers += self._runner.listen(contribution, future, begun)
            answers += self._progress()
        do(answers)
        if not whole:
            payload.reach(payload.size, self._look)
        return future

    def _look(self) -> None:
        """Something may be ready by now."""
        with self._lock:
            answers = self._progress()
        do(answers)

    # ---- Checkpoints ----

    def snapshot(self, token: int, plan_id: bytes, manifest: str) -> Future[Shard]:
        future: Future[Shard] = Future()
        with self._lock:
            self._check_token(token)
            answer = self._snapshots.ask(plan_id, manifest, future)
        answer()
        return future

    def restore(self, session: int, path: str, turn: Turn, order: RestoreOrder = ALL) -> Future[RestoreReply]:
        with self._lock:
            self._check(session)
            if self.server == 0 and order.stage != "look":
                self._members.check_part(session)
            future, answers = self._restores.ask(session, path, turn, order, Future())
        do(answers)
        return future

    # ---- What is there, and what waits ----

    def status(self) -> ServerStatus:
        with self._lock:
            return status_of(
                self.incarnation,
                self._store,
                self._rounds,
                self._members,
                self._log,
                self._snapshots,
                self._runner,
                self._clock(),
            )

    def close(self) -> None:
        """Ends all that waits; nothing is lost that was answered."""
        with self._lock:
            answers = self._abandon(ServerLost("the server ends", str(self.task)), lambda session: True)
        do(answers)
        self.kernels.close()

    def _abandon(self, error: PSError, watches: Callable[[int], bool]) -> list[Answer]:
        """Fails all that waits; of the watchers those for whose session `watches` holds."""
        self._rounds.abandon(error)
        waiting: list[Future[Any]] = [future for future, _ in self._rounds.take_failed()]
        waiting += self._waiters.drop(watches)
        waiting += self._snapshots.clear()
        waiting += self._restores.clear()
        return [failing(future, error) for future in waiting]

    def _reply(self, again: Resend) -> list[Answer]:
        return self._runner.replies(again.record, [(again.said, again.future)])

    def _progress(self) -> list[Answer]:
        """After every change, under the lock: what can be answered or run now."""
        answers: list[Answer] = []
        for session in self._rounds.sessions():
            error = self._ended(session)
            if error is not None:
                self._rounds.fail_session(session, error)
        for future, error in self._rounds.take_failed():
            answers.append(failing(future, error))
            if isinstance(error, Diverged) and not isinstance(error, NewcomerDiverged):
                self._members.fail_all(error)
        answers += [partial(kept.follow, again) for kept, again in self._rounds.take_followed()]
        answers += self._runner.next()
        answers += self._waiters.answers(self._clock(), self._ended)
        answers += self._snapshots.answers()
        if self._log.over and (self.server != 0 or self._members.chief_left()):
            answers.append(answering(self.done, None))
        return answers
