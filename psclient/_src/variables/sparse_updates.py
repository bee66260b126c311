"""What an update with the gradient of some rows is to all other rows: `ps.lazy_update`, `ps.exact_update`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

Sparse = Literal["exact", "lazy", "dense"]
"""Exact: as for the whole gradient, made up when a row is touched or read. Lazy: nothing. Dense: as for the whole
gradient, which is made.
"""

CatchUp = Literal["replay", "closed_form"]
"""How exact updates are made up. Replay: one by one, with the same bits. Closed form: many as one, where their function
has a closed form, within a few millionths.
"""


def check_catch_up(catch_up: object) -> CatchUp:
    """Returns one of the two words; raises `ValueError` for anything else."""
    for word in get_args(CatchUp):
        if catch_up == word:
            found: CatchUp = word
            return found
    raise ValueError(f"catch_up is {catch_up!r}; use 'replay' or 'closed_form'")


def check_sparse(sparse: object) -> Sparse:
    """Returns one of the three words; raises `ValueError` for anything else."""
    for word in get_args(Sparse):
        if sparse == word:
            found: Sparse = word
            return found
    raise ValueError(f"sparse is {sparse!r}; use 'exact', 'lazy' or 'dense'")


class SparseUpdate:
    """An update function, and what it is to rows that are not given.

    Args:
        fn: the function, for `strategy.extended.update`.
        sparse: as above.
        needs_rows: True if it is an error where the update is given no rows.
        optional: True if it is left out where no process contributes to the gradient.
        catch_up: how what it is to other rows is made up, if it is exact.
        of_optimizer: True if it is an optimizer's step, and no function of the script.
        as_lazy: True if it stands for a lazy update, and is refused where that would be.
    """

    def __init__(
        self,
        fn: Callable[..., object],
        sparse: Sparse,
        needs_rows: bool = False,
        optional: bool = False,
        catch_up: CatchUp = "replay",
        of_optimizer: bool = False,
        as_lazy: bool = False,
    ) -> None:
        self.fn = fn
        self.sparse = sparse
        self.needs_rows = needs_rows
        self.optional = optional
        self.catch_up = catch_up
        self.of_optimizer = of_optimizer
        self.as_lazy = as_lazy
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Calls the function."""
        return self.fn(*args, **kwargs)


def lazy_update(fn: Callable[..., object]) -> SparseUpdate:
    """Makes an update function be for the rows of its `IndexedSlices` alone: all other rows stay as they are.

    Without it an update means what it means for the whole gradient, which is zero where no row is given: momentum goes
    on there, weight decay as well. Where that is the same, as for SGD, rows alone are computed anyhow.

    The function assigns variables of one shape, by elementwise operations on them, on rows of one gradient, and on
    numbers.

        strategy.extended.update(table, ps.lazy_update(fn), args=(gradient, momentum))

    Args:
        fn: for `strategy.extended.update`, also one that `update_function` has made.
    """
    return _sparse(fn, "lazy", "lazy_update")


def exact_update(fn: Callable[..., object], catch_up: CatchUp = "replay") -> SparseUpdate:
    """Makes servers put an update off in rows that its `IndexedSlices` do not have, until somebody needs them.

    The update means what it means without `exact_update`, and every value that anybody reads has the same bits: a row
    that has missed updates has them made up when it is touched, read or saved. So a round costs what its rows cost, and
    what they have missed.

    The function is as for `lazy_update`, and assigns each table that it reads. Where it is another, and with copies of
    the variables in the processes, the whole gradient is made.

    Args:
        fn: for `strategy.extended.update`, also one that `update_function` has made.
        catch_up: "closed_form" to have many updates made up as one where the function has a closed form: it multiplies
            each table by numbers, and adds to one of them a multiple of another one, which it may divide by a root.
            Then values are right within a few millionths, and what a row has missed costs the same, however much it is.

    Raises:
        TypeError: it is no function.
        ValueError: `catch_up` is another word.
    """
    return _sparse(fn, "exact", "exact_update", check_catch_up(catch_up))


def _sparse(fn: Callable[..., object], sparse: Sparse, name: str, catch_up: CatchUp = "replay") -> SparseUpdate:
    if not callable(fn):
        raise TypeError(f"{name} takes an update function, not a {type(fn).__name__}")
    return SparseUpdate(fn, sparse, needs_rows=sparse == "lazy", catch_up=catch_up)
