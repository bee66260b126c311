"""Runs one round of one server: reduces what came, applies the programs, says what changed.

What a round assigns is handed back, to be committed at once or not at all. The arrays are new ones, but for those that
the caller has lent: kernels write into these, and only when nothing of the round can fail any more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psserver.devices import owned
from psserver.execution.calls import Call, Parts, Ready
from psserver.execution.nonfinite import Found, finite_flag, is_finite, may_be_nonfinite
from psserver.execution.reducer import reduce
from psserver.execution.senders import Sender
from psserver.plans.batches import MAX_PARTS, Batch
from psserver.plans.outline import Application
from psserver.plans.round import ReadyRound
from psserver.programs.kernels.codegen import ASSIGNED, SUMS, Sum
from psserver.programs.kernels.kernels import Kernels
from pswire.cluster import Task
from pswire.errors import Diverged, MemoryLimit, ProgramError, PSError
from pswire.model.plan import Plan, Ref
from pswire.model.tensor import DTYPES, Array, TensorSpec, join, spec_of

log = logging.getLogger("psserver")


@dataclass(frozen=True)
class Outcome:
    """What a round did.

    Attributes:
        assigned: new values of variables, on the device, by number.
        given: the plan's returned values of this server, on the host.
        wanted: new values of the assigned variables that a member wants back, on the host.
        found: values that are NaN or infinite.
    """

    assigned: dict[int, Array]
    given: tuple[Array, ...]
    wanted: dict[int, Array]
    found: Found = field(default_factory=Found)


def run(job: ReadyRound, kernels: Kernels, values: Mapping[int, Array], lent: Set[int] = frozenset()) -> Outcome:
    """Runs a round whose contributions are all there. Nothing is applied, and zeros are returned, if all only observe.

    Args:
        job: the plan and the contributions.
        kernels: of the device where the variables live and the programs run.
        values: the variables' arrays, by number.
        lent: variables whose arrays may be written into, since nobody else holds them.

    Raises:
        PSError: why the round cannot run; then nothing has changed.
    """
    if not job.contributors:
        # All were started again while the last round of those before them was still to be completed.
        returned = (np.zeros(spec.shape, DTYPES[spec.dtype]) for _, spec in job.prepared.given)
        return Outcome({}, tuple(returned), {})
    with told(job), kernels.device.scope():
        return Values(job, kernels).outcome(values, lent)


@contextmanager
def told(job: ReadyRound) -> Iterator[None]:
    """Whatever goes wrong becomes a `PSError`: everyone in the round is waiting for an answer, and gets the same."""
    task = str(Task("ps", job.prepared.server))
    try:
        yield
    except PSError as error:
        raise type(error)(_failed(job, error.message), error.task or task) from error
    except MemoryError as error:
        raise MemoryLimit(_failed(job, f"the server ran out of memory: {error}"), task) from error
    except Exception as error:  # what the verifier cannot know, a device's errors included
        log.exception("round %d failed", job.round)
        raise ProgramError(_failed(job, str(error)), task) from error


def _failed(job: ReadyRound, why: str) -> str:
    return f"round {job.round} ({job.section()}) failed: {why}"


class Values:
    """The values of one round, as they come to be. Used by one thread at a time.

    Args:
        job: the plan and the contributions.
        kernels: of the device where the variables live and the programs run.

    Attributes:
        values: the variables' arrays before the round, by number.
        assigned: what the round has assigned so far.
        known: operands, and results that somebody has still to read.
        batches: those of the plan, under the numbers of all their applications; none before the beginning.
        found: values that are NaN or infinite.
    """

    def __init__(self, job: ReadyRound, kernels: Kernels) -> None:
        self.job, self.kernels, self.device = job, kernels, kernels.device
        self.plan: Plan = job.plan
        self.known: dict[Ref, Any] = {}
        self.reduced: dict[int, Any] = {}
        self.outline = job.prepared.outline
        self.uses, self.readers = self.outline.uses.copy(), self.outline.readers.copy()
        self.values: Mapping[int, Array] = {}
        self.assigned: dict[int, Array] = {}
        self.senders = [Sender(part, job.prepared) for part in job.contributors]
        self._contributed: dict[int, list[tuple[float, list[Array]]]] = {}
        self.batches: Mapping[int, Batch] = {}
        self.found = Found()
        # On a GPU: what is to be judged, and whether it is finite, as the device will know.
        self._flags: list[tuple[Ref, Any, Any]] = []

    def outcome(self, values: Mapping[int, Array], lent: Set[int]) -> Outcome:
        """Runs the whole round; the arguments are those of `run`."""
        self.values = values
        self.begin()
        calls = self._calls(lent)
        if not self._reserve(calls, lent):
            calls = self._calls(frozenset())
            self._reserve(calls, lent)
        # What may fail comes before anything is written in place.
        given = self.outline.given
        reduced = {ref: self.device.get(self._reduced(ref.index)) for ref in given if ref.kind == "reduction"}
        for call in calls:
            self.run(call)
        returned = tuple(owned(reduced[ref] if ref in reduced else self.value(ref)) for ref in given)
        want = {id for part in self.job.parts for id in part.said.want} & self.assigned.keys()
        wanted = {id: self.device.get(self.assigned[id]) for id in want}
        self.judge()
        return Outcome(self.assigned, returned, wanted, self.found)

    def _calls(self, lent: Set[int]) -> list[Call | Ready]:
        """All applications, in batches where that is possible."""
        calls: list[Call | Ready] = []
        number = 0
        while number < len(self.outline.applications):
            batch = self.batches.get(number)
            ready = self.ready(number, batch.stop, lent) if batch else None
            calls.append(ready or self.call(number))
            number = calls[-1].numbers.stop
        return calls

    def ready(self, number: int, stop: int, own: Set[int]) -> Ready | None:
        """Applications of one batch as calls of its kernel; None if that is not possible.

        Args:
            number, stop: which.
            own: variables whose arrays nobody else holds.
        """
        batch = self.batches[number]
        ready = Ready.of(batch, number - batch.first, stop - batch.first, self.senders)
        if ready is None or not own >= set(ready.assigned):
            return None
        for each in ready.numbers:
            self._check_variables(self.outline.applications[each])
        return ready

    def call(self, number: int) -> Call:
        """An application by itself."""
        application = self.outline.applications[number]
        self._check_variables(application)
        return Call(number, application, self.kernels, self._parts)

    def run(self, call: Call | Ready) -> dict[int, Array]:
        """Runs a call; returns what it assigned."""
        applications = [self.outline.applications[number] for number in call.numbers]
        suspects: Set[int]
        unsure: Set[int]
        if isinstance(call, Ready):
            assigned = {id: self._value(Ref("variable", id)) for id in call.assigned}
            seen = call.run(self.kernels.crew, self._total, self._value)
            flagged = [(self.outline.applications[number], flags) for number, flags in seen]
            suspects = {index for application, flags in flagged if flags & SUMS for index in application.needs}
            unsure = {id for application, flags in flagged if flags & ASSIGNED for id in application.assigned}
        else:
            found, outputs = call.run(self._value, self.device.xp)
            assigned = {id: owned(value) for id, value in found.items()}
            self.known.update(zip(applications[0].made, outputs, strict=True))
            suspects, unsure = call.suspects, call.unsure
        if self.found.variables:
            for id in assigned:
                self.found.variables.pop(id, None)  # It has another value now.
        for index in suspects:
            self._accuse(index)
        for id in unsure:
            self._look(Ref("variable", id), assigned[id])
        self.assigned |= assigned
        for ref in (ref for application in applications for ref in application.read):
            self.readers[ref] -= 1
        for ref in {ref for application in applications for ref in (*application.made, *application.read)}:
            if not self.readers[ref]:
                del self.known[ref]  # Nobody reads it any more.
        return assigned

    def judge(self) -> None:
        """Takes in what a GPU knows by now of the values that it has made; waits for it."""
        if not self._flags:
            return
        flags, self._flags = self._flags, []
        finite = self.device.get(self.device.xp.stack([flag for *_, flag in flags]))
        for (ref, value, _), is_so in zip(flags, finite, strict=True):
            self._take_in(ref, value, bool(is_so))

    def _look(self, ref: Ref, value: Any) -> None:
        """Looks whether a reduction's value, or a variable's new one, is finite; on a GPU `judge` tells."""
        if not may_be_nonfinite(value.dtype):
            return
        if self.device.gpu is None:
            self._take_in(ref, value, is_finite(value))
        else:
            held = value if ref.kind == "variable" else None  # A reduction's memory serves the next one.
            self._flags.append((ref, held, finite_flag(value, self.device.xp)))

    def _take_in(self, ref: Ref, value: Any, finite: bool) -> None:
        if ref.kind == "variable":
            self.found.variables.pop(ref.index, None)
            if not finite:
                self.found.variables[ref.index] = self._was_so(ref.index, value)
        elif not finite:
            self._accuse(ref.index)

    def _was_so(self, id: int, value: Any) -> bool:
        """Whether a variable was not finite before the round: that is not known where it was written in place."""
        old = self.values.get(id)
        if old is None or old is value:
            return False
        return not (is_finite(old) if self.device.gpu is None else self.device.get(finite_flag(old, self.device.xp)))

    def _accuse(self, index: int) -> None:
        """Finds whose contributions to a reduction are not finite; they are still here."""
        for sender, (weight, pieces) in zip(self.senders, self._contributions(index), strict=True):
            if weight and not all(map(is_finite, pieces)):
                self.found.contributions.append((index, sender.task))
            if weight and self.plan.reductions[index].op == "first":
                return

    def _total(self, index: int) -> float:
        return sum(sender.part.said.weights[index] for sender in self.senders)

    def value(self, ref: Ref) -> Array:
        """A value on the host."""
        return self.device.get(self._value(ref))

    def _check_variables(self, application: Application) -> None:
        """Before anything is written: kernels see addresses only."""
        for id, dtype, shape in application.variables:
            value = self.values.get(id)
            if value is None or value.dtype != dtype or value.shape != shape:
                expected = TensorSpec(dtype.name, shape)
                found = "none" if value is None else str(spec_of(value))
                raise ProgramError(f"variable {id} should have a value of {expected} here, and has {found}")

    def _reserve(self, calls: Sequence[Call | Ready], lent: Set[int]) -> bool:
        """Has all kernels decide where they write: in place after the last thing that may fail.

        Returns:
            Whether they can: a batch writes in place or not at all.
        """
        risky = at = 0
        for call in calls:
            if isinstance(call, Call):
                risky = max([risky, *(n for n, stage in enumerate(call.stages, at) if stage.may_fail)])
                risky = at + call.width if call.copies else risky
            at += call.width
        at, fresh = 0, set[int]()
        for call in calls:
            if isinstance(call, Call):
                call.reserve([n >= risky for n in range(at, at + call.width)], lent, fresh)
                fresh |= call.assigned
            elif at < risky:
                return False
            at += call.width
        return True

    def _parts(self, index: int) -> Parts | None:
        """The contributions to a reduction, if a kernel may sum them."""
        contributions = self._contributions(index)
        present = [pieces for weight, pieces in contributions if weight]
        if not 0 < len(present) <= MAX_PARTS:
            return None
        combined = Sum(self.plan.reductions[index].op, len(present))
        return Parts(combined, present, sum(weight for weight, _ in contributions))

    def _contributions(self, index: int) -> list[tuple[float, list[Array]]]:
        """Weights and pieces of all who contribute to a reduction; the same however often it is asked."""
        found = self._contributed.get(index)
        if found is None:
            spec = self.plan.reductions[index].tensor
            found = self._contributed[index] = [sender.contribution(index, spec) for sender in self.senders]
        return found

    def contributed(self, index: int) -> bool:
        """Whether anybody contributes to a reduction."""
        return any(weight for weight, _ in self._contributions(index))

    def forget(self, index: int) -> None:
        """Nobody reads the contributions to a reduction any more."""
        self._contributed.pop(index, None)

    def begin(self) -> None:
        """Takes the operands, which must be equal; finds the batches. It is settled by now who contributes.

        It may wait for a kernel.
        """
        self._receive_operands()
        self.batches = self.job.prepared.batches(self.kernels, len(self.senders))

    def _receive_operands(self) -> None:
        for index, operand in enumerate(self.plan.operands):
            if self.job.prepared.server in operand.servers:
                sent_by = [sender.take(Ref("operand", index), operand.tensor) for sender in self.senders]
                self._check_equal(index, sent_by)
                self.known[Ref("operand", index)] = self.device.put(join(sent_by[0], operand.tensor))

    def _check_equal(self, index: int, sent_by: Sequence[Sequence[Array]]) -> None:
        first = _bytes(sent_by[0])
        for sender, pieces in zip(self.senders, sent_by, strict=True):
            if _bytes(pieces) != first:
                raise Diverged(
                    f"operand {index} differs: {self.senders[0].task} sent {_show(sent_by[0])}, "
                    f"{sender.task} sent {_show(pieces)}. What an update function takes besides "
                    "variables and reduced values must be the same on every process"
                )

    def _value(self, ref: Ref) -> Any:
        if ref.kind == "reduction":
            return self._reduced(ref.index)
        if ref.kind != "variable":
            return self.known[ref]
        assigned = self.assigned.get(ref.index)
        return self.values[ref.index] if assigned is None else assigned

    def _reduced(self, index: int) -> Any:
        """A reduction's value, made at its first use and let go at its last.

        So it is still in the processor's cache when it is read, and its memory serves the next one.
        """
        value = self.reduced.pop(index, None)
        if value is None:
            reduction = self.plan.reductions[index]
            value = self.device.put(reduce(reduction.op, reduction.tensor, self._contributions(index)))
            if index in self.outline.watched:
                self._look(Ref("reduction", index), value)
        self.uses[index] -= 1
        if self.uses[index]:
            self.reduced[index] = value
        return value


def _bytes(pieces: Sequence[Array]) -> bytes:
    return b"".join(piece.tobytes() for piece in pieces)


def _show(pieces: Sequence[Array]) -> str:
    return np.array2string(np.concatenate([piece[:4] for piece in pieces])[:4], threshold=4)
