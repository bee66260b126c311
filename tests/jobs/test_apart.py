"""Variables with a consistency of their own as real processes: updated as updates come, beside synchronous rounds."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CALM, PS0, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from pswire.server_options import ServerOptions


def push_both(rounds, stop):
    """Each step adds to a synchronous and to an asynchronous variable; digits of a sum count pushes by worker."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(4), name="w")
        t = ps.Variable(np.zeros(4), name="t", consistency=ps.Async())
        u = ps.Variable(np.zeros(4), name="u", consistency=ps.Async())
    mine = np.full(4, 1000.0**ME)
    for number in range(rounds):
        if [ME, number] == stop:
            say("at", number)
            gate("go")
        strategy.run(lambda: add_all([(t, mine), (w, mine), (u, mine)]))
        say("sent", number)
        say("t", float(strategy.run(lambda: t.read_value()[0])))
        strategy.run(lambda: w.read_value())
    say("done", strategy.round)
    gate("end")
    say("sums", [v.numpy().tolist() for v in (w, t, u)])


def total(*pushes):
    return [sum(count * 1000.0**worker for worker, count in enumerate(pushes))] * 4


def test_a_step_does_not_wait_for_others_where_it_need_not(tmp_path):
    """While one worker stands before its step, the other's asynchronous part is applied, and its own to be read; the
    synchronous part waits for both."""
    keys = {"ps": 2, "workers": 2, "gates": ["go", "end"], "timeouts": CALM}
    with ProcessCluster(push_both, tmp_path, (6, [1, 3]), **keys) as job:
        job.hear(W1, "at", 3)
        assert job.hear(W0, "sent", 3) == 3
        assert job.hear(W0, "t") // 1 == 4.0 + 3 * 1000.0
        with job.server(PS0) as server:
            assert server.status().round == 2
        job.open("go")
        for task in (W0, W1):
            assert job.hear(task, "done") == 6
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sums") == [total(6, 6)] * 3
        job.finish()


def train(steps, directory, stop):
    """Trains a dense layer and a dynamic table together; saves in the middle, and restores what was saved there."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(4, "float32"), name="w")
        table = ps.dynamic_embedding.get_variable("table", dim=2, initializer=0, consistency=ps.Async())
        optimizer = ps.optimizers.SGD(1.0)
    checkpoint = ps.train.Checkpoint(w=w, table=table, optimizer=optimizer)

    def step(number):
        rows = table.lookup([number % 3, 5 + ME])
        pairs = [(np.ones(4, "float32"), w), (rows.gradient(np.ones((2, 2), "float32")), table)]
        optimizer.apply_gradients(pairs)

    def told():
        return [w.numpy().tolist(), table.lookup([0, 1, 2, 5, 6]).numpy()[:, 0].tolist()]

    for number in range(steps):
        strategy.run(step, (number,))
        if number == stop:
            path = checkpoint.save(directory)
    say("counts", [int(each) for each in optimizer.variables])
    gate("end")
    say("after", told())
    checkpoint.restore(path).assert_consumed()
    say("restored", told())
    say("counted", [int(each) for each in optimizer.variables])
    gate("more")
    strategy.run(step, (0,))
    gate("over")
    say("more", told())


def test_a_table_is_trained_beside_dense_layers(tmp_path):
    """Everything counts once; a checkpoint has all that each worker had added before it saved, and no more; so it is
    what a restore gives back, with the counts of steps, of which a table has its own: those of all workers."""
    keys = {"ps": 2, "workers": 2, "gates": ["end", "more", "over"], "timeouts": CALM}
    with ProcessCluster(train, tmp_path, (9, "run/ckpt", 5), **keys) as job:
        for task in (W0, W1):
            assert job.hear(task, "counts")[0] == 9
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "after") == [[-18.0] * 4, [-6.0, -6.0, -6.0, -9.0, -9.0]]
            assert job.hear(task, "restored") == [[-12.0] * 4, [-4.0, -4.0, -4.0, -6.0, -6.0]]
            assert job.hear(task, "counted") == [6, 12]
        job.open("more")
        job.open("over")
        for task in (W0, W1):
            w, rows = job.hear(task, "more")
            assert w == [-14.0] * 4
            assert rows[3 + task.index] == -7.0
        job.finish()


def skip():
    """Worker 1 contributes NaN in one of its steps, to a variable of each kind."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Sync(nonfinite="skip"))
    with strategy.scope():
        w = ps.Variable(np.zeros(2), name="w")
        t = ps.Variable(np.zeros(2), name="t", consistency=ps.Async(nonfinite="skip"))
    for number in range(4):
        bad = ME == 1 and number == 2
        mine = np.full(2, np.nan if bad else 1000.0**ME)
        strategy.run(lambda mine=mine: add_all([(t, mine), (w, mine)]))
    say("added", [v.numpy().tolist() for v in (w, t)])
    gate("end")
    say("sums", [w.numpy().tolist(), t.numpy().tolist()])


def test_a_round_is_skipped_by_itself(tmp_path):
    """That of all where anybody's contribution is not finite; of a worker's own rounds only its own."""
    keys = {"ps": 1, "workers": 2, "gates": ["end"], "timeouts": CALM}
    with ProcessCluster(skip, tmp_path, (), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "added")
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sums") == [[3003.0] * 2, [3004.0] * 2]
        job.finish()


def test_processes_that_differ_are_told(tmp_path):
    """One creates the variable with the consistency of all: then updates of one would wait for those of the other."""

    def differ():
        strategy = ps.ParameterServerStrategy()
        if ME:
            gate("go")
        with strategy.scope():
            v = ps.Variable(np.zeros(2), name="v", consistency=None if ME else ps.Async())
        say("has", v.alone)
        v.numpy()
        say("created")
        gate("end")

    with ProcessCluster(differ, tmp_path, (), workers=2, gates=["go", "end"], timeouts=CALM) as job:
        job.hear(W0, "created")
        job.open("go")
        assert job.exited(W1) != 0
        assert "'v' float64[2] with ps.Async()" in job.errors(W1)


def change(rounds):
    """The job becomes asynchronous, and synchronous again; one variable is asynchronous all the time."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(2), name="w")
        t = ps.Variable(np.zeros(2), name="t", consistency=ps.Async())
    mine = np.full(2, 1000.0**ME)
    for consistency in (ps.Async(), ps.Sync(), ps.Async(), ps.Sync()):
        for _ in range(rounds):
            strategy.run(lambda: add_all([(t, mine), (w, mine)]))
        strategy.set_consistency(consistency)
        say("sums", [v.numpy().tolist() for v in (w, t)])
        float(strategy.reduce("sum", 1.0, axis=None))  # where all wait for each other, nobody adds before all have read
    say("round", strategy.round)


def test_a_job_that_changes_its_consistency(tmp_path):
    """At a change everybody has all that was added, to variables of both kinds; so it is after the way back."""
    with ProcessCluster(change, tmp_path, (5,), ps=2, workers=2, timeouts=CALM) as job:
        job.finish()
        for task in (W0, W1):
            told = job.said(task, "sums")
            # Where each goes on by itself the other may have gone on already.
            assert [told[1], told[3]] == [[[5005.0 * k] * 2] * 2 for k in (2, 4)]
            assert job.said(task, "round") == [24]


def push_large(steps, length):
    """Large contributions to variables of each kind on two servers, of which none waits for the other."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        shared = [ps.Variable(np.zeros(length), name=f"w{n}") for n in range(2)]
        apart = [ps.Variable(np.zeros(length), name=f"t{n}", consistency=ps.Async()) for n in range(2)]
    mine = np.full(length, 1000.0**ME)
    for _ in range(steps):
        strategy.run(lambda: add_all([(v, mine) for v in (*apart, *shared)]))
    say("added", [float(v.numpy()[0]) for v in (*shared, *apart)])
    gate("end")
    values = [v.numpy() for v in (*shared, *apart)]
    say("alike", all(bool((value == value[0]).all()) for value in values))
    say("sums", [float(value[0]) for value in values])


@pytest.mark.parametrize("lane", ["shm", "tcp", "grpc"])
def test_large_rounds_of_both_kinds_share_a_lane(tmp_path, lane):
    """What streams has room beside what is taken in whole, also where a server takes in little at a time."""
    server = ServerOptions(in_flight="16MiB")
    keys = {"ps": 2, "workers": 2, "gates": ["end"], "timeouts": CALM, "lane": lane, "server": server}
    with ProcessCluster(push_large, tmp_path, (5, 3 << 19), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "added")
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "alike")
            assert job.hear(task, "sums") == [5005.0] * 4
        job.finish()


def shares(rows, batch, stop):
    """Adds the rows of a dataset to a variable of each kind."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(()), name="w")
        t = ps.Variable(np.zeros(()), name="t", consistency=ps.Async())
    dataset = ps.ArrayDataset(np.arange(float(rows))).batch(batch)
    for mine in strategy.experimental_distribute_dataset(dataset):
        if [ME, strategy.round] == stop:
            say("at", strategy.round)
            gate("go")
        if [ME, strategy.round] == [0, 10]:
            gate("on")
        strategy.run(lambda mine=mine: add_all([(t, mine.sum()), (w, mine.sum())]))
        strategy.run(lambda: t.read_value())
        say("took", mine)
        w.numpy()
        say("made", strategy.round)
    say("over")
    gate("end")
    say("sums", [float(w.numpy()), float(t.numpy())])


def test_who_comes_back_amid_a_pass(tmp_path):
    """It is taken in before a batch, with the others' numbers of rounds, and with numbers of its own for the rest."""
    keys = {"workers": 2, "chief": "driver", "gates": ["go", "on", "end"], "timeouts": QUICK}
    with ProcessCluster(shares, tmp_path, (600, 8, [1, 3]), **keys) as job, job.server(PS0) as server:

        def sessions():
            return {member.session for member in server.status().epoch.members if member.task == W1}

        job.hear(W1, "at", 3)
        before = sessions()
        job.kill(W1)
        job.open("go")
        job.start(W1)
        job.until(lambda: sessions() - before)
        job.open("on")  # worker 0 goes on when the other one is a member again
        job.hear(W1, "took")
        for task in (W0, W1):
            job.hear(task, "over")
        job.open("end")
        for task in (W0, W1):
            w, t = job.hear(task, "sums")
            taken = [row for each in (W0, W1) for rows in job.said(each, "took") for row in rows]
            assert len(set(taken)) == len(taken)
            assert t == w == sum(taken)
        job.finish()
