"""The value of a variable on one server, whatever its kind."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from pswire.model.rows import Int64s

Memo = dict[Any, Any]
"""What values share that are read together; empty at first."""


class Value(Protocol):
    """The value of a variable; also a view of one, for who reads it later in the thread for arrays.

    Guarded by the core's lock; while a step has it, it belongs to the thread for arrays.

    Attributes:
        group: the `LazyGroup` of which updates are deferred together; None for none.
        is_plain: True if its array is the value, whoever has read it before.
        shape, dtype: as programs have them.
    """

    __slots__ = ()

    group: Any = None
    is_plain: bool = True
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def array(self) -> Any:
        """The array as it lies on the device; of a dynamic table by slots, good until the table's next round."""

    def begin(self, first: Any) -> bool:
        """Takes another first value; returns False if it stays as it is."""
        return False

    # ---- Readers ----

    def check_rows(self, ids: Int64s, name: str, task: str) -> None:
        """Raises `InvalidRequest` if one of these rows does not exist; `name` and `task` are for its message."""

    def read_ahead(self, ids: Int64s, hint: bool) -> None:
        """Begins to read rows from the disk that are wanted after a round; with `hint` after the next, others first."""
        return

    def view(self, memo: Memo) -> Value:
        """Returns it as it is now."""

    def whole(self) -> Any:
        """Returns the array with all updates, on its device; raises `InvalidRequest` if there is no such array."""

    def rows(self, ids: Int64s, xp: Any) -> Any:
        """Returns rows with all updates, as a new array on their device.

        Args:
            ids: the rows, in any order, also several times; of a dynamic table keys.
            xp: the array namespace of the server's device.
        """

    def freeze(self, by_rows: bool, memo: Memo) -> Any:
        """Returns it as it is now, as a `FrozenValue`; rounds update rows of it if `by_rows`. Raises as `whole`."""

    # ---- For a step of a round ----

    @property
    def is_frozen(self) -> bool:
        """True if a checkpoint reads it so that rows may be written in place, and the whole may not."""
        return False

    def replaced(self, array: Any) -> Value:
        """Returns the value after a step has written another array."""
        return self

    def set_aside(self, rows: Int64s) -> None:
        """Called before rows are written in place: keeps them for checkpoints."""
        return

    def apply(self, rows: Int64s) -> None:
        """Applies the deferred updates of some rows, each given once, in place."""
        return
