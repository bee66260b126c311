"""Effects: actions that a state machine asks for, as values. The core carries them out once its lock is released."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from pswire.cluster import Task
from pswire.errors import CheckpointError, MemoryLimit, PSError, VariableMismatch
from pswire.network.payload import Payload
from pswire.servers.votes import Testimony, Vote

log = logging.getLogger("psserver")

T = TypeVar("T")

Queue = Literal["arrays", "files"]
"""Names of the two work threads. Each runs one piece of work after another, so that rounds wait for no disk."""

Submit = Callable[[Callable[[], object]], object]
"""Puts work into a queue: a thread pool's in a server; in a test, a function that runs it at once."""


# Nobody changes an effect. They are not frozen, since that would take a small round several microseconds.


@dataclass(slots=True)
class Reply:
    """Answers a call. A caller that has gone away is skipped: the call has taken effect all the same."""

    future: Future[Any]
    value: Any


@dataclass(slots=True)
class Fail:
    """Answers a call with an error. A caller that has gone away is skipped."""

    future: Future[Any]
    error: PSError


@dataclass(slots=True)
class Run:
    """Calls a short function that does not block, at once."""

    call: Callable[..., object]
    args: tuple[Any, ...] = ()


@dataclass(slots=True)
class Await:
    """Enters the `look` stimulus once a payload has arrived up to an offset, in bytes."""

    payload: Payload
    offset: int


Then = Callable[[Any, PSError | None, float], "list[Effect]"]
"""Takes the result or the error of work, and the time in seconds. Called under the lock."""


@dataclass(slots=True)
class Work:
    """Calls a function in a queue's thread; brief work in the calling thread, where nothing is ahead of it.

    Attributes:
        queue: the queue.
        call: the function.
        args: its arguments.
        then: takes the result or the error.
        future: answered with the result or the error, after `then`.
        asks: answers the function's questions while it runs. Called under the lock; returns a value, and True if other
            calls may go on now. The function gets it as its last argument.
        follows: True to continue at once in the thread of the work before it.
        brief: True for array work that is over so soon that an event loop may do it.
    """

    queue: Queue
    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    then: Then | None = None
    future: Future[Any] | None = None
    asks: Callable[..., tuple[Any, bool]] | None = None
    follows: bool = False
    brief: bool = False


@dataclass(frozen=True)
class Peer:
    """One server of a job, as the others reach it.

    Attributes:
        address: `host:port`; "" if nobody has said it.
        incarnation: the incarnation that the job began with.
    """

    address: str
    incarnation: int


NOWHERE = Peer("", 0)
"""The place of a server that is gone."""


@dataclass(slots=True)
class Know:
    """Says where the servers of a job are from now on, in order."""

    servers: tuple[Peer, ...]


@dataclass(slots=True)
class Send:
    """Says a vote or a testimony to another server, which hears it once or several times, or is asked for again."""

    server: int
    said: Vote | Testimony


class Others(Protocol):
    """The other servers of a job, as this one reaches them. Methods return at once, and may be called by any thread."""

    def know(self, servers: Sequence[Peer]) -> None:
        """Takes where the servers of a job are from now on, in order."""

    def say(self, server: int, said: Vote | Testimony) -> None:
        """Says something to a server, if there is a connection; one is made if it was never tried."""


Effect = Reply | Fail | Run | Await | Work | Know | Send
"""One action to carry out without the lock."""


Outcome = tuple[T, list[Effect]]
"""A stimulus's answer to its caller, and its effects."""


def settle(future: Future[Any], value: object, error: BaseException | None = None) -> None:
    """Answers a future with an error if there is one, else with a value; skips an answered or cancelled future."""
    try:
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
    except InvalidStateError:
        pass  # by another thread, now: a server that ends fails what is being answered


def attempt(call: Callable[[], T]) -> tuple[T | None, PSError | None]:
    """Calls a function; returns its result or its error.

    Other exceptions become a `PSError`: somebody waits for the answer.
    """
    try:
        return call(), None
    except PSError as error:
        return None, error
    except MemoryError as error:
        return None, MemoryLimit(f"the server ran out of memory: {error}")
    except Exception as error:
        log.exception("work failed")
        return None, PSError(f"internal error: {error!r}; see the server's log")


@contextmanager
def naming(task: Task) -> Iterator[None]:
    """Adds the server's task to errors about checkpoints."""
    try:
        yield
    except (CheckpointError, VariableMismatch) as error:
        raise type(error)(error.message, str(task)) from error
