"""What an update with the gradient of some rows is to all other rows: `ps.lazy_update`, `ps.exact_update`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from psclient._src.options import check_word

Sparse = Literal["exact", "lazy", "dense"]
"""Exact: as for the whole gradient, made up when a row is touched or read. Lazy: nothing. Dense: as for the whole
gradient, which is made.
"""

CatchUp = Literal["replay", "closed_form"]
"""How exact updates are made up. Replay: one by one, with the same bits. Closed form: many as one, where their function
has a closed form, within a few millionths.
"""


@dataclass(eq=False)
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

    fn: Callable[..., object]
    sparse: Sparse
    needs_rows: bool = False
    optional: bool = False
    catch_up: CatchUp = "replay"
    of_optimizer: bool = False
    as_lazy: bool = False

    def __post_init__(self) -> None:
        self.__name__ = getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.fn(*args, **kwargs)


def lazy_update(fn: Callable[..., object]) -> SparseUpdate:
    """Makes an update function update only the rows of its `IndexedSlices`: all other rows keep their values.

    Without it an update computes the result for the dense gradient, whose other rows are zero: momentum and weight
    decay continue there. Where the result is the same, as for SGD, only the given rows are computed anyway.

    The function may assign variables of one shape, by elementwise operations on them, on rows of one gradient, and on
    numbers.

        strategy.extended.update(table, ps.lazy_update(fn), args=(gradient, momentum))

    Args:
        fn: an update function for `strategy.extended.update`, also one decorated with `update_function`.
    """
    return _sparse(fn, "lazy", "lazy_update")


def exact_update(fn: Callable[..., object], catch_up: CatchUp = "replay") -> SparseUpdate:
    """Makes servers defer an update of rows that its `IndexedSlices` do not contain until these rows are needed.

    The result is that of the update without `exact_update`, with the same bits in every value that is read: a row's
    missed updates are applied when the row is updated, read or saved. A round then costs what its rows and their missed
    updates cost.

    The function follows the rules of `lazy_update`, and assigns each table that it reads. For other functions, and with
    copies of the variables in the processes, the dense gradient is used.

    Args:
        fn: an update function for `strategy.extended.update`, also one decorated with `update_function`.
        catch_up: "replay" applies missed updates one after another. "closed_form" applies many at once if the function
            has a closed form: it multiplies each table by numbers, and adds to one of them a multiple of another one,
            which it may divide by a root. Values are then correct within a few millionths, and the cost does not depend
            on the number of missed updates.

    Raises:
        TypeError: `fn` is not a function.
        ValueError: `catch_up` is another word.
    """
    return _sparse(fn, "exact", "exact_update", check_word("catch_up", catch_up, CatchUp))


def _sparse(fn: Callable[..., object], sparse: Sparse, name: str, catch_up: CatchUp = "replay") -> SparseUpdate:
    if not callable(fn):
        raise TypeError(f"{name} takes an update function, not a {type(fn).__name__}")
    return SparseUpdate(fn, sparse, needs_rows=sparse == "lazy", catch_up=catch_up)
