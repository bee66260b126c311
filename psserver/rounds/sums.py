"""Sums of what several workers of a host contribute, which came as one contribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from psserver.plans.round import MemberShare
from pswire.api import Contribution
from pswire.errors import InvalidRequest
from pswire.model.log import Member
from pswire.network.payload import EMPTY, Payload


def check_sum(said: Contribution) -> None:
    """Raises `InvalidRequest` if a contribution cannot be the sum of its parts."""
    parts, sessions = said.parts, {part.session for part in said.parts}
    if len(sessions) < len(parts) or said.session not in sessions:
        raise InvalidRequest("a sum of pushes must name each sender once, including the process that sends it")
    if not said.host or all(part.observes for part in parts):
        raise InvalidRequest("a sum must contain pushes of one host, at least one of them with a weight")
    if any((part.generation, part.round, part.plan_id, part.host) != _round_of(said) for part in parts):
        raise InvalidRequest("a sum contains pushes to different rounds or from different hosts")
    if said.observes or any(_is_special(part) for part in (said, *parts)) or any(part.parts for part in parts):
        raise InvalidRequest("a sum contains pushes that cannot be summed")
    weights = [part.weights for part in parts]
    if {len(each) for each in weights} != {len(said.weights)} or said.weights != total_weights(weights):
        raise InvalidRequest(f"the weights {said.weights[:8]} of a sum differ from those of its parts")


def total_weights(weights: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Returns for each reduction the sum of the weights of several contributions, in their order."""
    return tuple(map(sum, zip(*weights, strict=True)))


def shares_of(said: Contribution, payload: Payload, members: Sequence[Member]) -> list[MemberShare]:
    """Returns the members' shares of a sum: the first one that contributes has it, and the others are within that.

    Args:
        said: the sum, which `check_sum` has let pass.
        payload: its payload.
        members: the senders of its parts, in their order.
    """
    pairs = sorted(zip(members, said.parts, strict=True), key=lambda pair: pair[0].task)
    first, own = next((member, part) for member, part in pairs if not part.observes)
    whole = MemberShare(first, replace(own, weights=said.weights, parts=said.parts), payload)
    return [whole if member is first else MemberShare(member, part, EMPTY, whole) for member, part in pairs]


def _round_of(said: Contribution) -> tuple[int, int, bytes, int]:
    return said.generation, said.round, said.plan_id, said.host


def _is_special(part: Contribution) -> bool:
    """Returns whether a contribution is more than arrays: rows, batches that were handed out, a closure's."""
    rows = part.rows or part.lookups or part.hints
    return bool(rows or part.chunks or part.first_values or part.closure or part.alone)
