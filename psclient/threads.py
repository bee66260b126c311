"""Threads for calls that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """Runs each call on a thread; idle threads are used again, and as many are made as are needed.

    They are daemons: a call under way must not keep a process from ending, as an executor's would. All
    methods may be called from any thread.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the two counts
        self._idle = 0
        self._count = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs a function; its result, or what it raises, is the future's."""
        future: Future[T] = Future()
        with self._lock:
            spawn = not self._idle
            self._idle -= not spawn
            self._count += spawn
        self._queue.put(lambda: settle(future, work))
        if spawn:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Lets the threads end when they have nothing to do."""
        with self._lock:
            count, self._count = self._count, 0
        for _ in range(count):
            self._queue.put(None)

    def _run(self) -> None:
        while task := self._queue.get():
            task()
            del task  # with it go the arrays that it sent
            with self._lock:
                self._idle += 1


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Answers a future with the result of a function, or with what it raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # whatever it is, it belongs to who waits
        future.set_exception(error)
    else:
        future.set_result(result)
