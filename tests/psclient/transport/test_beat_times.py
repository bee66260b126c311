"""When sessions beat: together, at a few times of a pause."""

from __future__ import annotations

import pytest

from psclient._src.transport.session import BEATS, until_beat

PAUSE = 2.0


def test_sessions_of_one_time_beat_together_whenever_they_began() -> None:
    times = {
        round(now + until_beat(PAUSE, 5 + BEATS * k, now), 6) % PAUSE for k in range(9) for now in (7.3, 100.0, 1e9)
    }
    assert times == {5 / BEATS * PAUSE}


def test_times_are_spread_over_a_pause() -> None:
    times = sorted((1e9 + until_beat(PAUSE, number, 1e9)) % PAUSE for number in range(BEATS))
    assert times == pytest.approx([PAUSE * number / BEATS for number in range(BEATS)])


def test_one_that_was_woken_a_little_early_does_not_beat_twice() -> None:
    for early in (1e-6, 1e-3, PAUSE / BEATS):
        assert until_beat(PAUSE, 3, 3 / BEATS * PAUSE - early) == pytest.approx(PAUSE + early)
    for tenth in range(200):
        assert 0 < until_beat(PAUSE, 3, tenth / 10) <= PAUSE * (1 + 1 / BEATS) + 1e-9
