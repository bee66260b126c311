"""The strategy's methods on a real cluster: several processes do together what one process of four replicas does.

What places and checkpoints have to do with it is tested with workers in threads.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import ProcessCluster
from pstesting.script import ME, say
from tests.kit.workers import in_threads


def trained(strategy):
    """Trains a classifier for 20 steps with Adam; what everyone can know of it, and what each replica was told."""
    random = np.random.default_rng(0)
    y = random.integers(0, 10, 150)
    x = random.normal(size=(150, 16)) + random.normal(size=(10, 16))[y]
    first = strategy.run(lambda: ps.get_replica_context().replica_id_in_sync_group)
    found = {"losses": [], "metrics": [], "examples": 0.0, "first": strategy.experimental_local_results(first)}
    with strategy.scope():
        w = ps.Variable(np.zeros((16, 10)), name="w")
        b = ps.Variable(lambda: np.zeros(10), name="b")
        optimizer = ps.optimizers.Adam(0.05)
        mean, accuracy = ps.metrics.Mean(), ps.metrics.Accuracy()
        of_classes, precision = ps.metrics.SparseCategoricalAccuracy(), ps.metrics.Precision([0.3, 0.6])

    def step(batch):
        context = ps.get_replica_context()
        x, y = batch
        logits = x @ w.read_value() + b.read_value()
        p = np.exp(logits - logits.max(axis=1, keepdims=True)) if len(x) else np.zeros((0, 10))
        p = p / p.sum(axis=1, keepdims=True)
        losses = -np.log(p[np.arange(len(y)), y])
        error = (p - np.eye(10)[y]) / 32
        optimizer.apply_gradients([(x.T @ error, w), (error.sum(axis=0), b)])
        mean.update_state(losses)
        accuracy.update_state(y, p.argmax(axis=1))
        of_classes.update_state(y, logits)
        precision.update_state(np.eye(10)[y], p)
        return losses, np.array([context.replica_id_in_sync_group, context.num_replicas_in_sync])

    data = strategy.experimental_distribute_dataset(strategy.experimental_make_numpy_dataset((x, y)).batch(32))
    for _ in range(4):
        for batch in data:
            losses, told = strategy.run(step, args=(batch,))
            found["losses"].append(float(strategy.reduce(ps.ReduceOp.MEAN, losses, axis=0)))
            ones = strategy.run(np.ones_like, args=(losses,))
            found["examples"] += float(strategy.reduce("sum", ones, axis=0))
        found["metrics"].append([mean.result(), accuracy.result(), of_classes.result(), *precision.result().tolist()])
        mean.reset_state()
    found["ids"] = [ids.tolist() for ids in strategy.experimental_local_results(told)]
    found["variables"] = [w.numpy().tolist(), b.numpy().tolist(), int(optimizer.iterations)]
    found["replicas"] = strategy.num_replicas_in_sync
    return found


def asked(strategy):
    """What the methods give that reach over all replicas, and of local ones what this process's replicas get."""
    extended, here = strategy.extended, ps.get_replica_context
    ids = strategy.experimental_distribute_values_from_function(lambda c: np.float64(c.replica_id_in_sync_group))
    counts = strategy.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync)
    every, mine = {}, {"ids": strategy.experimental_local_results(ids)}
    every["counts"] = sorted(set(strategy.experimental_local_results(counts)))

    # Reductions: over replicas, over ragged batches, of plain values, to every kind of destination.
    rows = strategy.run(lambda i: np.arange(int(i) * 2.0).reshape(-1, 2), (ids,))
    every["reduce"] = [
        float(strategy.reduce("sum", ids, axis=None)),
        float(strategy.reduce("MEAN", ids, axis=None)),
        strategy.reduce("sum", rows, axis=0).tolist(),
        strategy.reduce("mean", rows, axis=0).tolist(),
        float(strategy.reduce("mean", 7, axis=None)),
        np.isnan(strategy.reduce("mean", strategy.run(lambda: np.zeros(0)), axis=0)).tolist(),
    ]
    every["gather"] = [x.tolist() for x in strategy.gather((rows, strategy.run(np.isnan, (rows,))), axis=0)]
    with strategy.scope():
        v = ps.Variable(np.zeros(2), name="v", aggregation=ps.VariableAggregation.SUM)
        located = extended.reduce_to("sum", ids, v)
        extended.update(v, lambda v, t: v.assign_add(v * 0.0 + t), (located,))
        batch = extended.batch_reduce_to("mean", [(ids, ids), (rows_of(strategy, ids), extended.worker_devices[0])])
    every["updated"] = v.numpy().tolist()
    every["batch"] = [np.asarray(strategy.experimental_local_results(x)[0]).tolist() for x in batch]
    mine["copies"] = [float(x) for x in strategy.experimental_local_results(batch[0])]

    # In replicas: all_reduce of nests, several meetings, assignments that aggregate.
    def fn(i):
        nest = here().all_reduce("sum", {"a": i, "b": [np.full(2, i), np.float64(1.0)]})
        v.assign_add(np.full(2, i))
        again = here().all_reduce("mean", v.read_value() + i)
        joined = here().all_gather(np.full((1, int(i)), i, "float32"), axis=1)
        assert joined.tolist() == [[1.0, 2.0, 2.0, 3.0, 3.0, 3.0]]
        return np.array([nest["a"], nest["b"][0][1], nest["b"][1], again[0]]), here().merge_call(lambda s, i: i, (i,))

    nests, back = strategy.run(fn, (ids,))
    mine["back"] = [float(x) for x in strategy.experimental_local_results(back)]
    every["nests"] = sorted({tuple(x.tolist()) for x in strategy.experimental_local_results(nests)})
    every["assigned"] = v.numpy().tolist()

    # Data: global batches, and datasets of each worker's own; the last batches are partial.
    batches = strategy.experimental_distribute_dataset([np.arange(8.0), np.arange(5.0), np.ones(1)])
    every["batches"] = [float(strategy.reduce("mean", batch, axis=0)) for batch in batches]
    own = strategy.experimental_distribute_datasets_from_function(
        lambda c: ps.ArrayDataset(np.arange(30.0)).shard(c.num_input_pipelines, c.input_pipeline_id).batch(2)
    )
    every["own"] = sum(float(strategy.reduce("sum", strategy.run(np.square, (batch,)), axis=0)) for batch in own)

    # Copies that are combined when they are read.
    kinds = ps.VariableAggregation
    with strategy.scope():
        totals = {
            how: ps.Variable(1.0, name=how.name, synchronization=ps.VariableSynchronization.ON_READ, aggregation=how)
            for how in (kinds.SUM, kinds.MEAN, kinds.ONLY_FIRST_REPLICA, kinds.NONE)
        }
    read = [kinds.SUM, kinds.MEAN, kinds.ONLY_FIRST_REPLICA]
    every["initial"] = [float(totals[how]) for how in read]
    strategy.run(lambda i: [total.assign_add(i) for total in totals.values()] and None, (ids,))
    every["filled"] = [float(totals[how]) for how in read]
    mine["own"] = [float(x) for x in strategy.experimental_local_results(totals[kinds.NONE])]
    for how in read:
        totals[how].assign(8.0)
    mine["shares"] = [float(x) for x in strategy.experimental_local_results(totals[kinds.SUM])]
    every["whole"] = [float(totals[how]) for how in read]
    return {"every": every, "mine": mine}


def rows_of(strategy, ids):
    return strategy.run(lambda i: np.full(3, i), (ids,))


def program(replicas):
    """In every process: a strategy of so many replicas as it has, and what is found with it."""
    with ps.ParameterServerStrategy(devices=[f"cpu:{index}" for index in range(replicas[ME])]) as strategy:
        extended, resolver = strategy.extended, strategy.cluster_resolver
        leads = [extended.experimental_should_init, extended.should_checkpoint, extended.should_save_summary]
        knows = [resolver.task_type, resolver.task_id, resolver.cluster_spec().num_tasks("worker")]
        say("found", {"trained": trained(strategy), "asked": asked(strategy), "knows": knows, "leads": leads})


@pytest.fixture(scope="module")
def alone():
    """What one process of four replicas found, as it would be said."""
    with ps.ParameterServerStrategy(devices=[f"cpu:{index}" for index in range(4)]) as strategy:
        found = {"trained": trained(strategy), "asked": asked(strategy)}
    return json.loads(json.dumps(found, default=lambda value: np.asarray(value).tolist()))


@pytest.fixture(
    scope="module",
    params=[(2, 2), *(pytest.param(each, marks=pytest.mark.soak) for each in ((1, 3), (1, 1, 1, 1)))],
    ids=str,
)
def found(request, tmp_path_factory):
    keys = {"helpers": [trained, asked, rows_of], "ps": 2, "workers": len(request.param)}
    with ProcessCluster(program, tmp_path_factory.mktemp("job"), (request.param,), **keys) as job:
        said = [job.hear(task, "found") for task in job.runners]
        job.finish()
    return said


@pytest.fixture
def training(found, alone):
    if len(found) != 2 or found[0]["trained"]["ids"] != [[0, 4], [1, 4]]:
        pytest.skip("these tests are of two processes of two replicas")
    return [process["trained"] for process in found], alone["trained"]


# ---- Training ----


def test_two_processes_train_what_one_does(training):
    """The losses of 20 steps, the variables, and the count of the steps; the last batch of each generation is
    partial."""
    found, expected = training
    for process in found:
        assert len(process["losses"]) == 20
        assert process["losses"] == pytest.approx(expected["losses"], rel=1e-7)
        for value, wanted in zip(process["variables"], expected["variables"], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-7, atol=1e-9)
    assert expected["variables"][2] == 20
    assert expected["losses"][-1] < expected["losses"][0] / 2


def test_both_processes_say_the_same_to_the_last_bit(training):
    """Losses, variables, metrics: they are computed once."""
    (first, second), _ = training
    for what in ("losses", "variables", "metrics", "examples", "replicas"):
        assert first[what] == second[what]


def test_metrics_are_of_all_examples(training):
    """Each counts once, whatever replica had it; the accuracy goes on from generation to generation."""
    found, expected = training
    for process in found:
        np.testing.assert_allclose(process["metrics"], expected["metrics"], rtol=1e-7)
        assert process["examples"] == expected["examples"] == 4 * 150
    generations = np.reshape(expected["losses"], (4, 5)) @ [32, 32, 32, 32, 22] / 150
    np.testing.assert_allclose([mean for mean, *_ in expected["metrics"]], generations, rtol=1e-9)
    assert all(accuracy == of_classes for _, accuracy, of_classes, *_ in expected["metrics"])
    assert 0.0 < expected["metrics"][-1][3] < expected["metrics"][-1][4] <= 1.0


def test_replicas_are_numbered_over_all_processes(training):
    """In task order, and each is told of all."""
    (first, second), expected = training
    assert first["ids"] == [[0, 4], [1, 4]]
    assert second["ids"] == [[2, 4], [3, 4]]
    assert expected["ids"] == first["ids"] + second["ids"]
    assert (first["first"], second["first"]) == ([0, 1], [2, 3])  # before any round, too
    assert first["replicas"] == second["replicas"] == expected["replicas"] == 4


# ---- Methods ----


def test_methods_that_reach_over_all_replicas_agree(found, alone):
    """Whatever processes the replicas are in: reductions, updates, all_reduce, assignments, ON_READ totals."""
    for process in found:
        assert process["asked"]["every"] == alone["asked"]["every"]


def test_local_results_are_of_this_process(found, alone):
    """Those of all processes in order are those of one: values from a function, copies, results, shares."""
    expected = alone["asked"]["mine"]
    for what, wanted in expected.items():
        assert (what, [x for process in found for x in process["asked"]["mine"][what]]) == (what, wanted)
    assert expected["ids"] == [0.0, 1.0, 2.0, 3.0]


def test_a_process_knows_its_cluster(found):
    """By its strategy's resolver: the one that read TF_CONFIG."""
    assert [process["knows"] for process in found] == [["worker", task, len(found)] for task in range(len(found))]


def test_one_worker_initializes_and_saves(found):
    """The first in task order: for initialization, checkpoints and summaries."""
    assert [process["leads"] for process in found] == [[task == 0] * 3 for task in range(len(found))]


def test_the_numbers_are_right(alone):
    """By hand, so that not all are wrong alike."""
    every, mine = alone["asked"]["every"], alone["asked"]["mine"]
    assert every["counts"] == [4]
    assert every["reduce"] == [6.0, 1.5, [8.0, 14.0], [8 / 6, 14 / 6], 7.0, True]
    assert (every["updated"], every["batch"]) == ([6.0, 6.0], [1.5, [1.5] * 3])
    pairs = [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert every["gather"] == [pairs, [[False, False]] * 6]
    assert every["nests"] == [[6.0, 6.0, 4.0, 13.5]]
    assert every["assigned"] == [12.0, 12.0]
    assert (every["batches"], every["own"]) == ([3.5, 2.0, 1.0], float(np.square(np.arange(30.0)).sum()))
    assert every["initial"] == [4.0, 1.0, 1.0]
    assert every["filled"] == [10.0, 2.5, 1.0]
    assert mine["own"] == [1.0, 2.0, 3.0, 4.0]
    assert (mine["shares"], every["whole"]) == ([2.0] * 4, [8.0, 8.0, 8.0])


# ---- Variables of two servers, two workers of two replicas each ----

TWO = {"devices": ["cpu:0", "cpu:1"]}


def test_copies_are_combined_over_all_workers_and_shared_out_again(tmp_path):
    """SUM, MEAN, and the first of all replicas, which one worker has; restored by one worker, a sum is in two parts."""

    def local(strategy, variables):
        return [[float(x) for x in strategy.experimental_local_results(v)] for v in variables]

    def train(strategy, worker, restore=False):
        aggregations = list(ps.VariableAggregation)[1:]
        with strategy.scope():
            written = [ps.Variable(0.0, name=f"w {a.value}", aggregation=a) for a in aggregations]
            on_read = ps.VariableSynchronization.ON_READ
            read = [ps.Variable(0.0, name=f"r {a.value}", aggregation=a, synchronization=on_read) for a in aggregations]
            auc, mean = ps.metrics.AUC(3), ps.metrics.Mean()
        checkpoint = ps.train.Checkpoint(on_write=written, on_read=read, metrics=[auc, mean])
        if restore:
            assert checkpoint.restore("run").restored
            return local(strategy, read), [float(v) for v in [*written, *read]]

        def step():
            replica = ps.get_replica_context().replica_id_in_sync_group
            for v in [*written, *read]:
                v.assign_add(np.float32(replica + 1))
            # The example in Keras's document: each replica has one of its rows.
            labels, scores = np.array([0, 0, 1, 1]), np.array([0.0, 0.5, 0.3, 0.9])
            auc.update_state(labels[replica : replica + 1], scores[replica : replica + 1])
            mean.update_state(np.arange(replica))

        strategy.run(step)
        checkpoint.save("run/ckpt")
        checkpoint.sync()
        copies, values = local(strategy, read), [float(v) for v in [*written, *read]]
        read[0].assign(8.0)
        return copies, values, float(read[0]), local(strategy, read[:1]), [auc.result(), mean.result()]

    values = [10.0, 2.5, 1.0] * 2
    metrics = [pytest.approx(0.75), pytest.approx(sum([0.0, 0.0, 1.0, 0.0, 1.0, 2.0]) / 6)]
    expected = [(copies, values, 8.0, [[2.0, 2.0]], metrics) for copies in ([[1.0, 2.0]] * 3, [[3.0, 4.0]] * 3)]
    assert in_threads(train, root=tmp_path, **TWO) == expected
    ((copies, again),) = in_threads(lambda *one: train(*one, True), 1, 1, root=tmp_path, **TWO)
    assert (copies, again) == ([[5.0] * 2, [2.5] * 2, [1.0] * 2], values)


def test_values_stay_where_they_are():
    """What is colocated is used together; what is elsewhere is refused with the remedy, and nothing has changed.

    Replicas create variables beside one of either server, whichever has more room.
    """

    def place(strategy, worker):
        extended = strategy.extended
        with strategy.scope():
            a, b = (ps.Variable(np.ones(2), name=name) for name in "ab")
            with extended.colocate_vars_with(a):
                beside = ps.Variable(np.ones(2), name="beside")
            with extended.colocate_vars_with(extended.non_slot_devices([a, b])):
                both = ps.Variable(np.ones(2), name="both")
        assert (a.devices, len(a.devices), len(b.devices)) == (beside.devices, 1, 1)
        assert a.devices != b.devices
        assert sorted(both.devices) == sorted([*a.devices, *b.devices])

        def create(which):
            with extended.colocate_vars_with(which):
                return [ps.Variable(np.ones(8), name=f"{which.name} and its own {n}") for n in range(3)]

        for v in (a, b):
            made = [strategy.experimental_local_results(each)[0] for each in strategy.run(create, (v,))]
            assert [extended.value_container(each).devices for each in made] == [v.devices] * 3
        extended.update(a, lambda v, x, y: v.assign_add(x + y), (beside, both))
        elsewhere = "'b' .*task:1.* is used in an update on /job:ps/task:0.*colocate_vars_with, or read it first"
        with pytest.raises(ps.errors.LocalityError, match=elsewhere):
            extended.update(a, lambda v, x: v.assign_add(x), (b,))
        unreached = "'both' has copies that this update does not change.*update_non_slot"
        with pytest.raises(ps.errors.LocalityError, match=unreached):
            extended.update(a, lambda v: both.assign_add(v))
        return a.numpy().tolist()

    assert in_threads(place, **TWO) == [[3.0, 3.0]] * 2
