"""Asynchronous workers as real processes: nobody waits, every push counts once, whoever dies."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CALM, PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say


def push_alone(rounds, stops):
    """Contributions are powers of 1000, so that a sum's digits count pushes by worker. Says which were answered."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    say("replicas", strategy.num_replicas_in_sync)
    while strategy.round < rounds:
        if [ME, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"go{ME}")
        strategy.run(lambda: add_all([(v, np.full(4, 1000.0**ME)), (u, np.full(4, 1000.0**ME))]))
        say("did", strategy.round - 1)
    say("done", strategy.round)
    gate("end")
    say("sums", [v.numpy().tolist(), u.numpy().tolist()])


def total(*pushes):
    """What both variables are after so many pushes of each worker."""
    return [[sum(count * 1000.0**worker for worker, count in enumerate(pushes))] * 4] * 2


def test_the_slow_do_not_hold_up_the_fast(tmp_path):
    """One does all its rounds while the other stands; at the end every push of both has been counted once."""
    keys = {"ps": 2, "workers": 2, "gates": ["go1", "end"], "timeouts": CALM}
    with ProcessCluster(push_alone, tmp_path, (60, [[1, 5]]), **keys) as job:
        job.hear(W1, "at", 5)
        job.hear(W0, "done", 60)
        assert job.said(W1, "did") == list(range(5))
        job.open("go1")
        job.hear(W1, "done", 60)
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sums") == total(60, 60)
            assert job.said(task, "replicas") == [1]
        job.finish()


def test_a_killed_worker_holds_nobody_up_and_goes_on_where_it_was(tmp_path):
    """The other does not notice; started again, it makes the rounds that it had left, and no other twice."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["go1", "end"], "timeouts": QUICK}
    with ProcessCluster(push_alone, tmp_path, (40, [[1, 7]]), **keys) as job:
        job.hear(W1, "at", 7)
        job.kill(W1)
        job.open("go1")  # it may come to the same stop again
        job.hear(W0, "done", 40)
        job.start(W1)
        job.hear(W1, "done", 40)
        assert job.said(W1, "did") == list(range(40))
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sums") == total(40, 40)
        assert "is complete without" not in job.errors(W0)
        job.finish()


def test_a_worker_that_was_thought_dead_is_told(tmp_path):
    """What it sends after its lease has ended does not count; what was answered before does."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["go1", "end"], "timeouts": QUICK}
    with (
        ProcessCluster(push_alone, tmp_path, (40, [[1, 7]]), **keys) as job,
        job.server(PS0) as first,
        job.server(PS1) as second,
    ):
        job.hear(W1, "at", 7)
        job.kill(W1, signal.SIGSTOP)
        job.hear(W0, "done", 40)
        for server in (first, second):  # the chief tells the second, a moment after the first knows
            job.until(lambda server=server: [one.task for one in server.status().epoch.members] == [W0])
        job.open("go1")
        job.kill(W1, signal.SIGCONT)
        assert job.exited(W1) == 1
        assert "this session was ended" in job.errors(W1)
        job.open("end")
        assert job.hear(W0, "sums") == total(40, 7)
        assert job.exited(W0) == 0


@pytest.mark.soak
def test_a_worker_dies_again_and_again(tmp_path):
    """What was answered counts once; of what was under way at a death each server counts all or nothing."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["end"], "timeouts": QUICK}
    with ProcessCluster(push_alone, tmp_path, (600, []), **keys) as job:
        for round in (40, 200, 360):
            job.hear(W1, "did", round)
            job.kill(W1)
            job.start(W1)
        job.hear(W1, "done", 600)
        job.hear(W0, "done", 600)
        job.open("end")
        sums = job.hear(W0, "sums")
        job.finish()
        answered = job.said(W1, "did")
        assert len(set(answered)) == len(answered)
        for value, *others in sums:
            assert others == [value] * 3
            assert value % 1000 == 600
            assert len(answered) <= value // 1000 <= 600
        assert len(answered) >= 597


def learn_alone(rows, batch, stops):
    """Adds up all rows of a dataset that the workers share; says which it took."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        v = ps.Variable(np.zeros(()), name="v")
    dataset = ps.ArrayDataset(np.arange(float(rows))).shuffle(3).batch(batch)
    for mine in strategy.experimental_distribute_dataset(dataset):
        if [ME, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"go{ME}")
        strategy.run(lambda mine=mine: add_all([(v, mine.sum())]))
        say("took", mine)
    say("done", strategy.round)
    gate("end")
    say("sum", float(v.numpy()))


def test_every_example_counts_once(tmp_path):
    """Also where a worker dies with a batch in its hands: started again, it takes that batch first."""
    keys = {"workers": 2, "chief": "driver", "gates": ["go1", "end"], "timeouts": QUICK}
    with ProcessCluster(learn_alone, tmp_path, (120, 8, [[1, 4]]), **keys) as job:
        job.hear(W1, "at", 4)
        job.kill(W1)
        job.hear(W0, "done", 15)
        job.start(W1)
        job.open("go1")
        job.hear(W1, "done", 15)
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sum") == sum(range(120))
        taken = [row for task in (W0, W1) for rows in job.said(task, "took") for row in rows]
        assert sorted(taken) == list(range(120))
        job.finish()


def restore_alone(directory):
    """Worker 0 restores, and pushes; the other restores later."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        v = ps.Variable(np.zeros(()), name="v")
    checkpoint = ps.train.Checkpoint(v=v)
    if ME:
        gate("go1")
    try:
        say("restored", checkpoint.restore(directory).restored)
    except ps.errors.NoCheckpoint:
        say("restored", None)
    strategy.run(lambda: add_all([(v, 10.0**ME)]))
    say("pushed", float(v.numpy()))
    gate("end")
    say("value", float(v.numpy()))


def test_who_restores_late_undoes_nothing(tmp_path):
    """The first process says whether there was a checkpoint; what it has pushed since stays."""
    with ProcessCluster(restore_alone, tmp_path, ("run",), workers=2, gates=["go1", "end"]) as job:
        assert job.hear(W0, "pushed") == 1.0
        job.open("go1")
        assert job.hear(W1, "pushed") == 11.0
        job.open("end")
        for task in (W0, W1):
            assert job.said(task, "restored") == [None]
            assert job.hear(task, "value") == 11.0
        job.finish()


def test_all_processes_have_one_consistency(tmp_path):
    """Who has another is told so, with both tasks, and does not begin."""

    def differ():
        if ME:
            gate("go1")
        ps.ParameterServerStrategy(consistency=[ps.Sync(), ps.Async()][ME])
        say("open")
        gate("end")

    with ProcessCluster(differ, tmp_path, (), workers=2, gates=["go1", "end"]) as job:
        job.hear(W0, "open")
        job.open("go1")
        assert job.exited(W1) == 2
        words = (
            f"{W1} runs with ps.Async(), and {W0} with ps.Sync(); give every process of the job the same consistency"
        )
        assert words in job.errors(W1)


def test_local_replicas_make_a_push_together():
    """In one process: replicas are counted from 0, a mean is over theirs, and reads see what was pushed."""
    with ps.ParameterServerStrategy(["cpu:0", "cpu:1"], consistency=ps.Async()) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(2), name="v")

        def step():
            context = ps.get_replica_context()
            seen = v.numpy()
            add_all([(v, np.full(2, 1.0 + context.replica_id_in_sync_group))])
            return seen, v.numpy()

        assert strategy.num_replicas_in_sync == 2
        for turn in range(3):
            before, after = strategy.run(step)
            for seen in strategy.experimental_local_results(before):
                assert seen.tolist() == [3.0 * turn] * 2
            for seen in strategy.experimental_local_results(after):
                assert seen.tolist() == [3.0 * turn + 3.0] * 2
        ids = strategy.run(lambda: np.float64(ps.get_replica_context().replica_id_in_sync_group))
        assert float(strategy.reduce("mean", ids, None)) == 0.5
