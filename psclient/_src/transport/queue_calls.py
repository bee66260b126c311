"""The verbs of the queues that server 0 keeps: closures, and batches that are handed out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from google.protobuf.message import Message

from psclient._src.transport.daemon_threads import Threads
from pswire.cluster import Task
from pswire.encoding import messages
from pswire.encoding.verbs import parse
from pswire.model.chunks import ChunkAsk, Chunks
from pswire.model.closures import ClosureOrder, ClosureQueue, ClosureResult, Fetched, Taken
from pswire.pb import parameter_server_pb2 as pb


class QueueCalls:
    """The part of a `RemoteServer` that asks queues. All methods may be called from any thread."""

    task: Task
    _threads: Threads

    def _ask(self, name: str, request: Message, ends: bool = False) -> bytes:
        raise NotImplementedError

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

    def hand_out(self, session: int, ask: ChunkAsk) -> Future[Chunks]:
        """Implements `ParameterServer.hand_out`."""
        request = pb.HandOutRequest(session=session, ask=messages.CHUNK_ASK.to_pb(ask))
        return self._threads.submit(
            lambda: messages.CHUNKS.from_pb(parse(pb.HandOutReply, self._ask("HandOut", request)))
        )
