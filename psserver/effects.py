"""Effects: what a state machine wants to be done, as values. The core carries them out once its lock is released."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pswire.api import Vote
from pswire.cluster import Task
from pswire.errors import CheckpointError, PSError, VariableMismatch
from pswire.transport.payload import Payload

log = logging.getLogger("psserver")

T = TypeVar("T")

Queue = Literal["arrays", "files"]
"""Threads for work, which make one piece after another: rounds do not wait for a disk."""

Submit = Callable[[Callable[[], object]], object]
"""Puts work into a queue: a thread pool's in a server, done at once in a test."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers a call, unless its caller has gone away: what it asked for has happened all the same."""

    future: Future[Any]
    value: Any


@dataclass(frozen=True, slots=True)
class Fail:
    """Answers a call with an error, unless its caller has gone away."""

    future: Future[Any]
    error: PSError


@dataclass(frozen=True, slots=True)
class Run:
    """Calls a function at once, which is short and waits for nothing."""

    call: Callable[..., object]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Await:
    """Looks again once a payload has come up to an offset."""

    payload: Payload
    offset: int


Then = Callable[[Any, PSError | None, float], "list[Effect]"]
"""Takes in what came of work: its result, or its error; and the time. Called under the lock."""


@dataclass(frozen=True, slots=True)
class Work:
    """Calls a function in a queue's thread.

    Attributes:
        queue: which.
        call: the function.
        args: its arguments.
        then: takes in what came of it.
        future: answered with its result, or its error, after `then`.
        asks: answers the function's questions while it runs, under the lock, with a value, and whether others may go on
            now. The function gets it as its last argument.
        follows: continues at once in the thread of the work before it.
    """

    queue: Queue
    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    then: Then | None = None
    future: Future[Any] | None = None
    asks: Callable[..., tuple[Any, bool]] | None = None
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Says a vote to another server, which hears it once or several times, or is asked for again."""

    server: int
    vote: Vote


Effect = Reply | Fail | Run | Await | Work | Send
"""One thing that is to be done outside of the lock."""


def settle(future: Future[Any], value: object, error: BaseException | None = None) -> None:
    """Answers a future with a value, or with an error if there is one, unless it is answered or cancelled."""
    with suppress(InvalidStateError):  # by another thread, now: a server that ends fails what is being answered
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def attempt(call: Callable[[], T]) -> tuple[T | None, PSError | None]:
    """Calls a function; returns its result, or its error: somebody waits for it."""
    try:
        return call(), None
    except PSError as error:
        return None, error
    except Exception as error:
        log.exception("work failed")
        return None, PSError(f"internal error: {error!r}; see the server's log")


@contextmanager
def naming(task: Task) -> Iterator[None]:
    """Has an error about a checkpoint say which server has it."""
    try:
        yield
    except (CheckpointError, VariableMismatch) as error:
        raise type(error)(error.message, str(task)) from error
