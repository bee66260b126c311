"""One parameter server, without its network: the `ParameterServer` of a process.

The core holds the one lock. Under it the state machines decide (membership, log, rounds, store); array
work and answers happen outside of it. The clock is an argument.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from psserver import executor
from psserver.answers import Answer, Submit, answering, do, failing
from psserver.arrays import Device
from psserver.log import Log
from psserver.membership import Membership
from psserver.rounds import Job, Record, Rounds
from psserver.snapshots import Positions, Snapshots
from psserver.store import Store, human, owned
from pswire.api import (
    Contribution,
    CreateReply,
    Opened,
    PullReply,
    RoundReply,
    ServerStatus,
    Shard,
    Watched,
)
from pswire.cluster import Task
from pswire.errors import Fenced, PSError, ServerLost
from pswire.limits import Timeouts
from pswire.spec import Entry, Plan, Snapshotted, Start, Variable, VariableSpec
from pswire.tensor import Payload

log = logging.getLogger("psserver")


class Core:
    """A server's state and verbs. May be called from any thread.

    Args:
        server: the number of this server; server 0 also keeps the log and the sessions.
        incarnation: this process's life; never used twice.
        device: where variables live, "cpu" or "gpu:0".
        memory_limit: bytes of variables, 0 for no limit.
        checkpoint_root: the directory below which checkpoints are written and read.
        timeouts: the lease is what counts here.
        clock: monotonic seconds.
        submit: runs array work, one piece after another.

    Attributes:
        done: answered when the job has ended and everybody has left.
    """

    def __init__(
        self,
        server: int,
        incarnation: int,
        device: str,
        memory_limit: int,
        checkpoint_root: Path,
        timeouts: Timeouts,
        clock: Callable[[], float],
        submit: Submit,
    ) -> None:
        self.server = server
        self.task = Task("ps", server)
        self.incarnation = incarnation
        self.device = Device.parse(device)
        self.done: Future[None] = Future()
        self._clock = clock
        self._submit = submit
        self._lock = threading.Lock()
        # All below is guarded by the lock.
        self._store = Store(server, self.device, memory_limit)
        self._rounds = Rounds(server, lambda plan_id: self._log.describe(plan_id))
        self._members = Membership(timeouts.lease)
        self._log = Log(self.task, self._store, self._rounds)
        self._snapshots = Snapshots(self.task, self._store, checkpoint_root, submit)
        self._token = 0
        self._watchers: list[tuple[int, int, int, Future[Watched]]] = []
        self._readers: list[tuple[tuple[int, ...], int, Future[PullReply]]] = []

    # ---- Sessions ----

    def open(self, task: Task, replicas: int, session: int, drives: bool) -> Opened:
        with self._lock:
            if self.server == 0:
                session = self._members.open(task, replicas, drives, self._clock())
            answers = self._progress()
            token = self._members.token if drives else 0
            begun = self._rounds.epoch is not None
            opened = Opened(session, self.incarnation, token, self.server, begun, str(self.device))
        do(answers)
        return opened

    def beat(self, session: int, round: int, plan_id: bytes) -> None:
        with self._lock:
            try:
                if self.server == 0:
                    self._members.beat(session, (round, plan_id), self._clock(), self._log.describe)
                self._rounds.check(session)
            finally:
                answers = self._progress()
        do(answers)

    def leave(self, session: int, error: str) -> None:
        with self._lock:
            self._members.leave(session, error)
            answers = self._progress()
        do(answers)

    def tick(self, now: float) -> None:
        """Ends the sessions whose lease is over. To be called a few times per lease."""
        with self._lock:
            for task in self._members.expire(now):
                log.warning("lost %s: no sign of life for %.0f s", task, self._members.lease)
            answers = self._progress()
        do(answers)

    def _check(self, session: int) -> None:
        if self.server == 0:
            self._members.check(session)
            self._members.touch(session, self._clock())
        self._rounds.check(session)

    def _ended(self, session: int) -> PSError | None:
        try:
            self._check(session)
        except PSError as error:
            return error
        return None

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
            if id < 0:
                variable = self._log.name(self._members.task(session), ordinal, spec, servers)
            else:
                variable = Variable(id, spec, servers)
                self._store.declare(variable)
            needed = self._needs_value(variable)
        if needed and value is not None:
            # Outside of the lock: this may copy, or move to a device.
            array = self.device.put(owned(value.tensors([spec.tensor])[0]))
            with self._lock:
                self._store.initialize(variable.id, array)
                needed = False
        with self._lock:
            answers = self._progress()
        do(answers)
        return CreateReply(variable.id, variable.servers, not needed and self.server in variable.servers)

    def _needs_value(self, variable: Variable) -> bool:
        """Whether a first value is wanted here; a checkpoint that was restored may have it."""
        if self.server not in variable.servers or self._store.initialized(variable.id):
            return False
        value = self._snapshots.first_value(variable)
        if value is not None:
            self._store.initialize(variable.id, value)
        return value is None

    def pull(self, session: int, variables: Sequence[int], after: int) -> Future[PullReply]:
        future: Future[PullReply] = Future()
        with self._lock:
            self._check(session)
            for id in variables:
                self._store.value(id)
            self._readers.append((tuple(variables), after, future))
            answers = self._progress()
        do(answers)
        return future

    # ---- The log ----

    def propose(self, session: int, plan: Plan | None, entry: str, start: Start | None) -> None:
        with self._lock:
            self._check(session)
            if plan is not None and self._log.propose(plan):
                self._members.version += 1
            if entry:
                self._members.enter(session, entry)
            if start is not None:
                self._log.start(start)
            answers = self._progress()
        do(answers)

    def watch(self, session: int, after: int, version: int) -> Future[Watched]:
        future: Future[Watched] = Future()
        with self._lock:
            self._check(session)
            self._watchers.append((session, after, version, future))
            answers = self._progress()
        do(answers)
        return future

    def approve(self, token: int, index: int, entries: Sequence[Entry]) -> int:
        answers: list[Answer] = []
        with self._lock:
            self._check_token(token)
            if self._log.begins_anew(entries):
                answers = self._restart()
            agreed = self._log.append(index, entries)
            for entry in entries:
                if isinstance(entry, Snapshotted):
                    self._snapshots.thaw(entry.plan_id)
            answers += self._progress()
        do(answers)
        return agreed

    def _check_token(self, token: int) -> None:
        newest = self._members.token if self.server == 0 else self._token
        if token < newest or token == 0:
            raise Fenced(f"there is a newer chief (token {newest}, not {token}); this one has to end")
        self._token = token

    def _restart(self) -> list[Answer]:
        """A new job: drops all that the last one left, and tells those who still wait in it."""
        error = ServerLost("the job was started anew; restart the process", str(self.task))
        ended = {member.session for member in self._rounds.epoch.members} if self._rounds.epoch else set()
        answers = self._abandon(error, lambda session: session in ended)
        self._members.begin_anew(ended)
        self._log.clear()
        self._store.clear()
        self._rounds.clear()
        return answers

    # ---- Rounds ----

    def push(self, contribution: Contribution, payload: Payload) -> Future[RoundReply]:
        future: Future[RoundReply] = Future()
        answers: list[Answer] = []
        with self._lock:
            self._check(contribution.session)
            record = self._rounds.recorded(contribution)
            if record is not None:
                answers.append(self._reply(record, contribution, future))
            else:
                failed = self._rounds.push(contribution, payload, future)
                answers += [failing(waiter, error) for waiter, error in failed]
                if failed:
                    self._members.fail_all(failed[0][1])
            answers += self._progress()
        do(answers)
        return future

    def _execute(self, job: Job) -> None:
        with self._lock:
            values = self._store.values()
        error: PSError | None = None
        outcome = executor.Outcome({}, (), {})
        try:
            outcome = executor.run(job, self.server, self.device, values)
        except PSError as caught:
            error = caught
        with self._lock:
            if error is None:
                self._store.commit(outcome.assigned)
                waiters = self._rounds.complete(job, outcome.given)
                self._snapshots.freeze(job, self._rounds.positions)
            else:
                log.warning("round %d failed: %s", job.round, error)
                waiters = self._rounds.fail(job, error)
            record = self._rounds.records[job.round]
            answers = [self._reply(record, said, future, outcome) for said, future in waiters]
            answers += self._progress()
        do(answers)

    def _reply(
        self,
        record: Record,
        said: Contribution,
        future: Future[RoundReply],
        outcome: executor.Outcome | None = None,
    ) -> Answer:
        """The answer to one member; its wanted variables are read now, which is before the next round."""
        if record.error is not None or record.epoch is None:
            return failing(future, record.error or PSError("a round without an epoch"))
        wanted = outcome.wanted if outcome else {}
        try:
            fresh = [wanted[id] if id in wanted else self.device.get(self._store.value(id)) for id in said.want]
        except PSError as error:
            return failing(future, error)
        payload = Payload.pack([*record.given, *fresh])
        return answering(future, RoundReply(said.round, record.epoch, record.more, record.left_out, payload))

    # ---- Checkpoints ----

    def snapshot(self, token: int, plan_id: bytes, manifest: str) -> Future[Shard]:
        future: Future[Shard] = Future()
        with self._lock:
            self._check_token(token)
            self._snapshots.ask(plan_id, manifest, future)
            answers = self._progress()
        do(answers)
        return future

    def restore(self, session: int, path: str) -> Future[Positions]:
        with self._lock:
            self._check(session)
            future, first = self._snapshots.restoring(path, self._rounds.last)
            variables = [v for v in self._store.variables.values() if self.server in v.servers]
        if first:
            self._submit(lambda: self._restore(path, variables, future))
        return future

    def _restore(self, path: str, variables: list[Variable], future: Future[Positions]) -> None:
        try:
            restored, values = self._snapshots.read(path, variables)
        except PSError as error:
            with self._lock:
                self._snapshots.failed(future)
            do([failing(future, error)])
            return
        with self._lock:
            self._snapshots.restored(restored, values)
        do([answering(future, restored.positions)])

    # ---- What is there, and what waits ----

    def status(self) -> ServerStatus:
        with self._lock:
            return ServerStatus(
                self.server,
                self.incarnation,
                len(self._log.entries),
                self._rounds.epoch,
                self._rounds.last,
                self._rounds.positions,
                self._rounds.waiting(),
                len(self._store.variables),
                self._store.nbytes,
                self._store.memory_limit,
                self._members.chief_silent(self._clock()),
            )

    def summary(self) -> str:
        """One line of what this server holds."""
        status = self.status()
        return (
            f"{status.variables} variables, {human(status.nbytes)} of them here, after round {status.round} "
            f"on {self.device}"
        )

    def close(self) -> None:
        """Ends all that waits; nothing is lost that was answered."""
        with self._lock:
            answers = self._abandon(ServerLost("the server ends", str(self.task)), lambda session: True)
        do(answers)

    def _abandon(self, error: PSError, watches: Callable[[int], bool]) -> list[Answer]:
        """Fails all that waits; of the watchers those for whose session `watches` holds."""
        watchers = [w for w in self._watchers if watches(w[0])]
        waiting: list[Future[Any]] = [future for future, _ in self._rounds.abandon(error)]
        waiting += [future for *_, future in watchers]
        waiting += [future for *_, future in self._readers]
        waiting += self._snapshots.clear()
        self._watchers = [w for w in self._watchers if w not in watchers]
        self._readers.clear()
        return [failing(future, error) for future in waiting]

    def _progress(self) -> list[Answer]:
        """After every change, under the lock: what can be answered or run now."""
        answers: list[Answer] = []
        for session in self._rounds.sessions():
            error = self._ended(session)
            if error is not None:
                answers += [failing(f, e) for f, e in self._rounds.fail_sessions([session], error)]
        job = self._rounds.next_job()
        if job is not None:
            answers.append(lambda: self._submit(lambda: self._execute(job)))
        answers += self._answer_readers()
        answers += self._answer_watchers()
        answers += self._snapshots.answers()
        if self._log.over and (self.server != 0 or self._members.chief_left()):
            answers.append(answering(self.done, None))
        return answers

    def _answer_readers(self) -> list[Answer]:
        ready = [r for r in self._readers if r[1] <= self._rounds.last]
        self._readers = [r for r in self._readers if r[1] > self._rounds.last]
        return [self._answer_reader(ids, future) for ids, _, future in ready]

    def _answer_reader(self, ids: tuple[int, ...], future: Future[PullReply]) -> Answer:
        arrays, last = [self._store.value(id) for id in ids], self._rounds.last

        def read() -> None:
            answering(future, PullReply(last, Payload.pack([self.device.get(a) for a in arrays])))()

        return lambda: self._submit(read)

    def _answer_watchers(self) -> list[Answer]:
        version, length = self._members.version, len(self._log.entries)
        # A version of -1 follows the log alone. A log shorter than what the caller knows is another job's.
        ready = [w for w in self._watchers if length != w[1] or (w[2] >= 0 and w[2] != version)]
        if not ready:
            return []
        self._watchers = [w for w in self._watchers if w not in ready]
        plans, sessions = tuple(self._log.proposed.values()), self._members.states(self._clock())
        answers = []
        for _, after, _, future in ready:
            start = after if after <= length else 0
            entries = tuple(self._log.entries[start:])
            answers.append(answering(future, Watched(version, start, entries, plans, sessions)))
        return answers
