"""When a lane is broken for silence: what beats and words say, and how much of the time between them counts."""

from __future__ import annotations

import pytest

from psclient._src.transport.lane import Silence

LEASE = 8.0
"""Seconds."""


def silent(silence: Silence, *times: float, waiting: bool = True) -> list[str]:
    """What is said when beats are answered at these times."""
    return [silence.beat(waiting, now) for now in times]


def test_a_lane_is_broken_once_beats_were_answered_for_a_lease() -> None:
    """Nothing has come on it since the first of them: not before, and it says for how long."""
    *before, last = silent(Silence(LEASE), 0, 2, 4, 6, 8)
    assert before == [""] * 4
    assert last == "nothing has come on it for 8 s"


def test_whatever_comes_begins_it_anew() -> None:
    """A lease is counted from the first beat after it."""
    silence = Silence(LEASE)
    silent(silence, 0, 2, 4, 6)
    silence.heard = True
    assert not any(silent(silence, 8, 10, 12, 14, 16))
    assert silent(silence, 18) != [""]


def test_nobody_waits_for_nothing() -> None:
    """While no call is under way a server has nothing to say."""
    silence = Silence(LEASE)
    assert not any(silent(silence, *range(100), waiting=False))
    assert not any(silent(silence, 100, 102, 104, 106))


@pytest.mark.parametrize("gap", [5.0, 100.0])
def test_a_pause_counts_for_half_a_lease(gap: float) -> None:
    """Between two beats the server may have stood still, or this process: no word could come, or be read."""
    silence = Silence(LEASE)
    assert not any(silent(silence, 0, gap, gap + 1, gap + 3))
    assert silent(silence, gap + 4) != [""]


def words(silence: Silence, received: int, sent: int, *times: float, paused: bool = False) -> str:
    """What is said at a beat after words that came at these times."""
    for now in times:
        silence.heard = True
        silence.word(received, paused, sent, now)
    return silence.beat(True, times[-1])


def test_a_lane_is_broken_once_the_server_receives_nothing_for_a_lease() -> None:
    """Though its words come: what was sent is lost, or held up, on its way."""
    silence = Silence(LEASE)
    assert words(silence, 10, 20, 0, 2, 4, 6) == ""
    assert words(silence, 10, 30, 8) == "the server receives nothing more on it for 8 s"


def test_what_a_server_does_not_want_is_not_lost() -> None:
    """It says that it has enough for now; from when it goes on a lease is counted."""
    silence = Silence(LEASE)
    assert words(silence, 10, 20, *range(100), paused=True) == ""
    assert words(silence, 10, 20, 100, 102, 104, 106) == ""
    assert words(silence, 10, 20, 108) != ""


def test_what_has_all_arrived_is_not_waited_for() -> None:
    """However long the server says the same; a lease is counted from when more was sent."""
    silence = Silence(LEASE)
    assert words(silence, 20, 20, *range(100)) == ""
    assert words(silence, 20, 30, 100, 102, 104, 106) == ""
    assert words(silence, 20, 30, 108) != ""


def test_calls_that_are_over_are_not_waited_for() -> None:
    """An answer may come before all of its push was received: what the server said of it says nothing of the next."""
    silence = Silence(LEASE)
    assert words(silence, 10, 20, 0, 2, 4, 6) == ""
    silence.word(10, False, 20, 8)
    assert silent(silence, 9, waiting=False) == [""]
    assert silent(silence, 10) == [""]


def test_a_slow_network_is_no_silence() -> None:
    """As long as a byte arrives in each lease."""
    silence = Silence(LEASE)
    for count in range(20):
        assert words(silence, count, 1000, 6 * count, 6 * count + 3) == ""


def test_words_that_come_together_count_once() -> None:
    """A server, or a network, that stood still: the words of that time say nothing of what it has received since."""
    silence = Silence(LEASE)
    assert words(silence, 10, 20, 0, 100, 100, 100, 100, 100) == ""
    assert words(silence, 20, 20, 101) == ""
