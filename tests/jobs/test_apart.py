"""Variables with a consistency of their own: updated as updates come, beside synchronous rounds."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.script import add_all
from tests.kit.workers import PATIENT, in_threads, meet


def total(*pushes):
    """All three variables after so many pushes of each worker."""
    return [[sum(count * 1000.0**worker for worker, count in enumerate(pushes))] * 4] * 3


def test_a_step_does_not_wait_for_others_where_it_need_not():
    """While one worker stands before its step, the other's asynchronous part is applied, and its own to be read; the
    synchronous part waits for both."""
    stands, goes, ended = threading.Event(), threading.Event(), threading.Barrier(2)

    def push(strategy, worker):
        with strategy.scope():
            w = ps.Variable(np.zeros(4), name="w")
            t, u = (ps.Variable(np.zeros(4), name=name, consistency=ps.Async()) for name in "tu")
        mine = np.full(4, 1000.0**worker)
        for number in range(5):
            if (worker, number) == (1, 3):
                stands.set()
                meet(goes)
            strategy.run(lambda: add_all([(t, mine), (w, mine), (u, mine)]))
            if (worker, number) == (0, 3):
                meet(stands)
                assert strategy.run(lambda: t.read_value()[0]) == 4.0 + 3 * 1000.0
                assert cluster.cores[0].status().round == 2
                goes.set()
            elif number != 3:
                strategy.run(lambda: w.read_value())
        ended.wait()
        return [v.numpy().tolist() for v in (w, t, u)]

    with InProcessCluster(2, 2, timeouts=PATIENT) as cluster:
        assert in_threads(push, cluster=cluster) == [total(5, 5)] * 2


@pytest.mark.ci
def test_a_table_is_trained_beside_dense_layers(tmp_path):
    """Everything counts once; a checkpoint has all that each worker had added before it saved, and no more; so it is
    what a restore gives back, with the counts of steps, of which a table has its own: those of all workers."""
    meeting = threading.Barrier(2)

    def train(strategy, worker):
        with strategy.scope():
            w = ps.Variable(np.zeros(4, "float32"), name="w")
            table = ps.dynamic_embedding.get_variable("table", dim=2, initializer=0, consistency=ps.Async())
            optimizer = ps.optimizers.SGD(1.0)
        checkpoint = ps.train.Checkpoint(w=w, table=table, optimizer=optimizer)

        def step(number):
            rows = table.lookup([number % 3, 5 + worker])
            pairs = [(np.ones(4, "float32"), w), (rows.gradient(np.ones((2, 2), "float32")), table)]
            optimizer.apply_gradients(pairs)

        def seen():
            return [w.numpy().tolist(), table.lookup([0, 1, 2, 5, 6]).numpy()[:, 0].tolist()]

        for number in range(9):
            strategy.run(step, (number,))
            if number == 5:
                path = checkpoint.save("run/ckpt")
        assert int(optimizer.iterations) == 9
        meeting.wait()
        assert seen() == [[-18.0] * 4, [-6.0, -6.0, -6.0, -9.0, -9.0]]
        checkpoint.restore(path).assert_consumed()
        assert seen() == [[-12.0] * 4, [-4.0, -4.0, -4.0, -6.0, -6.0]]
        assert [int(each) for each in optimizer.variables] == [6, 12]
        meeting.wait()
        strategy.run(step, (0,))
        meeting.wait()
        dense, rows = seen()
        assert dense == [-14.0] * 4
        assert rows[3 + worker] == -7.0

    in_threads(train, root=tmp_path)
