"""Who may do something on a server: sessions that have not ended, on a server whose variables are of use."""

from __future__ import annotations

from psserver.core.job import Job
from psserver.registry import Registry
from psserver.state.sessions import Membership
from pswire.cluster import Task
from pswire.errors import Fenced, PSError, ServerLost
from pswire.telemetry import logging_setup


class Admission:
    """Says why a call is refused, whatever it asks for.

    Args:
        task: this server.
        registry: the sessions that were opened here.
        members: on the server that keeps them, which of them are open.
        job: the job as it is now: which server keeps them, and which of them a generation has ended.

    Attributes:
        job: that job.
    """

    def __init__(self, task: Task, registry: Registry, members: Membership, job: Job) -> None:
        self.job = job
        self._task = task
        self._registry = registry
        self._members = members
        self._admitted: dict[int, None] = {}  # the sessions that have called, and have not ended
        self._looked: tuple[object, ...] = ()  # what ends sessions, when they were looked at

    def ends(self) -> list[tuple[int, PSError]]:
        """Returns the sessions that have ended since this was asked last, each with the reason."""
        look = (
            self.job.log.keeps,
            self._members.ends,
            self.job.rounds.generation,
            len(self.job.rounds.fenced),
            self.job.runner.broken,
            self._registry.ends,
        )
        if look == self._looked:
            return []
        self._looked = look
        known = self._admitted | dict.fromkeys(self.job.rounds.clocks.sessions)
        found = [(session, error) for session in known if (error := self.ended(session)) is not None]
        for session, _ in found:
            self._admitted.pop(session, None)
        return found

    @property
    def admitted(self) -> tuple[int, ...]:
        """The sessions that have called, and have not ended; 0 for callers without one."""
        return (0, *self._admitted)

    def check(self, session: int, now: float) -> None:
        """Raises why a session may do nothing here; else the call is a sign of its life."""
        logging_setup.SESSION.set(session)
        error = self.ended(session)
        if error is not None:
            raise error
        self._admitted[session] = None
        self._members.touch(session, now)

    def check_reader(self, session: int, now: float) -> None:
        """Does as `check`; who only looks has no session, 0."""
        if session:
            self.check(session, now)
        else:
            self.check_unbroken()

    def ended(self, session: int) -> PSError | None:
        """Returns why a session may do nothing here; None if it may."""
        job = self.job
        try:
            if job.log.keeps:
                self._members.check(session)
            else:
                self._registry.check(session, job.rounds.generation)
            if session in job.rounds.fenced:
                raise Fenced("this process is not a member of the new generation; restart it to take part again")
            if job.runner.broken is not None:
                self.check_unbroken()
        except PSError as error:
            return error
        return None

    def check_unbroken(self) -> None:
        """Raises `ServerLost` if a round has failed halfway: nobody may compute on a mixture."""
        if self.job.runner.broken:
            raise ServerLost(self.job.runner.broken.message, str(self._task))
