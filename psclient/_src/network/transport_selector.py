"""The transports of a client: which one is used, and what happens when it breaks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress

from psclient._src.network.daemon_threads import Threads
from psclient._src.network.transport import Offer, Transport, TransportCall, TransportLost
from pswire.errors import PSError
from pswire.model.status import Pace
from pswire.network.payload import EMPTY, Payload
from pswire.network.sockets import MessageKind
from pswire.network.traffic import TRANSPORTS, Traffic, TransportName
from pswire.pb import parameter_server_pb2 as pb

log = logging.getLogger("psclient.transports")

ANSWERS = 8
"""Part of a lease within which a heartbeat on a transport is answered; after it one travels over gRPC, in time for the
lease."""

LOSSES = 3
"""Number of times that a transport may break before the next one is used."""

FORGIVEN = 100
"""After how many calls that were answered a transport may break as often again."""

AGAIN = 100
"""After how many calls a better transport is tried again; each time that it cannot be used twice as many."""


class TransportSelector:
    """A session's transports to one server, of which the best that works is used. May be used by any thread.

    Args:
        server: the server, for messages.
        offer: the transports that it has.
        lease: seconds of silence after which a transport is broken, while the server answers heartbeats.
        threads: run calls that may take a while.
        traffic: counts payload bytes of each transport.
        wanted: the transport to begin with; the ones after it are fallen back to.

    Attributes:
        transport: the one in use, which may be broken; None for gRPC.
    """

    def __init__(
        self,
        server: str,
        offer: Offer,
        lease: float,
        threads: Threads,
        traffic: Mapping[TransportName, Traffic],
        wanted: TransportName = "shm",
    ) -> None:
        self._server = server
        self._threads = threads
        self._traffic = traffic
        self._lease = lease
        self._offer: Offer | None = offer
        self._lock = threading.Lock()  # guards all below, but what counts calls
        self._names = [name for name in TRANSPORTS[TRANSPORTS.index(wanted) :] if self._has(name, offer)]
        self._at = 0  # index of the one in use
        self._losses = 0
        self._pause = AGAIN
        self._calls, self._again = 0, AGAIN
        self.transport: Transport | None = self._open(offer)
        self._said: Pace | None = None  # the last heartbeat over gRPC, unless it said what has to be readmitted

    def _has(self, name: TransportName, offer: Offer) -> bool:
        found = {"shm": bool(offer.path), "tcp": bool(offer.port), "grpc": True}[name]
        if not found:
            log.info("no %s transport to %s: the server does not offer it", name, self._server)
        return found

    def next(self, lost: Transport | None = None) -> Transport | None:
        """Returns the transport for one more call, as `best`."""
        self._calls += 1
        if self._at and self._calls >= self._again:
            self._again = self._calls + self._pause
            self._threads.submit(self._improve)
        return self.transport if lost is None else self.best(lost)

    def best(self, lost: Transport | None = None) -> Transport | None:
        """Returns the transport to use; None for gRPC.

        Args:
            lost: the one that was used and is broken.
        """
        if lost is None or self.transport is not lost:
            return self.transport
        with self._lock:
            if self.transport is lost and (offer := self._offer) is not None:
                self._losses = 1 if lost.answered >= FORGIVEN else self._losses + 1
                if self._losses > LOSSES:
                    self._skip("it breaks repeatedly")
                self.transport = self._open(offer, replaces=True)
        self._check_open()
        return self.transport

    def heartbeat(self, round: int, pace: Pace, clock: int) -> bool | None:
        """Sends a heartbeat on the transport, if it is idle and the content is that of the last one over gRPC.

        On the transport it says nothing, so that it may come late. A call that waits there needs heartbeats on another
        connection, which show that the transport is broken, and not the server; a heartbeat that is not answered is
        such a call.

        Args:
            round: the round that this process waits in, if any; sent each time.
            pace: the pace that the heartbeat reports.
            clock: the clock of this process, if it has one; sent each time.

        Returns:
            The answer; None if there is none, so that the heartbeat has to travel over gRPC.
        """
        transport, offer = self.transport, self._offer
        if transport is None or offer is None:
            return None
        if transport.waits or round >= 0 or clock or pace != self._said:
            return None
        try:
            call = TransportCall(0, MessageKind.HEARTBEAT, b"", EMPTY, _drives)
            transport.send(call)
            return call.result(self._lease / ANSWERS)
        except (TransportLost, TimeoutError, PSError):  # whatever it is, the heartbeat over gRPC tells
            return None

    def heartbeat_answered(self, round: int, pace: Pace, clock: int) -> None:
        """Closes the transport if a heartbeat over gRPC is answered while the transport has been silent for too long.

        Args:
            round: the round that the heartbeat reported.
            pace: the pace that the heartbeat reported.
            clock: the clock that the heartbeat reported.
        """
        self._said = None if round >= 0 or clock else pace
        transport = self.transport
        if transport is not None and (why := transport.silent()):
            log.warning(
                "the %s transport to %s is broken: %s, although the server answers heartbeats. Unanswered "
                "messages are sent again. Check whether a firewall or NAT drops connections",
                *(transport.name, self._server, why),
            )
            transport.close(why)

    def _open(self, offer: Offer, replaces: bool = False) -> Transport | None:
        while (name := self._names[self._at]) != "grpc":
            try:
                transport = Transport(name, offer, self._lease, self._traffic[name], replaces)
            except TransportLost as error:
                self._skip(str(error))
            else:
                log.info("%s transport to %s", name, self._server)
                return transport
        log.info("grpc transport to %s", self._server)
        return None

    def _skip(self, why: str) -> None:
        """Uses the next transport, for now."""
        log.info("no %s transport to %s: %s", self._names[self._at], self._server, why)
        self._at += 1
        self._losses = 0
        self._again, self._pause = self._calls + self._pause, 2 * self._pause

    def _improve(self) -> None:
        """Uses a better transport again if one can be opened; calls go on meanwhile."""
        offer = self._offer
        for at, name in enumerate(self._names[: self._at]):
            if offer is not None:
                with suppress(TransportLost):
                    self._replace(at, Transport(name, offer, self._lease, self._traffic[name]))
                    return
        self._pause *= 2

    def _replace(self, at: int, transport: Transport) -> None:
        """Uses a better transport; what is under way on the one before it goes over to it."""
        with self._lock:
            old: Transport | None = transport
            if at < self._at:
                old, self.transport, self._at, self._losses = self.transport, transport, at, 0
                log.info("%s transport to %s", transport.name, self._server)
        if old is not None:
            old.close("a better transport is available")
        self._check_open()

    def _check_open(self) -> None:
        """Closes a transport that was opened after the selector was closed."""
        if self._offer is None:
            self.close("closed")

    def close(self, why: str) -> None:
        """Ends the transport."""
        self._offer = None
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.close(why)


def _drives(reply: pb.HeartbeatReply, payload: Payload) -> bool:
    """Returns whether the answer to a heartbeat asks this process to drive the job."""
    return bool(reply.drive)
