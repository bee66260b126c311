"""Contents in pieces, as they travel, and waits for server 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from psclient._src.network.session import Session
from pswire.errors import ClosureCancelled, ClosureError, PSError
from pswire.limits import PIECE_BYTES
from pswire.model.closures import Failure, Fetched, Piece

T = TypeVar("T")


class StillWaits(PSError):
    """A wait has lasted for some time; who waits looks whether it is of use, and goes on."""


def pieces_of(content: bytes) -> Iterator[Piece]:
    """Cuts a content into pieces; at least one."""
    for offset in range(0, max(len(content), 1), PIECE_BYTES):
        yield Piece(len(content), offset, content[offset : offset + PIECE_BYTES])


def joined(first: Piece, more: Callable[[int], Piece]) -> bytearray:
    """Returns a whole content, given its first piece and a function that asks for the piece at an offset."""
    content = bytearray(first.data)
    while len(content) < first.size:
        content += more(len(content)).data
    return content


def wait(session: Session, future: Future[T], look: Callable[[], object]) -> T:
    """Waits for an answer without an end; looks now and then whether the wait is of use, which raises if it is not."""
    while True:
        deadline = session.deadline(session.timeouts.report_interval)
        try:
            # The deadline comes before a word is said: it is `look` that speaks.
            return session.wait(future, deadline, lambda: StillWaits(""), lambda: "waits", lambda: False)
        except StillWaits:
            look()


def result_of(session: Session, number: int, look: Callable[[], object]) -> bytearray:
    """Waits for the result of a closure.

    Raises:
        ClosureError: the closure has failed.
        ClosureCancelled: it was not run.
    """

    def ask(offset: int) -> Fetched:
        fetched = wait(session, session.log_server.fetch(session.number, number, offset), look)
        if fetched.state != "done":
            raise error_of(fetched.failure, number, fetched.state == "cancelled")
        return fetched

    return joined(ask(0).result, lambda offset: ask(offset).result)


def error_of(failure: Failure | None, number: int = 0, cancelled: bool = False) -> ClosureError:
    """Returns the error that a closure has failed with, or for which it was cancelled."""
    if failure is None:
        return ClosureCancelled(f"closure {number} was cancelled before it ended")
    told = f"{failure.function} failed: {failure.kind}: {failure.text}"
    if cancelled:
        return ClosureCancelled(f"closure {number} was not run, because {told}", failure.task, failure.kind)
    return ClosureError(told, failure.task, failure.kind)
