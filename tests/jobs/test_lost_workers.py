"""Workers that die or stop: rounds go on, and every contribution counts once and whole, or not at all."""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.processes import CHIEF, MARGIN, PS0, PS1, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit.internals import Task
from tests.kit.shell import sockets_of
from tests.kit.transports import ON_ONE_TRANSPORT, mappings

W3 = Task("worker", 3)

LEASE = QUICK.session_timeout


def endure(rounds, stops, leaves, elements=4, stall=None):
    """Each contribution is a power of 1000, so that the sums' digits count contributions by worker.

    Stops are (worker, round), each with a gate of its own; one worker leaves before a round, and one stalls in the
    middle of its push to server 1 over gRPC, or on a transport.
    """
    from tests.kit import transports

    def is_due():
        return strategy is not None and strategy._session.waits[0] == stall[1]

    def stop():
        say("stalled")
        gate("never")

    if stall and stall[0] == ME:
        if stall[2] == "transport":
            transports.stall(is_due, stop)
        else:
            faults.use(faults.Stall(is_due, stop), only=1)
    strategy = None
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(elements), name="v")
        u = ps.Variable(np.zeros(elements), name="u")
    while strategy.round < rounds and [ME, strategy.round] != leaves:
        if [ME, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"{ME} at {strategy.round}")
        mine = np.full(elements, 1000.0**ME)
        strategy.run(lambda mine=mine: add_all([(v, mine), (u, mine)]))
        found = v.numpy(), u.numpy()
        assert all((value == value[0]).all() for value in found)
        say("did", strategy.round - 1)
    say("sums", [float(v[0]), float(u[0])])


def counts(*workers):
    """The sum of so many contributions of each worker."""
    return sum(count * 1000.0**worker for worker, count in enumerate(workers))


def after_the_lease(job, task, round, began):
    """A task has done a round, not later than the lease allows."""
    job.hear(task, "did", round)
    assert time.monotonic() - began < LEASE + MARGIN


@pytest.mark.ci
@pytest.mark.usefixtures("compiled_rounds")
def test_workers_are_lost_one_after_another(tmp_path):
    """One leaves early, which nobody waits for; one is killed, and one is stopped: the others go on within a lease.

    They say which rounds are complete without whom, and end cleanly. The stopped one is told when it runs again.
    """
    stops = [[1, 5], [2, 7], [0, 9]]
    gates = [f"{worker} at {round}" for worker, round in stops]
    keys = {"ps": 2, "workers": 4, "chief": "driver", "timeouts": QUICK, "gates": gates}
    with ProcessCluster(endure, tmp_path, (12, stops, [3, 3]), **keys) as job:
        assert job.exited(W3) == 0
        job.hear(W1, "at", 5)
        job.kill(W1)
        began = time.monotonic()
        after_the_lease(job, W0, 5, began)
        job.hear(W2, "at", 7)
        job.pause(W2)
        job.open("2 at 7")
        began = time.monotonic()
        after_the_lease(job, W0, 7, began)
        job.resume(W2)
        assert job.exited(W2) == 1
        assert "this process was removed from the job" in job.errors(W2)
        job.open("0 at 9")  # not before: with the last one the servers end, and would tell nobody
        assert job.hear(W0, "sums") == [counts(12, 5, 7, 3)] * 2
        assert f"round 5 of server 0 is complete without {W1}" in job.errors(W0)
        assert f"round 6 of server 0 is complete without {W1}" not in job.errors(W0)
        assert [job.exited(task) for task in (W0, CHIEF, PS0, PS1)] == [0] * 4


def test_a_worker_killed_in_the_middle_of_a_push(tmp_path):
    """A contribution counts if it is whole on all servers."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["never"]}
    with ProcessCluster(endure, tmp_path, (4, [], [], 560_000, [1, 2, "grpc"]), **keys) as job:
        job.hear(W1, "stalled")
        # The other server has both contributions.
        with job.server(PS0) as server:
            job.until(lambda: any(each.round == 2 and not each.missing for each in server.status().waiting))
        job.kill(W1)
        began = time.monotonic()
        after_the_lease(job, W0, 2, began)
        assert job.hear(W0, "sums") == [counts(4, 2)] * 2
        for server in (0, 1):
            assert f"round 2 of server {server} is complete without {W1}" in job.errors(W0)
        assert job.exited(W0) == 0


@pytest.mark.ci
@ON_ONE_TRANSPORT
def test_a_worker_killed_in_the_middle_of_a_push_on_a_transport(tmp_path, name):
    """No half contribution is ever visible, the others go on within the lease, and its memory is gone."""
    keys = {
        "ps": 1,
        "workers": 3,
        "chief": "driver",
        "timeouts": QUICK,
        "gates": ["never", "0 at 7"],
        "transport": name,
    }
    with ProcessCluster(endure, tmp_path, (8, [[0, 7]], [], 400_000, [1, 5, "transport"]), **keys) as job:
        job.hear(W1, "stalled")
        server = job.cluster.processes[PS0].pid
        (path,) = sockets_of(server)
        assert path.is_socket()
        mapped = mappings(server)
        assert mapped == (4 if name == "shm" else 0)
        job.kill(W1)
        began = time.monotonic()
        after_the_lease(job, W0, 5, began)
        job.hear(W0, "at", 7)
        if name == "shm":
            job.until(lambda: mappings(server) == mapped - 1)
        job.open("0 at 7")
        for task in (W0, W2):
            first, second = job.hear(task, "sums")
            assert first in (counts(8, 5, 8), counts(8, 6, 8))
            assert second == counts(8, 5, 8)
            assert f"round 5 of server 0 is complete without {W1}" in job.errors(task)
            assert job.exited(task) == 0
    assert not path.exists()
