"""Between the verbs' requests and replies and the generated protobuf classes, as `codec` does for values."""

from __future__ import annotations

from pswire.api import (
    Contribution,
    PullReply,
    RestoreOrder,
    RestoreReply,
    RestoreStage,
    RoundReply,
    Shard,
    Watched,
)
from pswire.encoding.values import (
    entry_from_pb,
    entry_to_pb,
    epoch_from_pb,
    epoch_to_pb,
    member_from_pb,
    member_to_pb,
    plan_from_pb,
    plan_to_pb,
    position_to_pb,
    positions_from_pb,
    task_from_pb,
    task_to_pb,
    tensor_from_pb,
    tensor_to_pb,
)
from pswire.errors import InvalidRequest
from pswire.model.status import OpenRound, ProcessStatus, Saving, ServerStatus, SessionState, WorkerProgress
from pswire.pb import parameter_server_pb2 as pb
from pswire.transport.payload import Payload

_STAGES: dict[RestoreStage, pb.RestoreStage] = {
    "look": pb.RESTORE_STAGE_LOOK,
    "open": pb.RESTORE_STAGE_OPEN,
    "prepare": pb.RESTORE_STAGE_PREPARE,
}


def contribution_to_pb(contribution: Contribution, size: int) -> pb.PushHeader:
    return pb.PushHeader(
        session=contribution.session,
        epoch=contribution.epoch,
        round=contribution.round,
        plan_id=contribution.plan_id,
        weights=contribution.weights,
        more=contribution.more,
        positions=[position_to_pb(p) for p in contribution.positions],
        want=contribution.want,
        observes=contribution.observes,
        start=contribution.start,
        size=size,
    )


def contribution_from_pb(message: pb.PushHeader) -> Contribution:
    return Contribution(
        message.session,
        message.epoch,
        message.round,
        message.plan_id,
        tuple(message.weights),
        message.more,
        positions_from_pb(message.positions),
        tuple(message.want),
        message.observes,
        message.start,
    )


def round_to_pb(reply: RoundReply) -> pb.RoundHeader:
    return pb.RoundHeader(
        round=reply.round,
        epoch=epoch_to_pb(reply.epoch),
        more=reply.more,
        left_out=[task_to_pb(task) for task in reply.left_out],
        size=reply.payload.size,
        warnings=reply.warnings,
    )


def round_from_pb(message: pb.RoundHeader, payload: Payload) -> RoundReply:
    return RoundReply(
        message.round,
        epoch_from_pb(message.epoch),
        message.more,
        tuple(task_from_pb(task) for task in message.left_out),
        payload,
        tuple(message.warnings),
    )


def pull_to_pb(reply: PullReply) -> pb.PullHeader:
    return pb.PullHeader(round=reply.round, size=reply.payload.size)


def pull_from_pb(message: pb.PullHeader, payload: Payload) -> PullReply:
    return PullReply(message.round, payload)


def watched_to_pb(watched: Watched) -> pb.WatchReply:
    return pb.WatchReply(
        version=watched.version,
        start=watched.start,
        entries=[entry_to_pb(entry) for entry in watched.entries],
        plans=[plan_to_pb(plan) for plan in watched.plans],
        sessions=[session_to_pb(session) for session in watched.sessions],
    )


def watched_from_pb(message: pb.WatchReply) -> Watched:
    return Watched(
        message.version,
        message.start,
        tuple(entry_from_pb(entry) for entry in message.entries),
        tuple(plan_from_pb(plan) for plan in message.plans),
        tuple(session_from_pb(session) for session in message.sessions),
    )


def session_to_pb(session: SessionState) -> pb.SessionState:
    return pb.SessionState(
        member=member_to_pb(session.member),
        state=session.state,
        entry=session.join_point,
        silent=session.silent,
        drives=session.drives,
    )


def session_from_pb(message: pb.SessionState) -> SessionState:
    return SessionState(member_from_pb(message.member), message.state, message.entry, message.silent, message.drives)


def shard_to_pb(shard: Shard) -> pb.SnapshotReply:
    return pb.SnapshotReply(
        path=shard.path,
        file=shard.file,
        round=shard.round,
        positions=[position_to_pb(p) for p in shard.positions],
        tensors=[
            pb.NamedTensor(name=name, spec=tensor_to_pb(spec), checksum=checksum)
            for name, spec, checksum in shard.tensors
        ],
        nbytes=shard.nbytes,
    )


def shard_from_pb(message: pb.SnapshotReply) -> Shard:
    return Shard(
        message.path,
        message.file,
        message.round,
        positions_from_pb(message.positions),
        tuple((t.name, tensor_from_pb(t.spec), t.checksum) for t in message.tensors),
        message.nbytes,
    )


def restored_to_pb(reply: RestoreReply) -> pb.RestoreReply:
    positions = [position_to_pb(p) for p in reply.positions]
    return pb.RestoreReply(path=reply.path, positions=positions, manifest=reply.manifest, damaged=reply.damaged)


def restored_from_pb(message: pb.RestoreReply) -> RestoreReply:
    positions = positions_from_pb(message.positions)
    return RestoreReply(message.path, positions, message.manifest, dict(message.damaged))


def order_to_pb(order: RestoreOrder) -> pb.RestoreOrder:
    return pb.RestoreOrder(
        stage=_STAGES[order.stage],
        named=order.names is not None,
        names=order.names,
        late=order.late,
        cast=order.cast,
        damaged=order.damaged,
        checkers=order.checkers,
    )


def order_from_pb(message: pb.RestoreOrder) -> RestoreOrder:
    stage = next((stage for stage, number in _STAGES.items() if number == message.stage), None)
    if stage is None:
        raise InvalidRequest(f"a restore has no stage {message.stage}")
    names, damaged = dict(message.names) if message.named else None, dict(message.damaged)
    return RestoreOrder(stage, names, message.late, message.cast, damaged, message.checkers)


def status_to_pb(status: ServerStatus) -> pb.StatusReply:
    return pb.StatusReply(
        server=status.server,
        incarnation=status.incarnation,
        log=status.log,
        epoch=epoch_to_pb(status.epoch) if status.epoch else None,
        round=status.round,
        positions=[position_to_pb(p) for p in status.positions],
        waiting=[
            pb.OpenRound(
                round=w.round,
                section=w.section,
                missing=[task_to_pb(task) for task in w.missing],
                approved=w.approved,
            )
            for w in status.waiting
        ],
        variables=status.variables,
        nbytes=status.nbytes,
        memory_limit=status.memory_limit,
        chief=status.chief,
        places=[
            pb.Place(task=task_to_pb(p.task), round=p.round, positions=[position_to_pb(at) for at in p.positions])
            for p in status.places
        ],
        program_version=status.program_version,
        held=status.held,
        snapshot_limit=status.snapshot_limit,
        saving=[pb.Saving(path=each.path, round=each.round, nbytes=each.nbytes) for each in status.saving],
        sessions=[session_to_pb(session) for session in status.sessions],
        incarnations=status.incarnations,
        over=status.over,
        broken=status.broken,
        device=status.device,
        process=process_to_pb(status.process) if status.process else None,
        job=status.job,
    )


def process_to_pb(process: ProcessStatus) -> pb.ProcessStatus:
    return pb.ProcessStatus(
        clock=process.clock,
        resident=process.resident,
        versions=process.versions,
        data_port=process.data_port,
        data_path=process.data_path,
        lanes=process.lanes,
        traffic=process.traffic,
        uptime=process.uptime,
    )


def process_from_pb(message: pb.ProcessStatus) -> ProcessStatus:
    return ProcessStatus(
        message.clock,
        message.resident,
        dict(message.versions),
        message.data_port,
        message.data_path,
        dict(message.lanes),
        dict(message.traffic),
        message.uptime,
    )


def status_from_pb(message: pb.StatusReply) -> ServerStatus:
    return ServerStatus(
        server=message.server,
        incarnation=message.incarnation,
        log=message.log,
        epoch=epoch_from_pb(message.epoch) if message.HasField("epoch") else None,
        round=message.round,
        positions=positions_from_pb(message.positions),
        waiting=tuple(
            OpenRound(w.round, w.section, tuple(task_from_pb(t) for t in w.missing), w.approved)
            for w in message.waiting
        ),
        variables=message.variables,
        nbytes=message.nbytes,
        memory_limit=message.memory_limit,
        chief=message.chief,
        places=tuple(
            WorkerProgress(task_from_pb(p.task), p.round, positions_from_pb(p.positions)) for p in message.places
        ),
        program_version=message.program_version,
        held=message.held,
        snapshot_limit=message.snapshot_limit,
        saving=tuple(Saving(each.path, each.round, each.nbytes) for each in message.saving),
        sessions=tuple(session_from_pb(session) for session in message.sessions),
        incarnations=tuple(message.incarnations),
        over=message.over,
        broken=message.broken,
        device=message.device,
        process=process_from_pb(message.process) if message.HasField("process") else None,
        job=message.job,
    )
