"""Rounds that wait for contributions, for people and for the chief."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from psserver.rounds.rounds import Rounds
from psserver.rounds.sequences import shared_rounds
from pswire.cluster import Task
from pswire.model.log import Member
from pswire.model.status import OpenRound


def open_rounds(rounds: Rounds, now: float = inf) -> tuple[OpenRound, ...]:
    """Returns the open rounds, without those of one worker beside those of all.

    Args:
        rounds: all rounds of a server.
        now: the time, in monotonic seconds.
    """
    told = []
    for number, pending in shared_rounds(rounds.sequences):
        missing = pending.missing(rounds.fenced)
        section, approved = rounds.describe(pending.plan_id), pending.plan_id in rounds.plans
        tasks = tuple(member.task for member in missing)
        told.append(OpenRound(number, section, tasks, approved, computing(rounds, missing, now)))
    return (*told, *rounds.parked.waiting)


def computing(rounds: Rounds, members: Iterable[Member], now: float) -> tuple[Task, ...]:
    """Returns those of some members that compute, not much longer than they have done before."""
    found = ((member, rounds.sequences.get(member.task if member.alone else None)) for member in members)
    return tuple(m.task for m, sequence in found if sequence and sequence.computes(m.session, now))
