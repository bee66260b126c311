"""Jobs of a few workers: in threads of this process, and a script that most jobs of real processes run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.script import ME, add_all, gate, say
from pswire.limits import Timeouts
from tests.kit.rig import SOON

T = TypeVar("T")

PATIENT = Timeouts(beat=0.25, lease=SOON, call=SOON, round=3 * SOON, first=SOON, start=SOON)
"""Of workers in threads, of which none is to be taken for dead."""


def in_threads(
    make: Callable[[Any, int], T],
    workers: int = 2,
    servers: int = 2,
    cluster: InProcessCluster | None = None,
    root: str | Path = "runs",
    each: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> list[T]:
    """Runs `make(strategy, worker)` in each worker of a job; returns what each returns.

    Args:
        make: what a worker does. It may wait for another one by `meet`.
        workers, servers, root: of the cluster.
        cluster: one that is there, in place of a new one.
        each: options of the strategy of each worker alone.
        options: options of the strategies of all.
    """
    if cluster is None:
        with InProcessCluster(servers, workers, root, timeouts=PATIENT) as found:
            return in_threads(make, workers, servers, found, root, each, **options)
    there = cluster

    def work(index: int) -> T:
        own = {"timeouts": PATIENT, **options, **(each[index] if each else {})}
        with ps.ParameterServerStrategy(cluster_resolver=there.resolver(index), **own) as strategy:
            return make(strategy, index)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, index) for index in range(workers)]
        return [future.result(2 * SOON) for future in futures]


def meet(event: threading.Event) -> None:
    """Waits for what another thread sets."""
    assert event.wait(SOON), "another thread has not come so far"


def learn(rounds: int, consistency: str = "ps.Sync()", stops: Sequence[Any] = ()) -> None:
    """Adds powers of 1000 to two variables, so that digits of a sum count the rounds of each worker.

    Says "did" with the number of each round that is made, "done" with their count, and, once the gate "end" is open,
    "sums".

    Args:
        rounds: up to which number.
        consistency: of the strategy, as a script writes it.
        stops: of (worker, round, gate): before the round a worker says "at", and waits at the gate.
    """
    strategy = ps.ParameterServerStrategy(consistency=eval(consistency))
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    mine = np.full(4, 1000.0**ME)
    while strategy.round < rounds:
        for worker, number, name in stops:
            if (ME, strategy.round) == (worker, number):
                say("at", number)
                gate(name)
        strategy.run(lambda: add_all([(v, mine), (u, mine)]))
        say("did", strategy.round - 1)
    say("done", strategy.round)
    gate("end")
    say("sums", [v.numpy().tolist(), u.numpy().tolist()])


def total(*rounds: int) -> list[list[float]]:
    """The sums of `learn` after so many rounds of each worker."""
    return [[sum(count * 1000.0**worker for worker, count in enumerate(rounds))] * 4] * 2
