"""Who may do something on a server: sessions that have not ended, on a server whose variables are of use."""

from __future__ import annotations

from psserver.core.log import Log
from psserver.registry import Registry
from psserver.rounds.rounds import Rounds
from psserver.rounds.runner import Runner
from psserver.state.sessions import Membership
from pswire.cluster import Task
from pswire.errors import PSError, ServerLost
from pswire.telemetry import logging_setup


class Admission:
    """Says why a call is refused, whatever it asks for.

    Args:
        task: this server.
        registry: the sessions that were opened here.
        members: on the server that keeps them, which of them are open.
        rounds: which of them a generation has ended.
        runner: whether a round has failed halfway.
        log: which server keeps the sessions.

    Attributes:
        seen: what `ends` was when `changed` was asked last.
    """

    def __init__(
        self, task: Task, registry: Registry, members: Membership, rounds: Rounds, runner: Runner, log: Log
    ) -> None:
        self._task = task
        self._log = log
        self._registry = registry
        self._members = members
        self._rounds = rounds
        self._runner = runner
        self.seen: tuple[object, ...] = ()

    def changed(self) -> bool:
        """Returns True if a session may have ended since the last time that this was asked."""
        ends = self.ends
        changed, self.seen = ends != self.seen, ends
        return changed

    @property
    def ends(self) -> tuple[object, ...]:
        """What changes where a session may have ended; not where one is opened."""
        return (
            self._log.keeps,
            self._members.ends,
            self._rounds.generation,
            len(self._rounds.fenced),
            self._runner.broken,
            self._registry.ends,
        )

    def check(self, session: int, now: float) -> None:
        """Raises why a session may do nothing here; else the call is a sign of its life."""
        logging_setup.SESSION.set(session)
        error = self.ended(session)
        if error is not None:
            raise error
        self._members.touch(session, now)

    def check_reader(self, session: int, now: float) -> None:
        """Does as `check`; who only looks has no session, 0."""
        if session:
            self.check(session, now)
        else:
            self.check_unbroken()

    def ended(self, session: int) -> PSError | None:
        """Returns why a session may do nothing here; None if it may."""
        try:
            if self._log.keeps:
                self._members.check(session)
            else:
                self._registry.check(session, self._rounds.generation)
            self._rounds.check(session)
            self.check_unbroken()
        except PSError as error:
            return error
        return None

    def stop_clocks(self) -> None:
        """Nobody waits for the clock of a session that has ended."""
        for session in self._rounds.clocks.sessions:
            if self.ended(session) is not None:
                self._rounds.clocks.leave(session)

    def check_unbroken(self) -> None:
        """Raises `ServerLost` if a round has failed halfway: nobody may compute on a mixture."""
        if self._runner.broken:
            raise ServerLost(self._runner.broken.message, str(self._task))
