"""A server is lost, and its variables have copies: what is saved then is whole; other rounds are refused copies."""

from __future__ import annotations

import json

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CALM, PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, gate, say
from tests.kit.faulty_servers import dies
from tests.kit.internals import Task

PS2 = Task("ps", 2)
KEYS = {"ps": 2, "workers": 2, "chief": "driver", "replication": 1, "timeouts": CALM, "gates": ["go 20", "go 60"]}
EITHER = pytest.mark.parametrize("lost", [PS0, pytest.param(PS1, marks=pytest.mark.soak)], ids=str)


def learn(rounds, stops, path=""):
    """Adds up, with a momentum by which each round leaves its trace; says what it has at the end.

    Waits in some rounds until the test lets it go on. With a path it goes on from a checkpoint there, if there is one,
    and saves one after the last round.
    """
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        v = ps.Variable(np.zeros(3, "float32"), name="v")
        w = ps.Variable(np.zeros((2, 2), "float32"), name="w")
        optimizer = ps.optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([v, w])
    checkpoint = ps.train.Checkpoint(v=v, w=w, optimizer=optimizer)
    if path and (DIRECTORY / "checkpoints" / path).exists():
        checkpoint.restore(path).assert_consumed()

    def step(round):
        grads = [(np.full(3, -(ME + 1.0), "float32"), v), (np.full((2, 2), -(round % 4), "float32"), w)]
        optimizer.apply_gradients(grads)
        return np.float32(1)

    while strategy.round < rounds:
        round = strategy.round
        if round in stops:
            say("at", round)
            gate(f"go {round}")
        counted = strategy.reduce("sum", strategy.run(step, (round // 2,)), axis=None)
        assert float(counted) == len(strategy.last_round.contributors), (round, float(counted))
        if strategy.round > round + 2:
            say("joins", strategy.round)
    say("is", [v.numpy().tolist(), w.numpy().ravel().tolist(), int(optimizer.iterations.numpy())])
    if path:
        checkpoint.save(f"{path}/ckpt")


def trained(steps, gradient):
    """What the optimizer makes of each step's sum of gradients, in NumPy."""
    value = moment = np.float32(0)
    for step in range(steps):
        moment = np.float32(0.5) * moment + np.float32(gradient(step))
        value = value + moment
    return float(value)


def values(steps, both):
    """What there is after some steps: the first `both` were made by two workers, the others by worker 0 alone."""
    v = trained(steps, lambda step: 3.0 if step < both else 1.0)
    w = trained(steps, lambda step: (step % 4) * (2.0 if step < both else 1.0))
    return [[v] * 3, [w] * 4, steps]


def go_on(job, *tasks):
    """Lets workers go on that wait in a round."""
    for task in tasks:
        job.hear(task, "at")
    job.open("go 20")


@EITHER
def test_what_is_saved_without_a_server_is_whole(tmp_path, lost):
    """Its variables come from where their copies are; another cluster, without copies, goes on from there."""
    with ProcessCluster(learn, tmp_path, (30, [20], "run"), **KEYS) as job:
        go_on(job, W0, W1)
        job.kill(lost)
        for task in (W0, W1):
            assert job.hear(task, "is") == values(15, 15)
            assert job.exited(task) == 0
    kept = {**KEYS, "replication": 0, "ps": 1, "gates": []}
    with ProcessCluster(learn, tmp_path, (0, [], "run"), **kept) as job:
        for task in (W0, W1):
            assert job.hear(task, "is") == values(15, 15)
        job.finish()


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
        grads = [
            (np.full(3, -1.0), v),
            *((np.full(size, -1.0, "float32"), each) for each in large if round == stop),
        ]
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


@EITHER
def test_a_server_is_lost_while_a_checkpoint_is_written(tmp_path, lost):
    """It dies in the middle of a file. Those that have the copies save what it was to save, as it was after the same
    round: nobody has to save again."""
    environ = dies(tmp_path, lost.index, "in a shard")
    with ProcessCluster(save_amid, tmp_path, (26, 20), servers_environ=environ, **{**KEYS, "ps": 3}) as job:
        go_on(job, W0, W1)
        for task in (W0, W1):
            assert job.hear(task, "is") is True
            assert job.exited(task) == 0
        assert job.exited(lost) == -9
    (manifest,) = tmp_path.rglob("manifest.json")
    files = {path.name for path in manifest.parent.iterdir()}
    assert files == {"manifest.json", *json.loads(manifest.read_text())["files"]}


def test_a_server_saves_several_parts_of_a_table(tmp_path):
    """Of two servers each has both; one alone saves them."""
    with ProcessCluster(save_amid, tmp_path, (22, 20), **KEYS) as job:
        go_on(job, W0, W1)
        for task in (W0, W1):
            assert job.hear(task, "is") is True
        job.finish()


def rows(rounds, stops):
    """Trains rows; waits in some rounds until the test lets it go on."""

    def at(round):
        if round in stops:
            say("at", round)
            gate(f"go {round}")

    shards = ps.experimental.partitioners.FixedShardsPartitioner(2)
    say("is", train_rows(ps.ParameterServerStrategy(devices=["cpu:0"], variable_partitioner=shards), ME, rounds, at))


def train_rows(strategy, worker, rounds, at):
    """Trains rows of a variable, of a partitioned one, and of a dynamic table whose keys come and go."""
    with strategy.scope():
        cut = ps.Variable(np.zeros((8, 2), "float32"), name="cut")
        table = ps.dynamic_embedding.get_variable("table", dim=2, admission=ps.dynamic_embedding.CounterFilter(2))
        optimizer = ps.optimizers.Adagrad(0.5)

    def step(round):
        keys = np.array([round % 8, (round + worker) % 8, 1 << 40])
        table.look_ahead(keys + 1)
        grads = [(ps.IndexedSlices(np.ones((3, 2), "float32"), keys % 8), cut)]
        found = table.lookup(keys)
        grads.append((found.gradient(np.ones(found.values.shape, "float32")), table))
        optimizer.apply_gradients(grads)
        return float(np.sum(found.values))

    found = []
    for round in range(rounds):
        at(round)
        found.append(strategy.run(step, (round,)))
    keys, values = table.export()
    order = np.argsort(keys)
    return [cut.numpy().tolist(), keys[order].tolist(), values[order].tolist(), found[:4], table.size()]


def refused(consistency):
    """A strategy whose rounds would let copies come to differ."""
    try:
        ps.ParameterServerStrategy(consistency=consistency)
    except ps.errors.ConfigError as error:
        say("refused", str(error))


@pytest.mark.parametrize("consistency", ["ps.Async()", "ps.Sync(whole_rounds=False)"])
def test_copies_need_rounds_that_are_the_same_everywhere(tmp_path, consistency):
    """Other consistencies are refused at once, with what to write instead."""
    program = f"refused({consistency})"
    with ProcessCluster(alone, tmp_path, (program,), [refused], **{**KEYS, "workers": 1, "chief": "none"}) as job:
        text = job.hear(W0, "refused")
    assert "PS_REPLICATION=1 needs rounds that have the same contributions on all servers" in text
    assert "take consistency=ps.Sync(), or set PS_REPLICATION=0" in text


def alone(program):
    """Runs a line."""
    exec(program)
