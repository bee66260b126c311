"""Processes that wait for the place of a server, as one server knows them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from psserver.effects import Effect, Outcome
from psserver.services.log import Log
from psserver.services.service import Service
from pswire.cluster import Task, check_address
from pswire.errors import ConfigError, InvalidRequest
from pswire.limits import MAX_STANDBYS, STANDBY_SECONDS
from pswire.model.places import NOWHERE, Offered, Standby
from pswire.servers.places import MoveRequest, OfferRequest

logger = logging.getLogger("psserver")


class Standbys(Service):
    """The processes that wait, and the places that they have got. They outlive jobs.

    Each says about once a second to all servers that it is there, and which place it has got: so a place that one
    server has given is known to all, and to one that comes later.

    Args:
        task: this server, for messages.
        log: returns the log of the job as it is now.
        check_token: raises `Fenced` for a token that is not the chief's.
        leave: ends this server, which has moved; returns the effects.

    Attributes:
        moved_to: the address of the process that has this server's place now; "" while it has not moved.
    """

    verbs = frozenset(("offer", "move"))

    def __init__(
        self,
        task: Task,
        log: Callable[[], Log],
        check_token: Callable[[int], None],
        leave: Callable[[], list[Effect]],
    ) -> None:
        self.moved_to = ""
        self._task = task
        self._log = log
        self._check_token = check_token
        self._leave = leave
        self._known: dict[str, tuple[Standby, float]] = {}
        self._told: set[str] = set()  # the addresses of those that know that the job is over

    def offer(self, now: float, asked: OfferRequest) -> Outcome[Offered]:
        """Notes that a process is there; answers which place it has got, and where the servers are.

        Raises:
            InvalidRequest: too many wait, or its address is none.
        """
        log = self._log()
        place = self._note(asked.standby, now, log.over)
        return Offered(place, log.addresses if log.incarnations else (), log.over), []

    def _note(self, standby: Standby, now: float, over: bool) -> int:
        self._forget(now)
        try:
            check_address(standby.address, "a standby server")
        except ConfigError as error:
            raise InvalidRequest(error.message, str(self._task)) from None
        known = self._known.get(standby.address)
        if known is None and len(self._known) >= MAX_STANDBYS:
            raise InvalidRequest(f"{MAX_STANDBYS} standby servers wait, which is the limit", str(self._task))
        if standby.place == NOWHERE and known is not None:
            standby = replace(standby, place=known[0].place)
        self._known[standby.address] = standby, now
        if over:
            self._told.add(standby.address)
        else:
            self._told.discard(standby.address)
        return standby.place

    def untold(self, now: float) -> bool:
        """Returns True while one is there that does not know yet that the job is over."""
        return any(standby.address not in self._told for standby in self.waiting(now))

    def move(self, now: float, asked: MoveRequest) -> Outcome[str]:
        """Gives the place of a server to a process that waits; of the chief takes that this server has moved.

        Raises:
            ConfigError: no such process waits, or no server can move.
        """
        server, address, log = asked.server, asked.address, self._log()
        if asked.token:
            return address, self._move_to(server, address, asked.token)
        if not log.incarnations or log.over:
            raise ConfigError("no job runs on this server, so it cannot be moved", str(self._task))
        if not log.started.copies:
            raise ConfigError(
                "a server can move only if its variables have copies; start the job with PS_REPLICATION_FACTOR=2",
                str(self._task),
            )
        if server >= log.servers:
            raise InvalidRequest(f"the job has {log.servers} servers, so there is no server {server}")
        return self._give(server, address, now), []

    def _move_to(self, server: int, address: str, token: int) -> list[Effect]:
        self._check_token(token)
        if server != self._task.index:
            raise InvalidRequest(f"this is {self._task}, not {Task('ps', server)}", str(self._task))
        logger.warning("%s has moved to %s; this process ends", self._task, address)
        self.moved_to = address
        return self._leave()

    def _give(self, server: int, address: str, now: float) -> str:
        task, waiting = Task("ps", server), self.waiting(now)
        for standby in waiting:
            if standby.place == server and address in ("", standby.address):
                return standby.address
            if standby.place == server:
                raise ConfigError(
                    f"{task} is already moving to {standby.address}; stop the process there first to move it elsewhere",
                    str(self._task),
                )
        free = [standby.address for standby in waiting if standby.place == NOWHERE]
        if not free:
            raise ConfigError(
                f"no standby server can replace {task}; start one on another machine with psserver --join",
                str(self._task),
            )
        if address and address not in free:
            raise ConfigError(f"{address} is not a standby server; these are: {', '.join(free)}", str(self._task))
        chosen = address or free[0]
        standby, seen = self._known[chosen]
        self._known[chosen] = replace(standby, place=server), seen
        return chosen

    def waiting(self, now: float) -> tuple[Standby, ...]:
        """Returns the processes that are there, in the order in which they came."""
        self._forget(now)
        return tuple(standby for standby, _ in self._known.values())

    def _forget(self, now: float) -> None:
        """Forgets those of which nothing was heard, and those that are servers by now, for good."""
        servers = set(self._log().moved.values())
        self._known = {
            address: (standby, seen)
            for address, (standby, seen) in self._known.items()
            if now - seen <= STANDBY_SECONDS and address not in servers
        }
        self._told &= self._known.keys()
