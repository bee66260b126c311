"""The steps of a round that runs: what each reads, its array work, and what comes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from psserver.effects import Await, Effect, Run, Work
from psserver.execution.execution import Execution
from psserver.plans.round import Commit, ReadyRound
from psserver.programs.kernels.kernels import Kernels
from psserver.rounds.answers import Answers
from psserver.rounds.participants import Hooks
from psserver.rounds.pending_round import Waiter
from psserver.state.counters import ServerCounters
from psserver.state.variables import Store
from psserver.values.value import Value
from pswire.errors import PSError
from pswire.model.plan import Ref
from pswire.model.tensor import Array

log = logging.getLogger("psserver")


@dataclass
class Running:
    """A round whose steps run.

    Attributes:
        execution: the run.
        on_trial: True if nobody may see its results until servers have agreed on it.
        attempt: how many votes there were before it was tried.
        awaits: the payload that the next step waits for.
        assigned: the values of a run on trial so far.
        given: of all values those that participants assign.
        ready: values of the last step that are on the host already.
        dropped: True if it is of no use any more, though its array work may still be under way.
        before: the round that runs after it, under its number; None where it is the round of its number itself.
    """

    execution: Execution
    on_trial: bool = False
    attempt: int = 0
    awaits: Await | None = None
    assigned: dict[int, Value] = field(default_factory=dict)
    given: Mapping[int, Value] = field(default_factory=dict)
    ready: Mapping[int | Ref, Array] = field(default_factory=dict)
    dropped: bool = False
    before: ReadyRound | None = None

    @property
    def job(self) -> ReadyRound:
        """The round."""
        return self.execution.job


Over = Callable[[Running, PSError | None, float], list[Effect]]
"""Takes a round whose last step is over, its error, and the time in seconds."""


class StepRunner:
    """Runs the steps of one round after another. Guarded by the core's lock, but for the methods that are array work.

    Args:
        store: the variables.
        kernels: run programs.
        tally: counts the seconds.
        answers: the answers, which stream.
        hooks: what participants assign.
        over: takes a round of which all steps have run, or which has failed; nothing of it is done if a step failed.
        broken: takes a round after a bug: it is unknown how far it came.
    """

    def __init__(
        self,
        store: Store,
        kernels: Kernels,
        tally: ServerCounters,
        answers: Answers,
        hooks: Hooks,
        over: Over,
        broken: Callable[[Running, PSError, float], list[Effect]],
    ) -> None:
        self._store = store
        self._kernels = kernels
        self._tally = tally
        self._answers = answers
        self._hooks = hooks
        self._over = over
        self._broken = broken

    def begin(self, running: Running, waiters: Sequence[Waiter]) -> list[Effect]:
        """Begins a round that streams: its members, who wait, are answered while it runs."""
        begins = self._answers.begin(running.execution, waiters)
        return [Work("arrays", _tell, (begins,), then=partial(self._told, running))]

    def look(self, running: Running) -> list[Effect]:
        """Goes on with a round if the payload that its next step waits for has arrived, or will not."""
        if running.awaits is None or running.awaits == running.execution.awaits():
            return []
        return self.go_on(running)

    def go_on(self, running: Running, follows: bool = False) -> list[Effect]:
        """Returns the next step, or the payload it has to wait for."""
        execution, job = running.execution, running.job
        running.awaits = execution.awaits()
        if running.awaits is not None:
            return [running.awaits]
        if not execution.begun:  # nobody reads half a round
            self._store.lend(job.prepared.writes, running.on_trial and job.commit is Commit.PROGRESSIVE)
            self._store.note_tables(job.prepared.row_tables)
        # What may come to nothing writes nowhere.
        in_place = not (running.on_trial or job.skipped)
        reads = execution.reads()
        if job.plan.restore is not None:  # after which all updates have been applied
            reads = self._store.lazy().union(reads)
        then, brief = partial(self._commit, running), job.is_brief(self._kernels)
        return [Work("arrays", self._step, (running, reads, in_place), then=then, follows=follows, brief=brief)]

    def _step(
        self, running: Running, reads: Collection[int], in_place: bool
    ) -> tuple[dict[int, Value], dict[int | Ref, Array]]:
        """Runs one step: array work, without the lock.

        Nobody else changes the values that it reads, or can get those that it writes: they are lent. This thread may
        have held some until now, to answer the round before.
        """
        execution, store, began = running.execution, self._store, self._tally.clock()
        try:
            variables = store.borrow(reads, in_place, running.assigned)
            return execution.step(variables, store.take_spare, store.room, not in_place)
        finally:
            execution.ran += self._tally.ran(execution.job, began)

    def _told(self, running: Running, _: None, error: PSError | None, now: float) -> list[Effect]:
        if running.dropped:
            return []
        return self.go_on(running, follows=True) if error is None else self._broken(running, error, now)

    def _commit(
        self,
        running: Running,
        made: tuple[Mapping[int, Value], Mapping[int | Ref, Array]] | None,
        error: PSError | None,
        now: float,
    ) -> list[Effect]:
        """Takes the results of a step. The last step ends the round, and so does a failed one."""
        if running.dropped:
            return []
        try:
            return self._take(running, *(made or ({}, {})), error, now)
        except Exception as bug:  # our bug: it must reach the members as an error, not as silence
            log.exception("round %d failed", running.job.round)
            return self._broken(running, PSError(f"internal error: {bug!r}; see the server's log"), now)

    def _take(
        self,
        running: Running,
        assigned: Mapping[int, Value],
        ready: Mapping[int | Ref, Array],
        error: PSError | None,
        now: float,
    ) -> list[Effect]:
        execution, job = running.execution, running.job
        over = error is not None or execution.done
        if over and error is None:
            try:
                running.given = {id: value for assigns in self._hooks.assigns for id, value in assigns(job).items()}
                assigned = {**assigned, **running.given} if running.given else assigned
            except PSError as refusal:
                assigned, error = {}, refusal
        if running.on_trial:
            running.assigned |= assigned
        elif job.skipped:
            ready = {}  # the variables stay, and what is given is in the record
        elif error is None:
            self._store.commit(assigned)
        effects, running.ready = self._answers.put(ready), ready
        return effects + (self._over(running, error, now) if over else self.go_on(running, follows=True))


def _tell(begins: Sequence[Run]) -> None:
    """Hands the payloads of their answers to members, before the first step. Array work, without the lock."""
    for begin in begins:
        begin.call(*begin.args)
