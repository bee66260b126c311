"""What is said of a table is checked, and the error names what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pswire.errors import InvalidRequest
from pswire.model.hashing import BUCKETS
from pswire.model.plan import ShardOf, VariableSpec
from pswire.model.tables import (
    LFU,
    LRU,
    MIN_CAPACITY,
    ROWS,
    CBFFilter,
    Constant,
    CounterFilter,
    GlobalStepEvict,
    L2WeightEvict,
    Normal,
    ProbabilityFilter,
    SlotTensor,
    TablePart,
    TableSpec,
    TimeToLive,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from pswire.model.tensor import TensorSpec

SPEC = TableSpec((8,))


@pytest.mark.parametrize("initializer", [Zeros(), Constant(1.5), Uniform(1, 1), Normal(0, 0), TruncatedNormal()])
@pytest.mark.parametrize("admission", [None, CounterFilter(1), CBFFilter(255, 1, 0.5, 1), ProbabilityFilter(1)])
@pytest.mark.parametrize("eviction", [None, LRU(), LFU(0), GlobalStepEvict(1), L2WeightEvict(0), TimeToLive(0.5)])
def test_what_is_right(initializer, admission, eviction):
    """All kinds go together, and compare by what they say."""
    spec = replace(SPEC, initializer=initializer, admission=admission, eviction=eviction, capacity=MIN_CAPACITY)
    assert spec.check() is spec
    assert spec == replace(spec)
    assert hash(spec) == hash(replace(spec))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"shape": (0,)}, "no elements"),
        ({"shape": (-1,)}, "invalid shape"),
        ({"shape": (1 << 30, 1 << 30)}, "invalid shape"),
        ({"dtype": "float8"}, "unknown dtype"),
        ({"key_dtype": "int32"}, "int64 or uint64, not 'int32'"),
        ({"initializer": LRU()}, "initializer must be one of Zeros"),
        ({"initializer": Constant(math.nan)}, "value of a constant initializer must be a finite number"),
        ({"initializer": Uniform(1, 0)}, "needs low < high"),
        ({"initializer": Normal(0, -1)}, "stddev of a normal initializer must be at least 0"),
        ({"initializer": TruncatedNormal(math.inf)}, "mean of a truncated"),
        ({"initializer": Uniform(), "dtype": "int64"}, "int64 cannot have random"),
        ({"initializer": Constant(0.5), "dtype": "int64"}, "int64 cannot have the initial value 0.5"),
        ({"initializer": Constant(-1), "dtype": "uint8"}, "uint8 cannot have the initial value -1"),
        ({"initializer": Constant(2), "dtype": "bool"}, "bool cannot have the initial value 2"),
        ({"admission": CounterFilter(0)}, "k of a CounterFilter must be in"),
        ({"admission": CounterFilter(1 << 63)}, "k of a CounterFilter must be in"),
        ({"admission": CounterFilter(True)}, "k of a CounterFilter must be an integer"),
        ({"admission": CBFFilter(256)}, "k of a CBFFilter must be in .1, 255."),
        ({"admission": CBFFilter(2, 0)}, "max_element_size"),
        ({"admission": CBFFilter(2, 9, math.nan)}, "a finite number"),
        ({"admission": CBFFilter(2, 10, 0.9)}, "false_positive_probability"),
        ({"admission": CBFFilter(2, decay=-1)}, "decay of a CBFFilter"),
        ({"admission": ProbabilityFilter(1.1)}, "p of a ProbabilityFilter must be in"),
        ({"admission": 3}, "admission must be one of"),
        ({"eviction": LRU()}, "LRU evicts rows only above a limit; give a capacity"),
        ({"eviction": LFU(2), "capacity": MIN_CAPACITY}, "decay of LFU"),
        ({"eviction": GlobalStepEvict(0)}, "steps_to_live"),
        ({"eviction": L2WeightEvict(-1)}, "threshold"),
        ({"eviction": TimeToLive(-1)}, "seconds"),
        (
            {"initializer": Constant(1e5), "dtype": "float16"},
            "float16 cannot have the initial value 100000.0, which is inf",
        ),
        ({"initializer": Normal(0, 1e38)}, "the initial value -6e.38, which is infinite in that dtype"),
        ({"initializer": TruncatedNormal(1e308, 1e308), "dtype": "float64"}, "cannot have the initial value -inf"),
        ({"initializer": Uniform(-1e308, 1e308), "dtype": "float64"}, "width of a uniform initializer must be a"),
        ({"admission": CBFFilter(2, (1 << 36) + 1)}, "max_element_size of a CBFFilter must be in"),
        ({"memory_limit": (1 << 50) + 1}, "memory_limit must be in"),
        ({"capacity": 1 << 31}, "capacity must be in"),
        ({"capacity": 100}, "capacity of 100 rows is too small; the minimum is 16384"),
        ({"capacity": -1}, "capacity must be in"),
        ({"memory_limit": 1.5}, "memory_limit must be an integer"),
        ({"refused": "nan"}, "'initial' or 'zeros', not 'nan'"),
        ({"seed": 1 << 64}, "seed must be in"),
    ],
)
def test_what_is_wrong_is_named(wrong, told):
    """`InvalidRequest`, a `ValueError`, with the name and the number."""
    with pytest.raises(InvalidRequest, match=told) as error:
        replace(SPEC, **wrong).check()
    assert isinstance(error.value, ValueError)


def test_tensors_beside_the_rows():
    """Their dtype, shape and first value are checked."""
    assert SlotTensor("m", "float32", ()).check().row.nbytes == 4
    for wrong, told in (
        (SlotTensor("m", "float99", ()), "unknown dtype"),
        (SlotTensor("m", "float32", (0,)), "'m', of shape .0,., has no elements"),
        (SlotTensor("m", "int32", (), 0.5), "cannot have the initial value 0.5"),
        (SlotTensor("m", "float32", (), math.nan), "initial value of 'm'"),
        (SlotTensor("m", "bfloat16", (), 1e39), "bfloat16 cannot have the initial value 1e.39"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            wrong.check()


def test_the_size_of_a_bloom_filter():
    """The textbook's: 9.6 counters and 7 hashes for each key at one error in a hundred."""
    spec = CBFFilter(2, 1 << 20, 0.01)
    assert spec.hashes == 7
    assert 9.5 < spec.width * 1024 / (1 << 20) < 9.7


def variable(part: TablePart, **more: Any) -> VariableSpec:
    return VariableSpec("v", part.tensor, part=part, **more)


PART = TablePart("users", SPEC, 0, BUCKETS)
SLOT = SlotTensor("m", "float32", ())
NO_PARTS: dict[str, tuple[VariableSpec, str]] = {
    "no buckets": (variable(replace(PART, count=0)), "0 buckets from 0 on are not within the 1024"),
    "buckets behind the last": (variable(replace(PART, first=1000, count=25)), "25 buckets from 1000 on"),
    "a bucket before the first": (variable(replace(PART, first=-1)), "1024 buckets from -1 on"),
    "no table": (variable(replace(PART, spec=TableSpec((0,)))), "no elements"),
    "a name that is none": (variable(replace(PART, table="a\nb", slot=SLOT)), "1 to 512 printable"),
    "a slot of that name": (variable(replace(PART, table="m", slot=SLOT)), "the name of its table 'm'"),
    "a slot that is none": (variable(replace(PART, slot=replace(SLOT, value=math.inf))), "initial value of 'm'"),
    "rows of more than 1 MiB": (variable(TablePart("users", TableSpec(((1 << 18) + 1,)), 0, 1)), "invalid shape"),
    "rows of too many dimensions": (variable(TablePart("users", TableSpec((1,) * 32), 0, 1)), "33 dimensions"),
    "another shape": (VariableSpec("v", TensorSpec("float32", (ROWS, 9)), part=PART), "its part of a table is float32"),
    "a shard as well": (variable(PART, shard=ShardOf("w", 0, 1 << 40)), "its part of a table"),
    "what has a name in checkpoints": (variable(PART, saved_as="w"), "its part of a table"),
}


@pytest.mark.parametrize("case", NO_PARTS)
def test_what_is_no_part_of_a_table(case):
    """A variable says what part of which table it is, or is refused."""
    assert variable(PART).check().nbytes == 0
    wrong, told = NO_PARTS[case]
    with pytest.raises(InvalidRequest, match=told):
        wrong.check()


def test_an_empty_part_takes_what_its_filter_takes():
    """A byte for each counter of its buckets; what lies beside the rows takes nothing."""
    counting = replace(PART, spec=replace(SPEC, admission=CBFFilter(2, 1 << 20)), count=10)
    assert counting.nbytes == variable(counting).nbytes == 10 * counting.spec.admission.width
    assert replace(counting, slot=SLOT).nbytes == 0
