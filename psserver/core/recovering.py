"""Catching up: rounds of a server that is back, and still reads its variables, or makes what it has put off.

It takes part in rounds like any other: copies what is sent, votes, and answers. The values it makes later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from psserver.effects import Effect, Run, Work
from psserver.execution.contributions import Contributions
from psserver.execution.execution import Execution
from psserver.execution.nonfinite import NonfiniteVariables
from psserver.plans.round import Commit, ReadyRound
from psserver.state.counters import ServerCounters
from psserver.state.pending_round import Waiter
from psserver.state.rounds import Rounds
from psserver.state.strands import Record, ReturnedValues
from pswire.errors import PSError
from pswire.network.payload import Payload

log = logging.getLogger("psserver")


class Recovering:
    """The rounds that a server puts off, and makes later. Guarded by the core's lock.

    Args:
        rounds: the rounds, with the backlog.
        tally: counts rounds.
        nonfinite: the variables with NaN.
        fail: notes that a round has failed which the members take for made; returns the error.
        reply: answers a round's members.

    Attributes:
        keeps: the round that is being put off: its contributions are copied. None while there is none.
    """

    def __init__(
        self,
        rounds: Rounds,
        tally: ServerCounters,
        nonfinite: NonfiniteVariables,
        fail: Callable[[ReadyRound, PSError], PSError],
        reply: Callable[[Record, list[Waiter]], Sequence[Effect]],
    ) -> None:
        self._rounds = rounds
        self._tally = tally
        self._nonfinite = nonfinite
        self._fail = fail
        self._reply = reply
        self.keeps: ReadyRound | None = None

    def next(self) -> ReadyRound | None:
        """Returns the round to begin now, if any: one that can be put off, for which others wait; else one that was."""
        backlog = self._rounds.backlog
        job, backlog.waiting = backlog.waiting or self._rounds.next_job(), None
        if not backlog.behind or (job is not None and backlog.takes(job)):
            return job
        backlog.waiting = job
        return backlog.next()

    def put_off(self, job: ReadyRound) -> list[Effect]:
        """Ends a round for its members, whose servers have agreed on it."""
        self.keeps = job
        return [Work("arrays", _keep, (job,), then=partial(self._kept, job))]

    def _kept(
        self, job: ReadyRound, found: tuple[ReadyRound, ReturnedValues] | None, error: PSError | None, now: float
    ) -> list[Effect]:
        if job is not self.keeps:
            return []  # the job was started anew
        self.keeps, effects = None, self._rounds.unused(job)
        if found is None:
            failed = self._fail(job, error or PSError("the round's gradients could not be kept"))
            record, waiters = self._rounds.fail(job, failed)
        else:
            record, waiters = self._rounds.complete(job, found[1])
            self._rounds.backlog.put(found[0])
        traced = self._tally.over(job, record, self._rounds.last, 0.0, now)
        return [*effects, *self._reply(record, waiters), Run(self._tally.answered, (now, traced))]

    def made(self, execution: Execution, error: PSError | None) -> None:
        """A round that was put off is made, or has failed; its members were answered long ago."""
        job, backlog = execution.job, self._rounds.backlog
        backlog.made()
        if error is not None:
            self._fail(job, error)
            return
        self._nonfinite.judge(job, execution.found, self._tally)
        if not backlog.behind:
            log.info("recovered: all rounds up to round %d are applied", job.round)


def _keep(job: ReadyRound) -> tuple[ReadyRound, ReturnedValues]:
    """Copies a round's contributions, and reduces what it gives back. Array work, without the lock.

    The members' memory is theirs again once they are answered.

    Args:
        job: the round, with whole contributions; see `Backlog.takes`.

    Returns:
        The round as it is made later, and the values that it gives back, on the host.
    """
    parts = tuple(replace(part, payload=_copied(part.payload)) for part in job.parts)
    kept = replace(job, parts=parts, commit=Commit.ATOMIC, put_off=True)
    contributions = Contributions(kept)
    values = (contributions.value(ref.index) for ref, _ in job.prepared.given)
    return kept, ReturnedValues([np.ascontiguousarray(value) for value in values])


def _copied(payload: Payload) -> Payload:
    return Payload([(offset, memoryview(bytes(data))) for offset, data in payload.chunks[:]], payload.size)
