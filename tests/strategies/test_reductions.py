"""Reductions over replicas and gathers, with NumPy as the oracle, and where their values come to be."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from psclient._src.arraylike import LazyArray
from psclient._src.distribute.gathering import ReplicaPosition
from tests.kit.internals import MAX_NDIM
from tests.kit.programs import same_bits
from tests.kit.strategies import KINDS, in_replicas, kind_of, kinds, merged, of_each, refused, replicas, variable

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
    """Over replicas element by element, and over a batch, of which replicas have 3, 1, 0 and 2 examples. The result's
    dtype does not depend on the strategy, and MEAN divides by the true number. Dtypes that differ are promoted as NumPy
    does; Python numbers are integers, whose mean is a float."""
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
    values = [np.ones(2, dtype) for dtype in ("int32", "float32", "float64", "float32")]
    found = strategy.reduce("sum", of_each(strategy, values), axis=None)
    assert (found.dtype, found.tolist()) == (np.result_type(*values[:n]), [float(n)] * 2)
    found = strategy.reduce("mean", of_each(strategy, list(range(2, 6))), axis=None)
    assert (found, found.dtype) == (np.arange(2, 2 + n).mean(), np.float64)


@kinds("default", "mirrored-1", "mirrored-2", "servers-2x2", "async-2x2", soak=KINDS)
@pytest.mark.parametrize("op", OPS)
def test_any_axis(strategy, op):
    """It is reduced within each replica's array, and then over the replicas; several at once, or none. MEAN divides by
    the true number of elements. The mean of no examples is NaN, their sum 0, of the examples' shape."""
    n, reduced = replicas(strategy), {"sum": np.sum, "mean": np.mean}[op]
    same = [np.arange(24.0).reshape(2, 3, 4) + 100 * i for i in range(4)]
    longer = [np.arange(12.0 * (i + 1)).reshape(i + 1, 3, 4) for i in range(4)]
    for arrays, axes in ((same, (0, 1, 2, -1, -2)), (longer, ((0, 1), [0, 2], (2, 0, 1)))):
        for axis in axes:
            joined = axis if isinstance(axis, int) else 0
            axis_ = axis if isinstance(axis, int) else tuple(axis)
            found = strategy.reduce(op, of_each(strategy, arrays), axis=axis)
            np.testing.assert_allclose(found, reduced(np.concatenate(arrays[:n], axis=joined), axis=axis_))
    for axis in ((-1,), ()):
        found = strategy.reduce(op, of_each(strategy, same[:1] * 4), axis=axis)
        np.testing.assert_allclose(found, reduced(same[0], axis=axis) * (n if op == "sum" else 1))
    none = of_each(strategy, [np.zeros((0, 2), "float32")] * 4)
    with np.errstate(all="raise"):
        found = strategy.reduce(op, none, axis=0)
    np.testing.assert_array_equal(found, np.float32([np.nan if op == "mean" else 0] * 2), strict=True)
    if op == "mean":
        assert np.isnan(strategy.reduce(op, of_each(strategy, [np.zeros(0, "int64")] * 4), axis=0))


@pytest.mark.parametrize("op", OPS)
def test_a_nest_is_reduced_leaf_by_leaf(strategy, op):
    """Of what `run` returned: each leaf as if it were alone, in one round; an empty one comes back empty."""
    n = replicas(strategy)
    x = of_each(strategy, [np.arange(6.0).reshape(2, 3) + i for i in range(4)])
    nest = strategy.run(lambda own: {"a": own, "b": [own.sum(axis=1), (own[:, 0],)]}, (x,))
    for axis in (None, 0):
        found = strategy.reduce(op, nest, axis=axis)
        alone = [strategy.reduce(op, leaf, axis=axis) for leaf in (nest["a"], nest["b"][0], nest["b"][1][0])]
        together = [found["a"], found["b"][0], found["b"][1][0]]
        assert [leaf.tolist() for leaf in together] == [leaf.tolist() for leaf in alone]
    assert strategy.reduce(op, of_each(strategy, [[1.0, 2.0]] * 4), axis=None) == [n * 1.0, n * 2.0] or op == "mean"
    assert strategy.reduce(op, {"a": []}, axis=None) == {"a": []}
    if kind_of(strategy) == "embedded":
        before = strategy.round
        strategy.reduce(op, nest, axis=0)
        assert strategy.round == before + 1


def test_what_cannot_be_reduced(strategy):
    """The same class of error on every strategy, however many replicas there are; nothing is broken by it. Shapes that
    differ need an axis: the error has both and what to write."""
    n, one = replicas(strategy), np.ones((2, 3))
    part = {"a": ps.PerReplica([1.0] * n), "b": "text"}
    bad = [(value, None, TypeError, ".") for value in (None, "text", object(), part, np.array(["a"]))]
    unknown = (ml_dtypes.float8_e5m2, np.longdouble, np.clongdouble, [("field", "f4")], "M8[D]", object)
    bad += [({"a": of_each(strategy, [np.zeros(1, kind)] * 4)}, None, TypeError, r"^at \['a'\]: ") for kind in unknown]
    bad += [(ps.PerReplica([1.0] * 5), None, ValueError, ".")]
    bad += [(of_each(strategy, [one] * 4), axis, TypeError, "axis") for axis in ("a", 1.5, (0, None))]
    bad += [(of_each(strategy, [one] * 4), axis, ValueError, "axis") for axis in (2, -3, (0, 5), (0, 0), (1, -1))]
    x = of_each(strategy, [np.ones((4, 3)), np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 3))])
    if n > 1:
        bad.append((x, None, ValueError, r"shapes \(4, 3\) and \(2, 3\); pass .* axis=0"))
        bad.append((x, 1, ValueError, r"shapes \(4,\) and \(2,\)"))
        bad.append((ps.PerReplica([of_each(strategy, [1.0] * 4)] * n), None, TypeError, "contains another one"))
    for value, axis, error, says in bad:
        for op in OPS:
            with pytest.raises((TypeError, ValueError), match=says) as raised:
                strategy.reduce(op, value, axis=axis)
            assert raised.type is error, value
    assert strategy.reduce("mean", x, axis=0).tolist() == [1.0] * 3


def test_one_value_is_reduced_already(strategy):
    """A plain one, a mirrored one and a variable, however many copies it has: their mean is itself, while a sum would
    count it once or often. With one replica it is that one's; with several a sum is refused on every strategy."""
    n, extended, v = replicas(strategy), strategy.extended, variable(strategy, [1.0, 3.0])
    x = of_each(strategy, [np.float32(1.0)] * 4)
    once = extended.reduce_to("sum", x, x)
    assert (strategy.reduce("mean", once, None), strategy.reduce("mean", 5, None)) == (n, 5.0)
    plain, mirrored = np.array([1.0, 3.0]), ps.Mirrored([np.array([1.0, 3.0])] * n)
    for value in (plain, mirrored, v):
        assert np.asarray(strategy.reduce("mean", value, axis=None)).tolist() == [1.0, 3.0]
        assert np.asarray(extended.reduce_to("mean", value, v)).tolist() == [1.0, 3.0]
        assert strategy.reduce("mean", value, axis=0) == 2.0
    if n == 1:
        for value in (plain, v):
            assert np.asarray(strategy.reduce("sum", value, axis=None)).tolist() == [1.0, 3.0]
            assert strategy.reduce("sum", value, axis=0) == 4.0
    says = {id(plain): "a ndarray", id(v): "a .*"}
    for value in (plain, v, mirrored, once, extended.reduce_to("sum", x, v)) if n > 1 else (mirrored,):
        words = (
            f"SUM got {says[id(value)]} instead of a per-replica value, with {n} local" if id(value) in says else "SUM"
        )
        for attempt in (
            lambda value: strategy.reduce("SUM", value, axis=None),
            lambda value: extended.reduce_to("sum", value, extended.worker_devices[0]),
            lambda value: extended.batch_reduce_to("sum", [(value, v)]),
            lambda value: merged(strategy, lambda s: s.extended.reduce_to("sum", value, v)),
        ):
            with pytest.raises(ValueError, match=words):
                attempt(value)


def test_the_names_of_reductions(strategy):
    """In any case, and as the enums of the documents; replicas may make up the name for themselves. Of others the
    message says which there are."""
    n, x, device = replicas(strategy), of_each(strategy, [1.0] * 4), strategy.extended.worker_devices[0]
    for op in ("sum", "SUM", "Sum", ps.ReduceOp.SUM, ps.VariableAggregation.SUM):
        assert strategy.reduce(op, x, axis=None) == n
        assert strategy.extended.reduce_to(op, x, device) == n
        assert strategy.extended.batch_reduce_to(op, [(x, device)]) == [n]
        found = in_replicas(strategy, lambda i, op=op: float(here().all_reduce(op, np.float32(1.0))))
        assert found == (n,) * n
    found = in_replicas(strategy, lambda i: float(here().all_reduce("".join(["s", "um"]), np.float32(1.0))))
    assert found == (float(n),) * n
    for op in ("max", None, 3, ps.VariableAggregation.NONE, ps.VariableAggregation.ONLY_FIRST_REPLICA):
        for reduce in (
            lambda op: strategy.reduce(op, x, axis=None),
            lambda op: strategy.extended.reduce_to(op, x, device),
            lambda op: strategy.extended.batch_reduce_to(op, [(x, device)]),
            lambda op: strategy.run(lambda: here().all_reduce(op, 1.0)),
        ):
            with pytest.raises(ValueError, match=r"unknown reduction .*; use ps\.ReduceOp\.SUM or MEAN"):
                reduce(op)


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
        with pytest.raises(ValueError, match=r"is not a reduction; use VariableAggregation\.SUM or MEAN"):
            ps.ReduceOp.from_variable_aggregation(other)


def arrays(value):
    """The arrays of a value, by replica; one array for what is not distributed."""
    return [np.asarray(x).tolist() for x in ps.get_strategy().experimental_local_results(value)]


def test_a_value_is_reduced_to_a_place(strategy):
    """To itself, another per-replica value or all devices: each replica gets the result, on its device. To one device
    by its long and its short name, or a list of that one, an array; to several a copy on each. What is no place, or not
    here, is refused with those that are."""
    n, devices, extended = replicas(strategy), list(strategy.extended.worker_devices), strategy.extended
    x = of_each(strategy, [np.full(2, i + 1.0) for i in range(4)])
    total = float(sum(range(1, n + 1)))
    for to in (x, of_each(strategy, [np.zeros(5)] * n), devices, devices[:2]):
        found = extended.reduce_to("sum", x, to)
        assert isinstance(found, ps.Mirrored) == (n > 1)
        assert arrays(found) == [[total] * 2] * (len(to) if isinstance(to, list) else n)
    for index, device in enumerate(devices):
        for to in (device, [device], (device,), f"cpu:{index}", f"/device:CPU:{index}"):
            found = extended.reduce_to("mean", x, to)
            assert isinstance(found, np.ndarray | LazyArray)
            assert found.tolist() == [total / n] * 2
    for to in (None, 5, [], [3], {"a": "cpu:0"}):
        with pytest.raises(TypeError, match="is not a destination; pass a variable, a worker device such as"):
            extended.reduce_to("mean", x, to)
    for to in ("cpu:9", "/job:worker/task:7/device:CPU:0"):
        with pytest.raises(ValueError, match=f"not a device of this process, which has {devices[0]}"):
            extended.reduce_to("mean", x, to)


WAYS = {
    "reduce": lambda s, x, v: s.reduce("sum", x, axis=None),
    "reduce_to the value": lambda s, x, v: s.extended.reduce_to("sum", x, x),
    "reduce_to a device": lambda s, x, v: s.extended.reduce_to("sum", x, s.extended.worker_devices[0]),
    "reduce_to a variable": lambda s, x, v: s.extended.reduce_to("sum", x, v),
    "batch_reduce_to": lambda s, x, v: s.extended.batch_reduce_to("sum", [(x, v)])[0],
    "all_reduce": lambda s, x, v: s.experimental_local_results(s.run(lambda y: here().all_reduce("sum", y), (x,)))[0],
}
USES = [lambda r: r + 1, lambda r: 1 + r, lambda r: r / np.float32(2.0), lambda r: -r, lambda r: r**2, lambda r: r > 2]
USES += [lambda r: r == np.float32(3.0), float, int, bool, np.sqrt, np.asarray, lambda r: np.round(r / 3, 2)]
USES += [lambda r: r.shape, lambda r: r.ndim, lambda r: r.dtype, lambda r: f"{r:.3f}", lambda r: np.sum([r, r])]


def test_a_reduced_value_is_used_as_an_array(strategy):
    """Whichever way it was reduced, and wherever it is: only its class may differ, and what comes of it is NumPy's.
    Arrays are indexed, iterated over, and have a length; several truths are none. What lives on servers is an index, a
    text, and added to an array in place."""
    n = replicas(strategy)
    x, v = of_each(strategy, [np.float32(i + 1.0) for i in range(4)]), variable(strategy, 0.0)
    expected = np.asarray(np.float32(sum(range(1, n + 1))))
    for way, reduced in WAYS.items():
        if kind_of(strategy) == "default" and way == "all_reduce":
            continue  # the default context's one replica gets back what it gave
        for number, use in enumerate(USES):
            with strategy.scope():
                found, wanted = use(reduced(strategy, x, v)), use(expected)
            assert (found, type(found)) == (wanted, type(wanted)), (way, number)
        with strategy.scope():
            array = reduced(strategy, x, v).numpy()
        assert (type(array), array) == (np.ndarray, expected)
    x, total = of_each(strategy, [np.full(3, i + 1.0, "float32") for i in range(4)]), float(expected)
    for reduced in WAYS.values():
        with strategy.scope():
            found = reduced(strategy, x, variable(strategy))
            assert (len(found), found.shape, float(found[1])) == (3, (3,), total)
            assert [float(item) for item in found] == [total] * 3
            assert (found * found).sum() == 3 * total**2
    for vector in (variable(strategy), found):
        refused(ValueError, "ambiguous", lambda vector=vector: bool(vector))
    index, first = variable(strategy, np.int64(1)), variable(strategy, [1.0, 2.0, 3.0])
    assert ("abc"[index], f"{first}", bool(variable(strategy, 0))) == ("b", repr(first), False)
    array = np.ones(3, "float32")
    array += first
    assert (array.tolist(), first.numpy().tolist()) == ([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])


def test_a_batch_with_a_wrong_pair_reduces_nothing(strategy):
    """What is wrong is told before anything is recorded; the next one is as if it had not been."""
    v, x = variable(strategy), of_each(strategy, [1.0] * 4)
    with strategy.scope():
        for wrong in ((x, None), (of_each(strategy, ["text"] * 4), v)):
            with pytest.raises(TypeError):
                strategy.extended.batch_reduce_to("sum", [(x, v), wrong])
        assert strategy.reduce("sum", x, axis=None) == replicas(strategy)
    assert v.numpy().tolist() == [0.0] * 3


def test_a_value_is_broadcast(strategy):
    """To one device an array, to several, to all replicas, or to a variable, as many as there are copies. A mirrored
    value and a variable's are one value; a per-replica one is refused, with what to do."""
    n, extended, array = replicas(strategy), strategy.extended, np.arange(3.0)
    x = of_each(strategy, [np.float32(i) for i in range(4)])
    for to, count in ((extended.worker_devices[0], 1), ("cpu:0", 1), (list(extended.worker_devices), n), (x, n)):
        found = extended.broadcast_to(array, to)
        assert isinstance(found, ps.Mirrored) == (count > 1)
        assert arrays(found) == [[0.0, 1.0, 2.0]] * count
    v = variable(strategy)
    found = extended.broadcast_to(array, v)
    assert arrays(found) == [[0.0, 1.0, 2.0]] * len(arrays(v))
    assert arrays(extended.broadcast_to(2.5, x)) == [2.5] * n
    assert arrays(extended.broadcast_to(extended.broadcast_to(7.0, x), x)) == [7.0] * n
    assert arrays(extended.broadcast_to(variable(strategy, [1.0, 2.0, 3.0]), x)) == [[1.0, 2.0, 3.0]] * n
    if n > 1:
        with pytest.raises(ValueError, match="one value, not a per-replica value; reduce it with reduce_to"):
            extended.broadcast_to(x, x)
    refused(TypeError, "is not a destination", lambda: extended.broadcast_to(1.0, None))


@pytest.mark.parametrize("op", OPS)
def test_nests_are_all_reduced(strategy, op):
    """Leaf by leaf, of any shapes and dtypes; every replica gets a nest like its own. What all replicas share counts
    for each: an array, a Python number, a variable. Nests that differ are refused."""
    n = replicas(strategy)

    def fn(i):
        return here().all_reduce(op, {"a": (np.full(2, i + 1.0), [np.float32(i)]), "b": np.int32(2 * i)})

    numbers = np.arange(float(n))
    each = numbers.sum() if op == "sum" else numbers.mean()
    for found in in_replicas(strategy, fn):
        assert found["a"][0].tolist() == [each + (n if op == "sum" else 1)] * 2
        assert (float(found["a"][1][0]), float(found["b"])) == (each, 2 * each)
    shared, v = np.ones(2, "float32"), variable(strategy, 2.0)
    for given_, one in ((shared, [1.0, 1.0]), (3, 3.0), (v, 2.0)):
        found = in_replicas(strategy, lambda i, x: np.asarray(here().all_reduce(op, x)).tolist(), given_)
        assert found == ((np.asarray(one) * (n if op == "sum" else 1)).tolist(),) * n
    for empty in ((), [], {}):
        assert in_replicas(strategy, lambda i, empty=empty: here().all_reduce(op, empty)) == (empty,) * n
    for wrong, says in (
        (lambda i: [1.0] * (i + 1), "different numbers of values"),
        (lambda i: np.ones(i + 1), "reduce arrays of shapes"),
    ):
        if n > 1:
            with pytest.raises(ValueError, match=says):
                in_replicas(strategy, lambda i, wrong=wrong: here().all_reduce(op, wrong(i)))
    assert strategy.reduce("sum", of_each(strategy, [1.0] * 4), axis=None) == n


# ---- gather, all_gather ----

DTYPES = ("bool", "int8", "uint64", "float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128")


def odd(dtype, count):
    """Bits of every kind: zeros with a sign, infinities, NaNs with payloads."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.arange(count) % 3 == 0
    bits = np.random.default_rng(count).integers(0, 256, count * dtype.itemsize, "uint8")
    bits[-dtype.itemsize :] = 0
    bits[-1] = 128  # -0.0
    return bits.view(dtype)


def test_every_bit_comes_as_it_was_given(strategy):
    """Also of -0.0, of NaNs, and of truth values; the dtype stays."""
    for dtype in DTYPES:
        arrays = [odd(dtype, 4 + i).reshape(-1, 1) for i in range(4)]
        found = strategy.gather(of_each(strategy, arrays), axis=0)
        assert same_bits(np.asarray(found), np.concatenate(arrays[: replicas(strategy)]))
        assert type(found.numpy()) is np.ndarray


def test_sizes_may_differ_along_the_axis(strategy):
    """In the order of the replicas; an array may be empty, and need not be contiguous."""
    for axis in (0, 1, 2, np.int64(1)):
        arrays = []
        for size in (2, 0, 3, 1):
            shape = [3, 4, 5]
            shape[axis] = size
            arrays.append(np.arange(np.prod(shape), dtype="int32").reshape(shape[::-1]).transpose())
        found = strategy.gather(of_each(strategy, arrays), axis)
        np.testing.assert_array_equal(found, np.concatenate(arrays[: replicas(strategy)], axis), strict=True)


def test_a_nest_is_gathered_leaf_by_leaf(strategy):
    """In cross-replica context, in a merge call, and in replica context."""
    n = replicas(strategy)
    given = [{"a": np.full((1, 2), i), "b": (np.full(i, 1.5),)} for i in range(4)]
    value = of_each(strategy, given)
    ways = [strategy.gather(value, 0), merged(strategy, lambda s, x: s.gather(x, 0), value)]
    if kind_of(strategy) != "default":  # whose one replica gets back what it gave
        ways += in_replicas(strategy, lambda i, x: here().all_gather(x, 0), value)
    for found in ways:
        assert found["a"].tolist() == [[i, i] for i in range(n)]
        assert found["b"][0].tolist() == [1.5] * sum(range(n))
    assert strategy.gather({}, 0) == {}


def test_every_replica_gets_all(strategy):
    """What all of them share counts for each; a result is nobody's to change, and merges to a value of each. A variable
    is what each replica has of it: an ON_READ variable's copies, and a mirrored one R times."""
    n = replicas(strategy)
    shared, v = np.arange(2.0), variable(strategy, [1.0, 2.0])
    found = in_replicas(strategy, lambda i: here().all_gather((shared, v), axis=0))
    assert len(found) == n
    for arrays in found:
        assert [np.asarray(array).tolist() for array in arrays] == [[0.0, 1.0] * n, [1.0, 2.0] * n]
    own = variable(strategy, [0.0], synchronization=ps.VariableSynchronization.ON_READ)
    in_replicas(strategy, lambda i, w: w.assign(np.full(1, i + 1.0, "float32")), own)
    assert strategy.gather(own, 0).tolist() == [i + 1.0 for i in range(n)]
    assert strategy.gather(v, 0).tolist() == [1.0, 2.0] * n
    if kind_of(strategy) == "default":
        return  # whose one replica gets back what it gave
    for array in (*(arrays[0] for arrays in found), strategy.gather(of_each(strategy, [shared] * 4), 0)):
        with pytest.raises(ValueError, match="read-only"):
            array += 1.0


def test_what_cannot_be_gathered_is_refused(strategy):
    """With the reason; the next gather is as if it had not been. Each is called in its context."""
    n = replicas(strategy)
    rows = of_each(strategy, [np.ones((2, 3))] * 4)
    for value, axis, error, says in (
        (rows, None, TypeError, "axis is None, but gather joins arrays along one dimension"),
        (rows, 0.5, TypeError, "axis is 0.5"),
        (rows, -1, ValueError, "axis is -1, and must be at least 0"),
        (rows, 2, ValueError, "axis 2 does not exist in an array of 2 dimensions"),
        (of_each(strategy, [1.0] * 4), 0, ValueError, "scalars cannot"),
        (of_each(strategy, ["text"] * 4), 0, TypeError, "cannot be reduced; pass an array or a number"),
        (of_each(strategy, [np.ones(2, np.longdouble)] * 4), 0, TypeError, "dtype float128 cannot be sent"),
    ):
        with pytest.raises(error, match=says):
            strategy.gather(value, axis)
        with pytest.raises(error, match=says):
            in_replicas(strategy, lambda i, x, axis=axis: here().all_gather(x, axis), value)
    if n > 1:
        for arrays, says in (
            ([np.ones((2, 3 + i)) for i in range(4)], "differ only in dimension 0"),
            ([np.ones((2,) * (i + 1)) for i in range(4)], "differ only in dimension 0"),
            ([np.ones(2, f"int{8 << i % 2}") for i in range(4)], "arrays of dtypes int16 and int8; use the same dtype"),
        ):
            with pytest.raises(ValueError, match=says):
                strategy.gather(of_each(strategy, arrays), 0)
        refused(ValueError, "instead of a per-replica value", lambda: strategy.gather(np.ones(2), 0))
        with pytest.raises(ValueError, match=r"along different axes: \[0, 1"):
            in_replicas(strategy, lambda i, x: here().all_gather(x, i), rows)
    assert strategy.gather(rows, 0).shape == (2 * n, 3)
    if kind_of(strategy) != "default":  # which is both contexts
        with pytest.raises(RuntimeError, match="gather needs cross-replica context but was called in replica context"):
            strategy.run(lambda: strategy.gather(np.ones(1), 0))
        stale = strategy.run(lambda: ps.get_replica_context())
        with pytest.raises(RuntimeError, match="all_gather was called on a replica context that is not"):
            strategy.experimental_local_results(stale)[0].all_gather(np.ones(1), 0)


def gathered(split, arrays, axis, lost=()):
    """What processes of so many replicas get, all arrays given in order; a lost one gives nothing from then on."""
    meet, rows = threading.Barrier(len(split)), {}
    lost = dict(lost)

    def gather(process):
        sums, first = itertools.count(), sum(split[:process])

        def total(array):
            rows[process] = array * 0 if lost.get(process, 3) <= next(sums) else array
            meet.wait(10)
            found = sum(rows.values())
            meet.wait(10)
            return found

        return ReplicaPosition(first, sum(split), total).gather([arrays[first : first + split[process]]], axis)

    with ThreadPoolExecutor(len(split)) as pool:
        return [found for each in pool.map(gather, range(len(split))) for found in each]


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 3)], ids=str)
def test_processes_sum_what_one_would_concatenate(split):
    """To the last bit, with one or several replicas each, of any sizes, none included."""
    for dtype in DTYPES:
        arrays = [odd(dtype, 2 * i).reshape(2, -1) if i else np.zeros((2, 0), dtype) for i in range(sum(split))]
        for found in gathered(split, arrays, 1):
            assert same_bits(found, np.concatenate(arrays, axis=1))


def test_who_is_lost_is_excluded_as_a_whole():
    """Before its shapes are known, or after; the others get all of the others."""
    arrays = [np.full(i + 1, i) for i in range(4)]
    for lost in ({1: 0}, {1: 1}):
        for found in gathered((1, 2, 1), arrays, 0, lost)[::2]:
            assert found.tolist() == [0, 3, 3, 3, 3]


def test_all_processes_refuse_alike():
    """Shapes that do not fit are known to all before anything is sent."""
    asked = []

    def total(array):
        asked.append(array)
        other = np.zeros_like(array)
        other[0, 1, :5] = 1, array[0, 0, 1], 2, 7, 7
        return array + other

    with pytest.raises(ValueError, match=r"shapes \(2, 3\), \(7, 7\), which may differ only in dimension 0"):
        ReplicaPosition(0, 2, total).gather([[np.ones((2, 3))]], 0)
    assert [array.shape for array in asked] == [(1, 2, 3 + MAX_NDIM)]


def test_who_has_no_place_yet_sends_nothing():
    """A process that comes late sees what the others gather."""
    one = np.arange(2.0)

    def total(array):
        assert not array.any()
        if array.ndim == 1:
            array = array.copy()
            array[0], array[1:] = 1, one.view("uint8")
        else:
            array = array.copy()
            array[0, 0, :4] = 9, 11, 1, 2
        return array

    (found,) = ReplicaPosition(1, 1, total).gather([[np.ones(3), np.ones(3)]], 0)
    assert found.tolist() == one.tolist()
