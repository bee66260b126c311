"""The verbs of one request and one reply: checkpoints, queues of server 0, and what a server says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from google.protobuf.message import Message

from psclient._src.network.daemon_threads import Threads
from pswire.api import ALL, Enlisted, RestoreOrder, RestoreReply
from pswire.cluster import Task
from pswire.encoding import messages
from pswire.encoding.protocol import check_protocol, spoken
from pswire.encoding.verbs import parse
from pswire.model.chunks import ChunkAsk, Chunks
from pswire.model.closures import ClosureOrder, ClosureQueue, ClosureResult, Fetched, Taken
from pswire.model.places import Offered, Standby
from pswire.model.plan import Turn
from pswire.model.saved import Shard
from pswire.model.status import Happened, ServerStatus
from pswire.pb import parameter_server_pb2 as pb


class PlainCalls:
    """The part of a `RemoteServer` whose verbs have one request and one reply. Any thread may call any method."""

    task: Task
    _threads: Threads

    def _ask(self, name: str, request: Message, ends: bool = False) -> bytes:
        raise NotImplementedError

    def enlist(self, task: Task | None, key: int) -> Enlisted:
        """Implements `ParameterServer.enlist`."""
        asked = None if task is None else messages.TASK.to_pb(task)
        request = pb.EnlistRequest(key=key, task=asked, spoken=spoken())
        return messages.ENLISTED.from_pb(parse(pb.EnlistReply, self._ask("Enlist", request)))

    def leave(self, session: int, error: str) -> None:
        """Implements `ParameterServer.leave`."""
        self._ask("Leave", pb.LeaveRequest(session=session, error=error))

    def status(self) -> ServerStatus:
        """Calls `ParameterServer.status`; raises `ConfigError` if the server speaks another protocol."""
        m = parse(pb.StatusReply, self._ask("Status", pb.Empty()))
        check_protocol(m.spoken, str(self.task), "this process")
        return messages.STATUS.from_pb(m)

    def events(self) -> tuple[Happened, ...]:
        """As `ParameterServer.events`."""
        m = parse(pb.EventsReply, self._ask("Events", pb.Empty()))
        return tuple(map(messages.HAPPENED.from_pb, m.recent))

    # ---- Places ----

    def offer(self, standby: Standby) -> Offered:
        """Implements `ParameterServer.offer`."""
        said = pb.OfferRequest(standby=messages.STANDBY.to_pb(standby), spoken=spoken())
        return messages.OFFERED.from_pb(parse(pb.OfferReply, self._ask("Offer", said)))

    def move(self, server: int, address: str = "", token: int = 0) -> str:
        """Implements `ParameterServer.move`."""
        said = pb.MoveRequest(server=server, address=address, token=token)
        return parse(pb.MoveReply, self._ask("Move", said)).address

    # ---- Checkpoints ----

    def snapshot(self, token: int, plan_id: bytes, manifest: str) -> Future[Shard]:
        """Implements `ParameterServer.snapshot`."""
        request = pb.SnapshotRequest(token=token, plan_id=plan_id, manifest=manifest)
        ask = partial(self._ask, "Snapshot", request)
        return self._threads.submit(lambda: messages.SHARD.from_pb(parse(pb.SnapshotReply, ask())))

    def restore(self, session: int, path: str, turn: Turn, order: RestoreOrder = ALL) -> Future[RestoreReply]:
        """Implements `ParameterServer.restore`."""
        said = messages.ORDER.to_pb(order)
        request = pb.RestoreRequest(session=session, path=path, turn=messages.TURN.to_pb(turn), order=said)
        ask = partial(self._ask, "Restore", request)
        return self._threads.submit(lambda: messages.RESTORED.from_pb(parse(pb.RestoreReply, ask())))

    # ---- Queues ----

    def schedule(self, session: int, order: ClosureOrder) -> Future[ClosureQueue]:
        """Implements `ParameterServer.schedule`."""
        ask = partial(self._ask, "Schedule", pb.ScheduleRequest(session=session, order=messages.ORDERED.to_pb(order)))
        return self._threads.submit(lambda: messages.CLOSURES.from_pb(parse(pb.ScheduleReply, ask())))

    def take(
        self, session: int, functions: Sequence[str], result: ClosureResult | None = None, offset: int = 0
    ) -> Future[Taken]:
        """Implements `ParameterServer.take`."""
        told = None if result is None else messages.CLOSURE_RESULT.to_pb(result)
        request = pb.TakeRequest(session=session, functions=functions, result=told, offset=offset)
        ask = partial(self._ask, "Take", request)
        return self._threads.submit(lambda: messages.TAKEN.from_pb(parse(pb.TakeReply, ask())))

    def fetch(self, session: int, number: int, offset: int) -> Future[Fetched]:
        """Implements `ParameterServer.fetch`."""
        ask = partial(self._ask, "Fetch", pb.FetchRequest(session=session, number=number, offset=offset))
        return self._threads.submit(lambda: messages.FETCHED.from_pb(parse(pb.FetchReply, ask())))

    def assign_batches(self, session: int, ask: ChunkAsk) -> Future[Chunks]:
        """Implements `ParameterServer.assign_batches`."""
        request = pb.AssignBatchesRequest(session=session, ask=messages.CHUNK_ASK.to_pb(ask))
        return self._threads.submit(
            lambda: messages.CHUNKS.from_pb(parse(pb.AssignBatchesReply, self._ask("AssignBatches", request)))
        )
