"""Sync-on-read variables on every kind of strategy: each replica has a copy, combined when it is read across them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import KINDS, in_replicas, kind_of, kinds, merged, opened, refused, replicas, variable

AGGREGATION = ps.VariableAggregation
ON_READ = ps.VariableSynchronization.ON_READ
COMBINING = [AGGREGATION.SUM, AGGREGATION.MEAN, AGGREGATION.ONLY_FIRST_REPLICA]


pytestmark = kinds("mirrored-1", "mirrored-2", "servers-2x2", soak=KINDS[1:])
"""Outside of every scope there are no copies: `test_variable_rules` has what is then."""

ASYNCHRONOUS_TOO = kinds("mirrored-1", "mirrored-2", "servers-2x2", "async-2x2", soak=KINDS[1:])
"""Where workers are asynchronous servers have the aggregate: `test_asynchronous_totals` has that of several."""


def on_read(strategy, aggregation=AGGREGATION.SUM, value=0.0, **options):
    return variable(strategy, value, synchronization=ON_READ, aggregation=aggregation, **options)


def fill(strategy, v):
    """Replica 0 gets 1, replica 1 gets 2, and so on."""
    in_replicas(strategy, lambda replica: v.assign(np.float32(replica + 1)))


def of_replicas(strategy, v):
    """What each replica reads."""
    return [float(x) for x in in_replicas(strategy, lambda _: float(v))]


def read_across(aggregation, copies):
    """What is read across replicas that hold these values."""
    combined = {"sum": sum(copies), "mean": sum(copies) / len(copies), "only_first_replica": copies[0]}
    return combined[aggregation.name.lower()]


@ASYNCHRONOUS_TOO
@pytest.mark.parametrize("aggregation", COMBINING)
def test_a_replica_reads_its_own_copy_and_all_else_the_aggregate(strategy, aggregation):
    """In a replica function, in merge_call, in the scope, outside of it, and in any form of reading. Every copy begins
    with the initial value: a sum that begins with 1 reads R, and a mean 1; where workers are asynchronous 1, as with
    TensorFlow's parameter servers. Another strategy cannot combine the copies."""
    begins = 1 if getattr(strategy, "consistency", None) == ps.Async() else replicas(strategy)
    assert float(on_read(strategy, aggregation, 1.0)) == read_across(aggregation, [1.0] * begins)
    n, v = replicas(strategy), on_read(strategy, aggregation)
    fill(strategy, v)
    own = [float(replica + 1) for replica in range(n)]
    expected = read_across(aggregation, own)
    assert of_replicas(strategy, v) == own
    assert [float(copy) for copy in strategy.experimental_local_results(v)] == own
    across = []
    merged(strategy, lambda s: across.append(float(v)))
    assert across == [expected]
    with strategy.scope():
        assert float(v) == expected
    for found in (v, v.numpy(), v + 0, np.asarray(v), strategy.extended.read_var(v)):
        assert float(found) == expected
    with ps.MirroredStrategy(["cpu:0"]) as other, other.scope():
        refused(RuntimeError, "was used in the scope of another", lambda: float(v))


def test_without_an_aggregation_it_is_only_read_by_replicas(strategy):
    """The error says how to create it, and how to have its copies."""
    v = on_read(strategy, AGGREGATION.NONE)
    fill(strategy, v)
    refused(
        ValueError,
        rf"'{v.name}' is (read|assigned) in cross-replica context.*local_results",
        lambda: float(v),
        v.read_value,
        lambda: v.assign(1.0),
        lambda: strategy.extended.read_var(v),
    )
    assert of_replicas(strategy, v) == [replica + 1.0 for replica in range(replicas(strategy))]


def test_replicas_assign_what_they_are_given(strategy):
    """As an argument a replica gets its own copy; a merge of all the copies is the variable, whose traits it has."""
    n, v = replicas(strategy), on_read(strategy)
    merged_back = strategy.run(lambda own: own.assign_add(2.0), (v,))
    assert merged_back is v
    assert strategy.run(lambda: v.assign_add(0.0)) is v
    assert strategy.run(lambda own: (own, None), (v,)) == (v, None)
    assert of_replicas(strategy, v) == [2.0] * n
    found = []
    in_replicas(strategy, lambda _, own: ps.get_replica_context().merge_call(lambda s, w: found.append(w), (own,)), v)
    assert found == [v]
    for copy in strategy.experimental_local_results(v):
        traits = (copy.name, copy.trainable, copy.synchronization, copy.aggregation)
        assert traits == (v.name, False, ON_READ, AGGREGATION.SUM)
    own = on_read(strategy, AGGREGATION.MEAN, 10.0)  # the documents' `v = 0.9*v + 0.1*update`: nothing is combined
    in_replicas(strategy, lambda replica: own.assign(0.9 * own + 0.1 * replica))
    assert of_replicas(strategy, own) == pytest.approx([9.0 + 0.1 * replica for replica in range(n)])
    in_replicas(strategy, lambda _: own.assign(1.0))
    in_replicas(strategy, lambda replica: own.assign_add(replica).assign_sub(0.5))
    assert of_replicas(strategy, own) == [0.5 + replica for replica in range(n)]


@ASYNCHRONOUS_TOO
@pytest.mark.parametrize("aggregation", COMBINING)
def test_across_replicas_one_value_is_shared_out(strategy, aggregation):
    """A sum in equal parts, so that it reads the same again; all else whole."""
    n, v = replicas(strategy), on_read(strategy, aggregation)
    fill(strategy, v)
    assert v.assign(12.0) is v
    assert of_replicas(strategy, v) == [12.0 / n if aggregation is AGGREGATION.SUM else 12.0] * n
    assert float(v) == 12.0
    v.assign(variable(strategy, 8.0))
    assert float(v) == 8.0
    v.assign(ps.Mirrored([np.float32(4.0)] * n))
    assert float(v) == 4.0


def test_what_is_shared_out_fits(strategy):
    """An integer into a sum of floats has its fraction; a float is no integer, and another shape none of its own. As in
    TensorFlow integers are cut off: 7 over two replicas is 3 for each, -7 is -3; a count beyond what a double can hold
    is not rounded."""
    n, v, count = replicas(strategy), on_read(strategy), on_read(strategy, AGGREGATION.SUM, np.int64(0))
    v.assign(1)
    assert of_replicas(strategy, v) == [1 / n] * n
    refused(TypeError, f"'{count.name}': float64 cannot be assigned to int64", lambda: count.assign(1.5))
    refused(ValueError, rf"'{v.name}' has shape \(\); a value of shape \(2,\)", lambda: v.assign(np.ones(2)))
    assert (float(v), int(count)) == (1.0, 0)
    for value in (7, -7, (2**53 + 1) * 4):
        count.assign(np.int64(value))
        part = abs(value) // n * (1 if value > 0 else -1)
        assert (count.numpy().dtype, int(count)) == (np.int64, part * n)
        assert in_replicas(strategy, lambda _: int(count)) == (part,) * n


@ASYNCHRONOUS_TOO
@pytest.mark.parametrize("aggregation", AGGREGATION)
def test_across_replicas_each_copy_is_added_to(strategy, aggregation):
    """As in TensorFlow, of the other aggregations: what is read changes by as much. To a sum nothing is added, nor
    where there is no aggregation; the error says where to do it. A per-replica value is not assigned."""
    n, v = replicas(strategy), on_read(strategy, aggregation)
    with pytest.raises(ValueError, match=f"a per-replica value was assigned to '{v.name}'"):
        v.assign(ps.PerReplica([np.float32(1.0)] * max(2, n)))
    assert of_replicas(strategy, v) == [0.0] * n
    if aggregation in (AGGREGATION.SUM, AGGREGATION.NONE):
        for how in ("assign_add", "assign_sub"):
            said = f"{how} of '{v.name}' was called in cross-replica context.*strategy.run"
            refused(ValueError, said, lambda how=how: getattr(v, how)(1.0))
        assert of_replicas(strategy, v) == [0.0] * n
        return
    in_replicas(strategy, lambda replica: v.assign(np.float32(replica)))
    before = float(v)
    assert v.assign_add(3.0) is v
    v.assign_sub(1.0)
    assert float(v) == before + 2.0
    assert of_replicas(strategy, v) == [i + 2.0 for i in range(n)]


@ASYNCHRONOUS_TOO
@pytest.mark.parametrize("aggregation", COMBINING)
def test_a_read_has_the_variable_s_dtype(strategy, aggregation):
    """Also where a mean is worked out in another one; truth values are the first replica's."""
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64, np.complex64):
        v = on_read(strategy, aggregation, np.ones(2, dtype))
        v.assign(np.full(2, 4, dtype))
        assert (v.numpy().dtype, v.numpy().tolist()) == (np.dtype(dtype), [4, 4])
        assert {value.dtype for value in in_replicas(strategy, lambda _, v=v: v.read_value())} == {np.dtype(dtype)}
    truth = on_read(strategy, AGGREGATION.ONLY_FIRST_REPLICA, np.zeros(2, bool))
    in_replicas(strategy, lambda replica: truth.assign(np.array([replica == 0, replica == 1])))
    assert (truth.numpy().dtype, truth.numpy().tolist()) == (np.bool_, [True, False])


def test_it_is_reduced_as_a_per_replica_value(strategy):
    """By `reduce` and `reduce_to`, with any operation: its copies count, whatever its aggregation is. A value with its
    locality has one for each copy."""
    n, v = replicas(strategy), on_read(strategy, AGGREGATION.ONLY_FIRST_REPLICA)
    w = variable(strategy, 0.0)
    fill(strategy, v)
    total = n * (n + 1) / 2
    assert float(strategy.reduce("sum", v, None)) == total
    assert float(strategy.reduce("mean", v, None)) == total / n
    with strategy.scope():
        here = strategy.extended.reduce_to("sum", v, strategy.extended.worker_devices[0])
        reduced = strategy.extended.reduce_to("sum", v, w)
        strategy.extended.update(w, lambda w, x: w.assign(x), (reduced,))
    assert (float(here), float(w)) == (total, total)
    found = strategy.extended.reduce_to("mean", 3.0, v)
    assert [float(x) for x in strategy.experimental_local_results(found)] == [3.0] * n


# ---- Checkpoints: the aggregate is saved, and shared out among the replicas of then ----

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "complex64": np.complex64, "bool": np.bool_}
DTYPES |= {"float16": np.float16, "float64": np.float64}


AGGREGATIONS = {aggregation.name.lower(): aggregation for aggregation in AGGREGATION}


@pytest.fixture(autouse=True, scope="module")
def _root(tmp_path_factory):
    """Servers of this process keep checkpoints below the directory in which they were started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("checkpoints"))
        yield


ROOTS = {"mirrored": "runs/", "embedded": ""}
"""Where each kind of strategy looks for what servers save."""


@pytest.fixture(scope="module", params=["servers-1x4", "mirrored-4"])
def four(_root, request):
    """A strategy of four replicas."""
    with opened(request.param) as strategy:
        yield strategy


@pytest.fixture(scope="module")
def saved(four):
    """The path of a checkpoint of variables of every aggregation and dtype, a plain one and a metric: of four replicas.
    Replica 0 has added 1 to each sum, replica 1 has added 2, and so on."""
    made = {name: create(four, name, aggregation) for name, aggregation in AGGREGATIONS.items()}
    for v in made.values():
        in_replicas(four, lambda replica, v=v: v.assign_add(np.float32(replica + 1)))
    made["integers"] = v = create(four, "integers", AGGREGATION.SUM, np.zeros(2, "int64"))
    in_replicas(four, lambda replica: v.assign(np.array([replica + 1, -replica - 1])))
    for name, dtype in DTYPES.items():
        made[name] = v = create(four, name, *of_dtype(dtype))
        in_replicas(four, lambda _, v=v, dtype=dtype: v.assign(np.array([0, 1, 1], dtype)))
    with four.scope():
        made["plain"] = ps.Variable(8.0, name="plain")
        made["metric"] = metric = ps.metrics.Mean("loss")
    in_replicas(four, lambda replica: metric.update_state([[6.0], [1.0, 2.0], [], []][replica]))
    root, path = ROOTS[kind_of(four)], f"of {kind_of(four)}/ckpt"
    checkpoint = tracking(four, made)
    saved = checkpoint.save(root + path)
    checkpoint.sync()  # servers write it behind the next steps
    return saved.removeprefix(root)


def create(strategy, name, aggregation, value=0.0):
    with strategy.scope():
        return ps.Variable(value, name=name, synchronization=ON_READ, aggregation=aggregation)


def of_dtype(dtype):
    """How a variable of a dtype is aggregated, and what it begins with."""
    return AGGREGATION.ONLY_FIRST_REPLICA if dtype is np.bool_ else AGGREGATION.MEAN, np.zeros(3, dtype)


def copies_of(strategy, v):
    return [np.asarray(x).tolist() for x in in_replicas(strategy, lambda _: v.read_value())]


def tracking(strategy, made=()):
    """A checkpoint of a variable or a dict of them."""
    with strategy.scope():
        return ps.train.Checkpoint(made=made)


@pytest.mark.parametrize("kind", ["servers-2x2", "mirrored-2"])
@pytest.mark.parametrize("created", ["before the restore", "after the restore"])
def test_the_aggregate_is_shared_out_among_the_replicas_of_now(saved, kind, created):
    """A sum in equal parts, a mean and a first replica's value whole; a variable without aggregation begins anew. A
    plain value is shared out as an aggregate."""
    with opened(kind) as strategy:
        path = ROOTS[kind_of(strategy)] + saved
        if created == "after the restore":
            tracking(strategy).restore(path)
        made = {name: create(strategy, name, how, 50.0) for name, how in AGGREGATIONS.items()}
        made["plain"] = create(strategy, "plain", AGGREGATION.SUM)
        if created == "before the restore":
            tracking(strategy, made).restore(path).assert_existing_objects_matched()
        expected = {"sum": 5.0, "mean": 2.5, "only_first_replica": 1.0, "none": 50.0, "plain": 4.0}
        for name, v in made.items():
            assert copies_of(strategy, v) == [expected[name]] * 2, name
        assert [float(made[name]) for name in ("sum", "mean", "only_first_replica")] == [10.0, 2.5, 1.0]


def test_each_has_its_part_of_what_was_saved(four, saved):
    """What an ordinary variable has saved is each replica's value, whole, of a mean; every dtype is saved. A count of
    10 over four replicas is 2 for each, and the first has what is left over; TensorFlow loses it. A save changes no
    copy."""
    made = {name: create(four, name, *of_dtype(dtype)) for name, dtype in DTYPES.items()}
    expected = dict.fromkeys(DTYPES, [[0, 1, 1]] * 4) | {"plain": [8.0] * 4, "integers": [[4, -4], *[[2, -2]] * 3]}
    made["plain"] = create(four, "plain mean", AGGREGATION.MEAN)
    made["integers"] = create(four, "integers", AGGREGATION.SUM, np.zeros(2, "int64"))
    root = ROOTS[kind_of(four)]
    tracking(four, made).restore(root + saved).assert_existing_objects_matched()
    for _ in range(2):
        assert {name: copies_of(four, v) for name, v in made.items()} == expected
        tracking(four, made).save(f"{root}again/ckpt")
    assert all(made[name].numpy().dtype == dtype for name, dtype in DTYPES.items())


def test_one_replica_goes_on_where_four_were(saved):
    """A plain variable gets the aggregate of copies; a mean over 3 values goes on with a fourth."""
    with opened("servers-1x1") as one, one.scope():
        made = {"sum": ps.Variable(0.0, name="v"), "metric": ps.metrics.Mean("loss")}
        tracking(one, made).restore(saved).assert_existing_objects_matched()
        assert (float(made["sum"]), made["metric"].result()) == (10.0, 3.0)
        one.run(lambda: made["metric"].update_state([7.0]))
        assert made["metric"].result() == 4.0


@pytest.mark.parametrize("aggregation", AGGREGATION)
def test_across_replicas_no_rows_are_changed(strategy, aggregation):
    """Whatever the aggregation: each replica has rows of its own. TensorFlow refuses it as well."""
    v, slices = on_read(strategy, aggregation, np.zeros(3, "float32")), ps.IndexedSlices(np.float32([1.0]), [0], (3,))
    for how in ("scatter_add", "scatter_update", "scatter_min"):
        with pytest.raises(ValueError, match=f"{how} of '{v.name}' was called in cross-replica context"):
            getattr(v, how)(slices)
