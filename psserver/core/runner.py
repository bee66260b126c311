"""The runner: runs rounds, one after the other, and answers their members.

A small round runs once all contributions are whole, and commits all or nothing. A large round streams: each variable is
updated, and its value sent back, once all contributions to it are there, while others are still on their way in both
directions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from psserver.checkpoints.restores import Restores
from psserver.checkpoints.snapshots import Snapshots
from psserver.core.answers import Answers
from psserver.core.digests import Digests
from psserver.core.recovering import Recovering
from psserver.core.waiting import Waiters
from psserver.effects import Await, Effect, Run, Work
from psserver.execution.execution import NO_TABLES, Execution, StepTables, operands_differ
from psserver.execution.nonfinite import NonfiniteVariables
from psserver.plans.round import Commit, ReadyRound
from psserver.programs.kernels.kernels import Kernels
from psserver.state.counters import ServerCounters
from psserver.state.pending_round import Waiter
from psserver.state.rounds import Rounds
from psserver.state.strands import Record, ReturnedValues
from psserver.state.variables import Store
from pswire.api import Begun, Contribution, RoundReply
from pswire.errors import PSError, ServerLost
from pswire.model.plan import Ref
from pswire.model.tensor import Array

log = logging.getLogger("psserver")

Agreed = Set[int] | None
"""The sessions that votes have left; None where anybody may count."""


@dataclass(frozen=True)
class _Trial:
    """A run whose results are not visible.

    Attributes:
        execution: what ran.
        assigned: the new values of variables.
        ready: values that are on the host already.
    """

    execution: Execution
    assigned: Mapping[int, Array]
    ready: Mapping[int | Ref, Array]


@dataclass(frozen=True)
class _Ballot:
    """A round that several servers have to agree on.

    Attributes:
        job: the round, with the contributions that are whole here, less those that earlier votes have left out.
        attempt: how many votes there were before.
        trial: its run; None where it runs once it is decided.
    """

    job: ReadyRound
    attempt: int = 0
    trial: _Trial | None = None


class Runner:
    """The running round. Guarded by the core's lock, but for the methods that are array work.

    Args:
        store, rounds, snapshots, restores: the state that a round reads and changes.
        kernels: run its programs.
        tally: counts rounds.
        waiters: holds back the answers of a round that is over which have to wait.

    Attributes:
        broken: the error of a round that failed halfway and left variables unusable; None until then, and in a new job.
        held: the round that waits until more of a checkpoint is written; None if none does.
        digests: compares what rounds have made with other servers.
    """

    def __init__(
        self,
        store: Store,
        rounds: Rounds,
        snapshots: Snapshots,
        restores: Restores,
        kernels: Kernels,
        tally: ServerCounters,
        waiters: Waiters,
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._snapshots = snapshots
        self._restores = restores
        self._kernels = kernels
        self._tally = tally
        self._waiters = waiters
        self._nonfinite = NonfiniteVariables(store)
        self._execution: Execution | None = None
        self._awaits: Await | None = None  # the payload that the running round waits for
        self.held: ReadyRound | None = None
        self._ballot: _Ballot | None = None  # of the round that is not decided
        self._voted = 0.0  # when this server voted in it
        self._assigned: dict[int, Array] = {}  # the values of a trial run so far
        self._answers = Answers(store)
        self.digests = Digests(store, tally, self._nonfinite)
        self._late = Recovering(rounds, tally, self._nonfinite, self._fail_halfway, self._answer)
        self.broken: PSError | None = None

    def clear(self) -> None:
        """Forgets the running round; its results are dropped."""
        self._tally.forget()
        self._nonfinite.clear()
        self.broken = self._execution = self.held = self._awaits = self._ballot = self._late.keeps = None
        self._assigned = {}
        self._answers.drop()

    def listen(self, said: Contribution, future: Future[RoundReply], begun: Begun) -> list[Effect]:
        """Registers a callback for when the answer to a contribution begins to stream."""
        runs = self._execution is not None and self._execution.job.is_of(said)
        return self._answers.listen(said, future, begun, runs)

    def replies(self, record: Record, waiters: Sequence[Waiter]) -> list[Effect]:
        """Returns answers with the wanted variables as they are now, before the next round."""
        return self._answers.replies(record, waiters, self.broken, self._rounds.last + 1)

    def next(self) -> list[Effect]:
        """Begins the next round that can run, or continues the running one once its data has arrived."""
        if self._execution is not None:
            lost = self._execution.contributions.drop(self._rounds.fenced)
            if lost and self._ballot is not None:
                return self._again(self._ballot, self._execution, self._ballot.job.attempt)
            if self._awaits is None or self._awaits == self._execution.awaits():
                return []
            return self._go_on(self._execution)
        if self._ballot is not None:
            return self._count(self._ballot)
        if self.digests.hashes or self._late.keeps is not None:
            return []
        job = self.held or self._late.next()
        if job is None or self._holds(job):
            return []
        self._tally.round = job.round
        return self._start(job) if job.put_off or not job.voters else self._elect(_Ballot(job, job.attempt))

    def _start(self, job: ReadyRound) -> list[Effect]:
        """Begins a round of which it is known whose contributions it has, or which this server decides alone."""
        if self._ballot is None and (failed := self._refused(job, None)) is not None:
            return failed
        if self._rounds.backlog.behind and not job.put_off:
            return self._late.put_off(job)
        execution = self._execution = Execution(job, self._kernels, self._tally.timer(job))
        self._assigned = {}
        if job.commit is Commit.ATOMIC:
            return self._go_on(execution)
        begins = self._answers.begin(execution, self._rounds.waiters(job))
        return [Work("arrays", _tell, (begins,), then=partial(self._told, execution))]

    # ---- Rounds of several servers ----

    def _elect(self, ballot: _Ballot) -> list[Effect]:
        """Votes in a round, once it is known whether it can run: if it may refuse a value, after a trial run.

        A round that streams runs as its contributions come, on trial, since its vote says whose are whole.
        """
        job, self._ballot = ballot.job, ballot
        if job.tries and job.error is None and ballot.trial is None:
            return self._start(job)
        if not job.tries and job.error is None:  # else some servers would apply it, and others could not
            job = replace(job, error=operands_differ(job))
            self._ballot = ballot = replace(ballot, job=job)
        vote = job.vote(self._rounds.votes.job, ballot.attempt, self._rounds.strands[None].last)
        self._voted = self._tally.clock()
        self._tally.votes["sent"] += len(job.voters) - 1
        return self._rounds.votes.cast(vote, job.voters, self.digests.say(job.voters)) + self._count(ballot)

    def _count(self, ballot: _Ballot) -> list[Effect]:
        """Goes on with a round once all servers have voted; until then nothing of it is visible."""
        job = ballot.job
        verdict = self._rounds.votes.verdict(job.round, ballot.attempt, job.voters)
        if verdict is None:
            return []
        self._ballot = None
        self._tally.voted(job, self._voted)
        trial, agreed = ballot.trial, job.only(verdict.whole)
        if verdict.error is not None:
            error = verdict.error
            return self._finish(trial, False, lambda: self._close(job, trial, *self._rounds.fail(job, error)))
        if verdict.torn:
            return self._again(ballot, None if trial is None else trial.execution, ballot.attempt + 1)
        if agreed.is_short and not (verdict.unanimous or verdict.repeated):
            self._rounds.gather(job, ballot.attempt + 1)  # nothing was tried: what is waits for all
            return self.next()
        if not agreed.parts:
            void = partial(self._rounds.complete, agreed, ReturnedValues())
            return self._finish(trial, False, lambda: self._close(agreed, trial, *void()))
        if job.prepared.revotes and not verdict.unanimous:  # somebody has to run it again, and may then fail
            if trial is not None and agreed.parts != job.parts:
                if job.commit is Commit.PROGRESSIVE:
                    return self._again(ballot, trial.execution, ballot.attempt + 1, verdict.whole)
                return self._finish(trial, False, lambda: self._elect(_Ballot(agreed, ballot.attempt + 1)))
            return self._elect(_Ballot(agreed, ballot.attempt + 1, trial))
        if trial is None:
            return self._start(agreed)
        if agreed.plan.nonfinite == "raise" and agreed.accused:
            return self._finish(trial, False, lambda: self._refused(agreed, trial) or [])
        return self._finish(trial, not agreed.skipped, lambda: self._apply(agreed, trial))

    def _finish(self, trial: _Trial | None, applied: bool, then: Callable[[], list[Effect]]) -> list[Effect]:
        """Goes on once a trial run has ended its rounds of dynamic tables, which is array work.

        So it is to hold tables for a checkpoint, or to put restored ones in their place: nobody may look at them then.
        """
        if trial is None or not (trial.execution.open or (applied and _takes_tables(trial.execution.job, self._store))):
            return then()
        execution, self._awaits = trial.execution, None
        self._execution = execution
        return [Work("arrays", execution.finish, (applied,), then=partial(self._finished, execution, then))]

    def _finished(
        self, execution: Execution, then: Callable[[], list[Effect]], _: None, error: PSError | None, now: float
    ) -> list[Effect]:
        if execution is not self._execution:
            return []
        if error is not None:
            return self._break(execution, error, now)
        self._execution = None
        return then()

    def _apply(self, agreed: ReadyRound, trial: _Trial) -> list[Effect]:
        """A trial run becomes the round."""
        if not agreed.skipped:
            change = self._store.exchange if agreed.commit is Commit.PROGRESSIVE else self._store.commit
            change(trial.assigned, trial.execution.missed)
        ready, execution = {} if agreed.skipped else trial.ready, trial.execution
        return [Run(execution.close), *self._end(execution, ready, None, self._tally.clock())]

    def _refused(self, job: ReadyRound, trial: _Trial | None) -> list[Effect] | None:
        """Fails a round of which it is known now that a contribution has NaN or infinity, if its plan asks for that."""
        error = self._nonfinite.refused(job, self._tally)
        return None if error is None else self._close(job, trial, *self._rounds.fail(job, error))

    def _close(self, job: ReadyRound, trial: _Trial | None, record: Record, waiters: list[Waiter]) -> list[Effect]:
        """A round is over that has changed nothing."""
        self._store.end_loan()
        self._answers.drop()
        self._tally.void(job, record, self._rounds.last)
        ends = [] if trial is None else [Run(trial.execution.close)]
        return [*ends, *self._answer(record, waiters)]

    def _answer(self, record: Record, waiters: list[Waiter]) -> list[Effect]:
        """Answers the members of a round that is over, but for those whose answers have to wait."""
        return self.replies(record, self._waiters.hold(record, waiters))

    def _again(self, ballot: _Ballot, ran: Execution | None, attempt: int, agreed: Agreed = None) -> list[Effect]:
        """Drops a run, and asks for its contributions once more: others count than it has.

        Args:
            ballot: the round.
            ran: its run, which may still be in the thread for arrays; None where there was none.
            attempt: the number of its next vote.
            agreed: the sessions that its votes have left; None where anybody may count.
        """
        self._store.end_loan()
        self._execution = self._awaits = self._ballot = None
        self._answers.drop()
        log.debug("round %d is repeated, because a worker was lost during it", ballot.job.round)
        ends = [] if ran is None else [Run(ran.close)]
        return [*self._rounds.again(ballot.job, attempt, agreed), *ends, *self.next()]

    def _holds(self, job: ReadyRound) -> bool:
        """Returns True if a round must wait: it would leave too many old values to a checkpoint."""
        waited, self.held = self.held, job if self._snapshots.blocks(job.prepared.replaces) else None
        if self.held and not waited:
            log.info("round %d waits until more of a checkpoint is written (--snapshot-limit)", job.round)
        return self.held is not None

    def _go_on(self, execution: Execution, follows: bool = False) -> list[Effect]:
        """Returns the next step of the running round, or the payload it has to wait for."""
        self._awaits = execution.awaits()
        if self._awaits is not None:
            return [self._awaits]
        if not execution.begun:  # nobody reads half a round
            exchanges = self._ballot is not None and execution.job.commit is Commit.PROGRESSIVE
            self._store.lend(execution.job.prepared.writes, exchanges)
            self._store.note_tables(execution.job.prepared.row_tables)
        # What may come to nothing writes nowhere.
        in_place = self._ballot is None and not execution.job.skipped
        step = execution, self._store.beside(execution.reads(), execution.job.plan.restore is not None), in_place
        then, brief = partial(self._commit, execution), execution.job.is_brief(self._kernels)
        return [Work("arrays", self._step, step, then=then, follows=follows, brief=brief)]

    # ---- Array work, without the lock ----

    def _step(
        self, execution: Execution, reads: Collection[int], in_place: bool
    ) -> tuple[dict[int, Array], dict[int | Ref, Array]]:
        """Runs one step. Drops the values afterwards, so that the next step may write in place.

        Nobody else changes the values that it reads, or can get those that it writes: they are lent. This thread may
        have held some until now, to answer the round before.
        """
        began = self._tally.clock()
        alone = self._store.alone(reads) if in_place else frozenset[int]()  # before there is one who holds them
        held = self._store.held_of(reads, alone) if in_place else {}
        values = self._store.values_of(reads)
        values |= {id: self._assigned[id] for id in self._assigned.keys() & values.keys()}
        missed = self._store.missed_of(reads)
        tensors = self._store.tables_of([*reads, *execution.job.prepared.tables])
        tables = StepTables(tensors, self._store.room(), not in_place) if tensors else NO_TABLES
        try:
            return execution.step(values, alone, self._store.take_spare, missed, held, tables)
        finally:
            values.clear()
            execution.ran += self._tally.ran(execution.job, began)

    # ---- What came of it ----

    def _told(self, execution: Execution, _: None, error: PSError | None, now: float) -> list[Effect]:
        if execution is not self._execution:
            return []  # all calls failed when the job was started anew
        return self._go_on(execution, follows=True) if error is None else self._break(execution, error, now)

    def _commit(
        self,
        execution: Execution,
        made: tuple[Mapping[int, Array], Mapping[int | Ref, Array]] | None,
        error: PSError | None,
        now: float,
    ) -> list[Effect]:
        """Takes the results of a step. The last step ends the round, and so does a failed one."""
        if execution is not self._execution:
            return []
        try:
            return self._take(execution, *(made or ({}, {})), error, now)
        except Exception as bug:  # our bug: it must reach the members as an error, not as silence
            log.exception("round %d failed", execution.job.round)
            return self._break(execution, PSError(f"internal error: {bug!r}; see the server's log"), now)

    def _take(
        self,
        execution: Execution,
        assigned: Mapping[int, Array],
        ready: Mapping[int | Ref, Array],
        error: PSError | None,
        now: float,
    ) -> list[Effect]:
        over = error is not None or execution.done
        if over and error is None:
            assigned, error = self._restores.among(execution.job, assigned)
        if self._ballot is not None:
            self._assigned |= assigned
        elif execution.job.skipped:
            ready = {}  # the variables stay, and what is given is in the record
        elif error is None:
            self._store.commit(assigned, execution.missed)
        effects = self._answers.put(ready)
        if over and self._ballot is not None:
            return effects + self._try(self._ballot, execution, ready, error)
        if execution.job.plan.restore is not None:
            self._nonfinite.restore(assigned)
        if not over:
            return effects + self._go_on(execution, follows=True)
        return [*effects, Run(execution.close), *self._end(execution, ready, error, now)]

    def _try(
        self, ballot: _Ballot, execution: Execution, ready: Mapping[int | Ref, Array], error: PSError | None
    ) -> list[Effect]:
        """A trial run is over, which has changed nothing: now this server can vote."""
        self._execution = None
        trial, self._assigned = _Trial(execution, self._assigned, ready), {}
        return self._elect(_Ballot(replace(ballot.job, error=error), ballot.attempt, trial))

    def _break(self, execution: Execution, error: PSError, now: float) -> list[Effect]:
        """Ends a round after a bug: it is unknown how far it came."""
        self._answers.drop()
        if not (execution.job.put_off or self._rounds.runs(execution.job)):
            self._execution = None
            return []
        return self._end(execution, {}, self._fail_halfway(execution.job, error), now)

    def _fail_halfway(self, job: ReadyRound, error: PSError) -> PSError:
        self.broken = _halfway(job, error)
        return self.broken

    def _end(
        self, execution: Execution, ready: Mapping[int | Ref, Array], error: PSError | None, now: float
    ) -> list[Effect]:
        """Ends the round; `ready` are values that are on the host already."""
        job = execution.job
        self._store.end_loan()
        if job.put_off:
            self._execution = None
            self._late.made(execution, error)
            return self.digests.over(execution, error)
        effects = self._rounds.unused(job)
        if error is None:
            warnings = self._nonfinite.judge(job, execution.found, self._tally)
            dropped = sorted(execution.contributions.dropped)
            record, waiters = self._rounds.complete(job, execution.given, dropped, warnings)
            effects += self._restores.ran(job)  # first: members that are answered may look at the files
            effects += self._snapshots.freeze(job)
        else:
            # Of what several servers have agreed on, none may do otherwise.
            if (execution.halfway or job.voters) and self.broken is None:
                error = self._fail_halfway(job, error)
            log.warning("round %d failed; its workers raise the whole error: %.160s", job.round, error)
            record, waiters = self._rounds.fail(job, error)
        traced = self._tally.over(job, record, self._rounds.last, execution.ran, now)
        self._execution = None
        waiters = self._waiters.hold(record, waiters)
        found = self._rounds.last + 1, ready, execution.lookups.found
        replies = self._answers.replies(record, waiters, self.broken, *found)
        self._answers.drop()
        return [*effects, *replies, Run(self._tally.answered, (now, traced)), *self.digests.over(execution, error)]


def _tell(begins: Sequence[Run]) -> None:
    """Hands the payloads of their answers to members, before the first step. Array work, without the lock."""
    for begin in begins:
        begin.call(*begin.args)


def _takes_tables(job: ReadyRound, store: Store) -> bool:
    """Returns True if a round holds or replaces dynamic tables, beside what it does in them."""
    return bool((job.plan.snapshot or job.plan.restore) and store.tables())


def _halfway(job: ReadyRound, error: PSError) -> PSError:
    return ServerLost(
        f"round {job.round} failed after it had updated some of the variables ({error}); restart from a checkpoint",
        error.task,
    )
