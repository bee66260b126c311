"""Options and contexts of input functions, and the shapes of batches."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from pswire.model.consistency import Mode
from pswire.model.plan import Nonfinite
from pswire.model.plan import ReduceOp as OpName


class AutoShardPolicy(IntEnum):
    """The way in which workers share a dataset; the numbers are those of `tf.data.experimental.AutoShardPolicy`.

    Attributes:
        OFF: no sharing: every worker sees all of the data, and splits it among its local replicas.
        AUTO: the same as DATA.
        FILE: by files; refused, since a dataset knows none here.
        DATA: each global batch is cut into slices, one for each replica of all workers.
        HINT: by a placeholder in the pipeline; refused, since pipelines have none here.
        DYNAMIC: server 0 hands out global batches, whole, to whichever worker asks next; not of `tf.data`. For workers
            that make updates of their own, with `Async()` or `BoundedStaleness(k)`, and for datasets of which any batch
            can be read by its number: a batched `ArrayDataset`, a list of batches, a `MapDataset` of grain.
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
        experimental_prefetch_to_device: batches are put on the replicas' devices; False leaves them on the host,
            as NumPy arrays.
        auto_shard_policy: for `experimental_distribute_dataset`; a dataset from a function is never sharded.
        prefetch: for variables, of which rows are looked up in each step, a function that returns their ids, given one
            replica's batch. The rows of the next batch then come with the round of this one.

    Raises:
        ValueError: there is no such policy.
        TypeError: a value of `prefetch` is no function.
    """

    _nest_leaf: ClassVar[bool] = True

    experimental_prefetch_to_device: bool = True
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    prefetch: Mapping[Any, Callable[[Any], Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "auto_shard_policy", AutoShardPolicy(self.auto_shard_policy))
        for variable, ids in self.prefetch.items():
            if not (hasattr(variable, "prefetch") and callable(ids)):
                raise TypeError(f"prefetch has {variable!r}: {ids!r}; give a function of a batch for each variable")


@dataclass(frozen=True)
class RunOptions:
    """Options of `strategy.run`, so that scripts written for TensorFlow run unchanged. Neither has a meaning here.

    Attributes:
        experimental_enable_dynamic_batch_size: replica functions are plain Python and take arrays of any shape.
        experimental_bucketizing_dynamic_shape: nothing is compiled for a shape, so shapes are not put into buckets.
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
        """Examples for each replica; raises `ValueError` if they cannot be shared out equally."""
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"a global batch of {global_batch_size} examples cannot be shared equally by "
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
        shape: its dimensions; None for the first, which counts the examples and may differ.
        dtype: of its elements.
    """

    _nest_leaf: ClassVar[bool] = True

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class PerReplicaSpec:
    """The shapes and dtypes of one per-replica value of a batch.

    Attributes:
        specs: of each local replica.
    """

    _nest_leaf: ClassVar[bool] = True

    specs: tuple[ArraySpec, ...]


ReduceOpName = Literal["sum", "mean", "SUM", "MEAN"]
"""A reduction by its name."""


class ReduceOp(enum.Enum):
    """SUM, or MEAN: the sum over the number of contributing replicas, or of elements where an axis is reduced.

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
            raise ValueError(f"{aggregation} is no reduction; there is one for VariableAggregation.SUM and MEAN")
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
    """A round that is over.

    Attributes:
        number: its number; of an asynchronous worker its own count.
        generation: number of the generation whose members made it.
        contributors: the tasks whose contributions it has, such as `/job:worker/task:0`, in order.
        excluded: members that it was completed without, since they were lost, or late where there are backup workers.
    """

    _nest_leaf: ClassVar[bool] = True

    number: int
    generation: int
    contributors: tuple[str, ...]
    excluded: tuple[str, ...] = ()


def check_nonfinite(choice: str) -> None:
    """Raises `ValueError` for an unknown choice of what becomes of updates with NaN or infinity."""
    if choice not in get_args(Nonfinite):
        raise ValueError(f"unknown nonfinite {choice!r}; choose 'apply', 'skip' or 'raise'")


@dataclass(frozen=True)
class Sync:
    """Synchronous rounds: every update includes each worker's contribution once and whole.

    A round has the same contributions on all servers of its section, whoever is lost while it is made: the servers
    agree before anything of it is visible.

    Attributes:
        nonfinite: what becomes of a round's updates if what a process contributes to one of them has NaN or infinity.
            "apply": they are applied, with a warning. "skip": none of them is applied, slots and `iterations` included,
            with a warning. "raise": none is applied, and every process raises `NonfiniteError`. For the last two each
            process tests what it sends, and large rounds do not stream.
        backup_workers: b, the members that a round of updates does not wait for: it is made once the contributions of
            N - b of its N members are whole, at least of one. Who comes later is left out, as `last_round` says it,
            gets the new values, and goes on at once; its examples are handed out again. So each example of a pass over
            a distributed dataset counts once. Rounds that update nothing, and saves, wait for all. Smaller than the
            number of workers; large rounds do not stream.

    Raises:
        ValueError: there is no such choice, or `backup_workers` is negative.
        TypeError: `backup_workers` is no whole number.
    """

    mode: ClassVar[Mode] = "sync"

    nonfinite: Nonfinite = "apply"
    backup_workers: int = 0

    def __post_init__(self) -> None:
        check_nonfinite(self.nonfinite)
        if isinstance(self.backup_workers, bool) or not isinstance(self.backup_workers, int):
            raise TypeError(f"backup_workers={self.backup_workers!r} is no number of workers; give a whole number")
        if self.backup_workers < 0:
            raise ValueError(f"backup_workers={self.backup_workers} is negative; 0 waits for every worker")


MAX_STALENESS = 2**31 - 1
"""The greatest bound of staleness: `Async()` has none."""


@dataclass(frozen=True)
class BoundedStaleness:
    """Each worker makes updates of its own, as with `Async()`, and gets at most `k` rounds ahead of the slowest.

    A push is applied once, whole and at once. The answer of a worker's round c waits until every other worker has
    pushed its round c - k, and has the values of when it comes: so what a worker computes its next round from has all
    updates of the others up to round c - k, and most often newer ones. `k = 0` is lockstep: nobody begins a round
    before all have pushed the one before. Who has left, was lost, or has ended a pass over its data and begun nothing
    else is not waited for. All else is as with `Async()`.

    Source: stale synchronous parallel, Ho et al., NIPS 2013; held answers bring fresh values as in ESSP, Dai et al.,
    AAAI 2015.

    Attributes:
        mode: "bounded".
        backup_workers: 0: nobody waits for a round.
        k: the most rounds that an answered worker is ahead of another one; the same in all processes.
        nonfinite: as of `Async`.

    Raises:
        TypeError: `k` is no integer.
        ValueError: `k` is negative, or too large; there is no such choice.
    """

    mode: ClassVar[Mode] = "bounded"
    backup_workers: ClassVar[int] = 0

    k: int
    nonfinite: Nonfinite = "apply"

    def __post_init__(self) -> None:
        if isinstance(self.k, bool | np.bool_) or not isinstance(self.k, int | np.integer):
            raise TypeError(f"BoundedStaleness has k={self.k!r}; give a number of rounds, an integer from 0 on")
        object.__setattr__(self, "k", int(self.k))
        if not 0 <= self.k <= MAX_STALENESS:
            raise ValueError(
                f"BoundedStaleness has k={self.k}; give a number of rounds from 0, which is lockstep, to "
                f"{MAX_STALENESS}, or take Async(), which has no bound"
            )
        check_nonfinite(self.nonfinite)


@dataclass(frozen=True)
class Async:
    """Each worker makes updates of its own: a push is applied once, whole and at once, and nobody waits for others.

    `num_replicas_in_sync` is then this worker's number of replicas, and what a step reads may have been changed by
    others since. The examples of a dataset are shared by all workers all the same, or with `AutoShardPolicy.DYNAMIC`
    handed out to whichever asks next. In a job with `Sync()` single variables may have it: see `Variable`.

    Attributes:
        mode: "async".
        backup_workers: 0: nobody waits.
        nonfinite: as of `Sync`; a round has one contribution here, and `NonfiniteError` is raised in its process.

    Raises:
        ValueError: there is no such choice.
    """

    mode: ClassVar[Mode] = "async"
    backup_workers: ClassVar[int] = 0

    nonfinite: Nonfinite = "apply"

    def __post_init__(self) -> None:
        check_nonfinite(self.nonfinite)


Consistency = Sync | BoundedStaleness | Async
"""How updates of different workers relate."""
