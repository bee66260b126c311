"""The stimulus of batches that are handed out, a part of the machine's. Server 0 takes it."""

from __future__ import annotations

from psserver.core.admission import Admission
from psserver.effects import Effect
from psserver.registry import Registry
from psserver.rounds.rounds import Rounds
from pswire.cluster import Task
from pswire.errors import InvalidRequest
from pswire.model.chunks import ChunkAsk, Chunks

Outcome = tuple[Chunks, list[Effect]]
"""A stimulus's answer to its caller, and its effects."""


class ChunkStimuli:
    """The part of a server's state machine that hands out batches."""

    task: Task
    server: int
    rounds: Rounds
    registry: Registry
    _admission: Admission

    def assign_batches(self, now: float, session: int, ask: ChunkAsk) -> Outcome:
        """Answers a worker that asks for batches of a dataset."""
        if self.server != 0:
            raise InvalidRequest("only server 0 assigns batches", str(self.task))
        self._admission.check(session, now)
        return self.rounds.chunks.assign_batches(session, self.registry.task(session), ask), []
