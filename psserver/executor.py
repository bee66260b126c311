"""Runs one round of one server: reduces what came, applies the programs, says what changed.

Nothing is written in place: what a round assigns is handed back as new arrays, to be committed at once
or not at all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psserver import interpreter
from psserver.arrays import Device
from psserver.reducer import reduce
from psserver.rounds import Job, Part, sent
from psserver.store import owned
from pswire.errors import Diverged, MemoryLimit, ProgramError, PSError
from pswire.spec import Apply, Plan, Ref
from pswire.tensor import Array, TensorSpec, join, layout

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


def run(job: Job, server: int, device: Device, values: Mapping[int, Array]) -> Outcome:
    """Runs a round.

    Args:
        job: the plan and the contributions.
        server: the number of this server.
        device: where the variables live and the programs run.
        values: the variables' arrays, by number.

    Raises:
        PSError: why the round cannot run; then nothing has changed.
    """
    try:
        with device.scope():
            return _Run(job, server, device, values).outcome()
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

    def __init__(self, job: Job, server: int, device: Device, values: Mapping[int, Array]) -> None:
        self.job, self.server, self.device = job, server, device
        self.plan: Plan = job.plan
        self.known: dict[Ref, Any] = {}
        self.contributions: dict[int, list[tuple[float, list[Array]]]] = {}
        self.reduced: dict[int, Any] = {}
        used = [ref for apply in self.plan.applies if server in apply.servers for ref in apply.args]
        used += [ref for ref, _ in self.plan.given(server)]
        self.uses = Counter(ref.index for ref in used if ref.kind == "reduction")
        self.values = values
        self.assigned: dict[int, Array] = {}

    def outcome(self) -> Outcome:
        self._receive()
        results = 0
        for apply in self.plan.applies:
            outputs = len(self.plan.programs[apply.program].outputs)
            if self.server in apply.servers:
                self._apply(apply, results)
            results += outputs
        given = tuple(self.device.get(self._value(ref)) for ref, _ in self.plan.given(self.server))
        want = {id for part in self.job.parts for id in part.said.want} & self.assigned.keys()
        return Outcome(self.assigned, given, {id: self.device.get(self.assigned[id]) for id in want})

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

    def _apply(self, apply: Apply, first: int) -> None:
        program = self.plan.programs[apply.program]
        assigned, outputs = interpreter.run(program, [self._value(ref) for ref in apply.args], self.device.xp)
        for target, value in assigned.items():
            self.assigned[apply.args[target].index] = owned(value)
        for number, value in enumerate(outputs, first):
            self.known[Ref("result", number)] = value

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
