"""The verbs by which servers get other places."""

from __future__ import annotations

from dataclasses import dataclass

from pswire.model.places import Offered, Standby
from pswire.servers.requests import ServerRequest


@dataclass(frozen=True)
class OfferRequest(ServerRequest[Offered]):
    """Notes that a process waits for the place of a server, or has got one. Key: its address.

    It is forgotten `pswire.limits.STANDBY_SECONDS` after it has said so for the last time.

    Raises:
        InvalidRequest: too many wait, or its address is none.
    """

    standby: Standby

    @property
    def sender(self) -> str:
        return f"the standby server at {self.standby.address}"

    def words(self) -> tuple[None, str]:
        return None, f"{self.standby.address} waits for the place of a server"


@dataclass(frozen=True)
class MoveRequest(ServerRequest[str]):
    """Gives the place of a server to a process that waits; the chief moves the server there. Key: both arguments.

    It is answered with the address of that process.

    Attributes:
        server: index of the server.
        address: the address of the process; "" for any.
        token: the chief's, if it tells this server that it has moved there, and is to end; else 0.

    Raises:
        ConfigError: no such process waits, or the job cannot move its servers.
        InvalidRequest: there is no such server.
        Fenced: the token is an old one.
    """

    server: int
    address: str = ""
    token: int = 0

    def words(self) -> tuple[None, str]:
        return None, f"server {self.server} moves to {self.address or 'any standby server'}"
