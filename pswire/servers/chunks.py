"""The verb by which batches are handed out; `pswire.api` has all others, and what all promise."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from pswire.model.chunks import ChunkAsk, Chunks


class ChunkServer(Protocol):
    """Server 0, as workers see it that take whatever batch of a dataset comes next."""

    def assign_batches(self, session: int, ask: ChunkAsk) -> Future[Chunks]:
        """Hands out chunks of a dataset; answered at once. Key: (session, dataset, number of the question).

        A chunk is done once a round is applied whose contribution names it, or its session says so. What a session has
        when it ends, and has not done, is handed out again.

        Raises:
            InvalidRequest: the session asks again what it has asked before its last question; or has too many chunks.
            ConfigError: another worker has a dataset of another length.
        """
        ...
