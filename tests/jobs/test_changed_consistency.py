"""A running job changes its consistency, between rounds, with the same variables and sessions, whoever is lost then."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import psclient as ps
from pstesting import InProcessCluster
from pstesting.processes import CHIEF, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit.workers import PATIENT, in_threads, total

ROAD = (
    (ps.Sync(), 5),
    (ps.Async(), 7),
    (ps.Sync(), 4),
    (ps.BoundedStaleness(2), 6),
    (ps.BoundedStaleness(0), 5),
    (ps.Sync(backup_workers=1), 0),
    (ps.Async(nonfinite="skip"), 3),
    (ps.Sync(nonfinite="skip"), 5),
)


def phases(strategy, worker, road):
    """Makes rounds with one consistency after the other; digits of a sum count contributions by worker.

    Each phase goes on up to a round of its own. Returns what it reads after each change, how many rounds it made, and
    what it reads at the end.
    """
    with strategy.scope():
        v, u = (ps.Variable(np.zeros(4), name=name) for name in "vu")
    mine, rounds, changes = np.full(4, 1000.0**worker), 0, []
    for consistency, more in road:
        strategy.set_consistency(consistency)
        changes.append((strategy.round, [v.numpy().tolist(), u.numpy().tolist()], strategy.num_replicas_in_sync))
        until = strategy.round + more
        while strategy.round < until:
            strategy.run(lambda: add_all([(v, mine), (u, mine)]))
            rounds += 1
    strategy.set_consistency(ps.Sync())
    assert strategy.consistency == ps.Sync()
    return changes, rounds, [v.numpy().tolist(), u.numpy().tolist()]


def test_each_contribution_counts_once_on_the_whole_road():
    """From synchronous to asynchronous rounds and back, to staleness that is bounded, to another bound, and back."""
    made = sum(count for _, count in ROAD)
    for changes, rounds, sums in in_threads(lambda *one: phases(*one, ROAD), workers=3):
        assert rounds == made
        assert sums == total(*[rounds] * 3)
        # Whoever reads after a change to synchronous rounds reads what all have pushed; and all count on together.
        for place, ((consistency, _), (number, values, replicas)) in enumerate(zip(ROAD, changes, strict=True)):
            before, together = sum(count for _, count in ROAD[:place]), isinstance(consistency, ps.Sync)
            assert number == before
            assert replicas == (3 if together else 1)
            assert not together or values == total(*[before] * 3)


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_pass_gives_each_example_once(dynamic):
    """Whichever consistency it has: its batches are shared, or handed out, by the one of its beginning."""
    plan = (ps.Sync(), ps.Async(), ps.Sync(), ps.BoundedStaleness(1), ps.Sync(backup_workers=1))

    def passes(strategy, worker):
        with strategy.scope():
            seen = ps.Variable(np.zeros(12, "int64"), name="seen", aggregation=ps.VariableAggregation.SUM)
        dataset, found = ps.ArrayDataset(np.arange(12)).batch(4), []
        batches = strategy.experimental_distribute_dataset(dataset)
        for consistency in plan:
            strategy.set_consistency(consistency)
            if dynamic and not isinstance(consistency, ps.Sync):
                options = ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC)
                batches = strategy.experimental_distribute_dataset(dataset, options)
            for batch in batches:
                strategy.run(lambda batch: seen.assign_add(np.bincount(batch, minlength=12)), (batch,))
            strategy.set_consistency(ps.Sync())
            found.append(seen.numpy().tolist())
            batches = batches if not dynamic else strategy.experimental_distribute_dataset(dataset)
        return found

    assert in_threads(passes) == [[[count + 1] * 12 for count in range(len(plan))]] * 2


@pytest.mark.parametrize(
    ("first", "others", "words"),
    [
        (ps.Sync(), "another", ("ps.BoundedStaleness(1)", "ps.BoundedStaleness(2)", str(W0), str(W1))),
        (ps.Sync(), "rounds", ("ps.BoundedStaleness(1)", "before round 1", f"{W1} runs round 1 first")),
        (ps.Async(), "rounds", ("ps.BoundedStaleness(1)", "PS_ROUND_TIMEOUT", f"{W1} did not")),
    ],
)
def test_who_does_not_make_the_change_is_named(first, others, words):
    """In every process, and none hangs; who makes rounds of its own has as long as a round may take."""

    def differ(strategy, worker):
        with strategy.scope():
            v = ps.Variable(np.zeros(3), name="v")
        strategy.run(lambda: add_all([(v, np.ones(3))]))
        try:
            if worker == 0 or others == "another":
                strategy.set_consistency(ps.BoundedStaleness(1 + worker))
            while True:
                strategy.run(lambda: add_all([(v, np.ones(3))]))
                v.numpy()
                time.sleep(0.2)
        except ps.errors.Diverged as error:
            return str(error)

    timeouts = PATIENT if first == ps.Sync() else replace(PATIENT, session_timeout=2.0, round_timeout=6.0)
    with InProcessCluster(2, 2, timeouts=timeouts) as cluster:
        for told in in_threads(differ, cluster=cluster, consistency=first, timeouts=timeouts):
            assert all(word in told for word in words), told


# ---- With one process ----


@pytest.fixture
def strategy():
    """On a server of this process."""
    with (
        InProcessCluster(servers=2) as cluster,
        ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as made,
    ):
        yield made


def test_a_change_is_made_between_rounds(strategy):
    """Not in a replica's function, nor where replicas have met, nor amid a pass; afterwards it can be made."""
    where = "between steps, in cross-replica context"

    def merges():
        ps.get_replica_context().merge_call(lambda strategy: strategy.set_consistency(ps.Async()))

    for function in (lambda: strategy.set_consistency(ps.Async()), merges):
        with pytest.raises(RuntimeError, match=where):
            strategy.run(function)
    for _ in strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(4)).batch(2)):
        with pytest.raises(RuntimeError, match=r"during a pass over dataset 0.*between two passes"):
            strategy.set_consistency(ps.Async())
    with pytest.raises(TypeError, match="is not a consistency"):
        strategy.set_consistency("async")
    with pytest.raises(ps.errors.ConfigError, match="backup_workers=1 needs more than 1"):
        strategy.set_consistency(ps.Sync(backup_workers=1))
    with (
        ps.ParameterServerStrategy(deterministic=True) as other,
        pytest.raises(ps.errors.ConfigError, match="deterministic=True needs rounds of all workers"),
    ):
        other.set_consistency(ps.Async())
    assert strategy.consistency == ps.Sync()
    strategy.set_consistency(ps.Async())
    with strategy.scope():
        strategy.set_consistency(ps.BoundedStaleness(0))
    assert strategy.consistency == ps.BoundedStaleness(0)


def test_what_was_recorded_before_a_change_counts_before_it(strategy):
    """A variable is created, assigned and read on either side of changes, as without them."""
    with strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
        v.assign_add(np.ones(3))
        strategy.set_consistency(ps.Async())
        u = ps.Variable(np.zeros(3), name="u")
        assert v.numpy().tolist() == [1.0] * 3
        u.assign(v.read_value() + 1.0)
    strategy.set_consistency(ps.Sync())
    assert u.numpy().tolist() == [2.0] * 3
    assert strategy.round >= 2


def test_nonfinite_values_are_treated_as_the_change_says(strategy):
    """An optimizer's step is not replayed as it was recorded before."""
    with strategy.scope():
        v = ps.Variable(np.zeros(2), name="v")
        optimizer = ps.optimizers.SGD(1.0)

    def step(value):
        strategy.run(lambda: optimizer.apply_gradients([(np.array([value, 0.0]), v)]))
        return v.numpy().tolist()

    assert [step(-1.0), step(-1.0)] == [[1.0, 0.0], [2.0, 0.0]]
    strategy.set_consistency(ps.Sync(nonfinite="skip"))
    assert [step(np.nan), step(-1.0)] == [[2.0, 0.0], [3.0, 0.0]]
    strategy.set_consistency(ps.Async(nonfinite="raise"))
    with pytest.raises(ps.errors.NonfiniteError):
        step(np.inf)
    strategy.set_consistency(ps.Sync())
    assert np.isnan(step(np.nan)[0])


def test_batches_are_handed_out_to_asynchronous_workers_alone(strategy):
    """A dataset of theirs says so where all make rounds together, and goes on where they do not."""
    options = ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC)
    dataset = ps.ArrayDataset(np.arange(4)).batch(2)
    strategy.set_consistency(ps.Async())
    batches = strategy.experimental_distribute_dataset(dataset, options)
    assert len(list(batches)) == 2
    strategy.set_consistency(ps.Sync())
    with pytest.raises(RuntimeError, match="but set_consistency made them synchronous"):
        list(batches)
    with pytest.raises(ValueError, match="use AUTO"):
        strategy.experimental_distribute_dataset(dataset, options)
    strategy.set_consistency(ps.BoundedStaleness(1))
    assert len(list(batches)) == 2


def test_checkpoints_know_nothing_of_it(strategy):
    """What was saved with one consistency is restored with another, before changes and after them."""
    with strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
        checkpoint = ps.train.Checkpoint(v=v)

    def step():
        strategy.run(lambda: add_all([(v, np.ones(3))]))
        return v.numpy().tolist()

    path = checkpoint.save("changed/ckpt")
    for number, consistency in enumerate((ps.Async(), ps.Sync(), ps.BoundedStaleness(0), ps.Sync()), 1):
        step()
        strategy.set_consistency(consistency)
        for _ in range(2):
            step()
            checkpoint.restore(path)
            assert v.numpy().tolist() == [number - 1.0] * 3
        assert step() == [number] * 3
        path = checkpoint.save("changed/ckpt")


ALL = (W0, W1, W2)


def walk(plan, stops):
    """Makes rounds with one consistency after the other, each up to a round that all share.

    Worker 1 waits before some of the changes, and worker 0 after them. Digits of a sum count contributions by worker.
    """
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    mine = np.full(4, 1000.0**ME)
    for number, (consistency, until) in enumerate(plan):
        if strategy.round >= until:
            continue
        if number in stops and ME == 1:
            gate(f"go{number}")
        strategy.set_consistency(eval(consistency))
        say("changed", number)
        if number in stops and ME != 2:
            gate(f"on{number}")
        while strategy.round < until:
            strategy.run(lambda: add_all([(v, mine), (u, mine)]))
            v.numpy()
            last = strategy.last_round
            say("made", [last.number, str(strategy.consistency), list(last.contributors)])
    say("sums", [v.numpy().tolist(), u.numpy().tolist()])
    gate("end")


PLAN = (
    ("ps.Sync()", 3),
    ("ps.Async()", 7),
    ("ps.Sync()", 10),
    ("ps.BoundedStaleness(2)", 14),
    ("ps.Sync()", 32),  # who comes is taken in a window of rounds later
)


def expected(job):
    """The values of both variables: by the common rounds that worker 0 has seen, and the own rounds of each."""
    counts = Counter()
    for task in ALL:
        for _, consistency, contributors in job.said(task, "made"):
            if "Sync" not in consistency or task == W0:
                counts.update(contributors)
    return [[sum(counts[str(task)] * 1000.0**task.index for task in ALL)] * 4] * 2


@pytest.mark.ci  # each change has its test
@pytest.mark.parametrize(
    "killed",
    [
        {1: "early", 2: "early", 3: "late", 4: "chief"},
        pytest.param({1: "late", 2: "chief", 4: "early"}, marks=pytest.mark.soak),
    ],
    ids=["chief last", "chief amid"],
)
def test_a_worker_that_is_killed_in_changes_comes_back(tmp_path, killed):
    """Before a change is made, or after it: each contribution counts once, and its processes make rounds as the others.

    If the chief is killed, who drives in its place finds in the sessions who has asked for what, and makes the change.
    """
    gates = [*(f"{word}{number}" for number in killed for word in ("go", "on")), "end"]
    keys = {"ps": 2, "workers": 3, "chief": "driver", "gates": gates, "timeouts": QUICK}
    with ProcessCluster(walk, tmp_path, (PLAN, list(killed)), **keys) as job:
        for number, how in killed.items():
            asks = f"waits for {W1} in set_consistency({PLAN[number][0]})"
            together = "Sync" in PLAN[number][0]
            job.hear_error(W2, asks)
            job.kill(CHIEF if how == "chief" else W2)
            if how == "early":  # to asynchronous workers it comes at once, and so to the change itself
                job.start(W2)
                job.hear_error(W2, asks if together else "waits until")
            job.open(f"go{number}")
            job.hear(W0, "changed", number)
            if how == "late":
                job.start(W2)
            if how == "late" and together:
                job.hear_error(W2, "waits until")
            job.open(f"on{number}")
        sums = [job.hear(task, "sums") for task in ALL]
        assert sums == [expected(job)] * 3
        made = [tuple(one) for one in job.said(W0, "made")]
        numbers = [[number for number, *_ in job.said(task, "made")] for task in ALL]
        assert numbers[0] == sorted(set(numbers[0]))
        # Who comes back may be a round ahead of the others where they go on together: then that is theirs as well.
        assert {number for each in numbers for number in each} == set(range(PLAN[-1][1]))
        assert str(W2) in made[-1][2]  # it is there again
        job.open("end")
