"""The clean end: every process ends by itself, and nothing of ours is left in a process that goes on."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest

import psclient as ps
from pstesting.processes import CALM, PS0, PS1, SECONDS, ProcessCluster, until
from pstesting.script import add, gate, say
from tests.kit.internals import start_server
from tests.kit.shell import children, listens, open_files, shell

ROOT = Path(__file__).parents[2]


def work(rounds):
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(300_000), name="v")
    for _ in range(rounds):
        strategy.run(lambda: add(v, np.ones(300_000)))
    float(v[0])
    say("worked", True)
    gate("looked")


@pytest.mark.parametrize(
    "chief", ["driver", *(pytest.param(chief, marks=pytest.mark.soak) for chief in ("script", "none"))]
)
def test_a_job_leaves_nothing_behind(tmp_path, chief):
    """All processes exit with 0 by themselves; their ports are free, and the names of their sockets are gone."""
    before = children()
    with ProcessCluster(work, tmp_path, (5,), gates=["looked"], ps=2, workers=2, chief=chief) as job:
        for task in job.runners:
            job.hear(task, "worked", True)
        sockets = [path for task in (PS0, PS1) for path in _sockets(job.cluster.processes[task].pid)]
        assert len(sockets) == 2
        assert all(path.is_socket() for path in sockets)
        job.open("looked")
        job.finish()
        assert not any(listens(address) for address in job.cluster.addresses.values())
    assert children() == before
    assert not any(path.exists() for path in sockets)


def _sockets(pid):
    """The names in shared memory of the sockets that a process listens on; not those of other tests' servers."""
    bound = {Path(each.laddr) for each in psutil.Process(pid).net_connections("unix") if each.laddr}
    return [path.with_name(path.name.removeprefix(".")) for path in bound if path.parent == Path("/dev/shm")]


def close_and_look(seconds):
    """Says what is left of gRPC, by the names of its types, after a job whose pushes went over a stream of gRPC's."""
    import gc

    import grpc

    strategy = ps.ParameterServerStrategy(lane="grpc")
    with strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
    for _ in range(3):
        strategy.run(lambda: add(v, np.ones(3)))
    strategy.close()
    deadline = time.monotonic() + seconds
    while True:
        gc.collect()
        left = [type(one).__name__ for one in gc.get_objects() if isinstance(one, grpc.Call | grpc.Channel)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    say("left", left)


def test_nothing_of_grpc_waits_for_the_end_of_the_interpreter(tmp_path):
    """One call in a thousand that was deleted there waited for good for a thread that was no longer."""
    with ProcessCluster(close_and_look, tmp_path, (10,), workers=2) as job:
        for task in job.runners:
            assert job.hear(task, "left") == []
        job.finish()


class Held:
    """What this process holds that somebody has to give back: as much after each strategy as after the first."""

    def __init__(self):
        self.before = self.now()
        self.descriptors = None

    @staticmethod
    def now():
        return {*threading.enumerate(), *children()}

    def check(self):
        until(lambda: self.now() <= self.before, 10, lambda: f"there are {self.now() - self.before} more")
        if self.descriptors is None:
            self.descriptors = descriptors()
        # On a busy machine gRPC closes the socket of a channel that was closed with the work of the next one.
        most = self.descriptors + 1
        until(lambda: descriptors() <= most, 10, lambda: f"{self.descriptors} descriptors became {descriptors()}")


def descriptors():
    """Number of open files, sockets and pipes; gRPC has a pool of pollers besides, which grows with the load."""
    return sum(not target.startswith("anon_inode:") for target in open_files())


def train_once(resolver=None):
    """One strategy from its beginning to its end; returns it, and what it computed."""
    strategy = ps.ParameterServerStrategy(devices=["cpu:0", "cpu:1"], cluster_resolver=resolver, timeouts=CALM)
    with strategy.scope():
        v = ps.Variable(np.zeros(5), name="v")
        optimizer = ps.optimizers.SGD(1.0)
    for _ in range(3):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(5), v)]))
    value = v.numpy()
    strategy.close()
    return weakref.ref(strategy), float(value[0])


def strategies_one_after_the_other(aggregation, count):
    """Each is a job of its own: it finds none of the variables of the one before."""
    os.environ["PS_AGGREGATION"] = aggregation
    servers = [start_server(task, until_done=False, timeouts=CALM) for task in range(2)]
    spec = ps.ClusterSpec({"ps": tuple(address for _, address in servers), "worker": ("127.0.0.1:0",)})
    held, strategies = Held(), []
    try:
        for _ in range(count):
            strategies.append(train_once(ps.SimpleClusterResolver(spec, task_type="worker", task_id=0)))
            held.check()
    finally:
        for process, _ in servers:
            process.stdin.close()
            assert process.wait(SECONDS) == 0
            process.stdout.close()
    assert [value for _, value in strategies] == [-6.0] * count
    gc.collect()
    assert [ref() for ref, _ in strategies] == [None] * count


def strategies_with_servers_of_their_own():
    held = Held()
    for _ in range(3):
        assert train_once()[1] == -6.0
        held.check()


def leave_nothing():
    """In a process of its own: in that of the tests, what other tests have left may begin and end."""
    strategies_one_after_the_other("none", 4)
    strategies_one_after_the_other("host", 3)  # a leak of one descriptor for each job is seen by the third
    strategies_with_servers_of_their_own()


def test_strategies_leave_nothing_in_their_process(tmp_path):
    """Jobs, one after the other on the same two servers: threads and descriptors stay as they are.

    Without a cluster each strategy has a server of its own, which is gone when the strategy is closed.
    """
    call = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {__name__} import leave_nothing; leave_nothing()"
    (tmp_path / "program.py").write_text(call)
    done = shell(["python", "program.py"], tmp_path, SECONDS)
    assert (done.code, done.left) == (0, ()), done.err
