"""A server's core, as its network side sees it."""

from __future__ import annotations

from typing import Protocol

from psserver.effects import Others
from psserver.registry import Registry
from pswire.api import ParameterServer
from pswire.errors import ServerGone
from pswire.model.status import STILL, Pace
from pswire.servers.votes import Testimony, Vote


class Served(ParameterServer, Protocol):
    """What clients call, and other servers. All methods may be called from any thread.

    Attributes:
        incarnation: the server's incarnation.
        registry: its sessions.
        others: the other servers of its job, set by whoever serves it.
    """

    incarnation: int
    registry: Registry
    others: Others | None

    def heartbeat(self, session: int, round: int, plan_id: bytes, pace: Pace | None = STILL, clock: int = 0) -> bool:
        """Does what a `ParameterServer` does. Without a pace the heartbeat says nothing but that the process lives.

        Raises:
            InvalidRequest: it says nothing, and this server has heard no other heartbeat since it keeps the sessions.
        """

    def introduce(self, server: int, incarnation: int) -> None:
        """Lets another server vote here.

        Args:
            server: its number.
            incarnation: its incarnation, which names it from now on.

        Raises:
            InvalidRequest: it has this server's number.
            Forbidden: another process was introduced with this incarnation.
        """

    def hear(self, server: int, said: Vote | Testimony) -> None:
        """Takes in another server's vote or testimony. One that was heard before changes nothing."""

    def meet(self, server: int) -> None:
        """Another server is connected, for the first time or anew."""

    def outlive(self, error: ServerGone) -> None:
        """Another server says that the job goes on without this one, which then ends."""

    def miss(self, server: int, reason: str) -> None:
        """Another server is not connected, or no more; says why."""
