"""A process that waits for the place of a server: it says so to the servers of a job, until one gives it a place.

Afterwards, as a server, it goes on saying which place it has got, until the job has taken it in: so a server that has
heard nothing of it yet, or comes later, and the chief, know where it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from psserver.config import ServerConfig
from pswire.cluster import Task
from pswire.encoding.calls import CALLS, CallCodec
from pswire.encoding.verbs import TOKEN_KEY, bearer, refused
from pswire.errors import ConfigError, Forbidden, Unauthenticated
from pswire.model.places import NOWHERE, Offered, Standby
from pswire.network.grpc_channel import open_channel, stub
from pswire.security.names import certificate_name, task_name
from pswire.servers.places import OfferRequest
from pswire.telemetry.reminder import Reminder

log = logging.getLogger("psserver")

OFFER: CallCodec[Offered] = CALLS["Offer"]

PAUSE_SECONDS = 1.0
"""Seconds between two times that a process says that it is there."""

ASK_SECONDS = 2.0
"""Seconds that a server has to answer it."""

FINAL = (ConfigError, Forbidden, Unauthenticated)
"""Answers after which it is of no use to ask again."""


class Offers:
    """What this process says to the servers of a job. Used by one thread at a time.

    Args:
        config: what it shows to them, and where it is.
        addresses: where some or all of them are, in their order.

    Attributes:
        knows_job: True once a server has told of a job.
    """

    def __init__(self, config: ServerConfig, addresses: Sequence[str]) -> None:
        self.addresses = self._homes = tuple(addresses)
        self.knows_job = False
        self._config = config
        token = config.security.token
        self._metadata = ((TOKEN_KEY, bearer(token)),) if token else ()
        self._calls: dict[tuple[int, str], tuple[grpc.Channel, Any]] = {}

    def say(self, place: int) -> Offered | None:
        """Says to all servers that this process is there, with the place that it has got.

        Returns:
            What they know; None if none answers.

        Raises:
            PSError: a server refuses this process.
        """
        data = OFFER.encode(OfferRequest(Standby(self._config.address, self._config.domain, place)))
        # Also where they were: the next job begins there.
        asked = dict.fromkeys([*enumerate(self.addresses), *enumerate(self._homes)])
        calls = [self._call(server, address) for server, address in asked if address]
        futures = [call.future(data, timeout=ASK_SECONDS, metadata=self._metadata) for call in calls]
        answers = [answer for future in futures if (answer := _answer(future)) is not None]
        if not answers:
            return None
        jobs = [answer for answer in answers if answer.addresses]
        if jobs:
            self.knows_job = True
            self._go_on_at(jobs[0].addresses)
        found = next((answer.place for answer in answers if answer.place != NOWHERE), NOWHERE)
        return Offered(found, self.addresses, bool(jobs) and all(answer.over for answer in jobs))

    def close(self) -> None:
        """Closes the connections."""
        for channel, _ in self._calls.values():
            channel.close()
        self._calls.clear()

    def _call(self, server: int, address: str) -> Any:
        key = server, address
        if key not in self._calls:
            name = certificate_name(task_name(Task("ps", server)))
            channel = open_channel(address, self._config.security, name)
            self._calls[key] = channel, stub(channel, OFFER.verb.path, (False, False))
        return self._calls[key][1]

    def _go_on_at(self, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        for key in self._calls.keys() - {*enumerate(addresses), *enumerate(self._homes)}:
            self._calls.pop(key)[0].close()


def await_place(config: ServerConfig, until_done: bool, pause: Callable[[float], bool]) -> tuple[int, tuple[str, ...]]:
    """Waits for the place of a server.

    Args:
        config: the configuration of this process, which names the servers that it asks.
        until_done: True to wait no longer once the job is over.
        pause: waits for that many seconds between two questions; returns False if this process is to end.

    Returns:
        The index of the server whose place it has got, `NOWHERE` where there is no more to wait for, and where the
        servers are.

    Raises:
        ConfigError: no server answers, and none has told of a job before.
        PSError: a server refuses this process.
    """
    offers, limits = Offers(config, config.join), config.timeouts
    where, heard, limit = ", ".join(config.join), time.monotonic(), limits.start_timeout
    silent = Reminder(limits.report_interval, lambda: log.warning("no server answers at %s; still trying", where))
    try:
        while True:
            offered = offers.say(NOWHERE)
            now = time.monotonic()
            if offered is None and now - heard > limit and offers.knows_job and until_done:
                log.warning(
                    "no server at %s has answered for %g s, so the job is over or lost; this standby server ends",
                    where,
                    limit,
                )
                return NOWHERE, offers.addresses
            if offered is None and now - heard > limit:
                raise ConfigError(
                    f"no server at {where} has answered for {limit:g} s; check that the job runs, and that --join "
                    "names its servers in order"
                )
            if offered is None:
                silent.look()
            else:
                heard, limit = now, limits.server_timeout
                if offered.place != NOWHERE or (offered.over and until_done):
                    return offered.place, offers.addresses
            if not pause(PAUSE_SECONDS):
                return NOWHERE, offers.addresses
    finally:
        offers.close()


class StandingOffer:
    """Says which place this process has got, in a thread of its own, until the job has taken it in.

    Args:
        config: this server's configuration; its task has the place.
        addresses: where the servers are.
        taken: returns True once the job has taken it in.
        over: called if the job is over before; None where that is of no interest.
    """

    def __init__(
        self,
        config: ServerConfig,
        addresses: Sequence[str],
        taken: Callable[[], bool],
        over: Callable[[], object] | None = None,
    ) -> None:
        self._offers = Offers(config, addresses)
        self._place = config.task.index
        self._taken = taken
        self._over = over
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offers itself", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says no more."""
        self._closed.set()
        self._thread.join(2 * ASK_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closed.is_set() and not self._taken():
                try:
                    offered = self._offers.say(self._place)
                    if offered is not None and offered.over and self._over is not None:
                        self._over()
                        return
                except FINAL as error:
                    log.warning("a server rejected this standby server: %s", error)
                self._closed.wait(PAUSE_SECONDS)
        finally:
            self._offers.close()


def _answer(future: Any) -> Offered | None:
    """Returns a server's answer; None if it has none, or refuses for now."""
    try:
        return OFFER.answer_from(future.result(), "a server")
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call):
            return None
        answer = refused(error.details() or "", error.trailing_metadata() or ())
        if isinstance(answer, FINAL):
            raise answer from None
        if answer is not None:
            log.warning("a server cannot accept this standby server now: %s", answer)
        return None
