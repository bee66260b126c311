"""Processes that wait for the place of a server, as one server knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pswire.cluster import Task, check_address
from pswire.errors import ConfigError, InvalidRequest
from pswire.limits import MAX_STANDBYS, STANDBY_SECONDS
from pswire.model.places import NOWHERE, Standby


class Standbys:
    """The processes that wait, and the places that they have got. Guarded by the core's lock.

    Each says about once a second to all servers that it is there, and which place it has got: so a place that one
    server has given is known to all, and to one that comes later.

    Args:
        task: this server, for messages.
        moved: the addresses of servers that have moved: a process that is a server now waits no more.
    """

    def __init__(self, task: Task, moved: Mapping[int, str]) -> None:
        self._task = str(task)
        self._moved = moved
        self._known: dict[str, tuple[Standby, float]] = {}
        self._told: set[str] = set()  # the addresses of those that know that the job is over

    def offer(self, standby: Standby, now: float, over: bool = False) -> int:
        """Notes that a process is there; returns its place, `NOWHERE` for none.

        Args:
            standby: the process.
            now: monotonic seconds.
            over: True if it is told that the job is over.

        Raises:
            InvalidRequest: too many wait, or its address is none.
        """
        self._forget(now)
        try:
            check_address(standby.address, "a standby server")
        except ConfigError as error:
            raise InvalidRequest(error.message, self._task) from None
        known = self._known.get(standby.address)
        if known is None and len(self._known) >= MAX_STANDBYS:
            raise InvalidRequest(f"{MAX_STANDBYS} standby servers wait, which is the limit", self._task)
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

    def give(self, server: int, address: str, now: float) -> str:
        """Gives the place of a server to a process that waits; returns its address.

        Args:
            server: index of the server.
            address: of the process; "" for any.
            now: monotonic seconds.

        Raises:
            ConfigError: no such process waits.
        """
        task, waiting = Task("ps", server), self.waiting(now)
        for standby in waiting:
            if standby.place == server and address in ("", standby.address):
                return standby.address
            if standby.place == server:
                raise ConfigError(
                    f"{task} is already moving to {standby.address}; stop the process there first to move it elsewhere",
                    self._task,
                )
        free = [standby.address for standby in waiting if standby.place == NOWHERE]
        if not free:
            raise ConfigError(
                f"no standby server can replace {task}; start one on another machine with psserver --join",
                self._task,
            )
        if address and address not in free:
            raise ConfigError(f"{address} is not a standby server; these are: {', '.join(free)}", self._task)
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
        servers = set(self._moved.values())
        self._known = {
            address: (standby, seen)
            for address, (standby, seen) in self._known.items()
            if now - seen <= STANDBY_SECONDS and address not in servers
        }
        self._told &= self._known.keys()
