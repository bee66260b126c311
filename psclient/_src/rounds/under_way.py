"""One round that this process has sent, until what came of it is taken in."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from psclient._src.data.progress import Pass
from psclient._src.rounds.prepared import PlanShares, WantedVariables
from pswire.api import RoundReply
from pswire.cluster import Task
from pswire.errors import PSError
from pswire.model.log import Generation
from pswire.model.plan import Plan, Ref
from pswire.model.rows import Int64s, Rows
from pswire.model.tensor import Array, TensorSpec

if TYPE_CHECKING:
    from psclient._src.telemetry.traces.worker import Flush


class Lookup(NamedTuple):
    """Rows that come back with a round.

    Attributes:
        variable: number of the variable.
        ids: int64[n], the places of the rows, in increasing order.
        spec: dtype and shape of the rows.
    """

    variable: int
    ids: Int64s
    spec: TensorSpec


@dataclass(eq=False)
class UnderWay:
    """A round that this process has sent.

    Attributes:
        number: the round's number.
        plan: its plan.
        shares: its plan by server.
        want: for each server the variables that come back.
        lookups: for each server the rows that come back: variable, ids, and their tensor.
        futures: for each server the answer.
        label: the generation that its pushes name; None before this process takes part.
        passed: the pass over a dataset that it belongs to; None outside of all.
        waited: True if the call that makes it waits for it: that call is told where it fails.
        line: the user's line that made it.
        alone: True if this process makes it alone, beside those of all members.
        traced: its trace; None for none.
        values: what its plan returns; None until they are taken.
        failure: why it failed, for every process; None if it did not.
    """

    number: int
    plan: Plan
    shares: PlanShares
    want: Mapping[int, WantedVariables]
    lookups: Mapping[int, tuple[Lookup, ...]]
    futures: Mapping[int, Future[RoundReply]]
    label: Generation | None
    passed: Pass | None
    waited: bool
    line: str
    alone: bool = False
    traced: Flush | None = None
    values: Mapping[Ref, Array | Rows] | None = None
    failure: PSError | None = None


class Answered(NamedTuple):
    """What the answers to a round say of the members; its values are nobody's concern any more.

    Attributes:
        number: the round's number.
        passed: as in `UnderWay`.
        generation: the newest generation that they name; None where the round failed.
        more: True if any member had a further batch.
        out: with backup workers, who was left out of a round of updates.
        over: as in `RoundReply`, the most that any server told.
    """

    number: int
    passed: Pass | None
    generation: Generation | None
    more: bool
    out: frozenset[Task] = frozenset()
    over: int = 0
