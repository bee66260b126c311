"""What a server has saved of a checkpoint: what its file has of variables and tables."""

from __future__ import annotations

from dataclasses import dataclass

from pswire.model.log import Position
from pswire.model.plan import ShardOf
from pswire.model.tables import SlotTensor, TableSpec
from pswire.model.tensor import TensorSpec


@dataclass(frozen=True)
class PartOf:
    """The place of a tensor of a file among those that make one tensor of a dynamic table, one behind another.

    Attributes:
        whole: the name of that.
        first: the first of the buckets that the file has.
    """

    whole: str
    first: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a file.

    Attributes:
        name: its name there.
        spec: dtype and shape.
        checksum: of its bytes, as in `Manifest`.
        shard: which rows of a partitioned variable it has; None for a whole one.
        part: which part of a tensor of a dynamic table it is; None for none.
    """

    name: str
    spec: TensorSpec
    checksum: str
    shard: ShardOf | None = None
    part: PartOf | None = None


@dataclass(frozen=True)
class SavedTable:
    """A dynamic table, or a part of one, in a file: its tensors are its rows in the order of their keys' hashes.

    Attributes:
        name: the table's name, which its rows have as a tensor.
        spec: the table.
        slots: the tensors beside the rows.
        since: the round of the table since which there are changes alone; -1 for the whole.
        round: the round of the table.
    """

    name: str
    spec: TableSpec
    slots: tuple[SlotTensor, ...]
    since: int
    round: int


@dataclass(frozen=True)
class Shard:
    """One server's file of a checkpoint.

    Attributes:
        path: the checkpoint's directory, as the server resolved it.
        file: the file's name in it.
        round: the round whose state it holds.
        positions: the datasets' positions after that round.
        tensors: its tensors.
        nbytes: the file's size.
        tables: the dynamic tables of which it has a part.
    """

    path: str
    file: str
    round: int
    positions: tuple[Position, ...]
    tensors: tuple[SavedTensor, ...]
    nbytes: int = 0
    tables: tuple[SavedTable, ...] = ()
