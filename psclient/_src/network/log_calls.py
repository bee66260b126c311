"""What a process asks the server that keeps the log: the first that is there, and the next one where that is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

from psclient._src.network.hosting import Hosting
from psclient._src.network.patience import Deadline
from psclient._src.network.worker_clock import WorkerClock
from pswire.api import ParameterServer, Watched
from pswire.cluster import Task
from pswire.errors import ChiefLost, ConfigError, Fenced, PSError, ServerGone, Unreachable
from pswire.limits import Timeouts
from pswire.model.changes import Change, change_of
from pswire.model.consistency import Consistency
from pswire.model.log import (
    GenerationClosed,
    JobStarted,
    LogEntry,
    Member,
    Start,
    holds_job,
)
from pswire.model.plan import Nonfinite, Plan
from pswire.model.status import ServerStatus

log = logging.getLogger("psclient")

T = TypeVar("T")


class Proposal(NamedTuple):
    """Arguments of `ParameterServer.propose` behind the session."""

    plan: Plan | None
    join_point: str
    start: Start | None
    trace: str = ""


class Proposals:
    """The plans of which no round was answered yet, the last join point, and the last start of a generation.

    May be used by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._plans: dict[bytes, Plan] = {}
        self._join_point = ""
        self._start: Start | None = None

    def keep(self, proposal: Proposal) -> None:
        """Keeps what is proposed."""
        with self._lock:
            if proposal.plan is not None:
                self._plans[proposal.plan.id] = proposal.plan
            self._join_point = proposal.join_point or self._join_point
            self._start = proposal.start or self._start

    def forget(self, plan_id: bytes) -> None:
        """A plan is known to be approved."""
        with self._lock:
            self._plans.pop(plan_id, None)

    def all(self) -> list[Proposal]:
        """Returns what is to be proposed again."""
        with self._lock:
            found = [Proposal(plan, "", None) for plan in self._plans.values()]
            found += [Proposal(None, self._join_point, None)] if self._join_point else []
            return found + ([Proposal(None, "", self._start)] if self._start else [])


def changes_of(entries: Sequence[LogEntry]) -> list[Change]:
    """Returns the changes of consistency among the entries of a log, in order."""
    found = (change_of(entry.generation) for entry in entries if isinstance(entry, GenerationClosed))
    return [change for change in found if change is not None]


class LogCalls:
    """The part of a `Session` that has to do with the log. May be used by any thread.

    Attributes:
        consistency: how this process's rounds are made.
        nonfinite: what becomes of updates if a contribution has NaN or infinity.
        clock: what the heartbeats say of this process's rounds, where its staleness is bounded; else None.
        change: the last change of the job's consistency; None before the first.
        begun: the beginning of the job; of no meaning before `await_job`.
    """

    task: Task
    servers: tuple[ParameterServer, ...]
    consistency: Consistency
    clock: WorkerClock | None
    nonfinite: Nonfinite = "apply"
    change: Change | None = None
    begun: JobStarted = JobStarted(0, ())
    timeouts: Timeouts
    number: int
    waits: tuple[int, bytes]
    job: str
    incarnations: tuple[int, ...]
    copied: bool
    hosting: Hosting
    _proposals: Proposals

    @property
    def log_server(self) -> ParameterServer:
        """The server that keeps the log and the sessions: the first that is there."""
        return self.servers[self.hosting.keeper]

    @property
    def live(self) -> list[ParameterServer]:
        """The servers that are not gone."""
        return [self.servers[index] for index in self.hosting.live]

    def _reason(self, error: Fenced) -> PSError:
        """Returns why the session was ended, which this server knows: the others learn of it by a generation."""
        try:
            self.log_server.heartbeat(self.number, *self.waits)
        except PSError as told:
            return told
        return error

    def wait(
        self,
        future: Future[T],
        deadline: Deadline,
        late: Callable[[], PSError],
        word: Callable[[], str],
        needs_chief: Callable[[], bool] = lambda: True,
    ) -> T:
        """Waits for an answer: see `Session`."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises the error that ended the session: see `Session`."""
        raise NotImplementedError

    def end(self, error: PSError) -> None:
        """Ends the session: see `Session`."""
        raise NotImplementedError

    def deadline(self, seconds: float) -> Deadline:
        """Makes a deadline: see `Session`."""
        raise NotImplementedError

    def _begin(self, consistency: Consistency) -> None:
        self.consistency = consistency
        self.clock = WorkerClock(len(self.servers)) if consistency.mode == "bounded" else None

    def move(self, change: Change) -> bool:
        """Makes rounds as a change says from now on; returns False where that was known."""
        if self.change is not None and change.number <= self.change.number:
            return False
        self.change, self.nonfinite = change, change.nonfinite
        self._begin(change.consistency)
        return True

    def await_job(self) -> None:
        """Waits until a chief has begun the job that this session belongs to; raises `ChiefLost` if none does."""
        deadline, entries = self.deadline(self.timeouts.start_timeout), list[LogEntry]()
        while True:
            watched = self.ask_keeper(
                partial(self.follow, len(entries)),
                deadline,
                lambda: ChiefLost(
                    f"no chief started the job within {self.timeouts.start_timeout:g} s; start the chief "
                    "task (psworker with its TF_CONFIG), or remove it from the cluster to make worker 0 "
                    "the chief"
                ),
                lambda: "waits for a chief to start the job",
            )
            del entries[watched.start :]  # a log that is shorter is another job's
            entries += watched.entries
            if holds_job(entries, self.incarnations, self.job):
                self._take_copies(entries)
                for change in changes_of(entries):
                    self.move(change)
                return

    def follow(self, after: int, keeper: ParameterServer) -> Future[Watched]:
        """Asks for the entries of the log from a number on, once there are any."""
        return keeper.watch(self.number, after, -1)

    def _take_copies(self, entries: Sequence[LogEntry]) -> None:
        """Takes where copies of variables lie; raises `ConfigError` where this process expects something else."""
        self.begun = next(entry for entry in entries if isinstance(entry, JobStarted))
        if bool(self.begun.copies) != self.copied:
            here, there = (f"PS_REPLICATION_FACTOR={1 + each}" for each in (self.copied, bool(self.begun.copies)))
            raise ConfigError(
                f"{self.task} uses {here}, but the job uses {there}; use the same value in every process of the job"
            )

    def look(self, after: int = -1) -> Watched:
        """Returns the sessions and proposals as they are now.

        Args:
            after: number of entries of the log not to send; by default all that there are.
        """
        known = self.log_status().log if after < 0 else after
        log_server = Task("ps", self.hosting.keeper)
        return self.ask_keeper(
            lambda keeper: keeper.watch(self.number, known, 0),
            self.deadline(self.timeouts.call_timeout),
            lambda: Unreachable(f"no answer for {self.timeouts.call_timeout:g} s", str(log_server)),
            lambda: f"waits for news of {log_server}",
            lambda: False,
        )

    def ended(self) -> list[Member]:
        """Returns the members of sessions that have ended, however they did."""
        return [state.member for state in self.look().sessions if state.state != "open"]

    def ask_keeper(
        self,
        ask: Callable[[ParameterServer], Future[T]],
        deadline: Deadline,
        late: Callable[[], PSError],
        word: Callable[[], str],
        needs_chief: Callable[[], bool] = lambda: True,
    ) -> T:
        """Asks the server that keeps the log, and the next one where that is lost; waits as `wait`."""
        return self.with_keeper(lambda keeper: self.wait(ask(keeper), deadline, late, word, needs_chief))

    def with_keeper(self, call: Callable[[ParameterServer], T]) -> T:
        """Calls the server that keeps the log, and the next one where that is lost."""
        while True:
            try:
                return call(self.log_server)
            except ServerGone:
                self.check()

    def log_status(self) -> ServerStatus:
        """Returns the status of the server that keeps the log."""
        return self.with_keeper(lambda keeper: keeper.status())

    def propose(
        self, plan: Plan | None = None, join_point: str = "", start: Start | None = None, trace: str = ""
    ) -> None:
        """Proposes to the server that keeps the log, and to the next one where that is lost: see `ParameterServer`."""
        proposal = Proposal(plan, join_point, start, trace)
        if self.copied:
            self._proposals.keep(proposal)
        self.with_keeper(lambda keeper: keeper.propose(self.number, *proposal))

    def answered(self, plan_id: bytes) -> None:
        """A round of a plan was answered: it is approved."""
        if self.copied:
            self._proposals.forget(plan_id)

    def _propose_again(self) -> None:
        """Proposes what the server that is gone may have told nobody."""
        for proposal in self._proposals.all():
            try:
                self.propose(*proposal)
            except PSError as error:
                log.debug("%s could not repeat a proposal: %s", self.task, error)

    def check_chief(self) -> None:
        """Ends the session if the chief has been silent for longer than `Timeouts.chief_timeout`."""
        silent = self.log_status().chief
        if self.timeouts.chief_timeout < silent < float("inf"):
            error = ChiefLost(
                f"the chief has not responded for {silent:.0f} s, and {self.task} needs it to continue; "
                "restart the chief"
            )
            self.end(error)
