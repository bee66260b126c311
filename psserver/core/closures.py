"""The stimuli of closures: what a coordinator schedules, and workers run. Server 0 takes them."""

from __future__ import annotations

from concurrent.futures import Future

from psserver.core.admission import Admission
from psserver.effects import Effect
from psserver.registry import Registry
from psserver.rounds.rounds import Rounds
from psserver.state.closures import Closures
from pswire.cluster import Task
from pswire.errors import InvalidRequest
from pswire.model.closures import ClosureOrder, ClosureQueue, ClosureResult, Fetched, Taken

Outcome = tuple[None, list[Effect]]
"""The outcome of a stimulus that answers by its future."""


class ClosureStimuli:
    """The part of a server's state machine that closures concern."""

    task: Task
    server: int
    closures: Closures
    rounds: Rounds
    registry: Registry
    _admission: Admission

    def schedule(self, now: float, session: int, order: ClosureOrder, future: Future[ClosureQueue]) -> Outcome:
        """Takes what a coordinator schedules."""
        return None, self.closures.schedule(session, self._who(session, now), order, future)

    def take(
        self,
        now: float,
        session: int,
        functions: tuple[str, ...],
        result: ClosureResult | None,
        offset: int,
        future: Future[Taken],
    ) -> Outcome:
        """Takes what came of a worker's closure, and has it wait for the next."""
        effects = self.closures.take(session, self._who(session, now), functions, result, offset, future)
        self.rounds.learn(*self.closures.view)
        return None, effects

    def fetch(self, now: float, session: int, number: int, offset: int, future: Future[Fetched]) -> Outcome:
        """Adds a call that waits for what came of a closure."""
        self._who(session, now)
        return None, self.closures.fetch(session, number, offset, future)

    def _left(self, session: int, error: str) -> list[Effect]:
        """A process has left, cleanly where there is no error: after a chief there will be no closures any more."""
        found = self.registry.find(session)
        ends = not error and found is not None and found.task.job == "chief"
        return self.closures.leave() if ends else []

    def _who(self, session: int, now: float) -> Task:
        """Returns the task of a session that may have to do with closures; raises `PSError` if it may not."""
        if self.server != 0:
            raise InvalidRequest("only server 0 schedules closures", str(self.task))
        self._admission.check(session, now)
        return self.registry.task(session)
