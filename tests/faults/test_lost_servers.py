"""A server is lost, and its variables have copies: the job goes on at the same round, with exact sums."""

from __future__ import annotations

import dataclasses
import json
import signal
import time

import numpy as np
import pytest

import psclient as ps
from psclient._src.processes.shutdown import SERVER_LOST
from psserver.cli import OUTLIVED
from pstesting.processes import CALM, CHIEF, PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, gate, say
from pswire.cluster import Task

PS2 = Task("ps", 2)
KEYS = {"ps": 2, "workers": 2, "chief": "driver", "replication": 1, "timeouts": CALM, "gates": ["go 20", "go 60"]}
BOTH = [PS1, PS0]


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


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_the_job_goes_on_without_a_server(tmp_path, lost):
    """It is killed while rounds are made; nobody restarts, and every round has counted once on what is left."""
    with ProcessCluster(learn, tmp_path, (120, [20]), **KEYS) as job:
        go_on(job, W0, W1)
        job.kill(lost)
        for task in (W0, W1):
            assert job.hear(task, "is") == values(60, 60)
            assert f"goes on without {lost}: was lost (nothing listens there any more" in job.errors(task)
        assert job.exited(W0) == job.exited(W1) == job.exited(CHIEF) == 0
        assert job.exited(PS0 if lost == PS1 else PS1) == 0


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_a_server_that_wakes_up_too_late_answers_nobody(tmp_path, lost):
    """It was paused for longer than a lease. The others have gone on; it is told so, and ends."""
    with ProcessCluster(learn, tmp_path, (120, [20, 60]), **{**KEYS, "timeouts": QUICK}) as job:
        go_on(job, W0, W1)
        job.pause(lost)
        for task in (W0, W1):
            job.hear(task, "at", 60)
        job.resume(lost)
        assert job.exited(lost) == OUTLIVED
        assert "ends: the job goes on without it: it was lost" in job.errors(lost)
        job.open("go 60")
        for task in (W0, W1):
            assert job.hear(task, "is") == values(60, 60)


def test_a_server_that_was_paused_for_a_moment_is_waited_for(tmp_path):
    """For less than a lease: nobody goes on without it."""
    with ProcessCluster(learn, tmp_path, (120, [20]), **KEYS) as job:
        go_on(job, W0, W1)
        job.pause(PS1)
        job.until(lambda: "does not reach" in job.errors(PS0) or job.said(W0, "at"))
        job.resume(PS1)
        for task in (W0, W1):
            assert job.hear(task, "is") == values(60, 60)
            assert "goes on without" not in job.errors(task)
        job.finish()


def test_a_server_and_its_copy(tmp_path):
    """Both are lost: everybody is told which, and ends."""
    timeouts = dataclasses.replace(QUICK, server=4.0)
    with ProcessCluster(learn, tmp_path, (40, [20]), **{**KEYS, "ps": 3, "timeouts": timeouts}) as job:
        for task in (W0, W1):
            job.hear(task, "at")
        job.kill(PS1)
        job.hear_error(CHIEF, f"goes on without {PS1}")
        job.kill(PS2)
        job.kill(PS0)
        job.open("go 20")
        for task in (W0, W1):
            job.hear_error(task, "was lost")
            assert job.exited(task) == SERVER_LOST
        assert job.exited(CHIEF) == SERVER_LOST


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_a_worker_and_a_server_are_lost_at_the_same_time(tmp_path, lost):
    """A round of the worker counts for all variables, or for none."""
    with ProcessCluster(learn, tmp_path, (120, [20]), **{**KEYS, "timeouts": QUICK}) as job:
        go_on(job, W0, W1)
        job.kill(W1)
        job.kill(lost)
        found = job.hear(W0, "is")
        assert found in [values(60, both) for both in range(9, 61)]
        assert found[2] == 60
        assert job.exited(W0) == 0


def test_who_comes_later_finds_those_that_are_left(tmp_path):
    """A worker that is started again, and a chief, after server 0 is gone."""
    with ProcessCluster(learn, tmp_path, (400, [20]), **{**KEYS, "timeouts": QUICK}) as job:
        for task in (W0, W1):
            job.hear(task, "at")
        job.kill(PS0)
        job.hear_error(W0, f"goes on without {PS0}")
        job.kill(W1)
        job.kill(CHIEF)
        job.start(CHIEF)
        job.start(W1)
        job.open("go 20")
        assert job.hear(W1, "joins") > 20
        assert job.hear(W0, "is") == job.hear(W1, "is")
        assert job.exited(W0) == job.exited(W1) == 0
        assert job.exited(CHIEF) == 0, job.errors(CHIEF)


def arrive(rounds):
    """Adds up. A worker that finds the file `later` stops between the servers on which it opens its session."""
    from psclient._src.transport.session import Session

    if (DIRECTORY / "later").exists() and ME == 1:
        opens = Session._open_next

        def held(session, index):
            say("opened", index)
            gate("on")
            return opens(session, index)

        Session._open_next = held
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        v = ps.Variable(0.0, name="v", aggregation="sum")
    say("there", 0)
    while strategy.round < rounds:
        strategy.run(lambda: v.assign_add(1.0))
        time.sleep(0.01)
    say("is", float(v.numpy()))


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_a_server_is_lost_while_a_worker_opens_its_session(tmp_path, lost):
    """Between two servers. The one that keeps the sessions now knows only the worker's dead process, which has a lease.

    The worker waits for that, and takes part.
    """
    keys = {**KEYS, "timeouts": QUICK, "gates": ["on"]}
    with ProcessCluster(arrive, tmp_path, (600,), **keys) as job:
        job.hear(W0, "there")
        job.hear(W1, "there")
        (tmp_path / "later").touch()
        job.kill(W1)
        job.start(W1)
        job.hear(W1, "opened")
        job.kill(lost)
        job.hear_error(W0, f"goes on without {lost}")
        job.open("on")
        job.hear(W1, "there")
        assert job.hear(W0, "is") == job.hear(W1, "is")
        assert job.exited(W0) == job.exited(W1) == 0


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_what_is_saved_without_a_server_is_whole(tmp_path, lost):
    """Its variables come from where their copies are; another cluster, without copies, goes on from there."""
    with ProcessCluster(learn, tmp_path, (40, [20], "run"), **KEYS) as job:
        go_on(job, W0, W1)
        job.kill(lost)
        for task in (W0, W1):
            assert job.hear(task, "is") == values(20, 20)
            assert job.exited(task) == 0
    kept = {**KEYS, "replication": 0, "ps": 1, "gates": []}
    with ProcessCluster(learn, tmp_path, (0, [], "run"), **kept) as job:
        for task in (W0, W1):
            assert job.hear(task, "is") == values(20, 20)
        job.finish()


def save_amid(rounds, stop):
    """Saves what takes a while to write, trains on, and says what is restored of it at the end."""
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        large = [ps.Variable(np.full(6_000_000, k, "float32"), name=f"large{k}") for k in range(3)]
        v = ps.Variable(np.zeros(3), name="v")
        table = ps.dynamic_embedding.get_variable("table", dim=2)
        optimizer = ps.optimizers.SGD(1.0)
    checkpoint = ps.train.Checkpoint(large=large, v=v, table=table)

    def step(round):
        grads = [
            (np.full(3, -1.0), v),
            *((np.full(6_000_000, -1.0, "float32"), each) for each in large if round == stop),
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


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_a_server_is_lost_while_a_checkpoint_is_written(tmp_path, lost):
    """Those that have the copies save what it was to save, as it was after the same round: nobody has to save again."""
    keys = {**KEYS, "ps": 3}
    with ProcessCluster(save_amid, tmp_path, (60, 20), **keys) as job, job.server(lost) as server:
        go_on(job, W0, W1)
        job.until(lambda: bool(server.status().saving))
        job.kill(lost)
        for task in (W0, W1):
            assert job.hear(task, "is") is True
            assert job.exited(task) == 0
    (manifest,) = tmp_path.rglob("manifest.json")
    files = {path.name for path in manifest.parent.iterdir()}
    assert files == {"manifest.json", *json.loads(manifest.read_text())["files"]}


def test_a_server_saves_several_parts_of_a_table(tmp_path):
    """Of two servers each has both; one alone saves them."""
    with ProcessCluster(save_amid, tmp_path, (30, 20), **KEYS) as job:
        go_on(job, W0, W1)
        for task in (W0, W1):
            assert job.hear(task, "is") is True
        job.finish()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_servers_that_are_no_neighbours(tmp_path, number):
    """Of four servers two go, one after the other; what each had lies on the next one."""
    with ProcessCluster(learn, tmp_path, (200, [20]), **{**KEYS, "ps": 4}) as job:
        go_on(job, W0, W1)
        job.kill(PS0, number)
        job.hear_error(W0, f"goes on without {PS0}")
        job.kill(PS2, number)
        for task in (W0, W1):
            assert job.hear(task, "is") == values(100, 100)
            assert job.exited(task) == 0


def rows(rounds, stops):
    """Trains rows of a variable, of a partitioned one, and of a dynamic table whose keys come and go.

    Waits in some rounds until the test lets it go on.
    """
    strategy = ps.ParameterServerStrategy(
        devices=["cpu:0"], variable_partitioner=ps.experimental.partitioners.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        cut = ps.Variable(np.zeros((8, 2), "float32"), name="cut")
        table = ps.dynamic_embedding.get_variable("table", dim=2, admission=ps.dynamic_embedding.CounterFilter(2))
        optimizer = ps.optimizers.Adagrad(0.5)

    def step(round):
        keys = np.array([round % 8, (round + ME) % 8, 1 << 40])
        table.look_ahead(keys + 1)
        grads = [(ps.IndexedSlices(np.ones((3, 2), "float32"), keys % 8), cut)]
        found = table.lookup(keys)
        grads.append((found.gradient(np.ones(found.values.shape, "float32")), table))
        optimizer.apply_gradients(grads)
        return float(np.sum(found.values))

    found = []
    for round in range(rounds):
        if round in stops:
            say("at", round)
            gate(f"go {round}")
        found.append(strategy.run(step, (round,)))
    keys, values = table.export()
    order = np.argsort(keys)
    say("is", [cut.numpy().tolist(), keys[order].tolist(), values[order].tolist(), found[:4], table.size()])


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_rows_and_tables_have_copies(tmp_path, lost):
    """Without a server everything is, bit for bit, as it is in a cluster that has lost none."""
    found = []
    for number, killed in enumerate((None, lost)):
        directory = tmp_path / str(number)
        directory.mkdir()
        with ProcessCluster(rows, directory, (40, [20]), **{**KEYS, "replication": int(killed is not None)}) as job:
            go_on(job, W0, W1)
            if killed is not None:
                job.kill(killed)
            found.append([job.hear(task, "is") for task in (W0, W1)])
            assert job.exited(W0) == job.exited(W1) == 0
    assert found[0] == found[1]


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
