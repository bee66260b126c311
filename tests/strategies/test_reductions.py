"""Reductions over replicas, with NumPy as the oracle, and where their values come to be."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.arraylike import LazyArray
from tests.kit.cases import search
from tests.kit.strategies import KINDS, copies, in_replicas, kind_of, kinds, merged, of_each, replicas, variable

here = ps.get_replica_context
pytestmark = kinds("default", "mirrored-1", "mirrored-2", "servers-2x2", soak=KINDS)

FLOATS = ("float16", ml_dtypes.bfloat16, "float32", "float64", "complex64")
INTEGERS = ("bool", "int8", "uint8", "int32", "int64", "uint64")
OPS = ("sum", "mean")


def dtype_of(op, dtype):
    """In which dtype a reduction comes back: bool counts, means of integers and of half precision are wider."""
    dtype = np.dtype(dtype)
    if op == "sum":
        return np.dtype("int64") if dtype.kind == "b" else dtype
    if dtype.kind in "biu":
        return np.dtype("float64")
    return np.dtype("float32") if dtype.itemsize == 2 else dtype


def oracle(op, rows, dtype):
    """The sum or mean of rows along their first axis."""
    wide = np.asarray(rows, "complex128" if np.dtype(dtype).kind == "c" else "float64")
    return wide.sum(axis=0) if op == "sum" else wide.mean(axis=0)


def close(found, expected, dtype):
    half = np.dtype(dtype).itemsize == 2
    np.testing.assert_allclose(np.asarray(found, expected.dtype), expected, rtol=2e-2 if half else 1e-6)


# ---- reduce ----


@pytest.mark.parametrize("op", OPS)
def test_every_dtype_is_reduced(strategy, op):
    """Over replicas element by element, and over a batch, of which replicas have 3, 1, 0 and 2 examples.

    The result's dtype does not depend on the strategy, and MEAN divides by the true number.
    """
    n = replicas(strategy)
    for dtype in (*FLOATS, *INTEGERS):
        rows = (np.arange(24).reshape(4, 2, 3) % 7).astype(dtype)[:n]
        found = strategy.reduce(op, of_each(strategy, [row.copy() for row in rows]), axis=None)
        assert (found.dtype, found.shape) == (dtype_of(op, dtype), (2, 3))
        close(found, oracle(op, rows, dtype), dtype)
        rows = [(np.arange(2 * k).reshape(k, 2) % 5 + i).astype(dtype) for i, k in enumerate((3, 1, 0, 2))]
        found = strategy.reduce(op, of_each(strategy, rows), axis=0)
        assert (found.dtype, found.shape) == (dtype_of(op, dtype), (2,))
        close(found, oracle(op, np.concatenate(rows[:n]), dtype), dtype)


@given(sizes=st.lists(st.integers(0, 5), min_size=4, max_size=4), op=st.sampled_from(OPS), seed=st.integers(0, 9))
@search(0.25)
def test_any_split_of_a_batch_gives_the_same(strategy, sizes, op, seed):
    """Whatever replica has which examples, the reduction is that of the batch as a whole."""
    sizes[0] += not sum(sizes[: replicas(strategy)])
    rows = [np.random.default_rng([seed, i]).normal(size=(k, 3)) for i, k in enumerate(sizes)]
    found = strategy.reduce(op, of_each(strategy, rows), axis=0)
    whole = np.concatenate(rows[: replicas(strategy)])
    np.testing.assert_allclose(found, oracle(op, whole, "float64"), atol=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_any_axis(strategy, op):
    """It is reduced within each replica's array, and then over the replicas."""
    n = replicas(strategy)
    arrays = [np.arange(24.0).reshape(2, 3, 4) + 100 * i for i in range(4)]
    for axis in (0, 1, 2, -1, -2):
        found = strategy.reduce(op, of_each(strategy, arrays), axis=axis)
        whole = np.concatenate(arrays[:n], axis=axis)
        np.testing.assert_allclose(found, whole.sum(axis=axis) if op == "sum" else whole.mean(axis=axis))


@pytest.mark.parametrize("op", OPS)
def test_several_axes(strategy, op):
    """MEAN divides by the true number of elements; no axis at all is none."""
    n = replicas(strategy)
    reduced = {"sum": np.sum, "mean": np.mean}[op]
    for axis in ((0, 1), [0, 2], (2, 0, 1)):
        arrays = [np.arange(12.0 * (i + 1)).reshape(i + 1, 3, 4) for i in range(4)]
        found = strategy.reduce(op, of_each(strategy, arrays), axis=axis)
        np.testing.assert_allclose(found, reduced(np.concatenate(arrays[:n]), axis=tuple(axis)))
    for axis in ((-1,), ()):
        found = strategy.reduce(op, of_each(strategy, [np.arange(24.0).reshape(2, 3, 4)] * 4), axis=axis)
        expected = reduced(np.arange(24.0).reshape(2, 3, 4), axis=axis) * (n if op == "sum" else 1)
        np.testing.assert_allclose(found, expected)


def test_axes_that_are_not_there(strategy):
    """What is no number, and a number that the array has no axis of or that comes twice."""
    for axis, error in (
        *((wrong, TypeError) for wrong in ("a", 1.5, (0, None))),
        *((wrong, ValueError) for wrong in (2, -3, (0, 5), (0, 0), (1, -1))),
    ):
        with pytest.raises(error, match="axis"):
            strategy.reduce("sum", of_each(strategy, [np.ones((2, 3))] * 4), axis=axis)


@pytest.mark.parametrize("op", OPS)
def test_a_nest_is_reduced_leaf_by_leaf(strategy, op):
    """Of what `run` returned: each leaf as if it were alone, in one round; an empty one comes back empty."""
    n = replicas(strategy)
    x = of_each(strategy, [np.arange(6.0).reshape(2, 3) + i for i in range(4)])
    nest = strategy.run(lambda own: {"a": own, "b": [own.sum(axis=1), (own[:, 0],)]}, (x,))
    for axis in (None, 0):
        found = strategy.reduce(op, nest, axis=axis)
        alone = [strategy.reduce(op, leaf, axis=axis) for leaf in (nest["a"], nest["b"][0], nest["b"][1][0])]
        assert [leaf.tolist() for leaf in (found["a"], found["b"][0], found["b"][1][0])] == [
            leaf.tolist() for leaf in alone
        ]
    assert strategy.reduce(op, of_each(strategy, [[1.0, 2.0]] * 4), axis=None) == [n * 1.0, n * 2.0] or op == "mean"
    assert strategy.reduce(op, {"a": []}, axis=None) == {"a": []}
    if kind_of(strategy) == "embedded":
        before = strategy.round
        strategy.reduce(op, nest, axis=0)
        assert strategy.round == before + 1


MISUSED = {
    "None": (None, TypeError),
    "text": ("text", TypeError),
    "an object": (object(), TypeError),
    "a nest with text": ({"a": 1.0, "b": "text"}, TypeError),
    "words": (np.array(["a"]), TypeError),
    "too many": (ps.PerReplica([1.0] * 5), ValueError),
}


@pytest.mark.parametrize("op", OPS)
def test_what_cannot_be_reduced(strategy, op):
    """The same class of error on every strategy, however many replicas there are."""
    for name, (value, error) in MISUSED.items():
        value = {"a": ps.PerReplica([1.0] * replicas(strategy)), "b": "text"} if isinstance(value, dict) else value
        with pytest.raises((TypeError, ValueError), match=r".") as raised:
            strategy.reduce(op, value, axis=None)
        assert raised.type is error, name


def test_shapes_that_differ_need_an_axis(strategy):
    """The error has both shapes and what to write; nothing is broken by it."""
    x = of_each(strategy, [np.ones((4, 3)), np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 3))])
    if replicas(strategy) > 1:
        with pytest.raises(ValueError, match=r"shapes \(4, 3\) and \(2, 3\); give the axis .* axis=0"):
            strategy.reduce("sum", x, axis=None)
        with pytest.raises(ValueError, match=r"shapes \(4,\) and \(2,\)"):
            strategy.reduce("sum", x, axis=1)
    assert strategy.reduce("mean", x, axis=0).tolist() == [1.0] * 3


def test_nothing_at_all(strategy):
    """The mean of no examples is NaN, their sum 0, of the examples' shape."""
    none = of_each(strategy, [np.zeros((0, 2), "float32")] * 4)
    with np.errstate(all="raise"):
        mean = strategy.reduce("mean", none, axis=0)
    assert (mean.dtype, mean.shape) == (np.float32, (2,))
    assert np.isnan(mean).all()
    assert strategy.reduce("sum", none, axis=0).tolist() == [0.0, 0.0]
    assert np.isnan(strategy.reduce("mean", of_each(strategy, [np.zeros(0, "int64")] * 4), axis=0))


def test_a_mean_of_integers_is_a_float(strategy):
    """2 and 3 make 2.5, as arrays and as Python numbers."""
    n = replicas(strategy)
    expected = np.arange(2, 2 + n).mean()
    for values in (list(range(2, 6)), [np.int32(i) for i in range(2, 6)]):
        found = strategy.reduce("mean", of_each(strategy, values), axis=None)
        assert (found, found.dtype) == (expected, np.float64)
    assert strategy.reduce("mean", of_each(strategy, [np.array([2, 3])] * 4), axis=0) == 2.5


def test_dtypes_that_differ_are_promoted(strategy):
    """As NumPy does."""
    values = [np.ones(2, dtype) for dtype in ("int32", "float32", "float64", "float32")]
    found = strategy.reduce("sum", of_each(strategy, values), axis=None)
    assert found.dtype == np.result_type(*values[: replicas(strategy)])
    assert found.tolist() == [float(replicas(strategy))] * 2


def test_a_plain_value(strategy):
    """With one replica it is that one's; with several their mean, while a sum of it would count it once or often."""
    n, value = replicas(strategy), np.array([1.0, 3.0])
    assert strategy.reduce("mean", value, axis=None).tolist() == [1.0, 3.0]
    assert strategy.reduce("mean", value, axis=0) == 2.0
    assert strategy.reduce("mean", 5, axis=None) == 5.0
    if n == 1:
        assert strategy.reduce("sum", value, axis=None).tolist() == [1.0, 3.0]
        assert strategy.reduce("sum", value, axis=0) == 4.0
        return
    for reduce in (
        lambda: strategy.reduce("sum", value, axis=None),
        lambda: strategy.extended.reduce_to("sum", value, strategy.extended.worker_devices[0]),
        lambda: strategy.extended.batch_reduce_to("sum", [(value, value)]),
        lambda: merged(strategy, lambda s, x: s.extended.reduce_to("sum", x, x), value),
    ):
        with pytest.raises(ValueError, match=f"SUM of ndarray, which is not a per-replica value, with {n} local"):
            reduce()


NAMES = ["sum", "SUM", "Sum", ps.ReduceOp.SUM, ps.VariableAggregation.SUM]


def test_the_names_of_reductions(strategy):
    """In any case, and as the enums of the documents."""
    n, x, device = replicas(strategy), of_each(strategy, [1.0] * 4), strategy.extended.worker_devices[0]
    for op in NAMES:
        assert strategy.reduce(op, x, axis=None) == n
        assert strategy.extended.reduce_to(op, x, device) == n
        assert strategy.extended.batch_reduce_to(op, [(x, device)]) == [n]
        found = in_replicas(strategy, lambda i, op=op: float(here().all_reduce(op, np.float32(1.0))))
        assert found == (n,) * n


def test_a_name_need_not_be_one_object(strategy):
    """Replicas that make up the name for themselves mean the same reduction."""
    found = in_replicas(strategy, lambda i: float(here().all_reduce("".join(["s", "um"]), np.float32(1.0))))
    assert found == (float(replicas(strategy)),) * replicas(strategy)


def test_other_reductions_are_refused(strategy):
    """The message says which there are."""
    x, device = of_each(strategy, [1.0] * 4), strategy.extended.worker_devices[0]
    for op in ("max", None, 3, ps.VariableAggregation.NONE, ps.VariableAggregation.ONLY_FIRST_REPLICA):
        for reduce in (
            lambda op: strategy.reduce(op, x, axis=None),
            lambda op: strategy.extended.reduce_to(op, x, device),
            lambda op: strategy.extended.batch_reduce_to(op, [(x, device)]),
            lambda op: strategy.run(lambda: here().all_reduce(op, 1.0)),
        ):
            with pytest.raises(ValueError, match=r"unknown reduction .*; use ps\.ReduceOp\.SUM or MEAN"):
                reduce(op)


def test_values_of_copies_are_reduced(strategy):
    """A variable with a copy for each replica is a per-replica value of what they hold."""
    v = variable(strategy, 0.0, synchronization=ps.VariableSynchronization.ON_READ)
    in_replicas(strategy, lambda i, w: w.assign(np.float32(i + 1)), v)
    assert strategy.reduce("sum", v, axis=None) == sum(range(1, replicas(strategy) + 1))


def test_a_per_replica_value_in_another_is_refused(strategy):
    """A reduction takes one array from each replica."""
    if replicas(strategy) == 1:
        pytest.skip("one replica has no per-replica values")
    nested = ps.PerReplica([of_each(strategy, [1.0] * 4)] * replicas(strategy))
    with pytest.raises(TypeError, match="stands inside another one"):
        strategy.reduce("sum", nested, axis=None)


def test_what_is_reduced_is_nobodys_to_change(strategy):
    """All replicas may share the value; and whoever gave an array may go on changing that."""
    n = replicas(strategy)
    given_ = [np.ones(2) for _ in range(4)]
    x = of_each(strategy, given_)
    found = [strategy.reduce(op, x, axis=None) for op in OPS]
    found += [strategy.extended.reduce_to("sum", x, strategy.extended.worker_devices[0])]
    if kind_of(strategy) != "default":  # whose one replica gets back what it gave
        found += in_replicas(strategy, lambda i, x: here().all_reduce("sum", x), x)
    for array in given_:
        array[:] = 5.0
    assert found[1].tolist() == [1.0, 1.0]
    assert all(value.tolist() == [float(n)] * 2 for value in (found[0], *found[2:]))
    for value in found:
        with pytest.raises(ValueError, match="read-only"):
            value += 1.0


def test_an_aggregation_is_a_reduction():
    """SUM and MEAN are; the others have none."""
    kinds = ps.VariableAggregation
    assert ps.ReduceOp.from_variable_aggregation(kinds.SUM) is ps.ReduceOp.SUM
    assert ps.ReduceOp.from_variable_aggregation(kinds.MEAN) is ps.ReduceOp.MEAN
    for other in (kinds.NONE, kinds.ONLY_FIRST_REPLICA, "sum", None):
        with pytest.raises(ValueError, match=r"is no reduction; there is one for VariableAggregation\.SUM and MEAN"):
            ps.ReduceOp.from_variable_aggregation(other)


# ---- reduce_to ----


def arrays(value):
    """The arrays of a value, by replica; one array for what is not distributed."""
    return [np.asarray(x).tolist() for x in ps.get_strategy().experimental_local_results(value)]


def test_to_the_value_itself_is_an_all_reduce(strategy):
    """Also to another per-replica value, or to all devices: each replica gets the result, on its device."""
    n = replicas(strategy)
    x = of_each(strategy, [np.full(2, i + 1.0) for i in range(4)])
    total = float(sum(range(1, n + 1)))
    for to in (x, of_each(strategy, [np.zeros(5)] * n), list(strategy.extended.worker_devices)):
        found = strategy.extended.reduce_to("sum", x, to)
        assert isinstance(found, ps.Mirrored) == (n > 1)
        assert arrays(found) == [[total] * 2] * n


def test_to_one_device_gives_an_array(strategy):
    """To each by its long and by its short name, and to a list of that one."""
    x = of_each(strategy, [np.full(2, i + 1.0) for i in range(4)])
    expected = np.mean(np.arange(1.0, replicas(strategy) + 1))
    for index, device in enumerate(strategy.extended.worker_devices):
        for to in (device, [device], (device,), f"cpu:{index}", f"/device:CPU:{index}"):
            found = strategy.extended.reduce_to("mean", x, to)
            assert isinstance(found, np.ndarray | LazyArray)
            assert found.tolist() == [expected] * 2


def test_to_several_devices_gives_a_copy_on_each(strategy):
    """In the order in which they are named."""
    devices = strategy.extended.worker_devices[:2]
    found = strategy.extended.reduce_to("mean", of_each(strategy, [1.0] * 4), devices)
    assert arrays(found) == [1.0] * len(devices)


def test_to_a_variable_has_its_locality(strategy):
    """One value for each copy of it, for `update`, which adds the sum to every copy once."""
    n = replicas(strategy)
    v = variable(strategy)

    def merge(strategy, x):
        total = strategy.extended.reduce_to("sum", x, v)
        strategy.extended.update(v, lambda v, t: v.assign_add(t), (total,))
        return total

    total = merged(strategy, merge, of_each(strategy, [np.full(3, i + 1.0, "float32") for i in range(4)]))
    expected = [float(sum(range(1, n + 1)))] * 3
    assert v.numpy().tolist() == expected
    assert np.asarray(strategy.experimental_local_results(total)[0]).tolist() == expected
    if kind_of(strategy) == "mirrored":
        with strategy.scope():
            kept = strategy.extended.reduce_to("mean", np.ones(3, "float32"), v)
        assert len(strategy.experimental_local_results(kept)) == copies(strategy, v)
    assert all(np.asarray(w).tolist() == expected for w in strategy.experimental_local_results(v))


def test_to_what_is_no_place(strategy):
    """Neither a variable, a device, nor a value; the message names one."""
    x = of_each(strategy, [1.0] * 4)
    for to in (None, 5, [], [3], {"a": "cpu:0"}):
        with pytest.raises(TypeError, match="is no destination; give a variable, a worker device such as"):
            strategy.extended.reduce_to("mean", x, to)


def test_to_a_device_that_is_not_here(strategy):
    """The message has those that are."""
    for to in ("cpu:9", "/job:worker/task:7/device:CPU:0"):
        with pytest.raises(
            ValueError, match=f"no device of this process; it has {strategy.extended.worker_devices[0]}"
        ):
            strategy.extended.reduce_to("mean", of_each(strategy, [1.0] * 4), to)


def test_a_mirrored_value_is_reduced_already(strategy):
    """Its mean is itself; a sum of it is refused on every strategy, by `reduce` and by `reduce_to`."""
    n = replicas(strategy)
    x = of_each(strategy, [np.float32(1.0)] * 4)
    once = strategy.extended.reduce_to("sum", x, x)
    assert strategy.reduce("mean", once, axis=None) == n
    mirrored = ps.Mirrored([np.float32(3.0)] * n)
    assert strategy.reduce("mean", mirrored, axis=None) == 3.0
    for value in (mirrored, *([once, strategy.extended.reduce_to("sum", x, variable(strategy))] if n > 1 else [])):
        for attempt in (
            lambda value=value: strategy.reduce("SUM", value, axis=None),
            lambda value=value: strategy.extended.reduce_to("sum", value, "cpu:0"),
        ):
            with pytest.raises(ValueError, match="SUM of"):
                attempt()


def test_what_each_replica_all_reduced_is_a_value_of_each(strategy):
    """A result for each replica, whose sum is R times as large; with one replica the value itself."""
    n = replicas(strategy)
    x = of_each(strategy, [np.float32(i + 1.0) for i in range(4)])
    total = sum(range(1, n + 1))
    for merge in (
        lambda own: here().all_reduce("sum", own),
        lambda own: here().merge_call(lambda s, y: s.extended.reduce_to("sum", y, y), (own,)),
    ):
        found = strategy.run(merge, (x,))
        assert isinstance(found, ps.PerReplica) == (n > 1)
        assert [float(own) for own in strategy.experimental_local_results(found)] == [total] * n
        assert strategy.reduce("SUM", found, axis=None) == n * total


WAYS = {
    "reduce": lambda s, x, v: s.reduce("sum", x, axis=None),
    "reduce_to the value": lambda s, x, v: s.extended.reduce_to("sum", x, x),
    "reduce_to a device": lambda s, x, v: s.extended.reduce_to("sum", x, s.extended.worker_devices[0]),
    "reduce_to a variable": lambda s, x, v: s.extended.reduce_to("sum", x, v),
    "batch_reduce_to": lambda s, x, v: s.extended.batch_reduce_to("sum", [(x, v)])[0],
    "all_reduce": lambda s, x, v: s.experimental_local_results(s.run(lambda y: here().all_reduce("sum", y), (x,)))[0],
}
USES = {
    "add": lambda r: r + 1,
    "radd": lambda r: 1 + r,
    "divided": lambda r: r / np.float32(2.0),
    "negated": lambda r: -r,
    "power": lambda r: r**2,
    "greater": lambda r: r > 2,
    "equal": lambda r: r == np.float32(3.0),
    "float": float,
    "int": int,
    "bool": bool,
    "shape": lambda r: r.shape,
    "ndim": lambda r: r.ndim,
    "dtype": lambda r: r.dtype,
    "format": lambda r: f"{r:.3f}",
    "ufunc": np.sqrt,
    "function": lambda r: np.sum([r, r]),
    "array": np.asarray,
    "numpy": lambda r: r.numpy(),
    "type of numpy": lambda r: type(r.numpy()),
    "round": lambda r: np.round(r / 3, 2),
}


def test_a_reduced_value_is_used_as_an_array(strategy):
    """Whichever way it was reduced, and wherever it is: only its class may differ, and what comes of it is NumPy's."""
    n = replicas(strategy)
    x, v = of_each(strategy, [np.float32(i + 1.0) for i in range(4)]), variable(strategy, 0.0)
    expected = np.asarray(np.float32(sum(range(1, n + 1))))
    for way, reduced in WAYS.items():
        if kind_of(strategy) == "default" and way == "all_reduce":
            continue  # the default context's one replica gets back what it gave
        for use, apply in USES.items():
            with strategy.scope():
                found = apply(reduced(strategy, x, v))
            if use.endswith("numpy"):
                assert found == (np.ndarray if "type" in use else expected), (way, use)
            else:
                wanted = apply(expected)
                assert (found, type(found)) == (wanted, type(wanted)), (way, use)


def test_reduced_arrays_have_their_elements(strategy):
    """They are indexed, iterated over, and have a length, of any way to reduce them."""
    n, v = replicas(strategy), variable(strategy)
    x = of_each(strategy, [np.full(3, i + 1.0, "float32") for i in range(4)])
    total = float(sum(range(1, n + 1)))
    for way in WAYS.values():
        with strategy.scope():
            found = way(strategy, x, v)
            assert (len(found), found.shape, float(found[1])) == (3, (3,), total)
            assert [float(item) for item in found] == [total] * 3
            assert (found * found).sum() == 3 * total**2


# ---- batch_reduce_to, broadcast_to ----


def test_a_batch_of_reductions_is_each_of_them(strategy):
    """Of different shapes, dtypes and destinations, in the order of the pairs."""
    n, v = replicas(strategy), variable(strategy)
    x = of_each(strategy, [np.full(3, i + 1.0, "float32") for i in range(4)])
    y = of_each(strategy, [i + 1 for i in range(4)])
    pairs = [(x, x), (y, strategy.extended.worker_devices[0]), (x, v)]
    found = strategy.extended.batch_reduce_to("mean", pairs, experimental_hints={"bytes_per_pack": 1})
    mean = np.mean(np.arange(1.0, n + 1))
    assert isinstance(found, list)
    assert arrays(found[0]) == [[mean] * 3] * n
    assert (found[1].tolist(), found[1].dtype) == (mean, np.float64)
    assert np.asarray(strategy.experimental_local_results(found[2])[0]).tolist() == [mean] * 3
    assert strategy.extended.batch_reduce_to("sum", []) == []


def test_a_batch_comes_as_a_zip(strategy):
    """Pairs that are there once are enough."""
    x, v = of_each(strategy, [1.0] * 4), variable(strategy)
    found = strategy.extended.batch_reduce_to("sum", zip([x, x], [x, v], strict=True))
    assert [float(value[0] if value.ndim else value) for value in found] == [replicas(strategy)] * 2


def test_a_batch_with_a_wrong_pair_reduces_nothing(strategy):
    """What is wrong is told before anything is recorded; the next one is as if it had not been."""
    v, x = variable(strategy), of_each(strategy, [1.0] * 4)
    with strategy.scope():
        for pairs, error in (
            ([(x, v), (x, None)], TypeError),
            ([(x, v), (of_each(strategy, ["text"] * 4), v)], TypeError),
        ):
            with pytest.raises(error):
                strategy.extended.batch_reduce_to("sum", pairs)
        assert strategy.reduce("sum", x, axis=None) == replicas(strategy)
    assert v.numpy().tolist() == [0.0] * 3


def test_a_value_is_broadcast(strategy):
    """To one device an array, to several, to all replicas, or to a variable, as many as there are copies."""
    n, extended, array = replicas(strategy), strategy.extended, np.arange(3.0)
    x = of_each(strategy, [np.zeros(2)] * 4)
    for to, count in ((extended.worker_devices[0], 1), ("cpu:0", 1), (list(extended.worker_devices), n), (x, n)):
        found = extended.broadcast_to(array, to)
        assert isinstance(found, ps.Mirrored) == (count > 1)
        assert arrays(found) == [[0.0, 1.0, 2.0]] * count
    v = variable(strategy)
    found = extended.broadcast_to(array, v)
    assert arrays(found) == [[0.0, 1.0, 2.0]] * copies(strategy, v)
    assert arrays(extended.broadcast_to(2.5, x)) == [2.5] * n


def test_only_one_value_is_broadcast(strategy):
    """A mirrored one and a variable's are; a per-replica one is refused, with what to do."""
    n, extended = replicas(strategy), strategy.extended
    x = of_each(strategy, [np.float32(i) for i in range(4)])
    v = variable(strategy, [1.0, 2.0, 3.0])
    assert arrays(extended.broadcast_to(extended.broadcast_to(7.0, x), x)) == [7.0] * n
    assert arrays(extended.broadcast_to(v, x)) == [[1.0, 2.0, 3.0]] * n
    if n > 1:
        with pytest.raises(ValueError, match="one value, and not a per-replica one; reduce it with reduce_to"):
            extended.broadcast_to(x, x)
    with pytest.raises(TypeError, match="is no destination"):
        extended.broadcast_to(1.0, None)


# ---- all_reduce ----


@pytest.mark.parametrize("op", OPS)
def test_nests_are_all_reduced(strategy, op):
    """Leaf by leaf, of any shapes and dtypes; every replica gets a nest like its own."""
    n = replicas(strategy)

    def fn(i):
        return here().all_reduce(op, {"a": (np.full(2, i + 1.0), [np.float32(i)]), "b": np.int32(2 * i)})

    numbers = np.arange(float(n))
    each = numbers.sum() if op == "sum" else numbers.mean()
    for found in in_replicas(strategy, fn):
        assert found["a"][0].tolist() == [each + (n if op == "sum" else 1)] * 2
        assert (float(found["a"][1][0]), float(found["b"])) == (each, 2 * each)


def test_what_all_replicas_share_counts_for_each(strategy):
    """One array for all, a Python number, a variable: each replica's is one."""
    n, shared = replicas(strategy), np.ones(2, "float32")
    v = variable(strategy, 2.0)
    for given_, one in ((shared, [1.0, 1.0]), (3, 3.0), (v, 2.0)):
        found = in_replicas(strategy, lambda i, x: np.asarray(here().all_reduce("sum", x)).tolist(), given_)
        assert found == ((np.asarray(one) * n).tolist(),) * n


def test_nothing_is_a_nest_too(strategy):
    """An empty nest comes back empty."""
    for empty in ((), [], {}):
        assert in_replicas(strategy, lambda i, empty=empty: here().all_reduce("sum", empty)) == (empty,) * replicas(
            strategy
        )


def test_nests_that_differ_are_refused(strategy):
    """In their number of leaves, or in a leaf's shape."""
    if replicas(strategy) == 1:
        pytest.skip("one replica reduces one nest")
    for wrong, says in (
        (lambda i: [1.0] * (i + 1), "different numbers of values"),
        (lambda i: np.ones(i + 1), "reduce arrays of shapes"),
    ):
        with pytest.raises(ValueError, match=says):
            strategy.run(lambda wrong=wrong: here().all_reduce("sum", wrong(here().replica_id_in_sync_group)))
    assert strategy.reduce("sum", of_each(strategy, [1.0] * 4), axis=None) == replicas(strategy)


def test_a_gradient_that_was_all_reduced_is_the_same_everywhere(strategy):
    """The mean of the replicas' means is that of a batch that is split equally, to the last bit on all of them."""
    n = replicas(strategy)
    batch = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")

    def fn(i):
        part = np.array_split(batch, n)[i]
        return here().all_reduce("mean", part.mean(axis=0))

    found = in_replicas(strategy, fn)
    assert len({np.asarray(x).tobytes() for x in found}) == 1
    np.testing.assert_allclose(found[0], batch.mean(axis=0), rtol=1e-5)
