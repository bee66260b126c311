"""A network that drops, cuts, repeats, delays and swallows: every contribution counts once, and whole."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.faults import Faults
from pstesting.processes import PS0, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say


def hammer(rounds, rates, calls, changes):
    """Sums of integers on a network that has faults, or, with a number of calls, on lanes that break again and again.

    Says the steps whose sums are not exact. With changes each step has another consistency.
    """
    from tests.kit import lanes

    network = Faults(7 + ME, rates)
    made = lanes.fragile(ME, calls) if calls else faults.use(network)
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        small = ps.Variable(np.zeros(5), name="small")
        large = ps.Variable(np.zeros(200_000), name="large")
        optimizer = ps.optimizers.SGD(1.0)
        weights = ps.Variable(np.zeros(7), name="weights")
    kinds = ps.Sync(), ps.Async(), ps.Sync(nonfinite="skip"), ps.BoundedStaleness(1)
    wrong = []
    for step in range(rounds):
        if changes:
            strategy.set_consistency(kinds[step % 4])
        value = (step + 1.0) * (ME + 1)
        strategy.run(lambda value=value: add_all([(small, np.full(5, value)), (large, np.full(200_000, value))]))
        strategy.run(lambda value=value: optimizer.apply_gradients([(np.full(7, value), weights)]))
        expected = 6.0 * sum(range(1, step + 2))
        found = [small.numpy(), large.numpy(), -weights.numpy()]
        if not (changes and step % 2) and not all((value == expected).all() for value in found):
            wrong.append([step, expected, [float(value[0]) for value in found]])
    strategy.set_consistency(ps.Sync())
    say("wrong", wrong)
    say("sums", [float(small[0]), float(large.numpy().min()), float(-weights[0]), int(optimizer.iterations)])
    say("faults", {"lanes": made[0]} if calls else network.counts)


ALL = {"drop": 0.1, "cut": 0.05, "repeat": 0.05, "twice": 0.05, "late": 0.05, "lose": 0.1}
TWICE = {fault: 2 * rate for fault, rate in ALL.items()}
CHANGES = {"changes": True}


@pytest.mark.parametrize(
    ("lane", "rates"),
    [
        pytest.param("grpc", ALL, id="all of it"),
        pytest.param("shm", {"lanes": 30}, id="breaking lanes, shm"),
        pytest.param("tcp", {"lanes": 30}, id="breaking lanes, tcp", marks=pytest.mark.soak),
        pytest.param("grpc", ALL | CHANGES, id="all of it, amid changes", marks=pytest.mark.ci),
        pytest.param("grpc", {}, id="no fault", marks=pytest.mark.soak),
        pytest.param("grpc", {"drop": 0.1}, id="dropped", marks=pytest.mark.soak),
        pytest.param("grpc", {"repeat": 0.05, "twice": 0.05}, id="repeated", marks=pytest.mark.soak),
        pytest.param("grpc", {"lose": 0.1}, id="reply lost after apply", marks=pytest.mark.soak),
        pytest.param("grpc", TWICE, id="twice as much", marks=pytest.mark.soak),
        pytest.param("grpc", TWICE | CHANGES, id="twice as much, amid changes", marks=pytest.mark.soak),
    ],
)
def test_the_variable_is_the_exact_sum(tmp_path, lane, rates):
    """2 rounds a step, 2 servers, 3 workers, integers: the exact sum after each round, whatever the network does."""
    rounds, counts, rates = 14, [], dict(rates)
    changes, calls = rates.pop("changes", False), rates.get("lanes", 0)
    args = (rounds, {} if calls else rates, calls, changes)
    with ProcessCluster(hammer, tmp_path, args, ps=2, workers=3, lane=lane) as job:
        for task in (W0, W1, W2):
            assert job.hear(task, "wrong") == []
            *sums, steps = job.hear(task, "sums")
            assert sums == [6.0 * sum(range(1, rounds + 1))] * 3
            assert changes or steps == rounds
            counts.append(job.hear(task, "faults"))
        job.finish()
    assert all(sum(count[fault] for count in counts) for fault in rates), counts
    assert not calls or min(count["lanes"] for count in counts) > 6, "hardly a lane broke"


def begin(rounds):
    """Worker 1 does not hear the answer to its first call until the others have begun."""
    lost = faults.LoseOnce("Open", lambda: (say("lost"), gate("begun")))
    if ME == 1:
        faults.use(lost, only=0)
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(2), name="v")
    for _ in range(rounds):
        strategy.run(lambda: add_all([(v, np.full(2, 100.0**ME))]))
    say("sums", float(v[0]))


def test_a_lost_answer_at_the_beginning(tmp_path):
    """Who asks again for its session gets the same one: the job that has begun with it does not lose it."""
    with ProcessCluster(begin, tmp_path, (10,), workers=3, gates=["begun"]) as job, job.server(PS0) as server:
        job.hear(W1, "lost")
        job.until(lambda: server.status().epoch is not None)
        job.open("begun")
        for task in (W0, W1, W2):
            assert job.hear(task, "sums") == 10 * 10101.0
        job.finish()


def end():
    """The chief does not hear that server 1 knows of the end, by which that server ends."""
    import socket
    from contextlib import suppress

    from pswire.pb import parameter_server_pb2 as pb

    _, port = ps.TFConfigClusterResolver().cluster_spec().task_address("ps", 1).split(":")

    def until_gone():
        with suppress(ConnectionRefusedError):
            while True:
                socket.create_connection(("127.0.0.1", int(port))).close()

    def is_last(request):
        return any(entry.HasField("done") for entry in pb.ApproveRequest.FromString(request).entries)

    faults.use(faults.LoseOnce("Approve", lambda: (until_gone(), say("lost", True)), is_last), only=1)
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(2), name="v")
    strategy.run(lambda: add_all([(v, np.ones(2))]))


def test_a_lost_answer_at_the_end(tmp_path):
    """A server that has ended is not waited for until a lease is over, or a call's time."""
    with ProcessCluster(end, tmp_path, ps=2, workers=1, timeouts=ps.Timeouts(lease=90.0, call=90.0)) as job:
        job.hear(W0, "lost", True)
        job.finish()  # in less than these
