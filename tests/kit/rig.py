"""Servers for tests: a job of a few cores, driven by hand, in process or over gRPC."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from psserver.programs.kernels.compiler import PATIENCE, Compiler
from pstesting.clock import Clock
from pswire.checkpoint import assembly
from tests.kit import internals as inside
from tests.kit.internals import ALL, Core, Input, PlacedVariable, Plan, Program, Ref, RoundReply, Task, TensorSpec, Turn

CHIEF = Task("chief", 0)
WORKERS = tuple(Task("worker", index) for index in range(4))
HEARTBEAT = inside.Timeouts.heartbeat_interval
SOON = 60.0
"""Seconds within which whatever can be answered is, on a machine that others use."""

T = TypeVar("T")


NOWHERE = "/dev/null/nowhere"
"""A checkpoint root in which nothing can be saved: a test that saves says where."""


def at_once(work: Callable[[], object]) -> None:
    """Runs array work in the caller's thread."""
    work()


class Deferred:
    """Array work that is done when a test says so.

    Attributes:
        queue: what is to be done.
    """

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()

    def __call__(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def run(self) -> None:
        """Does it, and what follows from it."""
        while self.queue:
            self.queue.popleft()()


def core(
    server: int = 0,
    incarnation: int = 0,
    memory_limit: int = 0,
    root: Path | str = NOWHERE,
    clock: Callable[[], float] | None = None,
    submit: Callable[[Callable[[], object]], object] = at_once,
    lease: float = 10.0,
    files: Callable[[Callable[[], object]], object] | None = None,
    **more: Any,
) -> Core:
    """A core with what a test does not care about filled in; it compiles no kernel that it does not wait for.

    What a compiler in the background has not finished when a test is over would slow down all tests behind it.
    """
    config = inside.ServerConfig(
        Task("ps", server),
        memory_limit=memory_limit,
        checkpoint_root=str(root),
        timeouts=inside.Timeouts(session_timeout=lease),
        **{"kernel_cache": os.environ.get("PS_KERNEL_CACHE", ""), **more},
    )
    made = Core(config, incarnation or 100 + server, clock or Clock(), submit, files)
    made.kernels.compiler._patience = sys.maxsize
    return made


def compiler_of(core: Core) -> Compiler:
    """A core's compiler, which compiles from now on as that of a server does."""
    core.kernels.compiler._patience = PATIENCE
    return core.kernels.compiler


def eventually(condition: Callable[[], T]) -> T:
    """What a condition gives once it is true; fails where it does not become so."""
    deadline = time.monotonic() + SOON
    pause, seconds = threading.Event(), 0.001
    while not (found := condition()):
        assert time.monotonic() < deadline, "this did not come to be"
        pause.wait(seconds)
        seconds = min(1.5 * seconds, 0.05)  # a condition may ask a server
    return found


@dataclass
class Servers:
    """Some servers, and what is behind them.

    Attributes:
        verbs: what a client sees, in order.
        cores: what answers, in order.
        clock: of all cores.
        root: the checkpoint root of all cores.
        remote: whether there is a network in between.
    """

    verbs: list[inside.ParameterServer]
    cores: list[Core]
    clock: Clock
    root: Any
    remote: bool

    def spend(self, seconds: float, *sessions: int) -> None:
        """Lets time pass; the cores look at their leases, and these sessions heartbeat."""
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            for session in sessions:
                self.verbs[0].heartbeat(session, -1, b"")
            self.tick()

    def tick(self) -> None:
        """Lets the cores look at their leases."""
        for one in self.cores:
            one.tick()


class Beside:
    """The other servers of a core: they hear at once what it says.

    Args:
        core: the core.
        cores: all of them.
    """

    def __init__(self, core: Core, cores: Sequence[Core]) -> None:
        self._core, self._cores = core, cores

    def know(self, servers: Sequence[inside.Peer]) -> None:
        """They are in this process."""

    def say(self, server: int, said: inside.Vote | inside.Testimony) -> None:
        """Passes it on."""
        self._cores[server].hear(self._core.server, said)


@contextmanager
def serving(kind: str, count: int, root: Path | str, memory_limit: int = 0) -> Iterator[Servers]:
    """Runs servers: `core` in the caller's thread, `thread` with array work beside it, a transport's name over a
    network.

    With `calls` it is gRPC, and each push and pull a call of its own.
    """
    clock = Clock()
    with ExitStack() as stack:
        cores = []
        for number in range(count):
            submit: Callable[..., object] = at_once
            if kind != "core":
                submit = stack.enter_context(ThreadPoolExecutor(1)).submit
            cores.append(core(number, 0, memory_limit, root, clock, submit))
        verbs: list[inside.ParameterServer] = list(cores)
        distant = kind in (*inside.TRANSPORTS, "calls")
        if distant:
            transport: inside.TransportName = "grpc" if kind == "calls" else cast(inside.TransportName, kind)
            verbs = [stack.enter_context(remote(one, transport=transport, streams=kind != "calls")) for one in cores]
        for one in cores:
            one.others = Beside(one, cores)
        yield Servers(verbs, cores, clock, root, distant)
        for one in cores:
            one.close()


@contextmanager
def remote(
    behind: Core, transport: inside.TransportName = "grpc", streams: bool = True
) -> Iterator[inside.RemoteServer]:
    """A core behind a real connection."""
    with inside.ServerThread(behind, inside.ServerConfig(behind.task), grace=0.0) as thread:
        timeouts = inside.Timeouts(
            session_timeout=4.0, call_timeout=10.0, round_timeout=SOON, server_timeout=5 * SOON
        )  # a server in this process is never lost, however busy the machine is
        server = inside.RemoteServer(thread.address, behind.task, timeouts, transport=transport, streams=streams)
        try:
            yield server
        finally:
            server.close()


def create(
    server: inside.ParameterServer,
    session: int,
    id: int,
    spec: inside.VariableSpec,
    servers: tuple[int, ...] = (0,),
    value: inside.Payload | None = None,
) -> inside.CreateBatchReply:
    """Creates a variable on one server, and gives it a first value there; returns what is known of it then."""
    batch = [PlacedVariable(id, spec, servers)]
    reply = server.create_batch(session, batch)
    if reply.error is not None:
        raise reply.error
    if value is not None:
        said = inside.Contribution(session, 0, 0, b"", first_values=(id,))
        server.push(said, value).result(SOON)
        reply = server.create_batch(session, batch)
    return reply


def consistency(k: int = 0, **said: Any) -> inside.Consistency:
    """How a member makes its rounds; `k` is the staleness."""
    return inside.Consistency(staleness=k, **said)


class Job:
    """A job on some servers, with a chief that does what the test says.

    Args:
        servers: where.
        copies: which server has the copies of each; empty: none.
    """

    def __init__(self, servers: Servers, copies: tuple[int, ...] = ()) -> None:
        self.servers = servers
        self.copies = copies
        self.verbs = servers.verbs
        self.begin()

    def begin(self) -> inside.JobStarted:
        """Opens a chief's session and begins a job, whatever was there before."""
        self.opened = self.open(CHIEF, 0, True)
        self.token = self.opened.token
        self.generation = inside.Generation(0, ())
        self.variables: list[PlacedVariable] = []
        addresses = tuple(one.address for one in self.verbs if isinstance(one, inside.RemoteServer))
        lives = tuple(one.incarnation for one in self.servers.cores)
        entry = inside.JobStarted(self.token, lives, addresses=addresses, copies=self.copies)
        for server in self.verbs:
            assert server.approve(self.token, 0, [entry]) == 1
        return entry

    def open(self, task: Task, replicas: int = 1, drives: bool = False, **said: Any) -> inside.Opened:
        """Opens a session on every server, as is said in `consistency`; who was this task, or chief, has ended."""
        self.end(task, drives)
        how = consistency(**said)
        # A key of its own, as clients have: an attempt that is made again finds the session of the first one.
        opened = self.verbs[0].open(task, replicas, secrets.randbits(62) | 1, drives, how)
        for server in self.verbs[1:]:
            server.open(task, replicas, opened.session, drives, how)
        return opened

    def end(self, task: Task, drives: bool = False) -> None:
        """The processes that are a task, or any chief, end: their connections have, for a heartbeat nobody has
        beaten."""
        first = self.servers.cores[0]
        sessions = [
            state.member.session
            for state in self.verbs[0].status().sessions
            if state.state == "open" and state.drives == drives and (drives or state.member.task == task)
        ]
        for session in sessions:
            if isinstance(first, Core):
                with first._lock:
                    first.machine.members.part(session, self.servers.clock() - HEARTBEAT)
            else:  # in another process, whose clock nobody turns
                self.verbs[0].leave(session, "it ended")

    def append(self, *entries: inside.LogEntry) -> None:
        """Appends to server 0's log and copies all of it to the others."""
        first = self.verbs[0]
        length = first.status().log
        assert first.approve(self.token, length, entries) == length + len(entries)
        whole: list[inside.LogEntry] = []
        while len(whole) < length + len(entries):  # a long log comes in several answers
            whole += first.watch(self.opened.session, len(whole), 0).result(SOON).entries
        for server in self.verbs[1:]:
            assert server.approve(self.token, 0, whole) == len(whole)

    def join(self, *tasks: Task, replicas: int = 1, **said: Any) -> list[Worker]:
        """Opens a session for each task, and closes a generation of them and of those who are there; see `open`."""
        how = consistency(**said)
        workers = [Worker(self, task, self.open(task, replicas, **said).session, replicas, how) for task in tasks]
        members = [*self.generation.members, *(worker.member for worker in workers)]
        self.close(sorted(members, key=lambda member: member.task))
        for worker in workers:
            worker.generation = self.generation.number
        return workers

    def close(self, members: Sequence[inside.Member] = ()) -> inside.Generation:
        """Closes a generation of these members."""
        number = self.generation.number + 1
        self.generation = inside.Generation(number, tuple(members), start=inside.Start(number, 0))
        self.append(inside.GenerationClosed(self.generation))
        return self.generation

    def variable(
        self, creator: Worker, value: inside.Array, servers: tuple[int, ...] = (0,), name: str = "", **said: Any
    ) -> PlacedVariable:
        """Creates a variable with its first value, as the next of the job; more may be said in its `VariableSpec`."""
        spec = inside.VariableSpec(name or f"v{len(self.variables)}", inside.spec_of(np.asarray(value)), **said)
        variable = PlacedVariable(len(self.variables), spec, servers)
        if 0 not in servers:
            create(self.verbs[0], creator.session, variable.id, spec, servers)
        for server in servers:
            self.give(creator, variable, server, value)
        self.variables.append(variable)
        return variable

    def give(self, creator: Worker, variable: PlacedVariable, server: int, value: inside.Array) -> None:
        """Creates a variable on a server, with its first value."""
        first = inside.Payload.pack([inside.portable(value)])
        create(self.verbs[server], creator.session, variable.id, variable.spec, variable.servers, first)

    def adder(self, creator: Worker, value: Any = 0, servers: tuple[int, ...] = (0,)) -> tuple[PlacedVariable, Plan]:
        """A variable, and an approved plan that adds to it and returns the sum."""
        variable = self.variable(creator, np.asarray(value), servers)
        return variable, self.approve(sum_into(variable), creator)

    def arrived(self, worker: Worker, server: int = 0) -> None:
        """Waits until what a worker pushed last is there."""
        eventually(
            lambda: any(
                waiting.round == worker.round and worker.task not in waiting.missing
                for waiting in self.verbs[server].status().waiting
            )
        )

    def approve(self, plan: Plan, proposer: Worker) -> Plan:
        """Proposes and approves a plan."""
        self.verbs[0].propose(proposer.session, plan, "", None)
        self.append(inside.Approved(plan))
        return plan

    def order(self, worker: Worker, path: str, state: str = "", **said: Any) -> Plan:
        """A round that orders a checkpoint of all servers."""
        servers = tuple(range(len(self.verbs)))
        plan = self.approve(checkpoint(path, servers, state, worker.round), worker)
        together(*(worker.push(plan, server=server, **said) for server in servers))
        worker.round += 1
        return plan

    def save(self, worker: Worker, path: str = "run/ckpt-1", **said: Any) -> list[inside.Shard]:
        """Orders a checkpoint, and does what a chief does then: shards, the manifest, the log."""
        plan = self.order(worker, path, **said)
        try:
            pending = [server.snapshot(self.token, plan.id, "") for server in self.verbs]
            shards = [future.result(SOON) for future in pending]
            self.verbs[0].snapshot(self.token, plan.id, manifest_of(shards)).result(SOON)
        except inside.PSError as error:
            self.append(inside.Snapshotted(plan.id, 0, path, str(error)))
            raise
        self.append(inside.Snapshotted(plan.id, shards[0].round, path))
        return shards

    def restore(
        self, worker: Worker, path: str = "run", order: inside.RestoreOrder = ALL, others: Sequence[Worker] = ()
    ) -> inside.RestoreReply:
        """What every process does to restore; the others are the members besides."""
        turn, members = worker.turn(), (worker, *others)
        found = self.prepare(worker, path, turn, order)
        plan = self.commit(worker, path, turn)
        pushed = [member.push(plan, server=server) for member in members for server in plan.servers]
        together(*pushed)
        for member in members:
            member.round += 1
        return found

    def prepare(self, worker: Worker, path: str, turn: Turn, order: inside.RestoreOrder = ALL) -> inside.RestoreReply:
        """Has all servers prepare a restore; they say the same."""
        opened = self.verbs[0].restore(worker.session, path, turn, inside.RestoreOrder("open")).result(SOON)
        futures = [server.restore(worker.session, opened.path, turn, order) for server in self.verbs]
        assert all(future.result(SOON) == opened for future in futures)
        return opened

    def commit(self, worker: Worker, path: str, turn: Turn) -> Plan:
        """The plan of the round that commits a restore."""
        return self.approve(Plan(restore=inside.RestoreCommit(path, tuple(range(len(self.verbs))), turn)), worker)

    def value(self, reader: Worker, variable: PlacedVariable, after: int = -1) -> inside.Array:
        """Reads a variable."""
        server = self.verbs[variable.servers[0]]
        reply = server.pull(reader.session, [variable.id], after).result(SOON)
        return reply.payload.tensors([variable.spec.tensor])[0]


class JobWithValues(Job):
    """A job on cores whose array work is the test's, or not here: first values lie there without any."""

    def give(self, creator: Worker, variable: PlacedVariable, server: int, value: inside.Array) -> None:
        """Creates a variable on a server, and puts its first value there."""
        create(self.verbs[server], creator.session, variable.id, variable.spec, variable.servers)
        self.servers.cores[server].machine.job.store.initialize(variable.id, np.array(value))


@dataclass
class Worker:
    """A process that takes part.

    Attributes:
        job: where.
        task, session, replicas: who.
        how: how it makes its rounds.
        generation: the newest generation that it has taken in.
        round: its next round.
        restores: how many it has begun.
        own: its next round of its own, beside those of all.
    """

    job: Job
    task: Task
    session: int
    replicas: int = 1
    how: inside.Consistency = inside.SYNC
    generation: int = 0
    round: int = 0
    restores: int = 0
    own: int = 0

    @property
    def mode(self) -> inside.Mode:
        """The relation between updates of different workers."""
        return self.how.mode

    def turn(self) -> Turn:
        """Its next restore."""
        self.restores += 1
        return Turn(self.round, self.generation, self.restores) if self.mode == "sync" else Turn(0, 0, self.restores)

    @property
    def member(self) -> inside.Member:
        """This process as generations name it."""
        return inside.Member(self.task, self.session, self.replicas, self.how)

    def push(
        self,
        plan: Plan,
        values: Sequence[Any] = (),
        *,
        weights: Sequence[float] | None = None,
        operands: Sequence[Any] = (),
        server: int = 0,
        alone: bool = False,
        **more: Any,
    ) -> Future[RoundReply]:
        """Contributes to its next round, on one server, or to one of its own; the test turns the round.

        More fields of a `Contribution` may be given.
        """
        given = tuple(weights) if weights is not None else (float(self.replicas),) * len(plan.reductions)
        number = self.own if alone else self.round
        said = inside.Contribution(self.session, self.generation, number, plan.id, given, alone=alone, **more)
        return self.job.verbs[server].push(said, payload(plan, server, values, given, operands))

    def make(self, plan: Plan, values: Sequence[Any] = (), **said: Any) -> RoundReply:
        """Makes its next round, or one of its own, for which nobody else has to do anything."""
        reply = self.push(plan, values, **said).result(SOON)
        if said.get("alone"):
            self.own += 1
        else:
            self.round += 1
        return reply


def payload(
    plan: Plan, server: int, values: Sequence[Any], weights: Sequence[float], operands: Sequence[Any]
) -> inside.Payload:
    """What goes to one server: the operands, then the contributions that count."""
    used = zip(plan.operands, operands, strict=True)
    arrays = [inside.portable(np.asarray(value, one.tensor.dtype)) for one, value in used if server in one.servers]
    arrays += [
        inside.portable(np.asarray(value, reduction.tensor.dtype))
        for reduction, value, weight in zip(plan.reductions, values, weights, strict=True)
        if weight and server in reduction.servers
    ]
    return inside.Payload.pack(arrays)


def together(*futures: Future[RoundReply]) -> list[RoundReply]:
    """The answers of a round."""
    return [future.result(SOON) for future in futures]


def turn(*workers: Worker) -> None:
    """The next round of workers."""
    for worker in workers:
        worker.round += 1


def given(reply: RoundReply, plan: Plan, server: int = 0, want: Sequence[PlacedVariable] = ()) -> list[inside.Array]:
    """The values in an answer: what the plan returns, then the wanted variables."""
    specs = [variable.spec.tensor for variable in want] + [spec for _, spec in plan.given(server)]
    tensors = reply.payload.tensors(specs)
    return [*tensors[len(want) :], *tensors[: len(want)]]


# ---- Plans ----


def adding(tensor: TensorSpec) -> Program:
    """The program `v.assign_add(x)`."""
    return Program((Input("variable", tensor), Input("value", tensor)), (inside.Node("add", (0, 1)),), ((0, 2),), ())


def power(tensor: TensorSpec) -> Program:
    """The program `v.assign(v ** x)`, which refuses some integers."""
    return replace(adding(tensor), nodes=(inside.Node("pow", (0, 1)),))


def scaling(tensor: TensorSpec) -> Program:
    """The program `v.assign_sub(x * rate)`, whose rate is an operand; returns the new value."""
    inputs = (Input("variable", tensor), Input("value", tensor), Input("operand", TensorSpec(tensor.dtype, ())))
    return Program(inputs, (inside.Node("multiply", (1, 2)), inside.Node("subtract", (0, 3))), ((0, 4),), (4,))


def sum_into(*variables: PlacedVariable, op: inside.ReduceOp = "sum", returned: bool = True) -> Plan:
    """A plan that adds to each variable what is reduced for it, and returns what was reduced."""
    return Plan(
        reductions=tuple(inside.Reduction(op, v.spec.tensor, v.servers, repr(v.spec.name)) for v in variables),
        programs=tuple(adding(v.spec.tensor) for v in variables),
        applies=tuple(
            inside.Apply(index, v.servers, (Ref("variable", v.id), Ref("reduction", index)))
            for index, v in enumerate(variables)
        ),
        returned=tuple(Ref("reduction", index) for index in range(len(variables))) if returned else (),
    )


def powers_of(*variables: PlacedVariable) -> Plan:
    """A plan that raises each variable to the power that is reduced for it: one server alone may refuse its own."""
    plan = sum_into(*variables, returned=False)
    return replace(plan, programs=tuple(power(variable.spec.tensor) for variable in variables))


def reduce_only(tensor: TensorSpec, op: inside.ReduceOp = "sum", server: int = 0, target: str = "") -> Plan:
    """A plan that reduces one value and changes nothing."""
    return Plan(reductions=(inside.Reduction(op, tensor, (server,), target),), returned=(Ref("reduction", 0),))


def sgd(variable: PlacedVariable) -> Plan:
    """A plan that subtracts a mean times a rate, the operand; returns the new value."""
    tensor, servers = variable.spec.tensor, variable.servers
    return Plan(
        reductions=(inside.Reduction("mean", tensor, servers),),
        operands=(inside.Operand(TensorSpec(tensor.dtype, ()), servers),),
        programs=(scaling(tensor),),
        applies=(inside.Apply(0, servers, (Ref("variable", variable.id), Ref("reduction", 0), Ref("operand", 0))),),
        returned=(Ref("result", 0),),
    )


def manifest_of(shards: Sequence[inside.Shard]) -> str:
    """The text of the manifest that a chief writes for these shards."""
    return replace(assembly.manifest_of(shards, inside.SnapshotOrder("", ())), saved_at=0.0).text()


def checkpoint(path: str, servers: tuple[int, ...], state: str = "", round: int = 0) -> Plan:
    """A plan that only orders a checkpoint."""
    return Plan(snapshot=inside.SnapshotOrder(path, servers, round, state))
