"""Gathers: the arrays of all replicas, one behind the other, as NumPy concatenates them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from psclient._src.distribute.gathering import Place
from tests.kit.internals import MAX_NDIM
from tests.kit.programs import same_bits
from tests.kit.strategies import in_replicas, kind_of, merged, of_each, replicas, variable

here = ps.get_replica_context

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
    """What all of them share counts for each; a result is nobody's to change, and merges to a value of each."""
    n = replicas(strategy)
    shared, v = np.arange(2.0), variable(strategy, [1.0, 2.0])
    found = in_replicas(strategy, lambda i: here().all_gather((shared, v), axis=0))
    assert len(found) == n
    for arrays in found:
        assert [np.asarray(array).tolist() for array in arrays] == [[0.0, 1.0] * n, [1.0, 2.0] * n]
    if kind_of(strategy) == "default":
        return  # whose one replica gets back what it gave
    for array in (*(arrays[0] for arrays in found), strategy.gather(of_each(strategy, [shared] * 4), 0)):
        with pytest.raises(ValueError, match="read-only"):
            array += 1.0


def test_a_variable_is_what_each_replica_has_of_it(strategy):
    """An ON_READ variable's copies, and a mirrored one R times, wherever it lives."""
    n = replicas(strategy)
    v = variable(strategy, [0.0], synchronization=ps.VariableSynchronization.ON_READ)
    in_replicas(strategy, lambda i, w: w.assign(np.full(1, i + 1.0, "float32")), v)
    assert strategy.gather(v, 0).tolist() == [i + 1.0 for i in range(n)]
    assert strategy.gather(variable(strategy, [7.0]), 0).tolist() == [7.0] * n


def test_predictions_of_a_pass_are_those_of_all_examples(strategy):
    """In order, batch by batch, also of a batch of which some replicas have none; what they hold back is kept."""
    n = replicas(strategy)
    held = strategy.experimental_distribute_values_from_function(lambda context: np.zeros(1))
    predictions = []
    for x in strategy.experimental_distribute_dataset([np.arange(2.0 * n), np.array([99.0])]):
        held = strategy.run(lambda held, x: held + len(x), args=(held, x))
        predictions += strategy.gather(strategy.run(np.negative, (x,)), axis=0).tolist()
    assert predictions == [-i for i in range(2 * n)] + [-99.0]
    assert strategy.reduce("sum", held, axis=None) == 2 * n + 1


def test_what_cannot_be_gathered_is_refused(strategy):
    """With the reason; the next gather is as if it had not been."""
    n = replicas(strategy)
    rows = of_each(strategy, [np.ones((2, 3))] * 4)
    for value, axis, error, says in (
        (rows, None, TypeError, "axis is None; a gather joins arrays along one dimension"),
        (rows, 0.5, TypeError, "axis is 0.5"),
        (rows, -1, ValueError, "axis is -1, and must be at least 0"),
        (rows, 2, ValueError, "axis 2 is none of an array of 2 dimensions"),
        (of_each(strategy, [1.0] * 4), 0, ValueError, "a scalar has no dimension"),
        (of_each(strategy, ["text"] * 4), 0, TypeError, "cannot be reduced; give an array or a number"),
    ):
        with pytest.raises(error, match=says):
            strategy.gather(value, axis)
        with pytest.raises(error, match=says):
            in_replicas(strategy, lambda i, x, axis=axis: here().all_gather(x, axis), value)
    if n > 1:
        for arrays, says in (
            ([np.ones((2, 3 + i)) for i in range(4)], "differ in dimension 0 only"),
            ([np.ones((2,) * (i + 1)) for i in range(4)], "differ in dimension 0 only"),
            ([np.ones(2, f"int{8 << i % 2}") for i in range(4)], "arrays of int16 and int8; give arrays of one dtype"),
        ):
            with pytest.raises(ValueError, match=says):
                strategy.gather(of_each(strategy, arrays), 0)
        with pytest.raises(ValueError, match="which is not a per-replica value"):
            strategy.gather(np.ones(2), 0)
        with pytest.raises(ValueError, match=r"along different dimensions: \[0, 1"):
            in_replicas(strategy, lambda i, x: here().all_gather(x, i), rows)
    assert strategy.gather(rows, 0).shape == (2 * n, 3)


def test_each_is_called_in_its_context(strategy):
    """`gather` across replicas, `all_gather` in a replica's function."""
    if kind_of(strategy) == "default":
        pytest.skip("the default context is both")
    with pytest.raises(RuntimeError, match="gather needs cross-replica context, and is called in replica context"):
        strategy.run(lambda: strategy.gather(np.ones(1), 0))
    stale = strategy.run(lambda: ps.get_replica_context())
    with pytest.raises(RuntimeError, match="all_gather on a replica context that is not"):
        strategy.experimental_local_results(stale)[0].all_gather(np.ones(1), 0)


# ---- Several processes: what each of them sums ----


class Processes:
    """Processes that gather in one thread: each gather is made until it sums what is not known, and then anew."""

    def __init__(self, split, lost=None):
        self.split, self.lost = split, lost or {}

    def gather(self, arrays, axis):
        """What each process gets that is there to the end, all arrays given in order."""
        totals = []
        for number in range(3):
            rows, found = [], []
            first = 0
            for process, count in enumerate(self.split):
                asked = iter(totals)

                def total(array, asked=asked, rows=rows, process=process, number=number):
                    known = next(asked, None)
                    if known is None:
                        rows.append(array * 0 if self.lost.get(process, 3) <= number else array)
                        raise LookupError
                    return known

                mine_ = [arrays[first : first + count]]
                try:
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr("secrets.randbits", lambda bits, process=process: process)
                        found += Place(first, sum(self.split), total).gather(mine_, axis)
                except LookupError:
                    pass
                first += count
            if found:
                return found
            totals.append(sum(rows))
        raise AssertionError("a gather is made of two sums")


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 3)], ids=str)
def test_processes_sum_what_one_would_concatenate(split):
    """To the last bit, with one or several replicas each, of any sizes, none included."""
    for dtype in DTYPES:
        arrays = [odd(dtype, 2 * i).reshape(2, -1) if i else np.zeros((2, 0), dtype) for i in range(sum(split))]
        for found in Processes(split).gather(arrays, 1):
            assert same_bits(found, np.concatenate(arrays, axis=1))


def test_who_is_lost_is_left_out_as_a_whole():
    """Before its shapes are known, or after; the others get all of the others."""
    arrays = [np.full(i + 1, i) for i in range(4)]
    for lost in ({1: 0}, {1: 1}):
        for found in Processes((1, 2, 1), lost).gather(arrays, 0)[::2]:
            assert found.tolist() == [0, 3, 3, 3, 3]


def test_all_processes_refuse_alike():
    """Shapes that do not fit are known to all before anything is sent."""
    asked = []

    def total(array):
        asked.append(array)
        other = np.zeros_like(array)
        other[0, 1, :5] = 1, array[0, 0, 1], 2, 7, 7
        return array + other

    with pytest.raises(ValueError, match=r"shapes \(2, 3\), \(7, 7\); these may differ in dimension 0 only"):
        Place(0, 2, total).gather([[np.ones((2, 3))]], 0)
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

    (found,) = Place(1, 1, total).gather([[np.ones(3), np.ones(3)]], 0)
    assert found.tolist() == one.tolist()
