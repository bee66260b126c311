"""Contributions with rows, as workers send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare, ReadyRound
from pswire.api import Contribution
from pswire.model.log import Member
from pswire.model.plan import Plan
from pswire.model.rows import Rows
from pswire.model.tensor import Array
from pswire.transport.parts import parts_of
from pswire.transport.payload import Payload
from tests.kit.rig import WORKERS

Given = Array | Rows | None
"""What one worker gives to a reduction: an array, rows, or nothing, with a weight of 0."""


def rows(*ids: int, of: Any = 1.0, width: int = 2, dtype: str = "float32") -> Rows:
    """Rows for some places, all with one number, or as given."""
    values = np.broadcast_to(np.asarray(of, dtype), (len(ids), width)).copy() if np.ndim(of) == 0 else np.asarray(of)
    return Rows(np.array(ids, np.int64), values)


def packed(plan: Plan, given: Sequence[Given], operands: Sequence[Array] = ()) -> tuple[tuple[int, ...], Payload]:
    """How many rows each reduction of rows has, and the payload: what is dense, then ids and rows."""
    counts = tuple(len(one.values) if isinstance(one, Rows) else 0 for n, one in enumerate(given) if n in plan.rows)
    dense = [one for one in given if one is not None and not isinstance(one, Rows)]
    tail = [array for one in given if isinstance(one, Rows) for array in one]
    return counts, Payload.pack([*operands, *dense, *tail])


def share(
    place: int,
    plan: Plan,
    given: Sequence[Given],
    operands: Sequence[Array] = (),
    weights: Sequence[float] | None = None,
    part_bytes: int = 1 << 20,
) -> MemberShare:
    """One worker's share of a round on server 0."""
    counts, payload = packed(plan, given, operands)
    chunks = [(at, memoryview(b"".join(buffers))) for at, buffers in parts_of(payload, part_bytes)]
    own = tuple(weights) if weights else tuple(0.0 if one is None else 1.0 for one in given)
    said = Contribution(place + 1, 1, 4, plan.id, own, rows=counts)
    PreparedPlan(plan, 0).check(said, payload.size)
    return MemberShare(Member(WORKERS[place], place + 1, 1), said, Payload(chunks, payload.size))


def round_of(plan: Plan, *shares: MemberShare) -> ReadyRound:
    """A round of these."""
    return ReadyRound(4, PreparedPlan(plan, 0), shares, (), lambda: "the section")
