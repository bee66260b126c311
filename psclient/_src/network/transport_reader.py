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
        self._turn = threading.Lock()  # held by the caller that receives
        self._thread = 0  # the caller's
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._bell)
        ring = weakref.WeakMethod(self._ring)  # else both held each other, and whatever is waited for
        end.add_done_callback(lambda _: None if (method := ring()) is None else method())

    def _ring(self, _: object = None) -> None:
        """Wakes the caller that receives: an answer is there that it has not received, or a transport is lost."""
        if threading.get_ident() != self._thread:
            os.eventfd_write(self._bell, 1)

    def wait(self, future: Future[Any], seconds: float, transports: Callable[[], Sequence[Transport]]) -> None:
        """Waits until an answer is there, or all waits end.

        Args:
            future: the answer.
            seconds: the time after which it returns all the same.
            transports: returns the transports on which calls are under way.
        """
        if future.done() or self._end.done():
            return
        until = time.monotonic() + seconds
        if self._turn.acquire(blocking=False):
            taken: list[Transport] = []
            try:
                for transport in transports():
                    taken.append(transport)  # first: an interrupt may come at any time
                    transport.take_over(self._ring)
                self._receive([transport for transport in taken if transport.is_taken(self._ring)], future, until)
            finally:
                for transport in taken:
                    transport.give_back(self._ring)
                self._thread = 0
                self._turn.release()
        if not (future.done() or self._end.done()):
            # Another thread receives, or nothing that comes on a transport is waited for.
            _await((future, self._end), until)

    @waits
    def _receive(self, taken: Sequence[Transport], future: Future[Any], until: float) -> None:
        """Receives on transports that were taken over until there is an answer, or all are lost; returns lost ones."""
        self._thread = threading.get_ident()
        future.add_done_callback(self._ring)
        transports = {transport.fileno(): transport for transport in taken}
        poll = select.poll()
        for file in (self._bell, *transports):
            poll.register(file, select.POLLIN)
        while transports and not (future.done() or self._end.done()):
            left = until - time.monotonic()
            if left <= 0:
                return
            for file, _ in poll.poll(math.ceil(1000 * left)):
                if file == self._bell:
                    with suppress(BlockingIOError):
                        os.eventfd_read(file)
                else:
                    transports[file].read()
            for file in [file for file, transport in transports.items() if transport.lost]:
                poll.unregister(file)
                transports.pop(file).give_back(self._ring)


@waits
def _await(futures: Sequence[Future[Any]], until: float) -> None:
    wait(futures, max(until - time.monotonic(), 0), FIRST_COMPLETED)
