"""The chief: approves plans, closes generations, has checkpoints written, ends the job.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psclient._src.chief.checkpoints import CheckpointCommitter
from psclient._src.chief.decisions import Beginning, Decision, came, decide, told_of, undone
from psclient._src.chief.hung_members import HungMembers
from psclient._src.chief.job_log import JobLog, JobOver
from psclient._src.chief.losses import Differences, announce, go_on_without
from psclient._src.chief.returns import Returns
from psclient._src.chief.timers import AbandonmentTimer, LeaveSaves, StepDown, is_here
from psclient._src.network.daemon_threads import Threads
from psclient._src.network.remote_server import RemoteServer, expect
from psclient._src.network.session import Session
from pswire.api import Watched
from pswire.cluster import ClusterSpec, Task
from pswire.errors import Abandoned, Fenced, PSError, ServerGone, ServerLost, TaskTaken
from pswire.limits import Timeouts
from pswire.model.log import Done, GenerationClosed, LogEntry
from pswire.model.status import Pace, SessionState
from pswire.telemetry import logging_setup
from pswire.telemetry.metrics import Histogram
from pswire.telemetry.reminder import Reminder

if TYPE_CHECKING:
    from psclient._src.telemetry.traces.chief import ChiefTraces

log = logging.getLogger("psclient.chief")

PAUSE = 1.0
"""Seconds after which the chief looks again even if nothing was announced."""


@dataclass(frozen=True)
class Driven:
    """A chief's view of its job, from the log: that of earlier chiefs is included.

    Attributes:
        generations: number of closed generations.
        members: number of members of the newest generation.
        plans: number of approved plans.
        missing: tasks of the cluster without a session, in order.
        checkpoints: number of checkpoints by outcome: "saved" or "failed".
        saving: seconds from a checkpoint's order until it was complete, or had failed; this chief's alone.
    """

    generations: int
    members: int
    plans: int
    missing: tuple[Task, ...]
    checkpoints: Counter[str]
    saving: Histogram


class Chief:
    """Drives a job, in a thread or in the caller's.

    Args:
        task: the task that drives: the chief task, or worker 0 where the cluster has none.
        servers: connections that only the chief uses.
        cluster: the tasks that begin a job together.
        timeouts: time limits of calls, leases and waits.
        runs_script: True if the chief task itself is a replica, so that the first generation waits for it.
        failed: called with the reason why a chief that drives in a thread cannot go on.
        job: the identity of the job.
        copied: True if variables have copies, so that the job goes on without a server that is lost.

    Attributes:
        task: the task that drives.
        page: URL of its status page, which its heartbeats tell; "" for none.
        steps_down: tells it to end before the job does, because its process is to.
        traces: the traces of what it does; None where they are off.
    """

    traces: ChiefTraces | None = None

    def __init__(
        self,
        task: Task,
        servers: Sequence[RemoteServer],
        cluster: ClusterSpec,
        timeouts: Timeouts,
        runs_script: bool = False,
        failed: Callable[[PSError], object] = lambda error: None,
        job: str = "",
        copied: bool = False,
    ) -> None:
        self._failed = failed
        self.task = task
        self.page = ""
        self.steps_down = StepDown(timeouts)
        self._job = job
        self._copied = copied
        self._servers = servers
        self._timeouts = timeouts
        self._cluster = cluster
        self._expected = set(cluster.tasks("worker")) | ({task} if runs_script else set())
        self._threads = Threads("checkpoint")
        self._took = Histogram()
        self._takes_over = False
        self._begin()
        self._missing: set[Task] = set()
        self._presence = AbandonmentTimer(self._expected, timeouts)
        self._leave_saves = LeaveSaves(timeouts.session_timeout)
        self._gives_up: Abandoned | None = None
        self._sessions: Sequence[SessionState] = ()  # as they were last seen; replaced, never changed
        self._reminder = Reminder(timeouts.report_interval, self._say_who_is_missing)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _begin(self) -> None:
        """Knows nothing yet: what it has to know the servers tell."""
        self._session = self._new_session()
        self._log = JobLog(self._servers, self._session, self._takes_over, self._cluster)
        self._checkpoints = CheckpointCommitter(self._servers, self._session, self._threads, self._took)
        self._returns = Returns(self._servers, self._session, self._log, self._threads)
        self._differences = Differences(self._servers, self._session, self._log, self._threads)
        self._hung = HungMembers(self._session, self._timeouts, self._period, self._threads, self._differences)
        self._watching: Future[Watched] | None = None
        self._version = 0  # of the news that were seen, as the server counts them that keeps the log

    def _new_session(self) -> Session:
        session = Session(self.task, self._servers, 0, True, self._timeouts, job=self._job, copied=self._copied)
        session.pace = lambda: Pace(page=self.page)
        return session

    @property
    def opened(self) -> bool:
        """True once it has had a session, and so has driven the job."""
        return self._session.number != 0

    @property
    def log_server(self) -> RemoteServer:
        """The server that keeps the log and the sessions."""
        return self._servers[self._session.hosting.keeper]

    @property
    def _period(self) -> float:
        """Seconds between two looks at all servers' rounds: a small part of what a round may take."""
        return min(max(self._timeouts.round_timeout / 40, PAUSE / 4), 5.0)

    @property
    def addresses(self) -> dict[Task, str]:
        """The servers and their addresses now. May be read by any thread."""
        return {server.task: server.address for server in self._servers}

    @property
    def expected(self) -> list[Task]:
        """The tasks that the first generation waits for, and the chief's. May be read by any thread."""
        return sorted(self._expected | {self.task})

    def log_from(self, index: int) -> tuple[LogEntry | None, Sequence[LogEntry]]:
        """Returns the first entry of the log, None where there is none, and those from an index on. In any thread."""
        entries = self._log.state.log
        return next(iter(entries), None), entries[index:]

    @property
    def driven(self) -> Driven:
        """The readings of this chief for its metrics. May be read by any thread."""
        state = self._log.state
        members = len(state.generation.members) if state.generation else 0
        missing = tuple(sorted(self._missing))
        return Driven(len(state.generations), members, len(state.approved), missing, state.saved, self._took)

    def start(self, takes_over: bool = False, waits: bool = True) -> None:
        """Drives in a thread of its own, from now on.

        Args:
            takes_over: True to go on with a job that nobody drives any more, and to begin none.
            waits: True to wait for another chief to end, for at most its lease.

        Raises:
            TaskTaken: another chief is there.
        """
        self._open(takes_over, waits)
        self._thread = threading.Thread(target=self._drive_quietly, daemon=True, name="chief")
        self._thread.start()

    def stop(self, abandon: bool, steps_down: bool = False) -> None:
        """Waits for the job to end, in a process whose own script has ended.

        Logs every `Timeouts.report_interval` which tasks it waits for. Gives up when no task is left, see
        `AbandonmentTimer`; a task that is there may take as long as it needs.

        Args:
            abandon: end at once, because this process failed.
            steps_down: end soon, because this process leaves: others drive on.
        """
        if abandon:
            self._stop.set()
        if steps_down:
            self.steps_down.tell()
        while self._thread and self._thread.is_alive():
            self._thread.join(self._timeouts.report_interval)
            if self._thread.is_alive():
                awaited = _told(undone(self._sessions, self._expected)) or "the servers to end the job"
                log.warning("%s has finished its script and continues as chief; it waits for %s", self.task, awaited)

    @property
    def is_driving(self) -> bool:
        """True while it drives in a thread of its own."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Closes the connections of a chief that has not driven; one that drives closes them itself."""
        if self._thread is None:
            self._threads.close()
            for server in self._servers:
                server.close()

    def _say_who_is_missing(self) -> None:
        """Of a process that only drives: those who are there say themselves for whom they wait."""
        waited = undone(self._sessions, self._expected)
        missing = {task: state for task, state in waited.items() if state != "still connected"}
        if missing and self._thread is None and (self._log.state.generation is None or missing == waited):
            log.warning("the chief in %s waits for %s", self.task, _told(missing))

    def _drive_quietly(self) -> None:
        try:
            self._drive()
        except Fenced as error:
            log.warning("the chief in %s ends: %s", self.task, error)
        except Exception as error:  # whatever it is, this process would wait in vain for what needs its chief
            log.error("the chief in %s failed: %s", self.task, error, exc_info=not isinstance(error, PSError))
            self._failed(error if isinstance(error, PSError) else PSError(f"the chief failed: {error!r}"))

    def drive(self, takes_over: bool = False, waits: bool = True, begun: Callable[[], object] = lambda: None) -> None:
        """Drives in the calling thread until the job is done; raises `PSError` if that is impossible.

        Args:
            takes_over: as `start`.
            waits: as `start`.
            begun: called once it is chief: from then on it may be told to step down.
        """
        self._open(takes_over, waits)
        begun()
        self._drive()

    def _open(self, takes_over: bool, waits: bool) -> None:
        self._takes_over = self._log.takes_over = takes_over
        if takes_over and not self._copied and self.log_server.status().incarnations:
            for server in self._servers:
                expect(server)  # each has answered the chief that began the job
        try:
            self._session.open(waits)
        except ServerLost as lost:
            announce(self._session, self._log, lost)  # by the token that server 0 has just given
            raise

    def _drive(self) -> None:
        try:
            while True:
                try:
                    self._lead()
                    break
                except JobOver:
                    raise
                except Fenced as error:
                    self._reopen(error)
        finally:
            self._returns.close()
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
            self._log.attach()
            attached = False
            while not self._stop.is_set():
                try:
                    if not attached:
                        self._log.copy()
                        self._returns.take_back()
                        attached = True
                    watched = self._watch()
                    if watched is None:
                        continue
                    self._version = watched.version
                    if self._act(watched):
                        error = ""
                        break
                except (ServerGone, ServerLost) as lost:
                    go_on_without(self._session, self._log, lost)
                    self._differences.tell(lost)
                    self._watching, self._version = None, 0
                    continue
                if self.steps_down.look(self._sessions, time.monotonic()):
                    log.warning("the chief in %s leaves; another process takes over as chief", self.task)
                    break
        except ServerLost as lost:
            announce(self._session, self._log, lost)  # first: who sees that its session has ended may take its place
            raise
        finally:
            self._session.leave(error)

    def _reopen(self, error: Fenced) -> None:
        """Its session has ended, since it was paused or cut off: it goes on with a new token, if nobody else is chief.

        Raises:
            Fenced: another chief is there, or this one is to end.
            ServerLost: a server was lost or replaced in the meantime.
        """
        if self._stop.is_set():
            raise error
        before = self._session.incarnations
        self._returns.close()
        self._begin()
        try:
            self._session.open(waits=False)
        except TaskTaken as taken:
            why = error.message.partition(";")[0]  # not its advice to restart: the other process has to end first
            raise Fenced(f"{why}; {taken.message}", error.task) from None
        except ServerLost as lost:
            announce(self._session, self._log, lost)  # by the token that server 0 has just given
            raise
        if self._session.incarnations != before and not self._copied:
            self._session.leave("a server was replaced")
            raise ServerLost("a server was replaced while the chief was disconnected; restart from a checkpoint")
        log.warning("the chief in %s was disconnected (%s), and continues: no other took over", self.task, error)

    # ---- Looking and appending ----

    def _watch(self) -> Watched | None:
        """Returns what is new at server 0; what there is after a pause, so that checkpoints get on; None at the end."""
        until = time.monotonic() + PAUSE
        while not self._stop.is_set():
            self._session.check()
            suspects = self._session.hosting.suspects
            if suspects:
                raise next(iter(suspects.values()))
            if self._watching is None:
                known = len(self._log.state.log)
                self._watching = self._session.log_server.watch(self._session.number, known, self._version)
            self._reminder.look()
            news: list[Future[Any]] = [
                self._watching,
                *self._checkpoints.pending(),
                *self._returns.pending(),
                *self._session.hosting.suspected,
            ]
            wait(news, PAUSE / 4, FIRST_COMPLETED)
            if self._watching.done():
                watched, self._watching = self._watching.result(), None
            elif self._has_news() or self.steps_down.told or time.monotonic() > until:
                watched = self._session.look(len(self._log.state.log))
            else:
                continue
            self._sessions = watched.sessions
            self._log.take(watched)
            # An answer may be older than a look on which this chief has acted already.
            if watched.version >= self._version:
                return watched
        return None

    def _has_news(self) -> bool:
        """Returns whether there is something to decide of which the server that keeps the log does not tell."""
        return bool(self._checkpoints.ended() or self._hung.look(self._log.state.generation) or self._returns.due())

    def _act(self, watched: Watched) -> bool:
        """Takes the decisions that are due; returns whether the job is over: done, or given up."""
        self._missing = self._expected - came(watched.sessions)
        saved = self._checkpoints.ended()
        state = self._log.state
        may_save = self._leave_saves.may(time.monotonic())
        back = self._returns.look()
        traced = None if self.traces is None else self.traces.approve(watched.traces)
        entries = self._settled(decide(state, watched, self._expected, self._hung.sessions, saved, may_save, back))
        closed = [entry.generation for entry in entries if isinstance(entry, GenerationClosed)]
        for one in closed:
            log.info("generation %d: %s", one.number, ", ".join(str(m.task) for m in one.members) or "nobody")
        for line in told_of(state, closed[-1], watched.sessions) if closed else ():
            log.warning("%s", line)
        done = entries[-1:] == [Done()]
        gives_up = None if done else self._abandoned(watched.sessions)
        if gives_up is not None:
            entries.append(Done())
        leaving = self._returns.leaving(entries)
        farewells = [self._returns.farewell(gone.server) for gone in leaving]
        if leaving:
            self._log.lose(leaving, entries, self._timeouts.call_timeout)
            self._watching, self._version = None, 0
        elif entries and not self._log.append(entries):
            return False
        self._leave_saves.decided(entries, time.monotonic())
        self._gives_up = gives_up
        if saved:
            self._checkpoints.told()
        self._returns.take_back()
        self._log.copy()
        if traced is not None:
            traced.end()
        for say in farewells:
            self._threads.submit(say)
        self._checkpoints.order(state.saves.values(), state.gone, self._returns.moving)
        over = done or gives_up is not None
        if over:
            self._returns.end()
        return over

    def _settled(self, decided: Sequence[Decision]) -> list[LogEntry]:
        """The entries for the log, once the servers have said where new members begin."""
        asks = any(isinstance(one, Beginning) for one in decided)
        statuses = [server.status() for server in self._session.live] if asks else []
        return [one.closed(statuses) if isinstance(one, Beginning) else one for one in decided]

    def _abandoned(self, sessions: Sequence[SessionState]) -> Abandoned | None:
        """Decides whether to give the job up: nobody is there, nor came a moment ago, and no checkpoint is written."""
        gives_up = self._presence.look(sessions, time.monotonic())
        if gives_up is None:
            return None
        here = any(is_here(session, self._timeouts.session_timeout) for session in self._session.look().sessions)
        writes = any(server.status().saving for server in self._session.live)
        return None if here or writes else gives_up


def _told(states: Mapping[Task, str]) -> str:
    return ", ".join(f"{task} ({states[task]})" for task in sorted(states))
