"""Versions of this package that speak different protocols: refused with both ends named, or served."""

from __future__ import annotations

import re

import numpy as np
import pytest

import psclient as ps
from psclient._src.transport import lane
from psserver.transport import grpc_service
from pstesting.in_process import InProcessCluster
from pstesting.processes import PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, say
from pswire.encoding import messages, protocol
from pswire.encoding.protocol import CHUNKS, COMPRESSION, OLDEST, PROTOCOL, TABLES
from pswire.errors import ConfigError
from pswire.model.hashing import BUCKETS
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tables import TablePart, TableSpec
from pswire.pb import parameter_server_pb2 as pb
from tests.kit import rig

TABLE = TablePart("users", TableSpec((4,)), 0, BUCKETS)
PART = VariableSpec("users/part_0", TABLE.tensor, part=TABLE)


def speak(number):
    """Worker 1 speaks another protocol, and knows none after it; both make rounds over the tcp lane."""
    from psclient._src.transport import lane, remote_server
    from pswire.encoding import protocol

    if ME == 1:
        lane.PROTOCOL = remote_server.PROTOCOL = number
        protocol.SERVED = (number - 1, number)
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
    for _ in range(3):
        strategy.run(lambda: add_all([(v, np.ones(4))]))
    say("sums", v.numpy().tolist())


def test_the_protocol_before_is_served(tmp_path):
    """A worker of it trains together with one of this protocol, on the lanes as well."""
    with ProcessCluster(speak, tmp_path, (OLDEST,), ps=1, workers=2, lane="tcp") as job:
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


def test_a_lane_refuses_an_unknown_protocol(monkeypatch, caplog):
    """As its session would have been; the calls go another way, and the log says why."""
    monkeypatch.setattr(lane, "PROTOCOL", PROTOCOL + 1)
    with rig.remote(rig.core(), lane="tcp") as server:
        session = server.open(W0, 1, 0, False).session
        server.pull(session, [], -1).result()
    assert f"session {session} speaks protocol {PROTOCOL + 1}, and {PS0} " in caplog.text


# ---- What an older server lacks ----


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


def without_tables(monkeypatch, task):
    """A server says that it speaks the last protocol that had none."""
    older(monkeypatch, task, TABLES - 1)


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
    without_tables(monkeypatch, PS0)
    with rig.remote(rig.core()) as server:
        session = server.open(W0, 1, 0, False).session
        both = f"{PS0} speaks protocol {TABLES - 1}, which has no dynamic tables, and {W0}, which speaks {PROTOCOL}, "
        with pytest.raises(ConfigError, match=f"{both}creates the table 'users'; install the same version"):
            server.create_batch(session, [PlacedVariable(0, PART, (0,))])
        plain = PlacedVariable(0, VariableSpec("v", TABLE.spec.row), (0,))
        assert "no chief has begun a job" in str(server.create_batch(session, [plain]).error)


def test_a_table_is_created_where_all_servers_have_tables(monkeypatch):
    """Where one has none no other is asked either, and the script goes on with what is no table."""
    without_tables(monkeypatch, PS1)
    with InProcessCluster(2) as cluster, ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        with strategy.scope():
            with pytest.raises(ConfigError, match=f"{PS1} speaks protocol {TABLES - 1}, .*'users'"):
                ps.dynamic_embedding.get_variable("users", 4, shards=1)
            v = ps.Variable(np.ones(3), name="v")
        assert v.numpy().tolist() == [1.0] * 3
        assert cluster.cores[0].status().variables == 1


def test_a_server_that_waits_for_all_is_given_no_backup_workers(monkeypatch):
    """It would wait for the last member, and say nothing; who has none trains with it."""
    without_tables(monkeypatch, PS0)
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


# ---- Batches that are handed out ----


def test_a_server_that_hands_out_nothing_is_not_asked(monkeypatch):
    """A dataset whose batches it should hand out is refused where it is made; another policy is not."""
    plainly = grpc_service.Service._open

    async def opened(self, *asked):
        reply = pb.OpenReply.FromString(await plainly(self, *asked))
        reply.protocol = CHUNKS - 1
        return reply.SerializeToString()

    monkeypatch.setattr(grpc_service.Service, "_open", opened)
    data = ps.ArrayDataset(np.arange(4)).batch(2)
    dynamic = ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC)
    with InProcessCluster() as cluster:
        resolver = cluster.resolver()
        with ps.ParameterServerStrategy(cluster_resolver=resolver, consistency=ps.Async()) as strategy:
            both = f"{PS0} speaks protocol {CHUNKS - 1}, which has no batches that are handed out, and .*{W0}"
            with pytest.raises(ConfigError, match=f"{both}, which speaks {PROTOCOL}, has a dataset with .*DYNAMIC"):
                strategy.experimental_distribute_dataset(data, dynamic)
            assert len(list(strategy.experimental_distribute_dataset(data))) == 2
