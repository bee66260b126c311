"""How a process asks server 0 for batches of its datasets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from psclient._src.network.session import Session
from pswire.errors import Unreachable
from pswire.model.chunks import ChunkAsk, Chunks


class BatchCalls:
    """Asks for batches that are assigned. Used by the thread that runs cross-replica code.

    Args:
        session: this process's session, open.
        restores: returns what `ChunkAsk.restores` is to be.
    """

    def __init__(self, session: Session, restores: Callable[[], int]) -> None:
        self._session = session
        self.restores = restores

    def ask(self, ask: ChunkAsk) -> Future[Chunks]:
        """Asks, and waits for nothing."""
        return self._session.log_server.assign_batches(self._session.number, ask)

    def wait(self, future: Future[Chunks]) -> Chunks:
        """Waits for an answer; raises `PSError` if none comes, or what ended the session meanwhile."""
        session = self._session

        def late() -> Unreachable:
            return Unreachable(f"{session.task} requested a batch from server 0 and got no response")

        deadline = session.deadline(2 * session.timeouts.call_timeout)
        return session.wait(future, deadline, late, lambda: "waits for server 0 to assign a batch", lambda: False)
