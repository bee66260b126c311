"""`get_variable` and `group`: dynamic tables, and many small ones in one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from psclient._src import context, values
from psclient._src.arrays.nest import Nest
from psclient._src.options import Consistency
from psclient._src.variables.consistency import check_consistency
from psclient._src.variables.table_views import KEY_BITS, MAX_VIEWS, TableGroup
from psclient._src.variables.tables import TableVariable
from psclient.dynamic_embedding.options import HashPartitioner, StorageOption, check_shards, limit_of
from psclient.initializers import Constant, Initializer, RandomUniform
from pswire.errors import ConfigError, InvalidRequest
from pswire.model.plan import VariableSpec
from pswire.model.tables import ROWS, Admission, Eviction, TableSpec, Unknown
from pswire.model.tensor import TensorSpec


def get_variable(
    name: str,
    dim: SupportsIndex | Sequence[SupportsIndex],
    key_dtype: npt.DTypeLike = "int64",
    value_dtype: npt.DTypeLike = "float32",
    trainable: bool = True,
    checkpoint: bool = True,
    init_size: int = 0,
    initializer: Initializer | float | None = None,
    partitioner: HashPartitioner | None = None,
    admission: Admission | None = None,
    eviction: Eviction | None = None,
    capacity: int | None = None,
    memory_limit: int | str | None = None,
    storage: StorageOption | str | None = None,
    refused: Unknown = "initial",
    hash_seed: int = 0,
    shards: int | None = None,
    compression: None = None,
    consistency: Consistency | None = None,
) -> TableVariable:
    """Gets or creates a dynamic table of the current strategy, by its name: a variable with rows by 64-bit keys.

    In replica and cross-replica context of a `ParameterServerStrategy`, in the same way on every process. A second call
    with the same arguments returns the same table.

    Source: `get_variable` of TensorFlow Recommenders Addons; options of admission and eviction are those of DeepRec.

    Args:
        name: the table's name, also in checkpoints.
        dim: number of elements of a row, or its shape; () for one number.
        key_dtype: int64 or uint64. Any 64-bit number is a key.
        value_dtype: dtype of the rows.
        trainable: True if optimizers should train it.
        checkpoint: True: every table is in each checkpoint.
        init_size: expected number of rows; ignored: a table grows bucket by bucket, without a pause.
        initializer: initial values of a row, one of `ps.initializers` or a number; by default uniform in [-0.05, 0.05).
            They depend on its seed, the key and the column: two tables with the same seed have the same values.
        partitioner: `HashPartitioner`, which is the default.
        admission: which new keys get a row: `CounterFilter`, `CBFFilter` or `ProbabilityFilter`; None for all.
            Gradients of other keys are dropped.
        eviction: which rows are removed: `LRU`, `LFU`, `GlobalStepEvict`, `TTL` or `L2WeightEvict`. With None, rows are
            evicted only above a limit, the least recently updated first.
        capacity: largest number of rows of the whole table, at least 16,384; None or 0 for no limit.
        memory_limit: bytes for its rows, slots and index on all servers together, such as "4GiB"; None or 0 for no
            limit. A round that updates more rows than fit raises `MemoryLimit` and changes nothing.
        storage: `StorageOption("dram")`, or "dram", which is the default.
        refused: the value of a lookup for a key without a row because of `admission`: "initial", its initial value, or
            "zeros".
        hash_seed: seed of the hashes that assign keys to buckets; keep it secret if untrusted parties choose keys. A
            checkpoint is restored only into a table with the same seed.
        shards: number of parts, each on its own server; for None or more than the number of servers, all servers.
        compression: None: rows are sent and stored uncompressed.
        consistency: how updates of it by different workers relate, the same in all processes: `ps.Async()` in a
            strategy with `ps.Sync()` for a table that each worker updates independently; None for that of the strategy.
            See `docs/asynchronous.md`.

    Returns:
        The table.

    Raises:
        RuntimeError: the current strategy has no parameter servers, or called in an update function.
        ValueError: an argument has an invalid value; or another table or variable has this name.
        TypeError: an argument has another type.
        VariableMismatch: another process has created something else in its place.
        ConfigError: its consistency does not work with that of the job.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; use a string, such as 'users'")
    if not checkpoint:
        raise ValueError(
            f"table {name!r}: checkpoint=False is not supported, because checkpoints contain all tables; remove it"
        )
    if compression is not None:
        raise ValueError(
            f"table {name!r}: compression of rows is not supported; remove compression, or use value_dtype='float16'"
        )
    check_consistency(consistency, name)
    if isinstance(storage, str):
        storage = StorageOption(storage)
    if not isinstance(storage, StorageOption | None):
        raise TypeError(f"table {name!r}: storage is {storage!r}; use StorageOption('dram'), or leave it out")
    if not isinstance(partitioner, HashPartitioner | None):
        raise TypeError(f"table {name!r}: partitioner is {partitioner!r}; use HashPartitioner(), or leave it out")
    first = _initializer(initializer, name)
    row = dim if isinstance(dim, Sequence) else (dim,)
    try:
        table = TableSpec(
            tuple(map(operator.index, row)),
            np.dtype(value_dtype).name,
            cast(Any, np.dtype(key_dtype).name),
            first._of_rows(),
            admission,
            eviction,
            capacity or 0,
            limit_of(memory_limit, name),
            refused,
            first.seed,
            hash_seed,
        ).check()
        VariableSpec(name, TensorSpec(table.dtype, (ROWS, *table.shape))).check()
    except (InvalidRequest, ConfigError) as error:
        raise ValueError(f"table {name!r}: {error.message}") from None
    parts = check_shards(shards if partitioner is None or shards is not None else partitioner.shards)
    current = _strategy_for(name)

    def create(strategy: Any) -> TableVariable:
        with context.across_replicas(strategy, "get_variable"):
            made: TableVariable = strategy.backend.variables.table(
                strategy, name, table, bool(trainable), parts, consistency
            )
        return made

    replica = context.get_replica_context()
    if replica is None:
        return create(current)
    return cast(TableVariable, replica.merge_call(_create_together, (create,)))


def _create_together(strategy: Any, creates: Nest) -> TableVariable:
    return cast(TableVariable, values.local_results(creates)[0](strategy))


def group(
    names: Iterable[str], dim: SupportsIndex | Sequence[SupportsIndex], name: str = "group", **options: Any
) -> TableGroup:
    """Gets or creates many small tables as one: their gradients in one step are one reduction.

    The key in the one table is the number of a table above the 48 bits of its own key: there are no collisions. So keys
    are integers from 0 to 2**48 - 1, and there are at most 32,768 tables. Limits, filters and policies apply to all
    tables together. A checkpoint has only the one table: keep the order of the names, and add new ones at the end.

        tables = de.group(["user", "item", "genre"], dim=16)
        rows = tables.lookup({"user": batch["user"], "item": batch["item"]})
        optimizer.apply_gradients([(rows[n].gradient(d[n]), tables[n]) for n in rows])

    Source: the table-batched embeddings of TorchRec, and table stacking in TPU embeddings.

    Args:
        names: names of the tables, in the order of their numbers; for a dict its keys.
        dim: as in `get_variable`, the same for all.
        name: name of the one table.
        options: further arguments of `get_variable`, except `key_dtype`.

    Returns:
        A mapping from names to tables.

    Raises:
        ValueError: there are no names, too many, or a name twice; as `get_variable`.
        TypeError: `names` is a string, each letter of which would be a name; as `get_variable`.
        RuntimeError: as `get_variable`.
    """
    if isinstance(names, str):
        raise TypeError(f"names is {names!r}, but must be a list of names; use [{names!r}]")
    known = list(names)
    if not 0 < len(known) <= MAX_VIEWS or len(set(known)) < len(known):
        raise ValueError(
            f"group {name!r} got {len(known)} names, {len(set(known))} of them different; use 1 to "
            f"{MAX_VIEWS} different names"
        )
    if "key_dtype" in options:
        raise TypeError(f"group {name!r}: keys of a group must be integers of {KEY_BITS} bits; leave key_dtype out")
    table = get_variable(name, dim, **options)
    if table.views is None:
        table.views = TableGroup(table, known)
    views: TableGroup = table.views
    if list(views) != known:
        raise ValueError(
            f"group {name!r} already exists with the names {list(views)}; use another name, or the same "
            "names in the same order"
        )
    return views


def _initializer(given: Initializer | float | None, name: str) -> Initializer:
    if given is None:
        return RandomUniform()
    if isinstance(given, bool | int | float):
        return Constant(float(given))
    if not (hasattr(given, "_of_rows") and hasattr(given, "seed")) or isinstance(given, type):
        raise TypeError(
            f"table {name!r}: initializer is {given!r:.80}; use one of ps.initializers, such as "
            "ps.initializers.RandomUniform(-0.05, 0.05), or a number"
        )
    return given


def _strategy_for(name: str) -> Any:
    """Returns the strategy of the scope; raises `RuntimeError` where it can have no table."""
    if context.in_update():
        raise RuntimeError("an update function cannot create tables; create them before, in strategy.scope()")
    strategy = context.get_strategy()
    if not strategy.backend.between_graph:
        raise RuntimeError(
            f"table {name!r} needs parameter servers, but the current strategy is a "
            f"{type(strategy).__name__}; create it in the scope of a ps.ParameterServerStrategy"
        )
    return strategy
