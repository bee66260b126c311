"""Answers of calls that wait: what a function returns, or what another call was answered with."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Answers a future with the result of a function, or with what it raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # whatever it is, it belongs to who waits
        future.set_exception(error)
        del future, work  # else the error, by its traceback, and the future hold each other, and a call's connection
    else:
        future.set_result(result)


def follow(future: Future[T], other: Future[T]) -> None:
    """Answers a future as another one, which is over."""
    error = other.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(other.result())
