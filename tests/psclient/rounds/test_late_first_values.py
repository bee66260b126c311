"""First values of variables that are created when a job runs: those of the lowest task that creates them there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import psclient as ps
from psclient._src.rounds import first_values
from pstesting.in_process import InProcessCluster
from pswire.limits import Timeouts
from tests.kit.rig import eventually
from tests.kit.workers import in_threads, meet


def run(cluster: InProcessCluster, *scripts: Callable[..., Any], **options: Any) -> list[Any]:
    """Runs a script in each worker of a cluster, which it is told; returns what each has returned."""
    work = lambda strategy, me: scripts[me](cluster, strategy, me)  # noqa: E731
    return in_threads(work, len(scripts), cluster=cluster, devices=["cpu:0"], **options)


def created(cluster: InProcessCluster) -> int:
    """How many variables there are."""
    return int(cluster.cores[0].status().variables)


def a_round(strategy: ps.ParameterServerStrategy) -> float:
    return float(strategy.reduce("SUM", np.float32(1), axis=None))


def create(strategy: ps.ParameterServerStrategy, name: str, value: float, size: int = 4) -> ps.Variable:
    with strategy.scope():
        return ps.Variable(np.full(size, value, "float32"), name=name)


def each_begins(cluster: InProcessCluster, strategy: ps.ParameterServerStrategy, me: int) -> list[float]:
    """Creates variables between rounds, after the others have; with slots, and with one that is not beside others."""
    a_round(strategy)
    found, have = [], 0
    for n in range(3):
        if me == 0 and n:
            eventually(lambda have=have: created(cluster) > have)  # another one has created it
        late = create(strategy, f"late{n}", 7.0 + me, size=6)
        with strategy.scope(), strategy.extended.colocate_vars_with(late):
            slot = ps.Variable(np.full(6, 17.0 + me, "float32"), name=f"slot{n}")
        found += [*np.unique(late.numpy()), *np.unique(slot.numpy())]
        have = created(cluster)  # the others create no more before this one's round
        a_round(strategy)
    return found


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one server": (1, 2, {"deterministic": True}),
    "several, in shards": (3, 2, {"variable_partitioner": ps.experimental.partitioners.FixedShardsPartitioner(3)}),
    "with copies": (2, 2, {}),
    "three workers": (2, 3, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_late_variable_begins_with_the_value_of_the_lowest_task(name, environ):
    """Also if that one comes last: the others wait for it."""
    if name == "with copies":
        environ["PS_REPLICATION_FACTOR"] = "2"
    servers, workers, options = LAYOUTS[name]
    with InProcessCluster(servers, workers) as cluster:
        found = run(cluster, *[each_begins] * workers, **options)
    assert found == [[7.0, 17.0] * 3] * workers


def test_nobody_waits_for_a_task_that_goes_on_without_it():
    """One that does not create the variable comes to its next round: then the lowest of the others gives its value. The
    same where it leaves."""

    def lowest(cluster: InProcessCluster, strategy: ps.ParameterServerStrategy, me: int) -> list[float]:
        a_round(strategy)
        a_round(strategy)  # without the variable
        found = [float(create(strategy, "some", -1.0).numpy()[0])]
        a_round(strategy)
        return found

    def other(cluster: InProcessCluster, strategy: ps.ParameterServerStrategy, me: int) -> list[float]:
        a_round(strategy)
        if me == 2:
            eventually(lambda: any(item.missing for core in cluster.cores for item in core.status().waiting))
        found = [float(create(strategy, "some", me).numpy()[0])]
        a_round(strategy)
        a_round(strategy)
        eventually(lambda: len([one for one in cluster.cores[0].status().sessions if one.state == "left"]) == 1)
        return [*found, float(create(strategy, "more", me).numpy()[0])]

    with InProcessCluster(2, 3) as cluster:
        assert run(cluster, lowest, other, other) == [[1.0], [1.0, 1.0], [1.0, 1.0]]


def test_a_round_under_way_is_not_one_that_the_lower_task_has_come_to_alone(calls_of, monkeypatch):
    """Both have sent it, and it waits for a third worker: the lower one still gives its value."""
    monkeypatch.setattr(first_values, "LOOKS", (0.0, 0.01))
    looks, late = calls_of("_first", first_values.FirstValueWaiter), threading.Event()

    def script(cluster: InProcessCluster, strategy: ps.ParameterServerStrategy, me: int) -> float:
        a_round(strategy)
        if me == 2:
            meet(late)
        strategy.reduce("SUM", np.float32(1), axis=None)  # sends a round, and waits for nobody
        if me == 0:
            before = len(looks)
            eventually(lambda: len(looks) > before + 2)  # worker 1 waits for the value
        made = create(strategy, "late", 7.0 + me)
        late.set()
        return float(made.numpy()[0])

    with InProcessCluster(1, 3) as cluster:
        assert run(cluster, script, script, script) == [7.0] * 3


def test_a_task_that_has_joined_takes_its_place():
    """Worker 1 leaves and comes again: of a variable that worker 0 does not create the others wait for its value."""

    def leaves(cluster: InProcessCluster, strategy: ps.ParameterServerStrategy, me: int) -> None:
        a_round(strategy)

    def stays(cluster: InProcessCluster, strategy: ps.ParameterServerStrategy, me: int) -> None:
        while a_round(strategy) != 2:
            pass
        left.set()
        while a_round(strategy) != 3:
            pass
        if me == 2:
            assert float(create(strategy, "later", 9.0).numpy()[0]) == 8.0
        a_round(strategy)

    left = threading.Event()
    with InProcessCluster(1, 3) as cluster, ThreadPoolExecutor(1) as pool:
        others = pool.submit(run, cluster, stays, leaves, stays)
        meet(left)
        with ps.ParameterServerStrategy(["cpu:0"], cluster_resolver=cluster.resolver(1)) as strategy:
            assert a_round(strategy) == 3
            eventually(lambda: created(cluster) == 1)  # by worker 2
            assert float(create(strategy, "later", 8.0).numpy()[0]) == 8.0
            a_round(strategy)
        others.result()


def test_asynchronous_workers_wait_for_one_round_of_a_lower_one():
    """It gives its value if it creates the variable before its next round; else the other one does, and all have one
    value."""
    made = threading.Event()

    def after_a_round(cluster: InProcessCluster, strategy: ps.ParameterServerStrategy, me: int) -> list[float]:
        v = create(strategy, "v", 0.0)
        strategy.run(lambda: v.assign_add(np.ones(4, "float32")))
        eventually(lambda: sum(place.round >= 0 for place in cluster.cores[0].status().places) == 2)
        if me == 0:
            eventually(lambda: created(cluster) == 2)
        found = [float(create(strategy, "first", 7.0 + me).numpy()[0])]
        while me == 0 and not made.is_set():
            strategy.run(lambda: v.assign_add(np.ones(4, "float32")))
            strategy.reduce("SUM", np.float32(1), axis=None).numpy()
        found += [float(create(strategy, "second", 7.0 + me).numpy()[0])]
        made.set()
        return found

    with InProcessCluster(1, 2) as cluster:
        assert run(cluster, after_a_round, after_a_round, consistency=ps.Async()) == [[7.0, 8.0]] * 2


def test_an_asynchronous_worker_does_not_wait_for_one_that_does_nothing():
    """Which makes no round for longer than a call may wait without a word."""
    limits = Timeouts(report_interval=0.3)
    with InProcessCluster(1, 2, timeouts=limits) as cluster:
        done: list[float] = []

        def idle(cluster: InProcessCluster, strategy: ps.ParameterServerStrategy, me: int) -> float:
            a_round(strategy)
            eventually(lambda: bool(done))
            return float(create(strategy, "late", 7.0).numpy()[0])

        def busy(cluster: InProcessCluster, strategy: ps.ParameterServerStrategy, me: int) -> float:
            a_round(strategy)
            done.append(float(create(strategy, "late", 8.0).numpy()[0]))
            return done[0]

        assert run(cluster, idle, busy, consistency=ps.Async(), timeouts=limits) == [8.0, 8.0]
