"""The lanes of a client: which one is used, and what happens when it breaks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from psclient._src.transport.daemon_threads import Threads
from psclient._src.transport.lane import Answered, Lane, LaneLost, Offer
from pswire.errors import PSError
from pswire.model.status import Pace
from pswire.transport.futures import settle
from pswire.transport.payload import Payload
from pswire.transport.traffic import LANES, LaneName, Traffic

log = logging.getLogger("psclient.lanes")

T = TypeVar("T")

ANSWERS = 8
"""Part of a lease within which a beat on a lane is answered; after it one travels over gRPC, in time for the lease."""

LOSSES = 3
"""Number of times that a lane may break before the next one is used."""

FORGIVEN = 100
"""After how many calls that were answered a lane may break as often again."""

AGAIN = 100
"""After how many calls a better lane is tried again; each time that it cannot be used twice as many."""


class LaneSelector:
    """A session's lanes to one server, of which the best that works is used. May be used by any thread.

    Args:
        server: the server, for messages.
        offer: the lanes that it has.
        lease: seconds of silence after which a lane is broken, while the server answers beats.
        threads: run calls that may take a while.
        traffic: counts payload bytes of each lane.
        wanted: the lane to begin with; the ones after it are fallen back to.
    """

    def __init__(
        self,
        server: str,
        offer: Offer,
        lease: float,
        threads: Threads,
        traffic: Mapping[LaneName, Traffic],
        wanted: LaneName = "shm",
    ) -> None:
        self._server = server
        self._threads = threads
        self._traffic = traffic
        self._lease = lease
        self._offer: Offer | None = offer
        self._lock = threading.Lock()  # guards all below, but what counts calls
        self._names = [name for name in LANES[LANES.index(wanted) :] if self._has(name, offer)]
        self._at = 0  # index of the one in use
        self._losses = 0
        self._pause = AGAIN
        self._calls, self._again = 0, AGAIN
        self._lane: Lane | None = self._open(offer)
        self._said: Pace | None = None  # the last beat over gRPC, unless it said what has to be taken back

    def _has(self, name: LaneName, offer: Offer) -> bool:
        found = {"shm": bool(offer.path), "tcp": bool(offer.port), "grpc": True}[name]
        if not found:
            log.info("no %s lane to %s: the server has none", name, self._server)
        return found

    def ask(
        self,
        call: Callable[[Lane], Future[Answered]],
        decode: Callable[[Any, Payload], T],
        otherwise: Callable[[], Future[T]],
        lost: Lane | None = None,
    ) -> Future[T]:
        """Calls on the best lane that works, and where that breaks on the next.

        Args:
            call: makes the call on a lane.
            decode: reads its answer.
            otherwise: makes the call without a lane.
            lost: the lane that broke with the call on it.
        """
        lane = self.best(lost)
        self._calls += 1
        if self._at and self._calls >= self._again:
            self._again = self._calls + self._pause
            self._threads.submit(self._improve)
        if lane is None:
            return otherwise()
        result: Future[T] = Future()

        def answered(answer: Future[Answered]) -> None:
            if isinstance(answer.exception(), LaneLost):
                again = partial(self.ask, call, decode, otherwise, lane)
                self._threads.submit(lambda: settle(result, lambda: again().result()))
            else:
                settle(result, lambda: decode(*answer.result()))

        call(lane).add_done_callback(answered)
        return result

    @property
    def lane(self) -> Lane | None:
        """The lane in use, which may be broken; None for gRPC."""
        return self._lane

    def best(self, lost: Lane | None = None) -> Lane | None:
        """Returns the lane to use; None for gRPC.

        Args:
            lost: the one that was used and is broken.
        """
        if lost is None or self._lane is not lost:
            return self._lane
        with self._lock:
            if self._lane is lost and (offer := self._offer) is not None:
                self._losses = 1 if lost.answered >= FORGIVEN else self._losses + 1
                if self._losses > LOSSES:
                    self._skip("it breaks again and again")
                self._lane = self._open(offer, replaces=True)
        self._check_open()
        return self._lane

    def beat(self, round: int, pace: Pace, clock: int) -> bool | None:
        """Beats on the lane, if no call is under way there, and the beat says what the last one over gRPC has said.

        On the lane it says nothing, so that it may come late. A call that waits there needs beats on another
        connection, which show that the lane is broken, and not the server; a beat that is not answered is such a call.

        Args:
            round, pace, clock: what the beat says. Who waits in a round, or has a clock, says so each time.

        Returns:
            The answer; None if there is none, so that the beat has to travel over gRPC.
        """
        lane, offer = self._lane, self._offer
        if lane is None or offer is None or not offer.beats:
            return None
        if lane.waits or round >= 0 or clock or pace != self._said:
            return None
        try:
            reply, _ = lane.beat().result(self._lease / ANSWERS)
        except (LaneLost, TimeoutError, PSError):  # whatever it is, the beat over gRPC tells
            return None
        return bool(reply.drive)

    def beat_answered(self, round: int, pace: Pace, clock: int) -> None:
        """Takes the answer of a beat over gRPC: closes the lane if the server has been silent on it for too long.

        Args:
            round, pace, clock: what the beat has said.
        """
        self._said = None if round >= 0 or clock else pace
        lane = self._lane
        if lane is not None and (why := lane.silent()):
            log.warning(
                "the %s lane to %s is broken: %s, while it answers beats; what waits there is sent again. "
                "Does a firewall or NAT in between drop connections?",
                *(lane.name, self._server, why),
            )
            lane.close(why)

    def _open(self, offer: Offer, replaces: bool = False) -> Lane | None:
        while (name := self._names[self._at]) != "grpc":
            try:
                lane = Lane(name, offer, self._lease, self._traffic[name], replaces)
            except LaneLost as error:
                self._skip(str(error))
            else:
                log.info("%s lane to %s", name, self._server)
                return lane
        log.info("grpc lane to %s", self._server)
        return None

    def _skip(self, why: str) -> None:
        """Uses the next lane, for now."""
        log.info("no %s lane to %s: %s", self._names[self._at], self._server, why)
        self._at += 1
        self._losses = 0
        self._again, self._pause = self._calls + self._pause, 2 * self._pause

    def _improve(self) -> None:
        """Uses a better lane again if one can be opened; calls go on meanwhile."""
        offer = self._offer
        for at, name in enumerate(self._names[: self._at]):
            if offer is not None:
                with suppress(LaneLost):
                    self._replace(at, Lane(name, offer, self._lease, self._traffic[name]))
                    return
        self._pause *= 2

    def _replace(self, at: int, lane: Lane) -> None:
        """Uses a better lane; what is under way on the one before it goes over to it."""
        with self._lock:
            old: Lane | None = lane
            if at < self._at:
                old, self._lane, self._at, self._losses = self._lane, lane, at, 0
                log.info("%s lane to %s", lane.name, self._server)
        if old is not None:
            old.close("a better lane is there")
        self._check_open()

    def _check_open(self) -> None:
        """Closes a lane that was opened after the selector was closed."""
        if self._offer is None:
            self.close("closed")

    def close(self, why: str) -> None:
        """Ends the lane."""
        self._offer = None
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close(why)
