"""Sessions by their numbers: the task of each, and the token of its transports. One registry for a whole server."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from pswire.cluster import Task
from pswire.errors import ConfigError, Fenced, Forbidden
from pswire.limits import MAX_SESSIONS
from pswire.model.log import Generation
from pswire.security.session_numbers import count_of, is_made_for

log = logging.getLogger("psserver")

REMEMBERED = 64
"""Sessions that one job may have had, as a multiple of the sessions that may be open at the same time: the chief hears
of all.
"""

TRANSPORT_TOKEN_BYTES = 16
"""Length of a transport's random token, in bytes."""


@dataclass(frozen=True)
class Registered:
    """One session.

    Attributes:
        task: the task that opened it. No other may use it.
        transport_token: the token that its client shows to open a transport; the answer to `Open` holds it.
    """

    task: Task
    transport_token: bytes


class Registry:
    """The sessions that were opened on one server: those of its job, and the last ones of earlier jobs.

    Written and checked under the core's lock. The rims call `find` from any thread without the lock: it does one lookup
    in one dictionary, and what is in it never changes.

    Args:
        server: this server's task, for messages.
        limit: maximum number of concurrent sessions.

    Attributes:
        ends: changes with every session that is readmitted or retired.
    """

    def __init__(self, server: Task, limit: int = MAX_SESSIONS) -> None:
        self.limit = limit
        self.ends = 0
        self._server = str(server)
        self._sessions: dict[int, Registered] = {}
        self._past: dict[int, None] = {}  # of jobs that are over: their processes are told so
        self._generation: Generation | None = None  # that `_stolen` was made for
        self._stolen: dict[int, Task] = {}  # sessions that another task has opened than the generation says

    def enter(self, number: int, task: Task) -> None:
        """Registers a session that a task has opened.

        A task takes back a number that was made for it from one that has opened it here before; so does a server its
        incarnation, which is no number of a session.

        Raises:
            Forbidden: the session is another task's.
            ConfigError: the job has had too many sessions.
        """
        found = self._sessions.get(number)
        if found is not None and found.task != task:
            self._take_back(number, found.task, task)
            found = None
        if found is None or number in self._past:
            self.check_room()
            self._sessions.setdefault(number, Registered(task, secrets.token_bytes(TRANSPORT_TOKEN_BYTES)))
            self._past.pop(number, None)
            self._compare(None)

    def _take_back(self, number: int, holder: Task, task: Task) -> None:
        """Takes a session from a task that has opened it and for which it was not made; raises `Forbidden` if it was.

        Its transports end with it: they were opened with the token of what was registered.
        """
        is_own = is_made_for(task, number) or (task.job == "ps" != holder.job and not is_made_for(holder, number))
        if not is_own:
            raise Forbidden(f"session {number} belongs to {holder}, not to {task}; restart {task}", self._server)
        log.warning(
            "%s had opened session %d, which belongs to %s; it was given back to %s. Check which process runs as %s",
            *(holder, count_of(number), task, task, holder),
        )
        del self._sessions[number]
        self._past.pop(number, None)
        self.ends += 1

    def check_room(self) -> None:
        """Raises `ConfigError` if the job can have no more sessions. Ended sessions count as well."""
        known = len(self._sessions) - len(self._past)
        if known >= REMEMBERED * self.limit:
            raise ConfigError(
                f"the tasks of this job were started {known} times, which is the limit; restart the job, or start "
                "its servers with a larger --max-sessions"
            )

    def find(self, number: int) -> Registered | None:
        """Returns the session with a number; None if it was never opened here, or is forgotten. From any thread."""
        return self._sessions.get(number)

    def task(self, number: int) -> Task:
        """Returns the task of a session that was opened here."""
        return self._sessions[number].task

    def transport_token(self, number: int) -> bytes:
        """Returns the transport token of a session that was opened here."""
        return self._sessions[number].transport_token

    def check(self, number: int, generation: Generation | None) -> None:
        """Checks that a session may act on a server that does not give out session numbers.

        Args:
            number: the session's number.
            generation: the newest generation. Its member list decides which task owns a session, whichever task opened
                it here first.

        Raises:
            Fenced: the session was not opened here, or its job is over.
            Forbidden: another task than the session's own has opened it.
        """
        found = self._sessions.get(number)
        if found is None or number in self._past:
            raise Fenced("this session was not opened on this server, or its job is over; restart the process")
        if generation is not self._generation:
            self._compare(generation)
        if number in self._stolen:
            owner = self._stolen[number]
            raise Forbidden(f"session {number} belongs to {owner}, but {found.task} has opened it", self._server)

    def _compare(self, generation: Generation | None) -> None:
        """Finds the sessions opened by another task than the generation says; once per generation, not per check."""
        self._generation = generation
        members = generation.everybody if generation else ()
        found = [(member, self._sessions.get(member.session)) for member in members]
        self._stolen = {m.session: m.task for m, here in found if here is not None and here.task != m.task}

    def retire(self, numbers: Iterable[int]) -> None:
        """Marks these sessions as of a job that is over: they count no more.

        As many are remembered as one job may have.
        """
        self.ends += 1
        self._past |= dict.fromkeys(number for number in numbers if number in self._sessions)
        while len(self._past) > REMEMBERED * self.limit:
            oldest = next(iter(self._past))
            del self._past[oldest], self._sessions[oldest]
