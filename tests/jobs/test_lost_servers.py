"""Servers are lost: with copies the job goes on, bit for bit; without, every process ends and names the server."""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import pytest

import psclient as ps
from psserver.state.sessions import DEPUTY_HEARTBEATS
from pstesting import forks
from pstesting.in_process import InProcessCluster
from pstesting.processes import CALM, CHIEF, PS0, PS1, QUICK, SECONDS, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, gate, say
from tests.kit.children import dies
from tests.kit.internals import SERVER_LOST

KEYS = {"ps": 2, "workers": 2, "chief": "driver", "replication_factor": 2, "timeouts": CALM, "gates": ["go 20"]}
OTHER = {PS0: PS1, PS1: PS0}


def learn(steps, stops, size=3, path="", saves=-1):
    """Adds up, with a momentum by which each step leaves its trace; says what it has at the end.

    Waits before some steps until the test lets it go on. Without a number of steps it makes them until the test has had
    enough. With a path it goes on from a checkpoint there, if there is one, and saves one after a step.
    """
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        v = ps.Variable(np.zeros(3, "float32"), name="v")
        w = ps.Variable(np.zeros((2, 2), "float32"), name="w")
        large = ps.Variable(np.zeros(size, "float32"), name="large")
        optimizer = ps.optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([v, w, large])
    checkpoint = ps.train.Checkpoint(v=v, w=w, large=large, optimizer=optimizer)
    number, enough = 0, False
    if path and (DIRECTORY / "checkpoints" / path).exists():
        checkpoint.restore(path).assert_consumed()
        number, saves = int(optimizer.iterations.numpy()), -1
    say("begins", number)

    def step(number):
        mine = -(ME + 1.0)
        grads = [(np.full(3, mine, "float32"), v), (np.full((2, 2), -(number % 4), "float32"), w)]
        optimizer.apply_gradients([*grads, (np.full(size, mine, "float32"), large)])
        time.sleep(0 if steps else 0.01)
        return np.array([1, (DIRECTORY / "enough").exists()], "float32")

    while not enough and number != steps:
        if number in stops:
            say("at", number)
            gate(f"go {number}")
        counted, ends = strategy.reduce("sum", strategy.run(step, (number,)), axis=None)
        assert counted == len(strategy.last_round.contributors), (number, counted)
        enough = not steps and ends > 0
        if number == 0:
            say("trains")
        number += 1
        if number == saves:
            checkpoint.save(f"{path}/ckpt", ps.train.CheckpointOptions(enable_async=False))
    found, first = large.numpy(), v.numpy()
    assert (found == first[0]).all(), (found.min(), found.max(), first)
    say("is", [first.tolist(), w.numpy().ravel().tolist(), int(optimizer.iterations.numpy())])


def values(steps):
    """What there is after some steps of two workers, in NumPy."""

    def trained(gradient):
        value = moment = np.float32(0)
        for step in range(steps):
            moment = np.float32(0.5) * moment + np.float32(gradient(step))
            value = value + moment
        return float(value)

    return [[trained(lambda step: 3.0)] * 3, [trained(lambda step: 2.0 * (step % 4))] * 4, steps]


def go_on(job):
    """Lets both workers go on, which wait before step 20."""
    for task in (W0, W1):
        job.hear(task, "at", 20)
    job.open("go 20")


def lose(job, server):
    """Kills a server; returns once the job goes on without it."""
    job.kill(server)
    job.hear_error(CHIEF, f"goes on without {server}")


def all_go_on_with(job, server):
    """Returns once all have said that a server is back."""
    for task in (CHIEF, W0, W1):
        job.hear_error(task, f"uses {server} again, which was readmitted")


def await_variables(job, server):
    """Returns once a server that is back has its variables as they are now: another one may be lost."""
    with job.server(server) as there:
        job.until(lambda: (s := there.status()).incarnation in s.incarnations and not s.recovering)


def enough(job, directory, *servers):
    """Ends the job; what both workers have learnt is what the steps that they say make."""
    (directory / "enough").touch()
    found = job.hear(W0, "is")
    assert found == job.hear(W1, "is") == values(found[2])
    assert {job.exited(task) for task in (W0, W1, CHIEF, *servers)} == {0}


def problems(job):
    """What `psctl status` finds wrong, by its kind and task."""
    addresses = ",".join(job.cluster.addresses[server] for server in sorted(job.cluster.addresses))
    psctl = [sys.executable, "-m", "psclient.psctl", "--address", addresses, "status", "--json"]
    environ = os.environ | job.cluster._options.variables()
    done = forks.run(psctl, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    return {(each["kind"], each["task"]): each["message"] for each in json.loads(done.stdout)["problems"]}


# ---- Servers that are started again ----


@pytest.mark.ci
@pytest.mark.usefixtures("compiled_rounds")
def test_a_server_without_copies_that_is_replaced(tmp_path):
    """Its successor refuses the old sessions at once. Everyone started again goes on from the checkpoint.

    One worker comes back before the chief: it is as new as all others, and drives nothing, since nothing is left.
    """
    keys = {**KEYS, "replication_factor": 1, "timeouts": QUICK}
    with ProcessCluster(learn, tmp_path, (22, [20], 3, "run", 4), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 20)
        job.kill(PS1)
        job.start(PS1)
        job.open("go 20")
        for task in (W0, W1, CHIEF):
            job.hear_error(task, f"error: {PS1}: was ")
            assert job.exited(task) == SERVER_LOST
        job.start(W1)
        job.hear_error(W1, "waits for a chief to start the job")
        time.sleep(2 * DEPUTY_HEARTBEATS * QUICK.heartbeat_interval)
        assert "the chief is down" not in job.errors(W1)
        job.start(CHIEF)
        job.start(W0)
        for task in (W0, W1):
            assert job.hear(task, "begins") == 4
            assert job.hear(task, "is") == values(22)
        job.finish()


# ---- What is saved ----


def save_amid(rounds, stop):
    """Saves what travels in parts, trains on, and says what is restored of it at the end."""
    size = 300_000
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        large = [ps.Variable(np.full(size, k, "float32"), name=f"large{k}") for k in range(3)]
        v = ps.Variable(np.zeros(3), name="v")
        table = ps.dynamic_embedding.get_variable("table", dim=2)
        optimizer = ps.optimizers.SGD(1.0)
    checkpoint = ps.train.Checkpoint(large=large, v=v, table=table)

    def step(round):
        grads = [(np.full(3, -1.0), v)]
        grads += [(np.full(size, -1.0, "float32"), each) for each in large if round == stop]
        found = table.lookup(np.array([round, 1000]))
        optimizer.apply_gradients([*grads, (found.gradient(np.ones((2, 2), "float32")), table)])

    def state():
        keys, rows = table.export()
        order = np.argsort(keys)
        sums = [float(np.sum(each.numpy(), dtype="float64")) for each in large]
        return [v.numpy().tolist(), sums, keys[order].tolist(), rows[order].tolist()]

    while strategy.round < rounds:
        round = strategy.round
        if round == stop:
            before = state()
            say("at", round)
            gate("go 20")
            checkpoint.save("run/ckpt")
        strategy.run(step, (round,))
    assert state() != before
    checkpoint.sync()
    checkpoint.restore("run/ckpt-1").assert_consumed()
    say("is", state() == before)


@pytest.mark.ci
def test_a_server_is_lost_while_a_checkpoint_is_written(tmp_path):
    """It dies in the middle of a file. Those that have the copies save what it was to save, as it was after the same
    round: nobody has to save again. Of two servers one saves all parts of a table.
    """
    environ = dies(tmp_path, 0, "in a shard")
    with ProcessCluster(save_amid, tmp_path, (26, 20), servers_environ=environ, **KEYS) as job:
        go_on(job)
        for task in (W0, W1):
            assert job.hear(task, "is") is True
            assert job.exited(task) == 0
        assert job.exited(PS0) == -9
    (manifest,) = tmp_path.rglob("manifest.json")
    files = {path.name for path in manifest.parent.iterdir()}
    assert files == {"manifest.json", *json.loads(manifest.read_text())["files"]}


@pytest.mark.parametrize("consistency", [ps.Async(), ps.BoundedStaleness(1)], ids=str)
def test_copies_need_rounds_that_are_the_same_everywhere(environ, consistency):
    """Other consistencies are refused at once, with what to write instead."""
    environ["PS_REPLICATION_FACTOR"] = "2"
    with InProcessCluster(2) as cluster, pytest.raises(ps.errors.ConfigError) as refused:
        ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(), consistency=consistency)
    assert "PS_REPLICATION_FACTOR=2 needs rounds with the same gradients on all servers" in str(refused.value)
    assert "use consistency=ps.Sync(), or set PS_REPLICATION_FACTOR=1" in str(refused.value)
