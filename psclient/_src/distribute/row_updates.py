"""Updates of some rows, where variables have copies in this process: the function sees the rows as if they were all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psclient._src.arraylike import Readable
from psclient._src.arrays import nest
from psclient._src.arrays.devices import AnyArray, Device, to_device, to_numpy
from psclient._src.arrays.nest import Leaf, Nest
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.kinds import Cell, LocalVariable, ReplicaCopy
from pswire.errors import ProgramError
from pswire.model.row_updates import row_shape
from pswire.model.rows import Int64s, Rows
from pswire.model.tensor import Array, spec_of


class RowsOfVariable(Readable):
    """Some rows of a copy of a variable, to an update function the whole variable.

    Args:
        copy: the copy.
        ids: the places of the rows.
        device: the copy's.
    """

    def __init__(self, copy: LocalVariable | ReplicaCopy, ids: Int64s, device: Device) -> None:
        self.name = copy.name
        self.trainable = copy.trainable
        self._copy = copy
        self._ids = ids
        rows = copy.cell.array[ids]
        self.spec = spec_of(rows)
        self._cell = Cell(copy.name, self.spec, device, rows)
        self._first = self._cell.array

    def _fetch(self) -> Array:
        return to_numpy(self._cell.array)

    def _copy_on(self, device: Device) -> AnyArray:
        return to_device(self._cell.array, device)

    def value(self) -> AnyArray:
        """Their value, as `read_value`."""
        return self.read_value()

    def assign(self, value: Any) -> RowsOfVariable:
        """Gives the rows a value."""
        return self._write("assign", value)

    def assign_add(self, delta: Any) -> RowsOfVariable:
        """Adds to the rows."""
        return self._write("assign_add", delta)

    def assign_sub(self, delta: Any) -> RowsOfVariable:
        """Subtracts from the rows."""
        return self._write("assign_sub", delta)

    def _write(self, how: str, value: Any) -> RowsOfVariable:
        self._cell.write(how, value)
        return self

    def put_back(self) -> None:
        """Gives the copy its rows, if they were assigned; all other rows stay."""
        if self._cell.array is not self._first:
            self._copy.cell.scatter("scatter_update", Rows(self._ids, self._cell.array))


def update_rows(
    fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], device: Device
) -> Nest:
    """Calls an update function with the rows of its `IndexedSlices`, and with those of the variables.

    In update context.

    Args:
        fn: the function.
        args: its positional arguments, with one copy of each variable.
        kwargs: its keyword arguments, likewise.
        device: the copy's.

    Raises:
        ProgramError: the arguments do not have the rows of one value.
    """
    slices = [leaf for leaf in nest.flatten((tuple(args), dict(kwargs))) if isinstance(leaf, IndexedSlices)]
    if len({id(one) for one in slices}) != 1:
        raise ProgramError(f"a lazy update takes the rows of one gradient, but got {len(slices)}")
    ids, rows = slices[0].rows()
    shape = slices[0].shape or ()
    views: dict[int, RowsOfVariable] = {}
    copies: dict[int, object] = {}

    def part(leaf: Leaf) -> Leaf:
        if isinstance(leaf, IndexedSlices):
            return to_device(rows, device)
        if isinstance(leaf, LocalVariable | ReplicaCopy) and leaf.shape in (shape, row_shape(shape)):
            if id(leaf) not in views:
                views[id(leaf)] = RowsOfVariable(leaf, ids, device)
                copies[id(views[id(leaf)])] = leaf
            return views[id(leaf)]
        return leaf

    own, named = nest.map_structure(part, (tuple(args), dict(kwargs)))
    result = fn(*own, **named)
    for view in views.values():
        view.put_back()
    return nest.map_structure(lambda leaf: copies.get(id(leaf), leaf), result)
