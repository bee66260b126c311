"""A job that loses a connection, a worker that hangs, and for a while a server: every contribution counts as told.

What each worker adds is a power of a thousand, so that the digits of the sums tell who was counted how often. Each
process records what it has pushed and, from the answers, whose contributions were left out: the variables have to be
the sum over these records, and nobody ends but the worker that hung, when it wakes.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
import pytest

import psclient as ps
from pstesting.network import WAYS, Relay
from pstesting.processes import CHIEF, PS0, PS1, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit.internals import Task

WORKERS = (W0, W1, W2, Task("worker", 3))

SHORT = ps.Timeouts(session_timeout=2.0, heartbeat_interval=0.25, round_timeout=7.0, report_interval=0.5)
LONG = ps.Timeouts(session_timeout=3.0, heartbeat_interval=0.6, round_timeout=10.0)


def recorded():
    """Has this process record each push: its server, its round, and whose were left out; None for no answer."""
    from psclient._src.network.remote_server import RemoteServer

    push, records = RemoteServer.push, {}

    def recording(server, contribution, *rest, **more):
        answer = push(server, contribution, *rest, **more)
        key = server.task.index, contribution.round
        records.setdefault(key)

        def answered(done):
            if not done.cancelled() and done.exception() is None:
                records[key] = [str(task) for task in done.result().excluded]

        answer.add_done_callback(answered)
        return answer

    RemoteServer.push = recording
    return records


def sum_up(rounds, stops, relay, seconds):
    """Rounds on both servers, with a gate before the pushes in which (worker, round) is a stop."""
    from pstesting import network

    if ME == 1:
        network.through(relay, server=1)
    records = recorded()
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(1000), name="v")
        u = ps.Variable(np.zeros(1000), name="u")
    mine = np.full(1000, 1000.0**ME)

    def step():
        time.sleep(seconds)
        if [ME, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"{ME} at {strategy.round}")
        add_all([(v, mine), (u, mine)])

    try:
        while strategy.round < rounds:
            strategy.run(step)
            say("did", strategy.round - 1)
        say("sums", [np.unique(v.numpy()), np.unique(u.numpy())])
    except ps.errors.Fenced as error:
        say("fenced", str(error))
        raise
    finally:
        say("records", [[*key, excluded] for key, excluded in records.items()])


def expected(records):
    """The variables' values by what the workers have recorded; a round leaves out the same for all, on all servers."""
    pushed, excluded = {}, {}
    for worker, pushes in records.items():
        for server, round, left in pushes:
            pushed.setdefault((server, round), set()).add(worker)
            if left is not None:
                excluded.setdefault(round, set()).add(tuple(sorted(left)))
    assert {len(views) for views in excluded.values()} == {1}
    sums = [0.0, 0.0]
    for (server, round), workers in pushed.items():
        (left,) = excluded[round]
        sums[server] += sum(1000.0**worker.index for worker in workers if str(worker) not in left)
    return sums


FAULTS = {
    "one after the other": (
        (SHORT, 40, 0.01, [(0, 8), (2, 16), (0, 24), (0, 32)]),
        "arrive 8 0, drop, go 8, arrive 16 2, arrive 24 0, pause 1 24, arrive 32 0, wake 16, go 32",
    ),
    "in one round, and then the other server": (
        (LONG, 800, 0.03, [(0, 100), (2, 100), (0, 500), (0, 700)]),
        "arrive 100 0 2, drop, pause 1 100, arrive 500 0, pause 0 500, arrive 700 0, wake 100, go 700",
    ),
}
"""Timeouts, rounds, seconds of a step, and pairs of a worker and a round in which it waits at a gate before it pushes;
and what happens: a connection is dropped in silence, worker 2 hangs in a round, a server stands still for two leases
while worker 0 goes on."""


@pytest.mark.parametrize(
    "faults", [pytest.param(n, marks=pytest.mark.soak if FAULTS[n][0][0] is LONG else pytest.mark.ci) for n in FAULTS]
)
def test_a_connection_a_worker_and_a_server_fail(tmp_path, faults):
    """The sums are those of the records, and no process ends but the worker that hung, when it wakes."""
    (timeouts, rounds, seconds, stops), happens = FAULTS[faults]
    with ExitStack() as stack:
        relay = Relay(stack)
        keys = {"ps": 2, "workers": 4, "chief": "driver", "transport": "tcp", "timeouts": timeouts}
        keys |= {"helpers": [recorded], "gates": [f"{worker} at {round}" for worker, round in stops]}
        args = (rounds, [list(stop) for stop in stops], relay.port, seconds)
        job = stack.enter_context(ProcessCluster(sum_up, tmp_path, args, **keys))
        second = stack.enter_context(job.server(PS1))

        def arrived(round, workers):
            """Whether all others' pushes of a round have arrived."""
            return any(one.round == round and {*one.missing} <= {*workers} for one in second.status().waiting)

        for what, *numbers in map(str.split, happens.split(", ")):
            match what, list(map(int, numbers)):
                case "arrive", [round, *indices]:
                    workers = [WORKERS[index] for index in indices]
                    for worker in workers:
                        job.hear(worker, "at", round)
                    job.until(lambda round=round, workers=workers: arrived(round, workers))
                case "drop", _:
                    assert relay.count == 1
                    relay.swallow(WAYS)  # nothing arrives any more on the connection of worker 1 to the second server
                case "go", [round]:
                    job.open(f"0 at {round}")
                case "pause", [server, round]:
                    job.pause((PS0, PS1)[server])
                    job.open(f"0 at {round}")
                    time.sleep(2 * timeouts.session_timeout)
                    job.resume((PS0, PS1)[server])
                case "wake", [round]:  # only now the worker that hung ends, because it is told that it was given up
                    assert job.cluster.processes[W2].poll() is None
                    job.open(f"2 at {round}")
                    assert "this process was removed from the job" in job.hear(W2, "fenced")
        going = [task for task in WORKERS if task != W2]
        sums = [job.hear(task, "sums") for task in going]
        assert sums == [[[value] for value in expected({task: job.hear(task, "records") for task in WORKERS})]] * 3
        everyone = (PS0, PS1, CHIEF, *WORKERS)
        assert {task: job.exited(task) for task in everyone} == {task: int(task == W2) for task in everyone}
