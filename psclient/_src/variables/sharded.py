"""Partitioned variables: `ps.ShardedVariable`, whose rows are on several servers.

Its shards are ordinary variables on servers. Whatever is done with the whole is cut by `Sharding`, here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np

from psclient._src import context
from psclient._src.arraylike import LazyArray, Mirrored, Readable
from psclient._src.arrays import nest
from psclient._src.arrays.devices import AnyArray, Value, as_array, is_array
from psclient._src.arrays.nest import Nest
from psclient._src.arrays.rows import concatenate
from psclient._src.context import StrategyFace
from psclient._src.values import DistributedValues
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.kinds import ServerVariable, check_fits, on_replica
from psclient._src.variables.server_reader import ServerReader
from psclient._src.variables.variable import Variable, VariableAggregation
from pswire.model.plan import ShardOf, VariableSpec
from pswire.model.rows import Int64s, Rows
from pswire.model.tensor import Array, TensorSpec


@dataclass(frozen=True)
class Sharding:
    """A variable's rows, cut into shards: "div", the first rows in the first shard.

    Attributes:
        starts: number of the first row of each shard, and of all rows.
        places: the servers of each shard.
    """

    starts: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def starts_of(cls, rows: int, shards: int) -> tuple[int, ...]:
        """Returns where so many shards begin, and the end; the first `rows % shards` have one row more."""
        least, more = divmod(rows, shards)
        return tuple(accumulate((least + (number < more) for number in range(shards)), initial=0))

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return self.starts[-1]

    @property
    def place(self) -> tuple[int, ...]:
        """The servers of all shards."""
        return tuple(sorted({server for place in self.places for server in place}))

    @property
    def bounds(self) -> list[slice]:
        """The rows of each shard."""
        return [slice(first, end) for first, end in pairwise(self.starts)]

    def cuts(self, shape: tuple[int, ...], like: tuple[int, ...]) -> bool:
        """Returns whether a value of a shape has the rows of a variable of another one, so that it is cut with it."""
        return len(shape) == len(like) and shape[:1] == (self.rows,)

    def tensors(self, whole: TensorSpec) -> list[TensorSpec]:
        """Returns dtype and shape of what each shard has of a value."""
        return [TensorSpec(whole.dtype, (b.stop - b.start, *whole.shape[1:])) for b in self.bounds]

    def specs(self, spec: VariableSpec) -> list[VariableSpec]:
        """Returns the shards of a variable as they are created, but for their names."""
        return [
            VariableSpec(
                f"{spec.name}/part_{number}",
                tensor,
                spec.trainable,
                spec.saved_as,
                None if spec.saved_as == "" else ShardOf(spec.name, first, self.rows),
                alone=spec.alone,
            )
            for number, (tensor, first) in enumerate(zip(self.tensors(spec.tensor), self.starts, strict=False))
        ]

    def split_ids(self, ids: Int64s) -> list[tuple[slice, Int64s]]:
        """Cuts increasing ids: which of them are in each shard, and their places there."""
        at = np.searchsorted(ids, self.starts).tolist()
        return [(slice(a, b), ids[a:b] - first) for (a, b), first in zip(pairwise(at), self.starts, strict=False)]

    def split_rows(self, slices: IndexedSlices) -> list[IndexedSlices]:
        """Cuts rows by the shards that they are of; nothing is copied."""
        ids, values = slices.rows()
        return [
            IndexedSlices._of_rows(Rows(own, values[at]), (b.stop - b.start, *slices.shape[1:]))
            for (at, own), b in zip(self.split_ids(ids), self.bounds, strict=True)
        ]

    def split(self, leaf: Any, whole: Variable) -> Sequence[Any]:
        """Cuts an argument of an update of a partitioned variable.

        What is cut like the variable gives its shards; rows and arrays with as many rows are cut; all else is for each
        shard as it is.

        Args:
            leaf: the argument.
            whole: the variable that is updated.

        Raises:
            ValueError: another variable that is cut otherwise.
        """
        if isinstance(leaf, VariableOfShards):
            if leaf.sharding != self:
                raise ValueError(
                    f"variable {leaf.name!r} is split differently from {whole.name!r}, or is on other "
                    "servers; create it in strategy.extended.colocate_vars_with, or pass its value"
                )
            return leaf.variables
        if isinstance(leaf, ShardedValue):
            if leaf.sharding == self:
                return leaf.parts
            leaf = leaf.numpy()
        if isinstance(leaf, IndexedSlices):
            return self.split_rows(whole._fit_slices(leaf))
        if isinstance(leaf, Mirrored):
            if not self.cuts(leaf.shape, whole.shape):
                return [leaf] * len(self.places)
            leaf = leaf.numpy()
        if isinstance(leaf, LazyArray) and self.cuts(leaf.shape, whole.shape):
            leaf = leaf.numpy()
        if is_array(leaf) and self.cuts(tuple(leaf.shape), whole.shape):
            return [leaf[rows] for rows in self.bounds]
        return [leaf] * len(self.places)

    def split_all(self, args: Nest, whole: Variable) -> list[Nest]:
        """Cuts a nest of arguments, as `split` cuts each of its leaves."""
        cut = [self.split(leaf, whole) for leaf in nest.flatten(args)]
        return [nest.pack_sequence_as(args, [each[number] for each in cut]) for number in range(len(self.places))]


class ShardedValue(LazyArray):
    """A value of a partitioned variable's shape, of which each server of the variable has the rows of its shards.

    Args:
        parts: the value of each shard.
        sharding: how it is cut.
        spec: dtype and shape of the whole.
        bring: brings values here, in one round.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        sharding: Sharding,
        spec: TensorSpec,
        bring: Callable[[Sequence[object]], list[Array]],
    ) -> None:
        self.parts = tuple(parts)
        self.sharding = sharding
        self.spec = spec
        self._bring = bring

    def _fetch(self) -> Array:
        return np.concatenate(self._bring(self.parts))


class VariableOfShards(Variable):
    """Base of what lies beside each shard of a partitioned variable.

    Args:
        strategy, spec, aggregation: of the whole, as `PlacedVariable` has them.
        sharding: how the partitioned variable is cut.
        variables: a variable for each shard.
        reader: reads them from their servers.
    """

    def __init__(
        self,
        strategy: StrategyFace,
        spec: VariableSpec,
        aggregation: VariableAggregation,
        sharding: Sharding,
        variables: Sequence[ServerVariable],
        reader: ServerReader,
    ) -> None:
        self._describe(strategy, spec, aggregation)
        self.sharding = sharding
        self.place = sharding.place
        self._shards = tuple(variables)
        self._reader = reader
        for shard in self._shards:
            shard.whole = self

    @property
    def variables(self) -> list[ServerVariable]:
        """The shards, in order."""
        return list(self._shards)

    def _on_host(self) -> Value:
        if context.update_lift() is not None:
            self._refuse_update()
        return self._fetch()

    def _refuse_update(self) -> NoReturn:
        """Raises `ValueError`: an update function sees a shard, and this is all of them."""
        raise ValueError(
            f"{self.name!r} has {len(self._shards)} shards, but an update function sees only one of them; "
            "pass it as an argument to the update of a variable that is split in the same way, or read it "
            "before and pass its value"
        )

    def _taken(self, how: str, value: Any) -> Any:
        if isinstance(value, Variable) and value.strategy is not self.strategy:
            return value  # which is refused later, with a word
        if isinstance(value, DistributedValues) and not isinstance(value, Readable):
            return value  # as well
        check_fits(self.name, self.spec, how, value)
        if isinstance(value, VariableOfShards | ShardedValue):
            return value if value.sharding == self.sharding else value.numpy()
        if isinstance(value, Readable):
            return value.numpy()
        return value if isinstance(value, bool | int | float | complex) else as_array(value)


class ShardCopies(VariableOfShards):
    """A variable of other rows than the partitioned variable beside which it was created: a copy beside each shard.

    The copies stay equal, as what updates them does the same for each shard.
    """

    def _fetch(self) -> Array:
        return self._reader.read_all([self._shards[0].handle])[0]


class CutVariable(VariableOfShards):
    """Base of variables whose rows are cut, some of them in each shard."""

    def _announce(self, ids: Int64s, hint: bool = False) -> None:
        for shard, (_, own) in zip(self._shards, self.sharding.split_ids(ids), strict=True):
            shard._announce(own)

    def _take_rows(self, ids: Int64s) -> AnyArray:
        split = zip(self._shards, self.sharding.split_ids(ids), strict=True)
        wanted = [(shard.handle, own) for shard, (_, own) in split if len(own)]
        found = self._reader.read_rows_of_all(wanted or [(self._shards[0].handle, ids)])
        return on_replica(concatenate(found))


class ShardedVariable(CutVariable):
    """A variable that is cut along its first axis into shards on several servers; used like any other variable.

    `Variable` makes one in the scope of a strategy with a `variable_partitioner`. `variables` are the shards, named
    "NAME/part_0", ...: shard i has the rows from `sharding.starts[i]` on. Reads, assignments, lookups and updates use
    the whole variable; each server is asked only for its own rows. A checkpoint stores the whole variable by its name.

    Source: `tf.distribute`'s ShardedVariable; iteration is over rows, as for any other variable.

    Attributes:
        sharding: the first row of each shard, and its servers.
    """

    _kept: tuple[tuple[Array, ...], Array] | None = None

    def _fetch(self) -> Array:
        parts = tuple(self._reader.read_all([shard.handle for shard in self._shards]))
        # What was read is the same object until a round changes it: so long the whole made of it serves as well.
        kept = self._kept
        if kept is None or any(part is not other for part, other in zip(parts, kept[0], strict=True)):
            whole = np.concatenate(parts)
            whole.flags.writeable = False
            self._kept = kept = parts, whole
        return kept[1]

    def __getitem__(self, key: object) -> Value:
        first = key[0] if isinstance(key, tuple) and key else key
        if context.update_lift() is not None or not isinstance(first, slice | int | np.integer):
            return super().__getitem__(key)
        number = not isinstance(first, slice)
        taken = range(self.shape[0])[first]  # raises IndexError as an array does
        rows = range(taken, taken + 1) if isinstance(taken, int) else taken
        if isinstance(first, bool) or not rows:
            return super().__getitem__(key)
        low, high = min(rows[0], rows[-1]), max(rows[0], rows[-1])
        asked = [n for n, b in enumerate(self.sharding.bounds) if b.start <= high and low < b.stop]
        if len(asked) == len(self._shards):
            return super().__getitem__(key)
        base = self.sharding.starts[asked[0]]
        found = self._reader.read_all([self._shards[n].handle for n in asked])
        part = on_replica(concatenate(found))
        end = rows[-1] - base + (1 if rows.step > 0 else -1)
        own = rows[0] - base if number else slice(rows[0] - base, None if end < 0 else end, rows.step)
        return part[(own, *key[1:]) if isinstance(key, tuple) else own]


def shards_of(variable: Variable) -> list[Variable]:
    """Returns a partitioned variable's shards, of another one itself."""
    return [*variable.variables] if isinstance(variable, VariableOfShards) else [variable]


def whole_of(variable: Any) -> Any:
    """Returns the partitioned variable of a shard; of anything else itself."""
    whole = variable.whole if isinstance(variable, ServerVariable) else None
    return variable if whole is None else whole
