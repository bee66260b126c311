"""Servers as a client finds them: which are gone, and which speak another protocol, and are refused or served."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest

import psclient as ps
from psclient._src.network import transport
from psclient._src.network.daemon_threads import Threads
from psclient._src.network.hosting import Hosting
from psclient._src.network.log_calls import JobNews
from psserver.network import grpc_service
from pstesting.in_process import InProcessCluster
from pstesting.processes import PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, say
from pswire.api import Watched
from pswire.cluster import Task
from pswire.encoding import messages, protocol
from pswire.encoding.protocol import CHUNKS, COMPRESSION, OLDEST, PROTOCOL, TABLES
from pswire.errors import ConfigError, PSError, ServerGone, ServerLost, Unreachable
from pswire.limits import Timeouts
from pswire.model.hashing import BUCKETS
from pswire.model.log import STEP, Generation, GenerationClosed, Gone, Return
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.status import ServerStatus
from pswire.model.tables import TablePart, TableSpec
from pswire.pb import parameter_server_pb2 as pb
from tests.kit import rig
from tests.kit.samples import BARE

TABLE = TablePart("users", TableSpec((4,)), 0, BUCKETS)
PART = VariableSpec("users/part_0", TABLE.tensor, part=TABLE)


def speak(number):
    """Worker 1 speaks another protocol, and knows none after it; both make rounds over the tcp transport."""
    from psclient._src.network import remote_server, transport
    from pswire.encoding import protocol

    if ME == 1:
        transport.PROTOCOL = remote_server.PROTOCOL = number
        protocol.SERVED = (number - 1, number)
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
    for _ in range(3):
        strategy.run(lambda: add_all([(v, np.ones(4))]))
    say("sums", v.numpy().tolist())


def test_the_protocol_before_is_served(tmp_path):
    """A worker of it trains together with one of this protocol, on the transports as well."""
    with ProcessCluster(speak, tmp_path, (OLDEST,), ps=1, workers=2, transport="tcp") as job:
        for task in (W0, W1):
            assert job.hear(task, "sums") == [6.0] * 4
        job.finish()


def test_an_unknown_protocol_is_refused_with_both_ends_named(tmp_path):
    """At once, and with the exit code of what has to be corrected."""
    with ProcessCluster(speak, tmp_path, (PROTOCOL + 1,), ps=1, workers=2) as job:
        line = job.hear_error(W1, f"{W1} speaks protocol {PROTOCOL + 1}, and {PS0} {OLDEST} to {PROTOCOL}")
        assert "install the same version" in line
        assert job.exited(W1) == 2


@pytest.mark.parametrize("number", [OLDEST, PROTOCOL + 1], ids=["the one before", "an unknown one"])
def test_a_client_serves_the_same_protocols(monkeypatch, number):
    """A server of the one before answers it; one that lets in anybody, with an unknown one, is refused."""
    monkeypatch.setattr(grpc_service, "spoken_with", lambda spoken: number)
    with rig.remote(rig.core()) as server:
        if number < PROTOCOL:
            assert server.open(W0, 1, 0, False).session
        else:
            with pytest.raises(ConfigError, match=re.escape(f"{PS0} speaks protocol {number}, and {W0} ")):
                server.open(W0, 1, 0, False)


def test_a_transport_refuses_an_unknown_protocol(monkeypatch, caplog):
    """As its session would have been; the calls go another way, and the log says why."""
    monkeypatch.setattr(transport, "PROTOCOL", PROTOCOL + 1)
    with rig.remote(rig.core(), transport="tcp") as server:
        session = server.open(W0, 1, 0, False).session
        server.pull(session, [], -1).result()
    assert f"session {session} speaks protocol {PROTOCOL + 1}, and {PS0} " in caplog.text


def older(monkeypatch, task, number):
    """A server says that it speaks an older protocol, which is served whatever is served now."""
    plainly = grpc_service.Service._open

    async def opened(self, *asked):
        reply = pb.OpenReply.FromString(await plainly(self, *asked))
        if self._task == str(task):
            reply.protocol = number
        return reply.SerializeToString()

    monkeypatch.setattr(grpc_service.Service, "_open", opened)
    monkeypatch.setattr(protocol, "SERVED", (number, *protocol.SERVED))


def test_a_server_without_compression_is_sent_nothing_compressed(monkeypatch):
    """It would take the bytes for the numbers; what is not compressed goes on, and the script may ask for no more."""
    older(monkeypatch, PS1, COMPRESSION - 1)
    with InProcessCluster(2) as cluster, ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        with strategy.scope():
            said = (
                f"{PS1} speaks protocol {COMPRESSION - 1}, which has no compression, and {W0}, which speaks {PROTOCOL}"
            )
            with pytest.raises(ConfigError, match=f"{said}, compresses contributions to variable 'w'; .* leave it out"):
                ps.Variable(np.ones(3), name="w", compression=ps.compression.Int8())
            v = ps.Variable(np.ones(3), name="v")
        assert v.numpy().tolist() == [1.0] * 3


def test_a_server_without_tables_is_given_none(monkeypatch):
    """It would take a part of one for an array; its client refuses, and is told all the same what is no table."""
    older(monkeypatch, PS0, TABLES - 1)
    with rig.remote(rig.core()) as server:
        session = server.open(W0, 1, 0, False).session
        both = f"{PS0} speaks protocol {TABLES - 1}, which has no dynamic tables, and {W0}, which speaks {PROTOCOL}, "
        with pytest.raises(ConfigError, match=f"{both}creates the table 'users'; install the same version"):
            server.create_batch(session, [PlacedVariable(0, PART, (0,))])
        plain = PlacedVariable(0, VariableSpec("v", TABLE.spec.row), (0,))
        assert "no chief has begun a job" in str(server.create_batch(session, [plain]).error)


def test_a_table_is_created_where_all_servers_have_tables(monkeypatch):
    """Where one has none no other is asked either, and the script goes on with what is no table."""
    older(monkeypatch, PS1, TABLES - 1)
    with InProcessCluster(2) as cluster, ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        with strategy.scope():
            with pytest.raises(ConfigError, match=f"{PS1} speaks protocol {TABLES - 1}, .*'users'"):
                ps.dynamic_embedding.get_variable("users", 4, shards=1)
            v = ps.Variable(np.ones(3), name="v")
        assert v.numpy().tolist() == [1.0] * 3
        assert cluster.cores[0].status().variables == 1


def test_a_server_that_waits_for_all_is_given_no_backup_workers(monkeypatch):
    """It would wait for the last member, and say nothing; who has none trains with it."""
    older(monkeypatch, PS0, TABLES - 1)
    with rig.remote(rig.core()) as server:
        both = f"{PS0} speaks protocol {TABLES - 1}, which has no backup workers, and {W0}, which speaks {PROTOCOL}, "
        with pytest.raises(ConfigError, match=re.escape(f"{both}runs with ps.Sync(backup_workers=1); install")):
            server.open(W0, 1, 0, False, "whole", "", 0, 1)
    with rig.remote(rig.core()) as server:  # another one: this one's number alone is older
        assert server.open(W0, 1, 0, False, "whole").session


@pytest.mark.parametrize("how", ["it says so", "it knows no such mode"])
def test_an_older_server_has_no_bounded_staleness(monkeypatch, how):
    """Both are named: one that says that it speaks protocol 2, and one that refuses the mode, as those do."""
    if how == "it says so":
        monkeypatch.setattr(grpc_service, "spoken_with", lambda spoken: 2)
    else:
        monkeypatch.setattr(messages, "MODES", _Older(messages.MODES))
    with rig.remote(rig.core()) as server, pytest.raises(ConfigError) as refused:
        server.open(W0, 1, 0, False, "bounded", staleness=3)
    assert refused.value.message.startswith(
        f"{PS0} speaks protocol 2, which has no bounded staleness, and {W0}, which speaks {PROTOCOL}, runs with "
        "ps.BoundedStaleness(3); install the same version"
    )


class _Older:
    """The modes as a server knew them that has no bounded staleness; clients know all."""

    def __init__(self, modes):
        self.numbers, self._modes = modes.numbers, modes

    def __getitem__(self, number):
        return self._modes[99 if self._modes[number] == "bounded" else number]


def test_a_server_that_hands_out_nothing_is_not_asked(monkeypatch):
    """A dataset whose batches it should hand out is refused where it is made; another policy is not."""
    older(monkeypatch, PS0, CHUNKS - 1)
    data = ps.ArrayDataset(np.arange(4)).batch(2)
    dynamic = ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC)
    with InProcessCluster() as cluster:
        resolver = cluster.resolver()
        with ps.ParameterServerStrategy(cluster_resolver=resolver, consistency=ps.Async()) as strategy:
            both = f"{PS0} speaks protocol {CHUNKS - 1}, which has no batches that are handed out, and .*{W0}"
            with pytest.raises(ConfigError, match=f"{both}, which speaks {PROTOCOL}, has a dataset with .*DYNAMIC"):
                strategy.experimental_distribute_dataset(data, dynamic)
            assert len(list(strategy.experimental_distribute_dataset(data))) == 2


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
    assert hosting.lose(losses(1)) == losses(1)
    assert hosting.lose(losses(1)) == []
    assert hosting.lose(losses(1, 0)) == losses(0)
    assert (hosting.losses, hosting.live) == ((1, 0), (2, 3))
    assert hosting.lose(losses(1)) == []
    assert (hosting.losses, hosting.gone) == ((1, 0), {0, 1})


def test_a_server_may_have_told_what_its_successor_tells_later(hosting):
    """The one that kept the log, and was lost itself: the order is that of the log."""
    hosting.lose(losses(3))
    assert hosting.lose(losses(1, 3)) == losses(1)
    assert (hosting.losses, hosting.live) == ((1, 3), (0, 2))


def test_who_is_back_may_be_lost_again(hosting):
    """It is the last one to lead."""
    hosting.lose(losses(0))
    assert hosting.take_back(0, 1, "", lambda: True)
    assert hosting.live == (1, 2, 3, 0)
    assert hosting.take_back(0, 1, "", lambda: True) is None
    assert hosting.lose(losses(0, 0)) == losses(0)
    assert hosting.gone == {0}


def test_who_is_lost_while_it_is_taken_back_stays_away(hosting):
    """It is told as lost, and not readmitted."""
    hosting.lose(losses(0))

    def opened() -> bool:
        assert hosting.lose(losses(0, 0)) == losses(0)
        return True

    assert hosting.take_back(0, 1, "", opened) is None
    assert hosting.gone == {0}


def test_who_comes_later_knows_who_leads_and_who_is_gone():
    """A server that was lost and is back is the last one to lead; it waits for none that the job goes on without."""
    hosting = look("mine", *(status(server, losses=(0,)) for server in range(3)))
    assert (hosting.live, hosting.gone, hosting.losses) == ((1, 2, 0), frozenset(), (0,))
    assert hosting.lose(losses(0)) == []
    hosting = look("mine", None, *(status(server, losses=(0,), gone=(0,)) for server in (1, 2)))
    assert (hosting.live, hosting.gone, hosting.losses) == ((1, 2), {0}, (0,))


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


@pytest.mark.parametrize("error", [ServerLost("nothing listens there"), ServerGone("is gone: was lost")])
def test_who_comes_while_a_server_is_lost_takes_it_for_gone(error):
    """Whether it finds that out by itself, or another server tells it while it asks."""
    hosting = look("mine", status(0), error, status(2))
    assert (hosting.live, hosting.gone) == ((0, 2), {1})


def test_a_server_that_is_silent_holds_a_chief_up_for_a_lease():
    """The job does not know yet that it is lost."""
    began = time.monotonic()
    hosting = look("mine", status(0), None, status(2), decides=True)
    assert (hosting.gone, [*hosting.suspects]) == ({1}, [1])
    assert time.monotonic() - began > TIMEOUTS.session_timeout


@pytest.mark.parametrize("decides", [True, False])
def test_a_server_of_no_job_is_waited_for(decides):
    """A worker of a running one waits for what the chief says."""
    with pytest.raises(Unreachable):
        look("mine", *((None, BARE, BARE) if decides else (status(0), None, status(2))), decides=decides)


@pytest.mark.parametrize("keeper", [status(1, "other", losses=(0,)), status(1, broken="it was lost", losses=(0,))])
def test_who_begins_anew_knows_nothing(keeper):
    """What another job lost, or one that cannot go on, is nothing to a new one, whose log server 0 keeps."""
    others = (replace(keeper, server=server, incarnation=LIVES[server], broken="") for server in (0, 2))
    hosting = look("mine", next(others), keeper, next(others))
    assert (hosting.live, hosting.losses) == ((0, 1, 2), ())


def read(*generations: Generation) -> JobNews:
    """Returns what is known once two servers were lost, and these generations closed."""
    news = JobNews()
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
