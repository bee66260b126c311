"""Time that counts against the deadlines of waits: not that in which a server was silent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from psclient._src.interpreter.interrupts import waits
from pswire.errors import TaskTaken
from pswire.limits import Timeouts

log = logging.getLogger("psclient")

T = TypeVar("T")


class Patience:
    """Watches the heartbeats to all servers. May be used by any thread.

    While a server stands still, or is cut off, no round can complete, and nobody is to blame: that time does not count,
    nor does the lease after it, in which everyone comes back. The same holds while this process itself stands still.

    Args:
        lease: of the sessions, in seconds.
        heartbeat: seconds between two heartbeats.
        clock: monotonic seconds.
    """

    def __init__(self, lease: float, heartbeat: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease = lease
        self._usual = heartbeat + lease / 4
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._heard: dict[int, float] = {}
        self._stood = 0.0
        self._until = 0.0  # up to when that was counted: what several servers were silent for counts once

    def heard(self, server: int) -> None:
        """Notes that a server has answered a heartbeat."""
        now = self._clock()
        with self._lock:
            last = self._heard.get(server, now)
            if now - last > self._usual:
                self._stood += self._uncounted(last, now)
                self._until = max(self._until, now + self._lease)
            self._heard[server] = now

    def forget(self, server: int) -> None:
        """A server is gone, and is waited for no more."""
        with self._lock:
            self._heard.pop(server, None)

    def stood(self) -> float:
        """Seconds so far that count against no deadline; it never becomes less."""
        now = self._clock()
        with self._lock:
            first = min(self._heard.values(), default=now)
            return self._stood + (self._uncounted(first, now) if now - first > self._usual else 0.0)

    def deadline(self, seconds: float) -> Deadline:
        """Returns a deadline after some seconds from now, of which only those that count are counted."""
        return Deadline(self, seconds, self._clock)

    def _uncounted(self, first: float, now: float) -> float:
        return max(now + self._lease - max(first, self._until), 0.0)


class Deadline:
    """The end of one or several waits in turn: silences in any of them move it.

    Args:
        patience: tells the time that does not count.
        seconds: length in seconds that count, from now on.
        clock: monotonic seconds.
    """

    def __init__(self, patience: Patience, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._end = clock() + seconds - patience.stood()

    def left(self) -> float:
        """Seconds until then, as far as is known now; 0 and less once it has passed."""
        return self._end + self._patience.stood() - self._clock()


@waits
def until_free(call: Callable[[], T], timeouts: Timeouts, ended: threading.Event) -> T:
    """Repeats a call while another process has this task: if that is gone, until its lease is over.

    Raises:
        TaskTaken: it is there.
    """
    until, told = time.monotonic() + timeouts.session_timeout + 2 * timeouts.heartbeat_interval, False
    while True:
        try:
            return call()
        except TaskTaken as error:
            if time.monotonic() > until:
                raise
            if not told:
                told = True
                log.warning(
                    "waiting up to %g s (PS_SESSION_TIMEOUT) for the earlier process of this task to end: %s",
                    timeouts.session_timeout,
                    error,
                )
        ended.wait(timeouts.heartbeat_interval / 2)
