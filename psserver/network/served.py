"""A server's core, as its network side sees it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from psserver.effects import Others
from psserver.registry import Registry
from pswire.api import Begun, Contribution, RoundReply
from pswire.errors import ServerGone
from pswire.network.payload import Payload
from pswire.servers.requests import R, ServerRequest
from pswire.servers.votes import Testimony, Vote


class Served(Protocol):
    """What clients call, and other servers. All methods may be called from any thread.

    Attributes:
        incarnation: the server's incarnation.
        registry: its sessions.
        others: the other servers of its job, set by whoever serves it.
    """

    incarnation: int
    registry: Registry
    others: Others | None

    def call(self, request: ServerRequest[R]) -> R:
        """Does what a `ParameterServer` does, as `push`."""

    def push(self, contribution: Contribution, payload: Payload, begun: Begun | None = None) -> Future[RoundReply]:
        """Contributes to a round."""

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
