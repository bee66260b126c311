"""The gRPC rim of a client: `RemoteServer` is a `ParameterServer` that lives elsewhere.

Every call is sent again, with growing pauses, until it was answered or its deadline has passed; the
server knows repeats by their keys. What no server answered becomes `Unreachable`, or `ServerLost` once
there was a session to lose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc

from psclient._src.config import grpc_streams
from psclient._src.network.daemon_threads import Threads
from psclient._src.network.grpc_calls import GrpcCalls
from psclient._src.network.retries import Attempts
from psclient._src.network.transport import Offer, Transport, TransportCall
from psclient._src.network.transport_selector import TransportSelector
from pswire.api import (
    ApproveRequest,
    Begun,
    Contribution,
    CreateBatchReply,
    CreateBatchRequest,
    HeartbeatRequest,
    Opened,
    OpenRequest,
    ParameterServer,
    PullReply,
    PullRequest,
    RoundReply,
    Watched,
    WatchRequest,
)
from pswire.cluster import ClusterSpec, Task
from pswire.encoding import messages
from pswire.encoding.calls import CALLS, cut
from pswire.encoding.verbs import VERBS, Verb, parse
from pswire.errors import PSError, ServerGone
from pswire.limits import MAX_BATCH_VARIABLES, Refused, Timeouts
from pswire.model.log import Done
from pswire.model.places import Moved
from pswire.model.status import STILL, ServerStatus
from pswire.network.grpc_channel import Interceptor
from pswire.network.payload import EMPTY, Payload
from pswire.network.sockets import MessageKind
from pswire.network.traffic import TransportName, traffic
from pswire.pb import parameter_server_pb2 as pb
from pswire.security.identity import Security
from pswire.security.names import certificate_name, task_name
from pswire.servers.requests import R, ServerRequest

CREATION_SECONDS = 0.02
"""Seconds that a busy server takes to create one variable, a part of a dynamic table for example, at most."""

T = TypeVar("T")


class RemoteServer(ParameterServer):
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
        self._encoder, self._decoder = messages.PushEncoder(), messages.RoundDecoder()
        self._transports: dict[int, TransportSelector] = {}  # of each session
        self._security = security or Security()
        self._tls = self._security.client_context if self._security.tls else None
        self._name = certificate_name(task_name(task))
        self._interceptors = interceptors
        self._options = decides, streams, told
        self._own: Mapping[type[ServerRequest[Any]], Callable[[Any], Any]] = {
            OpenRequest: self._open,
            HeartbeatRequest: self._heartbeat,
            CreateBatchRequest: self._create_batch,
            WatchRequest: self._watch,
            ApproveRequest: self._approve,
            PullRequest: self._pull,
        }
        """What is done for a request beside sending it."""
        self._connect(address)

    def _connect(self, address: str) -> None:
        self.address = address
        decides, streams, told = self._options
        shown, lease = self._security, self._timeouts.session_timeout
        self._calls = GrpcCalls(address, self.task, shown, self._name, lease, self._interceptors, self.traffic, streams)
        self._attempts = Attempts(address, str(self.task), self._timeouts, self._calls, self._missing, decides, told)

    # ---- The verbs ----

    def call(self, request: ServerRequest[R]) -> R:
        own: Any = self._own.get(type(request)) or (self._ask_beside if request.waits else self._ask)
        answer: R = own(request)
        return answer

    def _ask_beside(self, request: ServerRequest[Any]) -> Future[Any]:
        return self._threads.submit(lambda: self._ask(request))

    def _ask(self, request: ServerRequest[Any]) -> Any:
        codec = CALLS[request.verb]
        return codec.answer_from(self._send(codec.verb, codec.encode(request)), str(self.task))

    def _send(self, verb: Verb, data: bytes, extra: float = 0.0, ends: bool = False) -> bytes:
        """Makes a call until it is answered, or, if `ends`, the server has ended by it; see `Attempts`."""
        return self._attempts.until_answered(verb, partial(self._calls.once, verb.name, data), extra, ends)

    def _open(self, request: OpenRequest) -> Opened:
        """Opens a session; binds later calls to the incarnation that answered."""
        codec = CALLS["Open"]
        data = self._send(codec.verb, codec.encode(request))
        opened: Opened = codec.answer_from(data, str(self.task))
        self._calls.bind(opened.incarnation)
        self._attempts.opened = True
        if request.replicas:
            self._begin_transports(parse(pb.OpenReply, data))
        return opened

    def _begin_transports(self, m: pb.OpenReply) -> None:
        """Opens the transports of a session; those that it had before end."""
        host = self.address.rpartition(":")[0].strip("[]")
        offer = Offer(
            *(m.session, m.transport_token, host, m.data_port, m.data_path, m.in_flight),
            *(self._name, m.buffer_bytes, self._tls),
        )
        old, how = self._transports.get(m.session), (self._threads, self.traffic, self._transport)
        self._transports[m.session] = TransportSelector(str(self.task), offer, self._timeouts.session_timeout, *how)
        if old is not None:
            old.close("the session was opened again")

    def _heartbeat(self, request: HeartbeatRequest) -> bool:
        """Heartbeats on an idle transport if there is one, which needs no new content; else over gRPC."""
        transports, said = self._transports.get(request.session), (request.round, request.pace or STILL, request.clock)
        if transports and (drives := transports.heartbeat(*said)) is not None:
            return drives
        drives = bool(self._ask(request))
        if transports:
            transports.heartbeat_answered(*said)
        return drives

    def _create_batch(self, request: CreateBatchRequest) -> CreateBatchReply:
        """Creates variables; sends a large batch in several calls."""
        whole, codec = CreateBatchReply(0), CALLS["CreateBatch"]
        for batch, data in cut(request, "variables", MAX_BATCH_VARIABLES):
            answer = self._send(codec.verb, data, len(batch.variables) * CREATION_SECONDS)
            reply: CreateBatchReply = codec.answer_from(answer, str(self.task))
            whole = CreateBatchReply(
                whole.count + reply.count,
                whole.initialized + reply.initialized,
                whole.restored + reply.restored,
                reply.error,
            )
            if reply.error is not None:
                break
        return whole

    def _watch(self, request: WatchRequest) -> Future[Watched]:
        """Watches; may return the first part of long news, and the rest at the next call."""
        codec = CALLS["Watch"]
        once = partial(self._calls.watch, codec.encode(request))
        again = partial(self._attempts.until_answered, codec.verb, once)
        return self._threads.submit(lambda: codec.answer_from(again(), str(self.task)))

    def _approve(self, request: ApproveRequest) -> int:
        """Appends to the log; sends a long list in several calls."""
        length, index, codec = request.index, request.index, CALLS["Approve"]
        ends = any(isinstance(entry, Done) for entry in request.entries[-1:])
        for batch, data in cut(request, "entries"):
            if index > batch.index:
                data = codec.encode(replace(batch, index=index))
            length = codec.answer_from(self._send(codec.verb, data, ends=ends), str(self.task))
            index += len(batch.entries)
            if length < index:
                break
        return length

    def push(self, contribution: Contribution, payload: Payload, begun: Begun | None = None) -> Future[RoundReply]:
        """Calls `ParameterServer.push`; the payload may still grow. Sends a broken stream again, whole."""
        header = self._encoder.encode(contribution, payload.size)
        call = TransportCall(contribution.session, MessageKind.PUSH, header, payload, self._decoder.decode, self)
        self._send_payload(call)
        return call

    def _pull(self, request: PullRequest) -> Future[PullReply]:
        header = messages.PULL.to_pb(request).SerializeToString()
        call = TransportCall(request.session, MessageKind.PULL, header, EMPTY, messages.pull_from_pb, self)
        self._send_payload(call)
        return call

    def _send_payload(self, call: TransportCall[Any], lost: Transport | None = None) -> None:
        """Makes a call on the best transport of its session that works, or over gRPC where none does.

        Args:
            call: the call.
            lost: the transport that broke with the call on it.
        """
        self._calls.check()
        transports = self._transports.get(call.session)
        transport = None if transports is None else transports.next(lost)
        if transport is None:
            self._send_over_grpc(call)
        else:
            transport.send(call)

    def _send_over_grpc(self, call: TransportCall[Any]) -> None:
        """Makes a call without a transport, in another thread."""
        self._calls.check()
        kind, header, payload = call.said
        pushes = kind is MessageKind.PUSH

        def once(seconds: float) -> Any:
            calls = self._calls
            return call.decode(*calls.push(header, payload, seconds) if pushes else calls.pull(header, seconds))

        again = partial(self._attempts.until_answered, VERBS["Push" if pushes else "Pull"], once)
        self._threads.submit(partial(call.settle, again))

    def lost(self, call: TransportCall[Any], transport: Transport) -> None:
        """Makes a call again whose transport is lost, in another thread: to open the next one takes a while."""
        try:
            self._threads.submit(partial(self._send_again, call, transport))
        except PSError as error:
            call.fail(error)

    def _send_again(self, call: TransportCall[Any], transport: Transport) -> None:
        try:
            self._send_payload(call, transport)
        except BaseException as error:  # whatever it is, it belongs to the caller that waits
            call.fail(error)
            del call  # else the error, by its traceback, and the call hold each other

    def refused(self, call: TransportCall[Any], error: PSError) -> bool:
        """Makes a call again to which the server says that it has ended, where it waits for a verdict as any other."""
        if not self._attempts.awaits_verdict(error):
            return False
        try:
            self._send_over_grpc(call)
        except PSError as failure:
            call.fail(failure)
        return True

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

    # ---- What is said of it ----

    def _missing(self) -> str:
        """Returns whom the server waits for, in words, if it can still say it."""
        try:
            data = self._calls.once("Status", b"", self._timeouts.heartbeat_interval)
            status: ServerStatus = CALLS["Status"].answer_from(data, str(self.task))
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
