"""The chief: approves plans, closes epochs, has checkpoints written, ends the job.

It holds no state that the servers do not hold: a new chief reads the log and goes on. It looks at server 0,
decides, appends to server 0's log, and copies the log to the other servers. It never touches an array. It alone says
that a server is lost, and who holds a round up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from psclient._src.chief.abandonment import AbandonmentTimer, is_here
from psclient._src.chief.counters import Driven
from psclient._src.chief.stalls import Stall, Stalls
from psclient._src.transport.daemon_threads import Threads
from psclient._src.transport.remote_server import RemoteServer
from psclient._src.transport.session import Session
from pswire.api import Shard, Watched
from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.writer import manifest_of
from pswire.cluster import ClusterSpec, Task
from pswire.errors import (
    Abandoned,
    CheckpointError,
    ConfigError,
    Fenced,
    PSError,
    RoundTimeout,
    ServerLost,
    TaskTaken,
    Unreachable,
)
from pswire.limits import PART_BYTES, Timeouts
from pswire.model.log import (
    Approved,
    Done,
    Epoch,
    EpochClosed,
    JobStarted,
    LogEntry,
    Lost,
    Member,
    Position,
    Snapshotted,
    Start,
    Started,
    forget_state,
)
from pswire.model.plan import Plan
from pswire.model.status import ServerStatus, SessionState
from pswire.telemetry import logging_setup
from pswire.telemetry.metrics import Histogram
from pswire.telemetry.reminder import Reminder

log = logging.getLogger("psclient.chief")

PAUSE = 1.0
"""Seconds after which the chief looks again even if nothing was announced."""


@dataclass
class _State:
    """What the log says."""

    log: list[LogEntry] = field(default_factory=list)
    approved: set[bytes] = field(default_factory=set)
    epoch: Epoch | None = None
    started: set[int] = field(default_factory=set)
    epochs: dict[int, Epoch] = field(default_factory=dict)
    saves: dict[bytes, Plan] = field(default_factory=dict)
    saved: Counter[str] = field(default_factory=lambda: Counter(saved=0, failed=0))

    def take(self, entries: Sequence[LogEntry]) -> None:
        for entry in entries:
            self.log.append(entry)
            match entry:
                case Approved():
                    self._approve(entry.plan)
                case EpochClosed():
                    self.epoch = self.epochs[entry.epoch.number] = entry.epoch
                    if entry.epoch.start:
                        self.started = {member.session for member in entry.epoch.members}
                case Started():
                    self.started |= {m.session for m in self.epochs[entry.start.epoch].members}
                case Snapshotted():
                    self.saves.pop(entry.plan_id, None)
                    self.saved["failed" if entry.error else "saved"] += 1
                    forget_state(self.log, entry.plan_id)

    def _approve(self, plan: Plan) -> None:
        self.approved.add(plan.id)
        if plan.snapshot is not None:
            self.saves[plan.id] = plan


class Chief:
    """Drives a job, in a thread or in the caller's.

    Args:
        task: who drives: the chief task, or worker 0 where the cluster has none.
        servers: connections of its own.
        cluster: who begins a job together.
        timeouts: how long everything may take.
        runs_script: whether the chief task itself is a replica, so that the first epoch waits for it.
        failed: told why a chief that drives in a thread cannot go on.
        job: the identity of the job.
    """

    def __init__(
        self,
        task: Task,
        servers: Sequence[RemoteServer],
        cluster: ClusterSpec,
        timeouts: Timeouts,
        runs_script: bool = False,
        failed: Callable[[PSError], object] = lambda error: None,
        job: str = "",
    ) -> None:
        self._failed = failed
        self._job = job
        self._task = task
        self._servers = servers
        self._timeouts = timeouts
        self._expected = set(cluster.tasks("worker")) | ({task} if runs_script else set())
        self._threads = Threads("checkpoint")
        self._begin()
        self._ordered_at = 0.0
        self._took = Histogram()
        self._missing: set[Task] = set()
        self._presence = AbandonmentTimer(self._expected, timeouts)
        self._gives_up: Abandoned | None = None
        self._sessions: Sequence[SessionState] = ()  # as they were last seen; replaced, never changed
        self._reminder = Reminder(timeouts.word, self._say_who_is_missing)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _begin(self) -> None:
        """Knows nothing yet: what it has to know the servers tell."""
        self._session = self._new_session()
        self._state = _State()
        self._copied = [0] * len(self._servers)
        self._saving: Future[Snapshotted] | None = None
        self._watching: Future[Watched] | None = None
        self._asked: list[Future[ServerStatus]] = []
        self._ask_at = self._spoke = 0.0
        self._stalls = Stalls(self._timeouts.lease, self._period)
        self._hung: set[int] = set()

    def _new_session(self) -> Session:
        return Session(self._task, self._servers, 0, True, self._timeouts, job=self._job)

    @property
    def _period(self) -> float:
        """Seconds between two looks at all servers' rounds: a small part of what a round may take."""
        return min(max(self._timeouts.round / 40, PAUSE / 4), 5.0)

    @property
    def driven(self) -> Driven:
        """What it knows of its job, for its metrics. May be asked by any thread."""
        state = self._state
        members = len(state.epoch.members) if state.epoch else 0
        missing = tuple(sorted(self._missing))
        return Driven(len(state.epochs), members, len(state.approved), missing, state.saved, self._took)

    def start(self) -> None:
        """Drives in a thread of its own, from now on."""
        self._session.open()
        self._thread = threading.Thread(target=self._drive_quietly, daemon=True, name="chief")
        self._thread.start()

    def stop(self, abandon: bool) -> None:
        """Waits for the job to end, in a process whose own script has ended; says every `Timeouts.word` for whom.

        It is given up where nobody is there any more, as `AbandonmentTimer` says; who is there may take as long as it
        likes.

        Args:
            abandon: end at once, because this process failed.
        """
        if abandon:
            self._stop.set()
        while self._thread and self._thread.is_alive():
            self._thread.join(self._timeouts.word)
            if self._thread.is_alive():
                undone = _told(self._undone()) or "the servers to end the job"
                log.warning("%s has done its part, and drives the job on: waits for %s", self._task, undone)

    def _undone(self) -> dict[Task, str]:
        """The tasks that have not done their part, and what is known of each."""
        states = dict.fromkeys(self._expected, "never came") | {s.member.task: s.state for s in self._sessions}
        return {task: "still here" if state == "open" else state for task, state in states.items() if state != "left"}

    def _say_who_is_missing(self) -> None:
        """Of a process that only drives: those who are there say themselves for whom they wait."""
        undone = self._undone()
        missing = {task: state for task, state in undone.items() if state != "still here"}
        if missing and self._thread is None and (self._state.epoch is None or missing == undone):
            log.warning("%s drives the job, and waits for %s", self._task, _told(missing))

    def _drive_quietly(self) -> None:
        try:
            self._drive()
        except Fenced as error:
            log.warning("the chief in %s ends: %s", self._task, error)
        except Exception as error:  # whatever it is, this process would wait in vain for what needs its chief
            log.error("the chief in %s failed: %s", self._task, error, exc_info=not isinstance(error, PSError))
            self._failed(error if isinstance(error, PSError) else PSError(f"the chief failed: {error!r}"))

    def drive(self) -> None:
        """Drives in the calling thread until the job is done; raises `PSError` if that is impossible."""
        self._session.open()
        self._drive()

    def _drive(self) -> None:
        try:
            while True:
                try:
                    self._lead()
                    break
                except Fenced as error:
                    self._reopen(error)
                except ServerLost as error:
                    self._announce(error)
                    raise
        finally:
            for server in self._servers:
                server.close()
            self._threads.close()
        if self._gives_up:
            raise self._gives_up

    def _lead(self) -> None:
        """Drives with the session that there is."""
        error = "the chief was stopped"
        logging_setup.SESSION.set(self._session.number)
        try:
            self._attach()
            version = 0
            while not self._stop.is_set():
                watched = self._watch(version)
                if watched is None:
                    continue
                version = watched.version
                if self._decide(watched):
                    error = ""
                    break
        finally:
            self._session.leave(error)

    def _reopen(self, error: Fenced) -> None:
        """Its session has ended, since it was paused or cut off: it goes on with a new token, if nobody else is chief.

        Raises:
            Fenced: another chief is there, or this one is to end.
            ServerLost: a server was replaced in the meantime.
        """
        if self._stop.is_set():
            raise error
        before = self._session.incarnations
        self._begin()
        try:
            self._session.open(waits=False)
        except TaskTaken as taken:
            raise Fenced(f"{error.message}; {taken.message}", error.task) from None
        if self._session.incarnations != before:
            self._session.leave("a server was replaced")
            raise ServerLost("a server of the job was replaced while the chief was away; restart from a checkpoint")
        log.warning("the chief in %s was away (%s); nobody has taken its place, and it goes on", self._task, error)

    def _announce(self, error: ServerLost) -> None:
        """Writes to the log that a server is lost: by that all processes know it at once."""
        lost = next((server.task for server in self._servers[1:] if str(server.task) == error.task), None)
        if lost is None:
            return  # server 0 keeps the log: each process sees for itself
        log_server, known = self._servers[0], self._state.log
        try:
            while True:
                index = len(known)
                if log_server.approve(self._session.token, index, [Lost(lost.index, error.message)]) > index:
                    return
                known += log_server.watch(0, index, 0).result(self._timeouts.call).entries
        except (PSError, TimeoutError) as failure:
            log.warning("the chief cannot say that %s is lost: %s", lost, failure)

    def discard(self) -> str:
        """Ends the job that the servers hold, in the place of a chief that is gone.

        Returns:
            Its identity.

        Raises:
            ConfigError: they hold none, or processes of it are there.
            PSError: a server does not answer.
        """
        status = self._servers[0].status()
        if not status.incarnations or status.over:
            raise ConfigError("these servers hold no job: nothing is to be discarded")
        here = sorted({str(s.member.task) for s in status.sessions if is_here(s, self._timeouts.lease)})
        if here:
            raise ConfigError(f"{', '.join(here)} of the job are here; end these processes first, then discard it")
        self._job = status.job
        self._begin()
        self._session.open(waits=False)
        error = "the job could not be discarded"
        try:
            self._attach()
            while not self._append([Done()]):
                known = len(self._state.log)
                news = self._servers[0].watch(self._session.number, known, 0)
                self._state.take(news.result(self._timeouts.call).entries)
            self._copy()
            error = ""
        finally:
            self._session.leave(error)
        return self._job

    # ---- Looking and appending ----

    def _attach(self) -> None:
        """Begins a job, or goes on with the one that the servers hold."""
        entries: list[LogEntry] = []
        # A long log comes in several answers.
        while len(entries) < self._servers[0].status().log:
            entries += self._session.look(len(entries)).entries
        first = entries[0] if entries else None
        over = any(isinstance(entry, Done | Lost) for entry in entries)
        mine = (self._session.incarnations, self._job)
        same = isinstance(first, JobStarted) and (first.incarnations, first.name) == mine
        if same and not over:
            self._state.take(entries)
            log.info("goes on with job %s at entry %d", first, len(entries))
        else:
            begin = JobStarted(self._session.number, self._session.incarnations, self._job)
            # Server 0 last: once it has the job, clients create variables, which another server that began
            # the job only then would drop.
            for server in reversed(self._servers):
                server.approve(self._session.token, 0, [begin])
            self._state.take([begin])
        self._copy()

    def _watch(self, version: int) -> Watched | None:
        """What is new at server 0; what there is after a pause, so that checkpoints get on; None at the end."""
        until = time.monotonic() + PAUSE
        while not self._stop.is_set():
            self._session.check()
            if self._watching is None:
                known = len(self._state.log)
                self._watching = self._servers[0].watch(self._session.number, known, version)
            self._reminder.look()
            news: list[Future[Any]] = [self._watching, *([self._saving] if self._saving else [])]
            wait(news, PAUSE / 4, FIRST_COMPLETED)
            if self._watching.done():
                watched, self._watching = self._watching.result(), None
            elif self._saved() or self._stalled() or time.monotonic() > until:
                watched = self._session.look(len(self._state.log))
            else:
                continue
            self._sessions = watched.sessions
            # What this chief appended in the meantime comes back to it.
            self._state.take(watched.entries[len(self._state.log) - watched.start :])
            # An answer may be older than a look on which this chief has acted already.
            if watched.version >= version:
                return watched
        return None

    def _append(self, entries: Sequence[LogEntry]) -> bool:
        """Appends to server 0's log, if nothing else was appended in between."""
        index = len(self._state.log)
        agreed = self._servers[0].approve(self._session.token, index, entries)
        if agreed != index + len(entries):
            return False
        self._state.take(entries)
        return True

    def _copy(self) -> None:
        """Copies the log to the servers that lack its end."""
        for number, server in enumerate(self._servers[1:], 1):
            try:
                while self._copied[number] < len(self._state.log):
                    index = self._copied[number]
                    self._copied[number] = server.approve(self._session.token, index, self._state.log[index:])
            except (Unreachable, ServerLost) as error:
                if not isinstance(self._state.log[-1], Done):
                    raise
                # It ends by this very entry, so that a lost answer cannot be asked for again.
                log.info("server %d did not say that it knows of the end: %s", number, error)

    # ---- Deciding ----

    def _decide(self, watched: Watched) -> bool:
        """Does what there is to do; returns whether the job is over: done, or given up."""
        self._missing = self._expected - {s.member.task for s in watched.sessions if s.state in ("open", "left")}
        entries: list[LogEntry] = [Approved(p) for p in watched.plans if p.id not in self._state.approved]
        saved = self._saved()
        entries += saved
        for epoch in self._next_epochs(watched.sessions):
            entries.append(EpochClosed(epoch))
            log.info("epoch %d: %s", epoch.number, ", ".join(str(m.task) for m in epoch.members) or "nobody")
        done = self._is_done(watched.sessions)
        gives_up = None if done else self._abandoned(watched.sessions)
        over = done or gives_up is not None
        if over:
            entries.append(Done())
        if entries and not self._append(entries):
            return False
        self._gives_up = gives_up
        if saved:
            self._saving = None
            self._took.observe(time.monotonic() - self._ordered_at)
        self._copy()
        self._save_next()
        return over

    def _stalled(self) -> bool:
        """Looks from time to time whom the job's oldest open round waits for; says whether somebody is to go.

        Who beats is alive, and may all the same not come to its push any more. While a server does not answer, no
        answer is looked at.
        """
        epoch, now = self._state.epoch, time.monotonic()
        if epoch is None or any(member.mode == "async" for member in epoch.members) or now < self._ask_at:
            return False
        if not self._asked:
            self._asked = [self._threads.submit(server.status) for server in self._servers]
        if not all(asked.done() for asked in self._asked):
            return False
        statuses, self._asked = [asked.result() for asked in self._asked], []
        self._ask_at = now + self._period
        stall = self._stalls.look(statuses, now)
        if stall is None or not stall.missing:
            return False
        self._speak(stall, now)
        late = stall.seconds >= self._timeouts.round
        hung = {member.session for member in epoch.members if member.task in stall.missing} if late else set()
        new, self._hung = hung - self._hung, self._hung | hung
        return bool(new)

    def _speak(self, stall: Stall, now: float) -> None:
        """Names those who hold the job up, from a tenth of their time on."""
        if stall.seconds < self._timeouts.round / 10 or now - self._spoke < self._timeouts.word:
            return
        self._spoke = now
        log.warning(
            "round %d has waited for %s for %.0f s; who does not come within %g s (PS_TIMEOUT_ROUND) is left out",
            stall.round,
            ", ".join(map(str, stall.missing)),
            stall.seconds,
            self._timeouts.round,
        )

    def _next_epochs(self, sessions: Sequence[SessionState]) -> list[Epoch]:
        """Who takes part from now on; nothing if that does not change."""
        here = {s.member.session: s for s in sessions if s.state == "open" and s.member.session not in self._hung}
        current = self._state.epoch
        if current is None:
            came = {s.member.task for s in sessions if s.state in ("open", "left")}
            if not here or not self._expected <= came:
                return []
            return [self._cold(1, [s.member for s in here.values()])]
        if any(s.member.mode == "async" for s in here.values()):
            return self._alone(current, [s.member for s in here.values()])
        epoch = self._together(current, here)
        return [epoch] if epoch else []

    def _alone(self, current: Epoch, here: Sequence[Member]) -> list[Epoch]:
        """Asynchronous workers come and go at once: each begins where its task was."""
        stay = [member for member in current.members if member in here]
        if len(stay) < len(current.members):
            # First who is gone is fenced on all servers, so that nothing it sent arrives after they were asked.
            return [Epoch(current.number + 1, _ordered(stay))]
        epochs: list[Epoch] = []
        for member in (member for member in here if member not in current.members):
            stay.append(member)
            number = current.number + 1 + len(epochs)
            epochs.append(Epoch(number, _ordered(stay), start=self._resume(number, member.task)))
        return epochs

    def _resume(self, epoch: int, task: Task) -> Start:
        """Where an asynchronous worker goes on: after the last push of its task that reached any server."""
        places = [place for server in self._servers for place in server.status().places if place.task == task]
        last = max(places, key=lambda place: place.round, default=None)
        return Start(epoch, last.round + 1, last.positions) if last else Start(epoch, 0)

    def _together(self, current: Epoch, here: Mapping[int, SessionState]) -> Epoch | None:
        """Synchronous members take new ones in at a join point; None if nothing changes."""
        stay = [m for m in current.members if m.session in here]
        started = [m for m in stay if m.session in self._state.started]
        new = [s for s in here.values() if s.member not in stay]
        if not started:
            # Nobody is left to say where the group stands, but the servers know it: once those who are gone are
            # fenced on all of them, so that nothing they sent arrives after the servers were asked.
            if len(stay) < len(current.members):
                return Epoch(current.number + 1, _ordered(stay))
            members = [s.member for s in here.values()]
            return self._cold(current.number + 1, members) if members else None
        waiting = [m for m in stay if m.session not in self._state.started]
        join_point = current.join_point if waiting else next((s.join_point for s in new if s.join_point), "")
        taken = [s.member for s in new if s.join_point and s.join_point == join_point]
        if len(stay) == len(current.members) and not taken:
            return None
        return Epoch(current.number + 1, _ordered([*stay, *taken]), join_point)

    def _cold(self, number: int, members: Sequence[Member]) -> Epoch:
        """An epoch whose members begin after the last round that any server knows."""
        round = -1
        positions: tuple[Position, ...] = ()
        for server in self._servers:
            status = server.status()
            newest = max([status.round, *(waiting.round for waiting in status.waiting)])
            if newest > round:
                round, positions = newest, status.positions
        return Epoch(number, _ordered(members), start=Start(number, round + 1, positions))

    def _is_done(self, sessions: Sequence[SessionState]) -> bool:
        """Whether the tasks of the last epoch that had members have left cleanly, and nobody else is here.

        A member may be gone, and another process of its task, which no epoch took in any more, may have left for it.
        """
        if any(s.state == "open" for s in sessions) or not self._expected <= {s.member.task for s in sessions}:
            return False
        # Sessions are numbered in order, so that the newest one of a task stays.
        left = {s.member.task: s.member.session for s in sessions if s.state == "left"}
        last = next(
            (e.members for _, e in sorted(self._state.epochs.items(), reverse=True) if e.members),
            tuple(s.member for s in sessions),
        )
        return all(left.get(member.task, -1) >= member.session for member in last)

    def _abandoned(self, sessions: Sequence[SessionState]) -> Abandoned | None:
        """Why the job is given up, if it is: nobody is there, nor came a moment ago, and no checkpoint is written."""
        gives_up = self._presence.look(sessions, time.monotonic())
        if gives_up is None:
            return None
        came = any(is_here(session, self._timeouts.lease) for session in self._session.look().sessions)
        writes = any(server.status().saving for server in self._servers)
        return None if came or writes else gives_up

    # ---- Checkpoints ----

    def _save_next(self) -> None:
        """Has the next checkpoint written: one after another, so that of two at one path the later stays."""
        plan = next(iter(self._state.saves.values()), None)
        if self._saving is None and plan is not None:
            self._ordered_at = time.monotonic()
            self._saving = self._threads.submit(partial(self._commit, plan))

    def _saved(self) -> list[Snapshotted]:
        """The checkpoint that was written, if it is; raises what ends this chief."""
        return [self._saving.result()] if self._saving is not None and self._saving.done() else []

    def _commit(self, plan: Plan) -> Snapshotted:
        """Shards first, the manifest last; without a manifest there is no checkpoint."""
        order = plan.snapshot
        if order is None:
            raise ValueError("the plan orders no checkpoint")
        try:
            pending = [self._ask(server, plan.id) for server in order.servers]
            shards = [
                self._awaited(server, plan.id, future) for server, future in zip(order.servers, pending, strict=True)
            ]
            if len({(shard.round, shard.positions) for shard in shards}) > 1:
                rounds = ", ".join(str(shard.round) for shard in shards)
                raise CheckpointError(f"the servers' parts are of different rounds ({rounds}); save again")
            text, first = _fitting(manifest_of(shards, order)), order.servers[0]
            done = self._awaited(first, plan.id, self._ask(first, plan.id, text), text)
        except (ServerLost, Fenced):
            raise  # nobody knows what became of it: who drives the job next will
        except Exception as error:  # whatever it is, the processes that wait for the checkpoint are told
            if not isinstance(error, PSError):
                log.exception("a checkpoint could not be committed")
            return Snapshotted(plan.id, 0, order.path, str(error) if isinstance(error, PSError) else repr(error))
        return Snapshotted(plan.id, done.round, done.path)

    def _ask(self, server: int, plan_id: bytes, manifest: str = "") -> Future[Shard]:
        return self._servers[server].snapshot(self._session.token, plan_id, manifest)

    def _awaited(self, server: int, plan_id: bytes, future: Future[Shard], manifest: str = "") -> Shard:
        """What a server writes, however long its round and its disk take; who asks again is told of the same."""
        said = "%s still writes its part of a checkpoint, or waits for its round"
        reminder = Reminder(self._timeouts.word, lambda: log.info(said, self._servers[server].task))
        while True:
            if wait([future], self._timeouts.word).done:
                try:
                    return future.result()
                except RoundTimeout:
                    future = self._ask(server, plan_id, manifest)
            reminder.look()


def _fitting(manifest: Manifest) -> str:
    """The text of a manifest; raises `CheckpointError` where it is longer than what a restore could be told of."""
    text = manifest.text()
    if len(text) > PART_BYTES:
        raise CheckpointError(
            f"its manifest, of {len(manifest.tensors):,} variables, takes {len(text):,} bytes, and at most "
            f"{PART_BYTES:,} can be sent; make fewer and larger variables, or give them shorter names"
        )
    return text


def _told(states: Mapping[Task, str]) -> str:
    return ", ".join(f"{task} ({states[task]})" for task in sorted(states))


def _ordered(members: Sequence[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: member.task))
