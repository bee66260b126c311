"""What a server has saved of a checkpoint, and what a restore is to do, and has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

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


@dataclass(frozen=True)
class RestoreReply:
    """The answer to `restore`: a checkpoint was read.

    Attributes:
        path: the checkpoint's path, below the checkpoint root: where a directory was asked for, of its newest one.
        positions: the datasets' positions in it.
        manifest: the text of its manifest.
        damaged: names of those beside it that were passed over, since they are damaged, with what is wrong.
    """

    path: str
    positions: tuple[Position, ...]
    manifest: str = ""
    damaged: Mapping[str, str] = field(default_factory=dict)


RestoreStage = Literal["look", "open", "prepare"]


@dataclass(frozen=True)
class RestoreOrder:
    """The extent of a restore: the variables that it changes, and the way.

    Attributes:
        stage: how far it goes: "look" tells what there is, without a turn; "open" tells what there was when the first
            process asked in this turn; "prepare" reads the values, and holds them for the round that commits them.
        names: for each tensor of the checkpoint the number of the variable that gets it; None: each variable gets the
            one with its own saved name, and misses none.
        late: True if variables that are created later get theirs, by their saved names.
        cast: True to cast values to the variable's dtype; else another dtype is refused.
        damaged: names of checkpoints, in the directory that was asked for, which are known to be damaged, with what is
            wrong: they are passed over, and set aside once another one is restored.
        checkers: number of servers that each check a share of what no variable takes; 0: only what is read is checked.
    """

    stage: RestoreStage = "prepare"
    names: Mapping[str, int] | None = None
    late: bool = True
    cast: bool = False
    damaged: Mapping[str, str] = field(default_factory=dict)
    checkers: int = 0


ALL = RestoreOrder()
"""Every variable gets what is saved under its own name."""
