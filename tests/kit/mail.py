"""Votes between servers that a test delivers itself."""

from __future__ import annotations

from collections.abc import Sequence

from psserver.effects import Peer
from pswire.servers.votes import Vote


class Mail:
    """The other servers of a core: keeps what it says.

    Args:
        sender: the core's number.
        votes: what is on its way, as (sender, receiver, vote).

    Attributes:
        known: where the servers are, as the core was told.
    """

    def __init__(self, sender: int, votes: list[tuple[int, int, Vote]]) -> None:
        self.known: tuple[Peer, ...] = ()
        self._sender = sender
        self._votes = votes

    def know(self, servers: Sequence[Peer]) -> None:
        """Keeps where the servers of a job are."""
        self.known = tuple(servers)

    def say(self, server: int, vote: Vote) -> None:
        """Adds a vote to what is on its way."""
        self._votes.append((self._sender, server, vote))
