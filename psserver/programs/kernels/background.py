"""A background thread that does work in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Background:
    """A thread that starts with the first work. May be called from any thread.

    The thread is a daemon: work that cannot be interrupted, such as a compiler for a GPU, does not hold up the end of
    the process.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # guarded by `_changed`, as all below
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """True if it takes no more work; long work checks it from time to time."""
        return self._closed

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Queues work; returns its future, which is cancelled if the thread is closed."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                _cancel(future)
                return future
            self._waiting.append((work, future))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return future

    def close(self, seconds: float) -> None:
        """Cancels work that has not begun; waits for the rest, at most some seconds."""
        with self._changed:
            self._closed = True
            dropped, thread = list(self._waiting), self._thread
            self._waiting.clear()
            self._changed.notify()
        for _, future in dropped:
            _cancel(future)
        if thread is not None:
            thread.join(seconds)

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            work, future = taken
            try:
                future.set_result(work())
            except BaseException as error:  # raised to the future's waiters
                future.set_exception(error)

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return self._waiting.popleft() if self._waiting else None


def _cancel(future: Future[Any]) -> None:
    """Cancels a future and wakes its waiters."""
    future.cancel()
    future.set_running_or_notify_cancel()
