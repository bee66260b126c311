"""Answers of calls that wait: what a function returns, or what another call was answered with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger("pswire")

_MAKING = threading.Lock()


class LeanFuture(Future[T]):
    """The answer of a call under way, which nobody can cancel; its condition is made when somebody waits.

    Nearly all answers are there by then, or have a callback. The result is stored before anybody looks for a condition,
    and a condition is made before anybody looks for a result: so one of the two sees the other.
    """

    def __init__(self) -> None:
        self._state = RUNNING
        self._result: T | None = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Future[T]], object]] = []  # each is taken by one thread
        self._open = [None]  # taken by the thread that answers
        self._waited: threading.Condition | None = None

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        if self._waited is None:
            with _MAKING:
                self._waited = self._waited or threading.Condition()
        return self._waited

    def done(self) -> bool:
        return self._state is FINISHED

    def cancel(self) -> bool:
        return False

    def set_running_or_notify_cancel(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> T:
        if self._state is FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]  # it has one
        try:
            return super().result(timeout)
        finally:
            self = None  # type: ignore[assignment]  # else the error, by its traceback, and this hold each other

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._exception if self._state is FINISHED else super().exception(timeout)

    def set_result(self, result: T) -> None:
        self._end(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        self._end(None, exception)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        self._done_callbacks.append(fn)
        if self._state is FINISHED:
            self._call_back()

    def _end(self, result: T | None, error: BaseException | None) -> None:
        try:
            self._open.pop()
        except IndexError:
            raise InvalidStateError(f"{self._state}: {self!r}") from None
        self._result, self._exception = result, error
        self._state = FINISHED
        if self._waited is not None:
            with self._waited:
                for waiter in self._waiters:
                    (waiter.add_result if error is None else waiter.add_exception)(self)
                self._waited.notify_all()
        if self._done_callbacks:
            self._call_back()

    def _call_back(self) -> None:
        while self._done_callbacks:
            try:
                call = self._done_callbacks.pop(0)
            except IndexError:
                return  # another thread has it
            try:
                call(self)
            except Exception:
                log.exception("calling back for %r failed", self)


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
