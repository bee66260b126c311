"""Options and contexts of input functions, and the shapes of batches."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from pswire.errors import InvalidArgument
from pswire.model.consistency import Mode
from pswire.model.plan import Nonfinite
from pswire.model.plan import ReduceOp as OpName


def check_word(name: str, value: object, words: Any) -> Any:
    """Returns an argument that is one of a few words.

    Args:
        name: name of the argument, for messages.
        value: the given value.
        words: a `Literal` of the words.

    Raises:
        ValueError: it is none of them.
    """
    known = get_args(words)
    for word in known:
        if value == word:
            return word
    raise InvalidArgument(f"{name} is {value!r}; use {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")


class AutoShardPolicy(IntEnum):
    """How workers share a dataset; the numbers are those of `tf.data.experimental.AutoShardPolicy`.

    Attributes:
        OFF: not shared: every worker reads all data, and splits it among its local replicas.
        AUTO: the same as DATA.
        FILE: by files; not supported, because datasets have no files here.
        DATA: each global batch is cut into slices, one for each replica of all workers.
        HINT: by a placeholder in the pipeline; not supported, because pipelines have none here.
        DYNAMIC: server 0 assigns each global batch to the worker that asks next; not in `tf.data`. For workers that
            make their own updates, with `Async()` or `BoundedStaleness(k)`, and for datasets whose batches can be read
            by number: a batched `ArrayDataset`, a list of batches, a `MapDataset` of grain.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3
    DYNAMIC = 4


@dataclass(frozen=True)
class InputOptions:
    """Options of a distributed dataset.

    Attributes:
        experimental_prefetch_to_device: True to put batches on the replicas' devices; False leaves them on the host, as
            NumPy arrays.
        auto_shard_policy: how `experimental_distribute_dataset` shares batches; a dataset from a function is never
            sharded.
        prefetch: the rows for the next batch are fetched together with the round of the current one. A mapping of each
            variable whose rows a step looks up to a function that takes one replica's batch and returns the ids; {} to
            fetch none ahead. None finds out by itself which arrays of the batches, or columns of one, are ids.

    Raises:
        ValueError: `auto_shard_policy` is not one of `AutoShardPolicy`.
        TypeError: a value of `prefetch` is not a function.
    """

    _nest_leaf: ClassVar[bool] = True

    experimental_prefetch_to_device: bool = True
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    prefetch: Mapping[Any, Callable[[Any], Any]] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "auto_shard_policy", AutoShardPolicy(self.auto_shard_policy))
        for variable, ids in (self.prefetch or {}).items():
            if not (hasattr(variable, "prefetch") and callable(ids)):
                raise TypeError(f"prefetch maps {variable!r} to {ids!r}; pass a function of a batch for each variable")


@dataclass(frozen=True)
class RunOptions:
    """Options of `strategy.run`, so that scripts written for TensorFlow run unchanged. They have no effect here.

    Attributes:
        experimental_enable_dynamic_batch_size: replica functions are plain Python and take arrays of any shape.
        experimental_bucketizing_dynamic_shape: nothing is compiled for a shape, so shapes need no buckets.
    """

    _nest_leaf: ClassVar[bool] = True

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False


@dataclass(frozen=True)
class InputContext:
    """The context of a function that makes one worker's dataset.

    Attributes:
        num_input_pipelines: number of workers that make one.
        input_pipeline_id: number of this worker among them, from 0.
        num_replicas_in_sync: R, the replicas of all workers.
    """

    _nest_leaf: ClassVar[bool] = True

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of examples for each replica; raises `ValueError` if they cannot be divided evenly."""
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"a global batch of {global_batch_size} examples cannot be split equally among "
                f"{self.num_replicas_in_sync} replicas"
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return f"ps.InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"


@dataclass(frozen=True)
class ValueContext:
    """The context of a function that makes one replica's value; see `experimental_distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: number of the replica that the value is for, from 0.
        num_replicas_in_sync: R, the replicas of all workers.
    """

    _nest_leaf: ClassVar[bool] = True

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"ps.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


@dataclass(frozen=True)
class ArraySpec:
    """The shape and dtype of one array of a batch.

    Attributes:
        shape: the dimensions; None for the first, which counts the examples and may differ.
        dtype: the dtype of the elements.
    """

    _nest_leaf: ClassVar[bool] = True

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class PerReplicaSpec:
    """The shapes and dtypes of one per-replica value of a batch.

    Attributes:
        specs: one spec for each local replica.
    """

    _nest_leaf: ClassVar[bool] = True

    specs: tuple[ArraySpec, ...]


ReduceOpName = Literal["sum", "mean", "SUM", "MEAN"]
"""A reduction by its name."""


class ReduceOp(enum.Enum):
    """SUM, or MEAN: the sum divided by the number of replicas, or of elements if an axis is reduced.

    The values are those of `tf.distribute.ReduceOp`.
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @property
    def wire(self) -> OpName:
        """Its name in plans."""
        return "sum" if self is ReduceOp.SUM else "mean"

    @staticmethod
    def from_variable_aggregation(aggregation: enum.Enum) -> ReduceOp:
        """Returns the reduction of a `VariableAggregation`, SUM or MEAN; raises `ValueError` for any other."""
        name = getattr(aggregation, "name", "")
        if name not in ReduceOp.__members__:
            raise ValueError(f"{aggregation} is not a reduction; use VariableAggregation.SUM or MEAN")
        return ReduceOp[name]

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """The op of a name in any case; raises `ValueError` for an unknown one."""
        if isinstance(op, cls):
            return op
        try:
            return cls(str(getattr(op, "name", op)).upper())
        except ValueError:
            raise ValueError(f"unknown reduction {op!r}; use ps.ReduceOp.SUM or MEAN") from None


@dataclass(frozen=True)
class Round:
    """A completed round.

    Attributes:
        number: its number; for an asynchronous worker the worker's own count.
        generation: number of the generation whose members made it.
        contributors: the tasks that contributed to it, such as `/job:worker/task:0`, in order.
        excluded: members that it was completed without, because they were lost, or late (backup workers, quorum).
        behind: the number of later rounds that were over when this process, which was late, got its response; else 0.
    """

    _nest_leaf: ClassVar[bool] = True

    number: int
    generation: int
    contributors: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    behind: int = 0


def check_nonfinite(choice: str) -> None:
    """Raises `ValueError` for an unknown choice of what becomes of updates with NaN or infinity."""
    if choice not in get_args(Nonfinite):
        raise ValueError(f"unknown nonfinite {choice!r}; use 'apply', 'skip' or 'raise'")


@dataclass(frozen=True)
class Sync:
    """Synchronous rounds: every update includes each worker's contribution exactly once, complete.

    A round has the same contributions on all its servers, even if a member is lost meanwhile: the servers agree before
    any of its results becomes visible.

    Attributes:
        nonfinite: what happens if a contribution to an update has NaN or infinity. "apply": the updates are applied,
            with a warning. "skip": no update of the round is applied, slots and `iterations` included, with a warning.
            "raise": none is applied, and every process raises `NonfiniteError`. With "skip" and "raise" each process
            checks what it sends, and large rounds do not stream.
        backup_workers: b, the number of members that a round does not wait for: a round with N members completes when N
            - b of them, at least one, have contributed completely. A later member is excluded from the round (see
            `last_round`), gets the new values and continues at once; its examples are assigned again, so that each
            example of a pass over a distributed dataset counts once. Rounds without updates, and saves, wait for all
            members. It must be smaller than the number of workers. With backup workers, large rounds do not stream.

    Raises:
        ValueError: `nonfinite` is another word, or `backup_workers` is negative.
        TypeError: `backup_workers` is not an integer.

    Examples:
        >>> import psclient as ps
        >>> ps.Sync(nonfinite="skip", backup_workers=1)
        Sync(nonfinite='skip', backup_workers=1)
    """

    mode: ClassVar[Mode] = "sync"

    nonfinite: Nonfinite = "apply"
    backup_workers: int = 0

    def __post_init__(self) -> None:
        check_nonfinite(self.nonfinite)
        if isinstance(self.backup_workers, bool) or not isinstance(self.backup_workers, int):
            raise TypeError(f"backup_workers={self.backup_workers!r} is not a number of workers; use an integer")
        if self.backup_workers < 0:
            raise ValueError(f"backup_workers={self.backup_workers} is negative; use 0 to wait for every worker")


MAX_STALENESS = 2**31 - 1
"""The greatest bound of staleness: `Async()` has none."""


@dataclass(frozen=True)
class BoundedStaleness:
    """Each worker makes its own updates, as with `Async()`, and gets at most `k` rounds ahead of the slowest.

    A push is applied once, completely and at once. The response to a worker's round c waits until every other worker
    has pushed its round c - k, and contains the values at the time it is sent. So a worker computes its next round from
    values that include all updates of the others up to round c - k, and usually newer ones. `k = 0` is lockstep: a
    round begins when all workers have pushed the one before. Workers that have left, were lost, or have ended their
    pass over the data are not waited for. Everything else is as with `Async()`.

    Source: stale synchronous parallel, Ho et al., NIPS 2013; held responses bring fresh values as in ESSP, Dai et al.,
    AAAI 2015.

    Attributes:
        mode: "bounded".
        backup_workers: 0; rounds do not wait for other workers.
        k: the largest number of rounds that a worker with a response is ahead of another one; the same in all
            processes.
        nonfinite: as in `Async`.

    Raises:
        TypeError: `k` is not an integer.
        ValueError: `k` is negative or too large, or `nonfinite` is another word.

    Examples:
        >>> import psclient as ps
        >>> ps.BoundedStaleness(k=3)
        BoundedStaleness(k=3, nonfinite='apply')
    """

    mode: ClassVar[Mode] = "bounded"
    backup_workers: ClassVar[int] = 0

    k: int
    nonfinite: Nonfinite = "apply"

    def __post_init__(self) -> None:
        if isinstance(self.k, bool | np.bool_) or not isinstance(self.k, int | np.integer):
            raise TypeError(f"BoundedStaleness has k={self.k!r}; use an integer of at least 0")
        object.__setattr__(self, "k", int(self.k))
        if not 0 <= self.k <= MAX_STALENESS:
            raise ValueError(
                f"BoundedStaleness has k={self.k}; use 0 (lockstep) to {MAX_STALENESS}, or Async(), which has no bound"
            )
        check_nonfinite(self.nonfinite)


@dataclass(frozen=True)
class Async:
    """Each worker makes its own updates: a push is applied once, completely and at once, without waiting for others.

    `num_replicas_in_sync` is then the number of this worker's replicas, and other workers may have changed the values
    that a step has read. The workers still share the examples of a dataset; with `AutoShardPolicy.DYNAMIC` each batch
    is assigned to the worker that asks next. In a job with `Sync()` single variables may use it: see `Variable`.

    Attributes:
        mode: "async".
        backup_workers: 0; rounds do not wait for other workers.
        nonfinite: as in `Sync`. A round has one contribution here, and only its process raises `NonfiniteError`.

    Raises:
        ValueError: `nonfinite` is another word.

    Examples:
        >>> import psclient as ps
        >>> ps.Async()
        Async(nonfinite='apply')
    """

    mode: ClassVar[Mode] = "async"
    backup_workers: ClassVar[int] = 0

    nonfinite: Nonfinite = "apply"

    def __post_init__(self) -> None:
        check_nonfinite(self.nonfinite)


@dataclass(frozen=True)
class Quorum:
    """Synchronous rounds that go on without the slowest workers, whose contributions are merged into the next round.

    A round goes on once `size` of its W members have contributed, and waits at most `grace` seconds more for the
    others. A worker that comes later gets the values of then at once. Its contribution is neither dropped nor counted
    twice: it is added to the next round of the same step, with its weight, on all servers alike. With fewer than `size`
    members left a round waits for all of them.

    Use it with an update that divides by the weights of those that take part, as means do: a round has the
    contributions of `size` to W workers, and sometimes several of one. Rounds that change no variable, and saves, wait
    for all members. Large rounds do not stream.

    Attributes:
        mode: "sync".
        backup_workers: 0; late contributions are not dropped.
        size: the number of members that suffice; the same in all processes.
        grace: the seconds for which a round waits for the others once `size` members have contributed; servers look
            four times a second. The same in all processes.
        nonfinite: as in `Sync`. A late contribution counts for the round into which it is merged.

    Raises:
        TypeError: `size` is not an integer, or `grace` is not a number.
        ValueError: `size` is less than 1, `grace` is negative or not finite, or `nonfinite` is another word.

    Examples:
        >>> import psclient as ps
        >>> ps.Quorum(3, grace=2)
        Quorum(size=3, grace=2.0, nonfinite='apply')
    """

    mode: ClassVar[Mode] = "sync"
    backup_workers: ClassVar[int] = 0

    size: int
    grace: float = 0.0
    nonfinite: Nonfinite = "apply"

    def __post_init__(self) -> None:
        if isinstance(self.size, bool | np.bool_) or not isinstance(self.size, int | np.integer):
            raise TypeError(f"Quorum has size={self.size!r}; use the number of workers that suffice for a round")
        if isinstance(self.grace, bool | np.bool_) or not isinstance(self.grace, int | float | np.number):
            raise TypeError(f"Quorum has grace={self.grace!r}; use a number of seconds")
        if not 1 <= self.size <= MAX_STALENESS:
            raise ValueError(f"Quorum has size={self.size}; use at least 1, and at most the number of workers")
        if not 0 <= self.grace < float("inf"):
            raise ValueError(f"Quorum has grace={self.grace!r}; use a number of seconds of at least 0")
        object.__setattr__(self, "size", int(self.size))
        object.__setattr__(self, "grace", float(self.grace))
        check_nonfinite(self.nonfinite)


Consistency = Sync | Quorum | BoundedStaleness | Async
"""How updates of different workers relate."""
