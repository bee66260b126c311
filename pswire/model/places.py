"""The places of servers: processes that wait for one, and servers that have moved."""

from __future__ import annotations

from dataclasses import dataclass

NOWHERE = -1
"""The place of a process that has got none."""


@dataclass(frozen=True)
class Standby:
    """A process that waits for the place of a server, as `psserver --join` does, or has got one.

    Attributes:
        address: its address, `host:port`.
        domain: the part of the machines that fails as one in which it runs.
        place: index of the server whose place it has got; `NOWHERE` for none.
    """

    address: str
    domain: str = ""
    place: int = NOWHERE


@dataclass(frozen=True)
class Offered:
    """What a server knows of the place of a process that waits.

    Attributes:
        place: index of the server whose place it has got; `NOWHERE` for none.
        addresses: the addresses of all servers of the job, in their order; empty before a job.
        over: True if the job is over.
    """

    place: int = NOWHERE
    addresses: tuple[str, ...] = ()
    over: bool = False


@dataclass(frozen=True)
class Moved:
    """The address of a server that is not where it was when the job began.

    Attributes:
        server: index of the server.
        address: its address now, `host:port`.
    """

    server: int
    address: str
