"""Contributions as workers send them: with rows, with keys, in pieces that a test lets come; votes that it delivers;
rounds without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from psserver.plans.round import ReturnedValues
from psserver.rounds.rounds import Rounds
from psserver.rounds.votes import Votes
from pstesting.clock import Clock
from tests.kit import internals as inside
from tests.kit.internals import Array, Contribution, MemberShare, Payload, Peer, PlacedVariable, Plan, Ref, Rows, Vote
from tests.kit.rig import WORKERS, Job, Servers, Worker, adding, at_once, core, payload

Given = Array | Rows | None
"""What one worker gives to a reduction: an array, rows, or nothing, with a weight of 0."""


def rows(*ids: int, of: Any = 1.0, width: int = 2, dtype: str = "float32") -> Rows:
    """Rows for some places, all with one number, or as given."""
    values = np.broadcast_to(np.asarray(of, dtype), (len(ids), width)).copy() if np.ndim(of) == 0 else np.asarray(of)
    return Rows(np.array(ids, np.int64), values)


def packed(plan: Plan, given: Sequence[Given], operands: Sequence[Array] = ()) -> tuple[tuple[int, ...], Payload]:
    """How many rows each reduction of rows has, and the payload: what is dense, then ids and rows."""
    counts = tuple(len(one.values) if isinstance(one, Rows) else 0 for n, one in enumerate(given) if n in plan.rows)
    dense = [one for one in given if one is not None and not isinstance(one, Rows)]
    tail = [array for one in given if isinstance(one, Rows) for array in one]
    return counts, Payload.pack([*operands, *dense, *tail])


def share(
    place: int,
    plan: Plan,
    given: Sequence[Given],
    operands: Sequence[Array] = (),
    weights: Sequence[float] | None = None,
    part_bytes: int = 1 << 20,
) -> MemberShare:
    """One worker's share of a round on server 0."""
    counts, payload = packed(plan, given, operands)
    chunks = [(at, memoryview(b"".join(buffers))) for at, buffers in inside.parts_of(payload, part_bytes)]
    own = tuple(weights) if weights else tuple(0.0 if one is None else 1.0 for one in given)
    said = Contribution(place + 1, 1, 4, plan.id, own, rows=counts)
    inside.PreparedPlan(plan, 0).check(said, payload.size)
    return MemberShare(inside.Member(WORKERS[place], place + 1, 1), said, Payload(chunks, payload.size))


def round_of(plan: Plan, *shares: MemberShare) -> inside.ReadyRound:
    """A round of these."""
    return inside.ReadyRound(4, inside.PreparedPlan(plan, 0), shares, (), lambda: "the section")


WHOLE = inside.TensorSpec("float32", (inside.ROWS, 2))
"""A table of two numbers a row, as programs have it."""


def part_of(
    number: int,
    spec: inside.TableSpec,
    server: int = 0,
    buckets: range = range(inside.BUCKETS),
    slot: inside.SlotTensor | None = None,
    name: str = "users",
    table: str = "users",
) -> PlacedVariable:
    """A variable that is a part of a table, or a tensor beside one."""
    part = inside.TablePart(table, spec, buckets.start, len(buckets), slot)
    return PlacedVariable(number, inside.VariableSpec(slot.name if slot else name, part.tensor, part=part), (server,))


def create_part(job: Job, worker: Worker, variable: PlacedVariable) -> PlacedVariable:
    """Creates it, as the next variable of a job."""
    for place in dict.fromkeys((0, *variable.servers)):
        reply = job.verbs[place].create_batch(worker.session, [variable])
        assert (reply.error, reply.initialized) == (None, (variable.id,) * (place in variable.servers))
    job.variables.append(variable)
    return variable


def by_keys(*tables: PlacedVariable, program: inside.Program | None = None, **more: object) -> Plan:
    """A plan that adds rows by keys to each table."""
    reductions = tuple(inside.Reduction("sum", WHOLE, v.servers, repr(v.spec.name), "keys") for v in tables)
    applies = tuple(
        inside.Apply(0, v.servers, (Ref("variable", v.id), Ref("reduction", n))) for n, v in enumerate(tables)
    )
    return Plan(reductions, programs=(program or adding(WHOLE),), applies=applies, **more)  # type: ignore[arg-type]


def keyed(keys: Sequence[int], value: float = 1.0, times: Sequence[int] | None = None) -> list[Array]:
    """Keys and how often each came, and rows that are all of one number."""
    ids = np.array([keys, times or [1] * len(keys)], np.int64)
    return [ids, np.full((len(keys), 2), value, "float32")]


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
        weights, operands, want: as there.
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
        observes: bool = False,
    ) -> None:
        each = 0.0 if observes else float(worker.replicas)
        given = tuple(weights) if weights is not None else (each,) * len(plan.reductions)
        packed = Payload() if observes else payload(plan, 0, values, given, operands)
        self._bytes = bytearray(packed.size)
        self._at = 0
        for offset, buffer in packed.chunks:
            self._bytes[offset : offset + len(buffer)] = buffer
        self.payload = Payload((), packed.size)
        self.begun: list[Payload] = []
        self.said = Contribution(
            worker.session, worker.generation, worker.round, plan.id, given, False, (), want, observes
        )
        push = worker.job.verbs[0].push
        self.reply: Future[inside.RoundReply] = push(self.said, self.payload, self.begun.append)

    def come(self, nbytes: int = 1 << 60, step: int = 1 << 60) -> Sending:
        """More bytes come, in parts of `step`; all of them, where it is not said how many."""
        end = min(inside.align(self._at + nbytes), len(self._bytes))
        while self._at < end:
            upto = min(end, self._at + inside.align(min(step, end)))
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
    values = [job.servers.cores[0].machine.job.store.find(variable.id).array for variable in variables]
    assert all((value == value[0]).all() or np.isnan(value).all() for value in values)
    return [float(value[0]) for value in values]


def arrays(payload: Payload) -> list[float]:
    """The variables in the beginning of an answer, as far as they are there; each has one number throughout."""
    end = payload.end // (SIZE * 8)
    whole = np.concatenate([np.frombuffer(buffer, np.float64) for _, buffer in payload.chunks] or [np.zeros(0)])
    assert payload.end % inside.ALIGN == 0
    return [float(whole[at * SIZE]) for at in range(end)]


class Mail:
    """The other servers of a core: keeps what it says.

    Args:
        sender: the core's number.
        votes: what is on its way, as (sender, receiver, vote).

    Attributes:
        known: where the servers are, as the core was told.
    """

    def __init__(self, sender: int, votes: list[tuple[int, int, Vote]]) -> None:
        self.known: tuple[Peer, ...] = ()
        self._sender = sender
        self._votes = votes

    def know(self, servers: Sequence[Peer]) -> None:
        """Keeps where the servers of a job are."""
        self.known = tuple(servers)

    def say(self, server: int, vote: Vote) -> None:
        """Adds a vote to what is on its way."""
        self._votes.append((self._sender, server, vote))


class Voters:
    """Servers that vote, with a network between them that a test turns.

    Args:
        root: their checkpoint root.
        count: how many they are.
        limits: of the memory of each; none where it is left out.
        submit: what does their array work; by default the caller's thread does.
        copied: True if each has the copies of the one before it.

    Attributes:
        clock, cores, job: what they are, and the job on them.
        variables: one of each server, which a test adds.
        votes: what is on its way, as (sender, receiver, vote).
    """

    def __init__(
        self,
        root: Any,
        count: int = 2,
        limits: Sequence[int] = (),
        submit: Callable[..., object] = at_once,
        copied: bool = False,
    ) -> None:
        self.clock, self.votes = Clock(), list[tuple[int, int, Vote]]()
        self.cores = [core(n, 0, limits[n] if limits else 0, root, self.clock, submit) for n in range(count)]
        for number, one in enumerate(self.cores):
            one.others = Mail(number, self.votes)
        copies = (*range(1, count), 0) if copied else ()
        self.job = Job(Servers(list(self.cores), self.cores, self.clock, root, False), copies)
        self.variables: list[PlacedVariable] = []

    def hear(self, change: Callable[[Vote], Sequence[Vote]] = lambda vote: [vote]) -> None:
        """Has all votes arrive, and those that follow, as `change` leaves them."""
        while self.votes:
            sender, receiver, vote = self.votes.pop(0)
            for each in change(vote):
                self.cores[receiver].hear(sender, each)

    @property
    def values(self) -> list[float]:
        """What is in the variable of each server."""
        return [
            float(one.machine.job.store.find(v.id).array[0]) for one, v in zip(self.cores, self.variables, strict=True)
        ]

    @property
    def lasts(self) -> list[int]:
        """The last round that is over, on each server."""
        return [one.status().round for one in self.cores]


class RoundsByHand:
    """The rounds of a server, without the server: what is asked of them is answered at once.

    Args:
        describe: says what a plan does, as of `Rounds`.
        plans: the approved ones, of which the first is pushed for where none is named.
        members: those of generation 1.
        start: where it begins.

    Attributes:
        rounds: what a test may ask for by this object, too.
    """

    def __init__(
        self,
        *plans: Plan,
        members: Sequence[inside.Member] = (),
        start: inside.Start | None = None,
        describe: Callable[[bytes], str] = lambda plan_id: "a section",
    ) -> None:
        self.rounds = Rounds(describe, Votes(0))
        self._plan = plans[0]
        self._failed: dict[Future[Any], inside.PSError] = {}
        for plan in plans:
            self.approve(inside.PreparedPlan(plan, 0))
        self.close_generation(inside.Generation(1, tuple(members), start=start))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.rounds, name)
        if name not in ("approve", "refuse", "close_generation", "session_ended"):
            return found
        return lambda *args: self._carry_out(found(*args))

    def _carry_out(self, effects: Sequence[inside.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, inside.Fail):
                effect.future.set_exception(effect.error)
                self._failed[effect.future] = effect.error

    def failed(self) -> dict[Future[Any], inside.PSError]:
        """The calls that were refused since this was asked last, and why."""
        found, self._failed = self._failed, {}
        return found

    def refused(self, *args: Any, **said: Any) -> None:
        """Pushes what is refused; raises why."""
        future = self.push(*args, **said)
        raise self._failed.pop(future)

    def give(self, said: Contribution, content: Payload) -> Future[Any]:
        """Contributes."""
        future: Future[Any] = Future()
        self._carry_out(self.rounds.push(said, content, future, 0.0))
        return future

    def push(
        self,
        session: int,
        round: int = 0,
        plan: Plan | None = None,
        generation: int = 1,
        whole: bool = True,
        **said: Any,
    ) -> Future[Any]:
        """Contributes the session's number, of which nothing has come where it is not `whole`."""
        plan = plan or self._plan
        header = Contribution(session, generation, round, plan.id, (1.0,), **said)
        content = payload(plan, 0, [session], (1.0,), ())
        return self.give(header, content if whole else Payload((), content.size))

    def finish(self, job: inside.ReadyRound) -> list[int]:
        """Ends a round; returns who is answered."""
        record, waiters = self.rounds.complete(job, ReturnedValues([np.array(0)]))
        for _, future in waiters:
            future.set_result(record)
        return [said.session for said, _ in waiters]

    def run(self) -> list[tuple[Any, int, list[int]]]:
        """Runs all rounds that can; returns their sequences and numbers, and whose contributions they have."""
        made = []
        while (job := self.rounds.next_job()) is not None:
            made.append((job.sequence, job.round, [part.said.session for part in job.parts]))
            self.finish(job)
        return made
