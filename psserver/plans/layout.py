"""The layout of a contribution: offsets of its tensors in the payload."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pswire.api import Contribution
from pswire.model.plan import Plan, Ref
from pswire.model.tensor import TensorSpec, align, layout

Numbers = npt.NDArray[np.int64]


class RowBytes(NamedTuple):
    """The bytes of one row of a reduction.

    Attributes:
        reduction: the number of the reduction.
        ids: bytes of its id, or of its key and how often that came.
        values: bytes of its values; -1 where the reduction is not made.
    """

    reduction: int
    ids: int
    values: int


@dataclass(frozen=True)
class ContributionLayout:
    """The layout of a contribution's payload. Offsets and sizes are in bytes.

    Attributes:
        of: offset and end of each operand, and of each contribution with a weight.
        operands: the end of the last operand.
        size: the size of the payload.
        starts, ends: offset and end of each contribution, by the reduction's number, int64; 0 for an absent one.
        window: most bytes that must be held at a time in a streamed round.
        rows: of each contribution that is rows the offsets of ids and rows, and their number; by the reduction's.
    """

    of: Mapping[Ref, tuple[int, int]]
    operands: int
    size: int
    starts: Numbers
    ends: Numbers
    window: int
    rows: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)

    def with_rows(self, sent: Iterable[tuple[RowBytes, int]]) -> ContributionLayout:
        """Returns the layout with rows behind all else: of each such reduction ids, then rows.

        Args:
            sent: the bytes of the rows of each reduction, and how many rows there are.
        """
        found: dict[int, tuple[int, int, int]] = {}
        end = self.size
        for (number, each, nbytes), count in sent:
            ids = align(end) if count else end
            end = ids + each * count
            rows = align(end) if nbytes * count else end
            end = rows + nbytes * count
            found[number] = ids, rows, count
        return replace(self, size=end, rows=found)


def lay_out(plan: Plan, server: int, needs: Sequence[Sequence[int]], said: Contribution) -> ContributionLayout:
    """Computes the layout of a payload to a server: operands, then contributions with a weight; empty for an observer.

    Args:
        plan, server: the plan, and the number of the server.
        needs: for each step of a round there, the reductions that it needs.
        said: the contribution, without its payload.
    """
    operands = [] if said.observes else list(enumerate(plan.operands))
    reductions = [] if said.observes else list(zip(range(len(said.weights)), plan.reductions, strict=False))
    tensors = {Ref("operand", index): item.tensor for index, item in operands if server in item.servers}
    last = len(tensors)
    tensors |= {
        Ref("reduction", index): item.tensor if item.codec is None else TensorSpec("uint8", (item.nbytes,))
        for index, item in reductions
        if said.weights[index] and server in item.servers and item.form == "dense"
    }
    offsets, size = layout(tensors.values())
    ends = [offset + spec.nbytes for offset, spec in zip(offsets, tensors.values(), strict=True)]
    of = dict(zip(tensors, zip(offsets, ends, strict=True), strict=True))
    bounds = np.zeros((2, len(plan.reductions)), np.int64)
    for ref, place in of.items():
        if ref.kind == "reduction":
            bounds[:, ref.index] = place
    return ContributionLayout(of, max(ends[:last], default=0), size, bounds[0], bounds[1], _window(needs, of))


def _window(needs: Sequence[Sequence[int]], of: Mapping[Ref, tuple[int, int]]) -> int:
    """Returns the most bytes between the first one still to be read and the last one that a step needs."""
    wanted = [[ref for index in step if (ref := Ref("reduction", index)) in of] for step in needs]
    readers = Counter(ref for refs in wanted for ref in refs)
    left = deque(sorted((place, ref) for ref, place in of.items() if ref.kind == "reduction"))
    window = begin = 0
    for refs in wanted:
        window = max([window, *(of[ref][1] - begin for ref in refs)])
        readers.subtract(refs)
        while left and not readers[left[0][1]]:
            begin = align(left.popleft()[0][1])
    return window
