"""Variables over two servers and two workers of two replicas each: what the API says of replicas holds for all four."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import ME, say
from tests.kit.internals import ServerOptions

TOTAL = 1.0 + 2.0 + 3.0 + 4.0


def train(path):
    strategy = ps.ParameterServerStrategy(devices=["cpu:0", "cpu:1"])
    extended, aggregations = strategy.extended, list(ps.VariableAggregation)[1:]

    def each():
        return np.float32(ps.get_replica_context().replica_id_in_sync_group + 1)

    with strategy.scope():
        written = [ps.Variable(0.0, name=f"w {a.value}", aggregation=a) for a in aggregations]
        read = [
            ps.Variable(0.0, name=f"r {a.value}", aggregation=a, synchronization=ps.VariableSynchronization.ON_READ)
            for a in aggregations
        ]
        auc, mean = ps.metrics.AUC(3), ps.metrics.Mean()
        first = ps.Variable(lambda: np.float32(7 + ME), name="first")
    checkpoint = ps.train.Checkpoint(on_write=written, on_read=read, metrics=[auc, mean], first=first)
    say("first", first in (7.0, 8.0))

    if path:
        say("restored", checkpoint.restore(path).restored)
        say("copies", [[float(x) for x in strategy.experimental_local_results(v)] for v in read])
    else:
        strategy.run(lambda: [v.assign_add(each()) for v in [*written, *read]])
        say("written", [float(v) for v in written])
        say("copies", [[float(x) for x in strategy.experimental_local_results(v)] for v in read])
        say("saved", checkpoint.save("run/ckpt"))
    say("read", [float(v) for v in read])

    read[0].assign(8.0)
    say("assigned", [float(read[0]), [float(x) for x in strategy.experimental_local_results(read[0])]])

    # The example in Keras's document: each replica has one of its rows.
    labels, scores = np.array([0, 0, 1, 1]), np.array([0.0, 0.5, 0.3, 0.9])

    def count():
        row = ps.get_replica_context().replica_id_in_sync_group
        auc.update_state(labels[row : row + 1], scores[row : row + 1])
        mean.update_state(np.arange(row))

    strategy.run(count)
    say("metrics", [auc.result(), mean.result()])

    with strategy.scope():
        a, b = (ps.Variable(np.ones(2), name=name) for name in "ab")
        with extended.colocate_vars_with(a):
            beside = ps.Variable(np.ones(2), name="beside")
        with extended.colocate_vars_with(extended.non_slot_devices([a, b])):
            both = ps.Variable(np.ones(2), name="both")
    say("places", [list(v.devices) for v in (a, b, beside, both)])

    def create(which):
        with extended.colocate_vars_with(which):
            return [ps.Variable(np.ones(8), name=f"{which.name} and its own {n}") for n in range(3)]

    for v in (a, b):
        made = [strategy.experimental_local_results(each)[0] for each in strategy.run(create, (v,))]
        say(f"created with {v.name}", [list(extended.value_container(each).devices) for each in made])
    resolver = strategy.cluster_resolver
    say("resolver", [resolver.task_type, resolver.task_id, resolver.cluster_spec().num_tasks("worker")])
    say("leads", [extended.experimental_should_init, extended.should_checkpoint, extended.should_save_summary])
    extended.update(a, lambda v, x, y: v.assign_add(x + y), (beside, both))
    say("updated", a.numpy())
    try:
        extended.update(a, lambda v, x: v.assign_add(x), (b,))
    except ps.errors.LocalityError as error:
        say("elsewhere", str(error))
    try:
        extended.update(a, lambda v: both.assign_add(v))
    except ps.errors.LocalityError as error:
        say("copies elsewhere", str(error))

    optimizer = ps.optimizers.Adam(0.5)
    strategy.run(lambda: optimizer.apply_gradients([(np.full(2, each()), v) for v in (a, b)]))
    say("trained", [(3.0 - a.numpy()).round(5), (1.0 - b.numpy()).round(5), int(optimizer.iterations)])


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    directory = tmp_path_factory.mktemp("job")
    with ProcessCluster(train, directory, ("",), ps=2, workers=2) as job:
        job.finish()
    return directory / "checkpoints", job


def both(job, what):
    """What the workers said of one thing."""
    (first,), (second,) = job.said(W0, what), job.said(W1, what)
    return first, second


def test_one_initial_value_wins(job):
    """Whichever worker was first: both have the same, and it is one of theirs."""
    assert both(job[1], "first") == (True, True)


def test_assignments_are_combined_over_all_workers(job):
    """SUM, MEAN, and the value of the first replica of all, which only one worker has."""
    assert both(job[1], "written") == ([TOTAL, TOTAL / 4, 1.0],) * 2


def test_sync_on_read_copies_are_combined_over_all_workers(job):
    """Each replica keeps its own; everyone reads the same aggregate."""
    assert both(job[1], "copies") == ([[1.0, 2.0]] * 3, [[3.0, 4.0]] * 3)
    assert both(job[1], "read") == ([TOTAL, TOTAL / 4, 1.0],) * 2
    assert both(job[1], "assigned") == ([8.0, [2.0, 2.0]],) * 2


def test_metrics_are_over_all_workers(job):
    """The AUC of four rows on four replicas, and a mean of 0 to 3 values."""
    values = [0.0, 0.0, 1.0, 0.0, 1.0, 2.0]
    assert both(job[1], "metrics") == ([pytest.approx(0.75), pytest.approx(sum(values) / 6)],) * 2


def test_values_stay_where_they_are(job):
    """What is colocated is used together; what is elsewhere is refused with the remedy, and nothing has changed."""
    a, b, beside, mirrored = both(job[1], "places")[0]
    assert (a, len(a), len(b)) == (beside, 1, 1)
    assert a != b
    assert sorted(mirrored) == sorted(a + b)
    assert both(job[1], "updated") == ([3.0, 3.0],) * 2
    for said in both(job[1], "elsewhere"):
        assert "never crosses servers" in said
        assert "colocate_vars_with, or read it first" in said
    for said in both(job[1], "copies elsewhere"):
        assert "'both' has copies that this update does not reach" in said
        assert "update_non_slot" in said


def test_replicas_create_where_they_say(job):
    """Beside a variable of either server, whichever has more room."""
    places = both(job[1], "places")[0]
    for name, place in zip("ab", places, strict=False):
        assert both(job[1], f"created with {name}") == ([place] * 3,) * 2


def test_a_process_knows_its_cluster(job):
    """By its strategy's resolver: the one that read TF_CONFIG."""
    assert both(job[1], "resolver") == (["worker", 0, 2], ["worker", 1, 2])


def test_one_worker_initializes_and_saves(job):
    """The first in task order: for initialization, checkpoints and summaries."""
    assert both(job[1], "leads") == ([True] * 3, [False] * 3)


def test_an_optimizer_counts_steps_once(job):
    """Whichever server holds a variable; the first step of Adam is its learning rate."""
    assert both(job[1], "trained") == ([[0.5, 0.5], [0.5, 0.5], 1],) * 2


def test_a_restored_aggregate_is_shared_out_among_the_workers_of_now(job, tmp_path):
    """Of four replicas on two workers, onto the two of one: a sum in two parts, all else whole."""
    root = str(job[0])
    with ProcessCluster(
        train, tmp_path, ("run",), ps=1, workers=1, server=ServerOptions(checkpoint_root=root)
    ) as alone:
        alone.finish()
    assert alone.said(W0, "restored") == [True]
    assert alone.said(W0, "copies") == [[[TOTAL / 2] * 2, [TOTAL / 4] * 2, [1.0] * 2]]
    assert alone.said(W0, "read") == [[TOTAL, TOTAL / 4, 1.0]]
