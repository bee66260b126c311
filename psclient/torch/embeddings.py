"""Modules whose rows are on servers: `Embedding` and `EmbeddingBag`, with the faces of `torch.nn`'s."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from torch.nn import functional

from psclient._src.arrays.conversions import on_host
from psclient._src.arrays.devices import to_numpy
from psclient._src.options import check_word
from psclient._src.variables.tables import RowsByKeys
from psclient._src.variables.variable import Variable
from psclient.torch.rows import Limit, TableRows
from pswire.errors import InvalidArgument, InvalidType
from pswire.model.tensor import Array


class LookupModule(torch.nn.Module):
    """Base of modules whose rows are on servers."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A module of the same tables: there is one of each on the servers."""
        made = type(self).__new__(type(self))
        torch.nn.Module.__init__(made)
        made._parameters.update(self._parameters)
        made.__dict__.update({name: value for name, value in vars(self).items() if name not in vars(made)})
        made.train(self.training)
        memo[id(self)] = made
        return made

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Its rows are saved by `ps.train.Checkpoint`; the gates that stand for them have nothing."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """As of `_save_to_state_dict`."""

    @property
    def rows(self) -> list[TableRows]:
        """The looked-up rows of each of its tables."""
        raise NotImplementedError

    def prefetch(self, *features: Any) -> None:
        """Requests the rows of the next call of `forward`, together with the next round; see `Loader`."""
        raise NotImplementedError

    @property
    def _takes_hints(self) -> bool:
        """True if `prefetch_hint` is of use: rows of its tables lie in files on servers."""
        return any(rows.table._takes_hints for rows in self.rows)

    def prefetch_hint(self, *features: Any) -> None:
        """Announces the call of `forward` after the next one, so that servers read its rows from disk."""
        raise NotImplementedError


REFUSED = {
    "_weight": "use from_pretrained(weight)",
    "_freeze": "use from_pretrained(weight, freeze=...)",
    "device": "rows come to the device of the ids; leave it out",
}
"""Arguments of torch's constructors that have no meaning here, each with the remedy."""


class OfOneTable(LookupModule):
    """Base of modules of one table, with the arguments that they share.

    Args:
        given: a table, or the number of rows of a new one.
        embedding_dim: size of a row of a new table.
        padding_idx: an id whose row has no gradient, and is zero in a new table; None for none.
        max_norm: rows that are longer become as long when they are looked up; None for rows of any norm.
        norm_type: the p of that norm.
        scale_grad_by_freq: True to divide the gradient of a row by the number of its ids in this worker's batch.
        sparse: ignored: gradients always are of rows.
        dtype: of a new table; None for torch's default.
        table: a table, as `given`.
        name: name of the variable of a new table.
        options: arguments of torch that are refused.
    """

    def __init__(
        self,
        given: Any,
        embedding_dim: int | None,
        *,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        dtype: torch.dtype | None,
        table: Any,
        name: str | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._check_arguments(given, embedding_dim, dtype, table, name, options)
        limit = Limit.of(max_norm, norm_type)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        if isinstance(given, numbers.Integral):
            size, dim = int(given), int(embedding_dim or 0)
            padding = padding_place(padding_idx, size)
            table = Variable(partial(_normal, size, dim, dtype, padding), name=name or type(self).__name__.lower())
        self._rows = TableRows.of(given if table is None else table)
        self._rows.restrict(limit)
        self.gate = self._rows.gate
        self.padding_idx = padding_place(padding_idx, self.num_embeddings) if self._has_size else padding_idx

    def _check_arguments(
        self, given: Any, dim: Any, dtype: Any, table: Any, name: str | None, options: Mapping[str, Any]
    ) -> None:
        kind = type(self).__name__
        for option, value in options.items():
            if value is not None or option not in REFUSED:
                raise InvalidType(f"{kind} does not support {option}=...: {REFUSED.get(option, 'remove it')}")
        sized = isinstance(given, numbers.Integral)
        if sized and (isinstance(given, bool) or not isinstance(dim, numbers.Integral) or given < 1 or dim < 1):
            raise InvalidArgument(f"{kind}({given!r}, {dim!r}): num_embeddings and embedding_dim must be at least 1")
        others = [
            what for what, value in (("embedding_dim", dim), ("dtype", dtype), ("name", name)) if value is not None
        ]
        if (given is None) == (table is None) or (others and not sized):
            raise InvalidType(
                f"{kind} takes either num_embeddings and embedding_dim, or a table "
                f"alone{', without ' + ' and '.join(others) if others else ''}: a ps.Variable (num_embeddings, "
                "embedding_dim), or one from ps.dynamic_embedding.get_variable, created in strategy.scope()"
            )

    @classmethod
    def _of_values(cls, embeddings: torch.Tensor, freeze: bool, name: str | None, **options: Any) -> Self:
        if not isinstance(embeddings, torch.Tensor) or embeddings.dim() != 2:
            raise InvalidArgument("embeddings must be a tensor of two dimensions, (num_embeddings, embedding_dim)")
        values = on_host(embeddings.detach().clone(memory_format=torch.contiguous_format))
        made = cls(table=Variable(values, name=name or cls.__name__.lower()), **options)
        made.gate.requires_grad_(not freeze)
        return made

    @property
    def table(self) -> Any:
        """The table."""
        return self._rows.table

    @property
    def rows(self) -> list[TableRows]:
        """The looked-up rows of its table."""
        return [self._rows]

    @property
    def num_embeddings(self) -> int:
        """The number of rows; of a dynamic table those of now."""
        found: int = self.table.shape[0] if self._has_size else self.table.size()
        return found

    @property
    def _has_size(self) -> bool:
        return not isinstance(self.table, RowsByKeys)

    @property
    def embedding_dim(self) -> int:
        """The size of a row."""
        return int(np.prod(self.table.shape[1:]))

    def prefetch(self, *features: Any) -> None:
        """Requests the rows of the ids that are looked up next, together with the next round; see `Loader`."""
        self.table.prefetch(*[to_numpy(each) for each in features])

    def prefetch_hint(self, *features: Any) -> None:
        """Announces the ids that are looked up after the next ones, so that servers read their rows from disk."""
        self.table.prefetch_hint(*[to_numpy(each) for each in features])

    def extra_repr(self) -> str:
        """The table, in words."""
        return repr(self.table)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def _look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Returns rows, places, and the place of the row for padding, if there is one."""
        rows, places = self._rows.look_up(ids)
        if self.padding_idx is None:
            return rows, places, None
        padding = places[ids == self.padding_idx]
        return rows, places, int(padding[0]) if len(padding) else None


def padding_place(padding_idx: int | None, size: int) -> int | None:
    """Returns the row for padding, as torch counts it: a negative one from the end."""
    if padding_idx is None:
        return None
    if not -size <= padding_idx < size:
        raise InvalidArgument(f"padding_idx is {padding_idx}, which is not a row of {size}")
    return padding_idx % size


def _normal(size: int, dim: int, dtype: torch.dtype | None, padding: int | None) -> Array:
    """Returns the first values of torch's modules."""
    values = torch.nn.init.normal_(torch.empty(size, dim, dtype=dtype))
    if padding is not None:
        values[padding] = 0
    return on_host(values)


class Embedding(OfOneTable):
    """Looks up rows of a table by their ids, with the API of `torch.nn.Embedding`.

    The optimizer of the module that contains it trains the rows. Rows that a `Loader` has prefetched are present; all
    others are fetched from the servers. Any 64-bit number is an id of a dynamic table.

    `Embedding(num_embeddings, embedding_dim)` creates a table of the current strategy, with torch's first values, in
    the same way on every worker. `Embedding(table)` uses an existing one.

    Args:
        num_embeddings: the number of rows; or a table: a variable on servers with a row for each id, such as one of
            `ps.dynamic_embedding.get_variable`, or a sharded one.
        embedding_dim: the size of a row.
        padding_idx: an id whose row has no gradient, and is zero in a new table; None for none.
        max_norm: a longer row becomes as long as this when it is looked up; None for no limit. On the servers it is
            shortened by the step that trains it.
        norm_type: the p of the norm.
        scale_grad_by_freq: True to divide a row's gradient by the number of its ids in this worker's batch.
        sparse: ignored, because gradients always are of rows.
        dtype: dtype of a new table; None for torch's default.
        table: the table, instead of a number of rows.
        name: name of a new table's variable.
        options: other arguments of torch, which raise an error.

    Raises:
        TypeError: neither sizes nor a table are given, or an argument of torch that is not supported.
        ValueError: a size, a norm or `padding_idx` is out of range.

    Examples:
        >>> import torch
        >>> import psclient as ps
        >>> import psclient.torch as pst
        >>> strategy = ps.ParameterServerStrategy()
        >>> with strategy.scope():
        ...     users = pst.Embedding(ps.dynamic_embedding.get_variable("users", dim=64))
        ...     items = pst.Embedding(1000, 64)
        >>> users(torch.tensor([[3, 5], [5, 9]])).shape
        torch.Size([2, 2, 64])
        >>> strategy.close()
    """

    def __init__(
        self,
        num_embeddings: Any = None,
        embedding_dim: int | None = None,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        dtype: torch.dtype | None = None,
        table: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            dtype=dtype,
            table=table,
            name=name,
            options=options,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        name: str | None = None,
    ) -> Self:
        """Creates a module with a new table of given values, as `torch.nn.Embedding.from_pretrained`.

        Args:
            embeddings: the values, (num_embeddings, embedding_dim).
            freeze: True if the rows are not trained, until `requires_grad_()` is called.
            padding_idx: as in the constructor; its row keeps its value.
            max_norm: as in the constructor.
            norm_type: as in the constructor.
            scale_grad_by_freq: as in the constructor.
            sparse: as in the constructor.
            name: as in the constructor.

        Returns:
            The module.
        """
        return cls._of_values(
            embeddings,
            freeze,
            name,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the row of each id: the shape of the ids, then that of a row.

        Args:
            input: integers of any shape.
        """
        rows, places, padding = self._look_up(input)
        if rows.ndim != 2:
            return rows[places]
        return functional.embedding(places, rows, padding, scale_grad_by_freq=self.scale_grad_by_freq)


PoolingMode = Literal["sum", "mean", "max", "sqrtn"]


class EmbeddingBag(OfOneTable):
    """Computes sums, means or maxima of bags of rows, with the API of `torch.nn.EmbeddingBag`.

    `EmbeddingBag(num_embeddings, embedding_dim)` creates a table of the current strategy, `EmbeddingBag(table)` uses
    an existing one.

    Args:
        num_embeddings: as in `Embedding`.
        embedding_dim: as in `Embedding`.
        max_norm: as in `Embedding`.
        norm_type: as in `Embedding`.
        scale_grad_by_freq: as in `Embedding`; not for "max".
        mode: "sum", "mean" or "max"; or "sqrtn", the sum divided by the root of the number of ids, or with weights by
            that of the sum of their squares, as in `ps.nn.embedding_lookup_sparse`.
        sparse: as in `Embedding`.
        include_last_offset: True if the offsets include the end of the last bag.
        padding_idx: as in `Embedding`; its row takes no part in bags.
        dtype: as in `Embedding`.
        table: as in `Embedding`.
        name: as in `Embedding`.
        options: as in `Embedding`.

    Raises:
        ValueError: rows are not vectors, another mode, or `scale_grad_by_freq` with "max"; as `Embedding`.
        TypeError: as `Embedding`.
    """

    def __init__(
        self,
        num_embeddings: Any = None,
        embedding_dim: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: PoolingMode = "mean",
        sparse: bool = False,
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        table: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        check_word("mode", mode, PoolingMode)
        if mode == "max" and scale_grad_by_freq:
            raise InvalidArgument('scale_grad_by_freq is not supported for mode="max"')
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            dtype=dtype,
            table=table,
            name=name,
            options=options,
        )
        if len(self.table.shape) != 2:
            raise InvalidArgument(f"bags need rows that are vectors, but rows of {self.table.name!r} are not")
        self.mode, self.include_last_offset = mode, include_last_offset

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: PoolingMode = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        name: str | None = None,
    ) -> Self:
        """Creates a module with a new table of given values, as `torch.nn.EmbeddingBag.from_pretrained`.

        Args:
            embeddings: the values, (num_embeddings, embedding_dim).
            freeze: True if the rows are not trained, until `requires_grad_()` is called.
            max_norm: as in the constructor.
            norm_type: as in the constructor.
            scale_grad_by_freq: as in the constructor.
            mode: as in the constructor.
            sparse: as in the constructor.
            include_last_offset: as in the constructor.
            padding_idx: as in the constructor; its row keeps its value.
            name: as in the constructor.

        Returns:
            The module.
        """
        return cls._of_values(
            embeddings,
            freeze,
            name,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            sparse=sparse,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the bags, (B, dim).

        Args:
            input: integers, (B, n) for bags of n, or (N,) with offsets.
            offsets: the index in `input` at which each bag begins.
            per_sample_weights: the weight of each id; only for "sum" and "sqrtn".
        """
        rows, places, padding = self._look_up(input)
        pooled = partial(
            functional.embedding_bag,
            places,
            offsets=offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode="sum" if self.mode == "sqrtn" else self.mode,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
        bags = pooled(rows, per_sample_weights=per_sample_weights)
        if self.mode != "sqrtn":
            return bags
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        squares = pooled(ones, per_sample_weights=None if per_sample_weights is None else per_sample_weights.square())
        return bags / torch.where(squares == 0, 1, squares).sqrt()


def lookups_of(module: torch.nn.Module) -> Mapping[int, LookupModule]:
    """Returns the modules within a module whose rows are on servers, by their `id`."""
    return {id(each): each for each in module.modules() if isinstance(each, LookupModule)}
