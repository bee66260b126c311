"""Callers that were refused before they reached the core: counted, told of, and never more than so much of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from pswire.errors import PSError, Unauthenticated
from pswire.model.status import Happened

log = logging.getLogger("psserver")

Reason = Literal["token", "certificate", "handshake", "transport"]
"""What a caller lacked: the job's token, a certificate that may do this, any certificate, or a transport of its
session."""

REASONS: tuple[Reason, ...] = get_args(Reason)

MOST_KEPT = 30
"""Refused callers that are kept: the newest. Who is refused may come as often as it likes."""

QUIET_SECONDS = 60.0
"""Seconds in which the log has one line at most of one host and reason, and `MOST_LINES` of all."""

MOST_LINES = 10


def reason_of(error: PSError) -> Reason:
    """Returns what a caller over gRPC lacked."""
    return "token" if isinstance(error, Unauthenticated) else "certificate"


class RefusedCallers:
    """The callers that were refused, and why. May be used from any thread.

    Args:
        task: this server's task, for the log.
        clock: monotonic seconds.
    """

    def __init__(self, task: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._task = task
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._found: dict[tuple[str, str, str], tuple[float, int]] = {}  # when last, and how often; the newest last
        self._counts: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._told: dict[tuple[str, Reason], float] = {}  # when the log was told; the newest last
        self._untold = 0

    @property
    def counts(self) -> Mapping[str, int]:
        """How many callers were refused so far, by reason."""
        with self._lock:
            return {reason: count for reason, count in self._counts.items()}  # noqa: C416 - its keys are plain text

    def note(self, what: str, peer: str, reason: Reason, why: str) -> None:
        """Notes a caller that is refused; the log tells of it, if it has not told of too many others.

        Args:
            what: what it asked for, in lower case: a verb, or "connect".
            peer: the other end, with a port, which is left out: it is another one each time.
            reason: what it lacked.
            why: the same in words.
        """
        host, now = peer.rpartition(":")[0] or peer, self._clock()
        with self._lock:
            _, count = self._found.pop((what, host, why), (0.0, 0))
            self._found[what, host, why] = now, count + 1
            while len(self._found) > MOST_KEPT:
                del self._found[next(iter(self._found))]
            self._counts[reason] += 1
            tells, untold = self._may_tell((host, reason), now), self._untold
            self._untold = 0 if tells else untold + 1
        if tells:
            more = f"; {untold} more were rejected since the last such line" if untold else ""
            log.warning("%s rejected a caller at %s (%s, %s): %s%s", self._task, host, what, reason, why, more)

    def _may_tell(self, key: tuple[str, Reason], now: float) -> bool:
        self._told = {other: then for other, then in self._told.items() if now - then < QUIET_SECONDS}
        if key in self._told or len(self._told) >= MOST_LINES:
            return False
        self._told[key] = now
        return True

    def recent(self) -> list[Happened]:
        """Returns them, the oldest first."""
        now = self._clock()
        with self._lock:
            found = list(self._found.items())
        return [
            Happened(now - then, what, f"a caller at {peer}" + (f", {count} times" if count > 1 else ""), why)
            for (what, peer, why), (then, count) in found
        ]
