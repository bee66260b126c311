"""Lookups of embeddings, by the names of `tf.nn`."""

from __future__ import annotations

import operator
from typing import Any, get_args

from psclient._src import context
from psclient._src.arrays.nest import Nest
from psclient._src.variables.lookup import LookedUpRows, RowReadable
from psclient._src.variables.sharded import CutVariable, whole_of
from psclient.nn.bags import Bags, Combiner
from psclient.nn.clipping import clip_rows
from psclient.nn.id_bags import GivenBags, IdBags
from psclient.nn.precision import check_floating


def embedding_lookup(
    params: Any, ids: Nest, max_norm: float | None = None, name: str | None = None, *, partition_strategy: str = "div"
) -> LookedUpRows:
    """Looks up rows of a variable by their ids. In replica and cross-replica context.

    Source: `tf.nn.embedding_lookup`, which returns `np.asarray` of this. Each row is fetched once; the result also
    computes the gradient of the variable, for clipped rows that through the clip.

    Args:
        params: a variable, (size, *row shape); also a list of one, or of all shards of one.
        ids: integers of any shape, of NumPy, CuPy or Python; may repeat.
        max_norm: clip rows to this L2 norm; None for no clipping.
        name: ignored.
        partition_strategy: "div", as variables are cut.

    Returns:
        The rows, with `values`, `inverse` and `gradient`.

    Raises:
        TypeError: `params` is not a variable, the ids are not integers, or `max_norm` is not a number.
        ValueError: an id is not a row of the variable; `max_norm` is not positive; another partition strategy.
        RuntimeError: called in an update function.
    """
    return clip_rows(_table(params, partition_strategy).lookup(ids), max_norm)


def embedding_lookup_sparse(
    params: Any,
    sp_ids: GivenBags,
    sp_weights: GivenBags | None,
    combiner: Combiner | None = None,
    max_norm: float | None = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
    *,
    partition_strategy: str = "div",
) -> Bags:
    """Looks up bags of rows: for each example the sum or mean of the rows of its ids.

    In replica and cross-replica context. Source: `tf.nn.embedding_lookup_sparse`, which returns `np.asarray` of this,
    but leaves out empty bags at the end, which are included here.

    Args:
        params: a variable of floats, (size, *row shape).
        sp_ids: the ids of each bag: a `ps.SparseTensor` whose rows are the bags, a list with a sequence of ids for each
            bag, or an array (B, m).
        sp_weights: the weight of each id, in the same form; None for 1 each.
        combiner: "sum" for the sum of the rows times their weights; "mean" (or None) to divide it by the sum of the
            weights; "sqrtn" to divide it by the root of the sum of their squares. If that is 0, the result is 0.
        max_norm: clip rows to this L2 norm first; None for no clipping.
        name: ignored.
        allow_fast_lookup: ignored.
        partition_strategy: "div", as variables are cut.

    Returns:
        The bags; zeros for an empty one.

    Raises:
        TypeError: `params` is not a variable of floats, ids are not integers, or weights not numbers.
        ValueError: an id is not a row of the variable, weights do not fit the ids, or another combiner.
        RuntimeError: called in an update function.
    """
    table, how = _table(params, partition_strategy), _checked("mean" if combiner is None else combiner)
    return _combined(table, IdBags.of(sp_ids, sp_weights), how, max_norm)


def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: GivenBags,
    sparse_weights: GivenBags | None = None,
    combiner: Combiner | None = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
    *,
    partition_strategy: str = "div",
) -> Bags:
    """Looks up bags of rows, as `embedding_lookup_sparse`, and ignores invalid ids.

    In replica and cross-replica context. Negative ids are ignored and, except with the combiner "sum", ids whose weight
    is not positive. A bag without ids is the row of `default_id`, or zeros.

    Source: `tf.nn.safe_embedding_lookup_sparse`.

    Args:
        embedding_weights: as `params` of `embedding_lookup_sparse`.
        sparse_ids: as `sp_ids` there.
        sparse_weights: as `sp_weights` there.
        combiner: as there.
        default_id: the id whose row an empty bag has; None for zeros.
        max_norm: as there.
        name: ignored.
        allow_fast_lookup: ignored.
        partition_strategy: as there.

    Returns:
        The bags.

    Raises:
        TypeError: as `embedding_lookup_sparse`; or `default_id` is not an integer.
        ValueError: as `embedding_lookup_sparse`.
        RuntimeError: as `embedding_lookup_sparse`.
    """
    table, how = _table(embedding_weights, partition_strategy), _checked("mean" if combiner is None else combiner)
    bags = IdBags.of(sparse_ids, sparse_weights)
    bags = bags.keep(bags.ids >= 0)
    if bags.weights is not None and how != "sum":
        bags = bags.keep(bags.weights > 0)
    return _combined(table, bags if default_id is None else bags.fill(operator.index(default_id)), how, max_norm)


def _combined(table: RowReadable, bags: IdBags, combiner: Combiner, max_norm: float | None) -> Bags:
    rows = table.lookup(bags.ids)
    check_floating(rows, "a bag of rows")
    return Bags.of(clip_rows(rows, max_norm), bags, combiner)


def _table(params: Any, partition_strategy: str) -> RowReadable:
    """Returns the variable whose rows are looked up."""
    if partition_strategy != "div":
        raise ValueError(
            f'partition_strategy is {partition_strategy!r}, but only "div" is supported, for whole and '
            "sharded variables"
        )
    tables = list(params) if isinstance(params, list | tuple) else [params]
    whole = whole_of(tables[0]) if tables else None
    if isinstance(whole, CutVariable) and tables[0] is not whole and len(tables) == len(whole.variables):
        if all(table is shard for table, shard in zip(tables, whole.variables, strict=True)):
            return whole
        raise ValueError(f"params are the shards of {whole.name!r} in another order; pass the variable itself")
    if len(tables) != 1:
        raise ValueError(
            f"params are {len(tables)} variables, but rows can be looked up in one only; pass one variable"
        )
    if isinstance(tables[0], RowReadable):
        return tables[0]
    if context.update_lift() is not None:
        raise RuntimeError(
            "embeddings were looked up in an update function, which works on whole arrays; look them up "
            "before, in the function passed to strategy.run"
        )
    raise TypeError(f"params must be a variable, not {type(tables[0]).__name__}; for an array use params[ids]")


def _checked(combiner: Any) -> Combiner:
    if combiner not in get_args(Combiner):
        raise ValueError(f"combiner is {combiner!r}; use one of {', '.join(map(repr, get_args(Combiner)))}")
    found: Combiner = combiner
    return found
