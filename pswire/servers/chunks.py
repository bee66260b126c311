"""The verb by which batches are handed out; server 0 answers it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from pswire.model.chunks import ChunkAsk, Chunks
from pswire.servers.requests import ServerRequest
from pswire.sizes import counted


@dataclass(frozen=True)
class AssignBatchesRequest(ServerRequest[Future[Chunks]]):
    """Hands out chunks of a dataset; answered at once. Key: (session, dataset, number of the question).

    A chunk is done once a round is applied whose contribution names it, or its session says so. What a session has
    when it ends, and has not done, is handed out again.

    Raises:
        InvalidRequest: the session asks again what it has asked before its last question; or has too many chunks.
        ConfigError: another worker has a dataset of another length.
    """

    session: int
    ask: ChunkAsk

    def words(self) -> tuple[int, str]:
        ask = self.ask
        ahead = "" if ask.needs else " ahead"
        asks = f"asks for {counted(ask.want, 'chunk')}{ahead} of dataset {ask.dataset}, pass {ask.epoch}"
        done = f", {len(ask.done)} done" if ask.done else ""
        return self.session, (asks if ask.want else f"looks at dataset {ask.dataset}") + done
