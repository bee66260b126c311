"""A quorum in real jobs: workers in threads, over real connections."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from pstesting.script import add_all
from tests.kit.workers import in_threads, meet, total


@pytest.mark.parametrize("copies", [1, 2])
def test_late_contributions_of_a_job_count_once(environ, copies):
    """One worker stands still while the others make nearly all rounds; then it makes its own."""
    environ["PS_REPLICATION_FACTOR"] = str(copies)
    over = threading.Event()

    def work(strategy, worker):
        with strategy.scope():
            v, u = (ps.Variable(np.zeros(4), name=name) for name in "vu")
        behind = 0
        for number in range(10):
            if (worker, number) == (2, 3):
                meet(over)
            mine = np.full(4, 1000.0**worker)
            strategy.run(lambda mine=mine: add_all([(v, mine), (u, mine)]))
            if worker == 2:
                v.numpy()
                behind = max(behind, strategy.last_round.behind)
            elif number == 9:
                u.numpy()
                over.set()
        for _ in range(2):  # all are there, then one round has what is late, and all have seen that
            strategy.reduce("sum", 0.0, axis=None)
            strategy.run(lambda: add_all([(v, np.zeros(4)), (u, np.zeros(4))]))
        strategy.reduce("sum", 0.0, axis=None)
        return [v.numpy().tolist(), u.numpy().tolist()], behind

    found = in_threads(work, 3, 2, consistency=ps.Quorum(2))
    assert [sums for sums, _ in found] == [total(10, 10, 10)] * 3
    assert found[0][1] == found[1][1] == 0 < found[2][1]


SPEC = ps.ClusterSpec({"ps": ["127.0.0.1:1"], "worker": ["a:1", "b:1"]})
OF_TWO = {"cluster_resolver": ps.SimpleClusterResolver(SPEC, task_type="worker", task_id=0)}


@pytest.mark.parametrize(
    ("consistency", "options", "words"),
    [
        (ps.Quorum(2), {}, r"ps.Quorum\(size=2\) needs at least 2 workers, but the"),
        (ps.Quorum(3), OF_TWO, "needs at least 3 workers, but the cluster has 2; use a smaller"),
        (ps.Quorum(1), {"deterministic": True}, "late ones are merged into the next round"),
        (ps.Sync(backup_workers=1), {}, "needs more than 1 workers, but the cluster has 1; use a smaller"),
        (ps.Sync(backup_workers=2), OF_TWO, "needs more than 2 workers, but the cluster has 2"),
        (ps.Sync(backup_workers=1), {"deterministic": True}, "with backup_workers the slowest are excluded"),
    ],
)
def test_rounds_need_enough_workers(consistency, options, words):
    """Else no round would be made: it is refused before anything is connected, as what needs all workers is."""
    with pytest.raises(ps.errors.ConfigError, match=words):
        ps.ParameterServerStrategy(consistency=consistency, **options)


@pytest.mark.parametrize("before", [ps.Quorum(1), ps.Sync()], ids=str)
def test_no_change_begins_or_ends_a_quorum(before):
    """What is late would wait for a round that is not made any more. A change to the same value is none."""
    with ps.ParameterServerStrategy(consistency=before) as strategy:
        for after in (ps.Quorum(1), ps.Sync(), ps.Quorum(1, grace=2)):
            if after == before:
                strategy.set_consistency(after)
            elif isinstance(after, ps.Quorum) or isinstance(before, ps.Quorum):
                with pytest.raises(ps.errors.ConfigError, match=r"cannot begin or end ps\.Quorum"):
                    strategy.set_consistency(after)
        assert strategy.consistency == before
