"""A worker that joins a running job: it finds the job, gets a place in it, and keeps that.

Any server of the job tells where all of them are; the one that keeps the sessions gives the place.
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from psclient._src.network.patience import until_free
from psclient._src.network.remote_server import RemoteServer
from psclient._src.network.tls_diagnosis import names_shown
from pswire.cluster import ClusterSpec, Task, check_address, is_loopback, join_address, tf_config_for
from pswire.errors import ConfigError, InvalidRequest, PSError, ServerGone, ServerLost, TaskTaken, Unreachable
from pswire.limits import Timeouts
from pswire.model.log import JobStarted
from pswire.model.status import ServerStatus, newest_of
from pswire.security.identity import PLACEHOLDER, Security, SecurityOptions
from pswire.telemetry.reminder import Reminder
from pswire.variables import JOB, REPLICATION_FACTOR, TF_CONFIG

log = logging.getLogger("psworker")

LOOK_SECONDS = 2.0
"""Seconds that a server may take to answer while a job is looked for."""

PAUSE = 0.25
"""Seconds between two looks."""

NOBODY = 0
"""The session of who has none yet."""

_WORKER = re.compile(r"worker-([0-9]{1,15})")
_SERVER = re.compile(r"ps-([0-9]{1,15})")


class JobIsOver(PSError):
    """The job is over: there is nothing to join."""


@dataclass(frozen=True)
class RunningJob:
    """A job that runs, as its servers tell of it.

    Attributes:
        name: its identity, "" for the one without a name.
        servers: the addresses of all servers, in their order.
        keeper: the server that keeps the sessions.
        workers: the addresses of the cluster's workers.
        chief: the address of the chief task, "" where there is none.
        copied: True if variables have copies on other servers.
    """

    name: str
    servers: tuple[str, ...]
    keeper: int
    workers: tuple[str, ...]
    chief: str
    copied: bool


@dataclass(frozen=True)
class Joined:
    """What a process is that has joined a job.

    Attributes:
        task: the task that it is.
        cluster: the cluster of the job, and this task in it.
        job: the job.
    """

    task: Task
    cluster: ClusterSpec
    job: RunningJob

    def variables(self) -> dict[str, str]:
        """The environment variables by which a script finds its place, as any other task does."""
        config = tf_config_for(self.cluster.as_dict(), self.task)
        named = {JOB: self.job.name} if self.job.name else {}
        return {TF_CONFIG: config, REPLICATION_FACTOR: str(1 + self.job.copied)} | named


def certified_task(options: SecurityOptions) -> Task | None:
    """Returns the worker that the certificate of a process names; None for a process without a certificate.

    Raises:
        ConfigError: a path has a place for the task's name, which is not known yet; the certificate names no worker.
    """
    for name, path in options.variables().items():
        if PLACEHOLDER in path:
            raise ConfigError(
                f"{name}={path}: a worker that joins does not know its task yet, so the path cannot contain {{task}}; "
                "write the path of one worker, such as certs/worker-2/tls.crt (psctl certs OUT --extra-workers N)"
            )
    names = options.names()
    found = sorted(int(match[1]) for name in names if (match := _WORKER.fullmatch(name)))
    if options.tls_cert and len(found) != 1:
        whose = ", ".join(sorted(names)) or "no task"
        raise ConfigError(
            f"{options.tls_cert} is for {whose}, but a worker that joins needs the certificate of exactly one "
            "worker; psctl certs OUT --extra-workers N makes such certificates"
        )
    return Task("worker", found[0]) if found else None


class Joiner:
    """Finds a job, and keeps this process's place in it; a context manager that ends the keeping.

    Args:
        addresses: of one or several servers of the job.
        timeouts: time limits of the cluster.
        security: certificate and token that this process shows.
        wanted: the task that it has to be, as its certificate says; None for any.
        name: the job's identity, as this process was told; "" for whichever the servers hold.

    Attributes:
        joined: the place; None before `take`.
    """

    def __init__(
        self, addresses: Sequence[str], timeouts: Timeouts, security: Security, wanted: Task | None, name: str
    ) -> None:
        self.joined: Joined | None = None
        self._addresses = tuple(addresses)
        self._timeouts = timeouts
        self._security = security
        self._wanted = wanted
        self._name = name
        self._key = secrets.randbits(62) | 1
        self._servers: dict[tuple[str, Task], RemoteServer] = {}
        self._tasks: dict[str, Task] = {}  # of the addresses, as certificates there say
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # the thread that keeps the place asks as well

    def __enter__(self) -> Joiner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._close()

    # ---- A place ----

    def take(self) -> Joined:
        """Waits for a job, and takes a place in it: the same as before, where this process had one.

        Raises:
            JobIsOver: the servers hold a job that is over.
            Unreachable: for `Timeouts.start_timeout` no server has answered, or no chief has begun a job.
            TaskTaken: another process is the task that this one has to be, and does not end.
            ConfigError, Unauthenticated, Forbidden: the servers refuse this process.
        """
        until = time.monotonic() + self._timeouts.start_timeout
        why = ""
        where = ", ".join(self._addresses)
        reminder = Reminder(
            self._timeouts.report_interval, lambda: log.warning("waiting for a job at %s: %s", where, why)
        )
        while True:
            try:
                with self._lock:
                    self.joined = self._look()
                return self.joined
            except (Unreachable, ServerLost, ServerGone, InvalidRequest) as error:
                why = error.message.partition("; ")[0]  # what to do is said below
            if time.monotonic() > until:
                raise Unreachable(
                    f"found no job to join at {where} within {self._timeouts.start_timeout:g} s (PS_START_TIMEOUT): "
                    f"{why}; start its servers and its chief, or correct --join"
                )
            reminder.look()
            self._ended.wait(PAUSE)

    def _look(self) -> Joined:
        """Takes a place, if there is a job now."""
        job = self._find()
        task = self._wanted if self.joined is None else self.joined.task
        found = until_free(partial(self._keeper(job).enlist, task, self._key), self._timeouts, self._ended)
        return Joined(found.task, self._cluster(job, found.task), job)

    def hold(self, always: bool) -> None:
        """Keeps the place from now on, in a thread of its own.

        Args:
            always: False to keep it until a session of the task is open, which keeps it then.
        """
        self._thread = threading.Thread(target=self._hold, args=(always,), name="place", daemon=True)
        self._thread.start()

    def _hold(self, always: bool) -> None:
        while not self._ended.wait(self._timeouts.heartbeat_interval):
            joined = self.joined
            if joined is None:
                continue
            try:
                with self._lock:
                    opened = self._renew(joined)
            except TaskTaken:
                opened = True  # most likely by this process: its place was not renewed for a lease
            except PSError as error:
                # The server that kept the sessions may be lost, or the job be over: the script is told, and not here.
                log.debug("%s could not renew its place: %s", joined.task, error)
                continue
            if opened and not always:
                self._close()
                return

    def _renew(self, joined: Joined) -> bool:
        """Keeps the place for another lease; returns whether a session of the task is open."""
        try:
            return self._keeper(joined.job).enlist(joined.task, self._key).opened
        except TaskTaken:
            raise
        except PSError:  # another server may keep the sessions by now
            return self._keeper(self._find()).enlist(joined.task, self._key).opened

    # ---- What is there ----

    def _find(self) -> RunningJob:
        """Returns the job that the servers hold.

        Raises:
            Unreachable: no server answers, or there is no job yet.
        """
        found, refusals = dict[int, tuple[RemoteServer, ServerStatus]](), list[PSError]()
        for address in self._addresses:
            try:
                server = self._connect(address, self._task_at(address))
                status = server.status()
            except (Unreachable, ServerLost) as error:
                self._tasks.pop(address, None)
                refusals.append(error)
            else:
                found[status.server] = server, status
        if not found:
            raise refusals[0]
        newest = newest_of(each for _, each in found.values())
        if newest is None:
            raise Unreachable("the chief has not started a job there yet")
        self._check(newest)
        return self._told(found[newest.server][0], newest, {index: each.address for index, (each, _) in found.items()})

    def _check(self, status: ServerStatus) -> None:
        """Raises why nobody can join the job that a server tells of."""
        where = ", ".join(self._addresses)
        if status.over:
            raise JobIsOver(f"the job at {where} is over, so it cannot be joined")
        if status.broken:
            raise Unreachable(f"the job there has lost a server, and was not restarted yet: {status.broken}")

    def _told(self, server: RemoteServer, status: ServerStatus, given: Mapping[int, str]) -> RunningJob:
        """Returns the job of which a server tells; at the given addresses servers have answered, by their numbers."""
        try:
            entries = server.watch(NOBODY, 0, 0).result(LOOK_SECONDS)
        except TimeoutError:
            raise Unreachable(f"no answer for {LOOK_SECONDS:g} s", str(server.task)) from None
        began = entries.entries[0] if entries.entries else None
        if not isinstance(began, JobStarted):
            raise Unreachable("the chief has not started a job there yet")
        self._check_name(began.name)
        if len(began.addresses) < len(began.incarnations):
            raise ConfigError(
                "the job's chief has an older version that does not send the addresses of servers; "
                "install the same version everywhere"
            )
        known = {moved.server: moved.address for moved in status.moved} | dict(given)
        servers = tuple(known.get(index, address) for index, address in enumerate(began.addresses))
        _check_reachable(servers, set(status.gone) | given.keys(), next(iter(given.values())))
        return RunningJob(began.name, servers, status.keeper, began.workers, began.chief, bool(began.copies))

    def _check_name(self, name: str) -> None:
        """Raises `ConfigError` if this process was told to join another job than the one of that name."""
        if self._name and self._name != name:
            held = f"the job {name!r}" if name else "a job without a name"
            raise ConfigError(
                f"PS_JOB names the job {self._name!r}, but the servers at {', '.join(self._addresses)} hold {held}; "
                "unset PS_JOB to join that job, or correct --join"
            )

    def _cluster(self, job: RunningJob, task: Task) -> ClusterSpec:
        """The cluster as this task's TF_CONFIG says it: that of the others, and this task.

        It gets the name of this host, unless all is on one machine.
        """
        host = check_address(job.servers[0], "the job's log")[0]
        mine = join_address(host if is_loopback(host) else socket.gethostname(), 0)
        workers = dict(enumerate(job.workers)) | {task.index: mine}
        jobs: dict[str, Sequence[str] | Mapping[int, str]] = {"ps": job.servers, "worker": workers}
        return ClusterSpec(jobs | ({"chief": [job.chief]} if job.chief else {}))

    # ---- Connections ----

    def _task_at(self, address: str) -> Task:
        """Returns which server is at an address, as far as its certificate has to be asked for by that name."""
        if address not in self._tasks:
            names = names_shown(address, self._security) if self._security.tls else ()
            numbers = sorted(int(match[1]) for name in names if (match := _SERVER.fullmatch(name)))
            self._tasks[address] = Task("ps", numbers[0] if numbers else 0)
        return self._tasks[address]

    def _keeper(self, job: RunningJob) -> RemoteServer:
        """Returns the connection to the server that keeps the sessions of a job."""
        return self._connect(job.servers[job.keeper], Task("ps", job.keeper))

    def _connect(self, address: str, task: Task) -> RemoteServer:
        key = address, task
        if key not in self._servers:
            timeouts = replace(self._timeouts, call_timeout=min(self._timeouts.call_timeout, LOOK_SECONDS))
            self._servers[key] = RemoteServer(address, task, timeouts, security=self._security)
        return self._servers[key]

    def _close(self) -> None:
        servers, self._servers = self._servers, {}
        for server in servers.values():
            server.close()


def _check_reachable(servers: Sequence[str], known: set[int], answered: str) -> None:
    """Raises `ConfigError` if the log names a server by an address that is another machine here.

    Args:
        servers: addresses of all servers.
        known: numbers of those that have answered, and of those that are not needed.
        answered: the address at which one has answered.
    """
    if is_loopback(check_address(answered, "--join")[0]):
        return
    for index, address in enumerate(servers):
        if index not in known and is_loopback(check_address(address, "the job's log")[0]):
            raise ConfigError(
                f"the job has {Task('ps', index)} at {address}, which is a local address here; give the addresses of "
                "all servers: --join HOST:PORT,HOST:PORT"
            )
