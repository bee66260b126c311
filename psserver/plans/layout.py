"""Where the tensors of a contribution lie in its payload."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pswire.api import Contribution
from pswire.model.plan import Plan, Ref
from pswire.model.tensor import align, layout

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ContributionLayout:
    """Where the tensors of a contribution lie in its payload.

    Attributes:
        of: offset and end of each operand and of each contribution that counts, in bytes.
        operands: the end of the last operand.
        size: of the payload.
        starts, ends: of each contribution in bytes, by the reduction's number; 0 for what is not there.
        window: how much of it has to be held at once where it is used bit by bit.
    """

    of: Mapping[Ref, tuple[int, int]]
    operands: int
    size: int
    starts: Numbers
    ends: Numbers
    window: int


def lay_out(plan: Plan, server: int, needs: Sequence[Sequence[int]], said: Contribution) -> ContributionLayout:
    """Finds what a payload to a server holds: operands, then contributions that count; nothing of who observes.

    Args:
        plan, server: what is contributed to.
        needs: for each step of a round there the reductions that it needs.
        said: what the contribution says of itself.
    """
    operands = [] if said.observes else list(enumerate(plan.operands))
    reductions = [] if said.observes else list(zip(range(len(said.weights)), plan.reductions, strict=False))
    tensors = {Ref("operand", index): item.tensor for index, item in operands if server in item.servers}
    last = len(tensors)
    tensors |= {
        Ref("reduction", index): item.tensor
        for index, item in reductions
        if said.weights[index] and server in item.servers
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
    """The most bytes between the first that somebody has still to read and the last that a step needs."""
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
