"""What the rounds of a simulated job are of: how many bytes, rows and variables lie on each server.

The real code makes rounds of small arrays, one of each server; what they cost is that of the whole workload.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from pswire.limits import PART_BYTES
from pswire.model.plan import Apply, Plan, Reduction, Ref, VariableSpec
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import TensorSpec

MOST_CHUNKS = 16
"""Pieces of a large contribution that are told apart; each of more parts than one where it has more."""

TINY = TensorSpec("float32", (4,))
"""What stands for the variables of a server."""


@dataclass(frozen=True)
class Share:
    """What of a round lies on one server, for one worker.

    Attributes:
        nbytes: bytes of dense variables.
        variables: their number.
        rows: rows of tables that the worker updates there, and has back.
        row_bytes: bytes of one row, its id included.
        compressed: the part of the bytes of dense variables that a contribution takes.
    """

    nbytes: float
    variables: float
    rows: float = 0.0
    row_bytes: float = 0.0
    compressed: float = 1.0

    @property
    def chunks(self) -> int:
        """The pieces in which it travels and is applied; 1 where nothing is applied before all is there."""
        return min(ceil(self.nbytes / PART_BYTES), MOST_CHUNKS) if self.streams else 1

    @property
    def streams(self) -> bool:
        """True if a server applies it bit by bit, as it comes."""
        return self.nbytes > PART_BYTES and not self.rows

    @property
    def pushed(self) -> float:
        """Bytes of a contribution."""
        return self.nbytes * self.compressed + self.rows * self.row_bytes

    @property
    def answered(self) -> float:
        """Bytes of an answer: whole values, with the rows of the next batch."""
        return self.nbytes + self.rows * self.row_bytes


@dataclass(frozen=True)
class Workload:
    """A training step, as parameter servers see it.

    Attributes:
        servers: number of servers.
        dense: bytes of all dense variables.
        variables: their number.
        ids: ids of rows of a worker's batch, each once.
        dimension: numbers of a row, of four bytes.
        step: seconds that a worker computes between two rounds.
        copies: servers beside the first that hold each variable.
        compressed: the part of the bytes of dense variables that a contribution takes.
        tensor: what stands for the variables of a server.
    """

    servers: int
    dense: float = 4000.0
    variables: int = 1
    ids: int = 0
    dimension: int = 0
    step: float = 0.0
    copies: int = 0
    compressed: float = 1.0
    tensor: TensorSpec = TINY

    def on(self, server: int) -> Share:
        """Returns what of it lies on a server: variables are spread by bytes, rows by their ids."""
        return self._share

    @cached_property
    def _share(self) -> Share:
        part = (1 + self.copies) / self.servers
        rows = self.ids * part
        row_bytes = 4.0 * self.dimension + 8.0 if self.ids else 0.0
        return Share(self.dense * part, self.variables * part, rows, row_bytes, self.compressed)

    @cached_property
    def created(self) -> list[tuple[VariableSpec, tuple[int, ...]]]:
        """The variables that stand for it, and their servers."""
        held = [
            tuple(dict.fromkeys((server + step) % self.servers for step in range(1 + self.copies)))
            for server in range(self.servers)
        ]
        return [(VariableSpec(f"v{server}", self.tensor), where) for server, where in enumerate(held)]

    @cached_property
    def plan(self) -> Plan:
        """A section that adds a sum to each of them."""
        tensor = self.tensor
        adding = Program((Input("variable", tensor), Input("value", tensor)), (Node("add", (0, 1)),), ((0, 2),), ())
        places = [where for _, where in self.created]
        return Plan(
            tuple(Reduction("sum", tensor, where, "step") for where in places),
            (),
            (adding,),
            tuple(
                Apply(0, where, (Ref("variable", number), Ref("reduction", number)))
                for number, where in enumerate(places)
            ),
        )

    @cached_property
    def contributions(self) -> tuple[np.ndarray, ...]:
        """What each worker contributes."""
        return tuple(np.ones(self.tensor.shape, self.tensor.dtype) for _ in self.created)
