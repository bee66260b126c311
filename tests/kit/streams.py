"""Contributions on their way, of which a test lets come what it says; and plans that are large enough to stream."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from pswire.api import Contribution, RoundReply
from pswire.limits import ALIGN
from pswire.model.plan import PlacedVariable, Plan
from pswire.model.tensor import Array, align
from pswire.transport.payload import Payload
from tests.kit.rig import Job, Worker, payload

LIMIT = 64
"""Bytes of contributions above which a round streams in tests that make it so; see `streaming`."""

SIZE = 8
"""Elements of the variables of such a round: one of float64 takes `LIMIT` bytes."""


def streaming(monkeypatch: Any) -> None:
    """Has the plans made from now on stream where their contributions exceed `LIMIT` bytes."""
    monkeypatch.setattr("pswire.model.plan.PART_BYTES", LIMIT)


class Sending:
    """One attempt to contribute to the worker's next round: its header is there, and no byte yet.

    Args:
        worker: who contributes.
        plan, values: what; see `Worker.push`.
        weights, operands, want, server: as there.
        observes: contributes nothing, and is there at once.

    Attributes:
        said: what it says.
        payload: as far as it has come.
        reply: what it is answered.
        begun: payloads of answers that the server told of before they were there.
    """

    def __init__(
        self,
        worker: Worker,
        plan: Plan,
        values: Sequence[Any] = (),
        *,
        weights: Sequence[float] | None = None,
        operands: Sequence[Any] = (),
        want: tuple[int, ...] = (),
        server: int = 0,
        observes: bool = False,
    ) -> None:
        each = 0.0 if observes else float(worker.replicas)
        given = tuple(weights) if weights is not None else (each,) * len(plan.reductions)
        packed = Payload() if observes else payload(plan, server, values, given, operands)
        self._bytes = bytearray(packed.size)
        self._at = 0
        for offset, buffer in packed.chunks:
            self._bytes[offset : offset + len(buffer)] = buffer
        self.payload = Payload((), packed.size)
        self.begun: list[Payload] = []
        self.said = Contribution(worker.session, worker.epoch, worker.round, plan.id, given, False, (), want, observes)
        push = worker.job.verbs[server].push
        self.reply: Future[RoundReply] = push(self.said, self.payload, self.begun.append)

    def come(self, nbytes: int = 1 << 60, step: int = 1 << 60) -> Sending:
        """More bytes come, in parts of `step`; all of them, where it is not said how many."""
        end = min(align(self._at + nbytes), len(self._bytes))
        while self._at < end:
            upto = min(end, self._at + align(min(step, end)))
            self.payload.add(self._at, memoryview(bytes(self._bytes[self._at : upto])))
            self._at = upto
        return self

    def told(self) -> Payload:
        """The payload of the answer that has begun; fails unless the server told of one."""
        (payload,) = self.begun
        return payload


def zeros(count: int) -> list[Array]:
    """First values for variables of rounds that stream."""
    return [np.zeros(SIZE) for _ in range(count)]


def full(*values: float) -> list[Array]:
    """Contributions that have one number in all elements."""
    return [np.full(SIZE, value) for value in values]


def stored(job: Job, *variables: PlacedVariable) -> list[float]:
    """What a server has of variables at this moment, which no client can see; each must have one number throughout."""
    values = [job.servers.cores[0].machine.store.value(variable.id) for variable in variables]
    assert all((value == value[0]).all() or np.isnan(value).all() for value in values)
    return [float(value[0]) for value in values]


def arrays(payload: Payload) -> list[float]:
    """The variables in the beginning of an answer, as far as they are there; each has one number throughout."""
    end = payload.end // (SIZE * 8)
    whole = np.concatenate([np.frombuffer(buffer, np.float64) for _, buffer in payload.chunks] or [np.zeros(0)])
    assert payload.end % ALIGN == 0
    return [float(whole[at * SIZE]) for at in range(end)]
