"""Votes of servers with certificates: encrypted on the tcp lane, and over gRPC where that cannot be reached."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from pstesting.network import Relay
from pstesting.processes import PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, say  # in the program below, which is a source
from tests.kit.certificates import Certificates, options


def count(rounds: int) -> None:
    """Adds to a variable of each server."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    mine = np.full(4, 100.0**ME)
    for _ in range(rounds):
        strategy.run(lambda: add_all([(v, mine), (u, mine)]))
    say("sums", [float(v[0]), float(u[0])])


@pytest.mark.parametrize("lane", ["tcp", pytest.param("grpc", marks=pytest.mark.soak)])
def test_servers_with_certificates_vote(
    stack: ExitStack, certificates: Certificates, tmp_path: Path, lane: str
) -> None:
    """Each shows its own as a client; what lies between passes bytes on, and reads none."""
    # At another address of this host there is no lane.
    relays = [Relay(stack, "127.0.0.2") for _ in range(2)] if lane == "grpc" else []
    between = [relay.address for relay in relays]
    keys = {"ps": 2, "workers": 2, "chief": "driver", "security": options(certificates.out)}
    with ProcessCluster(count, tmp_path, (8,), between=between, **keys) as job:
        for relay, server in zip(relays, (PS0, PS1), strict=False):
            relay.lead_to(job.cluster.addresses[server])
        for task in (W0, W1):
            assert job.hear(task, "sums") == [808.0, 808.0]
        job.finish()
        for one, other in ((PS0, PS1), (PS1, PS0)):
            assert f"{one} votes at {other}, lane {lane}" in job.errors(one)
