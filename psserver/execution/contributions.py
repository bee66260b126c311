"""The contributions of a round's members: their tensors in the payloads, which of them have arrived, and their sums.

Sums and means are computed from received parts without a copy.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, product
from typing import Any, TypeAlias

import numpy as np

from psserver.execution import decoding
from psserver.plans.batches import MAX_PARTS
from psserver.plans.layout import Numbers
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare, ReadyRound
from psserver.programs.kernels.codegen import SumTerm
from psserver.programs.kernels.launch import Pieces
from pswire.cluster import Task
from pswire.errors import Diverged, ProgramError
from pswire.model.compression import Codec
from pswire.model.plan import ReduceOp, Reduction, Ref
from pswire.model.rows import Rows, group, row_specs, sum_groups
from pswire.model.tables import MAX_COUNT
from pswire.model.tensor import DTYPES, Array, TensorSpec, address_of, align, join

Room = Callable[[tuple[int, ...], np.dtype[Any]], Array]
"""Allocates an array of a shape and dtype."""

Weighed: TypeAlias = tuple[float, list[Array]]
"""Weight and pieces of one contribution; no pieces if the weight is 0."""


@dataclass(frozen=True)
class ContributionParts:
    """Contributions to a reduction that only one kernel reads.

    Attributes:
        combined: the op that combines them, and their count.
        pieces: the pieces of each contribution.
        total: the sum of the weights.
    """

    combined: SumTerm
    pieces: Sequence[Pieces]
    total: float


class MemberInput:
    """One member's contribution, by tensors. Used by one thread at a time.

    Args:
        part: the member's share of the round.
        plan: the round's plan.

    Attributes:
        gone: True if the member is lost; tensors that it has not sent whole do not count.
    """

    def __init__(self, part: MemberShare, plan: PreparedPlan) -> None:
        self.part = part
        self.task = part.member.task
        self.gone = False
        self.places = plan.layout(part.said)
        self._ids: dict[int, Array] = {}  # that were asked for

    @cached_property
    def _left(self) -> deque[tuple[int, int]]:
        """The reductions whose contributions are not released, each with its end."""
        return deque((ref.index, end) for ref, (_, end) in self.places.of.items() if ref.kind == "reduction")

    @property
    def has_operands(self) -> bool:
        """True if its operands have arrived."""
        return self.part.payload.end >= self.places.operands

    def end(self, reduction: int) -> int:
        """Returns the offset up to which a contribution needs the payload, in bytes; 0 where there is none."""
        return self.places.of.get(Ref("reduction", reduction), (0, 0))[1]

    def beginning(self) -> bytes | None:
        """Returns its bytes up to the end of the last operand; None unless they have arrived in one piece."""
        for offset, buffer in self.part.payload.chunks[:1]:
            if offset == 0 and len(buffer) >= self.places.operands:
                return bytes(buffer[: self.places.operands])
        return None

    def take(self, ref: Ref, spec: TensorSpec) -> list[Array]:
        """Returns the pieces of a tensor."""
        return self.part.payload.pieces(self.places.of[ref][0], spec)

    def let_go(self, readers: Mapping[int, int]) -> None:
        """Releases the memory before the first contribution still to be read; `readers` counts readers by reduction."""
        while self._left and not readers[self._left[0][0]]:
            self.part.payload.release(align(self._left.popleft()[1]))

    def contributes(self, index: int) -> bool:
        """Returns whether it contributes to a reduction; False if a lost member has not sent that whole."""
        return bool(self.part.said.weights[index]) and not (self.gone and self.part.payload.end < self.end(index))

    def contribution(self, index: int, reduction: Reduction) -> Weighed:
        """Returns weight and pieces of a contribution; weight 0 if there is none."""
        weight, spec = self.part.said.weights[index], reduction.tensor
        if not self.contributes(index):
            return 0.0, []
        rows = self.rows(index, reduction)
        if rows is not None:
            return weight, [rows.values]
        if reduction.codec is not None:
            return weight, [decoding.decode(reduction.codec, self.encoded(index, reduction), spec).reshape(-1)]
        return weight, self.take(Ref("reduction", index), spec)

    def encoded(self, index: int, reduction: Reduction) -> Array:
        """Returns the bytes of a compressed contribution of a whole array, uint8."""
        spec = TensorSpec("uint8", (reduction.nbytes,))
        return join(self.take(Ref("reduction", index), spec), spec)

    def rows(self, index: int, reduction: Reduction) -> Rows | None:
        """Returns the ids and rows of a contribution that is rows of an array; None if it is no such.

        Args:
            index, reduction: number of the reduction, and the reduction.
        """
        keyed = reduction.form == "keys"
        ids, place = self.ids(index, keyed), self.places.rows.get(index)
        if ids is None or place is None:
            return None
        if reduction.codec is not None:
            size = reduction.codec.row_bytes(reduction.tensor) * place[2]
            data = join(self.part.payload.pieces(place[1], TensorSpec("uint8", (size,))), TensorSpec("uint8", (size,)))
            return Rows(ids, decoding.decode_rows(reduction.codec, data, reduction.tensor, place[2]))
        spec = row_specs(reduction.tensor, place[2])[1]
        return Rows(ids[0] if keyed else ids, join(self.part.payload.pieces(place[1], spec), spec))

    def ids(self, index: int, keyed: bool) -> Array | None:
        """Returns the ids of a contribution that is rows, (n,); None if it is no such.

        Of one by keys (2, n): the keys, and how often each came.
        """
        found, place = self._ids.get(index), self.places.rows.get(index)
        if found is None and place is not None:
            spec = TensorSpec("int64", (2, place[2]) if keyed else (place[2],))
            found = self._ids[index] = join(self.part.payload.pieces(place[0], spec), spec)
        return found

    def reached(self, reductions: Numbers) -> int:
        """Returns how many of these contributions, from the first on, have arrived, or are not waited for any more."""
        if self.gone:
            return len(reductions)
        missing = np.flatnonzero(self.places.ends[reductions] > self.part.payload.end)
        return int(missing[0]) if len(missing) else len(reductions)

    def addresses(self, reductions: Numbers) -> Numbers | None:
        """Returns the addresses of contributions, valid until their memory is released.

        Args:
            reductions: numbers of the reductions, int64.

        Returns:
            Addresses, int64; None unless all have arrived, each in one piece.
        """
        chunks = self.part.payload.chunks[:]
        starts, ends = self.places.starts[reductions], self.places.ends[reductions]
        if not chunks or np.count_nonzero(ends) < len(ends):
            return None
        offset, buffer = chunks[0]
        if offset == 0 and len(buffer) == self.places.size:  # as of all that is small
            return starts + _address(buffer)
        offsets = np.array([offset for offset, _ in chunks])
        sizes = np.array([len(buffer) for _, buffer in chunks])
        bases = np.array([_address(buffer) for _, buffer in chunks])
        which = np.searchsorted(offsets, starts, side="right") - 1
        if (which < 0).any() or (ends > (offsets + sizes)[which]).any():
            return None
        found: Numbers = bases[which] + (starts - offsets[which])
        return found


class Contributions:
    """All contributions to one round. Used by one thread at a time.

    Args:
        job: the round.
        timer: told when a sum apart from kernels began, in monotonic seconds, once it has ended; None for nobody.

    Attributes:
        senders: the contributors, in task order.
        dropped: members that were lost before their contributions were whole.
    """

    def __init__(self, job: ReadyRound, timer: Callable[[float], None] | None = None) -> None:
        self._prepared = job.prepared
        self._compared = bool(job.voters) and not job.tries  # the operands, before the servers voted
        self._timer = timer
        self.senders = [MemberInput(part, job.prepared) for part in job.contributors]
        self.dropped: set[Task] = set()
        self._lost = 0  # how many sessions were lost when it was looked at last
        self._known: dict[int, list[Weighed]] = {}

    def drop(self, sessions: Set[int]) -> bool:
        """Stops waiting for incomplete contributions of lost members; returns True if there are new ones.

        Args:
            sessions: all that were lost; none of them comes back.
        """
        if len(sessions) == self._lost:  # each push to a later round asks
            return False
        known, self._lost = len(self.dropped), len(sessions)
        for sender in self.senders:
            if sender.part.member.session in sessions and not sender.part.payload.whole:
                sender.gone = True
                self.dropped.add(sender.task)
        return len(self.dropped) > known

    @property
    def abandoned(self) -> bool:
        """True if all contributors are lost, and one or more before its contribution was whole."""
        return bool(self.dropped) and all(sender.gone for sender in self.senders)

    def settle(self) -> None:
        """Removes contributors that were lost before their operands had arrived.

        The contributors are fixed from now on.
        """
        self.senders = [sender for sender in self.senders if not sender.gone or sender.has_operands]

    def check_operands(self) -> None:
        """Raises `Diverged` if contributors whose operands have arrived have sent different ones to this server."""
        # Late contributions are merged whatever their operands were: those of their round are over.
        there = (sender for sender in self.senders if sender.has_operands and not sender.part.late)
        senders = list(there) if self._prepared.operands else []
        if len(senders) < 2:
            return
        first, *others = senders
        # Nearly always all begin with the same bytes. Else what lies between operands may differ, which is nothing.
        beginning = first.beginning()
        unsure = [sender for sender in others if beginning is None or sender.beginning() != beginning]
        for ref, operand in self._prepared.operands if unsure else ():
            pieces = first.take(ref, operand.tensor)
            for sender in unsure:
                what = operand.label or f"operand {ref.index}"
                _check_equal(what, first, pieces, sender, sender.take(ref, operand.tensor))

    def operands(self) -> Iterator[tuple[Ref, Array]]:
        """Yields the operands of this server; raises `Diverged` as `check_operands`, unless that was asked before."""
        if not self._compared:
            self.check_operands()
        for ref, operand in self._prepared.operands:
            yield ref, join(self.senders[0].take(ref, operand.tensor), operand.tensor)

    def reached(self, reductions: Numbers) -> int:
        """Returns how many rows of reductions, from the first on, have all contributions, or wait for no more."""
        return min(sender.reached(column) for sender in self.senders for column in reductions.T)

    def of(self, index: int) -> list[Weighed]:
        """Returns weight and pieces of each sender's contribution to a reduction; the same at every call.

        Compressed ones are decoded, and not kept.
        """
        found = self._known.get(index)
        if found is None:
            reduction = self._prepared.plan.reductions[index]
            found = [sender.contribution(index, reduction) for sender in self.senders]
            if reduction.codec is None:
                self._known[index] = found
        return found

    @cached_property
    def by_host(self) -> bool:
        """True if several senders are of one host: what these contribute is summed first, as its workers would do it.

        So the bits of a sum do not depend on whether they have.
        """
        hosts = [sender.part.said.host for sender in self.senders if sender.part.said.host]
        return len(set(hosts)) < len(hosts)

    @property
    def batched(self) -> int:
        """The number of contributions that kernels may sum in batches; 0 where they may not."""
        return 0 if self.by_host else len(self.senders)

    def _by_hosts(self, index: int, room: Room) -> list[Weighed]:
        """Returns the contributions to a reduction, as `of`; of the senders of one host their sum, and its weight."""
        if not self.by_host or self._prepared.plan.reductions[index].op == "first":
            return self.of(index)
        spec, hosts = self.spec(index), dict[object, list[Weighed]]()
        for sender, weighed in zip(self.senders, self.of(index), strict=True):
            hosts.setdefault(sender.part.said.host or sender, []).append(weighed)
        return [_together(spec, each, room) for each in hosts.values()]

    def is_given(self, index: int) -> bool:
        """Returns whether any sender's contribution to a reduction counts."""
        return any(sender.contributes(index) for sender in self.senders)

    def counted(self, index: int) -> Iterator[tuple[Task, list[Array]]]:
        """Yields the sender and the pieces of each contribution in a reduction's value."""
        present = (
            (sender.task, pieces)
            for sender, (weight, pieces) in zip(self.senders, self.of(index), strict=True)
            if weight
        )
        return islice(present, 1 if self._prepared.plan.reductions[index].op == "first" else None)

    def spec(self, index: int) -> TensorSpec:
        """Returns dtype and shape of a reduction's value."""
        return self._prepared.plan.reductions[index].tensor

    def total(self, index: int) -> float:
        """Returns the sum of the weights of a reduction."""
        return sum(sender.part.said.weights[index] for sender in self.senders)

    def parts(self, index: int) -> ContributionParts | None:
        """Returns the contributions to a reduction, if a kernel may sum them."""
        reduction = self._prepared.plan.reductions[index]
        if reduction.form != "dense" or reduction.codec is not None or self.by_host:
            return None
        present = [weighed for weighed in self.of(index) if weighed[0]]
        if not 0 < len(present) <= MAX_PARTS:
            return None
        combined = SumTerm(reduction.op, len(present))
        return ContributionParts(combined, [pieces for _, pieces in present], sum(weight for weight, _ in present))

    def value(self, index: int, room: Room = np.empty) -> Array:
        """Returns the value of a reduction; of rows the whole, with zeros where no row is.

        Args:
            index: number of the reduction.
            room: as `reduce` has it.
        """
        if self._timer is None:
            return self._value(index, room)
        began = time.monotonic()
        value = self._value(index, room)
        self._timer(began)
        return value

    def _value(self, index: int, room: Room) -> Array:
        reduction = self._prepared.plan.reductions[index]
        if reduction.form == "dense" and reduction.codec is not None:
            return self._decoded(index, reduction, reduction.codec)
        if reduction.form == "dense":
            return reduce(reduction.op, reduction.tensor, self._by_hosts(index, room), room)
        whole = np.zeros(reduction.tensor.shape, DTYPES[reduction.tensor.dtype])
        ids, values = self.reduced_rows(index)
        whole[ids] = values
        return whole

    def _decoded(self, index: int, reduction: Reduction, codec: Codec) -> Array:
        """As `reduce`, of compressed contributions: each is decoded to the reduction's dtype, then all are summed."""
        senders = [sender for sender in self.senders if sender.contributes(index)]
        with np.errstate(all="ignore"):
            value = decoding.total(codec, [sender.encoded(index, reduction) for sender in senders], reduction.tensor)
            if reduction.op == "mean":
                _divide(value, sum(sender.part.said.weights[index] for sender in senders), value)
        return value

    def check_rows(self) -> None:
        """Checks the ids of all rows, which must be here, and the places of elements; before anything is written.

        Raises:
            ProgramError: somebody's ids are no rows of the whole, or not in increasing order; or a key came no time;
                or places are those of no elements, or not in increasing order.
        """
        plan = self._prepared.plan
        for sender, index in product(self.senders, plan.chosen):
            reduction = plan.reductions[index]
            if Ref("reduction", index) in sender.places.of and sender.contributes(index):
                _check_places(sender.encoded(index, reduction), sender.task, reduction)
        for sender, index in product(self.senders, plan.rows):
            keyed = index in plan.keys
            ids = sender.ids(index, keyed)
            if ids is not None:
                (_check_times if keyed else _check_ids)(ids, sender.task, plan.reductions[index])

    def keys(self, index: int) -> list[Array]:
        """Returns keys of the contributions that `rows` returns, and how often each came, (2, n)."""
        found = (sender.ids(index, True) for sender in self._counted(index))
        return [keys for keys in found if keys is not None]

    def rows(self, index: int) -> list[Rows]:
        """Returns the rows of each contribution to a reduction that counts, in task order; `check_rows` was called."""
        reduction = self._prepared.plan.reductions[index]
        found = (sender.rows(index, reduction) for sender in self._counted(index))
        return [rows for rows in found if rows is not None]

    def _counted(self, index: int) -> list[MemberInput]:
        """Returns the senders whose rows count in a reduction."""
        present = [sender for sender in self.senders if sender.part.said.weights[index]]
        return present[: 1 if self._prepared.plan.reductions[index].op == "first" else None]

    @property
    def seconds(self) -> int:
        """The time of the round: the least of the contributors' clocks; 0 if none has told its own."""
        return min((sender.part.said.seconds for sender in self.senders if sender.part.said.seconds), default=0)

    def reduced_rows(self, index: int) -> Rows:
        """Returns the value of a reduction as rows, each place once, in increasing order."""
        reduction = self._prepared.plan.reductions[index]
        rows = self.rows(index)
        specs = row_specs(reduction.tensor, 0)
        ids, values = (
            np.concatenate([np.empty(spec.shape, DTYPES[spec.dtype]), *each])
            for spec, each in zip(specs, zip(*rows, strict=True) if rows else ((), ()), strict=True)
        )
        order, starts = group(ids)
        total = sum_groups(values, order, starts)
        if reduction.op == "mean":
            with np.errstate(all="ignore"):
                total /= np.asarray(self.total(index), total.dtype)
        return Rows(ids[order[starts[:-1]]], total)

    @cached_property
    def _readers(self) -> Counter[int]:
        """Number of steps that still have to read each reduction."""
        return self._prepared.outline.uses.copy()

    def let_go(self, needs: Iterable[Sequence[int]]) -> None:
        """Releases contributions that no step needs any more; `needs` holds the reductions of each finished step."""
        for index in chain.from_iterable(needs):
            self._readers[index] -= 1
            if not self._readers[index]:
                self._known.pop(index, None)
        for sender in self.senders:
            sender.let_go(self._readers)


def _together(spec: TensorSpec, contributions: Sequence[Weighed], room: Room) -> Weighed:
    """Returns the sum of contributions, of which any may have the weight 0, and of their weights."""
    present = [each for each in contributions if each[0]]
    if len(present) < 2:
        return present[0] if present else (0.0, [])
    return sum(weight for weight, _ in present), [reduce("sum", spec, present, room).reshape(-1)]


def _check_ids(ids: Array, task: Task, reduction: Reduction) -> None:
    size = reduction.tensor.shape[0]
    if len(ids) and not (ids[0] >= 0 and ids[-1] < size and bool((ids[1:] > ids[:-1]).all())):
        target = reduction.target or "a reduction"
        raise ProgramError(f"{target}: the row ids from {task} must increase and be below {size}")


def _check_places(data: Array, task: Task, reduction: Reduction) -> None:
    if reduction.codec is not None and not decoding.are_places(reduction.codec, data, reduction.tensor):
        target = reduction.target or "a reduction"
        raise ProgramError(
            f"{target}: the element indices from {task} must increase and be below {reduction.tensor.size}"
        )


def _check_times(ids: Array, task: Task, reduction: Reduction) -> None:
    times = ids[1]
    if times.size and not (times.min() >= 1 and times.max() <= MAX_COUNT):
        raise ProgramError(
            f"{reduction.target or 'a reduction'}: the key counts from {task} are between {times.min()} and "
            f"{times.max()}, which is not possible"
        )


def _address(buffer: memoryview) -> int:
    return address_of(np.frombuffer(buffer, np.uint8))


def _check_equal(
    what: str, first: MemberInput, expected: Sequence[Array], sender: MemberInput, pieces: Sequence[Array]
) -> None:
    if _bytes(pieces) != _bytes(expected):
        raise Diverged(
            f"{what} must be equal on all workers, but {first.task} has {_show(expected)} and "
            f"{sender.task} has {_show(pieces)}; give it the same value on every worker, or reduce it first"
        )


def _bytes(pieces: Sequence[Array]) -> bytes:
    return b"".join(piece.tobytes() for piece in pieces)


def _show(pieces: Sequence[Array]) -> str:
    return np.array2string(np.concatenate([piece[:4] for piece in pieces])[:4], threshold=4)


def reduce(
    op: ReduceOp, spec: TensorSpec, contributions: Sequence[tuple[float, Sequence[Array]]], room: Room = np.empty
) -> Array:
    """Combines contributions in the order given, which is task order, so that sums are reproducible.

    Args:
        op: "sum"; "mean": the sum over the sum of the weights; "first": the first one with a weight.
        spec: dtype and shape of each contribution and of the value.
        contributions: weight and pieces of each; the pieces of a weight of 0 are not read.
        room: allocates the memory of what is computed, given its shape and dtype.

    Returns:
        The value, of `spec`; zeros for a sum of nothing, NaN for a mean of nothing. It may be a view of a received
        part.
    """
    present = [pieces for weight, pieces in contributions if weight][: 1 if op == "first" else None]
    with np.errstate(all="ignore"):
        value = _sum(spec, present, room)
        if op == "mean":
            # A single contribution is received memory, which is only read; a sum is a new array.
            out = value if len(present) > 1 else room(value.shape, value.dtype)
            _divide(value, sum(weight for weight, _ in contributions), out)
            value = out
    return value


def _divide(value: Array, weights: float, out: Array) -> None:
    # Half precision cannot represent large sums of weights.
    total = np.asarray(weights, np.result_type(value.dtype, np.float32))
    np.divide(value, total, out=out, casting="same_kind")


def _sum(spec: TensorSpec, contributions: Sequence[Sequence[Array]], room: Room) -> Array:
    if not contributions:
        return np.zeros(spec.shape, DTYPES[spec.dtype])
    first, *others = contributions
    if not others and len(first) == 1:
        return join(first, spec)
    whole = room(spec.shape, DTYPES[spec.dtype])
    total = whole.reshape(-1)
    if not others:
        np.concatenate([total[:0], *first], out=total)
        return whole
    if all([len(p) for p in first] == [len(p) for p in other] for other in others):
        # All payloads are cut alike, so one pass adds the first two and nothing is copied.
        at = 0
        for pieces in zip(first, *others, strict=True):
            segment = total[at : at + len(pieces[0])]
            np.add(pieces[0], pieces[1], out=segment)
            for piece in pieces[2:]:
                np.add(segment, piece, out=segment)
            at += len(segment)
        return whole
    total[:] = join(first, spec).reshape(-1)
    for other in others:
        at = 0
        for piece in other:
            total[at : at + len(piece)] += piece
            at += len(piece)
    return whole
