"""The reader of values on servers, as variables see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from psclient._src.arrays.devices import Device
from psclient._src.variables.device_copies import Copied, DeviceCopy
from pswire.model.plan import PlacedVariable as Handle
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

TableQuestion = Literal["size", "keys", "rows"]
"""What is asked of a part of a dynamic table, as `pswire.api.TableQuestion`: each word asks for what comes before."""


class TableContent(NamedTuple):
    """The content of a part of a dynamic table, in the order of the keys' hashes, as far as it was asked for.

    Attributes:
        size: number of rows.
        keys: int64[n], bits.
        rows: (n, *row shape).
    """

    size: int
    keys: Int64s
    rows: Array


class ServerReader(Protocol):
    """Reads variables from their servers, to the host."""

    @property
    def kept(self) -> Callable[[Handle], Array | None]:
        """Returns a variable's value if it is here, and up to date; else None."""

    def read(self, handle: Handle) -> Array:
        """Returns a variable's value."""

    def copy_to(self, device: Device, variable: Copied, value: Array) -> DeviceCopy:
        """Copies a variable's value, as it was read, to a GPU; see `DeviceCopies`."""

    def read_rows(self, handle: Handle, ids: Int64s) -> Array:
        """Returns rows of a variable, by their places, int64[n]."""

    def prefetch(self, handle: Handle, *ids: Int64s) -> None:
        """Rounds that assign a variable bring these rows of it, one piece after another increasing, each once."""

    def _takes_hints(self, handle: Handle) -> bool:
        """Returns whether the rows of a part of a table lie in a file on its server."""

    def hint(self, handle: Handle, *ids: Int64s) -> None:
        """The next round that assigns a part of a table says these rows of it, given as to `prefetch`."""

    def read_all(self, handles: Sequence[Handle]) -> list[Array]:
        """Returns their values, on the host."""

    def read_rows_of_all(self, wanted: Sequence[tuple[Handle, Int64s]]) -> list[Array]:
        """Returns rows of each, by their places, on the host."""

    def read_tables(self, handles: Sequence[Handle], what: TableQuestion) -> list[TableContent]:
        """Returns what parts of dynamic tables have."""
