"""What is to be done outside of the core's lock: answers to futures, array work to be submitted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from pswire.cluster import Task
from pswire.errors import CheckpointError, PSError, VariableMismatch

log = logging.getLogger("psserver")

T = TypeVar("T")

Answer = Callable[[], object]
"""Something to be done once the lock is released."""

Submit = Callable[[Answer], object]
"""Runs array work: a thread pool in a server, at once in a test."""


def answering(future: Future[T], value: T) -> Answer:
    """Answers a future, unless its caller has gone away: what it asked for has happened all the same."""
    return lambda: _unless_done(future.set_result, value)


def failing(future: Future[Any], error: BaseException) -> Answer:
    """Answers a future with an error, unless its caller has gone away."""
    return lambda: _unless_done(future.set_exception, error)


def _unless_done(settle: Callable[[T], None], given: T) -> None:
    with suppress(InvalidStateError):  # by another thread, now: a server that ends fails what is being answered
        settle(given)


def working(future: Future[T], work: Callable[[], T]) -> Answer:
    """Work whose result, or whatever it raises, is a future's answer: somebody waits for it."""

    def run() -> None:
        try:
            answer = answering(future, work())
        except PSError as error:
            answer = failing(future, error)
        except Exception as error:
            log.exception("array work failed")
            answer = failing(future, PSError(f"internal error: {error!r}; see the server's log"))
        answer()

    return run


def do(answers: Sequence[Answer]) -> None:
    """Does all of it, in order."""
    for answer in answers:
        answer()


@contextmanager
def naming(task: Task) -> Iterator[None]:
    """Has an error about a checkpoint say which server has it."""
    try:
        yield
    except (CheckpointError, VariableMismatch) as error:
        raise type(error)(error.message, str(task)) from error
