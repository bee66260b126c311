"""Runs one round of one server: reduces what came, applies the programs, says what changed.

What a round assigns is handed back, to be committed at once or not at all. The arrays are new ones, but for those that
the caller has lent: kernels write into these, and only when nothing of the round can fail any more.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from psserver.calls import MAX_PARTS, Call, Parts
from psserver.kernels.kernels import Kernels
from psserver.kernels.source import Sum
from psserver.reducer import reduce
from psserver.rounds import Job, Part, sent
from psserver.store import owned
from pswire.errors import Diverged, MemoryLimit, ProgramError, PSError
from pswire.program import Program
from pswire.spec import Apply, Plan, Ref
from pswire.tensor import Array, TensorSpec, join, layout, spec_of

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
    """Runs a round.

    Args:
        job: the plan and the contributions.
        server: the number of this server.
        kernels: of the device where the variables live and the programs run.
        values: the variables' arrays, by number.
        lent: variables whose arrays may be written into, since nobody else holds them.

    Raises:
        PSError: why the round cannot run; then nothing has changed.
    """
    try:
        with kernels.device.scope():
            return _Run(job, server, kernels, values, lent).outcome()
    except PSError:
        raise
    except MemoryError as error:
        raise MemoryLimit(f"the server ran out of memory in round {job.round}: {error}") from error
    except Exception as error:
        # What the verifier cannot know, a device's errors included. Whatever it is, everyone in the round is
        # waiting for an answer, and gets the same one.
        log.exception("round %d failed", job.round)
        raise ProgramError(f"round {job.round} failed on server {server}: {error}") from error


class _Run:
    """The values of one round, as they come to be."""

    def __init__(self, job: Job, server: int, kernels: Kernels, values: Mapping[int, Array], lent: Set[int]) -> None:
        self.job, self.server, self.kernels, self.device = job, server, kernels, kernels.device
        self.plan: Plan = job.plan
        self.known: dict[Ref, Any] = {}
        self.contributions: dict[int, list[tuple[float, list[Array]]]] = {}
        self.reduced: dict[int, Any] = {}
        used = [ref for apply in self.plan.applies if server in apply.servers for ref in apply.args]
        used += [ref for ref, _ in self.plan.given(server)]
        self.uses = Counter(ref.index for ref in used if ref.kind == "reduction")
        self.values, self.lent = values, lent
        self.assigned: dict[int, Array] = {}

    def outcome(self) -> Outcome:
        self._receive()
        calls = self._calls()
        refs = [ref for ref, _ in self.plan.given(self.server)]
        # What may fail comes before anything is written in place.
        reduced = {ref: self.device.get(self._reduced(ref.index)) for ref in refs if ref.kind == "reduction"}
        for call, first in calls:
            assigned, outputs = call.run(self._value, self.device.xp)
            self.assigned |= {id: owned(value) for id, value in assigned.items()}
            self.known |= {Ref("result", number): value for number, value in enumerate(outputs, first)}
        given = tuple(reduced[ref] if ref in reduced else self.device.get(self._value(ref)) for ref in refs)
        want = {id for part in self.job.parts for id in part.said.want} & self.assigned.keys()
        return Outcome(self.assigned, given, {id: self.device.get(self.assigned[id]) for id in want})

    def _calls(self) -> list[tuple[Call, int]]:
        """The applications of this server, and for each the number of its first result, with all memory they need."""
        calls, results = [], 0
        for apply in self.plan.applies:
            program = self.plan.programs[apply.program]
            if self.server in apply.servers:
                self._check_variables(apply, program)
                calls.append((Call(apply, program, self.kernels, self._parts), results))
            results += len(program.outputs)
        self._reserve([call for call, _ in calls])
        return calls

    def _check_variables(self, apply: Apply, program: Program) -> None:
        """Before anything is written: kernels see addresses only."""
        for ref, item in zip(apply.args, program.inputs, strict=True):
            value = self.values.get(ref.index) if ref.kind == "variable" else None
            if ref.kind == "variable" and (value is None or spec_of(value) != item.spec):
                found = "none" if value is None else str(spec_of(value))
                raise ProgramError(f"variable {ref.index} should have a value of {item.spec} here, and has {found}")

    def _reserve(self, calls: Sequence[Call]) -> None:
        """Has all kernels decide where they write: in place after the last thing that may fail."""
        risky = at = 0
        for call in calls:
            risky = max([risky, *(n for n, stage in enumerate(call.stages, at) if stage.may_fail)])
            at += len(call.stages)
            risky = at if call.copies else risky
        at, fresh = 0, set[int]()
        for call in calls:
            call.reserve([n >= risky for n in range(at, at + len(call.stages))], self.lent, fresh)
            at += len(call.stages)
            fresh |= call.assigned

    def _parts(self, ref: Ref) -> Parts | None:
        """The contributions to a reduction, if only one call needs it and a kernel may sum them."""
        reduction = self.plan.reductions[ref.index]
        if reduction.op == "first":
            return None
        contributions = self.contributions[ref.index]
        present = [pieces for weight, pieces in contributions if weight]
        if self.uses[ref.index] > 1 or not 0 < len(present) <= MAX_PARTS:
            return None
        combined = Sum(reduction.op, len(present))
        return Parts(combined, present, sum(weight for weight, _ in contributions))

    def _receive(self) -> None:
        """Takes the contributions, and the operands, which must be equal."""
        present = [part for part in self.job.parts if not part.said.observes]
        parts = [_Reader(part, self.plan, self.server) for part in present]
        for index, reduction in enumerate(self.plan.reductions):
            if self.server in reduction.servers:
                self.contributions[index] = [reader.contribution(index, reduction.tensor) for reader in parts]
        for index, operand in enumerate(self.plan.operands):
            if self.server in operand.servers:
                sent_by = [reader.take(operand.tensor) for reader in parts]
                self._check_equal(index, present, sent_by)
                self.known[Ref("operand", index)] = self.device.put(join(sent_by[0], operand.tensor))

    def _check_equal(self, index: int, parts: Sequence[Part], sent_by: Sequence[Sequence[Array]]) -> None:
        first = _bytes(sent_by[0])
        for part, pieces in zip(parts, sent_by, strict=True):
            if _bytes(pieces) != first:
                raise Diverged(
                    f"operand {index} of round {self.job.round} ({self.job.section()}) differs: "
                    f"{parts[0].member.task} sent {_show(sent_by[0])}, "
                    f"{part.member.task} sent {_show(pieces)}. What an update function takes besides "
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
            value = self.device.put(reduce(reduction.op, reduction.tensor, self.contributions[index]))
        self.uses[index] -= 1
        if self.uses[index]:
            self.reduced[index] = value
        return value


class _Reader:
    """Takes the tensors of one payload in order, leaving out what has a weight of 0."""

    def __init__(self, part: Part, plan: Plan, server: int) -> None:
        self.part = part
        self.offsets = iter(layout(sent(plan, server, part.said))[0])

    def take(self, spec: TensorSpec) -> list[Array]:
        return self.part.payload.pieces(next(self.offsets), spec)

    def contribution(self, index: int, spec: TensorSpec) -> tuple[float, list[Array]]:
        weight = self.part.said.weights[index]
        return weight, self.take(spec) if weight else []


def _bytes(pieces: Sequence[Array]) -> bytes:
    return b"".join(piece.tobytes() for piece in pieces)


def _show(pieces: Sequence[Array]) -> str:
    return np.array2string(np.concatenate([piece[:4] for piece in pieces])[:4], threshold=4)
