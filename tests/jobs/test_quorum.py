"""A quorum in real jobs: workers in threads, over real connections."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

import psclient as ps
from pstesting.script import add_all
from tests.kit.workers import in_threads, meet, total


@pytest.mark.parametrize("environ", [{}, {"PS_REPLICATION_FACTOR": "2"}], ids=["", "copies"])
def test_late_contributions_of_a_job_count_once(monkeypatch, environ):
    """One worker stands still while the others make nearly all rounds; then it makes its own."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
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


def test_a_quorum_is_at_most_the_number_of_workers():
    """Else no round would have it: it is refused before anything is connected, as what needs all workers is."""
    with pytest.raises(ps.errors.ConfigError, match=re.escape("ps.Quorum(size=2) needs at least 2 workers, but the")):
        ps.ParameterServerStrategy(consistency=ps.Quorum(2))
    spec = ps.ClusterSpec({"ps": ["127.0.0.1:1"], "worker": ["a:1", "b:1"]})
    resolver = ps.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    with pytest.raises(ps.errors.ConfigError, match="needs at least 3 workers, but the cluster has 2; use a smaller"):
        ps.ParameterServerStrategy(consistency=ps.Quorum(3), cluster_resolver=resolver)
    with pytest.raises(ps.errors.ConfigError, match="late ones are merged into the next round"):
        ps.ParameterServerStrategy(consistency=ps.Quorum(1), deterministic=True)


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


def test_workers_with_different_quorums_are_refused():
    """The one that comes second names both."""
    both = re.compile(r"runs with ps\.Quorum\(\d, grace=0\), but .* with ps\.Quorum\(\d, grace=0\); give every")
    with pytest.raises(ps.errors.ConfigError, match=both):
        in_threads(
            lambda strategy, worker: strategy.barrier(), 2, 1, each=[{"consistency": ps.Quorum(n)} for n in (1, 2)]
        )
