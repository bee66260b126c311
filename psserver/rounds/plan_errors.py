"""The errors of members that make different sections in one round, with both in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from psserver.plans.round import Record
from psserver.rounds.pending_round import PendingRound
from psserver.state.sessions import diverged, newcomer_diverged
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.errors import Diverged, PSError
from pswire.model.log import Generation, Member

MAX_WORDS = 160
"""Most characters of a batch, in a member's words, that a message has."""


class PlanErrors:
    """Makes these errors.

    Args:
        describe: returns a plan in words, approved or not.
    """

    def __init__(self, describe: Callable[[bytes], str]) -> None:
        self._describe = describe

    def diverged(self, round: int, pending: PendingRound, member: Member, section: str) -> Diverged:
        """Returns the error of a member whose section, in words, is not that of its round."""
        other = next(iter(pending.parts.values()), None)
        positions = [(other.member.task, self._describe(pending.plan_id))] if other else []
        return diverged(round, [*positions, (member.task, section)])

    def refusal(self, round: int, member: Member, plan_id: bytes, other: Member, others: bytes) -> PSError:
        """Returns the error of a newcomer whose plan is not that of another member: it alone is wrong."""
        positions = [(other.task, self._describe(others)), (member.task, self._describe(plan_id))]
        return newcomer_diverged(member.task, round, positions)

    def late(self, said: Contribution, record: Record, generation: Generation) -> Diverged:
        """Returns the error of a member that has come late to a round, with another section than those who made it."""
        made = [(m.task, self._describe(record.plan_id)) for m in generation.members if m.session in record.sessions]
        late = [(m.task, self._describe(said.plan_id)) for m in generation.members if m.session == said.session]
        return diverged(said.round, [*made[:1], *late])


def different_batches(pending: PendingRound, senders: Iterable[tuple[Contribution, Member]]) -> Diverged | None:
    """Notes which global batch members read; returns the error of two that read different ones, None if none do.

    Args:
        pending: the round.
        senders: what members say that have come, which may be nothing of a batch.
    """
    for said, member in senders:
        if not said.batch:
            continue
        if pending.batch is None:
            pending.batch = member.task, said.batch
        elif pending.error is None and _differ(said.batch, pending.batch[1]):
            return _batches_differ(pending.batch, (member.task, said.batch))
    return None


def _differ(one: str, other: str) -> bool:
    """Returns whether batches have different examples; their numbers differ after an interrupt in one worker, too."""
    return one.partition(" has ")[2] != other.partition(" has ")[2]


def _batches_differ(one: tuple[Task, str], other: tuple[Task, str]) -> Diverged:
    (first, this), (second, that) = sorted([one, other])
    return Diverged(
        f"{first} and {second} read different global batches: {this[:MAX_WORDS]}, and {that[:MAX_WORDS]}. Give all "
        "workers the same data, batch size and shuffle seed (DataLoader: "
        "generator=torch.Generator().manual_seed(0), and no sampler that depends on the rank)"
    )


def joins(said: Contribution, generations: Mapping[int, Generation]) -> bool:
    """Returns True for the first round of a process that joined others, rather than began together with all."""
    start = generations[said.generation].start
    return said.start == said.round and (start is None or start.round != said.round)


def only_newcomers(pending: PendingRound, generations: Mapping[int, Generation]) -> bool:
    """Returns True if no older member has pushed to a round yet."""
    return bool(pending.parts) and all(joins(part.said, generations) for part in pending.parts.values())
