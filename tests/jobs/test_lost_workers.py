"""Workers that die, stop, or come back: rounds go on, and every contribution counts once and whole, or not at all."""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.processes import CHIEF, MARGIN, PS0, PS1, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import DIRECTORY, ME, add_all, gate, say
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


def learn(rows, batch, stops):
    """Adds up all rows of a dataset, each once; says which rows it took for which round. Saves after two rounds.

    Stops are (worker, round, gate); at the gate "never" it has taken its rows.
    """
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
    checkpoint = ps.train.Checkpoint(v=v)
    if (DIRECTORY / "checkpoints").exists():
        say("restored", checkpoint.restore("run").restored)
    dataset = ps.ArrayDataset((np.arange(rows), np.arange(3.0 * rows).reshape(rows, 3))).shuffle(3).batch(batch)
    gates = {(round, name == "never"): name for who, round, name in stops if who == ME}
    say("open", float(v.read_value()[0]))
    for numbers, values in strategy.experimental_distribute_dataset(dataset):
        for took in (False, True):
            if took:
                say("took", [strategy.round, numbers])
            if (strategy.round, took) in gates:
                say("at", strategy.round)
                gate(gates[strategy.round, took])
        strategy.run(lambda values=values: add_all([(v, values.sum(axis=0))]))
        say("value", [strategy.round - 1, v.numpy()])
        if strategy.round == 2:
            checkpoint.save("run/ckpt", ps.train.CheckpointOptions(enable_async=False))
    say("sums", v.numpy())


def rows_taken(job, *tasks):
    return [row for task in tasks for _, rows in job.said(task, "took") for row in rows]


def exact(rows):
    return [float(sum(3 * row + column for row in rows)) for column in range(3)]


def test_workers_die_and_come_back(tmp_path):
    """First one of them, then all: training goes on from the live variables and the data's position.

    A worker that comes back joins at a round boundary with the current values, at the group's place in the data. Every
    row counts once, but for those of the rounds that say that they were completed without it. It calls `restore` like
    the others did, which restores nothing: the variables are newer.
    """
    stops = [[1, 3, "never"], [0, 6, "one"], [0, 10, "all"], [1, 10, "all"]]
    keys = {"workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["never", "one", "all"]}
    with ProcessCluster(learn, tmp_path, (96, 6, stops), **keys) as job, job.server(PS0) as server:

        def starts(*tasks):
            for task in tasks:
                job.start(task)
                job.hear(task, "open")
            job.until(lambda: len(server.status().generation.members) == len(job.runners))

        job.hear(W1, "at", 3)
        job.kill(W1)
        lost = set(job.said(W1, "took")[-1][1])
        job.hear(W0, "at", 6)
        job.until(lambda: len(server.status().generation.members) == len(job.runners) - 1)
        starts(W1)
        job.open("one")
        for task in (W0, W1):
            job.hear(task, "at", 10)
        for task in (W0, W1):
            job.kill(task)
        starts(W0, W1)
        job.open("all")
        for task in job.runners:
            assert job.hear(task, "sums") == exact(set(range(96)) - lost)
        assert sorted(rows_taken(job, *job.runners)) == list(range(96))
        assert lost
        # What it sees after a round is what the others see, also right after it has come back.
        seen = dict(job.said(W0, "value"))
        assert all(seen[round] == value for round, value in job.said(W1, "value"))
        assert job.said(W1, "value")[-1][0] == max(seen)
        for task in (*job.runners, PS0):
            assert job.exited(task) == 0
        assert [job.said(task, "restored") for task in (W0, W1)] == [[False], [False] * 2]
