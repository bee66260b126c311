"""Workers that die in the middle of a push: rounds go on, and a contribution counts once and whole, or not at all."""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.processes import MARGIN, PS0, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit.shell import sockets_of
from tests.kit.transports import mappings


def endure(rounds, stalls, transport):
    """Each contribution is a power of 1000, so that the sums' digits count contributions by worker.

    Worker 1 stalls in the middle of a push, over gRPC of that to server 1; worker 0 waits at a gate before the last
    round.
    """
    from tests.kit import transports

    def is_due():
        return strategy is not None and strategy._session.waits[0] == stalls

    def stop():
        say("stalled")
        gate("never")

    strategy = None
    if ME == 1 and transport == "grpc":
        faults.use(faults.Stall(is_due, stop), only=1)
    elif ME == 1:
        transports.stall(is_due, stop)
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v, u = (ps.Variable(np.zeros(560_000), name=name) for name in "vu")
    while strategy.round < rounds:
        if (ME, strategy.round) == (0, rounds - 1):
            gate("looked")
        mine = np.full(560_000, 1000.0**ME)
        strategy.run(lambda mine=mine: add_all([(v, mine), (u, mine)]))
        found = v.numpy(), u.numpy()
        assert all((value == value[0]).all() for value in found)
        say("did", strategy.round - 1)
    say("sums", [float(v[0]), float(u[0])])


def counts(*workers):
    """The sum of so many contributions of each worker."""
    return sum(count * 1000.0**worker for worker, count in enumerate(workers))


@pytest.mark.parametrize(
    "transport",
    ["grpc", pytest.param("shm", marks=pytest.mark.ci), pytest.param("tcp", marks=pytest.mark.soak)],
)
def test_a_worker_killed_in_the_middle_of_a_push(tmp_path, transport):
    """A contribution counts if it is whole on all servers, and no half of a variable is ever visible. The others go on
    within the lease, and say which round is complete without whom; of its memory nothing stays."""
    servers = 2 if transport == "grpc" else 1
    keys = {"ps": servers, "workers": 3, "chief": "driver", "timeouts": QUICK, "gates": ["never", "looked"]}
    with ProcessCluster(endure, tmp_path, (8, 5, transport), transport=transport, **keys) as job:
        job.hear(W1, "stalled")
        with job.server(PS0) as server:  # where there are two it has all contributions
            job.until(
                lambda: any(each.round == 5 and (servers == 1 or not each.missing) for each in server.status().waiting)
            )
        pid = job.cluster.processes[PS0].pid
        (path,) = sockets_of(pid)
        assert path.is_socket()
        mapped = mappings(pid)
        assert mapped == (4 if transport == "shm" else 0)
        job.kill(W1)
        began = time.monotonic()
        job.hear(W0, "did", 5)
        assert time.monotonic() - began < QUICK.session_timeout + MARGIN
        job.until(lambda: mappings(pid) == mapped - (transport == "shm"))
        job.open("looked")
        whole, or_with_the_first_part = counts(8, 5, 8), counts(8, 6, 8)
        for task in (W0, W2):
            first, second = job.hear(task, "sums")
            assert second == whole
            assert first == whole or (servers == 1 and first == or_with_the_first_part)
            for number in range(servers):
                assert f"round 5 of server {number} is complete without {W1}" in job.errors(task)
            assert job.exited(task) == 0
    assert not path.exists()
