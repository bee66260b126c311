"""The verbs by which closures are scheduled, run, and fetched; `pswire.api` has all others, and what all promise."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from pswire.model.closures import ClosureOrder, ClosureQueue, ClosureResult, Fetched, Taken


class ClosureServer(Protocol):
    """Server 0, as a coordinator and its workers see it."""

    def schedule(self, session: int, order: ClosureOrder) -> Future[ClosureQueue]:
        """Schedules a closure, or a piece of one, at server 0. Key: (number, offset).

        Answered once there is room for it in the queue, and at once where one has failed of which the coordinator was
        not told: then it is not taken, as the answer's number says. With `joins`, once all closures are over.

        Raises:
            InvalidRequest: the session is not of a chief that runs the script.
            MemoryLimit: its arguments are larger than all that server 0 holds of closures.
            ConfigError: a worker that began the job has other functions.
        """
        ...

    def take(
        self, session: int, functions: Sequence[str], result: ClosureResult | None = None, offset: int = 0
    ) -> Future[Taken]:
        """Tells server 0 what came of a closure, and waits for the next. Key: the session, and the closure's number.

        A session has one closure at a time: it is given that again until it has told what came of it.

        Args:
            session: number of the worker's session.
            functions: the functions that it has registered.
            result: what came of the closure that it has; None where it has none, or its arguments are still to come.
            offset: the place of the piece of the arguments that it wants.

        Raises:
            ConfigError: the coordinator has registered other functions.
        """
        ...

    def fetch(self, session: int, number: int, offset: int) -> Future[Fetched]:
        """Waits until a closure is over; gives the piece of its result at an offset. Key: none, it changes nothing.

        Raises:
            InvalidRequest: there is no such closure, or its result was dropped.
        """
        ...
