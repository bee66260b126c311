"""The rules of sections and rounds, by two workers and two servers that are real processes."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import ME, add, add_all, gate, say


def rules():
    strategy = ps.ParameterServerStrategy()
    extended = strategy.extended
    with strategy.scope():
        a = ps.Variable(np.zeros(4), name="a")
        b = ps.Variable(np.zeros(3), name="b")

    # A run without a section.
    strategy.run(lambda: add_all([(a, np.ones(4)), (b, np.ones(3))]))
    before = strategy.traffic, strategy.round
    found = [strategy.run(lambda: float(a.read_value().sum()) * 0 + ME) for _ in range(20)]
    say("local", [found == [ME] * 20, before[1] == strategy.round])
    read = strategy.traffic
    for _ in range(20):
        strategy.run(lambda: a.read_value().sum() + b.read_value().sum())
    again = strategy.traffic
    for _ in range(20):
        strategy.run(lambda: a.read_value().sum() + b.read_value().sum())
    say("local traffic", [strategy.traffic[0] == before[0][0], strategy.traffic == again, read[1] <= again[1]])

    # Two sections in one run.
    def twice():
        add(a, np.full(4, ME + 1.0))
        seen = a.read_value()[0]
        add(a, np.full(4, seen))
        return seen

    first = strategy.round
    seen = strategy.run(twice)
    say("twice", [strategy.round - first, float(seen), a.numpy()])

    # Rounds that only reduce.
    first, kept = strategy.round, a.numpy()
    total = strategy.reduce("sum", np.arange(3.0) + ME, None)
    mean = strategy.reduce(ps.ReduceOp.MEAN, np.arange(2.0 + ME), axis=0)
    say("reduce", [strategy.round - first, total, float(mean), bool((kept == a.numpy()).all())])

    # A read right after an update, in the same section.
    def update_and_read(strategy):
        extended.update(a, lambda v: v.assign(v * 0 + 5.0))
        value = a.numpy()
        rounds = strategy.round
        extended.update(a, lambda v: v.assign_add(1.0))
        return [value, rounds]

    first = strategy.round
    value, rounds = strategy.run(lambda: ps.get_replica_context().merge_call(update_and_read))
    say("read", [value, rounds - first, strategy.round - first, a.numpy()])

    # Lazy values, during and after their section.
    def lazy(strategy, x):
        used = extended.reduce_to("sum", x, a)
        kept = extended.reduce_to("sum", x, a)
        left = extended.reduce_to("sum", x, a)
        numbers = used.numpy()
        returned = extended.update(a, lambda v: v.assign_add(1.0) + 1.0)
        return [numbers, returned], (kept, left)

    hidden = []

    def merge(strategy, x):
        result, forgotten = lazy(strategy, x)
        hidden.append(forgotten)
        return result

    numbers, returned = strategy.run(lambda: ps.get_replica_context().merge_call(merge, (np.full(4, 2.0),)))
    try:
        hidden[0][0].numpy()
    except RuntimeError as error:
        say("stayed", [numbers, np.asarray(returned), str(error)])

    # A variable that comes to be in the middle.
    with strategy.scope():
        late = ps.Variable(np.full(2, 10.0 + 100 * ME), name="late")
    start = late.numpy()
    strategy.run(lambda: add(late, np.full(2, 1.0 + ME)))
    say("late", [start[0] in (10.0, 110.0), late.numpy() - start])

    # Workers whose data do not end together.
    def mine(context):
        return [np.full(2, 10.0 * (step + 1) + ME) for step in range((2, 5)[context.input_pipeline_id])]

    steps = []

    def step(batch):
        add(b, np.full(3, batch.sum()))
        return batch.sum()

    for batch in strategy.experimental_distribute_datasets_from_function(mine):
        value = strategy.run(step, args=(batch,))
        steps.append([len(batch), float(strategy.reduce("mean", value, None)), float(strategy.reduce("sum", 1, None))])
    say("unequal", [steps, b.numpy()])

    # Servers that a section does not touch take no part in it.
    for _ in range(3):
        strategy.run(lambda: add(a, np.ones(4)))
    say("round", strategy.round)
    gate("status")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The job that keeps to the rules; it waits at its end until `ended` lets it go."""
    with ProcessCluster(rules, tmp_path_factory.mktemp("job"), ps=2, workers=2, gates=["status"]) as job:
        for task in (W0, W1):
            job.hear(task, "round")
        yield job


def both(job, what):
    """What the workers said of one thing; they say the same, but for what is theirs alone."""
    (first,), (second,) = job.said(W0, what), job.said(W1, what)
    return first, second


def test_a_run_without_a_section_is_local(job):
    """No flush, no round, no message: neither the round nor the traffic grows; reads are kept."""
    assert both(job, "local") == ([True, True],) * 2
    assert both(job, "local traffic") == ([True, True, True],) * 2


def test_two_sections_in_one_run_are_two_rounds(job):
    """The second section sees what the first has done: 2 + (1 + 2) = 5, and both workers add that."""
    assert both(job, "twice") == ([2, 5.0, [15.0] * 4],) * 2


def test_a_reduction_without_a_variable_is_a_round(job):
    """`strategy.reduce` counts as one round, gives everyone the same, and changes no variable."""
    expected = [2, [1.0, 3.0, 5.0], pytest.approx((0 + 1 + 0 + 1 + 2) / 5), True]
    assert both(job, "reduce") == (expected, expected)


def test_a_read_right_after_an_update_sees_the_new_value(job):
    """It ends the section: the rest of the same merge call is another round."""
    assert both(job, "read") == ([[5.0] * 4, 1, 2, [6.0] * 4],) * 2


def test_a_value_that_stayed_on_the_servers_says_so(job):
    """What was looked at or returned is there; all else was not sent back, and the error says what to do."""
    for numbers, returned, error in both(job, "stayed"):
        assert numbers == [4.0] * 4
        assert returned == [8.0] * 4
        assert "stayed on the servers when its section ended" in error
        assert "return it" in error


def test_a_variable_may_be_created_in_the_middle(job):
    """One process's first value wins, and the next round may use it."""
    assert both(job, "late") == ([True, [3.0, 3.0]],) * 2


def test_workers_stop_together_whatever_data_they_have(job):
    """One has 2 batches and one 5: five steps for both; empty batches add nothing and have no weight."""
    (first, total), (second, same) = both(job, "unequal")
    assert [step[0] for step in first] == [2, 2, 0, 0, 0]
    assert [step[0] for step in second] == [2] * 5
    sums = [2 * (10.0 * (s + 1) + worker) for s in range(5) for worker in (0, 1)]
    sums = [x if i % 2 or i < 4 else None for i, x in enumerate(sums)]
    means = [sums[0] + sums[1], sums[2] + sums[3], sums[5], sums[7], sums[9]]
    assert [step[1] for step in first] == [means[0] / 2, means[1] / 2, *means[2:]]
    assert [step[1:] for step in second] == [step[1:] for step in first]
    assert [step[2] for step in first] == [2, 2, 1, 1, 1]
    assert total == same == [2.0 + sum(means)] * 3


def test_servers_that_a_section_does_not_touch_take_no_part(job):
    """Their last round is older, though the count of rounds is the same for all."""
    statuses = []
    for task in (PS0, PS1):
        with job.server(task) as server:
            statuses.append(server.status())
    round = both(job, "round")[0]
    assert statuses[0].round == round - 1
    assert statuses[1].round < round - 3
    assert [status.waiting for status in statuses] == [(), ()]


def test_the_job_ends_cleanly(job):
    """After all of this every process ends by itself with code 0."""
    job.open("status")
    job.finish()
