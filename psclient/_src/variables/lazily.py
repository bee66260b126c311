"""Updates for some rows alone: `ps.lazily`."""

from __future__ import annotations

from collections.abc import Callable


class Lazily:
    """An update function that is for the rows of a gradient alone; made by `lazily`.

    Args:
        fn: the function, for `strategy.extended.update`.
    """

    def __init__(self, fn: Callable[..., object]) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Calls the function."""
        return self.fn(*args, **kwargs)


def lazily(fn: Callable[..., object]) -> Lazily:
    """Makes an update function be for the rows of its `IndexedSlices` alone: all other rows stay as they are.

    Without it an update means what it means for the whole gradient, which is zero where no row is given: momentum goes
    on there, weight decay as well. Where that is the same, as for SGD, rows alone are computed anyhow.

    The function assigns variables of one shape, by elementwise operations on them, on rows of one gradient, and on
    numbers.

        strategy.extended.update(table, ps.lazily(fn), args=(gradient, momentum))

    Args:
        fn: for `strategy.extended.update`, also one that `update_function` has made.
    """
    if not callable(fn):
        raise TypeError(f"lazily takes an update function, and not a {type(fn).__name__}")
    return Lazily(fn)
