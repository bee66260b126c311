"""The contributions of a round, compressed as they are sent: once, whoever asks for them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from psclient._src.arrays.devices import Coming, Pending
from psclient._src.distribute.reduction import SentRows
from psclient._src.variables.feedback import Feedback
from pswire.model.plan import Plan, Reduction
from pswire.model.tensor import Array

Sent = Array | Pending
"""As a contribution travels: a host array, or one that is on its way."""


@dataclass
class Compressed:
    """Contributions of which some are compressed.

    Attributes:
        contributions: for each reduction, as `Outgoing.contributions`.
        flawed: numbers of the reductions to which NaN or infinity is contributed, of those that are compressed.
        own: the arrays that were made for this, which nobody changes.
    """

    contributions: list[Sent | SentRows | None]
    flawed: list[int] = field(default_factory=list)
    own: list[Sent] = field(default_factory=list)


def compress(
    plan: Plan,
    contributions: Sequence[Sent | SentRows | None],
    feedback: Sequence[Feedback | None],
    host: Callable[[Sent], Array],
) -> Compressed:
    """Compresses the contributions to a round, which is to be sent: what is left over counts as kept for the next.

    Waits for copies from a GPU; what the program still computes is compressed when it is there.

    Args:
        plan: the round's plan.
        contributions: for each reduction, as `Outgoing.contributions`.
        feedback: for each reduction what is left over of earlier contributions; None where it is not compressed.
        host: returns an array on the host; waits for its copy from a GPU.
    """
    found = Compressed(list(contributions))
    for number in plan.compressed:
        sent, own = contributions[number], feedback[number]
        if sent is not None and own is not None:
            found.contributions[number] = _compressed(found, number, plan.reductions[number], sent, own, host)
    return found


def _compressed(
    found: Compressed,
    number: int,
    reduction: Reduction,
    sent: Sent | SentRows,
    own: Feedback,
    host: Callable[[Sent], Array],
) -> Sent | SentRows:
    if isinstance(sent, Coming):
        later = Coming(reduction.nbytes)
        sent.when(partial(_give, later, reduction, own))
        found.own.append(later)
        return later
    if isinstance(sent, SentRows):
        ids, rows = own.encode_rows(sent.ids, host(sent.values), reduction.tensor)
        made: Sent | SentRows = SentRows(ids, rows.data)
        data, finite = rows
    else:
        data, finite = own.encode(host(sent), reduction.tensor)
        made = data
    found.own.append(data)
    found.flawed += [] if finite else [number]
    return made


def _give(later: Coming, reduction: Reduction, own: Feedback, array: Array) -> None:
    later.give(own.encode(array, reduction.tensor).data)
