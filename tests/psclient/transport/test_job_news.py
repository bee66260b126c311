"""What a process has read in the log: which epoch it goes on with where it waits for a server that comes back."""

from __future__ import annotations

from psclient._src.transport.log_calls import JobNews
from pswire.api import Watched
from pswire.model.log import STEP, Epoch, EpochClosed, Gone, Return


def read(*epochs: Epoch) -> JobNews:
    """Returns what is known once two servers were lost, and these epochs closed."""
    news = JobNews()
    entries = (Gone(1, "was lost"), Gone(2, "was lost"), *map(EpochClosed, epochs))
    news.take(Watched(0, 0, entries, (), ()))
    return news


def coming(number: int, server: int, began: int, ready: bool = False) -> Epoch:
    """Returns an epoch that tells of a server that comes back."""
    return Epoch(number, (), STEP, returns=Return(server, 70 + server, began, ready, 9 if ready else 0))


FIRST, FENCED, BACK, NEXT = coming(2, 1, 2), coming(3, 1, 2), coming(4, 1, 2, True), coming(5, 2, 5)


def test_who_waits_goes_on_with_the_epoch_that_ends_it() -> None:
    """Not with one after it, by which all wait for the next server: that one they come to at a later step."""
    assert read(FIRST).after(FIRST) == FIRST
    assert read(FIRST, FENCED).after(FIRST) == FENCED
    assert read(FIRST, FENCED, BACK).after(FIRST) == BACK
    assert read(FIRST, FENCED, BACK, NEXT).after(FIRST) == read(FIRST, BACK, NEXT).after(FIRST) == BACK
    assert read(FIRST, Epoch(3, (), STEP), NEXT).after(FIRST) == Epoch(3, (), STEP)


def test_a_server_is_back_after_so_many_losses() -> None:
    """As many as the log has of it before."""
    news = read(FIRST, BACK)
    assert [(epoch.number, back.server, times) for epoch, back, times in news.returned] == [(4, 1, 1)]
