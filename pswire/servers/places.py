"""The verbs by which servers get other places; `pswire.api` has all others, and what all promise."""

from __future__ import annotations

from typing import Protocol

from pswire.model.places import Offered, Standby


class PlaceServer(Protocol):
    """A server, as processes see it that wait for a place, and those that move servers."""

    def offer(self, standby: Standby) -> Offered:
        """Notes that a process waits for the place of a server, or has got one. Key: its address.

        It is forgotten `pswire.limits.STANDBY_SECONDS` after it has said so for the last time.

        Raises:
            InvalidRequest: too many wait, or its address is none.
        """
        ...

    def move(self, server: int, address: str = "", token: int = 0) -> str:
        """Gives the place of a server to a process that waits; the chief moves the server there. Key: both arguments.

        Args:
            server: index of the server.
            address: the address of the process; "" for any.
            token: the chief's, if it tells this server that it has moved there, and is to end; else 0.

        Returns:
            The address of that process.

        Raises:
            ConfigError: no such process waits, or the job cannot move its servers.
            InvalidRequest: there is no such server.
            Fenced: the token is an old one.
        """
        ...
