"""Placement in real jobs: the same in every process, whatever died; within memory limits; of no matter to a restore."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.processes import CHIEF, W0, W1, ProcessCluster
from pstesting.script import add_all, gate, say
from tests.kit.workers import in_threads

STRATEGIES = ("greedy", "round_robin")


def grow():
    """Variables with slots, a gate, more variables, and a round on both servers."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        variables = [ps.Variable(np.zeros(size), name=f"v{size}") for size in (90, 3, 2, 4)]
        ps.optimizers.Adam().build(variables)
        say("built", [v.place for v in variables])
        gate("more")
        more = [ps.Variable(np.ones(size), name=f"v{size}") for size in (200, 60, 30)]
    say("placed", [v.place for v in more])
    strategy.run(lambda: add_all([(v, np.ones(v.shape)) for v in more]))


def test_places_outlive_the_chief_and_a_worker(tmp_path):
    """A worker that comes back places what it creates next where the others do; slot variables count."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["more"]}
    with ProcessCluster(grow, tmp_path, **keys) as job:
        for task in (W0, W1):
            assert job.hear(task, "built") == [[0], [1], [1], [1]]
        for task in (CHIEF, W1):
            job.kill(task)
            job.start(task)
        assert job.hear(W1, "built") == [[0], [1], [1], [1]]
        job.open("more")
        for task in (W0, W1):
            # With slots server 0 holds 270 numbers, server 1 holds 27; then 227, then 287.
            assert job.hear(task, "placed") == [[1], [1], [0]]
        job.finish()


def test_processes_that_place_otherwise_are_told():
    """Whoever comes second to the first variable that differs, with both places."""

    def disagree(strategy, worker):
        try:
            with strategy.scope():
                for size in (10, 1, 1):
                    ps.Variable(np.zeros(size))
        except ps.errors.VariableMismatch as error:
            return str(error)
        return ""

    told = in_threads(disagree, each=[{"ps_strategy": name} for name in ("greedy", "round_robin")])
    (message,) = filter(None, told)
    assert all(word in message for word in ("(0,)", "(1,)", str(W0), str(W1), "ps_strategy"))


@pytest.mark.soak
def test_a_checkpoint_does_not_know_places(tmp_path):
    """It comes back bit by bit on any number of servers, placed anyhow, slots and step count included."""

    def keep(strategy, worker):
        with strategy.scope():
            checkpoint = ps.train.Checkpoint()
            variables = [ps.Variable(np.full(size, 1.0), name=f"v{size}") for size in (90, 3, 2, 4, 7)]
            optimizer = ps.optimizers.Adam(0.1)
            optimizer.build(variables)
            checkpoint.variables, checkpoint.optimizer = variables, optimizer
        if (tmp_path / "run").exists():
            checkpoint.restore("run")
        else:
            for _ in range(2):
                strategy.run(optimizer.apply_gradients, args=([(v.numpy() * 2.0, v) for v in variables],))
            checkpoint.save("run/ckpt")
        with strategy.scope():
            return [v.place for v in variables], [v.numpy().tolist() for v in [*variables, *optimizer.variables]]

    clusters = [(2, "greedy"), (3, "round_robin"), (1, "greedy")]
    found = [in_threads(keep, 1, servers, root=tmp_path, ps_strategy=name)[0] for servers, name in clusters]
    places, values = zip(*found, strict=True)
    # The number of checkpoints, which `Checkpoint` keeps on server 0, is there before the first variable.
    assert [[list(place) for place in each] for each in places] == [
        [[1], [0], [0], [0], [0]], [[0], [1], [2], [0], [1]], [[0]] * 5
    ]  # fmt: skip
    assert values[0] == values[1] == values[2]
    assert values[0][0] != [1.0] * 90


@pytest.mark.parametrize("ps_strategy", STRATEGIES)
def test_a_full_server_is_passed_over(ps_strategy):
    """What does not fit on one goes to another, by either strategy; what fits on none is refused, with the limit."""
    with InProcessCluster(2) as cluster:
        for core in cluster.cores:
            core.machine.store.memory_limit = 8000
        options = {"cluster_resolver": cluster.resolver(), "ps_strategy": ps_strategy}
        with ps.ParameterServerStrategy(**options) as strategy, strategy.scope():
            made = [ps.Variable(np.zeros(size), name=f"v{size}") for size in (800, 500, 400, 150, 100)]
            assert [v.place for v in made] == [(0,), (1,), (1,), (0,), (1,)]
            with pytest.raises(ps.errors.MemoryLimit) as refused:
                ps.Variable(np.zeros(101), name="v101")
            assert float(ps.Variable(7.0)) == 7.0
    assert all(word in str(refused.value) for word in ("v101", "808 bytes", "--memory-limit", "/job:ps/task:"))
