"""A job that loses a connection, a worker that hangs, and for a while a server: every contribution counts as told.

What each worker adds is a power of a thousand, so that the digits of the sums tell who was counted how often. Each
process records what it has pushed and, from the answers, whose contributions were left out: the variables have to be
the sum over these records, and nobody ends but the worker that hung, when it wakes.
"""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import numpy as np
import pytest

import psclient as ps
from pstesting.network import WAYS, Relay
from pstesting.processes import CHIEF, PS0, PS1, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit.internals import Task

W3 = Task("worker", 3)
WORKERS = (W0, W1, W2, W3)

SHORT = ps.Timeouts(lease=2.0, beat=0.25, round=7.0, word=0.5)
LONG = ps.Timeouts(lease=3.0, beat=0.6, round=10.0)


def recorded():
    """Has this process record each push: its server, its round, and whose were left out; None for no answer."""
    from psclient._src.transport.remote_server import RemoteServer

    push, records = RemoteServer.push, {}

    def recording(server, contribution, *rest, **more):
        answer = push(server, contribution, *rest, **more)
        key = server.task.index, contribution.round
        records.setdefault(key)

        def answered(done):
            if not done.cancelled() and done.exception() is None:
                records[key] = [str(task) for task in done.result().left_out]

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
        say("records", [[*key, left_out] for key, left_out in records.items()])


def expected(records):
    """The variables' values by what the workers have recorded; a round leaves out the same for all, on all servers."""
    pushed, left_out = {}, {}
    for worker, pushes in records.items():
        for server, round, left in pushes:
            pushed.setdefault((server, round), set()).add(worker)
            if left is not None:
                left_out.setdefault(round, set()).add(tuple(sorted(left)))
    assert {len(views) for views in left_out.values()} == {1}
    sums = [0.0, 0.0]
    for (server, round), workers in pushed.items():
        (left,) = left_out[round]
        sums[server] += sum(1000.0**worker.index for worker in workers if str(worker) not in left)
    return sums


class Scenario:
    """The job, and what happens to it.

    Args:
        stack: ends it.
        directory: where it is.
        timeouts: its.
        rounds: how many it makes; less than a thousand.
        stops: pairs of a worker's index and a round, in which the worker waits at a gate before it pushes.
        step: seconds that a step takes.
    """

    def __init__(self, stack, directory, timeouts, rounds, stops, step=0.01):
        self.lease = timeouts.lease
        self.relay = Relay(stack)
        gates = [f"{worker} at {round}" for worker, round in stops]
        keys = {"ps": 2, "workers": 4, "chief": "driver", "lane": "tcp", "timeouts": timeouts}
        args = (rounds, [list(stop) for stop in stops], self.relay.port, step)
        self.job = stack.enter_context(ProcessCluster(sum_up, directory, args, helpers=[recorded], gates=gates, **keys))
        self.second = stack.enter_context(self.job.server(PS1))

    def arrive(self, round, *workers):
        """Waits until these workers stand before their pushes of a round, and those of all others have arrived."""
        for worker in workers:
            self.job.hear(worker, "at", round)
        self.job.until(
            lambda: any(one.round == round and {*one.missing} <= {*workers} for one in self.second.status().waiting)
        )

    def go_on(self, round, worker):
        """Opens the gate at which a worker stands."""
        self.job.open(f"{worker.index} at {round}")

    def drop(self, ways=WAYS):
        """Nothing arrives any more on the connection of worker 1 to the second server."""
        assert self.relay.count == 1
        self.relay.swallow(ways)

    def pause(self, server, round, worker):
        """A server stands still for two leases, while a worker goes on."""
        self.job.kill(server, signal.SIGSTOP)
        self.go_on(round, worker)
        time.sleep(2 * self.lease)
        self.job.kill(server, signal.SIGCONT)

    def wake(self, round, worker):
        """The worker that hung in a round goes on: only now it ends, because it is told that it was given up."""
        assert self.job.cluster.processes[worker].poll() is None
        self.go_on(round, worker)
        assert "this session was ended" in self.job.hear(worker, "fenced")
        assert self.job.exited(worker) == 1

    def end(self, *hung):
        """All ended well but those that hung, and the variables are the sum over the records."""
        going = [task for task in WORKERS if task not in hung]
        sums = [self.job.hear(task, "sums") for task in going]
        records = {task: self.job.hear(task, "records") for task in WORKERS}
        assert sums == [[[value] for value in expected(records)]] * len(going)
        everyone = (PS0, PS1, CHIEF, *WORKERS)
        assert {task: self.job.exited(task) for task in everyone} == {task: int(task in hung) for task in everyone}


@pytest.mark.soak
def test_without_a_fault(tmp_path):
    """The relay hands on all that comes, and the sums are those of the records; else these tests would show nothing."""
    with ExitStack() as stack:
        job = Scenario(stack, tmp_path, SHORT, 30, [(0, 8)])
        job.arrive(8, W0)
        job.go_on(8, W0)
        job.end()
        assert job.relay.count == 1


@pytest.mark.soak
@pytest.mark.parametrize("ways", [WAYS, ["up"], ["down"]], ids=["both ways", "pushes", "answers"])
def test_a_connection_is_dropped_in_silence(tmp_path, ways):
    """Whose connection it was goes on by another one, and what it had pushed counts once."""
    with ExitStack() as stack:
        job = Scenario(stack, tmp_path, SHORT, 30, [(0, 8)])
        job.arrive(8, W0)
        job.drop(ways)
        job.go_on(8, W0)
        job.end()


@pytest.mark.ci
def test_one_after_the_other(tmp_path):
    """A connection is dropped, a worker hangs, a server pauses for two leases: the sums are those of the records.

    No process ends but the worker that hung, when it wakes.
    """
    with ExitStack() as stack:
        job = Scenario(stack, tmp_path, SHORT, 40, [(0, 8), (2, 16), (0, 24), (0, 32)])
        job.arrive(8, W0)
        job.drop()
        job.go_on(8, W0)
        job.arrive(16, W2)
        job.arrive(24, W0)
        job.pause(PS1, 24, W0)
        job.arrive(32, W0)
        job.wake(16, W2)
        job.go_on(32, W0)
        job.end(W2)


@pytest.mark.soak
def test_a_minute_of_everything_at_once(tmp_path):
    """In one round a connection is dropped, a worker hangs and a server pauses; later the other server does.

    The sums are those of the records, and no process ends but the worker that hung, when it wakes.
    """
    with ExitStack() as stack:
        job = Scenario(stack, tmp_path, LONG, 800, [(0, 100), (2, 100), (0, 500), (0, 700)], step=0.03)
        job.arrive(100, W0, W2)
        job.drop()
        job.pause(PS1, 100, W0)
        job.arrive(500, W0)
        job.pause(PS0, 500, W0)
        job.arrive(700, W0)
        job.wake(100, W2)
        job.go_on(700, W0)
        job.end(W2)
