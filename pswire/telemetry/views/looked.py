"""The answers of servers to one who only looks at them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pswire.cluster import Task
from pswire.errors import PSError, Unreachable
from pswire.model.status import Happened, ServerStatus, newest_of


@dataclass(frozen=True)
class Looked:
    """The answer of one server.

    Attributes:
        task: the server's task; by its place in the list of addresses, where it does not answer.
        address: the address at which it was asked.
        status: its answer; None where it gave none.
        error: the reason why it gave none.
        skew: seconds that its clock is ahead of ours; the network makes it wrong by at most half of `took`.
        took: seconds from the question to the answer.
        recent: the last calls and work that it tells of, where that was asked.
    """

    task: Task
    address: str
    status: ServerStatus | None = None
    error: PSError | None = None
    skew: float = 0.0
    took: float = 0.0
    recent: tuple[Happened, ...] = ()


def gone_of(statuses: Iterable[ServerStatus]) -> frozenset[int]:
    """Returns the servers that are lost, and without which the job goes on, as the one says that knows most."""
    newest = newest_of(statuses)
    return frozenset(newest.gone if newest else ())


def keeper_of(statuses: Iterable[ServerStatus]) -> int:
    """Returns the server that keeps the log and the sessions."""
    newest = newest_of(statuses)
    return newest.keeper if newest else 0


def why_silent(found: Looked) -> str:
    """The state of a server that has not answered."""
    return "unreachable" if isinstance(found.error, Unreachable) else "refused"
