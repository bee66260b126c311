"""What a new generation changes in rounds: members that make none any more, and sequences that go on from a change."""

from __future__ import annotations

from psserver.effects import Effect
from psserver.plans.round import Key
from psserver.rounds.sequences import RoundSequence
from pswire.errors import Fenced
from pswire.model.changes import change_of
from pswire.model.log import Generation


def excluded(before: Generation | None, generation: Generation) -> set[int]:
    """Returns the sessions that made rounds, and make none any more; none at a change, before which they are fenced."""
    members = () if before is None or change_of(generation) is not None else before.everybody
    return {member.session for member in members if not generation.takes_part(member.session)}


def go_on(
    sequences: dict[Key, RoundSequence], before: Generation | None, generation: Generation, running: object
) -> list[Effect]:
    """Sequences go on from the round of a change, which all members make next; returns the effects.

    What is open is of members that are gone: those who are here have all their answers. None of it is applied any more,
    but for the round that runs.

    Args:
        sequences: all sequences.
        before: the generation before the change.
        generation: the one that begins with it.
        running: the key of the sequence whose round runs, and its number; None for none.
    """
    change, effects = change_of(generation), list[Effect]()
    if change is None:
        return effects
    for key, sequence in sequences.items():
        for number in [number for number in sequence.open if (key, number) != running]:
            effects += sequence.open.pop(number).fail(
                Fenced("the job changed its consistency without this process; restart the process")
            )
    turned = before is None or any(m.alone for m in before.members) != any(m.alone for m in generation.members)
    for key in (None, *(member.task for member in generation.members)):
        sequence = sequences.setdefault(key, RoundSequence())
        sequence.last = max(sequence.last, change.round - 1)
        if turned:
            sequence.settled = generation.start.positions if generation.start else ()
    return effects
