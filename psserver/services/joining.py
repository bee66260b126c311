"""Workers that join a running job: which index each of them has.

The server that keeps the sessions gives the indices. One is kept for a lease, or as long as a session of its task
is open, whichever is longer; then it is free again.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import count

from psserver.effects import Outcome
from psserver.services.log import Log
from psserver.services.service import Service
from psserver.state.sessions import Membership
from pswire.api import Enlisted, EnlistRequest
from pswire.cluster import Task
from pswire.errors import ConfigError, InvalidRequest, TaskTaken

WORKER = "worker"
"""The job of all who join."""


@dataclass
class _Kept:
    key: int
    seen: float


class JoiningWorkers(Service):
    """The indices that processes have which join a job.

    Args:
        task: this server, for messages.
        lease: seconds for which an index is kept that its process does not ask for again.
        limit: the most indices that are kept.
        members: the sessions.
        log: the log of the job.
    """

    verbs = frozenset(("enlist",))

    def __init__(self, task: Task, lease: float, limit: int, members: Membership, log: Log) -> None:
        self._task = str(task)
        self._members = members
        self._log = log
        self._lease = lease
        self._limit = limit
        self._kept: dict[int, _Kept] = {}

    def enlist(self, now: float, asked: EnlistRequest) -> Outcome[Enlisted]:
        """Gives a process that joins the job the task that it is to be, or keeps that for it."""
        task, key = asked.task, asked.key
        if task is not None and task.job != WORKER:
            raise InvalidRequest(f"{task} is not a worker; only workers can join a running job", self._task)
        if not key:
            raise InvalidRequest("a process that joins a job must identify itself by a random number", self._task)
        self._check_joinable()
        states = self._members.states(now)
        open = {each.member.task.index for each in states if each.state == "open" and each.member.task.job == WORKER}
        workers, wanted = self._log.started.workers, None if task is None else task.index
        index = self._give(key, wanted, len(workers), open, now)
        return Enlisted(Task(WORKER, index), index in open), []

    def _check_joinable(self) -> None:
        if self._log.servers and not self._log.keeps:
            raise InvalidRequest("this server does not keep the sessions, so workers cannot join here", self._task)
        if self._log.over or self._log.lost is not None:
            raise InvalidRequest("the job is over, so workers cannot join it", self._task)

    def _give(self, key: int, wanted: int | None, first: int, open: Set[int], now: float) -> int:
        """Gives an index to a process, and keeps it; gives it the same one again.

        Args:
            key: of the process.
            wanted: the index that it wants; None for the first that is free.
            first: the first index above those of the cluster.
            open: indices of which a session is open.
            now: monotonic seconds.

        Raises:
            TaskTaken: another process has the one that it wants.
            ConfigError: that one is the cluster's own; there are too many.
        """
        self._kept = {index: kept for index, kept in self._kept.items() if now - kept.seen <= self._lease}
        mine = next((index for index, kept in self._kept.items() if kept.key == key), None)
        if mine is None and len(self._kept) >= self._limit:
            raise ConfigError(
                f"{self._limit} workers are joining this job, which is the limit; wait until they have joined, or "
                "start the servers with a larger --max-sessions"
            )
        if mine is None or wanted not in (None, mine):
            mine = self._new(wanted, first, open)
            self._kept = {index: kept for index, kept in self._kept.items() if kept.key != key}
        self._kept[mine] = _Kept(key, now)
        return mine

    def _new(self, wanted: int | None, first: int, open: Set[int]) -> int:
        if wanted is None:
            return next(index for index in count(first) if index not in open and index not in self._kept)
        task = Task(WORKER, wanted)
        if wanted < first:
            raise ConfigError(
                f"{task} is one of the {first} workers of the job's cluster; start it with the cluster's TF_CONFIG and "
                f"without --join, or join with a certificate of {Task(WORKER, first)} or a later one (psctl certs OUT "
                "--extra-workers N makes them)",
                str(task),
            )
        if wanted in open or wanted in self._kept:
            raise TaskTaken(
                f"{task} is already in this job; end that process first, or join with the certificate of another "
                "worker (psctl certs OUT --extra-workers N makes them)",
                str(task),
            )
        return wanted
