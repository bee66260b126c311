"""How a process waits for servers, and what it asks the one that keeps the log, or the next one where that is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from psclient._src.network.lease import Lease, Proposal
from psclient._src.network.patience import Deadline
from psclient._src.network.remote_server import RemoteServer
from psclient._src.network.transport import Transport
from pswire.api import ParameterServer, Watched
from pswire.cluster import Task
from pswire.errors import (
    ChiefLost,
    ConfigError,
    Diverged,
    Fenced,
    PSError,
    ScriptFailed,
    ServerGone,
    ServerLost,
    Unreachable,
)
from pswire.model.changes import Change, change_of
from pswire.model.log import GenerationClosed, Gone, JobStarted, LogEntry, Member, Start, holds_job
from pswire.model.plan import Plan
from pswire.model.status import ServerStatus

log = logging.getLogger("psclient")

T = TypeVar("T")

FATAL = (ServerLost, Fenced, Diverged, ScriptFailed, ChiefLost)
"""After one of these the session is over: its process has to start again."""


def changes_of(entries: Sequence[LogEntry]) -> list[Change]:
    """Returns the changes of consistency among the entries of a log, in order."""
    found = (change_of(entry.generation) for entry in entries if isinstance(entry, GenerationClosed))
    return [change for change in found if change is not None]


class Session(Lease):
    """A lease, and what its process waits for, and asks the server that keeps the log. May be used by any thread.

    Attributes:
        begun: the beginning of the job; of no meaning before `await_job`.
    """

    begun: JobStarted = JobStarted(0, ())

    # ---- Waits ----

    def wait(
        self,
        future: Future[T],
        deadline: Deadline,
        late: Callable[[], PSError],
        word: Callable[[], str],
        needs_chief: Callable[[], bool] = lambda: True,
    ) -> T:
        """Waits for an answer, and ends when the session does.

        Args:
            future: the answer that is waited for.
            deadline: the end of the wait.
            late: returns the error to raise then.
            word: returns the line to log every `timeouts.report_interval` seconds; "" for none.
            needs_chief: returns True if the answer cannot come without a chief.

        Raises:
            PSError: the answer's error, `late`, what ended the session, or `ChiefLost`.
        """
        spoken: Future[None] | None = None
        while not self._reader.wait(
            future, max(min(deadline.left(), self.timeouts.report_interval), 0), self._transports
        ):
            self.check()
            if deadline.left() <= 0:
                raise late()
            if spoken is None or spoken.done():
                # In a thread of its own: it asks servers, and one that is lost would hold up the verdict.
                spoken = self._threads.submit(lambda: self._speak(word, needs_chief))
            self.hosting.look_for_returns(self._threads, self.job, self.take_back)
        return self._take(future)

    def _transports(self) -> list[Transport]:
        """Returns the transports on which calls of this process are under way."""
        found = list[Transport]()
        for server in self.servers:
            transport = server.transport(self.number) if isinstance(server, RemoteServer) else None
            if transport is not None and transport.waits:
                found.append(transport)
        return found

    def _speak(self, word: Callable[[], str], needs_chief: Callable[[], bool]) -> None:
        try:
            if line := word():
                log.warning("%s %s", self.task, line)
            if needs_chief():
                self.check_chief()
        except (PSError, TimeoutError) as error:
            log.debug("%s cannot find out what it waits for: %s", self.task, error)

    def _take(self, future: Future[T]) -> T:
        error = future.exception()
        decides = self.copied and self._drives and isinstance(error, ServerLost)  # then it goes on without that server
        if isinstance(error, FATAL) and not decides:
            self.end(error)
            self.check()
        return future.result()

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

    def check_chief(self) -> None:
        """Ends the session if the chief has been silent for longer than `Timeouts.chief_timeout`."""
        silent = self.log_status().chief
        if self.timeouts.chief_timeout < silent < float("inf"):
            error = ChiefLost(
                f"the chief has not responded for {silent:.0f} s, and {self.task} needs it to continue; "
                "restart the chief"
            )
            self.end(error)

    # ---- The log ----

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

    def propose(
        self, plan: Plan | None = None, join_point: str = "", start: Start | None = None, trace: str = ""
    ) -> None:
        """Proposes to the server that keeps the log, and to the next one where that is lost: see `ParameterServer`."""
        proposal = Proposal(plan, join_point, start, trace)
        if self.copied:
            self._proposals[proposal.key] = proposal._replace(trace="")
        self.with_keeper(lambda keeper: keeper.propose(self.number, *proposal))

    def answered(self, plan_id: bytes) -> None:
        """A round of a plan was answered: it is approved."""
        self._proposals.pop(plan_id, None)

    def _propose_again(self) -> None:
        """Proposes what the server that is gone may have told nobody."""
        for proposal in list(self._proposals.values()):
            try:
                self.propose(*proposal)
            except PSError as error:
                log.debug("%s could not repeat a proposal: %s", self.task, error)

    def lose(self, losses: Sequence[Gone]) -> None:
        """As `Lease`; what the server that is gone may have told nobody is proposed again."""
        keeper = self.hosting.keeper
        super().lose(losses)
        if self.hosting.keeper != keeper:
            self._threads.submit(self._propose_again)
