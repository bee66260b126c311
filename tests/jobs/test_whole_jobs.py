"""Jobs of real processes: an evaluator beside the training, several hosts, kernels that servers share."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import psclient as ps
from pstesting import forks
from pstesting.hosts import Host, HostCluster
from pstesting.processes import PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, gate, say
from tests.kit.internals import EVALUATOR
from tests.kit.shell import linked
from tests.kit.telemetry import Page, metrics_url, scalars
from tests.kit.workers import in_threads

# ---- An evaluator follows the checkpoints ----

SAVES = 3


def train_or_evaluate(saves):
    if ps.TFConfigClusterResolver().task_type == "evaluator":
        evaluate(saves)
        return
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(3), name="w")
        optimizer = ps.optimizers.SGD(1.0, momentum=0.5)
        checkpoint = ps.train.Checkpoint(model={"w": w}, optimizer=optimizer)
        leads = strategy.extended.should_save_summary
        make = ps.summary.create_file_writer if leads else lambda _: ps.summary.create_noop_writer()
        writer = make(str(DIRECTORY / "train"))
    for step in range(1, saves + 1):
        with strategy.scope(), writer.as_default(step):
            strategy.run(lambda: optimizer.apply_gradients([(-np.ones(3), w)]))
            ps.summary.scalar("sum", w.numpy().sum())
            checkpoint.save("run/ckpt")
        gate(f"saved-{step}")
    writer.close()


def evaluate(saves):
    strategy = ps.MirroredStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(3), name="another_name")
        checkpoint = ps.train.Checkpoint(model={"w": w})
    writer = ps.summary.create_file_writer(str(DIRECTORY / "evaluation"))
    for path in ps.train.checkpoints_iterator(str(DIRECTORY / "checkpoints" / "run"), timeout=60):
        checkpoint.restore(path).expect_partial()
        step = int(checkpoint.save_counter)
        with writer.as_default(step):
            ps.summary.scalar("sum", w.numpy().sum())
        say("evaluated", step)
        if step == saves:
            break
    writer.close()


def test_an_evaluator_sees_each_checkpoint(tmp_path):
    """With the values of its round, by the paths of objects; it may die, and another one goes on with the newest.

    Of the workers one alone writes summaries, and what the evaluator sees is what that one saw.
    """
    gates = [f"saved-{step}" for step in range(1, SAVES + 1)]
    keys = {"ps": 2, "workers": 2, "evaluator": True}
    with (
        forks.having("tensorboardX"),  # to import it takes each process a second
        ProcessCluster(train_or_evaluate, tmp_path, (SAVES,), [evaluate], gates, **keys) as job,
    ):
        job.hear(EVALUATOR, "evaluated", 1)
        job.kill(EVALUATOR)
        job.start(EVALUATOR)
        for step, name in enumerate(gates, 1):
            job.hear(EVALUATOR, "evaluated", step)
            job.open(name)
        job.finish()
    assert len(list((tmp_path / "train").iterdir())) == 1
    seen = scalars(tmp_path / "train")
    assert [step for _, step, _ in seen] == [1, 2, 3]
    assert set(scalars(tmp_path / "evaluation")) == set(seen)


# ---- Several hosts, whose links are slow ----

LENGTH = 200_000
WHERE = {PS0: "ps0", PS1: "ps1", W0: "worker0", W1: "worker1"}


def fit(strategy, worker, length, steps):
    """Trains one large variable in shards, and two small ones, by gradients that differ by worker and step.

    Returns the servers of the shards, and what all variables come to.
    """
    import hashlib

    rng = np.random.default_rng(worker)
    with strategy.scope():
        large = ps.Variable(np.zeros((length // 100, 100), "float32"), name="large")
        small = [ps.Variable(np.ones(8, "float32"), name=name) for name in ("a", "b")]
        optimizer = ps.optimizers.Adam(0.1)
    for _ in range(steps):
        pairs = [(rng.normal(size=v.shape).astype("float32"), v) for v in (large, *small)]
        strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        large.numpy()  # so that its new value comes with each round
    places = sorted({int(shard.device.split("ps/task:")[1].split("/")[0]) for shard in large.variables})
    return [places, hashlib.sha256(b"".join(v.numpy().tobytes() for v in (large, *small))).hexdigest()]


def fit_over_hosts(length, steps):
    cut = ps.experimental.partitioners.FixedShardsPartitioner(4)
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"], variable_partitioner=cut)
    say("result", fit(strategy, ME, length, steps))


@pytest.mark.ci  # four hosts with links; loopback has the rest
def test_a_job_over_hosts_ends_as_one_on_loopback(tmp_path, stack):
    """Bit for bit; and what it moves goes over the links of its servers, both of which have their share."""
    hosts = linked(stack, Host("ps0", 200e6), Host("ps1", 200e6), Host("worker0"), Host("worker1"))
    keys = {"helpers": [fit], "launcher": partial(HostCluster, hosts, WHERE)}
    with ProcessCluster(fit_over_hosts, tmp_path, (LENGTH, 3), **keys) as job:
        found = [job.hear(task, "result") for task in (W0, W1)]
        job.finish()
    assert found[0][0] == [0, 1]
    cut = ps.experimental.partitioners.FixedShardsPartitioner(4)
    assert in_threads(lambda *one: fit(*one, LENGTH, 3), transport="tcp", variable_partitioner=cut) == found
    moved = hosts.moved()
    for server in ("ps0", "ps1"):  # half of the model, of two workers, each step
        assert moved[server].received > 4 * LENGTH * 3
        assert moved[server].sent > 4 * LENGTH * 3


# ---- Servers of one host compile a kernel once, and load no more than they need for it ----

SIZE = 1 << 16


def updates(size):
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        variables = [ps.Variable(np.zeros(size, np.float32)) for _ in range(2)]
        optimizer = ps.optimizers.SGD(0.5)

    def step():
        optimizer.apply_gradients([(np.ones(size, np.float32), v) for v in variables])

    for rounds in (3, 2):
        for _ in range(rounds):
            strategy.run(step)
        say("values", [float(v.numpy()[-1]) for v in variables])
        gate(f"after {rounds}")


def kernels(directory, *servers):
    """Runs a job of servers that update by kernels; of each how many it has compiled and loaded, and its libraries.

    These are those of which a process has loaded the machine code.
    """
    directory.mkdir()
    keys = {"ps": len(servers), "workers": 1, "metrics_port": 0}
    with ProcessCluster(updates, directory, (SIZE,), gates=["after 3", "after 2"], **keys) as job:

        def made(task):
            page = Page.at(metrics_url(job, task))
            return tuple(page("server_kernels_compiled_total", outcome=how) for how in ("compiled", "loaded"))

        assert job.hear(W0, "values") == [-1.5] * 2
        job.until(lambda: all(sum(made(task)) == 1 for task in servers))
        job.open("after 3")
        assert job.hear(W0, "values") == [-2.5] * 2
        found = []
        for task in servers:
            assert Page.at(metrics_url(job, task))("server_kernel_seconds_total") > 0
            with open(f"/proc/{job.cluster.processes[task].pid}/maps", encoding="utf-8") as maps:
                text = maps.read()
            loaded = [name for name in ("llvmlite", "numba", "scipy") if f"/site-packages/{name}" in text]
            found.append((*made(task), loaded))
        job.open("after 2")
        job.finish()
    return sorted(found)


@pytest.mark.ci  # psserver/programs/test_kept_kernels.py has the folder
def test_a_host_compiles_a_kernel_once(tmp_path, environ):
    """Of two servers one compiles, with Numba but no SciPy; the other, and those of the next job, load by LLVM."""
    environ |= {"PS_KERNEL_CACHE": str(tmp_path / "kernels"), forks.EXECS: "1"}  # a fork has the compiler already
    assert kernels(tmp_path / "first", PS0, PS1) == [(0, 1, ["llvmlite"]), (1, 0, ["llvmlite", "numba"])]
    assert kernels(tmp_path / "second", PS0) == [(0, 1, ["llvmlite"])]
