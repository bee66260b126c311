"""Runs one round of one server: reduces what came, applies the programs, says what changed.

What a round assigns is handed back, to be committed at once or not at all. The arrays are new ones, but for those that
the caller has lent: kernels write into these, and only when nothing of the round can fail any more.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from psserver.calls import MAX_PARTS, Call, Parts
from psserver.job import Job, Part, places, refs
from psserver.kernels.kernels import Kernels
from psserver.kernels.source import Sum
from psserver.reducer import reduce
from psserver.store import owned
from pswire.cluster import Task
from pswire.errors import Diverged, MemoryLimit, ProgramError, PSError
from pswire.program import Program
from pswire.spec import Apply, Plan, Ref
from pswire.tensor import Array, TensorSpec, align, join, spec_of

log = logging.getLogger("psserver")


@dataclass(frozen=True)
class Outcome:
    """What a round did.

    Attributes:
        assigned: new values of variables, on the device, by number.
        given: the plan's returned values of this server, on the host.
        wanted: new values of the assigned variables that a member wants back, on the host.
    """

    assigned: dict[int, Array]
    given: tuple[Array, ...]
    wanted: dict[int, Array]


def run(job: Job, server: int, kernels: Kernels, values: Mapping[int, Array], lent: Set[int] = frozenset()) -> Outcome:
    """Runs a round whose contributions are all there.

    Args:
        job: the plan and the contributions.
        server: the number of this server.
        kernels: of the device where the variables live and the programs run.
        values: the variables' arrays, by number.
        lent: variables whose arrays may be written into, since nobody else holds them.

    Raises:
        PSError: why the round cannot run; then nothing has changed.
    """
    with told(job, server), kernels.device.scope():
        return _Run(job, server, kernels).outcome(values, lent)


@contextmanager
def told(job: Job, server: int) -> Iterator[None]:
    """Whatever goes wrong becomes a `PSError`: everyone in the round is waiting for an answer, and gets the same."""
    try:
        yield
    except PSError as error:
        raise type(error)(_failed(job, error.message), error.task or str(Task("ps", server))) from error
    except MemoryError as error:
        words = _failed(job, f"the server ran out of memory: {error}")
        raise MemoryLimit(words, str(Task("ps", server))) from error
    except Exception as error:  # what the verifier cannot know, a device's errors included
        log.exception("round %d failed", job.round)
        raise ProgramError(_failed(job, str(error)), str(Task("ps", server))) from error


def _failed(job: Job, why: str) -> str:
    return f"round {job.round} ({job.section()}) failed: {why}"


class _Run:
    """The values of one round, as they come to be."""

    def __init__(self, job: Job, server: int, kernels: Kernels) -> None:
        self.job, self.server, self.kernels, self.device = job, server, kernels, kernels.device
        self.plan: Plan = job.plan
        self.known: dict[Ref, Any] = {}
        self.reduced: dict[int, Any] = {}
        self.given = [ref for ref, _ in self.plan.given(server)]
        used = [ref for apply in self.plan.applies if server in apply.servers for ref in apply.args]
        self.uses = Counter(ref.index for ref in (*used, *self.given) if ref.kind == "reduction")
        self.readers = Counter(ref for ref in (*used, *self.given) if ref.kind == "result")
        self.values: Mapping[int, Array] = {}
        self.assigned: dict[int, Array] = {}
        self.senders = [_Sender(part, self.plan, server) for part in job.parts if not part.said.observes]
        self._contributed: dict[int, list[tuple[float, list[Array]]]] = {}

    def outcome(self, values: Mapping[int, Array], lent: Set[int]) -> Outcome:
        self.values = values
        self.receive_operands()
        calls = [(self.call(apply), first) for apply, first in self.applies()]
        self._reserve([call for call, _ in calls], lent)
        # What may fail comes before anything is written in place.
        reduced = {ref: self.device.get(self._reduced(ref.index)) for ref in self.given if ref.kind == "reduction"}
        for call, first in calls:
            self.run(call, first)
        given = tuple(owned(reduced[ref] if ref in reduced else self.value(ref)) for ref in self.given)
        want = {id for part in self.job.parts for id in part.said.want} & self.assigned.keys()
        return Outcome(self.assigned, given, {id: self.device.get(self.assigned[id]) for id in want})

    def applies(self) -> Iterator[tuple[Apply, int]]:
        """The applications of this server, and for each the number of its first result."""
        results = 0
        for apply in self.plan.applies:
            if self.server in apply.servers:
                yield apply, results
            results += len(self.plan.programs[apply.program].outputs)

    def call(self, apply: Apply) -> Call:
        program = self.plan.programs[apply.program]
        self._check_variables(apply, program)
        return Call(apply, program, self.kernels, self._parts)

    def run(self, call: Call, first: int) -> dict[int, Array]:
        """Runs a call; returns what it assigned."""
        assigned, outputs = call.run(self._value, self.device.xp)
        assigned = {id: owned(value) for id, value in assigned.items()}
        self.assigned |= assigned
        made = {Ref("result", number): value for number, value in enumerate(outputs, first)}
        read = [ref for ref in call.apply.args if ref.kind == "result"]
        self.known |= made
        self.readers.subtract(read)
        for ref in {*made, *read}:
            if not self.readers[ref]:
                del self.known[ref]  # Nobody reads it any more.
        return assigned

    def value(self, ref: Ref) -> Array:
        """A value on the host."""
        return self.device.get(self._value(ref))

    def _check_variables(self, apply: Apply, program: Program) -> None:
        """Before anything is written: kernels see addresses only."""
        for ref, item in zip(apply.args, program.inputs, strict=True):
            value = self.values.get(ref.index) if ref.kind == "variable" else None
            if ref.kind == "variable" and (value is None or spec_of(value) != item.spec):
                found = "none" if value is None else str(spec_of(value))
                raise ProgramError(f"variable {ref.index} should have a value of {item.spec} here, and has {found}")

    def _reserve(self, calls: Sequence[Call], lent: Set[int]) -> None:
        """Has all kernels decide where they write: in place after the last thing that may fail."""
        risky = at = 0
        for call in calls:
            risky = max([risky, *(n for n, stage in enumerate(call.stages, at) if stage.may_fail)])
            at += len(call.stages)
            risky = at if call.copies else risky
        at, fresh = 0, set[int]()
        for call in calls:
            call.reserve([n >= risky for n in range(at, at + len(call.stages))], lent, fresh)
            at += len(call.stages)
            fresh |= call.assigned

    def _parts(self, ref: Ref) -> Parts | None:
        """The contributions to a reduction, if only one call needs it and a kernel may sum them."""
        reduction = self.plan.reductions[ref.index]
        if reduction.op == "first":
            return None
        contributions = self._contributions(ref.index)
        present = [pieces for weight, pieces in contributions if weight]
        if self.uses[ref.index] > 1 or not 0 < len(present) <= MAX_PARTS:
            return None
        combined = Sum(reduction.op, len(present))
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

    def receive_operands(self) -> None:
        """Takes the operands, which must be equal."""
        for index, operand in enumerate(self.plan.operands):
            if self.server in operand.servers:
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
        self.uses[index] -= 1
        if self.uses[index]:
            self.reduced[index] = value
        return value


class Stream:
    """A round that runs while its contributions come: each application as soon as what it needs is there.

    None of its values can be refused, so that only a lack of memory can end it halfway. Used by one thread at a time.

    Args:
        job: the plan and the contributions; those of its first members are there up to their operands, or will be.
        server: the number of this server.
        kernels: of the device where the variables live and the programs run.
    """

    def __init__(self, job: Job, server: int, kernels: Kernels) -> None:
        self.job = job
        self._run = _Run(job, server, kernels)
        self._senders = self._run.senders
        self._steps: deque[tuple[Apply | Ref, int]] = deque(self._run.applies())
        self._steps += [(ref, 0) for ref in self._run.given]
        # By how many steps come after it, since a plan may name one application twice.
        left = range(len(self._steps) - 1, -1, -1)
        applies = zip(left, self._run.applies(), strict=False)
        self._last = {id: after for after, (apply, _) in applies for id in self._targets(apply)}
        self._readers = Counter(ref.index for step, _ in self._steps for ref in refs(step) if ref.kind == "reduction")
        self._begun = False
        self.has_written = False
        """Whether it has changed a variable."""
        self.given: list[Array] = []
        """The plan's returned values of this server, on the host."""
        self.dropped: set[Task] = set()
        """Members that were lost before their contributions were whole."""

    def _targets(self, apply: Apply) -> list[int]:
        return [apply.args[target].index for target, _ in self.job.plan.programs[apply.program].assigns]

    @property
    def done(self) -> bool:
        """Whether all of it has run."""
        return self._begun and not self._steps

    @property
    def abandoned(self) -> bool:
        """Whether all are lost who contribute."""
        return bool(self._senders) and all(sender.gone for sender in self._senders)

    def drop(self, sessions: Set[int]) -> bool:
        """Members are lost: what they have not sent whole is waited for no more; says whether there are new ones."""
        known = len(self.dropped)
        for sender in self._run.senders:
            if sender.part.member.session in sessions and not sender.part.payload.whole:
                sender.gone = True
                self.dropped.add(sender.task)
        return len(self.dropped) > known

    def close(self) -> None:
        """It is over: nobody reads what is left of the contributions, or still comes."""
        for part in self.job.parts:
            part.payload.discard()

    def awaits(self, then: Callable[[], object]) -> bool:
        """Whether the next step has to wait; then a function is called when it may be worth to look again."""
        for sender, end in self._needs():
            if sender.part.payload.end < end and not sender.gone:
                sender.part.payload.reach(end, then)
                return True
        return False

    def _needs(self) -> Iterator[tuple[_Sender, int]]:
        """Up to where each sender's payload must be there for the next step."""
        for sender in self._run.senders:
            if not self._begun:
                yield sender, sender.places.operands
            elif self._steps:
                ends = (sender.end(ref.index) for ref in refs(self._steps[0][0]) if ref.kind == "reduction")
                yield sender, max(ends, default=0)

    @property
    def reads(self) -> set[int]:
        """Numbers of the variables that must be there for the next step; for the first one all."""
        steps = [self._steps[0]] if self._begun else self._steps
        return {ref.index for step, _ in steps for ref in refs(step) if ref.kind == "variable"}

    def step(self, values: Mapping[int, Array], alone: Set[int]) -> tuple[dict[int, Array], dict[int | Ref, Array]]:
        """Makes the next step.

        Args:
            values: the variables that it reads, by number.
            alone: variables whose arrays nobody else holds.

        Returns:
            What it assigned, on the device; and the values that nothing changes any more, variables by number and
            returned values, on the host.
        """
        run = self._run
        with told(self.job, run.server), run.device.scope():
            if not self._begun:
                run.senders = [sender for sender in run.senders if not sender.gone or sender.has_operands]
                self._check_contributed(bool(run.senders))
                run.receive_operands()
                self._begun = True
                return {}, {}
            step, first = self._steps.popleft()
            reduced = [ref.index for ref in refs(step) if ref.kind == "reduction"]
            self._check_contributed(all(map(run.contributed, reduced)))
            if isinstance(step, Ref):
                self.given.append(owned(run.value(step)))
                self._let_go(reduced)
                return {}, {step: self.given[-1]}
            run.values = values
            call = run.call(step)
            call.reserve([True] * len(call.stages), alone, frozenset())
            self.has_written = True
            assigned, run.assigned = run.run(call, first), {}
            del call  # with it goes what it holds of the contributions
            self._let_go(reduced)
            left = len(self._steps)
            return assigned, {id: run.device.get(assigned[id]) for id in assigned if self._last[id] == left}

    def _let_go(self, reduced: Iterable[int]) -> None:
        """Frees the memory of contributions that no step needs any more."""
        self._readers.subtract(reduced)
        for index in {index for index in reduced if not self._readers[index]}:
            self._run.forget(index)
        for sender in self._run.senders:
            sender.let_go(self._readers)

    def _check_contributed(self, contributed: bool) -> None:
        """What nobody has sent whole changes no variable."""
        if self.abandoned and not contributed:
            raise ProgramError("all who contribute were lost before their contributions were whole")


class _Sender:
    """What one member contributes: its tensors, by what they are for."""

    def __init__(self, part: Part, plan: Plan, server: int) -> None:
        self.part = part
        self.task = part.member.task
        self.gone = False
        self.places = places(plan, server, part.said)
        self._left = deque((ref.index, end) for ref, (_, end) in self.places.of.items() if ref.kind == "reduction")

    @property
    def has_operands(self) -> bool:
        return self.part.payload.end >= self.places.operands

    def end(self, reduction: int) -> int:
        """Up to where the payload must be there for a contribution; 0 where there is none."""
        return self.places.of.get(Ref("reduction", reduction), (0, 0))[1]

    def take(self, ref: Ref, spec: TensorSpec) -> list[Array]:
        return self.part.payload.pieces(self.places.of[ref][0], spec)

    def let_go(self, readers: Mapping[int, int]) -> None:
        """Frees the memory of the contributions before the first that somebody has still to read."""
        while self._left and not readers[self._left[0][0]]:
            self.part.payload.release(align(self._left.popleft()[1]))

    def contribution(self, index: int, spec: TensorSpec) -> tuple[float, list[Array]]:
        """Weight and pieces; nothing of who is gone and has not sent it whole."""
        weight = self.part.said.weights[index]
        if not weight or (self.gone and self.part.payload.end < self.end(index)):
            return 0.0, []
        return weight, self.take(Ref("reduction", index), spec)


def _bytes(pieces: Sequence[Array]) -> bytes:
    return b"".join(piece.tobytes() for piece in pieces)


def _show(pieces: Sequence[Array]) -> str:
    return np.array2string(np.concatenate([piece[:4] for piece in pieces])[:4], threshold=4)
