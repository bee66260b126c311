"""The execution of a round on one server: takes contributions, applies the programs, returns changed values.

A round runs in steps. An atomic round has one step, in which nothing is written in place before the last part that may
fail. A streamed round has a step for each group of contributions that has arrived: each variable is updated, and may be
sent back, while contributions to others still arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from psserver.devices import owned
from psserver.effects import Await, Run
from psserver.execution.call_cutter import CallCutter
from psserver.execution.calls import KernelCall, Ready, Spare
from psserver.execution.compiled import compiled
from psserver.execution.contributions import Contributions, MemberInput
from psserver.execution.lookups import Lookups
from psserver.execution.nonfinite import NonfiniteValues
from psserver.execution.reservation import Call
from psserver.execution.row_calls import RowsCall, undo
from psserver.execution.table_rounds import TableRounds
from psserver.plans.outline import Application, Outline
from psserver.plans.round import Commit, ReadyRound, ReturnedValues
from psserver.programs.kernels.codegen import ASSIGNED, SUMS
from psserver.programs.kernels.kernels import Kernels
from psserver.values.step import StepVariables
from psserver.values.value import Value
from pswire.cluster import Task
from pswire.errors import MemoryLimit, ProgramError, PSError
from pswire.limits import PART_BYTES
from pswire.model.plan import Ref
from pswire.model.rows import Int64s
from pswire.model.tensor import DTYPES, Array

log = logging.getLogger("psserver")


NO_VARIABLES = StepVariables({})
"""Between two steps."""

STEP_BYTES = PART_BYTES
"""Most bytes of one member's contributions in a step of a batch: values go back while later ones are computed."""


class Execution:
    """A running round. Used by one thread at a time.

    Args:
        job: the plan and the contributions, which need not be whole in a streamed round.
        kernels: the kernels of the device where the variables live and the programs run.
        timer: told when a sum apart from kernels began, in monotonic seconds, once it has ended; None for nobody.

    Attributes:
        begun: True once its operands are taken, which fixes the contributors.
        ran: seconds for which its steps ran.
        wanted: numbers of the variables that some member wants back.
        given: the plan's returned values of this server.
        lookups: the rows that members have asked for, once all steps have run.
        found: NaN and infinite values found in the steps so far.
        touched: of each variable of which rows were updated so far these rows, the last ones; of a dynamic table keys.
    """

    def __init__(self, job: ReadyRound, kernels: Kernels, timer: Callable[[float], None] | None = None) -> None:
        self.job = job
        self.begun = False
        self.ran = 0.0
        self._timer = timer
        self.wanted = frozenset[int]().union(*[part.said.want for part in job.parts])
        self._returned: list[Array] = []
        self._rows: list[int] = []
        self.given = ReturnedValues(self._returned, self._rows)
        self.lookups = Lookups(job)
        self.touched: dict[int, Int64s] = {}
        self._progressive = job.commit is Commit.PROGRESSIVE
        self._outline = outline = job.prepared.outline
        self._kernels, self._device = kernels, kernels.device
        self.found = NonfiniteValues(kernels.device)
        self._cuts: CallCutter
        self._written = False
        self._at = self._stop = 0  # the range of the outline's steps that the next step runs
        self._variables = NO_VARIABLES
        self._rounds: TableRounds | None = None  # of dynamic tables
        # Operands and results, and below reductions, that are still to be read.
        self._known: dict[Ref, Any] = {}
        self._reduced: dict[int, Any] = {}
        self._uses, self._readers = dict(outline.uses), dict(outline.readers)

    @cached_property
    def contributions(self) -> Contributions:
        """The members' contributions; a compiled round does not look at them one by one."""
        found = self.found.sent = Contributions(self.job, self._timer)
        return found

    @property
    def dropped(self) -> Set[Task]:
        """Members that were lost before their contributions were whole."""
        return self.found.sent.dropped if self.found.sent else frozenset()

    def drop(self, sessions: Set[int]) -> bool:
        """Stops waiting for incomplete contributions of lost members, as `Contributions.drop`."""
        return bool(sessions) and self.contributions.drop(sessions)

    @property
    def done(self) -> bool:
        """True once all steps have run."""
        return self.begun and self._at == len(self._outline.needs)

    @property
    def halfway(self) -> bool:
        """True if a failure now would leave some variables with its update and others without."""
        return self._written and not self.contributions.abandoned

    @property
    def open(self) -> bool:
        """True if all steps have run, and rounds of dynamic tables wait for `finish`."""
        return self._rounds is not None

    def finish(self, applied: bool) -> None:
        """Commits or undoes what a trial run has done in dynamic tables, if it has, and takes the rows to look up.

        Does nothing where no table waits for it.

        Args:
            applied: False if nothing of the round is applied.
        """
        if not self.open:
            return
        with _told(self.job), self._device.scope():
            self._end_tables(applied)
            self.lookups.take(self._variables, self._device)
            self._variables = NO_VARIABLES

    def ends(self) -> list[Run]:
        """Returns what discards contributions that are left, or still arrive; nothing where all were there."""
        return [Run(part.payload.discard) for part in self.job.parts] if self._progressive else []

    # ---- What the next step is ----

    def awaits(self) -> Await | None:
        """Returns the payload and offset that the next step waits for; None if it can run."""
        for sender, end in self._ends() if self._progressive else ():
            if sender.part.payload.end < end and not sender.gone:
                return Await(sender.part.payload, end)
        return None

    def _ends(self) -> Iterator[tuple[MemberInput, int]]:
        """Yields, for each sender, the offset that its payload must reach for the next step."""
        for sender in self.contributions.senders:
            if not self.begun:
                yield sender, sender.places.operands
            elif not self.done:
                yield sender, max(map(sender.end, self._outline.needs[self._at]), default=0)

    def reads(self) -> Collection[int]:
        """Decides the next step; returns the numbers of the variables that it reads, before the first step all.

        Does not block: it is called under the core's lock.
        """
        if not self.begun:
            self._stop = 0 if self._progressive else len(self._outline.needs)
            here = self.lookups.variables | self.job.prepared.tables
            return self._outline.reads | here if here else self._outline.reads
        self._stop = self._at + self._count()
        read = {id for application in self._applications(self._at, self._stop) for id, *_ in application.variables}
        return read | self.lookups.variables if self._stop == len(self._outline.needs) else read

    def _count(self) -> int:
        """Returns how many of the outline's steps run next: those of a batch that have arrived, up to `STEP_BYTES`."""
        batch = self._cuts.batches.get(self._at)
        if batch is None:
            return 1
        rows = slice(self._at - batch.first, None)
        there = self.contributions.reached(batch.reductions[rows])
        return max(1, min(there, int(np.searchsorted(np.cumsum(batch.nbytes[rows]), STEP_BYTES, side="right"))))

    def _applications(self, at: int, stop: int) -> Sequence[Application]:
        return self._outline.applications[at:stop]

    # ---- One step ----

    def step(
        self, variables: StepVariables, spare: Spare, room: Callable[[], int] = lambda: -1, on_trial: bool = False
    ) -> tuple[dict[int, Value], dict[int | Ref, Array]]:
        """Runs the next step, as `reads` has decided.

        Args:
            variables: those that it reads.
            spare: returns an array for the new value of a variable, or None: then it is allocated.
            room: returns the bytes by which dynamic tables may grow; -1 without a limit.
            on_trial: True if the step may come to nothing when it is over.

        Returns:
            Assigned values; and final values on the host: wanted variables by number, and returned
            values.

        Raises:
            PSError: why the round cannot run; it has changed nothing, unless it is `halfway`.
        """
        if not on_trial and (ready := self._run_compiled(variables)) is not None:
            return variables.assigned, ready
        if not self.contributions.senders:
            # All members were restarted while the last round of the earlier ones was still open.
            self._returned += [np.zeros(spec.shape, DTYPES[spec.dtype]) for _, spec in self.job.prepared.given]
            self._returned += self._give_rows()
            self.begun, self._at = True, len(self._outline.needs)
            return {}, {}
        with _told(self.job), self._device.scope():
            self._variables = variables
            if not self.begun:
                self._begin()
            ends = self._stop == len(self._outline.needs)
            if ends and self.job.prepared.tables:  # such rounds are atomic, and have one step
                self._rounds = self._cuts.tables = self._begun_tables(room(), on_trial)
            try:
                ready = self._make(self._at, self._stop, spare)
            except BaseException:
                self._end_tables(False)
                raise
            self.found.settle()  # before contributions are released
            if not on_trial or self.job.skipped:
                self._end_tables(not self.job.skipped)
            if ends and not self.open:
                self.lookups.take(self._variables, self._device)
            if self._progressive:
                self.contributions.let_go(self._outline.needs[self._at : self._stop])
            self._at = self._stop
            if not self.open:
                self._variables = NO_VARIABLES
            return variables.assigned, ready

    def _run_compiled(self, variables: StepVariables) -> dict[int | Ref, Array] | None:
        """Runs the round as it was compiled; returns the values that are final, None where it is not compiled."""
        job = self.job
        if self._progressive or job.skipped or not job.is_plain:
            return None
        try:
            found = compiled(job.prepared, job.parts, self._kernels)
            seen = None if found is None else found.run(job.parts, variables)
        except Exception as error:
            raise _told_error(job, error) from error
        if seen is None:
            return None
        suspects, unsure = _suspicious(self._outline, seen.flags) if seen.flags else ((), ())
        if suspects:
            self.contributions.settle()
        for index in suspects:
            self.found.accuse(index)
        for id in unsure:
            self.found.look(Ref("variable", id), variables.value(id))
        self.begun, self._at = True, len(self._outline.needs)
        self._returned += seen.values
        last, assigned = self._outline.last, variables.assigned
        ready: dict[int | Ref, Array] = {id: assigned[id].array for id in self.wanted.intersection(last)}
        return ready | dict(zip(self._outline.given, seen.values, strict=True))

    def _begun_tables(self, room: int, on_trial: bool) -> TableRounds:
        prepared = self.job.prepared
        tables = {id: self._variables.now(id) for id in prepared.tables}
        rounds = TableRounds(prepared, tables, self.contributions, self._kernels.on_host, on_trial)
        rounds.begin(room)
        return rounds

    def _end_tables(self, applied: bool) -> None:
        """Commits or undoes the rounds of dynamic tables, with what calls have written there."""
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            self._written = applied  # a table that cannot end its round is of no use any more
            rounds.end(applied)
            self._written = False

    def _give_rows(self) -> list[Array]:
        """Returns ids and rows that are given back; they come behind all else."""
        rows = [self.contributions.reduced_rows(index) for index in self.job.prepared.given_rows]
        self._rows += [len(one.ids) for one in rows]
        return [array for one in rows for array in one]

    def _begin(self) -> None:
        """Takes the operands; finds the batches, for which it may wait for a kernel."""
        self.contributions.settle()
        self._check_contributed(bool(self.contributions.senders))
        self.contributions.check_rows()
        for application in self._outline.applications:
            self._variables.check(application.variables)  # before anything is written: kernels see addresses only
        self._known.update((ref, self._device.put(operand)) for ref, operand in self.contributions.operands())
        self._cuts = CallCutter(self.job.prepared, self._kernels, self.contributions)
        if self.job.plan.restore is not None:
            self._variables.flush(self._variables.before)
        self.begun = True

    def _check_contributed(self, contributed: bool) -> None:
        """Raises `ProgramError` if all contributors are lost and some data is missing: no variable may change."""
        if self.contributions.abandoned and not contributed:
            raise ProgramError("all workers of the round were lost before their gradients had arrived completely")

    def _make(self, at: int, stop: int, spare: Spare) -> dict[int | Ref, Array]:
        """Runs some of the outline's steps; returns values that are final."""
        if self.contributions.abandoned:
            needs = (index for each in self._outline.needs[at:stop] for index in each)
            self._check_contributed(all(any(weight for weight, _ in self.contributions.of(index)) for index in needs))
        applications = len(self._outline.applications)
        given = self._outline.given[max(at - applications, 0) : max(stop - applications, 0)]
        calls = self._cuts.calls(at, min(stop, applications), self._variables, not self._progressive, spare)
        # What may fail comes before anything is written in place.
        behind = self._give_rows() if stop == len(self._outline.needs) else []
        reduced = {ref: self._on_host(ref) for ref in given if ref.kind == "reduction"}
        self._written |= self._progressive and bool(calls)
        try:
            for call in calls:
                self._run(call)
        except BaseException:
            undo(calls)
            raise
        last, wanted = self._outline.last, self.wanted
        kept = (n for n in self._outline.optional if at <= n < stop and self._cuts.excludes(n))
        unchanged = {id: self._variables.now(id) for n in kept for id in self._outline.applications[n].assigned}
        ready: dict[int | Ref, Array] = {
            id: value.array
            for id, value in {**unchanged, **self._variables.assigned}.items()
            if id in wanted and last.get(id, stop) < stop and value.is_plain
        }
        if self._device.gpu is not None:
            ready = dict(zip(ready, self._device.get_all(list(ready.values())), strict=True))
        returned = [reduced[ref] if ref in reduced else self._on_host(ref) for ref in given]
        self._returned += [*returned, *behind]
        return ready | dict(zip(given, returned, strict=True))

    # ---- Calls of kernels ----

    def _run(self, call: Call) -> None:
        """Runs a call and takes the values that it assigned."""
        if isinstance(call, RowsCall):
            self._run_rows(call)
            return
        applications = self._applications(call.numbers.start, call.numbers.stop)
        if self._variables.is_lazy:
            self._variables.flush({id for application in applications for id, *_ in application.variables})
        suspects: Set[int]
        unsure: Set[int]
        if isinstance(call, Ready):
            assigned = dict(zip(call.assigned, self._variables.values(call.assigned), strict=True))
            seen = call.run(self._kernels.crew, self.contributions.total, self._value)
            suspects, unsure = _suspicious(self._outline, seen)
        else:
            judged = call.judged if isinstance(call, KernelCall) else frozenset[int]()
            found, outputs = call.run(lambda ref: self._value(ref, judged), self._device.xp)
            assigned = {id: self._variables.written(id, owned(array)) for id, array in found.items()}
            self._known.update(zip(applications[0].made, outputs, strict=True))
            suspects, unsure = call.suspects, call.unsure
        self.found.forget(assigned)
        for index in suspects:
            self.found.accuse(index)
        before = self._variables.before
        for id in unsure:
            self.found.look(Ref("variable", id), assigned[id].array, before[id].array)
        for doubt in call.doubts if isinstance(call, KernelCall) else ():
            self.found.doubt(doubt, {id: (assigned[id].array, before[id].array) for id in doubt.variables})
        self._variables.assign(assigned)
        if not self._outline.results:
            return
        for ref in (ref for application in applications for ref in application.read):
            self._readers[ref] -= 1
        for ref in {ref for application in applications for ref in (*application.made, *application.read)}:
            if not self._readers.get(ref):
                del self._known[ref]  # no reader is left

    def _run_rows(self, call: RowsCall) -> None:
        rows = call.rows
        if call.use.keyed and self._rounds is not None:
            assigned, ids = self._rounds.run(call, lambda ref: self._device.get(self._value(ref)))
        else:
            deferred = self._variables.defer(call.use, call.refs, call.ids, self._kernels)
            self._variables.set_aside(call.assigned, call.ids)
            assigned, ids = call.run(self._value, deferred), call.ids
            self._variables.assign({id: self._variables.written(id, array) for id, array in assigned.items()})
        self.touched |= dict.fromkeys(call.assigned, ids)
        self.found.forget(assigned)
        self.found.look_at_rows(call.reduction, rows, assigned, call.use.keyed)

    # ---- Values ----

    def _value(self, ref: Ref, judged: Set[int] = frozenset()) -> Any:
        if ref.kind == "reduction":
            return self._reduction(ref.index, judged)
        if ref.kind != "variable":
            return self._known[ref]
        return self._variables.value(ref.index)

    def _on_host(self, ref: Ref) -> Array:
        return owned(self._device.get(self._value(ref)))

    def _reduction(self, index: int, judged: Set[int]) -> Any:
        """Returns a reduction's value, computed at its first use and dropped at its last.

        So it is still in the processor's cache when it is read, and its memory serves the next one. `judged` are the
        reductions at which their reader looks for NaN and infinity by itself.
        """
        value = self._reduced.pop(index, None)
        if value is None:
            value = self._device.put(self.contributions.value(index, self._device.room))
            if index in self._outline.watched and index not in judged:
                self.found.look(Ref("reduction", index), value)
        self._uses[index] -= 1
        if self._uses[index]:
            self._reduced[index] = value
        return value


def _suspicious(outline: Outline, seen: Sequence[tuple[int, int]]) -> tuple[set[int], set[int]]:
    """Returns the reductions and the variables in which kernels that write in place saw NaN or infinity."""
    flagged = [(outline.applications[number], flags) for number, flags in seen]
    suspects = {index for application, flags in flagged if flags & SUMS for index in application.needs}
    return suspects, {id for application, flags in flagged if flags & ASSIGNED for id in application.assigned}


def operands_differ(job: ReadyRound) -> PSError | None:
    """Returns why a round cannot run whose contributors have sent different operands to this server; None if it can."""
    try:
        if job.prepared.operands:
            Contributions(job).check_operands()
    except Exception as error:
        return _told_error(job, error)
    return None


@contextmanager
def _told(job: ReadyRound) -> Iterator[None]:
    """Turns every exception into a `PSError`: all members of the round wait for an answer, and get the same."""
    try:
        yield
    except Exception as error:
        raise _told_error(job, error) from error


def _told_error(job: ReadyRound, error: Exception) -> PSError:
    if isinstance(error, PSError):
        return _failed(job, type(error), error.message, error.task)
    if isinstance(error, MemoryError):
        return _failed(job, MemoryLimit, f"the server ran out of memory: {error}")
    log.exception("round %d failed", job.round)  # what the verifier cannot know, a device's errors included
    return _failed(job, ProgramError, str(error))


def _failed(job: ReadyRound, kind: type[PSError], why: str, task: str = "") -> PSError:
    return kind(f"{why}; in round {job.round} ({job.section()})", task or str(Task("ps", job.prepared.server)))
