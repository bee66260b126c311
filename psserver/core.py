"""One parameter server, without its network: the `ParameterServer` of a process.

The core holds the one lock. Under it the state machines decide (membership, rounds, store, log); array
work and answers happen outside of it. `submit` runs array work: a thread pool in a server, at once in a
test. The clock is an argument.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from psserver import checkpoint, executor
from psserver.arrays import Device
from psserver.checkpoint import Frozen, Restored
from psserver.membership import Membership
from psserver.rounds import Job, Record, Rounds
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
from pswire.errors import (
    CheckpointError,
    Diverged,
    Fenced,
    InvalidRequest,
    MemoryLimit,
    PSError,
    ServerLost,
    VariableMismatch,
)
from pswire.limits import Timeouts
from pswire.spec import (
    Approved,
    Created,
    Done,
    Entry,
    EpochClosed,
    JobStarted,
    Plan,
    Position,
    Snapshotted,
    Start,
    Started,
    Variable,
    VariableSpec,
)
from pswire.tensor import Payload

log = logging.getLogger("psserver")

Answer = Callable[[], object]
"""Something to be done outside of the lock."""


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
        submit: Callable[[Answer], object],
    ) -> None:
        self.server = server
        self.task = Task("ps", server)
        self.incarnation = incarnation
        self.device = Device.parse(device)
        self.checkpoint_root = checkpoint_root
        self.done: Future[None] = Future()
        self._clock = clock
        self._submit = submit
        self._lock = threading.Lock()
        # All below is guarded by the lock.
        self._store = Store(server, self.device, memory_limit)
        self._rounds = Rounds(server)
        self._members = Membership(timeouts.lease)
        self._log: list[Entry] = []
        self._token = 0
        self._names: dict[str, int] = {}
        self._creators: dict[int, Task] = {}
        self._turn = 0
        self._proposed: dict[bytes, Plan] = {}
        self._watchers: list[tuple[int, int, Future[Watched]]] = []
        self._readers: list[tuple[tuple[int, ...], int, Future[PullReply]]] = []
        self._frozen: dict[bytes, Frozen] = {}
        self._snapshots: list[tuple[bytes, str, Future[Shard]]] = []
        self._restored: Restored | None = None
        self._restores: dict[tuple[str, int], Future[tuple[Position, ...]]] = {}

    # ---- Sessions ----

    def open(self, task: Task, replicas: int, session: int, drives: bool) -> Opened:
        with self._lock:
            if self.server == 0:
                session = self._members.open(task, replicas, drives, self._clock())
            answers = self._progress()
            opened = Opened(
                session,
                self.incarnation,
                self._members.token if drives else 0,
                self.server,
                self._rounds.epoch is not None,
            )
        _do(answers)
        return opened

    def beat(self, session: int, round: int, plan_id: bytes) -> None:
        with self._lock:
            try:
                if self.server == 0:
                    self._members.beat(session, (round, plan_id), self._clock(), self._describe)
                self._rounds.check(session)
            finally:
                answers = self._progress()
        _do(answers)

    def leave(self, session: int, error: str) -> None:
        with self._lock:
            self._members.leave(session, error)
            answers = self._progress()
        _do(answers)

    def tick(self, now: float) -> None:
        """Ends the sessions whose lease is over. To be called a few times per lease."""
        with self._lock:
            for task in self._members.expire(now):
                log.warning("lost %s: no sign of life for %.0f s", task, self._members.lease)
            answers = self._progress()
        _do(answers)

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
                variable = self._name(session, ordinal, spec, servers)
            else:
                variable = Variable(id, spec, servers)
                self._declare(variable)
            needed = self._needs_value(variable)
        if needed and value is not None:
            # Outside of the lock: this may copy, or move to a device.
            array = self.device.put(owned(value.tensors([spec.tensor])[0]))
            with self._lock:
                self._store.initialize(variable.id, array)
                needed = False
        with self._lock:
            answers = self._progress()
        _do(answers)
        return CreateReply(variable.id, variable.servers, not needed and self.server in variable.servers)

    def _name(self, session: int, ordinal: int, spec: VariableSpec, servers: tuple[int, ...]) -> Variable:
        """Server 0: finds the variable, or names and places it."""
        task = self._members.task(session)
        known = self._names.get(spec.name)
        if known is not None or ordinal < len(self._creators):
            there = self._store.variables[ordinal if known is None else known]
            if there.spec != spec or there.id != ordinal:
                raise VariableMismatch(
                    f"{task} creates variable {spec} as its number {ordinal}; {self._creators[there.id]} created "
                    f"{there.spec} as number {there.id}. Every process must create the same variables in the "
                    "same order"
                )
            return there
        if ordinal > len(self._creators):
            raise Diverged(f"{task} creates its variable number {ordinal}, and the job has {len(self._creators)}")
        count = self._servers()
        if not all(0 <= server < count for server in servers):
            raise InvalidRequest(f"servers {servers} of {count}")
        placed = servers or (self._turn % count,)
        self._turn += not servers
        variable = Variable(ordinal, spec, placed)
        self._declare(variable)
        self._names[spec.name] = variable.id
        self._creators[variable.id] = task
        self._log.append(Created(variable))
        return variable

    def _declare(self, variable: Variable) -> None:
        self._store.declare(variable)

    def _needs_value(self, variable: Variable) -> bool:
        """Whether a first value is wanted here; a checkpoint that was restored may have it."""
        if self.server not in variable.servers or self._store.initialized(variable.id):
            return False
        if self._restored is not None and variable.spec.name in self._restored:
            self._store.initialize(variable.id, self.device.put(self._restored.read(variable.spec)))
            return False
        return True

    def pull(self, session: int, variables: Sequence[int], after: int) -> Future[PullReply]:
        future: Future[PullReply] = Future()
        with self._lock:
            self._check(session)
            for id in variables:
                self._store.value(id)
            self._readers.append((tuple(variables), after, future))
            answers = self._progress()
        _do(answers)
        return future

    # ---- The log ----

    def propose(self, session: int, plan: Plan | None, entry: str, start: Start | None) -> None:
        with self._lock:
            self._check(session)
            if plan is not None and plan.id not in self._rounds.plans and plan.id not in self._proposed:
                self._verify(plan)
                self._proposed[plan.id] = plan
                self._members.version += 1
            if entry:
                self._members.enter(session, entry)
            if start is not None:
                self._note_start(start)
            answers = self._progress()
        _do(answers)

    def _note_start(self, start: Start) -> None:
        for item in self._log:
            if isinstance(item, Started) and item.start.epoch == start.epoch:
                if item.start != start:
                    raise Diverged(f"epoch {start.epoch} begins at {item.start}, not at {start}")
                return
        self._log.append(Started(start))

    def watch(self, session: int, after: int, version: int) -> Future[Watched]:
        future: Future[Watched] = Future()
        with self._lock:
            self._check(session)
            self._watchers.append((after, version, future))
            answers = self._progress()
        _do(answers)
        return future

    def approve(self, token: int, index: int, entries: Sequence[Entry]) -> int:
        answers: list[Answer] = []
        with self._lock:
            self._check_token(token)
            if entries and isinstance(entries[0], JobStarted) and entries[0] not in self._log[:1]:
                index, answers = 0, self._restart()
            agreed = self._append(index, entries)
            answers += self._progress()
        _do(answers)
        return agreed

    def _append(self, index: int, entries: Sequence[Entry]) -> int:
        """Takes what is new; returns up to where the log and the chief's agree."""
        have, end = len(self._log), index + len(entries)
        if index > have:
            return have
        if list(entries[: have - index]) != self._log[index:end]:
            # Server 0's log has grown by itself: the chief has to look again before it decides.
            return index
        for entry in entries[have - index :]:
            self._take(entry)
        return end

    def _check_token(self, token: int) -> None:
        newest = self._members.token if self.server == 0 else self._token
        if token < newest or token == 0:
            raise Fenced(f"there is a newer chief (token {newest}, not {token}); this one has to end")
        self._token = token

    def _restart(self) -> list[Answer]:
        """A new job: drops all that the last one left, and tells those who still wait in it."""
        error = ServerLost("the job was started anew; restart the process", str(self.task))
        answers = self._abandon(error, lambda after: after > 0)
        if self._rounds.epoch is not None:
            self._members.end_members(member.session for member in self._rounds.epoch.members)
        self._log.clear()
        for table in (self._names, self._creators, self._proposed, self._frozen, self._restores):
            table.clear()
        self._turn = 0
        self._restored = None
        self._store.clear()
        self._rounds.clear()
        return answers

    def _take(self, entry: Entry) -> None:
        """Appends one entry and does what it says."""
        match entry:
            case Created():
                self._declare(entry.variable)
            case Approved():
                self._verify(entry.plan)
                self._rounds.approve(entry.plan)
                self._proposed.pop(entry.plan.id, None)
            case EpochClosed():
                self._rounds.close_epoch(entry.epoch)
            case Snapshotted():
                self._frozen.pop(entry.plan_id, None)
        self._log.append(entry)

    def _verify(self, plan: Plan) -> None:
        plan.verify(self._store.variables, self._servers())
        limit = self._store.memory_limit
        if limit and plan.size > limit:
            raise MemoryLimit(
                f"a section makes a value of {human(plan.size)}; the limit is {human(limit)}", str(self.task)
            )

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
                answers += [_failing(waiter, error) for waiter, error in failed]
                if failed:
                    self._members.fail_all(failed[0][1])
            answers += self._progress()
        _do(answers)
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
                self._freeze(job)
            else:
                log.warning("round %d failed: %s", job.round, error)
                waiters = self._rounds.fail(job, error)
            record = self._rounds.records[job.round]
            answers = [self._reply(record, said, future, outcome) for said, future in waiters]
            answers += self._progress()
        _do(answers)

    def _reply(
        self,
        record: Record,
        said: Contribution,
        future: Future[RoundReply],
        outcome: executor.Outcome | None = None,
    ) -> Answer:
        """The answer to one member; its wanted variables are read now, which is before the next round."""
        if record.error is not None or record.epoch is None:
            return _failing(future, record.error or PSError("a round without an epoch"))
        wanted = outcome.wanted if outcome else {}
        try:
            arrays = [*record.given]
            arrays += [wanted[id] if id in wanted else self.device.get(self._store.value(id)) for id in said.want]
        except PSError as error:
            return _failing(future, error)
        reply = RoundReply(said.round, record.epoch, record.more, record.left_out, Payload.pack(arrays))
        return lambda: _settle(future, reply)

    # ---- Checkpoints ----

    def _freeze(self, job: Job) -> None:
        order = job.plan.snapshot
        if order is None or self.server not in order.servers:
            return
        values = {
            variable.spec.name: self._store.value(variable.id)
            for variable in self._store.variables.values()
            if min(variable.servers) == self.server
        }
        self._frozen[job.plan.id] = Frozen(order, self.server, job.round, self._rounds.positions, values)

    def snapshot(self, token: int, plan_id: bytes, manifest: str) -> Future[Shard]:
        future: Future[Shard] = Future()
        with self._lock:
            self._check_token(token)
            self._snapshots.append((plan_id, manifest, future))
            answers = self._progress()
        _do(answers)
        return future

    def restore(self, session: int, path: str) -> Future[tuple[Position, ...]]:
        with self._lock:
            self._check(session)
            key = (path, self._rounds.last)
            future = self._restores.get(key)
            if future is not None:
                return future
            future = self._restores[key] = Future()
            variables = [v for v in self._store.variables.values() if self.server in v.servers]
        self._submit(lambda: _do([self._restore(path, variables, future)]))
        return future

    def _restore(self, path: str, variables: list[Variable], future: Future[tuple[Position, ...]]) -> Answer:
        try:
            restored = Restored.open(self.checkpoint_root, path)
            values = {v.id: self.device.put(restored.read(v.spec)) for v in variables}
        except PSError as error:
            failure = error
            with self._lock:
                self._restores = {key: f for key, f in self._restores.items() if f is not future}
            return lambda: future.set_exception(failure)
        with self._lock:
            self._store.commit(values)
            self._restored = restored
        return lambda: future.set_result(restored.positions)

    # ---- What waits ----

    def status(self) -> ServerStatus:
        with self._lock:
            return ServerStatus(
                self.server,
                self.incarnation,
                len(self._log),
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
            answers = self._abandon(ServerLost("the server ends", str(self.task)), lambda after: True)
        _do(answers)

    def _abandon(self, error: PSError, watches: Callable[[int], bool]) -> list[Answer]:
        """Fails all that waits; of the watchers those for whose place in the log `watches` holds."""
        watchers = [w for w in self._watchers if watches(w[0])]
        waiting: list[Future[Any]] = [future for future, _ in self._rounds.abandon(error)]
        waiting += [future for *_, future in watchers]
        waiting += [future for *_, future in self._readers]
        waiting += [future for *_, future in self._snapshots]
        self._watchers = [w for w in self._watchers if w not in watchers]
        self._readers.clear()
        self._snapshots.clear()
        return [_failing(future, error) for future in waiting]

    def _progress(self) -> list[Answer]:
        """After every change, under the lock: what can be answered or run now."""
        answers: list[Answer] = []
        answers += self._end_fenced()
        job = self._rounds.next_job()
        if job is not None:
            answers.append(lambda: self._submit(lambda: self._execute(job)))
        answers += self._answer_readers()
        answers += self._answer_watchers()
        answers += self._answer_snapshots()
        over = bool(self._log) and isinstance(self._log[-1], Done)
        if over and (self.server != 0 or self._members.chief_left()):
            answers.append(lambda: _settle(self.done, None))
        return answers

    def _end_fenced(self) -> list[Answer]:
        """Waiting pushes of sessions that have ended are told why."""
        answers: list[Answer] = []
        for session in self._rounds.sessions():
            error = self._ended(session)
            if error is not None:
                answers += [_failing(f, e) for f, e in self._rounds.fail_sessions([session], error)]
        return answers

    def _ended(self, session: int) -> PSError | None:
        try:
            self._check(session)
        except PSError as error:
            return error
        return None

    def _answer_readers(self) -> list[Answer]:
        ready = [r for r in self._readers if r[1] <= self._rounds.last]
        self._readers = [r for r in self._readers if r[1] > self._rounds.last]
        return [self._answer_reader(ids, future) for ids, _, future in ready]

    def _answer_reader(self, ids: tuple[int, ...], future: Future[PullReply]) -> Answer:
        arrays, last = [self._store.value(id) for id in ids], self._rounds.last
        return lambda: self._submit(
            lambda: _settle(future, PullReply(last, Payload.pack([self.device.get(a) for a in arrays])))
        )

    def _answer_watchers(self) -> list[Answer]:
        version, length = self._members.version, len(self._log)
        # A version of -1 follows the log alone. A log shorter than what the caller knows is another job's.
        ready = [w for w in self._watchers if length != w[0] or (w[1] >= 0 and w[1] != version)]
        if not ready:
            return []
        self._watchers = [w for w in self._watchers if w not in ready]
        sessions, plans = self._members.states(self._clock()), tuple(self._proposed.values())

        def answer(after: int, future: Future[Watched]) -> Answer:
            start = after if after <= length else 0
            watched = Watched(version, start, tuple(self._log[start:]), plans, sessions)
            return lambda: _settle(future, watched)

        return [answer(after, future) for after, _, future in ready]

    def _answer_snapshots(self) -> list[Answer]:
        ready = [s for s in self._snapshots if s[0] in self._frozen]
        self._snapshots = [s for s in self._snapshots if s not in ready]

        def answer(frozen: Frozen, manifest: str, future: Future[Shard]) -> Answer:
            return lambda: self._submit(lambda: self._write(frozen, manifest, future))

        return [answer(self._frozen[plan_id], manifest, future) for plan_id, manifest, future in ready]

    def _write(self, frozen: Frozen, manifest: str, future: Future[Shard]) -> None:
        try:
            shard = checkpoint.write(self.checkpoint_root, frozen, manifest, self.device.get)
        except PSError as error:
            future.set_exception(error)
        except OSError as error:
            future.set_exception(CheckpointError(f"cannot write {frozen.order.path}: {error}", str(self.task)))
        else:
            _settle(future, shard)

    def _check(self, session: int) -> None:
        if self.server == 0:
            self._members.check(session)
            self._members.touch(session, self._clock())
        self._rounds.check(session)

    def _servers(self) -> int:
        first = self._log[0] if self._log else None
        if not isinstance(first, JobStarted):
            raise InvalidRequest("no chief has started a job on this server yet", str(self.task))
        return len(first.incarnations)

    def _describe(self, plan_id: bytes) -> str:
        plan = self._rounds.plans.get(plan_id) or self._proposed.get(plan_id)
        return plan.describe() if plan else "a section that nobody proposed"


def _settle(future: Future[Any], value: Any) -> None:
    # A caller that went away has cancelled its future; what it asked for has happened all the same.
    if not future.done():
        future.set_result(value)


def _failing(future: Future[Any], error: PSError) -> Answer:
    def fail() -> None:
        if not future.done():
            future.set_exception(error)

    return fail


def _do(answers: Sequence[Answer]) -> None:
    for answer in answers:
        answer()
