"""The gRPC rim of a client: `RemoteServer` is a `ParameterServer` that lives elsewhere.

Every call is sent again, with growing pauses, until it was answered or its deadline has passed; the
server knows repeats by their keys. What no server answered becomes `Unreachable`, or `ServerLost` once
there was a session to lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from psclient._src.config import grpc_streams
from psclient._src.network import tls_diagnosis
from psclient._src.network.daemon_threads import Threads
from psclient._src.network.grpc_calls import GrpcCalls
from psclient._src.network.plain_calls import PlainCalls
from psclient._src.network.retries import Attempts
from psclient._src.network.transport import Answered, Offer, Transport
from psclient._src.network.transport_selector import TransportSelector
from pswire.api import (
    Begun,
    Contribution,
    CreateBatchReply,
    Opened,
    ParameterServer,
    PullReply,
    RoundReply,
    RowRead,
    TableRead,
    Watched,
)
from pswire.cluster import ClusterSpec, Task
from pswire.encoding import messages
from pswire.encoding.protocol import spoken
from pswire.encoding.verbs import VERBS, batches, parse
from pswire.errors import PSError, ServerGone
from pswire.limits import MAX_BATCH_VARIABLES, Refused, Timeouts
from pswire.model.consistency import SYNC, Consistency
from pswire.model.log import Done, LogEntry, Start
from pswire.model.places import Moved
from pswire.model.plan import PlacedVariable, Plan
from pswire.model.status import STILL, Pace
from pswire.network.futures import follow
from pswire.network.grpc_channel import Interceptor
from pswire.network.payload import Payload
from pswire.network.traffic import TransportName, traffic
from pswire.pb import parameter_server_pb2 as pb
from pswire.security.identity import Security
from pswire.security.names import certificate_name, task_name

CREATION_SECONDS = 0.02
"""Seconds that a busy server takes to create one variable, a part of a dynamic table for example, at most."""

T = TypeVar("T")


class RemoteServer(PlainCalls):
    """A server at an address. All methods may be called from any thread.

    Arrays of a payload are read until its call is over; they must not change before that.

    Args:
        address: the server's address, `host:port`.
        task: the server's task, for messages.
        timeouts: time limits of the cluster; None for the defaults.
        interceptors: interceptors of gRPC, the first outermost; tests inject faults with them.
        transport: the fastest transport that may be used.
        security: certificate and token that this process shows, and the CA that it asks for; None for none.
        decides, told: as in `Attempts`.
        streams: as in `GrpcCalls`.

    Attributes:
        traffic: payload bytes of each transport.
    """

    def __init__(
        self,
        address: str,
        task: Task,
        timeouts: Timeouts | None = None,
        interceptors: Sequence[Interceptor] = (),
        transport: TransportName = "grpc",
        security: Security | None = None,
        decides: bool = True,
        streams: bool = True,
        told: bool = False,
    ) -> None:
        self.task = task
        self.traffic = traffic()
        self._timeouts = timeouts or Timeouts()
        self._threads = Threads(f"call {task}")
        self._transport = transport
        self._decoder = messages.RoundDecoder()
        self._transports: dict[int, TransportSelector] = {}  # of each session
        self._security = security or Security()
        self._tls = self._security.client_context if self._security.tls else None
        self._name = certificate_name(task_name(task))
        self._interceptors = interceptors
        self._options = decides, streams, told
        self._connect(address)

    def _connect(self, address: str) -> None:
        """Makes the connection to an address."""
        self.address = address
        decides, streams, told = self._options
        shown, lease = self._security, self._timeouts.session_timeout
        self._calls = GrpcCalls(address, self.task, shown, self._name, lease, self._interceptors, self.traffic, streams)
        self._attempts = Attempts(
            address,
            self.task,
            self._timeouts,
            self._calls.failed,
            self._calls.check,
            self._missing,
            partial(_mismatch, self._calls, address, shown, self._name),
            self._calls.renew,
            decides,
            told,
        )

    # ---- The verbs ----

    def open(
        self,
        task: Task,
        replicas: int,
        session: int,
        drives: bool,
        consistency: Consistency = SYNC,
        job: str = "",
        term: int = 0,
    ) -> Opened:
        """Calls `ParameterServer.open`; binds later calls to the incarnation that answered."""
        request = pb.OpenRequest(
            task=messages.TASK.to_pb(task),
            replicas=replicas,
            session=session,
            drives=drives,
            consistency=messages.CONSISTENCY.to_pb(consistency),
            job=job,
            term=term,
            spoken=spoken(),
        )
        m = parse(pb.OpenReply, self._ask("Open", request))
        self._calls.bind(m.incarnation)
        self._attempts.opened = True
        if replicas:
            host = self.address.rpartition(":")[0].strip("[]")
            offer = Offer(
                *(m.session, m.transport_token, host, m.data_port, m.data_path, m.in_flight),
                *(self._name, m.buffer_bytes, self._tls),
            )
            old, how = self._transports.get(m.session), (self._threads, self.traffic, self._transport)
            self._transports[m.session] = TransportSelector(str(self.task), offer, self._timeouts.session_timeout, *how)
            if old is not None:
                old.close("the session was opened again")
        return messages.OPENED.from_pb(m)

    def heartbeat(self, session: int, round: int, plan_id: bytes, pace: Pace = STILL, clock: int = 0) -> bool:
        """Calls `ParameterServer.heartbeat`; on an idle transport if there is one, which needs no new content."""
        transports = self._transports.get(session)
        if transports and (drives := transports.heartbeat(round, pace, clock)) is not None:
            return drives
        told = messages.PACE.to_pb(pace)
        said = pb.HeartbeatRequest(session=session, round=round, plan_id=plan_id, pace=told, clock=clock)
        reply = parse(pb.HeartbeatReply, self._ask("Heartbeat", said))
        if transports:
            transports.heartbeat_answered(round, pace, clock)
        return reply.drive

    def create_batch(self, session: int, variables: Sequence[PlacedVariable]) -> CreateBatchReply:
        """Calls `ParameterServer.create_batch`; sends a large batch in several calls."""
        whole = CreateBatchReply(0)
        encoded = [messages.VARIABLE.to_pb(variable) for variable in variables]
        for first in range(0, max(len(encoded), 1), MAX_BATCH_VARIABLES):
            for batch in batches(encoded[first : first + MAX_BATCH_VARIABLES]):
                request = pb.CreateBatchRequest(session=session, variables=batch)
                once = partial(self._calls.once, "CreateBatch", request.SerializeToString())
                answer = self._attempts.until_answered(VERBS["CreateBatch"], once, len(batch) * CREATION_SECONDS)
                reply = messages.batch_from_pb(parse(pb.CreateBatchReply, answer))
                whole = CreateBatchReply(
                    whole.count + reply.count,
                    whole.initialized + reply.initialized,
                    whole.restored + reply.restored,
                    reply.error,
                )
                if reply.error is not None:
                    return whole
        return whole

    def propose(self, session: int, plan: Plan | None, join_point: str, start: Start | None, trace: str = "") -> None:
        """Implements `ParameterServer.propose`."""
        request = pb.ProposeRequest(
            session=session,
            plan=messages.PLAN.to_pb(plan) if plan else None,
            entry=join_point,
            start=messages.START.to_pb(start) if start else None,
            trace=trace,
        )
        self._ask("Propose", request)

    def watch(self, session: int, after: int, version: int) -> Future[Watched]:
        """Calls `ParameterServer.watch`; may return the first part of long news, and the rest at the next call."""
        data = pb.WatchRequest(session=session, after=after, version=version).SerializeToString()

        again = partial(self._attempts.until_answered, VERBS["Watch"], partial(self._calls.watch, data))
        return self._threads.submit(lambda: messages.WATCHED.from_pb(parse(pb.WatchReply, again())))

    def approve(self, token: int, index: int, entries: Sequence[LogEntry]) -> int:
        """Calls `ParameterServer.approve`; sends a long list in several calls."""
        length, ends = index, any(isinstance(entry, Done) for entry in entries[-1:])
        for batch in batches([messages.ENTRY.to_pb(entry) for entry in entries]):
            request = pb.ApproveRequest(token=token, index=index, entries=batch)
            length = parse(pb.ApproveReply, self._ask("Approve", request, ends)).length
            index += len(batch)
            if length < index:
                break
        return length

    def push(self, contribution: Contribution, payload: Payload, begun: Begun | None = None) -> Future[RoundReply]:
        """Calls `ParameterServer.push`; the payload may still grow. Sends a broken stream again, whole."""
        header = messages.contribution_to_pb(contribution, payload.size).SerializeToString()

        def once(seconds: float) -> RoundReply:
            return self._decoder.decode(*self._calls.push(header, payload, seconds))

        again = partial(self._attempts.until_answered, VERBS["Push"], once)
        return self._ask_on_transport(
            contribution.session, lambda transport: transport.push(header, payload), self._decoder.decode, again
        )

    def pull(
        self,
        session: int,
        variables: Sequence[int],
        after: int,
        rows: Sequence[RowRead] = (),
        tables: Sequence[TableRead] = (),
    ) -> Future[PullReply]:
        """Implements `ParameterServer.pull`."""
        asked, questions = map(messages.ROW_READ.to_pb, rows), map(messages.TABLE_READ.to_pb, tables)
        request = pb.PullRequest(session=session, variables=variables, after=after, rows=asked, tables=questions)
        data = request.SerializeToString()

        def once(seconds: float) -> PullReply:
            return messages.pull_from_pb(*self._calls.pull(data, seconds))

        again = partial(self._attempts.until_answered, VERBS["Pull"], once)
        return self._ask_on_transport(session, lambda transport: transport.pull(data), messages.pull_from_pb, again)

    def _ask_on_transport(
        self,
        session: int,
        ask: Callable[[Transport], Future[Answered]],
        decode: Callable[[Any, Payload], T],
        otherwise: Callable[[], T],
    ) -> Future[T]:
        """Calls on the best transport of a session that works; over gRPC where none does."""
        self._calls.check()

        def over_grpc() -> Future[T]:
            self._calls.check()
            return self._threads.submit(otherwise)

        transports = self._transports.get(session)
        asked = transports.ask(ask, decode, over_grpc) if transports else over_grpc()
        if not (transports and self._attempts.told):
            return asked
        answer: Future[T] = Future()
        asked.add_done_callback(partial(self._hand_on, answer, over_grpc))
        return answer

    def _hand_on(self, answer: Future[T], otherwise: Callable[[], Future[T]], asked: Future[T]) -> None:
        """Hands on what a call on a transport came to; where the server has ended, it waits as any other call."""
        if self._attempts.awaits_verdict(asked.exception()):
            try:
                asked = otherwise()
            except PSError as error:
                answer.set_exception(error)
                return
        asked.add_done_callback(partial(follow, answer))

    def transport(self, session: int) -> Transport | None:
        """Returns the transport that a session's calls go on now; None for gRPC."""
        transports = self._transports.get(session)
        return transports.transport if transports else None

    # ---- The end ----

    def fail(self, error: PSError) -> None:
        """Makes all calls under way, and all that come, raise an error at once; the first one stays."""
        self._calls.fail(error)
        for transports in list(self._transports.values()):
            transports.close(error.message)

    @property
    def failed(self) -> bool:
        """True since `fail`, and until it begins anew."""
        return self._calls.failed.is_set()

    def begin_anew(self, address: str = "") -> None:
        """Takes back what `fail` was told: another life of the server is to be found there, or at another address."""
        self._transports.clear()
        if address in ("", self.address):
            self._attempts.begin_anew()
            self._calls.begin_anew()
        else:
            before = self._calls
            self._connect(address)
            before.fail(ServerGone(f"has moved to {address}", str(self.task)))
            before.close()

    def close(self) -> None:
        """Ends the connection; calls under way and later ones raise `PSError`."""
        self.fail(PSError(f"the connection to {self.address} is closed", str(self.task)))
        self._calls.close()
        self._threads.close()

    def _ask(self, name: str, request: Message, ends: bool = False) -> bytes:
        """Calls a verb of one request and one reply until it is answered, or, if `ends`, the server has ended by it."""
        data = request.SerializeToString()
        return self._attempts.until_answered(VERBS[name], partial(self._calls.once, name, data), ends=ends)

    # ---- What is said of it ----

    def _missing(self) -> str:
        """Returns whom the server waits for, in words, if it can still say it."""
        try:
            status = messages.STATUS.from_pb(
                parse(pb.StatusReply, self._calls.once("Status", b"", self._timeouts.heartbeat_interval))
            )
        except (grpc.RpcError, grpc.FutureCancelledError, PSError):
            return "; the server does not answer"
        tasks = sorted({task for waiting in status.waiting for task in waiting.missing})
        return f"; it waits for {', '.join(map(str, tasks))}" if tasks else ""


def look_again(server: RemoteServer) -> None:
    """Takes back that a server is gone, where an earlier session of this process has found so: it may be back."""
    if server.failed:
        server.begin_anew()
        expect(server)


def elsewhere(server: RemoteServer, address: str, call: float | None = None) -> RemoteServer:
    """Returns a connection to a process that is to be the same server.

    Args:
        server: the connection that there is.
        address: where the process is.
        call: seconds that a call to it may take; None for as many as one to the server.
    """
    decides, streams, told = server._options
    how = server._interceptors, server._transport, server._security, decides, streams, told
    timeouts = server._timeouts if call is None else replace(server._timeouts, call_timeout=call)
    return RemoteServer(address, server.task, timeouts, *how)


def follow_moves(servers: Sequence[ParameterServer], moved: Sequence[Moved]) -> list[int]:
    """Goes on at the addresses to which servers have moved; returns the indices of those that are found there now."""
    found = list[int]()
    for each in moved:
        server = servers[each.server]
        if isinstance(server, RemoteServer) and server.address != each.address:
            server.begin_anew(each.address)
            found.append(each.server)
    return found


def expect(server: RemoteServer) -> None:
    """A server has answered a process without a session: it is lost once nothing listens there any more."""
    server._attempts.opened = True


def connect(
    cluster: ClusterSpec,
    timeouts: Timeouts,
    transport: TransportName = "grpc",
    security: Security | None = None,
    drives: bool = False,
    refused: Refused = "lost",
    copied: bool = False,
) -> list[RemoteServer]:
    """Makes a connection to each parameter server of a cluster, in order.

    Args:
        cluster: the addresses of the servers.
        timeouts: time limits of the cluster.
        transport: the fastest one that may be used.
        security: the certificate and token that this process shows; None for none.
        drives: True for the chief: it decides for all which server is lost. What concerns server 0, which would
            have to tell of it, each process decides.
        refused: the meaning of a refused connection: the server is "lost", or this counts as "retry".
        copied: True if variables have copies: then the chief decides of server 0 as well, after a lease of silence.
    """
    tasks, streams = cluster.tasks("ps"), grpc_streams()
    if copied and drives:
        timeouts = replace(timeouts, server_timeout=min(timeouts.server_timeout, timeouts.session_timeout + 0.5))
    return [
        RemoteServer(
            cluster.address(task),
            task,
            timeouts,
            transport=transport,
            security=security,
            decides=refused == "lost" and (drives or (task.index == 0 and not copied)),
            streams=streams,
            told=copied and not drives,
        )
        for task in tasks
    ]


def _mismatch(calls: GrpcCalls, address: str, security: Security, name: str) -> str:
    return "" if calls.renew() else tls_diagnosis.mismatch(address, security.newest(), name)
