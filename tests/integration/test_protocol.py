"""Versions of this package that speak different protocols: refused with both ends named, or served."""

from __future__ import annotations

import re

import numpy as np
import pytest

import psclient as ps
from psclient._src.transport import lane
from psserver.transport import grpc_service
from pstesting.processes import PS0, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, say
from pswire.encoding.protocol import PROTOCOL
from pswire.errors import ConfigError
from tests.support import rig


def speak(number):
    """Worker 1 says that it speaks another protocol; both make rounds over the tcp lane."""
    from psclient._src.transport import lane, remote_server

    if ME == 1:
        lane.PROTOCOL = remote_server.PROTOCOL = number
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
    for _ in range(3):
        strategy.run(lambda: add_all([(v, np.ones(4))]))
    say("sums", v.numpy().tolist())


def test_the_protocol_before_is_served(tmp_path):
    """A worker of it trains together with one of this protocol, on the lanes as well."""
    with ProcessCluster(speak, tmp_path, (PROTOCOL - 1,), ps=1, workers=2, lane="tcp") as job:
        for task in (W0, W1):
            assert job.hear(task, "sums") == [6.0] * 4
        job.finish()


def test_an_unknown_protocol_is_refused_with_both_ends_named(tmp_path):
    """At once, and with the exit code of what has to be corrected."""
    with ProcessCluster(speak, tmp_path, (PROTOCOL + 1,), ps=1, workers=2) as job:
        line = job.hear_error(W1, f"{W1} speaks protocol {PROTOCOL + 1}, and {PS0} {PROTOCOL - 1} and {PROTOCOL}")
        assert "install the same version" in line
        assert job.exited(W1) == 2


@pytest.mark.parametrize("number", [PROTOCOL - 1, PROTOCOL + 1], ids=["the one before", "an unknown one"])
def test_a_client_serves_the_same_protocols(monkeypatch, number):
    """A server of the one before answers it; one that lets in anybody, with an unknown one, is refused."""
    monkeypatch.setattr(grpc_service, "PROTOCOL", number)
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
