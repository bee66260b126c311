"""Servers as a client finds them: which are gone, and which speak another protocol, and are refused at once."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version

import pytest

import psclient as ps
from psclient._src.network.daemon_threads import Threads
from psclient._src.network.hosting import Hosting
from psclient._src.network.job_news import JobNews
from psclient._src.network.remote_server import RemoteServer
from psclient._src.telemetry.observer import Servers
from psserver.config import ServerConfig
from psserver.core.core import Core
from psserver.effects import Peer
from psserver.network import peers
from psserver.network.joining import await_place
from psserver.network.peers import Peers
from pstesting.in_process import InProcessCluster
from pswire.api import Watched
from pswire.cluster import Task
from pswire.encoding import calls
from pswire.encoding.protocol import PROTOCOL, check_protocol
from pswire.errors import ConfigError, PSError, ServerGone, ServerLost, Unreachable
from pswire.limits import Timeouts
from pswire.model.log import STEP, Generation, GenerationClosed, Gone, Return
from pswire.model.status import ServerStatus
from pswire.pb import parameter_server_pb2 as pb
from pswire.security.identity import Security
from tests.kit.rig import eventually
from tests.kit.samples import BARE
from tests.kit.strategies import refused

OURS = f"paramserver {version('paramserver')} (protocol {PROTOCOL})"

OTHER = pb.Spoken(protocol=PROTOCOL + 1, version="9.8.7")

THEIRS = f"paramserver 9.8.7 (protocol {PROTOCOL + 1})"

PS0, W0 = "/job:ps/task:0", "/job:worker/task:0"


def opens(cluster: InProcessCluster) -> None:
    ps.ParameterServerStrategy(cluster_resolver=cluster.resolver())


def enlists(cluster: InProcessCluster) -> None:
    with closing(RemoteServer(cluster.addresses[0], Task("ps", 0))) as server:
        server.enlist(None, 1)


def offers(cluster: InProcessCluster) -> None:
    config = ServerConfig(Task("ps", 0), address="localhost:1", join=tuple(cluster.addresses))
    await_place(config, False, lambda seconds: True)


def looks(cluster: InProcessCluster) -> None:
    with Servers({Task("ps", 0): cluster.addresses[0]}, 30.0, Security()) as servers:
        (found,) = servers.look()
    raise found.error


TALKS = {
    "a worker that opens its session": (opens, "Request", f"{W0} has {THEIRS}, but {PS0} has {OURS}"),
    "a worker that joins": (enlists, "Request", f"a worker that joins has {THEIRS}, but {PS0} has {OURS}"),
    "a standby": (offers, "Request", f"the standby server at localhost:1 has {THEIRS}, but {PS0} has {OURS}"),
    "a worker and its server": (opens, "Reply", f"{PS0} has {THEIRS}, but this process has {OURS}"),
    "who looks": (looks, "Reply", f"{PS0} has {THEIRS}, but this process has {OURS}"),
}
"""What is done, the messages of the process that is of another version, and the error's first words."""


@pytest.mark.parametrize("talk", TALKS)
def test_another_protocol_is_refused_with_both_versions(monkeypatch, talk):
    """At once, and not when a deadline has passed; newer or older makes no difference."""
    act, ends, words = TALKS[talk]
    saying = calls._saying
    with InProcessCluster() as cluster:
        for number in (PROTOCOL - 1, PROTOCOL + 1):
            said = pb.Spoken(protocol=number, version="9.8.7")

            def says(message, said=said):
                saying(message)
                if message.DESCRIPTOR.name.endswith(ends) and "spoken" in message.DESCRIPTOR.fields_by_name:
                    message.spoken.CopyFrom(said)
                return message

            monkeypatch.setattr(calls, "_saying", says)
            began = time.monotonic()
            with pytest.raises(ConfigError) as caught:
                act(cluster)
            assert time.monotonic() - began < 5.0
            assert caught.value.message.startswith(words.replace(f"protocol {PROTOCOL + 1}", f"protocol {number}"))
            assert "Install the same version of paramserver everywhere" in caught.value.message


def test_a_server_of_another_protocol_does_not_vote(monkeypatch):
    """It is not let in where it introduces itself, and says why, as long as it is not reached."""
    monkeypatch.setattr(peers, "spoken", lambda: OTHER)
    missed: list[str] = []

    class Told(Core):
        def miss(self, server, reason):
            missed.append(reason)

    with InProcessCluster(1) as cluster:
        config = ServerConfig(Task("ps", 1))
        links = Peers(Told(config, 7, time.monotonic, lambda work: None), config)
        links.know((Peer(cluster.addresses[0], cluster.cores[0].incarnation),) * 2)
        links.say(0, None)
        eventually(lambda: missed)
        links.close()
    assert f"/job:ps/task:1 has {THEIRS}, but {PS0} has {OURS}" in missed[0]


def test_the_error_is_short_whatever_a_stranger_says():
    """A process that says nothing has protocol 0, as those had of before; what is not printable is not repeated."""
    for said in (pb.Spoken(), pb.Spoken(protocol=2**32 - 1, version="x" * 9999), pb.Spoken(version="\n9")):
        with pytest.raises(ConfigError) as caught:
            check_protocol(said, "the standby server at a-host.of-a-cluster:12345", "/job:worker/task:1234")
        assert len(caught.value.message) <= 300
        assert caught.value.message.isprintable()


def losses(*servers: int) -> list[Gone]:
    return [Gone(server, "was lost") for server in servers]


LIVES = (11, 12, 13)
"""The incarnations of three servers of a job."""

TIMEOUTS = Timeouts(session_timeout=0.3, heartbeat_interval=0.1, start_timeout=5.0)


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
    return replace(BARE, server=server, incarnation=LIVES[server], incarnations=LIVES, job=job, log=9, **more)


def look(job: str, *told: ServerStatus | PSError | None, decides: bool = False) -> Hosting:
    """What a process finds before it opens its session."""
    servers = [Server(each) for each in told]
    hosting, threads = Hosting(Task("worker", 0), servers), Threads("look")
    hosting.look_around(threads, TIMEOUTS, job, decides)
    threads.close()
    return hosting


@pytest.fixture
def hosting():
    """Of four servers, which are nobody's."""
    return Hosting(Task("worker", 0), [object()] * 4)


def test_each_loss_is_news_once(hosting):
    """The log is told whole, again and again; an answer of before another one, which comes late, changes nothing."""
    for told, news in (([1], [1]), ([1], []), ([1, 0], [0]), ([1], [])):
        assert hosting.lose(losses(*told)) == losses(*news)
    assert (hosting.losses, hosting.gone, hosting.live) == ((1, 0), {0, 1}, (2, 3))


def test_a_server_may_have_told_what_its_successor_tells_later(hosting):
    """The one that kept the log, and was lost itself: the order is that of the log."""
    hosting.lose(losses(3))
    assert hosting.lose(losses(1, 3)) == losses(1)
    assert (hosting.losses, hosting.live) == ((1, 3), (0, 2))


@pytest.mark.parametrize("meanwhile", [False, True])
def test_who_is_back_may_be_lost_again(hosting, meanwhile):
    """It is the last one to lead; one that is lost while it is taken back is not readmitted."""
    hosting.lose(losses(0))
    if not meanwhile:
        assert hosting.take_back(0, 1, "", lambda: True)
        assert hosting.live == (1, 2, 3, 0)
    assert hosting.take_back(0, 1, "", lambda: hosting.lose(losses(0, 0)) == losses(0)) is None
    if not meanwhile:
        assert hosting.lose(losses(0, 0)) == losses(0)
    assert hosting.gone == {0}


def test_who_comes_later_knows_who_leads_and_who_is_gone():
    """A server that was lost and is back is the last one to lead; it waits for none that the job goes on without, or
    that it finds lost, by itself or by what another server tells. What another job lost, or one that cannot go on, is
    nothing to it."""
    hosting = look("mine", *(status(server, losses=(0,)) for server in range(3)))
    assert (hosting.live, hosting.gone, hosting.losses) == ((1, 2, 0), frozenset(), (0,))
    assert hosting.lose(losses(0)) == []
    hosting = look("mine", None, *(status(server, losses=(0,), gone=(0,)) for server in (1, 2)))
    assert (hosting.live, hosting.gone, hosting.losses) == ((1, 2), {0}, (0,))
    for error in (ServerLost("nothing listens there"), ServerGone("is down: was lost")):
        hosting = look("mine", status(0), error, status(2))
        assert (hosting.live, hosting.gone) == ((0, 2), {1})
    for keeper in (status(1, "other", losses=(0,)), status(1, broken="it was lost", losses=(0,))):
        others = (replace(keeper, server=server, incarnation=LIVES[server], broken="") for server in (0, 2))
        hosting = look("mine", next(others), keeper, next(others))
        assert (hosting.live, hosting.losses) == ((0, 1, 2), ())


@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("server", range(3))
def test_a_new_process_in_the_place_of_a_server_is_no_new_job(server, decides):
    """The job does not know yet that the one before is lost: the chief is told."""
    there = [status(each) if each != server else replace(BARE, incarnation=99) for each in range(3)]
    hosting = look("mine", *there, decides=decides)
    assert hosting.gone == {server}
    assert hosting.losses == ()
    assert hosting.left_by(server).incarnation == LIVES[server]
    assert [*hosting.suspects] == [server] * decides
    assert hosting.lose(losses(server)) == []
    assert hosting.losses == (server,)


def test_a_server_that_is_silent_holds_a_chief_up_for_a_lease():
    """The job does not know yet that it is lost. A worker of a running job waits for what the chief says, and all wait
    for a server of no job."""
    began = time.monotonic()
    hosting = look("mine", status(0), None, status(2), decides=True)
    assert (hosting.gone, [*hosting.suspects]) == ({1}, [1])
    assert time.monotonic() - began > TIMEOUTS.session_timeout
    refused(Unreachable, "", lambda: look("mine", status(0), None, status(2)))
    refused(Unreachable, "", lambda: look("mine", None, BARE, BARE, decides=True))


def read(*generations: Generation) -> JobNews:
    """Returns what is known once two servers were lost, and these generations closed."""
    news = JobNews(None, lambda: None)
    entries = (Gone(1, "was lost"), Gone(2, "was lost"), *map(GenerationClosed, generations))
    news.take(Watched(0, 0, entries, (), ()))
    return news


def coming(number: int, server: int, began: int, ready: bool = False) -> Generation:
    """Returns a generation that tells of a server that comes back."""
    return Generation(number, (), STEP, returns=Return(server, 70 + server, began, ready, 9 if ready else 0))


FIRST, FENCED, BACK, NEXT = coming(2, 1, 2), coming(3, 1, 2), coming(4, 1, 2, True), coming(5, 2, 5)


def test_who_waits_goes_on_with_the_generation_that_ends_it():
    """Not with one after it, by which all wait for the next server at a later step; losses are counted."""
    assert read(FIRST).after(FIRST) == FIRST
    assert read(FIRST, FENCED).after(FIRST) == FENCED
    assert read(FIRST, FENCED, BACK).after(FIRST) == BACK
    assert read(FIRST, FENCED, BACK, NEXT).after(FIRST) == read(FIRST, BACK, NEXT).after(FIRST) == BACK
    assert read(FIRST, Generation(3, (), STEP), NEXT).after(FIRST) == Generation(3, (), STEP)
    news = read(FIRST, BACK)
    assert [(generation.number, back.server, times) for generation, back, times in news.returned] == [(4, 1, 1)]
