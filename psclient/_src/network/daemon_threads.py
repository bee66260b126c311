"""Threads for calls that wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from psclient._src.network.forks import Owner
from pswire.errors import PSError
from pswire.network.futures import settle

T = TypeVar("T")

SPARE = int(sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)))
"""Number of idle threads to keep: these Pythons can start none once the main thread has ended."""


class Threads:
    """Runs each call on a thread; idle threads are used again, and as many are made as are needed, and `SPARE`.

    They are daemons: a call under way must not keep a process from ending, as an executor's would. All
    methods may be called from any thread.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = Owner()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the two counts
        self._idle = 0  # and not about to take what is in the queue
        self._count = 0
        with self._lock:
            self._start(SPARE)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs a function; its result, or what it raises, is the future's.

        Raises:
            PSError: no thread is idle, and none could be started; or this is a fork of the process, which has none of
            its threads.
        """
        self._owner.check()
        future: Future[T] = Future()
        with self._lock:
            try:
                self._start(SPARE + 1)
            except RuntimeError as error:
                if not self._idle:
                    raise _unstarted(error) from None
            self._idle -= 1
        self._queue.put(lambda: settle(future, work))
        return future

    def _start(self, idle: int) -> None:
        """Starts threads until so many are idle."""
        while self._idle < idle:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._idle += 1
            self._count += 1

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


def check_startable() -> None:
    """Raises `PSError` where no thread can be started."""
    try:
        threading.Thread(target=bool, daemon=True).start()
    except RuntimeError as error:
        raise _unstarted(error) from None


def _unstarted(error: RuntimeError) -> PSError:
    return PSError(f"a thread could not be started ({error}); if the script has ended, call close() before its end")
