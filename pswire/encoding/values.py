"""Between our values and the generated protobuf classes: used by both rims, and by nobody else.

For each value there is a pair: `x_to_pb` and `x_from_pb`. Reading checks what the type system of
protobuf cannot: unknown enum numbers and missing choices raise `InvalidRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from pswire.cluster import JOBS, Task
from pswire.errors import InvalidRequest
from pswire.limits import MAX_PLAN_BYTES, MAX_PLAN_ITEMS, MAX_PLAN_NODES
from pswire.model.log import (
    Approved,
    Created,
    Done,
    Epoch,
    EpochClosed,
    JobStarted,
    LogEntry,
    Lost,
    Member,
    Mode,
    Position,
    Snapshotted,
    Start,
    Started,
)
from pswire.model.plan import (
    Apply,
    Operand,
    Plan,
    ReduceOp,
    Reduction,
    Ref,
    RefKind,
    RestoreCommit,
    SnapshotOrder,
    Turn,
    Variable,
    VariableSpec,
)
from pswire.model.program import PROGRAM_VERSION, Attr, Input, InputKind, Node, Program
from pswire.model.tensor import TensorSpec
from pswire.pb import parameter_server_pb2 as pb

Word = TypeVar("Word")
Number = TypeVar("Number")

_INPUT_KINDS: dict[pb.Input.Kind, InputKind] = {
    pb.Input.VARIABLE: "variable",
    pb.Input.VALUE: "value",
    pb.Input.OPERAND: "operand",
}
_REF_KINDS: dict[pb.Ref.Kind, RefKind] = {
    pb.Ref.VARIABLE: "variable",
    pb.Ref.REDUCTION: "reduction",
    pb.Ref.OPERAND: "operand",
    pb.Ref.RESULT: "result",
}
_REDUCE_OPS: dict[pb.Reduction.Op, ReduceOp] = {
    pb.Reduction.SUM: "sum",
    pb.Reduction.MEAN: "mean",
    pb.Reduction.FIRST: "first",
}
_MODES: dict[pb.Mode, Mode] = {pb.SYNC: "sync", pb.ASYNC: "async"}
_INPUT_KIND_TO_PB = {word: number for number, word in _INPUT_KINDS.items()}
_REF_KIND_TO_PB = {word: number for number, word in _REF_KINDS.items()}
_REDUCE_OP_TO_PB = {word: number for number, word in _REDUCE_OPS.items()}
_MODE_TO_PB = {word: number for number, word in _MODES.items()}


def _word(table: Mapping[Number, Word], number: Number, what: str) -> Word:
    if number not in table:
        raise InvalidRequest(f"unknown {what} {number}")
    return table[number]


# ---- Tensors and variables ----


def tensor_to_pb(spec: TensorSpec) -> pb.TensorSpec:
    return pb.TensorSpec(dtype=spec.dtype, shape=spec.shape)


def tensor_from_pb(message: pb.TensorSpec) -> TensorSpec:
    return TensorSpec(message.dtype, tuple(message.shape)).check()


def spec_to_pb(spec: VariableSpec) -> pb.VariableSpec:
    tensor = tensor_to_pb(spec.tensor)
    return pb.VariableSpec(name=spec.name, tensor=tensor, trainable=spec.trainable, saved_as=spec.saved_as)


def spec_from_pb(message: pb.VariableSpec) -> VariableSpec:
    saved_as = message.saved_as if message.HasField("saved_as") else None
    return VariableSpec(message.name, tensor_from_pb(message.tensor), message.trainable, saved_as).check()


def variable_to_pb(variable: Variable) -> pb.Variable:
    return pb.Variable(id=variable.id, spec=spec_to_pb(variable.spec), servers=variable.servers)


def variable_from_pb(message: pb.Variable) -> Variable:
    return Variable(message.id, spec_from_pb(message.spec), tuple(message.servers))


# ---- Tasks, positions, epochs ----


def task_to_pb(task: Task) -> pb.Task:
    return pb.Task(job=task.job, index=task.index)


def task_from_pb(message: pb.Task) -> Task:
    if message.job not in JOBS:
        raise InvalidRequest(f"unknown job {message.job!r}; known are {', '.join(JOBS)}")
    return Task(message.job, message.index)


def mode_to_pb(mode: Mode) -> pb.Mode:
    return _MODE_TO_PB[mode]


def mode_from_pb(number: pb.Mode) -> Mode:
    return _word(_MODES, number, "mode")


def position_to_pb(position: Position) -> pb.Position:
    return pb.Position(dataset=position.dataset, epoch=position.epoch, index=position.index)


def positions_from_pb(messages: Iterable[pb.Position]) -> tuple[Position, ...]:
    return tuple(Position(m.dataset, m.epoch, m.index) for m in messages)


def start_to_pb(start: Start) -> pb.Start:
    return pb.Start(epoch=start.epoch, round=start.round, positions=[position_to_pb(p) for p in start.positions])


def start_from_pb(message: pb.Start) -> Start:
    return Start(message.epoch, message.round, positions_from_pb(message.positions))


def member_to_pb(member: Member) -> pb.Member:
    return pb.Member(
        task=task_to_pb(member.task),
        session=member.session,
        replicas=member.replicas,
        mode=mode_to_pb(member.mode),
    )


def member_from_pb(message: pb.Member) -> Member:
    return Member(task_from_pb(message.task), message.session, message.replicas, mode_from_pb(message.mode))


def epoch_to_pb(epoch: Epoch) -> pb.Epoch:
    return pb.Epoch(
        number=epoch.number,
        members=[member_to_pb(member) for member in epoch.members],
        entry=epoch.join_point,
        start=start_to_pb(epoch.start) if epoch.start else None,
    )


def epoch_from_pb(message: pb.Epoch) -> Epoch:
    return Epoch(
        message.number,
        tuple(member_from_pb(member) for member in message.members),
        message.entry,
        start_from_pb(message.start) if message.HasField("start") else None,
    )


# ---- Programs and plans ----


def _attr_to_pb(name: str, value: Attr) -> pb.Attr:
    match value:
        case bool():
            return pb.Attr(name=name, flag=value)
        case int():
            return pb.Attr(name=name, number=value)
        case float():
            return pb.Attr(name=name, real=value)
        case str():
            return pb.Attr(name=name, text=value)
        case tuple():
            return pb.Attr(name=name, numbers=pb.Numbers(values=value))
        case None:
            return pb.Attr(name=name)


def _attr_from_pb(message: pb.Attr) -> tuple[str, Attr]:
    match message.WhichOneof("value"):
        case None:
            return message.name, None
        case "flag":
            return message.name, message.flag
        case "number":
            return message.name, message.number
        case "real":
            return message.name, message.real
        case "text":
            return message.name, message.text
        case _:
            return message.name, tuple(message.numbers.values)


def program_to_pb(program: Program) -> pb.Program:
    return pb.Program(
        inputs=[pb.Input(kind=_INPUT_KIND_TO_PB[i.kind], spec=tensor_to_pb(i.spec)) for i in program.inputs],
        nodes=[pb.Node(op=n.op, args=n.args, attrs=[_attr_to_pb(k, v) for k, v in n.attrs]) for n in program.nodes],
        assigns=[pb.Assign(target=target, value=value) for target, value in program.assigns],
        outputs=program.outputs,
        version=PROGRAM_VERSION,
    )


def program_from_pb(message: pb.Program) -> Program:
    if message.version != PROGRAM_VERSION:
        raise InvalidRequest(
            f"an update program has version {message.version}, and version {PROGRAM_VERSION} runs here; "
            "install the same release of paramserver on workers, chief and servers"
        )
    return Program(
        tuple(Input(_word(_INPUT_KINDS, i.kind, "kind of input"), tensor_from_pb(i.spec)) for i in message.inputs),
        tuple(Node(n.op, tuple(n.args), tuple(_attr_from_pb(a) for a in n.attrs)) for n in message.nodes),
        tuple((a.target, a.value) for a in message.assigns),
        tuple(message.outputs),
    )


def _ref_to_pb(ref: Ref) -> pb.Ref:
    return pb.Ref(kind=_REF_KIND_TO_PB[ref.kind], index=ref.index)


def _ref_from_pb(message: pb.Ref) -> Ref:
    return Ref(_word(_REF_KINDS, message.kind, "kind of value"), message.index)


def plan_to_pb(plan: Plan) -> pb.Plan:
    return pb.Plan(
        reductions=[
            pb.Reduction(op=_REDUCE_OP_TO_PB[r.op], tensor=tensor_to_pb(r.tensor), servers=r.servers, target=r.target)
            for r in plan.reductions
        ],
        operands=[pb.Operand(tensor=tensor_to_pb(o.tensor), servers=o.servers) for o in plan.operands],
        programs=[program_to_pb(program) for program in plan.programs],
        applies=[
            pb.Apply(program=a.program, servers=a.servers, args=[_ref_to_pb(ref) for ref in a.args])
            for a in plan.applies
        ],
        returned=[_ref_to_pb(ref) for ref in plan.returned],
        snapshot=(
            pb.SnapshotOrder(
                path=plan.snapshot.path,
                servers=plan.snapshot.servers,
                round=plan.snapshot.round,
                state=plan.snapshot.state,
            )
            if plan.snapshot
            else None
        ),
        restore=_commit_to_pb(plan.restore) if plan.restore else None,
    )


def plan_from_pb(message: pb.Plan) -> Plan:
    if message.ByteSize() > MAX_PLAN_BYTES:
        raise InvalidRequest(f"a plan has {message.ByteSize()} bytes; at most {MAX_PLAN_BYTES} are allowed")
    _check_items(message)
    snapshot = message.snapshot
    return Plan(
        tuple(
            Reduction(_word(_REDUCE_OPS, r.op, "reduction"), tensor_from_pb(r.tensor), tuple(r.servers), r.target)
            for r in message.reductions
        ),
        tuple(Operand(tensor_from_pb(o.tensor), tuple(o.servers)) for o in message.operands),
        tuple(program_from_pb(program) for program in message.programs),
        tuple(Apply(a.program, tuple(a.servers), tuple(_ref_from_pb(ref) for ref in a.args)) for a in message.applies),
        tuple(_ref_from_pb(ref) for ref in message.returned),
        SnapshotOrder(snapshot.path, tuple(snapshot.servers), snapshot.round, snapshot.state)
        if message.HasField("snapshot")
        else None,
        _commit_from_pb(message.restore) if message.HasField("restore") else None,
    )


def _check_items(message: pb.Plan) -> None:
    """Raises `InvalidRequest` for a plan of so many messages that reading them takes long; most may be empty."""
    nodes = sum(len(program.nodes) for program in message.programs[:MAX_PLAN_NODES])
    if nodes > MAX_PLAN_NODES:
        raise InvalidRequest(f"the programs of a plan have {nodes} nodes; at most {MAX_PLAN_NODES} are allowed")
    items = len(message.reductions) + len(message.operands) + len(message.programs) + len(message.applies)
    items += len(message.returned) + nodes
    if items <= MAX_PLAN_ITEMS:
        items += sum(len(p.inputs) + len(p.assigns) + len(p.outputs) for p in message.programs)
        items += sum(len(apply.args) for apply in message.applies)
        items += sum(len(node.attrs) for program in message.programs for node in program.nodes)
    if items > MAX_PLAN_ITEMS:
        raise InvalidRequest(f"a plan has {items} parts; at most {MAX_PLAN_ITEMS} are allowed")


def _commit_to_pb(commit: RestoreCommit) -> pb.RestoreCommit:
    return pb.RestoreCommit(
        path=commit.path, servers=commit.servers, turn=turn_to_pb(commit.turn), choice=commit.choice
    )


def _commit_from_pb(message: pb.RestoreCommit) -> RestoreCommit:
    return RestoreCommit(message.path, tuple(message.servers), turn_from_pb(message.turn), message.choice)


def turn_to_pb(turn: Turn) -> pb.Turn:
    return pb.Turn(round=turn.round, epoch=turn.epoch, ordinal=turn.ordinal)


def turn_from_pb(message: pb.Turn) -> Turn:
    return Turn(message.round, message.epoch, message.ordinal)


# ---- The log ----


def entry_to_pb(entry: LogEntry) -> pb.Entry:
    match entry:
        case JobStarted():
            return pb.Entry(job_started=pb.JobStarted(job=entry.job, incarnations=entry.incarnations, name=entry.name))
        case Created():
            return pb.Entry(created=variable_to_pb(entry.variable))
        case Approved():
            return pb.Entry(approved=plan_to_pb(entry.plan))
        case EpochClosed():
            return pb.Entry(epoch_closed=epoch_to_pb(entry.epoch))
        case Started():
            return pb.Entry(started=start_to_pb(entry.start))
        case Snapshotted():
            return pb.Entry(
                snapshotted=pb.Snapshotted(plan_id=entry.plan_id, round=entry.round, path=entry.path, error=entry.error)
            )
        case Done():
            return pb.Entry(done=pb.Empty())
        case Lost():
            return pb.Entry(lost=pb.Lost(server=entry.server, reason=entry.reason))


_ENTRY_FROM_PB: dict[str, Callable[[pb.Entry], LogEntry]] = {
    "job_started": lambda m: JobStarted(m.job_started.job, tuple(m.job_started.incarnations), m.job_started.name),
    "created": lambda m: Created(variable_from_pb(m.created)),
    "approved": lambda m: Approved(plan_from_pb(m.approved)),
    "epoch_closed": lambda m: EpochClosed(epoch_from_pb(m.epoch_closed)),
    "started": lambda m: Started(start_from_pb(m.started)),
    "snapshotted": lambda m: Snapshotted(
        m.snapshotted.plan_id, m.snapshotted.round, m.snapshotted.path, m.snapshotted.error
    ),
    "done": lambda m: Done(),
    "lost": lambda m: Lost(m.lost.server, m.lost.reason),
}


def entry_from_pb(message: pb.Entry) -> LogEntry:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("an entry of the log is empty, or of a newer version")
    return _ENTRY_FROM_PB[kind](message)
