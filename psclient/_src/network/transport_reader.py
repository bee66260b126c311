"""A caller that waits reads the transports itself, so that a response wakes only the thread that needs it."""

from __future__ import annotations

import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any

from psclient._src.interpreter.interrupts import waits
from psclient._src.network.transport import Transport


class TransportReader:
    """Waits for answers, and receives meanwhile. May be used by any thread.

    One caller at a time receives on all transports on which calls are under way, for all threads; the others wait for
    their answers alone. Between two waits, and where a transport has only now been opened, the transports' own threads
    receive.

    Args:
        end: ends all waits once it is done.
    """

    def __init__(self, end: Future[Any]) -> None:
        self._end = end
        self._over = False  # as `end`
        self._turn = threading.Lock()  # held by the caller that receives
        self._thread = 0  # the caller's
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._bell)
        stop = weakref.WeakMethod(self._stop)  # else both held each other, and whatever is waited for
        end.add_done_callback(lambda _: None if (method := stop()) is None else method())

    def _stop(self) -> None:
        """Ends all waits."""
        self._over = True
        self._ring()

    def _ring(self, _: object = None) -> None:
        """Wakes the caller that receives: an answer is there that it has not received, or a transport is lost."""
        if threading.get_ident() != self._thread:
            os.eventfd_write(self._bell, 1)

    def wait(self, future: Future[Any], seconds: float, transports: Callable[[], Sequence[Transport]]) -> bool:
        """Waits until an answer is there, or all waits end.

        Args:
            future: the answer.
            seconds: the time after which it returns all the same.
            transports: returns the transports on which calls are under way.

        Returns:
            True if the answer is there.
        """
        if future.done():
            return True
        until = time.monotonic() + seconds
        if not self._over and self._turn.acquire(blocking=False):
            asked: list[Transport] = []
            try:
                taken = dict[int, Transport]()
                for transport in transports():
                    asked.append(transport)  # first: an interrupt may come at any time
                    if transport.take_over(self._ring):
                        taken[transport.file] = transport
                if self._receive(taken, future, until):
                    return True
            finally:
                for transport in asked:
                    transport.give_back(self._ring)
                self._thread = 0
                self._turn.release()
        if not self._over:
            # Another thread receives, or nothing that comes on a transport is waited for.
            _await((future, self._end), until)
        return future.done()

    @waits
    def _receive(self, taken: dict[int, Transport], future: Future[Any], until: float) -> bool:
        """Receives on transports that were taken over, by their files, until there is an answer, or all are lost.

        Gives back those that are lost.

        Returns:
            True if the answer is there.
        """
        self._thread = threading.get_ident()
        future.add_done_callback(self._ring)
        poll = select.poll()
        for file in (self._bell, *taken):
            poll.register(file, select.POLLIN)
        while not future.done():
            left = until - time.monotonic()
            if not taken or self._over or left <= 0:
                return False
            lost = list[Transport]()
            for file, _ in poll.poll(math.ceil(1000 * left)):
                if file == self._bell:
                    with suppress(BlockingIOError):
                        os.eventfd_read(file)
                    lost += [transport for transport in taken.values() if transport.lost]
                elif not taken[file].read():
                    lost.append(taken[file])
            for transport in lost:
                if taken.pop(transport.file, None) is not None:  # it may be there twice
                    poll.unregister(transport.file)
                    transport.give_back(self._ring)
        return True


@waits
def _await(futures: Sequence[Future[Any]], until: float) -> None:
    wait(futures, max(until - time.monotonic(), 0), FIRST_COMPLETED)
