"""Sessions by their numbers: the task of each, and the token of its lanes. One registry for a whole server."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from pswire.cluster import Task
from pswire.errors import ConfigError, Fenced, Forbidden
from pswire.limits import MAX_SESSIONS
from pswire.model.log import Epoch

REMEMBERED = 64
"""How many times as many sessions a job may have had as may be open at a time: the chief has to hear of all of them."""

LANE_TOKEN_BYTES = 16
"""Length of a lane's token, which is drawn by lot."""


@dataclass(frozen=True)
class Registered:
    """One session.

    Attributes:
        task: the task that has opened it, and that alone may use it.
        lane_token: what its client shows to open a lane; it was told in the answer to `Open`.
    """

    task: Task
    lane_token: bytes


class Registry:
    """All sessions that were opened on one server: those of its job, and the last of the jobs that are over.

    Written and checked under the core's lock. The rims call `find` from any thread and without the lock: it looks into
    one dictionary, once, whose entries never change.

    Args:
        server: this server, for messages.
        limit: sessions that may be open at a time.
    """

    def __init__(self, server: Task, limit: int = MAX_SESSIONS) -> None:
        self.limit = limit
        self._server = str(server)
        self._sessions: dict[int, Registered] = {}
        self._past: dict[int, None] = {}  # of jobs that are over: their processes are told so, and are no strangers
        self._epoch: Epoch | None = None  # of which the next are
        self._stolen: dict[int, Task] = {}  # sessions that another task has opened than the epoch says

    def enter(self, number: int, task: Task) -> None:
        """Notes that a task has opened a session.

        Raises:
            Forbidden: another task has opened it.
            ConfigError: the job has had too many.
        """
        found = self._sessions.get(number)
        if found is not None and found.task != task:
            raise Forbidden(f"session {number} is {found.task}'s, and not {task}'s; restart {task}", self._server)
        if found is None or number in self._past:
            self.check_room()
            self._sessions.setdefault(number, Registered(task, secrets.token_bytes(LANE_TOKEN_BYTES)))
            self._past.pop(number, None)
            self._compare(None)

    def check_room(self) -> None:
        """Raises `ConfigError` if the job can have no more sessions; those that have ended count as well."""
        known = len(self._sessions) - len(self._past)
        if known >= REMEMBERED * self.limit:
            raise ConfigError(
                f"the tasks of this job were started {known} times already; start the job anew, or its "
                "servers with a larger --max-sessions"
            )

    def find(self, number: int) -> Registered | None:
        """The session with a number; None for one that was never opened here, or is forgotten. From any thread."""
        return self._sessions.get(number)

    def task(self, number: int) -> Task:
        """The task of a session that was opened here."""
        return self._sessions[number].task

    def lane_token(self, number: int) -> bytes:
        """Returns what the client of a session that was opened here is to show."""
        return self._sessions[number].lane_token

    def check(self, number: int, epoch: Epoch | None) -> None:
        """Raises why a session may do nothing on a server that does not give the numbers.

        Args:
            number: the session.
            epoch: the newest; what it says of its members is right, whoever came here before them.

        Raises:
            Fenced: it was not opened here, or its job is over.
            Forbidden: it was opened by a task that is not the session's.
        """
        found = self._sessions.get(number)
        if found is None or number in self._past:
            raise Fenced("this session was not opened here, or its job is over; restart the process")
        if epoch is not self._epoch:
            self._compare(epoch)
        if number in self._stolen:
            owner = self._stolen[number]
            raise Forbidden(f"session {number} is {owner}'s, and {found.task} has opened it", self._server)

    def _compare(self, epoch: Epoch | None) -> None:
        """Looks for what is stolen once for each epoch: checks are many."""
        self._epoch = epoch
        members = epoch.members if epoch else ()
        found = [(member, self._sessions.get(member.session)) for member in members]
        self._stolen = {m.session: m.task for m, here in found if here is not None and here.task != m.task}

    def retire(self, numbers: Iterable[int]) -> None:
        """The job of these sessions is over: they count no more. As many are remembered as one job may have."""
        self._past |= dict.fromkeys(number for number in numbers if number in self._sessions)
        while len(self._past) > REMEMBERED * self.limit:
            oldest = next(iter(self._past))
            del self._past[oldest], self._sessions[oldest]
