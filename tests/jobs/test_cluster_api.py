"""The strategy's methods on a real cluster: several processes do together what one process of four replicas does."""

from __future__ import annotations

import json

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import ProcessCluster
from pstesting.script import say


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


def program():
    """In every process: a strategy of two replicas, and what is found with it."""
    with ps.ParameterServerStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
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


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two processes of two replicas each found."""
    keys = {"helpers": [trained, asked, rows_of], "ps": 2, "workers": 2}
    with ProcessCluster(program, tmp_path_factory.mktemp("job"), (), **keys) as job:
        said = [job.hear(task, "found") for task in job.runners]
        job.finish()
    return said


def test_two_processes_train_what_one_does(found, alone):
    """The losses of 20 steps, the variables, and the count of the steps; the last batch of each epoch is partial.

    Metrics are of all examples: each counts once, whatever replica had it; the accuracy goes on from epoch to epoch.
    Both processes say the same to the last bit: it is computed once.
    """
    one, other = (process["trained"] for process in found)
    for what in ("losses", "variables", "metrics", "examples", "replicas"):
        assert one[what] == other[what]
    expected = alone["trained"]
    assert len(one["losses"]) == expected["variables"][2] == 20
    assert one["losses"] == pytest.approx(expected["losses"], rel=1e-7)
    assert expected["losses"][-1] < expected["losses"][0] / 2
    for value, wanted in zip(one["variables"], expected["variables"], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(one["metrics"], expected["metrics"], rtol=1e-7)
    assert one["examples"] == expected["examples"] == 4 * 150
    epochs = np.reshape(expected["losses"], (4, 5)) @ [32, 32, 32, 32, 22] / 150
    np.testing.assert_allclose([mean for mean, *_ in expected["metrics"]], epochs, rtol=1e-9)
    assert all(accuracy == of_classes for _, accuracy, of_classes, *_ in expected["metrics"])
    assert 0.0 < expected["metrics"][-1][3] < expected["metrics"][-1][4] <= 1.0


def test_methods_that_reach_over_all_replicas_agree(found, alone):
    """Whatever processes the replicas are in: reductions, updates, all_reduce, assignments, ON_READ totals.

    Local results of all processes, in order, are those of one: values from a function, copies, results, shares.
    """
    for process in found:
        assert process["asked"]["every"] == alone["asked"]["every"]
    for what, wanted in alone["asked"]["mine"].items():
        assert (what, [x for process in found for x in process["asked"]["mine"][what]]) == (what, wanted)


def test_a_process_knows_its_place(found, alone):
    """Its replicas are numbered over all processes, in task order, and each is told of all.

    Its resolver is the one that read TF_CONFIG; the first task initializes and saves: checkpoints and summaries.
    """
    for task, process in enumerate(found):
        mine = [2 * task, 2 * task + 1]
        assert process["trained"]["ids"] == [[number, 4] for number in mine]
        assert process["trained"]["first"] == mine  # before any round, too
        assert process["trained"]["replicas"] == 4
        assert process["knows"] == ["worker", task, 2]
        assert process["leads"] == [task == 0] * 3
    assert alone["trained"]["ids"] == [[number, 4] for number in range(4)]
