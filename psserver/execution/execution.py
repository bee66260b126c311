"""The execution of a round on one server: takes contributions, applies the programs, returns changed values.

A round runs in steps. An atomic round has one step, in which nothing is written in place before the last part that may
fail. A streamed round has a step for each group of contributions that has arrived: each variable is updated, and may be
sent back, while contributions to others still arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import numpy as np

from psserver.devices import owned
from psserver.effects import Await
from psserver.execution.calls import KernelCall, Ready, Spare
from psserver.execution.contributions import Contributions, Sender
from psserver.execution.nonfinite import NonfiniteValues
from psserver.execution.row_calls import RowsCall, undo
from psserver.execution.step_variables import StepVariables
from psserver.plans.batches import KernelBatch
from psserver.plans.outline import Application
from psserver.plans.round import Commit, ReadyRound
from psserver.programs.kernels.codegen import ASSIGNED, SUMS
from psserver.programs.kernels.kernels import Kernels
from psserver.state.held import Held
from psserver.state.missed import MissedUpdates
from psserver.state.strands import Given
from psserver.state.variables import take_rows
from pswire.cluster import Task
from pswire.errors import MemoryLimit, ProgramError, PSError
from pswire.limits import PART_BYTES
from pswire.model.finite import is_finite, may_be_nonfinite
from pswire.model.plan import Ref
from pswire.model.tensor import DTYPES, Array, TensorSpec, spec_of

log = logging.getLogger("psserver")

Call = KernelCall | Ready | RowsCall

STEP_BYTES = PART_BYTES
"""Most bytes of one member's contributions in a step of a batch: values go back while later ones are computed."""


class Execution:
    """A running round. Used by one thread at a time.

    Args:
        job: the plan and the contributions, which need not be whole in a streamed round.
        kernels: the kernels of the device where the variables live and the programs run.

    Attributes:
        begun: True once its operands are taken, which fixes the contributors.
        ran: seconds for which its steps ran.
        contributions: the members' contributions.
        wanted: numbers of the variables that some member wants back.
        given: the plan's returned values of this server.
        looked_up: for each session that has asked for rows these rows, on the host, once all steps have run.
        found: NaN and infinite values found in the steps so far.
        missed: what rows of variables have missed, where the steps so far have changed that; None for nothing.
    """

    def __init__(self, job: ReadyRound, kernels: Kernels) -> None:
        self.job = job
        self.begun = False
        self.ran = 0.0
        self.contributions = Contributions(job)
        self.wanted = frozenset[int]().union(*[part.said.want for part in job.parts])
        self._returned: list[Array] = []
        self._rows: list[int] = []
        self.given = Given(self._returned, self._rows)
        self.looked_up: dict[int, list[Array]] = {}
        self.missed: dict[int, MissedUpdates | None] = {}
        self._lookups = {part.said.session: part.said.lookups for part in job.parts if part.said.lookups}
        self._tables = frozenset(read.variable for reads in self._lookups.values() for read in reads)
        self._progressive = job.commit is Commit.PROGRESSIVE
        self._outline = outline = job.prepared.outline
        self._kernels, self._device = kernels, kernels.device
        self.found = NonfiniteValues(kernels.device, self.contributions)
        self._batches: Mapping[int, KernelBatch] = {}
        self._written = False
        self._at = self._stop = 0  # the range of the outline's steps that the next step runs
        self._variables = StepVariables({}, frozenset(), {}, {})
        # Operands and results, and below reductions, that are still to be read.
        self._known: dict[Ref, Any] = {}
        self._reduced: dict[int, Any] = {}
        self._uses, self._readers = dict(outline.uses), dict(outline.readers)

    @property
    def done(self) -> bool:
        """True once all steps have run."""
        return self.begun and self._at == len(self._outline.needs)

    @property
    def halfway(self) -> bool:
        """True if a failure now would leave some variables with its update and others without."""
        return self._written and not self.contributions.abandoned

    def close(self) -> None:
        """Discards contributions that are left, or still arrive."""
        for part in self.job.parts if self._progressive else ():
            part.payload.discard()

    # ---- What the next step is ----

    def awaits(self) -> Await | None:
        """Returns the payload and offset that the next step waits for; None if it can run."""
        for sender, end in self._ends() if self._progressive else ():
            if sender.part.payload.end < end and not sender.gone:
                return Await(sender.part.payload, end)
        return None

    def _ends(self) -> Iterator[tuple[Sender, int]]:
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
            return self._outline.reads | self._tables if self._tables else self._outline.reads
        self._stop = self._at + self._count()
        read = {id for application in self._applications(self._at, self._stop) for id, *_ in application.variables}
        return read | self._tables if self._stop == len(self._outline.needs) else read

    def _count(self) -> int:
        """Returns how many of the outline's steps run next: those of a batch that have arrived, up to `STEP_BYTES`."""
        batch = self._batches.get(self._at)
        if batch is None:
            return 1
        rows = slice(self._at - batch.first, None)
        there = self.contributions.reached(batch.reductions[rows])
        return max(1, min(there, int(np.searchsorted(np.cumsum(batch.nbytes[rows]), STEP_BYTES, side="right"))))

    def _applications(self, at: int, stop: int) -> Sequence[Application]:
        return self._outline.applications[at:stop]

    # ---- One step ----

    def step(
        self,
        values: Mapping[int, Any],
        alone: Set[int],
        spare: Spare,
        missed: Mapping[int, MissedUpdates] = MappingProxyType({}),
        held: Mapping[int, Held] = MappingProxyType({}),
    ) -> tuple[dict[int, Array], dict[int | Ref, Array]]:
        """Runs the next step, as `reads` has decided.

        Args:
            values: the variables that it reads, by number.
            alone: variables whose arrays nobody else holds.
            spare: returns an array for the new value of a variable, or None: then it is allocated.
            missed: what rows of these variables have missed.
            held: who holds variables that nobody else holds, and has rows set aside before they are written.

        Returns:
            Assigned values, on the device; and final values on the host: wanted variables by number, and returned
            values.

        Raises:
            PSError: why the round cannot run; it has changed nothing, unless it is `halfway`.
        """
        if not self.contributions.senders:
            # All members were restarted while the last round of the earlier ones was still open.
            self._returned += [np.zeros(spec.shape, DTYPES[spec.dtype]) for _, spec in self.job.prepared.given]
            self._give_rows()
            self.begun, self._at = True, len(self._outline.needs)
            return {}, {}
        with self._told(), self._device.scope():
            variables = self._variables = StepVariables(values, alone, missed, held)
            if not self.begun:
                self._begin()
            ready = self._make(self._at, self._stop, alone, spare)
            self.found.settle()  # before contributions are released
            if self._stop == len(self._outline.needs):
                with suppress(
                    MemoryError
                ):  # the variables are written: then each member's rows are taken by themselves
                    self._look_up()
            if self._progressive:
                self.contributions.let_go(self._outline.needs[self._at : self._stop])
            self.missed |= variables.changed
            self._variables, self._at = StepVariables({}, frozenset(), {}, {}), self._stop
            return variables.assigned, ready

    def _look_up(self) -> None:
        """Takes the rows that members have asked for, as they are after the round."""
        for session, reads in self._lookups.items():
            after, xp = not self.job.skipped, self._device.xp
            taken = [self._variables.rows(read.variable, read.numbers(), after, xp) for read in reads]
            self.looked_up[session] = list(map(self._device.get, taken))

    def _give_rows(self) -> None:
        for index in self.job.prepared.given_rows:
            rows = self.contributions.reduced_rows(index)
            self._returned += rows
            self._rows.append(len(rows.ids))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns every exception into a `PSError`: all members of the round wait for an answer, and get the same."""
        task = str(Task("ps", self.job.prepared.server))
        try:
            yield
        except PSError as error:
            raise type(error)(self._failed(error.message), error.task or task) from error
        except MemoryError as error:
            raise MemoryLimit(self._failed(f"the server ran out of memory: {error}"), task) from error
        except Exception as error:  # what the verifier cannot know, a device's errors included
            log.exception("round %d failed", self.job.round)
            raise ProgramError(self._failed(str(error)), task) from error

    def _failed(self, why: str) -> str:
        return f"round {self.job.round} ({self.job.section()}) failed: {why}"

    def _begin(self) -> None:
        """Takes the operands; finds the batches, for which it may wait for a kernel."""
        self.contributions.settle()
        self._check_contributed(bool(self.contributions.senders))
        self.contributions.check_rows()
        # Before anything is written: kernels see addresses only.
        for application in self._outline.applications:
            for id, dtype, shape in application.variables:
                value = self._variables.before.get(id)
                # To compare dtypes takes longer than all else here, and mostly they are the same object.
                if value is None or value.shape != shape or (value.dtype is not dtype and value.dtype != dtype):
                    expected = TensorSpec(dtype.name, shape)
                    found = "none" if value is None else str(spec_of(value))
                    raise ProgramError(f"variable {id} should have a value of {expected} here, and has {found}")
        self._known.update((ref, self._device.put(operand)) for ref, operand in self.contributions.operands())
        self._batches = self.job.prepared.batches(self._kernels, len(self.contributions.senders))
        if self.job.plan.restore is not None:
            self._variables.settle()
        self.begun = True

    def _check_contributed(self, contributed: bool) -> None:
        """Raises `ProgramError` if all contributors are lost and some data is missing: no variable may change."""
        if self.contributions.abandoned and not contributed:
            raise ProgramError("all who contribute were lost before their contributions were whole")

    def _make(self, at: int, stop: int, alone: Set[int], spare: Spare) -> dict[int | Ref, Array]:
        """Runs some of the outline's steps; returns values that are final."""
        if self.contributions.abandoned:
            needs = (index for each in self._outline.needs[at:stop] for index in each)
            self._check_contributed(all(any(weight for weight, _ in self.contributions.of(index)) for index in needs))
        applications = len(self._outline.applications)
        given = self._outline.given[max(at - applications, 0) : max(stop - applications, 0)]
        calls = self._calls(at, min(stop, applications), alone, spare)
        if stop == len(self._outline.needs):
            self._give_rows()
        # What may fail comes before anything is written in place.
        reduced = {ref: self._on_host(ref) for ref in given if ref.kind == "reduction"}
        self._written |= self._progressive and bool(calls)
        try:
            for call in calls:
                self._run(call)
        except BaseException:
            undo(calls)
            raise
        last, wanted = self._outline.last, self.wanted
        ready: dict[int | Ref, Array] = {
            id: array
            for id, array in self._variables.assigned.items()
            if id in wanted and last.get(id, stop) < stop and self._variables.missing(id) is None
        }
        if self._device.gpu is not None:
            ready = {id: self._device.get(array) for id, array in ready.items()}
        returned = [reduced[ref] if ref in reduced else self._on_host(ref) for ref in given]
        self._returned += returned
        return ready | dict(zip(given, returned, strict=True))

    # ---- Calls of kernels ----

    def _calls(self, at: int, stop: int, alone: Set[int], spare: Spare) -> list[Call]:
        """Returns the calls for some applications, in batches where possible, and decides where each of them writes."""
        calls = list(self._cut(at, stop, alone))
        if not self._reserve(calls, alone, spare):
            calls = list(self._cut(at, stop, frozenset()))
            self._reserve(calls, alone, spare)
        return calls

    def _cut(self, at: int, stop: int, alone: Set[int]) -> Iterator[Call]:
        while at < stop:
            call = self._call(at, stop, alone)
            yield call
            at = call.numbers.stop

    def _call(self, at: int, stop: int, alone: Set[int]) -> Call:
        application, batch = self._outline.applications[at], self._batches.get(at)
        if application.rows is not None:
            return RowsCall(at, application, application.rows, self._kernels, self.contributions)
        ready = Ready.of(batch, at, min(batch.stop, stop), self.contributions.senders, alone) if batch else None
        return ready or KernelCall(at, application, self._kernels, self.contributions.parts)

    def _reserve(self, calls: Sequence[Call], alone: Set[int], spare: Spare) -> bool:
        """Makes all kernels decide where they write: in place only after the last part that may fail.

        Returns:
            False if a batch, which can only write in place, comes too early for that.
        """
        risky = at = 0
        for call in () if self._progressive else calls:
            if isinstance(call, KernelCall):
                risky = max([risky, *(n for n, stage in enumerate(call.stages, at) if stage.may_fail)])
                risky = at + call.width if call.copies else risky
            elif isinstance(call, RowsCall) and call.may_fail:
                risky = max(risky, at)
            at += call.width
        at, fresh = 0, set[int]()
        for call in calls:
            if isinstance(call, KernelCall):
                call.reserve(risky - at, alone, fresh, spare)
                fresh |= call.assigned
            elif isinstance(call, RowsCall):
                call.reserve(alone | self._variables.own_rows | fresh, keeps_old=at < risky)
                fresh |= call.assigned
            elif at < risky:
                return False
            at += call.width
        return True

    def _run(self, call: Call) -> None:
        """Runs a call and takes the values that it assigned."""
        if isinstance(call, RowsCall):
            self._run_rows(call)
            return
        applications = self._applications(call.numbers.start, call.numbers.stop)
        if self._variables.any_missed:
            self._variables.settle({id for application in applications for id, *_ in application.variables})
        suspects: Set[int]
        unsure: Set[int]
        if isinstance(call, Ready):
            values = self._variables.values
            assigned = dict(zip(call.assigned, values(call.assigned), strict=True))
            seen = call.run(self._kernels.crew, self.contributions.total, self._value, values)
            flagged = [(self._outline.applications[number], flags) for number, flags in seen]
            suspects = {index for application, flags in flagged if flags & SUMS for index in application.needs}
            unsure = {id for application, flags in flagged if flags & ASSIGNED for id in application.assigned}
        else:
            found, outputs = call.run(self._value, self._device.xp)
            assigned = {id: owned(value) for id, value in found.items()}
            self._known.update(zip(applications[0].made, outputs, strict=True))
            suspects, unsure = call.suspects, call.unsure
        self.found.forget(assigned)
        for index in suspects:
            self.found.accuse(index)
        for id in unsure:
            self.found.look(Ref("variable", id), assigned[id], self._variables.before.get(id))
        self._variables.assigned |= assigned
        if not self._outline.results:
            return
        for ref in (ref for application in applications for ref in application.read):
            self._readers[ref] -= 1
        for ref in {ref for application in applications for ref in (*application.made, *application.read)}:
            if not self._readers.get(ref):
                del self._known[ref]  # no reader is left

    def _run_rows(self, call: RowsCall) -> None:
        missed = self._variables.make_up(call, self._kernels)
        self._variables.set_aside(call.assigned, call.ids)
        rows, assigned = call.rows, call.run(self._value, missed)
        self.found.forget(assigned)
        if may_be_nonfinite(rows.values.dtype) and not is_finite(rows.values):
            self.found.accuse(call.reduction)
            for id, array in assigned.items():
                self.found.look(Ref("variable", id), take_rows(array, rows.ids, self._device.xp))
        self._variables.assigned |= assigned

    # ---- Values ----

    def _value(self, ref: Ref) -> Any:
        if ref.kind == "reduction":
            return self._reduction(ref.index)
        if ref.kind != "variable":
            return self._known[ref]
        return self._variables.value(ref.index)

    def _on_host(self, ref: Ref) -> Array:
        return owned(self._device.get(self._value(ref)))

    def _reduction(self, index: int) -> Any:
        """Returns a reduction's value, computed at its first use and dropped at its last.

        So it is still in the processor's cache when it is read, and its memory serves the next one.
        """
        value = self._reduced.pop(index, None)
        if value is None:
            value = self._device.put(self.contributions.value(index))
            if index in self._outline.watched:
                self.found.look(Ref("reduction", index), value)
        self._uses[index] -= 1
        if self._uses[index]:
            self._reduced[index] = value
        return value
