"""Dynamic embedding tables in plain data: what a table is, what its rows begin with, who gets one, and who loses it.

A table has a row for each key that it has admitted. It has no size: rows are created by the first gradient for a key,
and evicted by a policy. All that is said here is the same on every server of a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pswire.errors import InvalidRequest
from pswire.model.hashing import BUCKETS, combined
from pswire.model.tensor import DTYPES, TensorSpec

KeyDtype = Literal["int64", "uint64"]
Unknown = Literal["initial", "zeros"]

KEY_DTYPES: tuple[KeyDtype, ...] = ("int64", "uint64")
"""Dtypes of keys. Any 64-bit number is a key; those of the two dtypes with the same bits are the same."""

ROWS = 1 << 24
"""Rows of a table as programs and shapes have it: as many as one contribution may have. A table has no size."""

MIN_CAPACITY = 16 * BUCKETS
"""Least rows of a table that has a limit: the limit is divided among the buckets."""

MAX_COUNT = (1 << 31) - 2
"""Most occurrences that an exact counter counts; also the most rows of one part of a table."""

MAX_MEMORY = 1 << 50
"""Most bytes of a table's memory limit: in 64 bits there is room for what is computed of it."""

RANDOM_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Dtypes of rows that may begin with random values."""


def _number(value: float, what: str, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises `InvalidRequest` unless a number is finite and in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{what} must be a finite number, not {value!r}")
    if not low <= value <= high:
        wanted = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise InvalidRequest(f"{what} must be {wanted}, not {value!r}")


def _count(value: int, what: str, low: int, high: int = (1 << 63) - 1) -> None:
    """Raises `InvalidRequest` unless a value is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{what} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(f"{what} must be in [{low}, {high}], not {value}")


@dataclass(frozen=True)
class Zeros:
    """First values that are zero."""

    @property
    def extremes(self) -> tuple[float, float]:
        """The least and the greatest value."""
        return 0.0, 0.0

    def check(self) -> None:
        """Nothing can be wrong."""


@dataclass(frozen=True)
class Constant:
    """First values that are all the same.

    Attributes:
        value: the value.
    """

    value: float = 0.0

    @property
    def extremes(self) -> tuple[float, float]:
        """The value, twice."""
        return self.value, self.value

    def check(self) -> None:
        """Raises `InvalidRequest` if the value is no finite number."""
        _number(self.value, "value of a constant initializer")


@dataclass(frozen=True)
class Uniform:
    """First values that are uniform in [low, high).

    Attributes:
        low, high: the bounds; rounding to a narrow dtype may make `high` of a value below it.
    """

    low: float = -0.05
    high: float = 0.05

    @property
    def extremes(self) -> tuple[float, float]:
        """The bounds."""
        return self.low, self.high

    def check(self) -> None:
        """Raises `InvalidRequest` if a bound is not finite, or they are not in order, or too far apart."""
        _number(self.low, "low of a uniform initializer")
        _number(self.high, "high of a uniform initializer")
        if self.low > self.high:
            raise InvalidRequest(f"a uniform initializer needs low < high, but has {self.low} and {self.high}")
        _number(self.high - self.low, "the width of a uniform initializer")


@dataclass(frozen=True)
class Normal:
    """First values that are normal, cut off at 6 standard deviations.

    Attributes:
        mean, stddev: mean and standard deviation.
    """

    mean: float = 0.0
    stddev: float = 0.05

    @property
    def extremes(self) -> tuple[float, float]:
        """The least and the greatest value."""
        return self.mean - 6 * self.stddev, self.mean + 6 * self.stddev

    def check(self) -> None:
        """Raises `InvalidRequest` if a number is not finite, or `stddev` is negative."""
        _number(self.mean, "mean of a normal initializer")
        _number(self.stddev, "stddev of a normal initializer", 0)


@dataclass(frozen=True)
class TruncatedNormal:
    """First values that are normal, without those beyond two standard deviations.

    Attributes:
        mean, stddev: mean and standard deviation before the cut, as TensorFlow has them; after it the standard
            deviation is 0.88 of it.
    """

    mean: float = 0.0
    stddev: float = 0.05

    @property
    def extremes(self) -> tuple[float, float]:
        """The least and the greatest value."""
        return self.mean - 2 * self.stddev, self.mean + 2 * self.stddev

    def check(self) -> None:
        """Raises `InvalidRequest` if a number is not finite, or `stddev` is negative."""
        _number(self.mean, "mean of a truncated normal initializer")
        _number(self.stddev, "stddev of a truncated normal initializer", 0)


Initializer = Zeros | Constant | Uniform | Normal | TruncatedNormal
"""First values of a row: a function of the table's seed, the key and the column."""


@dataclass(frozen=True)
class CounterFilter:
    """Admits a key after a number of occurrences; counts exactly, with 16 bytes and an index entry for each key.

    A key that occurs several times in one round counts each time. If it is admitted, all its gradients of the round
    count. With a limit of rows, the number of counted keys without a row has the same limit.

    Attributes:
        k: occurrences after which a key has a row; 1 admits each key at once.
    """

    k: int

    def check(self) -> None:
        """Raises `InvalidRequest` if `k` is not a positive integer."""
        _count(self.k, "k of a CounterFilter", 1, MAX_COUNT)


@dataclass(frozen=True)
class CBFFilter:
    """Admits a key after a number of occurrences, counted by a counting Bloom filter.

    A key is never admitted too late; it may be admitted too early.

    Attributes:
        k: occurrences after which a key has a row.
        max_element_size: number of keys that can be counted at once with the given probability of error.
        false_positive_probability: probability that a key is counted too high.
        decay: rounds after which the counts are halved; 0 for never.
    """

    k: int
    max_element_size: int = 1 << 24
    false_positive_probability: float = 0.01
    decay: int = 0

    def check(self) -> None:
        """Raises `InvalidRequest` if a number is out of range."""
        _count(self.k, "k of a CBFFilter", 1, 255)
        _count(self.max_element_size, "max_element_size of a CBFFilter", 1, 1 << 36)
        _number(self.false_positive_probability, "false_positive_probability of a CBFFilter", 1e-9, 0.5)
        _count(self.decay, "decay of a CBFFilter", 0, 1 << 31)

    @property
    def hashes(self) -> int:
        """Number of counters for each key."""
        return max(1, round(-math.log2(self.false_positive_probability)))

    @property
    def width(self) -> int:
        """Number of counters, one byte each, of one bucket."""
        counters = -math.log(self.false_positive_probability) / math.log(2) ** 2 * self.max_element_size
        return max(self.hashes, math.ceil(counters / BUCKETS))


@dataclass(frozen=True)
class ProbabilityFilter:
    """Admits a key with a probability in each round in which it occurs, by a hash of key and round.

    Attributes:
        p: the probability.
    """

    p: float

    def check(self) -> None:
        """Raises `InvalidRequest` if `p` is not a probability."""
        _number(self.p, "p of a ProbabilityFilter", 0, 1)


Admission = CounterFilter | CBFFilter | ProbabilityFilter
"""The filter before a table: decides which unknown keys get a row."""


@dataclass(frozen=True)
class LRU:
    """Above the limit, evicts the rows that were not updated for the longest time."""

    _needs_limit = True

    def check(self) -> None:
        """Does nothing: there are no arguments."""


@dataclass(frozen=True)
class LFU:
    """Above the limit, evicts the rows that were updated least often.

    Attributes:
        decay: factor by which a row's count shrinks in a round; 1 for none.
    """

    decay: float = 0.98
    _needs_limit = True

    def check(self) -> None:
        """Raises `InvalidRequest` if `decay` is not in [0, 1]."""
        _number(self.decay, "decay of LFU", 0, 1)


@dataclass(frozen=True)
class GlobalStepEvict:
    """Evicts rows that were not updated for a number of rounds; above a limit also the least recently updated.

    Attributes:
        steps_to_live: the number of rounds.
    """

    steps_to_live: int
    _needs_limit = False

    def check(self) -> None:
        """Raises `InvalidRequest` if `steps_to_live` is not a positive integer."""
        _count(self.steps_to_live, "steps_to_live of GlobalStepEvict", 1, (1 << 32) - 1)


@dataclass(frozen=True)
class L2WeightEvict:
    """Evicts rows whose L2 norm is below a threshold; above a limit also the least recently updated.

    Attributes:
        threshold: the smallest norm that stays.
    """

    threshold: float
    _needs_limit = False

    def check(self) -> None:
        """Raises `InvalidRequest` if `threshold` is negative."""
        _number(self.threshold, "threshold of L2WeightEvict", 0)


@dataclass(frozen=True)
class TimeToLive:
    """Evicts rows that were not updated for a time; above a limit also those not updated for longest.

    The time is what the table is told from outside, as seconds at a round, so that all its parts know the same.

    Attributes:
        seconds: the time.
    """

    seconds: float
    _needs_limit = False

    def check(self) -> None:
        """Raises `InvalidRequest` if `seconds` is negative."""
        _number(self.seconds, "seconds of TimeToLive", 0)


Eviction = LRU | LFU | GlobalStepEvict | L2WeightEvict | TimeToLive
"""The policy by which rows leave a table."""


@dataclass(frozen=True)
class SlotTensor:
    """A tensor beside the rows of a table, such as an optimizer's accumulator: it has a row wherever the table has one.

    Attributes:
        name: its name.
        dtype: its dtype.
        shape: shape of one row.
        value: the value with which a row begins.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: float = 0.0

    @property
    def row(self) -> TensorSpec:
        """One row, as a tensor."""
        return TensorSpec(self.dtype, self.shape)

    def check(self) -> SlotTensor:
        """Returns itself; raises `InvalidRequest`, which names what is wrong."""
        self.row.check()
        if not self.row.size:
            raise InvalidRequest(f"a row of {self.name!r}, of shape {self.shape}, has no elements")
        _number(self.value, f"initial value of {self.name!r}")
        _check_holds(self.dtype, self.value)
        return self


@dataclass(frozen=True)
class TableSpec:
    """A dynamic table.

    Attributes:
        shape: shape of one row; () for a single number.
        dtype: dtype of the rows.
        key_dtype: dtype of the keys.
        initializer: first values of a row.
        admission: which unknown keys get a row; None for all.
        eviction: which rows leave the table; None for none, but above a limit those not updated for longest.
        capacity: most rows of the whole table; 0 for no limit. A bucket has its share of them, and may exceed it only
            by rows of one and the same round.
        memory_limit: bytes that rows, slots and index of the whole table may take; 0 for no limit.
        refused: what a lookup of a key without a row gives where a filter stands before the table: its first value,
            or zeros. Without a filter it is the first value.
        seed: of the first values.
        hash_seed: of the hashes by which keys fall into buckets, and by which rows to evict are drawn. Who lets
            strangers choose keys keeps it secret.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    key_dtype: KeyDtype = "int64"
    initializer: Initializer = field(default_factory=Uniform)
    admission: Admission | None = None
    eviction: Eviction | None = None
    capacity: int = 0
    memory_limit: int = 0
    refused: Unknown = "initial"
    seed: int = 0
    hash_seed: int = 0

    @property
    def row(self) -> TensorSpec:
        """One row, as a tensor."""
        return TensorSpec(self.dtype, self.shape)

    @property
    def salt(self) -> int:
        """The salt of the hashes of keys."""
        return combined(self.hash_seed)

    def check(self) -> TableSpec:
        """Returns itself; raises `InvalidRequest`, which names what is wrong."""
        self.row.check()
        if not self.row.size:
            raise InvalidRequest(f"a row of shape {self.shape} has no elements")
        if self.key_dtype not in KEY_DTYPES:
            raise InvalidRequest(f"keys must be {' or '.join(KEY_DTYPES)}, not {self.key_dtype!r:.80}")
        _checked(self.initializer, "initializer", Initializer.__args__)
        if isinstance(self.initializer, Uniform | Normal | TruncatedNormal) and self.dtype not in RANDOM_DTYPES:
            raise InvalidRequest(f"rows of {self.dtype} cannot have random initial values; use Zeros or Constant")
        for value in self.initializer.extremes:
            _check_holds(self.dtype, value)
        if self.admission is not None:
            _checked(self.admission, "admission", Admission.__args__)
        _count(self.capacity, "capacity", 0, MAX_COUNT)
        _count(self.memory_limit, "memory_limit", 0, MAX_MEMORY)
        if 0 < self.capacity < MIN_CAPACITY:
            raise InvalidRequest(f"a capacity of {self.capacity} rows is too small; the minimum is {MIN_CAPACITY}")
        if self.eviction is not None:
            _checked(self.eviction, "eviction", Eviction.__args__)
            if self.eviction._needs_limit and not (self.capacity or self.memory_limit):
                raise InvalidRequest(
                    f"{type(self.eviction).__name__} evicts rows only above a limit; give a capacity or a memory_limit"
                )
        if self.refused not in ("initial", "zeros"):
            raise InvalidRequest(f"refused must be 'initial' or 'zeros', not {self.refused!r:.80}")
        _count(self.seed, "seed", 0, (1 << 64) - 1)
        _count(self.hash_seed, "hash_seed", 0, (1 << 64) - 1)
        return self


@dataclass(frozen=True)
class TablePart:
    """What a variable is that is the rows of some buckets of a dynamic table, or a tensor beside them.

    Attributes:
        table: the table's name.
        spec: the table.
        first, count: the buckets.
        slot: the tensor beside the rows that the variable is, named as the whole; None for the rows.
    """

    table: str
    spec: TableSpec
    first: int
    count: int
    slot: SlotTensor | None = None

    @property
    def tensor(self) -> TensorSpec:
        """Dtype and shape of the variable, as programs have it."""
        row = self.spec.row if self.slot is None else self.slot.row
        return TensorSpec(row.dtype, (ROWS, *row.shape))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes while it is empty: the counters of its filter."""
        admission = self.spec.admission
        return admission.width * self.count if self.slot is None and isinstance(admission, CBFFilter) else 0

    @property
    def whole(self) -> str:
        """The name of what it is a part of."""
        return self.table if self.slot is None else self.slot.name

    @property
    def key(self) -> str:
        """Tells it from other parts of the table: with copies a server has several."""
        return f"{self.table}@{self.first}"

    @property
    def buckets(self) -> range:
        """The buckets."""
        return range(self.first, self.first + self.count)

    def check(self) -> TablePart:
        """Returns itself; raises `InvalidRequest`, which names what is wrong."""
        self.spec.check()
        if self.slot is not None:
            self.slot.check()
            if self.slot.name == self.table:
                raise InvalidRequest(f"a slot variable has the name of its table {self.table!r}; rename it")
        if not 0 <= self.first < self.first + self.count <= BUCKETS:
            raise InvalidRequest(
                f"{self.count} buckets from {self.first} on are not within the {BUCKETS} buckets of a table"
            )
        return self


def _check_holds(name: str, value: float) -> None:
    """Raises `InvalidRequest` if elements of a dtype cannot have this value, or would be infinite."""
    dtype = DTYPES[name]
    if dtype.kind in "biu":
        bits = 1 if dtype.kind == "b" else 8 * dtype.itemsize - (dtype.kind == "i")
        low = -(1 << bits) if dtype.kind == "i" else 0
        if value != int(value) or not low <= value < 1 << bits:
            raise InvalidRequest(f"rows of {name} cannot have the initial value {value!r}")
        return
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(np.float64(value).astype(dtype))
    if not is_finite:
        raise InvalidRequest(f"rows of {name} cannot have the initial value {value!r}, which is infinite in that dtype")


def _checked(item: Initializer | Admission | Eviction, what: str, kinds: tuple[type, ...]) -> None:
    """Checks a part of a table; raises `InvalidRequest` for another kind of thing."""
    if not isinstance(item, kinds):
        raise InvalidRequest(f"{what} must be one of {', '.join(kind.__name__ for kind in kinds)}, not {item!r:.80}")
    item.check()
