"""Sums of contributions, as a server would compute them, and the parts of their answers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from pswire.api import Contribution, RoundReply
from pswire.model.finite import is_finite
from pswire.model.log import Member
from pswire.model.plan import Plan
from pswire.model.tensor import DTYPES, Array, TensorSpec, join, layout
from pswire.network.futures import follow
from pswire.network.payload import Payload


@dataclass(frozen=True, eq=False)
class Single(abc.ABC):
    """One worker's contribution to a round on one server, as it is summed.

    Attributes:
        server: index of the server.
        said: what the worker says.
        payload: what it contributes; it is summed once it is whole.
    """

    server: int
    said: Contribution
    payload: Payload

    @abc.abstractmethod
    def answer(self, reply: RoundReply) -> None:
        """Takes the answer to its round."""

    @abc.abstractmethod
    def refuse(self) -> None:
        """It is in no sum: whose it is pushes it."""


@dataclass(frozen=True, eq=False)
class OwnPush(Single):
    """A contribution that this process would push to one server.

    Attributes:
        plan: the plan.
        members: the members of the generation that it names, by their sessions.
        singly: pushes it, with nobody else's.
        future: the answer.
    """

    plan: Plan
    members: Mapping[int, Member]
    singly: Callable[[], Future[RoundReply]]
    future: Future[RoundReply] = field(default_factory=Future)

    def answer(self, reply: RoundReply) -> None:
        self.future.set_result(reply)

    def refuse(self) -> None:
        try:
            pushed = self.singly()
        except Exception as error:
            self.future.set_exception(error)
        else:
            pushed.add_done_callback(partial(follow, self.future))


def sum_of(own: OwnPush, singles: Sequence[Single]) -> tuple[Contribution, Payload] | None:
    """Returns the sum of what several workers contribute to a round, as it is pushed.

    Each element is summed in task order, as a server sums the contributions of one host.

    Args:
        own: this process's contribution, which is one of them.
        singles: all of them, in task order.

    Returns:
        The contribution, and its payload; None where a server has to say what is wrong: if they do not belong together,
        nobody contributes, or the sum has NaN or infinity, of which it does not tell whose they are.
    """
    said = [single.said for single in singles]
    rounds = {(each.generation, each.round, each.plan_id, each.host, len(each.weights)) for each in said}
    givers = [single for single in singles if not single.said.observes]
    if len(rounds) > 1 or not givers:
        return None
    operands = [item.tensor for item in own.plan.operands if own.server in item.servers]
    first, *others = (_operands(single.payload, operands) for single in givers)
    if any(other != first for other in others):
        return None
    weights = tuple(map(sum, zip(*(each.weights for each in said), strict=True)))
    here = [(index, each.tensor) for index, each in enumerate(own.plan.reductions) if own.server in each.servers]
    specs = [spec for index, spec in here if weights[index]]
    offsets, size = layout([*operands, *specs])
    memory = np.empty(size, np.uint8)
    for begin, offset, spec in zip([0, *offsets], [*offsets, size], [None, *operands, *specs], strict=True):
        memory[begin + (spec.nbytes if spec else 0) : offset] = 0  # what lies between tensors is sent, too
    for offset, sent in zip(offsets, first, strict=False):
        memory[offset : offset + len(sent)] = np.frombuffer(sent, np.uint8)
    alike = len({spec.dtype for spec in specs}) == 1 and len({tuple(map(bool, s.said.weights)) for s in givers}) == 1
    with np.errstate(all="ignore"):
        if alike:
            _add_alike(memory, DTYPES[specs[0].dtype], offsets[len(operands)], [single.payload for single in givers])
        else:
            _add_each(memory, operands, here, givers)
    sums = zip(offsets[len(operands) :], specs, strict=True)
    if not all(is_finite(memory[at : at + spec.nbytes].view(DTYPES[spec.dtype])) for at, spec in sums):
        return None
    want = tuple(dict.fromkeys(id for each in said for id in each.want))
    more, parts = any(each.more for each in said), tuple(said)
    whole = replace(
        own.said, weights=weights, more=more, want=want, observes=False, nonfinite=(), start=-1, parts=parts
    )
    return whole, Payload([(0, memory.data)] if size else (), size)


def _operands(payload: Payload, specs: Sequence[TensorSpec]) -> list[bytes]:
    """Returns the bytes of each operand; what lies between them is nothing."""
    places = zip(layout(specs)[0], specs, strict=True)
    return [b"".join(piece.tobytes() for piece in payload.pieces(offset, spec)) for offset, spec in places]


def _add_alike(memory: Array, dtype: np.dtype[np.generic], begin: int, payloads: Sequence[Payload]) -> None:
    """Sums payloads that have the same tensors, all of one dtype, in passes over what lies at a piece."""
    for number, payload in enumerate(payloads):
        for offset, buffer in payload.chunks:
            start, stop = max(offset, begin), offset + len(buffer)
            if start < stop:
                into = memory[start:stop].view(dtype)
                piece = np.frombuffer(buffer[start - offset :], dtype)
                np.add(into, piece, out=into) if number else np.copyto(into, piece)


def _add_each(
    memory: Array, operands: Sequence[TensorSpec], here: Sequence[tuple[int, TensorSpec]], singles: Sequence[Single]
) -> None:
    """Sums payloads tensor by tensor: each has those with a weight."""
    begun: set[int] = set()
    total = [index for index, _ in here if any(single.said.weights[index] for single in singles)]
    places = dict(zip(total, layout([*operands, *(s for i, s in here if i in total)])[0][len(operands) :], strict=True))
    for single in singles:
        sent = [(index, spec) for index, spec in here if single.said.weights[index]]
        offsets = layout([*operands, *(spec for _, spec in sent)])[0][len(operands) :]
        for (index, spec), offset in zip(sent, offsets, strict=True):
            if not spec.nbytes:
                continue
            place = places[index]
            into = memory[place : place + spec.nbytes].view(DTYPES[spec.dtype])
            piece = join(single.payload.pieces(offset, spec), spec).reshape(-1)
            np.add(into, piece, out=into) if index in begun else np.copyto(into, piece)
            begun.add(index)


def part_of(
    reply: RoundReply, all_want: Sequence[int], want: Sequence[int], specs: Callable[[], Sequence[TensorSpec]]
) -> RoundReply:
    """Returns the answer to a sum as one of its senders gets it.

    Args:
        reply: the answer.
        all_want: the variables that it has.
        want: those that this sender wants.
        specs: returns the tensors of these variables, and of the values behind them, as they lie in the answer.
    """
    if tuple(want) == tuple(all_want):
        return reply
    tensors = reply.payload.tensors(specs())
    place = {id: place for place, id in enumerate(all_want)}
    return replace(reply, payload=Payload.pack([*(tensors[place[id]] for id in want), *tensors[len(all_want) :]]))
