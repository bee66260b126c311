"""Jobs whose processes come late, that nobody will finish, or that end: nothing of ours is left, and all say why."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CALM, CHIEF, PS0, PS1, QUICK, SECONDS, W0, W1, W2, ProcessCluster, until
from pstesting.script import ME, add, gate, say
from tests.kit.internals import SERVER_LOST, Task, start_server
from tests.kit.shell import children, free_port, open_files, shell, sockets_of


def test_a_server_that_starts_a_lease_after_the_others():
    """A worker that waits for it keeps its session with the other servers, and then the job begins."""
    first, address = start_server(0, until_done=False, timeouts=QUICK)
    port = free_port()
    spec = ps.ClusterSpec({"ps": (address, f"127.0.0.1:{port}"), "worker": ("127.0.0.1:0",)})
    resolver = ps.SimpleClusterResolver(spec, task_type="worker", task_id=0)

    def work():
        with ps.ParameterServerStrategy(cluster_resolver=resolver, timeouts=QUICK) as strategy, strategy.scope():
            v, u = (ps.Variable(np.zeros(3), name=name) for name in "vu")
            strategy.run(lambda: [add(v, np.ones(3)), add(u, np.ones(3))])
            return float(v[0]), float(u[0])

    with ThreadPoolExecutor(1) as pool, first:
        result = pool.submit(work)
        time.sleep(QUICK.session_timeout + 1)
        assert not result.done()
        second, _ = start_server(1, port, until_done=False, timeouts=QUICK)
        with second:
            assert result.result(SECONDS) == (1.0, 1.0)
            second.stdin.close()
        first.stdin.close()


ALONE = replace(QUICK, no_workers_timeout=4.0)
"""Longer than a lease: whoever is lost is known to be lost by then."""

KEYS = {"workers": 1, "chief": "driver", "gates": ["on"], "timeouts": ALONE}


def train(servers):
    """Rounds on all servers, and a gate after the second."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        variables = [ps.Variable(np.zeros(4), name=name) for name in "uvw"[:servers]]  # one on each server
    while strategy.round < 4 * servers:
        for variable in variables:
            strategy.run(lambda variable=variable: add(variable, np.ones(4)))
        if strategy.round == 2 * servers:
            say("at")
            gate("on")


def test_servers_that_nobody_calls_end(tmp_path):
    """When a server dies all processes are told `ServerLost`, the chief as well, and nobody is left to tell the others.

    They end by themselves: the one that has the leases, and the one that has not.
    """
    left = PS0, Task("ps", 2)
    with ProcessCluster(train, tmp_path, (3,), ps=3, **KEYS) as job:
        job.hear(W0, "at")
        job.kill(PS1)
        job.open("on")
        assert [job.exited(task) for task in (W0, CHIEF)] == [SERVER_LOST] * 2
        for task in left:
            job.hear_error(task, "no process has contacted this server for 4 s (PS_NO_WORKERS_TIMEOUT), so it ends")
            assert job.exited(task) == 0


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


def listening(addresses):
    """The numbers of the sockets that listen at some addresses: a port that is free may be another test's at once."""
    ports = {f"{int(address.rpartition(':')[2]):04X}" for address in addresses}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {each[9] for each in lines if each[1].rpartition(":")[2] in ports and each[3] == "0A"}


def test_a_job_leaves_nothing_behind(tmp_path):
    """All processes exit with 0 by themselves; their ports are free, and the names of their sockets are gone."""
    before = children()
    with ProcessCluster(work, tmp_path, (5,), gates=["looked"], ps=2, workers=2, chief="driver") as job:
        for task in job.runners:
            job.hear(task, "worked", True)
        sockets = [path for task in (PS0, PS1) for path in sockets_of(job.cluster.processes[task].pid)]
        assert len(sockets) == 2
        assert all(path.is_socket() for path in sockets)
        addresses = job.cluster.addresses.values()
        assert len(ours := listening(addresses)) >= 2
        job.open("looked")
        job.finish()
        assert not ours & listening(addresses)
    assert children() == before
    assert not any(path.exists() for path in sockets)


def holding():
    """Returns what checks what this process has to give back: as much after each strategy as after the first."""

    def now():
        return {*threading.enumerate(), *children()}

    def descriptors():
        """Open files, sockets and pipes; gRPC has a pool of pollers besides, which grows with the load."""
        return sum(not target.startswith("anon_inode:") for target in open_files())

    def check():
        until(lambda: now() <= before, 10, lambda: f"there are {now() - before} more")
        most.append(descriptors())
        # On a busy machine gRPC closes the socket of a channel that was closed with the work of the next one.
        until(lambda: descriptors() <= most[0] + 1, 10, lambda: f"{most[0]} descriptors became {descriptors()}")

    before, most = now(), []
    return check


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


def strategies_one_after_the_other(local_reduction, count):
    """Each is a job of its own: it finds none of the variables of the one before."""
    os.environ["PS_LOCAL_REDUCTION"] = local_reduction
    servers = [start_server(task, until_done=False, timeouts=CALM) for task in range(2)]
    spec = ps.ClusterSpec({"ps": tuple(address for _, address in servers), "worker": ("127.0.0.1:0",)})
    check, strategies = holding(), []
    try:
        for _ in range(count):
            strategies.append(train_once(ps.SimpleClusterResolver(spec, task_type="worker", task_id=0)))
            check()
    finally:
        for process, _ in servers:
            process.stdin.close()
            assert process.wait(SECONDS) == 0
            process.stdout.close()
    assert [value for _, value in strategies] == [-6.0] * count
    gc.collect()
    assert [ref() for ref, _ in strategies] == [None] * count


def leave_nothing():
    """In a process of its own: in that of the tests, what other tests have left may begin and end."""
    strategies_one_after_the_other("0", 4)
    strategies_one_after_the_other("1", 3)  # a leak of one descriptor for each job is seen by the third
    check = holding()
    for _ in range(3):  # with servers of their own
        assert train_once()[1] == -6.0
        check()
    os.environ["PS_TRANSPORT"] = "grpc"
    train_once()
    until(lambda: not of_grpc(), 10, lambda: f"{of_grpc()} would be deleted at the end of the interpreter")


def of_grpc():
    """What is left of gRPC: one call in a thousand that was deleted at the very end waited for a thread for good."""
    gc.collect()
    return [type(one).__name__ for one in gc.get_objects() if isinstance(one, grpc.Call | grpc.Channel)]


def test_strategies_leave_nothing_in_their_process(tmp_path):
    """Jobs, one after the other on the same two servers: threads and descriptors stay as they are.

    Without a cluster each strategy has a server of its own, which is gone when the strategy is closed.
    """
    call = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {__name__} import leave_nothing; leave_nothing()"
    (tmp_path / "program.py").write_text(call)
    done = shell(["python", "program.py"], tmp_path, SECONDS)
    assert (done.code, done.left) == (0, ()), done.err


# ---- A script that fails ----


def fail_alone(bug):
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(1), name="v")
        optimizer = ps.optimizers.SGD(1.0)
    for step in range(10**6):
        if step == 5 and ME == 1:
            say("fails", float(v.numpy()[0]))
            raise getattr(ps.errors, bug, KeyError)("my bug")
        strategy.run(lambda: optimizer.apply_gradients([(-np.ones(1), v)]))


@pytest.mark.parametrize(
    ("ps_tasks", "kind", "text"), [(1, "KeyError", "KeyError: 'my bug'"), (2, "InvalidType", "InvalidType: my bug")]
)
def test_a_script_that_fails_ends_its_job(tmp_path, ps_tasks, kind, text):
    """No round is made without its part; all processes end at once, and name the worker and its error.

    A call that is wrong is the script's fault, though its error is ours.
    """
    with ProcessCluster(fail_alone, tmp_path, (kind,), ps=ps_tasks, workers=3, chief="driver") as job:
        assert job.hear(W1, "fails") == 15.0
        for task in (W0, W2):
            assert job.exited(task, 10) == 1
            assert f"the script of {W1} ended with {text}" in job.errors(task)
        assert job.exited(W1) == 1
        assert "my bug" in job.errors(W1)
        assert "PS_REPLICATION_FACTOR" not in "".join(map(job.errors, (W0, W1, W2, CHIEF, PS0)))
