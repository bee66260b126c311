"""The stimulus of batches that are handed out, a part of the machine's. Server 0 takes it."""

from __future__ import annotations

from concurrent.futures import Future

from psserver.core.admission import Admission
from psserver.effects import Outcome, Reply
from psserver.registry import Registry
from psserver.rounds.rounds import Rounds
from pswire.cluster import Task
from pswire.errors import InvalidRequest
from pswire.model.chunks import Chunks
from pswire.servers.chunks import AssignBatchesRequest


class ChunkStimuli:
    """The part of a server's state machine that hands out batches."""

    task: Task
    server: int
    rounds: Rounds
    registry: Registry
    _admission: Admission

    def assign_batches(self, now: float, asked: AssignBatchesRequest, future: Future[Chunks]) -> Outcome[None]:
        """Answers a worker that asks for batches of a dataset."""
        if self.server != 0:
            raise InvalidRequest("only server 0 assigns batches", str(self.task))
        self._admission.check(asked.session, now)
        task = self.registry.task(asked.session)
        return None, [Reply(future, self.rounds.chunks.assign_batches(asked.session, task, asked.ask))]
