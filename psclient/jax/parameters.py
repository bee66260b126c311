"""The parameters of a pytree as variables, with the optimizer that makes their steps on the servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax

from psclient._src import context
from psclient._src.distribute.strategy import Strategy
from psclient._src.options import check_word
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.variable import Variable
from psclient.jax.arrays import all_to_jax, scaled, to_host
from psclient.jax.optimizers import check_transformation
from psclient.jax.rows import JoinedRows
from psclient.jax.trees import Tree, check_alike, first_value, is_traced, leaves_of, nested
from psclient.optimizers import Optimizer
from pswire.errors import InvalidArgument, InvalidCall, InvalidType
from pswire.model.tensor import Array

Reduction = Literal["mean", "sum"]
"""What the gradients of all workers are combined to."""


@dataclass(frozen=True)
class Values:
    """The values of all parameters after one step.

    Attributes:
        step: number of steps that were applied.
        hosts: the arrays that were read, by which it is known whether they are still those of now.
        params: the pytree of JAX's arrays.
    """

    step: int
    hosts: tuple[Array, ...]
    params: Tree


class Parameters:
    """Variables for the leaves of a pytree, and their optimizer. Used by one thread at a time.

    Args:
        strategy: where the variables live.
        tx: the optimizer.
        params: the pytree.
        tables: tables whose rows are trained as well.
        name: the first part of the variables' names.
        reduction: "mean" or "sum".

    Attributes:
        strategy, tx, tables, reduction: the constructor's arguments.
        version: how many steps and assignments this process has made.
    """

    def __init__(
        self, strategy: Strategy, tx: Optimizer, params: Tree, tables: Sequence[Any], name: str, reduction: Reduction
    ) -> None:
        check_word("reduction", reduction, Reduction)
        if tx.variables:
            raise InvalidArgument(
                f"tx is the {type(tx).__name__} {tx.name!r} of another TrainState, or has already made "
                "steps, which it counts; create one optimizer for each state"
            )
        self.strategy, self.tx, self.tables, self.reduction = strategy, tx, tuple(tables), reduction
        self.version = 0
        self._name = name
        self._leaves, self._structure = leaves_of(params, name)
        values = [first_value(leaf) for leaf in self._leaves]
        with strategy.scope():
            self._variables = [
                Variable(value, name=leaf.name) for leaf, value in zip(self._leaves, values, strict=True)
            ]
            self._exclude(params)
            if self._variables or self.tables:
                tx.build([*self._variables, *self.tables])
        self._leaves = [leaf.without_value() for leaf in self._leaves]

    def _exclude(self, params: Tree) -> None:
        """Leaves variables out of weight decay, as the optimizer's mask says."""
        mask = getattr(self.tx, "mask", None)
        if mask is not None:
            decays = self._alike(mask(params) if callable(mask) else mask, "the leaves of mask")
            self.tx.exclude_from_weight_decay([v for v, own in zip(self._variables, decays, strict=True) if not own])

    def _alike(self, tree: Tree, what: str) -> list[Any]:
        return check_alike(tree, (leaf.name for leaf in self._leaves), self._structure, self._name, what)

    @cached_property
    def variables(self) -> Any:
        """The variables, in dicts by the keys of the pytree: what a checkpoint saves."""
        return nested((leaf.path, v) for leaf, v in zip(self._leaves, self._variables, strict=True))

    # ---- Reading ----

    def read(self) -> Values:
        """Returns the values of now: of synchronous workers those after the last round, of others with the own one."""
        step, hosts = self._in_replica()
        params = jax.tree_util.tree_unflatten(self._structure, all_to_jax(hosts))
        return Values(step, tuple(hosts), params)

    def _in_replica(self) -> tuple[int, list[Array]]:
        if not context.crosses_replicas() and context.has_strategy():
            return self._fetch()
        # As a step of its own: asynchronous workers read anew what their last round has not brought.
        return self.strategy.run(self._fetch)

    def _fetch(self) -> tuple[int, list[Array]]:
        hosts = [v.numpy() for v in self._variables]
        return int(self.tx.iterations) if self.tx.variables else 0, hosts

    def are_of_now(self, values: Values) -> bool:
        """Returns whether nothing has changed the variables since; of asynchronous workers, where others do, True."""
        if self.strategy.backend.group.alone:
            return True
        return all(v.numpy() is host for v, host in zip(self._variables, values.hosts, strict=True))

    # ---- Writing ----

    def apply(self, grads: Tree, rows: Mapping[JoinedRows, Any]) -> None:
        """Makes a step on the servers, in one round with those of all other workers.

        Raises:
            TypeError: a gradient is traced; a key of `rows` is no result of `lookup`.
            ValueError: the gradients have another structure, or a shape that is not their parameter's; a table was
                looked up twice.
        """
        leaves = self._alike(grads, "the gradients")
        if any(map(is_traced, leaves)):
            raise InvalidType(
                "apply_gradients was called on traced gradients, in jax.jit, grad or scan, but it sends "
                "gradients to servers; compile only the function that computes the gradients, and call "
                "apply_gradients outside"
            )
        share = 1.0 if self.reduction == "sum" else float(self.strategy.backend.group.weight)
        if share != 1.0 and leaves:
            leaves = scaled(leaves, share)
        pairs: list[tuple[Any, Any]] = list(zip(to_host(leaves), self._variables, strict=True))
        self.tx.apply_gradients(pairs + self._of_tables(rows, share))
        self.version += 1

    def _of_tables(self, rows: Mapping[JoinedRows, Any], share: float) -> list[tuple[IndexedSlices, Any]]:
        found: dict[int, tuple[IndexedSlices, Any]] = {}
        for one, d in rows.items():
            if not isinstance(one, JoinedRows):
                raise InvalidType(
                    f"a key of rows is a {type(one).__name__}; use rows={{rows: d}}, with the result of psj.lookup"
                )
            if id(one.table) in found:
                raise InvalidArgument(
                    f"{one.table.name!r} was looked up twice for this step; look up all ids in one call "
                    "(rows.inverse has the shape of the ids)"
                )
            found[id(one.table)] = one.gradient(d, share), one.table
        return list(found.values())

    def assign(self, params: Tree) -> None:
        """Gives all variables other values, which every process has alike."""
        values = to_host(self._alike(params, "the parameters"))
        with self.strategy.scope():
            for v, value in zip(self._variables, values, strict=True):
                v.assign(value)
        self.version += 1

    def __repr__(self) -> str:
        count = sum(v.size for v in self._variables)
        return f"{len(self._variables)} parameters of {count} numbers, {type(self.tx).__name__}"


def strategy_of(given: Strategy | None) -> Strategy:
    """Returns a strategy in which JAX's parameters may live: the given one, or that of the scope.

    Raises:
        RuntimeError: there is none.
        ValueError: it has several replicas in this process.
    """
    if given is None and not context.has_strategy():
        raise InvalidCall("no strategy is active; pass strategy=ps.ParameterServerStrategy(), or enter its scope")
    strategy: Any = context.get_strategy() if given is None else given
    count = len(strategy.extended.worker_devices)
    if count > 1:
        raise InvalidArgument(
            f"the strategy has {count} replicas in this process, but JAX uses all local devices as one; use "
            "one replica, such as devices=['cpu:0'], and shard arrays over JAX's devices"
        )
    return strategy  # type: ignore[no-any-return]


def check_optimizer(tx: Any) -> Optimizer:
    """Returns an optimizer that servers can run; raises `TypeError` for all else."""
    if isinstance(tx, Optimizer):
        return tx
    check_transformation(tx)
    raise InvalidType(
        f"tx is a {type(tx).__name__}; use one of psj.optimizers or ps.optimizers, such as psj.optimizers.sgd(0.1)"
    )
