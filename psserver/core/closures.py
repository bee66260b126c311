"""The stimuli of closures: what a coordinator schedules, and workers run. Server 0 takes them."""

from __future__ import annotations

from concurrent.futures import Future

from psserver.core.admission import Admission
from psserver.effects import Effect, Outcome
from psserver.registry import Registry
from psserver.rounds.rounds import Rounds
from psserver.state.closures import Closures
from pswire.cluster import Task
from pswire.errors import InvalidRequest
from pswire.model.closures import ClosureQueue, Fetched, Taken
from pswire.servers.closures import FetchRequest, ScheduleRequest, TakeRequest


class ClosureStimuli:
    """The part of a server's state machine that closures concern."""

    task: Task
    server: int
    closures: Closures
    rounds: Rounds
    registry: Registry
    _admission: Admission

    def schedule(self, now: float, asked: ScheduleRequest, future: Future[ClosureQueue]) -> Outcome[None]:
        """Takes what a coordinator schedules."""
        session = asked.session
        return None, self.closures.schedule(session, self._who(session, now), asked.order, future)

    def take(self, now: float, asked: TakeRequest, future: Future[Taken]) -> Outcome[None]:
        """Takes what came of a worker's closure, and has it wait for the next."""
        task = self._who(asked.session, now)
        effects = self.closures.take(asked.session, task, asked.functions, asked.result, asked.offset, future)
        self.rounds.learn(*self.closures.view)
        return None, effects

    def fetch(self, now: float, asked: FetchRequest, future: Future[Fetched]) -> Outcome[None]:
        """Adds a call that waits for what came of a closure."""
        self._who(asked.session, now)
        return None, self.closures.fetch(asked.session, asked.number, asked.offset, future)

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
