"""A coordinator and its workers as real processes: each closure counts once, whoever dies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.processes import CHIEF, MARGIN, PS1, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import DIRECTORY, TASK, gate, say

KEYS = {"chief": "script", "workers": 2, "timeouts": QUICK}


def count(closures, elements):
    """The n-th closure adds n to two variables, on two servers, in one round, and then 1 to both in another."""
    from pathlib import Path

    import grpc

    begun = []
    once = Path(DIRECTORY, "stalled")

    class Stall(grpc.UnaryStreamClientInterceptor):
        """Server 1 does not get the update of a closure that server 0 gets."""

        def intercept_unary_stream(self, continuation, details, request):
            if begun[-1:] >= [12] and details.method.endswith("/Push") and not once.exists():
                once.touch()
                say("stalled")
                gate("never")
            return continuation(details, request)

    if TASK == "/job:worker/task:1":
        faults.use(Stall(), only=1)
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        v, u = (ps.Variable(np.zeros(elements), name=name) for name in ("v", "u"))
        optimizer, seen = ps.optimizers.SGD(1.0), ps.metrics.Sum("seen")

    @ps.coordinator.function
    def add_up(n):
        begun.append(n)
        strategy.run(lambda: seen.update_state(n))
        for amount in (n, 1):
            gradient = np.full(elements, -float(amount))
            strategy.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, v), (gradient, u)]))
        return {"number": n, "task": TASK}

    say("open")
    if not ps.coordinator.is_coordinator():
        return
    coordinator = ps.coordinator.ClusterCoordinator(strategy)
    results = [coordinator.schedule(add_up, args=(n,)) for n in range(closures)]
    coordinator.join()
    found = coordinator.fetch(results)
    assert [each["number"] for each in found] == list(range(closures))
    say("joined", sorted({each["task"] for each in found}))
    gate("back")
    more = 0
    while found[-1]["task"] != "/job:worker/task:1":
        found.append(coordinator.schedule(add_up, kwargs={"n": 0}).fetch())
        more += 1
    assert coordinator.done()
    for value in (v.numpy(), u.numpy()):
        assert (value == value[0]).all()
    say("sums", [float(v[0]) - more, float(u[0]) - more])
    say("seen", seen.result())


@pytest.mark.ci
def test_a_closure_counts_once_where_its_worker_dies(tmp_path):
    """Also where a server had its update and another one not: it is run again, and each update counts once, and so
    does what its replicas add to a metric."""
    closures = 60
    keys = KEYS | {"ps": 2, "workers": 3, "gates": ["never", "back"]}
    with ProcessCluster(count, tmp_path, (closures, 4), **keys) as job:
        job.hear(W1, "stalled")
        job.kill(W1)
        assert set(job.hear(CHIEF, "joined")) == {str(W0), str(W1), str(W2)}  # it had run some before
        job.start(W1)
        job.hear(W1, "open")
        job.open("back")
        assert job.hear(CHIEF, "sums") == [sum(range(closures)) + closures] * 2
        assert job.hear(CHIEF, "seen") == sum(range(closures))
        for task in (CHIEF, W0, W1, W2):
            assert job.exited(task) == 0


def schedule(way):
    """Five closures, which are steps of Adam, and the first of which creates its slots; a gate; and one that stays."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
        optimizer = ps.optimizers.Adam(1.0)

    @ps.coordinator.function
    def step():
        optimizer.apply_gradients([(np.ones(3), v)])
        return TASK

    @ps.coordinator.function
    def steps():
        optimizer.build([v])
        return int(optimizer.iterations)

    @ps.coordinator.function
    def stays():
        gate("end")

    if way == "late" and TASK == "/job:worker/task:0":
        gate("late")
    if ps.coordinator.is_coordinator():
        coordinator = ps.coordinator.ClusterCoordinator(strategy)
        say("ran", sorted({closure.fetch() for closure in [coordinator.schedule(step) for _ in range(5)]}))
        say("steps", coordinator.schedule(steps).fetch())
        gate("go")
        coordinator.schedule(stays)
        say("stays")
        coordinator.join()


def test_a_coordinator_that_is_started_again(tmp_path):
    """Its schedule is gone with it; workers wait, and run what the new one schedules: other closures.

    Before that, what a closure creates waits for nobody: the worker that runs it gives the first values, though one
    before it in order has not come. At last a lost server ends every wait: the coordinator's join raises ServerLost,
    and so does a worker that waits for a closure, or returns one.
    """
    with ProcessCluster(schedule, tmp_path, ["late"], ps=2, gates=["late", "go", "end"], **KEYS) as job:
        assert job.hear(CHIEF, "ran") == [str(W1)]
        job.open("late")
        job.hear(CHIEF, "steps", 5)
        job.kill(CHIEF)
        job.start(CHIEF)
        job.hear(CHIEF, "steps", 10)
        job.open("go")
        job.hear(CHIEF, "stays")
        job.kill(PS1)
        job.hear_error(CHIEF, "was lost", MARGIN)
        assert job.exited(CHIEF) == 75
        job.open("end")
        assert [job.exited(task) for task in (W0, W1)] == [75] * 2


def test_nobody_coordinates_any_more(tmp_path):
    """A worker waits for a coordinator as for a chief, and says so then."""
    keys = KEYS | {"timeouts": replace(QUICK, chief_timeout=2.0)}
    with ProcessCluster(schedule, tmp_path, [""], gates=["go"], **keys) as job:
        job.hear(CHIEF, "steps")
        job.kill(CHIEF)
        job.hear_error(W0, "the chief has not responded for", MARGIN)
        assert {job.exited(W0, MARGIN), job.exited(W1, MARGIN)} == {1}


def test_a_chief_without_a_script_coordinates_nothing(tmp_path):
    """Workers that have registered functions say so, and what to do."""
    with ProcessCluster(schedule, tmp_path, [""], gates=["go"], **KEYS | {"chief": "driver"}) as job:
        job.hear_error(W0, "but the chief of this job does not run a script", MARGIN)
        assert job.exited(W0, MARGIN) == 2
