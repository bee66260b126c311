"""Rows of tables on servers, as tensors whose gradients go to the servers."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from psclient._src.arrays.conversions import on_host, to_torch
from psclient._src.arrays.devices import AnyArray, to_numpy
from psclient._src.interpreter.lifetimes import weakly
from psclient._src.variables.lookup import LookedUpRows, RowReadable
from psclient.torch.parameters import DTYPES, Gate
from pswire.errors import InvalidArgument, InvalidType
from pswire.model.tensor import Array


class Limit(NamedTuple):
    """A norm that rows of a table may not exceed, as of `torch.nn.Embedding`.

    Attributes:
        max_norm: the limit.
        norm_type: the p of the norm.
    """

    max_norm: float
    norm_type: float

    @classmethod
    def of(cls, max_norm: Any, norm_type: Any) -> Limit | None:
        """Checks arguments of torch; returns None for no limit."""
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) > 0
            ):
                raise InvalidArgument(f"{name} is {value!r}; use a positive number")
        return None if max_norm is None else cls(float(max_norm), float(norm_type))

    def apply(self, rows: torch.Tensor) -> None:
        """Shortens rows (n, dim) in place, as `torch.nn.functional.embedding` does."""
        norms = torch.linalg.vector_norm(rows, self.norm_type, dim=1, keepdim=True)
        rows.mul_(torch.where(norms > self.max_norm, self.max_norm / (norms + LIMIT_EPSILON), 1))


LIMIT_EPSILON = 1e-7
"""What torch adds to the norm of a row that it shortens."""


class TableRows:
    """The gradients of one table's rows since the last step, for all modules that have the table.

    Args:
        table: a variable of rows on servers: static, in shards, or dynamic; or one of a group of tables.

    Attributes:
        gate: stands for the rows among the parameters of modules, and for optimizers, which claim what they train.
        limit: the norm that rows may not exceed; None for any.
        watch: called with these rows when a gradient of some has come; true if somebody trains them.
    """

    _known: weakref.WeakValueDictionary[int, TableRows] = weakref.WeakValueDictionary()

    def __init__(self, table: RowReadable) -> None:
        self.table = table
        self.gate = Gate()
        self.limit: Limit | None = None
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

    def restrict(self, limit: Limit | None) -> None:
        """Sets the norm that rows may not exceed, for all modules of the table; None leaves it as it is.

        Raises:
            ValueError: another module has another limit, or rows cannot have one.
        """
        if limit is None:
            return
        name = self.table.name
        if len(self.table.shape) != 2 or self.table._stored_in is not self.table:
            raise InvalidArgument(
                f"max_norm needs a table of vectors with a variable of its own, but {name!r} is not; leave max_norm "
                "out, or create the table alone"
            )
        if self.limit not in (None, limit):
            raise InvalidArgument(f"modules of table {name!r} have different max_norm or norm_type; use one for all")
        self.limit = limit

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
        own = on_host(checked_ids(self.table, ids))
        self.table._tell_lookup(own)
        return self.look_up_on(ids.device, own)

    def look_up_on(self, device: torch.device, ids: Array) -> tuple[torch.Tensor, torch.Tensor]:
        """As `look_up`, with ids on the host and results on a device; no dataset is told."""
        found = self.table._look_up(ids)
        rows = to_torch(np.array(to_numpy(found.values))).to(device)
        if self.limit is not None:
            self.limit.apply(rows)
        if torch.is_grad_enabled() and self.gate.requires_grad:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(partial(weakly(self.arrived), found))
        return rows, torch.from_numpy(found.places).to(device)

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

    def gradients(self, factor: float) -> list[tuple[LookedUpRows, AnyArray]]:
        """Returns what was looked up and has a gradient, with that, times a factor; nothing if the factor is 0."""
        found = [(rows, leaf.grad) for rows, leaf in self._came.values() if leaf.grad is not None and factor]
        return [(rows, on_host(gradient if factor == 1 else gradient * factor)) for rows, gradient in found]

    def forget(self) -> None:
        """Forgets gradients: a step has taken them, or they are not wanted. What was looked ahead stays."""
        for _, leaf in self._came.values():
            leaf.grad = None
        self._came.clear()
        self.gate.grad = None


def checked_ids(table: RowReadable, ids: Any) -> torch.Tensor:
    """Returns ids of a table; raises `TypeError` unless they are a tensor."""
    if not isinstance(ids, torch.Tensor):
        raise InvalidType(f"ids of {table.name!r} are a {type(ids).__name__}; pass a tensor: torch.tensor(ids)")
    return ids
