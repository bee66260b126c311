"""`EmbeddingBagCollection`: tables by TorchRec's names, whose features are looked up together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from psclient._src.arrays.conversions import on_host
from psclient._src.variables.variable import Variable
from psclient.dynamic_embedding import get_variable
from psclient.torch.embeddings import LookupModule, TableRows
from psclient.torch.parameters import DTYPES
from pswire.errors import InvalidArgument, UnknownName
from pswire.model.tensor import Array


@dataclass
class EmbeddingBagConfig:
    """The configuration of a table, with TorchRec's names; TorchRec's own `EmbeddingBagConfig` may be used as well.

    Attributes:
        name: the table's name.
        embedding_dim: the size of a row.
        feature_names: the features with ids of this table.
        num_embeddings: number of rows; 0 for a dynamic table, which takes any 64-bit number as an id.
        pooling: "SUM" or "MEAN" of the rows of a bag.
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
    pooling: Any = "SUM"
    data_type: Any = "FP32"
    init_fn: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    weight_init_min: float | None = None
    weight_init_max: float | None = None
    table: Any = None


class KeyedJaggedTensor:
    """Ids of several features, with a bag for each example: as TorchRec's class of this name.

    Args:
        keys: names of the features.
        values: all ids, those of the first feature first, example after example.
        lengths: number of ids of each feature and example, (features x examples).
        weights: the weight of each id; None for 1 each.
    """

    def __init__(
        self, keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
    ) -> None:
        self._keys, self._values, self._lengths, self._weights = list(keys), values, lengths, weights

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def values(self) -> torch.Tensor:
        """All ids."""
        return self._values

    def lengths(self) -> torch.Tensor:
        """Number of ids of each bag."""
        return self._lengths

    def weights_or_none(self) -> torch.Tensor | None:
        """The weight of each id, if they have any."""
        return self._weights


class KeyedTensor:
    """The bags of several features, side by side, as TorchRec's class of this name.

    Args:
        keys: names of the features.
        parts: for each feature the bags, (B, dim).
    """

    def __init__(self, keys: Sequence[str], parts: Sequence[torch.Tensor]) -> None:
        self._parts = dict(zip(keys, parts, strict=True))

    def keys(self) -> list[str]:
        """Names of the features."""
        return list(self._parts)

    def values(self) -> torch.Tensor:
        """All bags, (B, sum of dims)."""
        return torch.cat(list(self._parts.values()), dim=1)

    def length_per_key(self) -> list[int]:
        """The size of each feature's bags."""
        return [part.shape[1] for part in self._parts.values()]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """The bags by feature."""
        return dict(self._parts)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._parts[key]


class EmbeddingBagCollection(LookupModule):
    """Bags of several features with tables on servers, with the API of TorchRec's module of this name.

        tables = [EmbeddingBagConfig(name="users", embedding_dim=64, feature_names=["user"])]
        bags = pst.EmbeddingBagCollection(tables)(features)  # in strategy.scope(), the first time
        bags["user"]                                         # (B, 64)

    Create it in `strategy.scope()`, in the same way on every worker: it creates its tables. `features` is TorchRec's
    `KeyedJaggedTensor`, this package's, or any object with `keys()`, `values()` and `lengths()`.

    Args:
        tables: the configurations of the tables.
        is_weighted: True if ids have weights, by which rows are multiplied.

    Raises:
        ValueError: a name is repeated, the pooling or data type is not known, or a dynamic table has an `init_fn`.
    """

    def __init__(self, tables: Sequence[Any], is_weighted: bool = False) -> None:
        super().__init__()
        if len({config.name for config in tables}) < len(tables):
            raise InvalidArgument(
                "two tables of a collection have the same name; use one table for all its features, or another name"
            )
        self._configs = list(tables)
        self._modes = [_pooling(config) for config in tables]
        self._tables = [TableRows.of(_table(config)) for config in tables]
        for number, rows in enumerate(self._tables):
            self.register_parameter(f"gate_{number}", rows.gate)
        self._weighted = is_weighted
        features = [feature for config in tables for feature in config.feature_names]
        self._names = [
            [f"{f}@{config.name}" if features.count(f) > 1 else f for f in config.feature_names] for config in tables
        ]

    @property
    def rows(self) -> list[TableRows]:
        """The looked-up rows of its tables."""
        return self._tables

    def embedding_bag_configs(self) -> list[Any]:
        """The configurations of its tables."""
        return self._configs

    def prefetch(self, *features: Any) -> None:
        """Requests the rows of the features that are looked up next, together with the next round; see `Loader`."""
        for rows, ids in self._ids(features):
            rows.table.prefetch(*ids)

    def prefetch_hint(self, *features: Any) -> None:
        """Announces the features that are looked up after the next ones, so that servers read their rows from disk."""
        for rows, ids in self._ids(features):
            rows.table.prefetch_hint(*ids)

    def _ids(self, features: Sequence[Any]) -> Iterator[tuple[TableRows, list[Any]]]:
        """Yields each table with the ids that it looks up for some batches."""
        bags = [_Bags(each) for each in features]
        for config, rows in zip(self._configs, self._tables, strict=True):
            yield rows, [each.ids(config.feature_names).cpu().numpy() for each in bags]

    def forward(self, features: Any) -> KeyedTensor:
        """Returns the bags of each feature.

        Args:
            features: the ids.
        """
        bags = _Bags(features)
        parts = [part for number in range(len(self._tables)) for part in self._of_table(number, bags)]
        return KeyedTensor([name for names in self._names for name in names], parts)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def _of_table(self, number: int, bags: _Bags) -> list[torch.Tensor]:
        names = self._configs[number].feature_names
        rows, places = self._tables[number].look_up(bags.ids(names))
        own = places.split([len(bags.of(name).ids) for name in names])
        return [self._pooled(number, rows, of, bags.of(name)) for name, of in zip(names, own, strict=True)]

    def _pooled(self, number: int, rows: torch.Tensor, places: torch.Tensor, own: _Bag) -> torch.Tensor:
        weights = own.weights if self._weighted else None
        bags = functional.embedding_bag(
            places, rows, own.offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        if self._modes[number] == "mean":
            counts = own.offsets.diff().clamp(min=1).to(bags.dtype)
            bags = bags / counts[:, None]
        return bags


class _Bag(NamedTuple):
    """The bags of one feature.

    Attributes:
        ids: their ids, one bag behind another.
        offsets: where each bag begins, and where the last one ends.
        weights: of the ids.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


class _Bags:
    """Features by their names."""

    def __init__(self, features: Any) -> None:
        keys = list(features.keys())
        self._values, flat = features.values(), features.lengths().reshape(-1)
        weights = features.weights_or_none() if hasattr(features, "weights_or_none") else None
        _check_lengths(keys, self._values, flat, weights)
        lengths = flat.reshape(len(keys), -1)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.sum(dim=1).cpu().cumsum(0)]).tolist()
        self._of: dict[str, _Bag] = {}
        for number, key in enumerate(keys):
            own = slice(ends[number], ends[number + 1])
            offsets = functional.pad(lengths[number].cumsum(0), (1, 0))
            self._of[key] = _Bag(self._values[own], offsets, None if weights is None else weights[own])

    def of(self, name: str) -> _Bag:
        """Returns a feature; raises `KeyError` where the features lack it."""
        if name not in self._of:
            raise UnknownName(f"feature {name!r} is not among {', '.join(self._of)}")
        return self._of[name]

    def ids(self, names: Sequence[str]) -> torch.Tensor:
        """Returns the ids of some features, one behind another."""
        return torch.cat([self.of(name).ids for name in names]) if names else self._values[:0]


def _check_lengths(
    keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
) -> None:
    """Raises `ValueError` if the lengths of bags, or weights, are not those of the values."""
    count, whole = len(values), int(lengths.sum())
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


def _table(config: Any) -> Any:
    """Returns the table of a configuration, which is created unless it is there."""
    found = getattr(config, "table", None)
    if found is not None:
        return found
    word, init = _word(getattr(config, "data_type", "FP32")), getattr(config, "init_fn", None)
    dtype = DATA_TYPES.get(word)
    if dtype is None:
        raise InvalidArgument(f"table {config.name!r} has data_type {word}; use one of {', '.join(DATA_TYPES)}")
    if not config.num_embeddings:
        if init is not None:
            raise InvalidArgument(
                f"table {config.name!r} has an init_fn but no size, so its rows are created on the servers; "
                "pass table=... from ps.dynamic_embedding.get_variable, with one of ps.initializers"
            )
        return get_variable(config.name, config.embedding_dim, value_dtype=DTYPES[dtype])
    most = 1 / math.sqrt(config.num_embeddings)
    low = -most if config.weight_init_min is None else config.weight_init_min
    high = most if config.weight_init_max is None else config.weight_init_max
    shape = config.num_embeddings, config.embedding_dim

    def first() -> Array:
        values = torch.from_numpy(np.random.default_rng().uniform(low, high, shape)).to(dtype)
        if init is not None:
            made = init(values)
            values = values if made is None else made
        return on_host(values.to(dtype).contiguous())

    return Variable(first, name=config.name)
