"""The verbs by which closures are scheduled, run, and fetched; server 0 answers them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from pswire.model.closures import ClosureOrder, ClosureQueue, ClosureResult, Fetched, Taken
from pswire.servers.requests import ServerRequest


@dataclass(frozen=True)
class ScheduleRequest(ServerRequest[Future[ClosureQueue]]):
    """Schedules a closure, or a piece of one, at server 0. Key: (number, offset).

    Answered once there is room for it in the queue, and at once where one has failed of which the coordinator was
    not told: then it is not taken, as the answer's number says. With `joins`, once all closures are over.

    Raises:
        InvalidRequest: the session is not of a chief that runs the script.
        MemoryLimit: its arguments are larger than all that server 0 holds of closures.
        ConfigError: a worker that began the job has other functions.
    """

    session: int
    order: ClosureOrder

    def words(self) -> tuple[int, str]:
        order = self.order
        waits = "waits for all closures" if order.joins else "looks"
        return self.session, f"closure {order.number} of {order.function}" if order.number else waits


@dataclass(frozen=True)
class TakeRequest(ServerRequest[Future[Taken]]):
    """Tells server 0 what came of a closure, and waits for the next. Key: the session, and the closure's number.

    A session has one closure at a time: it is given that again until it has told what came of it.

    Attributes:
        session: number of the worker's session.
        functions: the functions that it has registered.
        result: what came of the closure that it has; None where it has none, or its arguments are still to come.
        offset: the place of the piece of the arguments that it wants.

    Raises:
        ConfigError: the coordinator has registered other functions.
    """

    session: int
    functions: Sequence[str]
    result: ClosureResult | None = None
    offset: int = 0

    def words(self) -> tuple[int, str]:
        told = self.result
        over = f"closure {told.number} is over{told.kind and ': ' + told.kind}, " if told else ""
        return self.session, f"{over}waits for a closure"


@dataclass(frozen=True)
class FetchRequest(ServerRequest[Future[Fetched]]):
    """Waits until a closure is over; gives the piece of its result at an offset. Key: none, it changes nothing.

    Raises:
        InvalidRequest: there is no such closure, or its result was dropped.
    """

    session: int
    number: int
    offset: int

    def words(self) -> tuple[int, str]:
        return self.session, f"the result of closure {self.number}"
