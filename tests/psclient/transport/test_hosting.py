"""Which servers are gone, as a process hears of it from one server after the other."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from psclient._src.transport.daemon_threads import Threads
from psclient._src.transport.hosting import Hosting
from pswire.cluster import Task
from pswire.errors import PSError, ServerGone, ServerLost, Unreachable
from pswire.limits import Timeouts
from pswire.model.log import Gone
from pswire.model.status import ServerStatus
from tests.kit.samples import BARE


def losses(*servers: int) -> list[Gone]:
    return [Gone(server, "was lost") for server in servers]


LIVES = (11, 12, 13)
"""The incarnations of three servers of a job."""

TIMEOUTS = Timeouts(lease=0.3, beat=0.1, start=5.0)


class Server:
    """A server that tells what it holds, is silent, or raises an error."""

    def __init__(self, told: ServerStatus | PSError | None) -> None:
        self.told = told

    def status(self) -> ServerStatus:
        if self.told is None:
            time.sleep(0.05)
            raise Unreachable("no answer")
        if isinstance(self.told, PSError):
            raise self.told
        return self.told


def status(server: int, job: str = "mine", **more: object) -> ServerStatus:
    """The status of a server with a job that runs."""
    return replace(BARE, server=server, incarnation=LIVES[server], incarnations=LIVES, job=job, log=9, **more)  # type: ignore[arg-type]


def look(job: str, *told: ServerStatus | PSError | None, decides: bool = False) -> Hosting:
    """What a process finds before it opens its session."""
    servers = [Server(each) for each in told]
    hosting, threads = Hosting(Task("worker", 0), servers), Threads("look")  # type: ignore[arg-type]
    hosting.look_around(threads, TIMEOUTS, job, decides)
    threads.close()
    return hosting


@pytest.fixture
def hosting() -> Hosting:
    """Of four servers, which are nobody's."""
    return Hosting(Task("worker", 0), [object()] * 4)  # type: ignore[list-item]


def test_each_loss_is_news_once(hosting: Hosting) -> None:
    """The log is told whole, again and again."""
    assert hosting.lose(losses(1)) == losses(1)
    assert hosting.lose(losses(1)) == []
    assert hosting.lose(losses(1, 0)) == losses(0)
    assert (hosting.losses, hosting.live) == ((1, 0), (2, 3))


def test_what_comes_late_changes_nothing(hosting: Hosting) -> None:
    """An answer of before another one."""
    hosting.lose(losses(1, 0))
    assert hosting.lose(losses(1)) == []
    assert (hosting.losses, hosting.gone) == ((1, 0), {0, 1})


def test_a_server_may_have_told_what_its_successor_tells_later(hosting: Hosting) -> None:
    """The one that kept the log, and was lost itself: the order is that of the log."""
    hosting.lose(losses(3))
    assert hosting.lose(losses(1, 3)) == losses(1)
    assert (hosting.losses, hosting.live) == ((1, 3), (0, 2))


def test_who_is_back_may_be_lost_again(hosting: Hosting) -> None:
    """It is the last one to lead."""
    hosting.lose(losses(0))
    assert hosting.take_back(0, 1, "", lambda: True)
    assert hosting.live == (1, 2, 3, 0)
    assert hosting.take_back(0, 1, "", lambda: True) is None
    assert hosting.lose(losses(0, 0)) == losses(0)
    assert hosting.gone == {0}


def test_who_is_lost_while_it_is_taken_back_stays_away(hosting: Hosting) -> None:
    """It is told as lost, and not taken back."""
    hosting.lose(losses(0))

    def opened() -> bool:
        assert hosting.lose(losses(0, 0)) == losses(0)
        return True

    assert hosting.take_back(0, 1, "", opened) is None
    assert hosting.gone == {0}


def test_who_comes_later_knows_who_leads() -> None:
    """A server that was lost, and is back, is the last one to lead; it is not gone."""
    hosting = look("mine", *(status(server, losses=(0,)) for server in range(3)))
    assert (hosting.live, hosting.gone, hosting.losses) == ((1, 2, 0), frozenset(), (0,))
    assert hosting.lose(losses(0)) == []


def test_who_comes_later_knows_who_is_gone() -> None:
    """It waits for no server that the job goes on without."""
    hosting = look("mine", None, *(status(server, losses=(0,), gone=(0,)) for server in (1, 2)))
    assert (hosting.live, hosting.gone, hosting.losses) == ((1, 2), {0}, (0,))


@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("server", range(3))
def test_a_new_process_in_the_place_of_a_server_is_no_new_job(server: int, decides: bool) -> None:
    """The job does not know yet that the one before is lost: the chief is told."""
    there = [status(each) if each != server else replace(BARE, incarnation=99) for each in range(3)]
    hosting = look("mine", *there, decides=decides)
    assert hosting.gone == {server}
    assert hosting.losses == ()
    assert hosting.left_by(server).incarnation == LIVES[server]
    assert [*hosting.suspects] == [server] * decides
    assert hosting.lose(losses(server)) == []
    assert hosting.losses == (server,)


@pytest.mark.parametrize("error", [ServerLost("nothing listens there"), ServerGone("is gone: was lost")])
def test_who_comes_while_a_server_is_lost_takes_it_for_gone(error: PSError) -> None:
    """Whether it finds that out by itself, or another server tells it while it asks."""
    hosting = look("mine", status(0), error, status(2))
    assert (hosting.live, hosting.gone) == ((0, 2), {1})


def test_a_server_that_is_silent_holds_a_chief_up_for_a_lease() -> None:
    """The job does not know yet that it is lost."""
    began = time.monotonic()
    hosting = look("mine", status(0), None, status(2), decides=True)
    assert (hosting.gone, [*hosting.suspects]) == ({1}, [1])
    assert time.monotonic() - began > TIMEOUTS.lease


@pytest.mark.parametrize("decides", [True, False])
def test_a_server_of_no_job_is_waited_for(decides: bool) -> None:
    """A worker of a running one waits for what the chief says."""
    with pytest.raises(Unreachable):
        look("mine", *((None, BARE, BARE) if decides else (status(0), None, status(2))), decides=decides)


@pytest.mark.parametrize("keeper", [status(1, "other", losses=(0,)), status(1, broken="it was lost", losses=(0,))])
def test_who_begins_anew_knows_nothing(keeper: ServerStatus) -> None:
    """What another job lost, or one that cannot go on, is nothing to a new one, whose log server 0 keeps."""
    others = (replace(keeper, server=server, incarnation=LIVES[server], broken="") for server in (0, 2))
    hosting = look("mine", next(others), keeper, next(others))
    assert (hosting.live, hosting.losses) == ((0, 1, 2), ())
