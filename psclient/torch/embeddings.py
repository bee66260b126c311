"""Modules whose rows are on servers: `Embedding` and `EmbeddingBag`, with the faces of `torch.nn`'s."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional

from psclient._src.arrays.conversions import on_host, to_torch
from psclient._src.arrays.devices import to_numpy
from psclient._src.interpreter.lifetimes import weakly
from psclient._src.options import check_word
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.lookup import LookedUpRows, RowReadable, gradient_of_all
from psclient.torch.parameters import DTYPES, Gate
from pswire.errors import InvalidArgument, InvalidType


class TableRows:
    """The gradients of one table's rows since the last step, for all modules that have the table.

    Args:
        table: a variable of rows on servers: static, in shards, or dynamic; or one of a group of tables.

    Attributes:
        gate: stands for the rows among the parameters of modules, and for optimizers, which claim what they train.
        watch: called with these rows when a gradient of some has come; true if somebody trains them.
    """

    _known: weakref.WeakValueDictionary[int, TableRows] = weakref.WeakValueDictionary()

    def __init__(self, table: RowReadable) -> None:
        self.table = table
        self.gate = Gate()
        self._cleared = 0  # torch's count of changes of the gate's gradient, when a backward came last
        self.watch: Callable[[TableRows], Any] = lambda rows: False
        self._came: dict[int, tuple[LookedUpRows, torch.Tensor]] = {}  # leaves with gradients, by their ids

    @classmethod
    def of(cls, table: Any) -> TableRows:
        """Returns those of a table.

        Raises:
            TypeError: it is no variable of rows of numbers that can be trained.
        """
        if not isinstance(table, RowReadable) or not table.shape:
            raise InvalidType(
                f"rows of a {type(table).__name__} cannot be looked up; pass a ps.Variable, or a table from "
                "ps.dynamic_embedding.get_variable, created in strategy.scope()"
            )
        if np.dtype(table.dtype) not in [np.dtype(each) for each in DTYPES.values()]:
            raise InvalidType(f"table {table.name!r} is of {table.dtype}; only floating dtypes can be trained")
        found = cls._known.get(id(table))
        if found is None:
            found = cls._known[id(table)] = cls(table)
        return found

    def look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Looks rows up; if gradients are recorded they are a leaf whose gradient goes to the servers.

        Args:
            ids: integers of any shape.

        Returns:
            The rows, each once, (U, *row shape), on the device of the ids; and the place of each id among them.

        Raises:
            TypeError: the ids are no tensor, or no integers.
            ValueError: an id is no row of the table.
        """
        if not isinstance(ids, torch.Tensor):
            raise InvalidType(
                f"ids of {self.table.name!r} are a {type(ids).__name__}; pass a tensor: torch.tensor(ids)"
            )
        found = self.table.lookup(on_host(ids))
        rows = to_torch(np.array(to_numpy(found.values))).to(ids.device)
        if torch.is_grad_enabled() and self.gate.requires_grad:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(partial(weakly(self.arrived), found))
        return rows, torch.from_numpy(found.places).to(ids.device)

    def arrived(self, found: LookedUpRows, leaf: torch.Tensor) -> None:
        """A gradient was added to that of rows; kept as long as the step is to come, if somebody trains them."""
        if self.watch(self):
            self._came[id(leaf)] = found, leaf

    def begin_backward(self) -> None:
        """A backward comes to its rows: gradients of the one before are forgotten where they were cleared since."""
        if self.gate.grad is None or self.gate.grad._version != self._cleared:
            self.forget()
            self.gate.grad = torch.zeros_like(self.gate)
            self._cleared = self.gate.grad._version

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What was looked up and has a gradient."""
        return [leaf for _, leaf in self._came.values() if leaf.grad is not None]

    def take_gradient(self, factor: float) -> IndexedSlices | None:
        """Returns the gradient of what was looked up, times a factor; None where there is none, or the factor is 0."""
        found = [(rows, leaf.grad) for rows, leaf in self._came.values() if leaf.grad is not None and factor]
        if not found:
            return None
        grads = [gradient if factor == 1 else gradient * factor for _, gradient in found]
        return gradient_of_all([rows for rows, _ in found], [on_host(each) for each in grads])

    def forget(self) -> None:
        """Forgets gradients: a step has taken them, or they are not wanted. What was looked ahead stays."""
        for _, leaf in self._came.values():
            leaf.grad = None
        self._came.clear()
        self.gate.grad = None


class LookupModule(torch.nn.Module):
    """Base of modules whose rows are on servers."""

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


class OfOneTable(LookupModule):
    """Base of modules of one table.

    Args:
        table: a variable on servers with a row for each id, such as one of `ps.dynamic_embedding.get_variable`, or a
            sharded one.
        padding_idx: an id whose row has no gradient; None for none.

    Attributes:
        table: the table.

    Raises:
        TypeError: `table` is not such a table.
    """

    def __init__(self, table: Any = None, *sizes: Any, padding_idx: int | None = None, **others: Any) -> None:
        super().__init__()
        if sizes or others or table is None or isinstance(table, int):
            raise InvalidType(
                f"{type(self).__name__} takes a table instead of sizes and "
                f"{', '.join(others) or 'options'}; pass a ps.Variable of shape (num_embeddings, "
                "embedding_dim), or a table from ps.dynamic_embedding.get_variable, created in "
                "strategy.scope()"
            )
        self._rows = TableRows.of(table)
        self.gate = self._rows.gate
        self.padding_idx = padding_idx

    @property
    def table(self) -> Any:
        """The table."""
        return self._rows.table

    @property
    def rows(self) -> list[TableRows]:
        """The looked-up rows of its table."""
        return [self._rows]

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A module of the same table: there is one on the servers."""
        made = type(self).__new__(type(self))
        torch.nn.Module.__init__(made)
        made.gate = self._rows.gate
        made.__dict__.update({name: value for name, value in vars(self).items() if name not in vars(made)})
        made.train(self.training)
        memo[id(self)] = made
        return made

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


class Embedding(OfOneTable):
    """Looks up rows of a table by their ids, with the API of `torch.nn.Embedding`.

    The optimizer of the module that contains it trains the rows. Rows that a `Loader` has prefetched are present; all
    others are fetched from the servers. Any 64-bit number is an id of a dynamic table.

    Args:
        table: a variable on servers with a row for each id, such as one of `ps.dynamic_embedding.get_variable`, or a
            sharded one.
        padding_idx: an id whose row has no gradient; None for none.

    Raises:
        TypeError: `table` is not such a table.

    Examples:
        >>> import torch
        >>> import psclient as ps
        >>> import psclient.torch as pst
        >>> strategy = ps.ParameterServerStrategy()
        >>> with strategy.scope():
        ...     users = pst.Embedding(ps.dynamic_embedding.get_variable("users", dim=64))
        >>> users(torch.tensor([[3, 5], [5, 9]])).shape
        torch.Size([2, 2, 64])
        >>> strategy.close()
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the row of each id: the shape of the ids, then that of a row.

        Args:
            input: integers of any shape.
        """
        rows, places, padding = self._look_up(input)
        if rows.ndim != 2:
            return rows[places]
        return functional.embedding(places, rows, padding)


class EmbeddingBag(OfOneTable):
    """Computes sums, means or maxima of bags of rows, with the API of `torch.nn.EmbeddingBag`.

    Args:
        table: as in `Embedding`.
        padding_idx: as in `Embedding`.
        mode: "sum", "mean" or "max".
        include_last_offset: True if the offsets include the end of the last bag.

    Raises:
        ValueError: rows are not vectors, or another mode.
        TypeError: as `Embedding`.
    """

    def __init__(
        self,
        table: Any = None,
        *sizes: Any,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__(table, *sizes, padding_idx=padding_idx, **others)
        check_word("mode", mode, Literal["sum", "mean", "max"])
        if len(self.table.shape) != 2:
            raise InvalidArgument(f"bags need rows that are vectors, but rows of {self.table.name!r} are not")
        self.mode, self.include_last_offset = mode, include_last_offset

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
            per_sample_weights: the weight of each id; only for "sum".
        """
        rows, places, padding = self._look_up(input)
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def lookups_of(module: torch.nn.Module) -> Mapping[int, LookupModule]:
    """Returns the modules within a module whose rows are on servers, by their `id`."""
    return {id(each): each for each in module.modules() if isinstance(each, LookupModule)}
