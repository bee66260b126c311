"""Time that counts against no deadline."""

from __future__ import annotations

from psclient._src.transport.patience import Patience
from pstesting.clock import Clock

LEASE, BEAT = 4.0, 1.0


def test_beats_that_are_answered_take_no_time() -> None:
    """Nor does a look in between, however often."""
    clock = Clock()
    patience = Patience(LEASE, BEAT, clock)
    for _ in range(10):
        patience.heard(0)
        clock.now += BEAT + LEASE / 4
        assert patience.stood() == 0.0


def test_a_silence_and_the_lease_after_it_do_not_count() -> None:
    """While it lasts and once it is over, of whichever server; two at a time are one."""
    clock = Clock()
    patience = Patience(LEASE, BEAT, clock)
    for server in (0, 1):
        patience.heard(server)
    clock.now += 10.0
    assert patience.stood() == 10.0 + LEASE
    for server in (0, 1):
        patience.heard(server)
    assert patience.stood() == 10.0 + LEASE
    clock.now += BEAT
    assert patience.stood() == 10.0 + LEASE
    patience.heard(1)
    clock.now += 3.0
    assert patience.stood() == 10.0 + LEASE + 4.0


def test_an_earlier_silence_of_another_server_hides_none() -> None:
    """Each adds to what stood before."""
    clock = Clock()
    patience = Patience(LEASE, BEAT, clock)
    for server in (0, 1):
        clock.now += 100.0
        patience.heard(1 - server)
        patience.heard(server)
        before = patience.stood()
        clock.now += 10.0
        patience.heard(server)
        assert patience.stood() - before >= 10.0


def test_a_silence_moves_a_deadline_whichever_wait_it_falls_into() -> None:
    """Of two waits up to one deadline the second has the silence of the first; one from before does not count."""
    clock = Clock()
    patience = Patience(LEASE, BEAT, clock)
    patience.heard(0)
    clock.now += 100.0
    for _ in range(5):
        patience.heard(0)
        clock.now += BEAT
    patience.heard(0)
    deadline = patience.deadline(20.0)
    assert deadline.left() == 20.0
    clock.now += 10.0
    patience.heard(0)
    assert deadline.left() == 20.0 + LEASE
    for _ in range(20):
        clock.now += BEAT
        patience.heard(0)
    assert deadline.left() == LEASE
