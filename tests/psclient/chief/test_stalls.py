"""For how long a round has held a job up, as the chief counts it."""

from __future__ import annotations

from psclient._src.chief.stalls import Stall, Stalls
from pswire.cluster import Task
from pswire.model.status import OpenRound, ServerStatus

A, B = Task("worker", 0), Task("worker", 1)
LEASE, PERIOD = 4.0, 1.0


def status(*rounds: tuple[int, tuple[Task, ...]]) -> ServerStatus:
    """What a server says whose open rounds wait for these."""
    waiting = tuple(OpenRound(number, "a section", missing, True) for number, missing in rounds)
    return ServerStatus(0, 7, 1, None, 0, (), waiting, 0, 0, 0, 0.0)


def looks(stalls: Stalls, statuses: list[ServerStatus], start: float, seconds: float) -> Stall | None:
    """The last of looks that are a period apart."""
    stall = None
    for step in range(int(seconds / PERIOD) + 1):
        stall = stalls.look(statuses, start + step * PERIOD)
    return stall


def test_the_oldest_round_counts_from_the_look_that_shows_it() -> None:
    """Over all servers; whom any of them misses there is missing, and nobody else."""
    servers = [status((5, (B,)), (6, (A,))), status(), status((5, (A, B)))]
    assert looks(Stalls(LEASE, PERIOD), servers, 100.0, 7.0) == Stall(5, 7.0, (A, B))


def test_a_round_that_is_over_is_forgotten() -> None:
    """The next one has all of its time; between two rounds there is nothing."""
    stalls = Stalls(LEASE, PERIOD)
    looks(stalls, [status((5, (B,)))], 100.0, 9.0)
    assert looks(stalls, [status((6, (B,)))], 110.0, 2.0) == Stall(6, 2.0, (B,))
    assert stalls.look([status()], 113.0) is None
    assert looks(stalls, [status((6, (B,)))], 114.0, 0.0) == Stall(6, 0.0, (B,))


def test_time_in_which_somebody_stood_still_does_not_count() -> None:
    """A look that comes late is one: nor does the lease after it, in which all come back."""
    stalls = Stalls(LEASE, PERIOD)
    servers = [status((5, (B,)))]
    assert looks(stalls, servers, 100.0, 3.0) == Stall(5, 3.0, (B,))
    late = 103.0 + PERIOD + LEASE / 2 + 0.1
    assert stalls.look(servers, late) == Stall(5, 3.0, (B,))
    assert looks(stalls, servers, late + 1.0, LEASE - 1.0) == Stall(5, 3.0, (B,))
    assert looks(stalls, servers, late + LEASE + 1.0, 1.0) == Stall(5, 5.0, (B,))


def test_a_look_that_is_a_little_late_counts() -> None:
    """A busy machine is no excuse."""
    stalls = Stalls(LEASE, PERIOD)
    servers = [status((5, (B,)))]
    stalls.look(servers, 100.0)
    assert stalls.look(servers, 100.0 + PERIOD + LEASE / 2) == Stall(5, PERIOD + LEASE / 2, (B,))
