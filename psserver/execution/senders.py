"""What the members of a round have sent: where their tensors are, and which are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from psserver.plans.layout import Numbers
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare
from psserver.programs.kernels.launch import address_of
from pswire.model.plan import Ref
from pswire.model.tensor import Array, TensorSpec, align


class Sender:
    """What one member contributes: its tensors, by what they are for. Used by one thread at a time.

    Args:
        part: its share of the round.
        plan: what the round does.

    Attributes:
        gone: whether it is lost; what it has not sent whole counts for nothing.
    """

    def __init__(self, part: MemberShare, plan: PreparedPlan) -> None:
        self.part = part
        self.task = part.member.task
        self.gone = False
        self.places = plan.layout(part.said)
        self._left = deque((ref.index, end) for ref, (_, end) in self.places.of.items() if ref.kind == "reduction")

    @property
    def has_operands(self) -> bool:
        """Whether its operands are there."""
        return self.part.payload.end >= self.places.operands

    def end(self, reduction: int) -> int:
        """Up to where the payload must be there for a contribution; 0 where there is none."""
        return self.places.of.get(Ref("reduction", reduction), (0, 0))[1]

    def take(self, ref: Ref, spec: TensorSpec) -> list[Array]:
        """The pieces of a tensor."""
        return self.part.payload.pieces(self.places.of[ref][0], spec)

    def let_go(self, readers: Mapping[int, int]) -> None:
        """Frees the memory of the contributions before the first that somebody has still to read."""
        while self._left and not readers[self._left[0][0]]:
            self.part.payload.release(align(self._left.popleft()[1]))

    def contribution(self, index: int, spec: TensorSpec) -> tuple[float, list[Array]]:
        """Weight and pieces; nothing of who is gone and has not sent it whole."""
        weight = self.part.said.weights[index]
        if not weight or (self.gone and self.part.payload.end < self.end(index)):
            return 0.0, []
        return weight, self.take(Ref("reduction", index), spec)

    def reached(self, reductions: Numbers) -> int:
        """How many of these contributions, from the first on, are there, or are waited for no more."""
        if self.gone:
            return len(reductions)
        missing = np.flatnonzero(self.places.ends[reductions] > self.part.payload.end)
        return int(missing[0]) if len(missing) else len(reductions)

    def addresses(self, reductions: Numbers) -> Numbers | None:
        """Where contributions begin in memory, for as long as nobody lets go of them.

        Args:
            reductions: to which.

        Returns:
            Addresses; None unless all are there, each in one piece.
        """
        chunks = self.part.payload.chunks[:]
        starts, ends = self.places.starts[reductions], self.places.ends[reductions]
        if not chunks or (ends == 0).any():
            return None
        offsets = np.array([offset for offset, _ in chunks])
        sizes = np.array([len(buffer) for _, buffer in chunks])
        bases = np.array([address_of(np.frombuffer(buffer, np.uint8)) for _, buffer in chunks])
        which = np.searchsorted(offsets, starts, side="right") - 1
        if (which < 0).any() or (ends > (offsets + sizes)[which]).any():
            return None
        found: Numbers = bases[which] + (starts - offsets[which])
        return found
