"""Clusters for tests: what docs/testing.md promises of them."""

from __future__ import annotations

import importlib.util
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from pstesting import InProcessCluster, ProcessCluster
from pstesting.processes import QUICK, W0, W1, until
from pstesting.script import gate, say


def train(cluster, worker, sums):
    with ps.ParameterServerStrategy(["cpu:0"], cluster_resolver=cluster.resolver(worker)) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(3), name="v")
            optimizer = ps.optimizers.SGD(1.0)
        for _ in range(5):
            strategy.run(lambda: optimizer.apply_gradients([(np.full(3, worker + 1.0), v)]))
        sums[worker] = v.numpy().tolist()


def ours(before):
    """The threads that have come since and that are not gRPC's, which keeps some of its own for a while."""
    return [
        one.name for one in set(threading.enumerate()) - before if "grpc" not in repr(getattr(one, "_target", None))
    ]


def test_workers_in_threads_train_on_servers_in_threads(tmp_path):
    """Two workers and two servers in this process, over real connections; nothing of it is left."""
    before, sums = set(threading.enumerate()), {}
    with InProcessCluster(servers=2, workers=2, checkpoint_root=tmp_path) as cluster:
        assert len({*cluster.addresses}) == 2
        workers = [threading.Thread(target=train, args=(cluster, worker, sums)) for worker in range(2)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
    assert sums == {0: [-15.0] * 3, 1: [-15.0] * 3}
    until(lambda: not ours(before), 60, lambda: f"{ours(before)} are left")


def test_leases_end_in_one_process(tmp_path):
    """A worker that falls silent is lost after its lease, as with server processes."""
    timeouts = ps.Timeouts(lease=0.5, beat=0.1)
    with InProcessCluster(checkpoint_root=tmp_path, timeouts=timeouts) as cluster:
        (core,) = cluster.cores
        for task in (W0, W1):
            core.open(task, 1, 0, False)
        deadline = threading.Event()
        while any(session.state == "open" for session in core.status().sessions if session.member.task == W1):
            (number,) = [s.member.session for s in core.status().sessions if s.member.task == W0]
            core.beat(number, -1, b"")
            assert not deadline.wait(0.05)
        assert [s.state for s in core.status().sessions if s.member.task == W0] == ["open"]


def wait_at_a_gate():
    say("at")
    gate("go")
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
    say("read", v.numpy())


@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_a_process_is_killed_or_paused(tmp_path, fault):
    """It is started again, or goes on; the test hears it, and lets it through a gate."""
    with ProcessCluster(wait_at_a_gate, tmp_path, workers=2, gates=["go"], timeouts=QUICK) as cluster:
        for task in (W0, W1):
            cluster.hear(task, "at")
        if fault == "killed":
            cluster.kill(W1)
            cluster.start(W1)
            cluster.hear(W1, "at")
        else:
            cluster.pause(W1)
            cluster.resume(W1)
        cluster.open("go")
        assert cluster.hear(W0, "read") == cluster.hear(W1, "read") == [0.0] * 3
        cluster.finish()


def test_the_example_of_the_document(tmp_path):
    """A test as docs/testing.md shows it passes: a worker dies, and is replaced."""
    text = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    (example,) = (each for each in examples if "test_a_worker_that_dies_is_replaced" in each)
    path = tmp_path / "example.py"
    path.write_text(example, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_a_worker_that_dies_is_replaced(tmp_path)
