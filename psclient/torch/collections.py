"""Collections of tables by TorchRec's names, whose features are looked up together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from psclient._src import context
from psclient._src.arrays.conversions import on_host
from psclient._src.variables.lookup import RowReadable
from psclient._src.variables.partitioners import FixedShardsPartitioner
from psclient._src.variables.table_views import StackedRows, stored_ids
from psclient._src.variables.variable import Variable
from psclient.dynamic_embedding import get_variable, group
from psclient.torch.embeddings import LookupModule
from psclient.torch.jagged import JaggedTensor, KeyedTensor
from psclient.torch.parameters import DTYPES
from psclient.torch.rows import TableRows, checked_ids
from pswire.errors import InvalidArgument, InvalidType, UnknownName
from pswire.model.tensor import Array


@dataclass
class EmbeddingConfig:
    """The configuration of a table, with TorchRec's names; TorchRec's own `EmbeddingConfig` may be used as well.

    Attributes:
        name: the table's name.
        embedding_dim: the size of a row.
        feature_names: the features with ids of this table; none for one of the table's name.
        num_embeddings: number of rows; 0 for a dynamic table, whose ids are any 64-bit numbers, or from 0 to 2**48 - 1
            if the collection has other dynamic tables of the same dimension and data type.
        data_type: "FP32", "FP16", "BF16" or "FP64": the dtype of the table.
        init_fn: for a table with a number of rows, sets initial values: changes the given tensor, or returns another.
        weight_init_min: lower bound of uniform initial values; None for `-1 / sqrt(num_embeddings)`.
        weight_init_max: upper bound of uniform initial values; None for `1 / sqrt(num_embeddings)`.
        table: an existing table; None to create it.
    """

    name: str
    embedding_dim: int
    feature_names: list[str] = field(default_factory=list)
    num_embeddings: int = 0
    data_type: Any = "FP32"
    init_fn: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    weight_init_min: float | None = None
    weight_init_max: float | None = None
    table: Any = None


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """The configuration of a table of bags, as TorchRec's class of this name.

    Attributes:
        pooling: "SUM" or "MEAN" of the rows of a bag.
    """

    pooling: Any = "SUM"


class _Feature(NamedTuple):
    """A feature with ids of a table.

    Attributes:
        name: its name among the ids.
        shown: its name among the results.
        table: the table.
        config: the configuration of the table.
    """

    name: str
    shown: str
    table: RowReadable
    config: Any


class _Stack:
    """Tables that are stored as one: their ids are looked up together, and their gradients are one.

    Args:
        table: what stores their rows.
        features: the features of all of them.
    """

    def __init__(self, table: Any, features: Sequence[_Feature]) -> None:
        self.rows, self.features = TableRows.of(table), features
        self.names = [each.name for each in features]
        self._tables = [each.table for each in features]

    def ids(self, bags: _Bags) -> Array:
        """Returns the ids of its features as the one table has them, one feature after another, on the host."""
        own = bags.of(self.names)
        return stored_ids(self._tables, own.counts, self._on_host(own))

    @property
    def _takes_hints(self) -> bool:
        return self.rows.table._takes_hints

    def prefetch(self, *ids: Any) -> None:
        """Requests the rows of the next lookup; ids are as `ids` returns them."""
        self.rows.table.prefetch(*ids)

    def prefetch_hint(self, *ids: Any) -> None:
        """Announces the rows of the lookup after the next one."""
        self.rows.table.prefetch_hint(*ids)

    def look_up(self, own: _Bag) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows of the ids of its features' bags, each once, and the places of all these ids among them."""
        ids = self._on_host(own)
        self.rows.table._tell_lookup_by(self, lambda: np.split(ids, np.cumsum(own.counts)[:-1]))
        return self.rows.look_up_on(own.ids.device, stored_ids(self._tables, own.counts, ids))

    def _on_host(self, own: _Bag) -> Array:
        return on_host(checked_ids(self._tables[0], own.ids).reshape(-1))

    def _join(self, arrays: Iterable[tuple[int, Array]]) -> Array:
        """Returns ids as the one table has them, of arrays and the number of the feature of each."""
        numbers, ids = zip(*arrays, strict=True)
        tables, counts = [self._tables[number] for number in numbers], [each.size for each in ids]
        return stored_ids(tables, counts, np.concatenate([each.ravel() for each in ids]))


class _Collection(LookupModule):
    """Base of collections of tables, with the arguments and methods that they share.

    Args:
        tables: the configurations of the tables.
        device: None.
    """

    def __init__(self, tables: Sequence[Any], device: None) -> None:
        super().__init__()
        if device is not None:
            raise InvalidType(
                f"{type(self).__name__} does not support device={device!r}: rows come to the device of the ids; "
                "leave it out"
            )
        self._configs = list(tables)
        _check_names(self._configs)
        self._tables = _tables(self._configs)
        owners = [(config, name) for config in self._configs for name in _features_of(config)]
        counts = Counter(name for _, name in owners)
        features = [
            _Feature(name, f"{name}@{config.name}" if counts[name] > 1 else name, self._tables[config.name], config)
            for config, name in owners
        ]
        by_store: dict[int, list[_Feature]] = {}
        for feature in features:
            by_store.setdefault(id(feature.table._stored_in), []).append(feature)
        self._stacks = [_Stack(of[0].table._stored_in, of) for of in by_store.values()]
        self._shown = [feature.shown for feature in features]
        for number, stack in enumerate(self._stacks):
            self.register_parameter(f"gate_{number}", stack.rows.gate)

    @property
    def tables(self) -> Mapping[str, Any]:
        """Its tables by their names, for lookups and exports."""
        return dict(self._tables)

    @property
    def rows(self) -> list[TableRows]:
        """The looked-up rows of what stores its tables."""
        return [stack.rows for stack in self._stacks]

    def prefetch(self, *features: Any) -> None:
        """Requests the rows of the features that are looked up next, together with the next round; see `Loader`."""
        batches = [_Bags(each) for each in features]
        for stack in self._stacks:
            stack.prefetch(*[stack.ids(each) for each in batches])

    def prefetch_hint(self, *features: Any) -> None:
        """Announces the features that are looked up after the next ones, so that servers read their rows from disk."""
        batches = [_Bags(each) for each in features]
        for stack in self._stacks:
            stack.prefetch_hint(*[stack.ids(each) for each in batches])

    def _look_up(self, features: Any) -> Iterator[tuple[_Stack, _Bag, torch.Tensor, torch.Tensor]]:
        """Yields each stack with the bags of its features, rows, and the places of all their ids among the rows."""
        bags = _Bags(features)
        for stack in self._stacks:
            own = bags.of(stack.names)
            yield stack, own, *stack.look_up(own)


class EmbeddingBagCollection(_Collection):
    """Bags of several features with tables on servers, with the API of TorchRec's module of this name.

        tables = [EmbeddingBagConfig(name="users", embedding_dim=64, feature_names=["user"])]
        bags = pst.EmbeddingBagCollection(tables)(features)  # in strategy.scope(), the first time
        bags["user"]                                         # (B, 64)

    Create it in `strategy.scope()`, in the same way on every worker: it creates its tables. `features` is TorchRec's
    `KeyedJaggedTensor`, this package's, or any object with `keys()`, `values()` and `lengths()`.

    Tables of the same dimension and data type are stored as one, named after the first of them: `<name>_group`, a group
    of dynamic tables or a variable that is cut over all servers. Their ids are made unique, looked up and updated
    together.

    Args:
        tables: the configurations of the tables.
        is_weighted: True if ids have weights, by which rows are multiplied.
        device: None: rows come to the device of the ids.

    Raises:
        ValueError: a name is repeated, the pooling or data type is not known, or a dynamic table has an `init_fn`.
        TypeError: a device is given.
    """

    def __init__(self, tables: Sequence[Any], is_weighted: bool = False, device: None = None) -> None:
        self._modes = {config.name: _pooling(config) for config in tables}
        super().__init__(tables, device)
        self._weighted = is_weighted

    def embedding_bag_configs(self) -> list[Any]:
        """The configurations of its tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """True if ids have weights."""
        return self._weighted

    def forward(self, features: Any) -> KeyedTensor:
        """Returns the bags of each feature.

        Args:
            features: the ids.
        """
        return KeyedTensor(self._shown, *self._bags(features))

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def _bags(self, features: Any) -> tuple[list[int], torch.Tensor | list[torch.Tensor]]:
        """Returns the size of each feature's bags, and all bags side by side; with several stacks a list by feature."""
        found: dict[str, torch.Tensor] = {}
        for stack, own, rows, places in self._look_up(features):
            pooled = self._pooled(stack, own, rows, places)
            if len(self._stacks) == 1:
                return [rows.shape[1]] * len(stack.features), pooled
            found |= zip([each.shown for each in stack.features], pooled.split(rows.shape[1], dim=1), strict=True)
        parts = [found[name] for name in self._shown]
        return [part.shape[1] for part in parts], parts

    def _pooled(self, stack: _Stack, own: _Bag, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns the bags of a stack's features side by side, of ids whose rows are at some places."""
        (count, size), dim = own.lengths.shape, rows.shape[1]
        weights = own.weights_of(rows.dtype) if self._weighted else None
        if weights is None and len(places) == count * size and bool((own.lengths == 1).all()):
            # With one id in each bag, as is common, backward takes a third, and no bag is copied to its neighbours.
            return rows.index_select(0, places.view(count, size).t().flatten()).view(size, count * dim)
        sums = functional.embedding_bag(
            places,
            rows,
            functional.pad(own.lengths.flatten().cumsum(0), (1, 0)),
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        ).view(count, size, dim)
        means = [self._modes[each.config.name] == "mean" for each in stack.features]
        if any(means):
            divisors = torch.where(torch.tensor(means, device=sums.device)[:, None], own.lengths.clamp(min=1), 1)
            sums = sums / divisors[:, :, None].to(sums.dtype)
        return sums.transpose(0, 1).reshape(size, count * dim)


class EmbeddingCollection(_Collection):
    """Rows of several features with tables on servers, with the API of TorchRec's module of this name.

        tables = [EmbeddingConfig(name="items", embedding_dim=64, feature_names=["seen"])]
        rows = pst.EmbeddingCollection(tables)(features)  # in strategy.scope(), the first time
        rows["seen"].values()                             # (number of ids, 64)

    Features and tables are as in `EmbeddingBagCollection`, also how tables are stored.

    Args:
        tables: the configurations of the tables, of one dimension.
        device: None: rows come to the device of the ids.
        need_indices: True if results have the ids as weights.

    Raises:
        ValueError: tables have different dimensions; as `EmbeddingBagCollection`.
        TypeError: a device is given.
    """

    def __init__(self, tables: Sequence[Any], device: None = None, need_indices: bool = False) -> None:
        if len(dims := {config.embedding_dim for config in tables}) > 1:
            raise InvalidArgument(
                f"the tables of an EmbeddingCollection have dimensions {', '.join(map(str, sorted(dims)))}; use one "
                "collection for each dimension"
            )
        super().__init__(tables, device)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[Any]:
        """The configurations of its tables."""
        return self._configs

    def embedding_dim(self) -> int:
        """The size of a row."""
        dim: int = self._configs[0].embedding_dim
        return dim

    def need_indices(self) -> bool:
        """True if results have the ids as weights."""
        return self._need_indices

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Returns the row of each id, by feature.

        Args:
            features: the ids.
        """
        found = {}
        for stack, own, rows, places in self._look_up(features):
            parts = [each.split(own.counts) for each in (rows.index_select(0, places), own.ids)]
            for feature, lengths, values, ids in zip(stack.features, own.lengths, *parts, strict=True):
                found[feature.shown] = JaggedTensor(values, lengths, ids if self._need_indices else None)
        return {name: found[name] for name in self._shown}


class _Bag(NamedTuple):
    """The bags of some features.

    Attributes:
        ids: their ids, one bag behind another, those of the first feature first.
        lengths: number of ids of each bag, (features, B).
        counts: number of ids of each feature.
        weights: of the ids; None for none.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    counts: list[int]
    weights: torch.Tensor | None

    def weights_of(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weights of the ids; raises `ValueError` if they have none."""
        if self.weights is None:
            raise InvalidArgument("the collection has is_weighted=True, but the features have no weights; pass weights")
        return self.weights.to(dtype)


class _Bags:
    """Features by their names."""

    def __init__(self, features: Any) -> None:
        if not all(callable(getattr(features, name, None)) for name in ("keys", "values", "lengths")):
            raise InvalidType(
                f"features are a {type(features).__name__}; pass a KeyedJaggedTensor, of TorchRec or of this package"
            )
        self._keys = list(features.keys())
        values, flat = features.values(), features.lengths().reshape(-1)
        weights = features.weights_or_none() if hasattr(features, "weights_or_none") else None
        _check_lengths(self._keys, values, flat, weights)
        lengths = flat.reshape(len(self._keys), -1)
        self._all = _Bag(values, lengths, lengths.sum(dim=1).tolist(), weights)

    def of(self, names: Sequence[str]) -> _Bag:
        """Returns the bags of some features; raises `KeyError` where one is not there."""
        if names == self._keys:
            return self._all
        for name in names:
            if name not in self._keys:
                raise UnknownName(f"feature {name!r} is not among {', '.join(self._keys)}")
        places = [self._keys.index(name) for name in names]
        ids, lengths, counts, weights = self._all

        def joined(whole: torch.Tensor) -> torch.Tensor:
            parts = whole.split(counts)
            return torch.cat([parts[place] for place in places])

        own = [counts[place] for place in places]
        return _Bag(joined(ids), lengths[places], own, None if weights is None else joined(weights))


def _check_lengths(
    keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
) -> None:
    """Raises `ValueError` if names repeat, or the lengths of bags, or weights, are not those of the values."""
    count, whole = len(values), int(lengths.sum())
    if repeated := [key for key, times in Counter(keys).items() if times > 1]:
        raise InvalidArgument(f"two features are named {repeated[0]!r}; give each another name")
    if not keys or len(lengths) % len(keys):
        raise InvalidArgument(
            f"features with {len(keys)} keys have {len(lengths)} lengths; pass one length for each feature "
            "and example, the same number for each key"
        )
    if whole != count or (len(lengths) and int(lengths.min()) < 0):
        raise InvalidArgument(
            f"the lengths of {', '.join(map(repr, keys))} add up to {whole}, but there are {count} values; "
            "pass the number of ids of each feature and example, at least 0"
        )
    if weights is not None and len(weights) != count:
        raise InvalidArgument(f"there are {len(weights)} weights for {count} values; pass one weight for each value")


def _pooling(config: Any) -> str:
    word = _word(config.pooling).lower()
    if word not in ("sum", "mean"):
        raise InvalidArgument(f"table {config.name!r} has pooling {config.pooling!r}; use SUM or MEAN")
    return word


DATA_TYPES: Mapping[str, torch.dtype] = {
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
"""Dtypes of tables, by TorchRec's names."""


def _word(value: Any) -> str:
    """Returns a word, or that of an enumeration's member."""
    return str(getattr(value, "value", value))


def _features_of(config: Any) -> list[str]:
    return list(config.feature_names) or [config.name]


def _check_names(configs: Sequence[Any]) -> None:
    """Raises `ValueError` if two tables have one name, or two features of a table."""
    if len({config.name for config in configs}) < len(configs):
        raise InvalidArgument(
            "two tables of a collection have the same name; use one table for all its features, or another name"
        )
    for config in configs:
        if repeated := [name for name, times in Counter(_features_of(config)).items() if times > 1]:
            raise InvalidArgument(f"two features of table {config.name!r} are named {repeated[0]!r}; name it once")


def _tables(configs: Sequence[Any]) -> dict[str, RowReadable]:
    """Returns the table of each configuration, by its name; those that are alike are created as one."""
    found: dict[str, RowReadable] = {}
    alike: dict[tuple[bool, int, torch.dtype], list[Any]] = {}
    for config in configs:
        given = getattr(config, "table", None)
        if given is None:
            alike.setdefault((not config.num_embeddings, config.embedding_dim, _dtype(config)), []).append(config)
        else:
            found[config.name] = TableRows.of(given).table
    for (dynamic, dim, dtype), some in alike.items():
        found |= (_dynamic_tables if dynamic else _static_tables)(some, dim, dtype)
    return found


def _dtype(config: Any) -> torch.dtype:
    word = _word(getattr(config, "data_type", "FP32"))
    if word not in DATA_TYPES:
        raise InvalidArgument(f"table {config.name!r} has data_type {word}; use one of {', '.join(DATA_TYPES)}")
    return DATA_TYPES[word]


def _dynamic_tables(configs: Sequence[Any], dim: int, dtype: torch.dtype) -> dict[str, RowReadable]:
    for config in configs:
        if getattr(config, "init_fn", None) is not None:
            raise InvalidArgument(
                f"table {config.name!r} has an init_fn but no size, so its rows are created on the servers; "
                "pass table=... from ps.dynamic_embedding.get_variable, with one of ps.initializers"
            )
    names = [config.name for config in configs]
    if len(names) == 1:
        return {names[0]: get_variable(names[0], dim, value_dtype=DTYPES[dtype])}
    return {**group(names, dim, name=f"{names[0]}_group", value_dtype=DTYPES[dtype])}


def _static_tables(configs: Sequence[Any], dim: int, dtype: torch.dtype) -> dict[str, RowReadable]:
    names, sizes = [config.name for config in configs], [config.num_embeddings for config in configs]

    def first() -> Array:
        return on_host(torch.cat([_first_values(config, dim, dtype) for config in configs]))

    if len(names) == 1:
        return {names[0]: Variable(first, name=names[0])}
    servers = len(context.get_strategy().extended.parameter_devices)
    table = Variable(first, name=f"{names[0]}_group", partitioner=FixedShardsPartitioner(servers))
    starts = accumulate(sizes, initial=0)
    return {name: StackedRows(table, name, *place) for name, *place in zip(names, starts, sizes, strict=False)}


def _first_values(config: Any, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the first values of a table with a size."""
    most = 1 / math.sqrt(config.num_embeddings)
    low = -most if config.weight_init_min is None else config.weight_init_min
    high = most if config.weight_init_max is None else config.weight_init_max
    shape = config.num_embeddings, dim
    values = torch.from_numpy(np.random.default_rng().uniform(low, high, shape)).to(dtype)
    init = getattr(config, "init_fn", None)
    made = None if init is None else init(values)
    return (values if made is None else made).to(dtype).contiguous()
