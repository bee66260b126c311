"""This process's life with the servers: its sessions, its heartbeats, and how these end.

One thread per server heartbeats, and one call is held at server 0, which tells at once how the session ends. Whatever
ends the session ends every wait at once.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

from psclient._src.arrays.devices import Device
from psclient._src.interpreter.interrupts import waits
from psclient._src.network.daemon_threads import Threads
from psclient._src.network.forks import Owner
from psclient._src.network.hosting import Hosting
from psclient._src.network.patience import Deadline, Patience, until_free
from psclient._src.network.remote_server import RemoteServer
from psclient._src.network.transport import Transport
from psclient._src.network.transport_reader import TransportReader
from psclient._src.network.worker_clock import WorkerClock
from pswire.api import UNTIL_ENDED, UNTIL_GONE, Opened, ParameterServer, Watched
from pswire.cluster import Task, server_of
from pswire.errors import (
    Diverged,
    Fenced,
    PSError,
    ServerGone,
    ServerLost,
    TaskTaken,
    Unreachable,
)
from pswire.limits import Timeouts
from pswire.model.changes import Change
from pswire.model.consistency import SYNC, Consistency
from pswire.model.log import Gone, Return, Start
from pswire.model.plan import Nonfinite, Plan
from pswire.model.status import Pace
from pswire.network.futures import LeanFuture
from pswire.telemetry import logging_setup

log = logging.getLogger("psclient")

T = TypeVar("T")

HEARTBEATS = 16
"""Times in a pause between two heartbeats at which sessions heartbeat: those of one time wake a server once for all of
them."""


class Proposal(NamedTuple):
    """Arguments of `ParameterServer.propose` behind the session: a plan, a join point, or the start of a generation."""

    plan: Plan | None
    join_point: str
    start: Start | None
    trace: str = ""

    @property
    def key(self) -> object:
        """Of two with one key the later one counts."""
        return self.plan.id if self.plan is not None else bool(self.join_point)


class Lease:
    """One process's life with the servers: its sessions there, its heartbeats, and how that ends.

    Args:
        task: the task that this process is.
        servers: all parameter servers, in order; a test may hand cores in place of connections.
        replicas: number of local replicas; 0 for a chief that only drives.
        drives: True for a chief's session, which gets a fencing token.
        timeouts: time limits of the cluster.
        consistency: how this process's rounds are made at first; of no meaning where it drives.
        job: the identity of its job.
        broken: called once with the error that ends the session.
        copied: True if variables have copies: then it goes on without a server that is lost.

    Attributes:
        domains: the parts of the machines that fail as one in which the servers run, in their order.
        consistency: how this process's rounds are made.
        nonfinite: what becomes of updates if a contribution has NaN or infinity.
        clock: what the heartbeats say of this process's rounds, where its staleness is bounded; else None.
        change: the last change of the job's consistency; None before the first.
    """

    consistency: Consistency
    clock: WorkerClock | None
    nonfinite: Nonfinite = "apply"
    change: Change | None = None

    def __init__(
        self,
        task: Task,
        servers: Sequence[ParameterServer],
        replicas: int,
        drives: bool = False,
        timeouts: Timeouts | None = None,
        consistency: Consistency = SYNC,
        job: str = "",
        broken: Callable[[PSError], object] = lambda error: None,
        copied: bool = False,
    ) -> None:
        self.task = task
        self.servers = tuple(servers)
        self.hosting = Hosting(task, self.servers)
        self.copied, self.replicas = copied, replicas
        self.timeouts = timeouts or Timeouts()
        self._begin(consistency)
        self.job = job
        self.number = self.token = 0
        self.incarnations: tuple[int, ...] = ()
        self.devices: tuple[str, ...] = ()
        """The devices on which the servers hold variables, in their order, as `/job:ps/task:0/device:CPU:0`."""
        self.domains: tuple[str, ...] = ()
        self.told = False
        """True once the error that ended it was raised: the script may have caught it."""
        self.waits = (-1, b"")
        """The oldest round that is not answered, and its plan, for the heartbeats."""
        self.pace: Callable[[], Pace] = Pace
        """Returns what this process has done, for the heartbeats."""
        self.drive: Callable[[], object] = lambda: None
        """Told, again and again, that nobody drives the job, and that this process is to; does not wait."""
        self.window = 1
        """The most rounds that may be under way at a time; the same for all processes of the job."""
        self._drives = drives
        self._patience = Patience(self.timeouts.session_timeout, self.timeouts.heartbeat_interval)
        self._tell = broken
        self.owner = Owner()
        self._broken: Future[None] = LeanFuture()
        self._ended = threading.Event()
        self._heartbeats: list[threading.Thread] = []
        self.wakes = [threading.Event() for _ in self.servers]
        """Set for a server to heartbeat there at once."""
        self._beating = [threading.Lock() for _ in self.servers]  # heartbeats arrive in the order of what they say
        self._lock = threading.Lock()
        self._threads = Threads("word")
        self._proposals: dict[object, Proposal] = {}  # by their keys; without plans of which a round was answered
        self._reader = TransportReader(self._broken)

    @property
    def log_server(self) -> ParameterServer:
        """The server that keeps the log and the sessions: the first that is there."""
        return self.servers[self.hosting.keeper]

    @property
    def live(self) -> list[ParameterServer]:
        """The servers that are not gone."""
        return [self.servers[index] for index in self.hosting.live]

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

    @property
    def round_limit(self) -> float:
        """Seconds that this process waits for a round: longer than the chief, who drops those that hold it up."""
        return self.timeouts.round_timeout + 2 * self.timeouts.session_timeout

    def open(self, waits: bool = True) -> None:
        """Opens the session on every server and begins to heartbeat.

        Args:
            waits: True to wait until another process that has the task is gone, if it goes within its lease.

        Raises:
            Unreachable: a server does not answer, or servers do not agree.
            TaskTaken: another process is this task, and does not end.
            ConfigError: the servers hold another job; the job's other processes have another consistency.
            ServerLost: a server of the running job was lost meanwhile.
        """
        key = secrets.randbits(62) | 1
        until, opened = time.monotonic() + self.timeouts.start_timeout, dict[int, Opened]()
        while True:
            if self.copied:
                self.hosting.look_around(self._threads, self.timeouts, self.job, self._drives)
            try:
                if self._open_all(opened, key, waits):
                    break
                if time.monotonic() > until:
                    raise Unreachable(
                        "the servers do not agree on which of them keeps the sessions; restart this process",
                        str(self.task),
                    )
                # Another server keeps the sessions since then. It may have opened this one by the number that it had.
                key = self.number
                opened.clear()
                self.pause(self.timeouts.heartbeat_interval / 2)
            except (ServerGone, ServerLost):
                # It was lost just now: with copies the job may go on without it.
                if not self.copied or self._ended.is_set() or time.monotonic() > until:
                    raise
        first, term = next(iter(opened)), max(answer.term for answer in opened.values())
        if self._drives and term > opened[first].term:
            # Another server remembers a later chief: this one's token has to be above that.
            opened[first] = self._open_at(self.servers[first], key, term)
        self.token = opened[first].token
        self.window = min(answer.window for answer in opened.values())
        answers = [opened.get(index) or self.hosting.left_by(index) for index in range(len(self.servers))]
        self.incarnations = tuple(answer.incarnation for answer in answers)
        self.devices = tuple(Device.parse(answer.device).full_name(Task("ps", answer.server)) for answer in answers)
        self.domains = tuple(answer.domain for answer in answers)

    def _open_all(self, opened: dict[int, Opened], key: int, waits: bool) -> bool:
        """Opens the session on every server on which it is not open yet, first on the one that keeps the sessions.

        Returns False once another server keeps them that does not know this one: it is to be opened anew.
        """
        if opened and self.hosting.keeper not in opened:
            return False
        for index in [index for index in self.hosting.live if index not in opened]:
            if not opened:
                opened[index] = self._open_first(key) if waits else self._open_at(self.log_server, key)
                self.number, self.token = opened[index].session, opened[index].token
                logging_setup.follow(lambda: (-1, self.number))
            else:
                answer = self._open_next(index)
                if answer is None:
                    return False
                opened[index] = answer
            # A server that is not there yet, or hangs, must not cost the lease that the first one keeps.
            self._start_beating(index)
            if self.copied or len(opened) == 1:
                self._hold(index)
        return True

    def _open_next(self, index: int) -> Opened | None:
        """Opens the session on a server that does not keep the sessions; None if it is found to keep them."""
        try:
            answer = self._unless_broken(partial(self._open_at, self.servers[index], self.number))
        except TaskTaken:
            return None
        return answer if answer.session == self.number else None

    def _open_at(self, server: ParameterServer, session: int, term: int = 0) -> Opened:
        how = self.replicas, session, self._drives, self.consistency, self.job, term
        return self.hosting.note(server.open(self.task, *how))

    def _open_first(self, key: int) -> Opened:
        """Opens the session on the server that keeps them; waits while another process has the task."""
        return until_free(partial(self._open_at, self.log_server, key), self.timeouts, self._ended)

    def _unless_broken(self, work: Callable[[], T]) -> T:
        """Returns what a call gives that may wait for long, or what ends the session meanwhile."""
        self.owner.check()
        future = self._threads.submit(work)
        both: tuple[Future[Any], ...] = (future, self._broken)
        wait(both, return_when=FIRST_COMPLETED)
        if not future.done():
            self.check()
        return future.result()

    def _start_beating(self, index: int) -> None:
        self._patience.heard(index)
        own, name = (index, self.hosting.life(index), self.number), f"heartbeat-{index}"
        self._heartbeats.append(threading.Thread(target=self._heartbeat, args=own, daemon=True, name=name))
        self._heartbeats[-1].start()

    def _hold(self, index: int) -> None:
        """Holds a call at a server that is answered when the session ends, and ends when this process does.

        Where variables have copies, it is answered as well when a server is lost.
        """
        life, number = self.hosting.life(index), self.number

        def answered(told: Future[Watched]) -> None:
            error = told.exception()
            if not self._is_now(index, life, number):
                return
            if error is None:
                self.lose([entry for entry in told.result().entries if isinstance(entry, Gone)])
                self._hold(index)
            elif isinstance(error, PSError):
                self._unheard(index, error)

        known, version = (len(self.hosting.losses), UNTIL_GONE) if self.copied else (0, UNTIL_ENDED)
        try:
            self.servers[index].watch(self.number, known, version).add_done_callback(answered)
        except PSError as error:
            self._unheard(index, error)

    def _unheard(self, index: int, error: PSError) -> None:
        """A server does not answer any more, or has ended this session."""
        if (
            not self.copied
            or not isinstance(error, ServerLost | ServerGone)
            or (index not in self.hosting.gone and not self.hosting.suspect(index, error, self._drives))
        ):
            self.end(error)

    def lose(self, losses: Sequence[Gone]) -> None:
        """Goes on without servers that are lost; what waits for their answers is told, and asks others.

        Args:
            losses: all that the log tells of, from the first one on.
        """
        for entry in self.hosting.lose(losses):
            self._patience.forget(entry.server)
            self.wakes[entry.server].set()  # its heartbeats end

    def take_back(self, back: Return, times: int) -> None:
        """Goes on with a server that was gone, and is back, if it is not lost again.

        Args:
            back: which, and its new life.
            times: how often it was lost before.
        """
        server = back.server
        opens = partial(self._open_at, self.servers[server], self.number)
        opened = self.hosting.take_back(server, times, back.address, opens)
        if opened is not None:
            self.incarnations = back.among(self.incarnations)
            self.domains = (*self.domains[:server], opened.domain, *self.domains[server + 1 :])
            self._start_beating(server)
            self._hold(server)

    def leave(self, error: str = "") -> str:
        """Ends the session; a clean end tells the chief that this process has done its part.

        With copies all servers hear of it. Of a clean end the one that keeps the log hears last: once the chief sees
        there that it has left, the others may end its session.

        Args:
            error: why it does not end cleanly; "" if it does, for all that this process knows.

        Returns:
            The same; where the session had failed already, and this process did not know, why it had.
        """
        if self._ended.is_set():
            return error or str(self.ended_by() or "")
        self._ended.set()
        for wake in self.wakes:
            wake.set()
        self._threads.close()
        for index in (self.hosting.live if error else self.hosting.live[::-1]) if self.copied else (0,):
            if self.number and not _is_loss(self.ended_by(), index):
                try:
                    self.servers[index].leave(self.number, error)
                except (ServerLost, ServerGone, Unreachable) as failure:
                    log.debug("the session could not be closed: %s", failure)
                except PSError as failure:
                    log.warning("%s could not close its session: %s", self.task, failure)
                    return error or str(failure)
        return error

    def close(self) -> None:
        """Waits for the heartbeats to end, after `leave`."""
        logging_setup.follow(None)
        for thread in self._heartbeats:
            thread.join(self.timeouts.heartbeat_interval + self.timeouts.call_timeout)

    def _heartbeat(self, index: int, life: int, number: int) -> None:
        while True:
            woken = self.wakes[index].wait(until_heartbeat(self.timeouts.heartbeat_interval, number, time.time()))
            if index in self.hosting.gone or not self._is_now(index, life, number):
                return
            self.wakes[index].clear()
            try:
                self.heartbeat_now(index, not woken)
                self._patience.heard(index)
            except PSError as error:
                if self._is_now(index, life, number):
                    self._unheard(index, error)
                return

    def _is_now(self, index: int, life: int, number: int) -> bool:
        """Returns whether this is still the session of that number, and a server's life that one."""
        return not self._ended.is_set() and self.hosting.life(index) == life and self.number == number

    def heartbeat_now(self, index: int, by_itself: bool = False) -> None:
        """Heartbeats at a server; `by_itself` where the time has come, and nothing has happened."""
        with self._beating[index]:
            clock = self.clock  # of now: it is another one after a change
            said = 0 if clock is None else clock.say(index, by_itself)
            if self.servers[index].heartbeat(self.number, *self.waits, self.pace(), said):
                self.drive()

    def end(self, error: PSError) -> None:
        """Ends the session with an error for all calls that wait and all later ones."""
        if isinstance(error, Fenced):
            error = self._reason(error)
        with self._lock:
            if self._broken.done():
                return
            self._broken.set_exception(error)
        self._tell(error)
        if isinstance(error, Diverged):
            # The others may wait on servers that cannot know.
            self.leave(f"{type(error).__name__}: {error.message}")

    def _reason(self, error: Fenced) -> PSError:
        """Returns why the session was ended, which this server knows: the others learn of it by a generation."""
        try:
            self.log_server.heartbeat(self.number, *self.waits)
        except PSError as told:
            return told
        return error

    def ended_by(self) -> BaseException | None:
        """Returns what ended this session; None while nothing has."""
        return self._broken.exception() if self._broken.done() else None

    def check(self) -> None:
        """Raises the error that ended this session, if one did; in a fork of the process that it cannot be used."""
        self.owner.check()
        if self._broken.done():
            self.told = True
            self._broken.result()

    def deadline(self, seconds: float) -> Deadline:
        """Makes the deadline of waits that begin now; the time in which a server is silent does not count."""
        return self._patience.deadline(seconds)

    def pause(self, seconds: float) -> None:
        """Waits for some seconds; raises what ends the session meanwhile."""
        wait((self._broken,), seconds)
        self.check()

    def transport(self, index: int) -> Transport | None:
        """Returns the transport to a server, by its number; None for gRPC."""
        server = self.servers[index]
        return server.transport(self.number) if isinstance(server, RemoteServer) else None


waits(Lease.pause)
waits(Lease._unless_broken)


def until_heartbeat(pause: float, number: int, now: float) -> float:
    """Returns the seconds until a session's next heartbeat.

    Heartbeats are sent at one of a few times, which are the same for all sessions that share a clock.

    Args:
        pause: seconds between two heartbeats.
        number: number of the session.
        now: seconds since 1970; where clocks differ, heartbeats are spread as if there were no such times.
    """
    left = pause - (now - number % HEARTBEATS * pause / HEARTBEATS) % pause
    return left if left > pause / HEARTBEATS else left + pause  # this one was woken a little early


def _is_loss(error: BaseException | None, index: int) -> bool:
    """Returns whether an error says that a server is lost, so that no call to it is answered any more."""
    return isinstance(error, ServerLost) and server_of(error) == index
