"""The runner: runs rounds, one after the other, and answers their members.

A small round runs once all contributions are whole, and commits all or nothing. A large round streams: each variable is
updated, and its value sent back, once all contributions to it are there, while others are still on their way in both
directions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from psserver.effects import Effect, Run, Then, Work
from psserver.execution.execution import Execution, operands_differ
from psserver.plans.round import Commit, ReadyRound, Record, ReturnedValues
from psserver.programs.kernels.kernels import Kernels
from psserver.rounds.answers import Answers
from psserver.rounds.backlog import keep
from psserver.rounds.participants import Hooks, RoundParticipant
from psserver.rounds.pending_round import Waiter
from psserver.rounds.rounds import Rounds
from psserver.rounds.steps import Running, StepRunner
from psserver.state.counters import ServerCounters
from psserver.state.variables import Store
from pswire.api import Begun, Contribution, RoundReply
from pswire.errors import PSError, ServerLost

log = logging.getLogger("psserver")

Agreed = Set[int] | None
"""The sessions that votes have left; None where anybody may count."""


# ---- The phases of a round that has begun. `PendingRound` has what is before, `Running` is one of them. ----


@dataclass(frozen=True)
class Blocked:
    """A round that could begin, and that a participant blocks."""

    job: ReadyRound


@dataclass(frozen=True)
class Deciding:
    """A round that several servers have to agree on.

    Attributes:
        job: the round, with the contributions that are whole here, less those that earlier votes have left out.
        attempt: how many votes there were before.
        trial: its run, whose results nobody sees; None where it runs once it is decided.
        since: the time at which this server voted.
    """

    job: ReadyRound
    attempt: int = 0
    trial: Running | None = None
    since: float = 0.0


@dataclass(frozen=True)
class Deferring:
    """A round that is put off: its contributions are copied."""

    job: ReadyRound


@dataclass
class Closing:
    """A round is over, and participants have array work to do before the next one begins; `left` pieces of it."""

    left: int


Phase = Blocked | Deciding | Running | Deferring | Closing


class Runner:
    """The running round. Guarded by the core's lock.

    Args:
        store, rounds: the state that a round reads and changes.
        kernels: run its programs.
        tally: counts rounds.
        hold: holds back answers of a round that is over which have to wait; returns those that may go.
        participants: the features that take part in rounds, in order.

    Attributes:
        broken: the error of a round that failed halfway and left variables unusable; None until then, and in a new job.
    """

    def __init__(
        self,
        store: Store,
        rounds: Rounds,
        kernels: Kernels,
        tally: ServerCounters,
        hold: Callable[[Record, list[Waiter]], list[Waiter]],
        participants: Sequence[RoundParticipant] = (),
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._kernels = kernels
        self._tally = tally
        self._hold = hold
        self._hooks = Hooks(participants)
        self._answers = Answers(store)
        self._steps = StepRunner(store, kernels, tally, self._answers, self._hooks, self._ran, self._break)
        self._phase: Phase | None = None
        self.broken: PSError | None = None

    def drop(self) -> None:
        """Leaves a round; nothing of it counts."""
        if isinstance(self._phase, Running):
            self._phase.dropped = True
        self._phase = None
        self._answers.drop()

    @property
    def phase(self) -> Phase | None:
        """The phase of the round that has begun; None if there is none."""
        return self._phase

    def listen(self, said: Contribution, future: Future[RoundReply], begun: Begun) -> list[Effect]:
        """Registers a callback for when the answer to a contribution begins to stream."""
        plan = self._rounds.plans.get(said.plan_id)
        if plan is not None and not plan.streams:
            return []  # its answers are sent when they are whole
        runs = isinstance(self._phase, Running) and self._phase.job.is_of(said)
        return self._answers.listen(said, future, begun, runs)

    def replies(self, record: Record, waiters: Sequence[Waiter]) -> list[Effect]:
        """Returns answers with the wanted variables as they are now, before the next round."""
        return self._answers.replies(record, waiters, self.broken, self._rounds.last + 1)

    def next(self) -> list[Effect]:
        """Begins the next round that can run, or goes on with the one that has begun once it can."""
        phase = self._phase
        if phase is None:
            job = self._rounds.next_job()
        elif isinstance(phase, Running):
            if phase.execution.drop(self._rounds.fenced) and phase.on_trial:
                return self._again(phase.job, phase, phase.job.attempt)
            return self._steps.look(phase)
        elif isinstance(phase, Deciding):
            return self._count(phase)
        elif isinstance(phase, Blocked):
            job = phase.job
        else:
            return []
        if job is None:
            return []
        for blocks in self._hooks.blocks:
            if blocks(job):
                self._phase = Blocked(job)
                return []
        self._phase, self._tally.round = None, job.round
        return self._start(job) if job.put_off or not job.voters else self._elect(Deciding(job, job.attempt))

    def _start(self, job: ReadyRound) -> list[Effect]:
        """Begins a round of which it is known whose contributions it has, or which this server decides alone."""
        refusal = self._refusal(job)
        if refusal is not None:
            return self._fail(job, None, refusal)
        other = next((share.said.plan_id for share in job.merged if share.said.plan_id != job.plan.id), None)
        return self._run(job, False) if other is None else self._make_up(job, other)

    def _make_up(self, job: ReadyRound, plan_id: bytes) -> list[Effect]:
        """Applies late contributions to another plan before a round, which is to have them in what it saves."""
        merged = tuple(share for share in job.merged if share.said.plan_id == plan_id)
        rest = tuple(share for share in job.merged if share.said.plan_id != plan_id)
        made = replace(job, prepared=self._rounds.plans[plan_id], parts=(), merged=merged)
        before = replace(job, merged=rest)
        self._rounds.late.over(merged)
        if self._refusal(made) is not None:
            log.warning("late contributions with NaN or infinity are not applied before round %d", job.round)
            return self._start(before)
        running = self._phase = Running(Execution(made, self._kernels), before=before)
        return self._steps.go_on(running)

    def _made_up(self, running: Running, before: ReadyRound, error: PSError | None) -> list[Effect]:
        """Late contributions are applied, or have failed: the round for whose sake it was done goes on."""
        self._store.end_loan()
        self._phase = None
        if error is not None:
            log.warning("late contributions failed before round %d: %.160s", before.round, error)
            if running.execution.halfway or before.voters:
                self._fail_halfway(before, error)
        else:
            for warns in self._hooks.warns:
                warns(running.execution)
        return self._start(before)

    def _run(self, job: ReadyRound, on_trial: bool, attempt: int = 0) -> list[Effect]:
        if self._rounds.backlog.behind and not job.put_off:
            deferring = self._phase = Deferring(job)
            return [Work("arrays", keep, (job,), then=partial(self._kept, deferring))]
        running = self._phase = Running(Execution(job, self._kernels, self._tally.timer(job)), on_trial, attempt)
        streams = job.commit is Commit.PROGRESSIVE
        return self._steps.begin(running, self._rounds.waiters(job)) if streams else self._steps.go_on(running)

    # ---- Rounds of several servers ----

    def _elect(self, ballot: Deciding) -> list[Effect]:
        """Votes in a round, once it is known whether it can run: if it may refuse a value, after a trial run.

        A round that streams runs as its contributions come, on trial, since its vote says whose are whole.
        """
        job, attempt, trial = ballot.job, ballot.attempt, ballot.trial
        if job.error is None and job.tries:
            if trial is None:
                return self._run(job, True, attempt)
        elif job.error is None and (error := operands_differ(job)) is not None:
            job = replace(job, error=error)  # else some servers would apply it, and others could not
        vote = job.vote(self._rounds.votes.job, attempt, self._rounds.sequences[None].last)
        ballot = self._phase = Deciding(job, attempt, trial, self._tally.clock())
        self._tally.votes["sent"] += len(job.voters) - 1
        beside = {server: digest for tells in self._hooks.tells for server, digest in tells(job.voters).items()}
        return self._rounds.votes.cast(vote, job.voters, beside) + self._count(ballot)

    def _count(self, ballot: Deciding) -> list[Effect]:
        """Goes on with a round once all servers have voted; until then nothing of it is visible."""
        job, trial, attempt = ballot.job, ballot.trial, ballot.attempt + 1
        verdict = self._rounds.votes.verdict(job.round, ballot.attempt, job.voters)
        if verdict is None:
            return []
        self._phase = None
        self._tally.voted(job, ballot.since)
        agreed = job.only(verdict.whole)
        if verdict.error is not None:
            return self._fail(job, trial, verdict.error)
        if verdict.torn:
            return self._again(job, trial, attempt)
        if not (verdict.unanimous or verdict.repeated) and agreed.is_short:
            self._rounds.gather(job, attempt)  # nothing was tried: what is waits for all
            return self.next()
        agreed = self._rounds.late.agree(agreed, ballot.attempt)
        if not agreed.parts:
            agreed = replace(agreed, merged=())
            void = partial(self._rounds.complete, agreed, ReturnedValues())
            return self._finish(trial, False, lambda: self._close(agreed, trial, *void()))
        if job.prepared.revotes and not verdict.unanimous:  # somebody has to run it again, and may then fail
            if trial is None or agreed.parts == job.parts:
                return self._elect(Deciding(agreed, attempt, trial))
            if job.commit is Commit.PROGRESSIVE:
                return self._again(job, trial, attempt, verdict.whole)
            return self._finish(trial, False, lambda: self._elect(Deciding(agreed, attempt)))
        if trial is None:
            return self._start(agreed)
        if (refusal := self._refusal(agreed)) is not None:
            return self._fail(agreed, trial, refusal)
        return self._finish(trial, not agreed.skipped, lambda: self._apply(agreed, trial))

    def _finish(self, trial: Running | None, applied: bool, then: Callable[[], list[Effect]]) -> list[Effect]:
        """Goes on once a trial run has ended its rounds of dynamic tables, which is array work.

        So it is to hold tables for a checkpoint, or to put restored ones in their place: nobody may look at them then.
        """
        execution = None if trial is None else trial.execution
        if execution is None or not (execution.open or (applied and _takes_tables(execution.job, self._store))):
            return then()
        running = self._phase = Running(execution)
        return [Work("arrays", execution.finish, (applied,), then=partial(self._finished, running, then))]

    def _finished(
        self, running: Running, then: Callable[[], list[Effect]], _: None, error: PSError | None, now: float
    ) -> list[Effect]:
        if running.dropped:
            return []
        if error is not None:
            return self._break(running, error, now)
        self._phase = None
        return then()

    def _apply(self, agreed: ReadyRound, trial: Running) -> list[Effect]:
        """A trial run becomes the round."""
        if agreed.skipped:
            trial.ready = {}
        else:
            change = self._store.exchange if agreed.commit is Commit.PROGRESSIVE else self._store.commit
            change(trial.assigned)
        return [*trial.execution.ends(), *self._end(trial, None, self._tally.clock())]

    def _refusal(self, job: ReadyRound) -> PSError | None:
        """Returns why a participant refuses a round whose contributions are known now; None if none does."""
        for refuses in self._hooks.refuses:
            if (error := refuses(job)) is not None:
                return error
        return None

    def _fail(self, job: ReadyRound, trial: Running | None, error: PSError) -> list[Effect]:
        """Ends a round of which nothing is applied with an error."""
        return self._finish(trial, False, lambda: self._close(job, trial, *self._rounds.fail(job, error)))

    def _close(self, job: ReadyRound, trial: Running | None, record: Record, waiters: list[Waiter]) -> list[Effect]:
        """A round is over that has changed nothing."""
        self._store.end_loan()
        self._answers.drop()
        self._tally.void(job, record, self._rounds.last)
        ends = [] if trial is None else trial.execution.ends()
        return [*ends, *self.replies(record, self._hold(record, waiters))]

    def _again(self, job: ReadyRound, ran: Running | None, attempt: int, agreed: Agreed = None) -> list[Effect]:
        """Drops a run, and asks for its contributions once more: others count than it has.

        Args:
            job: the round.
            ran: its run, which may still be in the thread for arrays; None where there was none.
            attempt: the number of its next vote.
            agreed: the sessions that its votes have left; None where anybody may count.
        """
        self._store.end_loan()
        self.drop()
        log.debug("round %d is repeated, because a worker was lost during it", job.round)
        ends = [] if ran is None else ran.execution.ends()
        return [*self._rounds.again(job, attempt, agreed), *ends, *self.next()]

    # ---- The end ----

    def _ran(self, running: Running, error: PSError | None, now: float) -> list[Effect]:
        """All steps of a round have run. One on trial has changed nothing: now this server can vote."""
        if running.before is not None:
            return self._made_up(running, running.before, error)
        if running.on_trial:
            return self._elect(Deciding(replace(running.job, error=error), running.attempt, running))
        return [*running.execution.ends(), *self._end(running, error, now)]

    def _break(self, running: Running, error: PSError, now: float) -> list[Effect]:
        """Ends a round after a bug: it is unknown how far it came."""
        self._answers.drop()
        running.ready = {}
        if not (running.job.put_off or self._rounds.runs(running.job)):
            self._phase = None
            return []
        return self._end(running, self._fail_halfway(running.job, error), now)

    def _fail_halfway(self, job: ReadyRound, error: PSError) -> PSError:
        """Notes that a round has failed of which others have some; returns its error."""
        why = f"round {job.round} failed after it had updated some of the variables ({error})"
        self.broken = ServerLost(f"{why}; restart from a checkpoint", error.task)
        return self.broken

    def _end(self, running: Running, error: PSError | None, now: float) -> list[Effect]:
        """Ends a round that was applied, or has failed."""
        execution, job = running.execution, running.job
        self._store.end_loan()
        if job.put_off:
            self._phase = None
            return self._made(execution, error)
        effects = self._rounds.unused(job)
        if error is None:
            warnings = [line for warns in self._hooks.warns for line in warns(execution)]
            dropped = sorted(execution.dropped)
            record, waiters = self._rounds.complete(job, execution.given, dropped, warnings)
            for committed in self._hooks.committed:
                effects += committed(job, running.given)
        else:
            # Of what several servers have agreed on, none may do otherwise.
            if (execution.halfway or job.voters) and self.broken is None:
                error = self._fail_halfway(job, error)
            log.warning("round %d failed; its workers raise the whole error: %.160s", job.round, error)
            record, waiters = self._rounds.fail(job, error)
        traced = self._tally.over(job, record, self._rounds.last, execution.ran, now)
        self._phase = None
        found = self._rounds.last + 1, running.ready, execution.lookups.found
        effects += self._answers.replies(record, self._hold(record, waiters), self.broken, *found)
        self._answers.drop()
        effects.append(Run(self._tally.answered, (now, traced)))
        return effects if error is not None else effects + self._closing(execution)

    def _closing(self, execution: Execution) -> list[Effect]:
        """Returns array work that participants have before the next round begins."""
        works = [work for closes in self._hooks.closes if (work := closes(execution)) is not None]
        if works:
            closing = self._phase = Closing(len(works))
            for work in works:
                work.then = partial(self._closed, closing, work.then)
        return [*works]

    def _closed(
        self, closing: Closing, then: Then | None, result: object, error: PSError | None, now: float
    ) -> list[Effect]:
        if closing is not self._phase:
            return []
        closing.left -= 1
        if not closing.left:
            self._phase = None
        return [] if then is None else then(result, error, now)

    # ---- Rounds that are put off ----

    def _kept(
        self, deferring: Deferring, found: tuple[ReadyRound, ReturnedValues] | None, error: PSError | None, now: float
    ) -> list[Effect]:
        """The contributions of a round are copied: it is over for its members, whose servers have agreed on it."""
        if deferring is not self._phase:
            return []  # the job was started anew
        job, self._phase = deferring.job, None
        effects = self._rounds.unused(job)
        if found is None:
            failed = self._fail_halfway(job, error or PSError("the round's gradients could not be kept"))
            record, waiters = self._rounds.fail(job, failed)
        else:
            record, waiters = self._rounds.complete(job, found[1])
            self._rounds.backlog.put(found[0])
        traced = self._tally.over(job, record, self._rounds.last, 0.0, now)
        replies = self.replies(record, self._hold(record, waiters))
        return [*effects, *replies, Run(self._tally.answered, (now, traced))]

    def _made(self, execution: Execution, error: PSError | None) -> list[Effect]:
        """A round that was put off is made, or has failed; its members were answered long ago."""
        job, backlog = execution.job, self._rounds.backlog
        backlog.made()
        if error is not None:
            self._fail_halfway(job, error)
            return []
        for warns in self._hooks.warns:
            warns(execution)
        if not backlog.behind:
            log.info("recovered: all rounds up to round %d are applied", job.round)
        return self._closing(execution)


def _takes_tables(job: ReadyRound, store: Store) -> bool:
    """Returns True if a round holds or replaces dynamic tables, beside what it does in them."""
    return bool((job.plan.snapshot or job.plan.restore) and store.tables())
