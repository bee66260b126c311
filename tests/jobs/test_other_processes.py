"""Processes that a worker starts: they compute, are told at once what they cannot do, and end without a trace."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import say
from tests.kit.children import METHODS, doubled, put_doubled
from tests.kit.strategies import opened, refused

AT_ONCE = 10.0
"""Seconds: far more than a fork needs to answer on a machine that others use, and far less than any timeout."""


class Job:
    """A number to which each step adds one, on a server that is a process."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.v = ps.Variable(np.zeros(1, "float32"), name="v")
            self.table = ps.Variable(np.zeros((4, 2), "float32"), name="table")
            self.mean = ps.metrics.Mean()
            self.optimizer = ps.optimizers.SGD(1.0)
        self.data = strategy.experimental_distribute_dataset([np.ones((2, 1), "float32")] * 3)
        self.checkpoint = ps.train.Checkpoint(v=self.v)
        self.steps = 0

    def step(self):
        self.strategy.run(lambda: self.optimizer.apply_gradients([(-np.ones(1, "float32"), self.v)]))
        self.steps += 1

    def check(self):
        """Every step has counted once, and more can be made."""
        self.step()
        assert float(self.v.numpy()[0]) == self.steps
        assert float(self.strategy.reduce("SUM", np.float32(2), axis=None)) == 2


@pytest.fixture
def job(in_tmp_path):
    # A fork that collects a gRPC server hangs or crashes: what earlier tests have left is gone, or is never collected.
    gc.collect()
    gc.freeze()
    with opened("embedded-1") as strategy:
        found = Job(strategy)
        found.step()
        yield found
    gc.unfreeze()


@contextmanager
def forked(work):
    """What a fork computes, which is there when it has ended: at the end of the block."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(writer)
    found = []
    yield found
    late = threading.Timer(AT_ONCE * 3, os.kill, (pid, signal.SIGKILL))
    late.start()
    with open(reader, "rb") as file:
        found.append(pickle.loads(file.read() or pickle.dumps("it hangs")))
    os.waitpid(pid, 0)
    late.cancel()


def told(calls):
    """What some calls raise, by their names, and the seconds that the slowest took."""
    said, slowest = {}, 0.0
    for name, call in calls.items():
        began = time.monotonic()
        try:
            said[name] = f"returned {call()!r}"
        except BaseException as error:
            said[name] = f"{type(error).__name__}: {error}"
        slowest = max(slowest, time.monotonic() - began)
    return said, slowest


def calls_of(job):
    """All kinds of calls that need servers."""
    strategy = job.strategy

    def enter():
        with strategy.scope():
            pass

    def create():
        with strategy.scope():
            ps.Variable(0.0)

    return {
        "scope": enter,
        "create": create,
        "step": job.step,
        "run": lambda: strategy.run(lambda: 1),
        "read": job.v.numpy,
        "assign": lambda: job.v.assign([2.0]),
        "assign a metric": lambda: job.mean.variables[0].assign(1.0),
        "lookup": lambda: job.table.lookup([1]).values[0],
        "reduce": lambda: strategy.reduce("SUM", 1.0, axis=None),
        "gather": lambda: strategy.gather(np.ones(2), axis=0),
        "loop": lambda: next(iter(job.data)),
        "metric": job.mean.result,
        "save": lambda: job.checkpoint.save("runs/ckpt"),
        "restore": lambda: job.checkpoint.restore("runs/ckpt-1"),
        "read a checkpoint": lambda: job.checkpoint.read("runs/ckpt-1"),
        "consistency": lambda: strategy.set_consistency(ps.Async()),
        "buffer": lambda: strategy.buffer(job.v),
        # What no method of a strategy stands before:
        "a call": strategy._servers[0].status,
        "a call that waits": lambda: strategy._servers[0].watch(strategy._session.number, 0, -1).result(),
    }


def test_each_call_of_a_fork_fails_at_once(job):
    """Nothing hangs, whatever is called: the error says what to do. A look at what is here already is no call."""
    here = job.strategy.reduce("SUM", np.float32(2), axis=None)
    assert float(here) == 2
    job.checkpoint.save("runs/ckpt")
    with forked(lambda: (told(calls_of(job)), float(here))) as found:
        pass
    (said, slowest), value = found[0]
    assert {name: text for name, text in said.items() if "this process is a fork" not in text} == {}
    assert all("num_workers=0" in text for text in said.values())
    assert slowest < AT_ONCE
    assert value == 2
    job.check()


def test_forks_amid_rounds_of_another_thread(job):
    """Whatever lock that thread held at the time of the fork, the fork is told, and the rounds go on."""
    ends = threading.Event()

    def train():
        while not ends.is_set():
            job.step()
            job.v.numpy()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(10):
            with forked(lambda: told({"read": job.v.numpy, "run": lambda: job.strategy.run(lambda: 1)})) as found:
                pass
            said, slowest = found[0]
            assert all("this process is a fork" in text for text in said.values()), said
            assert slowest < AT_ONCE
    finally:
        ends.set()
        thread.join()
    job.check()


@pytest.mark.parametrize("method", METHODS)
def test_children_compute_while_their_worker_trains(job, method, capfd):
    """`Pool` and `Process`, however `multiprocessing` starts them; at their end they print nothing."""
    start = multiprocessing.get_context(method)
    with start.Pool(2) as pool:
        first = pool.map_async(doubled, range(8))
        for _ in range(3):
            job.step()
        processes, values = zip(*first.get(60), strict=True)
        assert list(map(int, values)) == [*range(0, 16, 2)]
        assert os.getpid() not in processes
        assert pool.apply(doubled, (job.v.numpy(),))[1].tolist() == [2 * job.steps]  # values travel
    queue = start.Queue()
    process = start.Process(target=put_doubled, args=(queue, job.strategy.reduce("SUM", np.float32(2), axis=None)))
    process.start()
    job.step()
    assert int(queue.get(timeout=60)[1]) == 4
    process.join(60)
    assert process.exitcode == 0
    job.check()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_belongs_to_a_strategy_is_not_sent(job, method):
    """Variables, strategies, datasets and what holds them: an error where the process is started, with the remedy."""
    start = multiprocessing.get_context(method)
    for value, remedy in (
        (job.v, r"ServerVariable 'v' cannot be pickled.*v\.numpy\(\)"),
        ({"of": [job.table]}, r"ServerVariable 'table' cannot be pickled"),
        (job.mean, r"'mean/total' cannot be pickled"),
        (job.strategy, "ParameterServerStrategy cannot be pickled.*create a strategy in it"),
        (job.data, "DistributedDataset cannot be pickled"),
        (iter(job.data), "DistributedIterator cannot be pickled"),
    ):
        process = start.Process(target=doubled, args=(value,))
        refused(TypeError, remedy, process.start)
    job.check()


def test_programs_are_started_beside_a_strategy(job):
    """With and without a function that their fork calls first; they get none of the worker's connections."""
    count = (
        "import glob, os; "
        "print(sum('socket' in os.readlink(n) for n in glob.glob('/proc/self/fd/*') if os.path.lexists(n)))"
    )
    for options in ({}, {"close_fds": False}, {"preexec_fn": os.getpid}):
        done = subprocess.run([sys.executable, "-c", count], stdout=subprocess.PIPE, text=True, check=True, **options)
        assert done.stdout == "0\n"
        job.step()
    job.check()


ENDS = """
import contextlib, gc, os, signal, sys
import numpy as np
import psclient as ps

EXPECTED = {"end": 0, "signal": -signal.SIGTERM}
worker, SIZE, held = os.getpid(), 200_000, {}
held["strategy"] = ps.ParameterServerStrategy(transport=sys.argv[1])
with held["strategy"].scope():
    held["v"] = ps.Variable(np.zeros(SIZE, "float32"))


def step():
    held["strategy"].run(lambda: held["v"].assign_add(np.ones(SIZE, "float32")))


def leave(how):
    match how:
        case "exit" | "scope":
            sys.exit(3)
        case "_exit":
            os._exit(3)
        case "close":
            held["strategy"].close()
            sys.exit(3)
        case "garbage":
            held.clear()
            gc.collect()
            sys.exit(3)
        case "signal":
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()


held["strategy"]._after_step(lambda: print("its last step has ended here:", os.getpid() == worker, flush=True))
step()
kept = held["v"].numpy()
for number, how in enumerate(("exit", "_exit", "scope", "close", "garbage", "signal", "end"), 2):
    with held["strategy"].scope() if how == "scope" else contextlib.nullcontext():
        pid = os.fork()
        if pid == 0:
            leave(how)
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == EXPECTED.get(how, 3), (how, code)
    step()
    assert held["v"].numpy()[-1] == number
    assert kept[0] == 1
if os.getpid() == worker:
    print("all is well")
"""


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.ci), "grpc"])
def test_the_end_of_a_fork_is_not_the_end_of_its_worker(transport, tmp_path):
    """However it ends, it closes no session and no connection of the worker, frees no memory, and prints nothing."""
    command = [sys.executable, "-c", ENDS, transport]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith("waiting for ")]  # on a busy machine
    assert (done.returncode, said) == (0, [])
    assert sorted(done.stdout.splitlines()) == ["all is well", "its last step has ended here: True"]


def forks_in_a_job():
    import multiprocessing

    from tests.kit.children import doubled

    with ps.ParameterServerStrategy(local_reduction=True) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(200_000, "float32"), name="v", aggregation=ps.VariableAggregation.SUM)
        for _ in range(4):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                doubles = pool.map_async(doubled, range(4))
                strategy.run(lambda: v.assign_add(np.ones(200_000, "float32")))
                assert sum(int(value) for _, value in doubles.get(60)) == 12
                try:
                    pool.apply(v.numpy.__func__, (v,))
                except TypeError as error:
                    say("sent", str(error))
            say("values", np.unique(v.numpy()))


def test_workers_of_one_host_fork_while_they_train(tmp_path):
    """What they sum together in shared memory is whole in each round."""
    with ProcessCluster(forks_in_a_job, tmp_path, ps=2, workers=2) as cluster:
        cluster.finish()
        for task in (W0, W1):
            assert cluster.said(task, "values") == [[2.0], [4.0], [6.0], [8.0]]
            assert all("'v' cannot be pickled" in text for text in cluster.said(task, "sent"))
