"""How the processes of a job make rounds: the same way everywhere, from its beginning and from each change on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pswire.cluster import Task
from pswire.errors import ConfigError, Diverged
from pswire.model.changes import Change, change_of
from pswire.model.log import Generation, Member

Asked = tuple[Member, str, int]
"""A member, the join point at which it waits, and the oldest round that it waits for; -1 for none."""


def as_all(opens: Member, others: Iterable[Member], generations: Mapping[int, Generation]) -> Member:
    """Returns a process that opens its session as it makes rounds: as the job does by now.

    Args:
        opens: the process, with what its script began with.
        others: those that are here, who all make their rounds alike.
        generations: of the job, by number.

    Raises:
        ConfigError: it begins with something else than the job did, and than what the job has now.
    """
    changed = any(change_of(generation) is not None for generation in generations.values())
    models = (
        [generations[number].members[0] for number in sorted(generations) if generations[number].members]
        if changed
        else []
    )
    if models:
        first, now = models[0], models[-1]
        if opens.consistency not in (first.consistency, now.consistency):
            raise ConfigError(
                f"{opens.task} runs with {opens.consistency}, but the job began with {first.consistency} and now "
                f"has {now.consistency}; give every process the consistency with which the job began"
            )
        return replace(opens, consistency=now.consistency)
    other = next((other for other in others if other.task != opens.task), opens)
    if opens.consistency != other.consistency:
        raise ConfigError(
            f"{opens.task} runs with {opens.consistency}, but {other.task} with {other.consistency}; give every "
            "process of the job the same consistency"
        )
    return opens


def differing(asked: Sequence[Asked], generations: Mapping[int, Generation]) -> Diverged | None:
    """Returns the error of members that do not come to one change at one place; None while nobody differs.

    Where each makes rounds of its own only the value can differ: how many rounds are made before is nobody's business.

    Args:
        asked: all members that are here.
        generations: of the job, by number.
    """
    changes = [(member, Change.parse(join_point)) for member, join_point, _ in asked]
    if not any(change for _, change in changes):
        return None
    made = sum(change_of(generation) is not None for generation in generations.values())
    found = [(member, change) for member, change in changes if change is not None and change.number == made]
    if not found:
        return None
    first, change = found[0]
    for member, other in found:
        if not change.same(other):
            return _diverged((first.task, f"calls {_call(change)}"), (member.task, f"{_call(other)}"))
    for member, _, round in asked:
        if not member.alone and round >= change.round:
            calls = f"calls {_call(change)} before round {change.round}"
            return _diverged((first.task, calls), (member.task, f"runs round {round} first"))
    return None


def _call(change: Change) -> str:
    return f"set_consistency({change.said})"


def _diverged(*does: tuple[Task, str]) -> Diverged:
    told = ", and ".join(f"{task} {what}" for task, what in does)
    return Diverged(
        f"the processes do not run the same program: {told}. Every process must call set_consistency at the same "
        "step with the same value"
    )
