"""The gRPC rim of a client: `RemoteServer` is a `ParameterServer` that lives elsewhere.

Every call is sent again, with growing pauses, until it was answered or its deadline has passed; the
server knows repeats by their keys. What no server answered becomes `Unreachable`, or `ServerLost` once
there was a session to lose.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from psclient.channels import OPTIONS, REASONS, Interceptor, stub
from psclient.lane import Answered, Lane, Offer
from psclient.lanes import Lanes
from psclient.staging import Parts
from psclient.threads import Threads
from pswire import codec, replies
from pswire.api import (
    ALL,
    Begun,
    Contribution,
    CreateReply,
    Opened,
    PullReply,
    RestoreOrder,
    RestoreReply,
    RoundReply,
    ServerStatus,
    Shard,
    Watched,
)
from pswire.cluster import ClusterSpec, Task
from pswire.errors import BY_NAME, InvalidRequest, PSError, ServerLost, Unreachable
from pswire.lanes import LaneName
from pswire.lanes.frames import Frame, frames
from pswire.limits import PART_BYTES, Timeouts
from pswire.log import Entry, Mode, Start
from pswire.payload import Assembly, Part, Payload
from pswire.pb import parameter_server_pb2 as pb
from pswire.spec import Plan, VariableSpec
from pswire.wire import INCARNATION_KEY, UNANSWERED, VERBS, Metadata, Verb, batches, parse, refused

log = logging.getLogger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.02, 1.0
"""Seconds between two attempts: the first pause, and what it doubles up to."""

SLOWEST = 10e6
"""Bytes per second that the slowest network carries; the deadline of `Create` allows for its value."""

WAIT_SECONDS = 600.0
"""How long a call waits at the server before it is sent again."""

T = TypeVar("T")
Header = TypeVar("Header", pb.RoundHeader, pb.PullHeader)


class RemoteServer:
    """A server at an address. All methods may be called from any thread.

    Arrays of a payload are read until its call is over; they must not change before that.

    Args:
        address: `host:port`.
        task: the server's task, for messages.
        timeouts: of the cluster.
        interceptors: of gRPC, the first outermost; tests inject faults with them.
        lane: the fastest lane that may be used.

    Attributes:
        bytes_sent: payload bytes handed to the network, repeats included.
        bytes_received: payload bytes that came.
    """

    def __init__(
        self,
        address: str,
        task: Task,
        timeouts: Timeouts | None = None,
        interceptors: Sequence[Interceptor] = (),
        lane: LaneName = "grpc",
    ) -> None:
        self.address = address
        self.task = task
        self.bytes_sent = 0
        self.bytes_received = 0
        self._timeouts = timeouts or Timeouts()
        self._threads = Threads(f"call {task}")
        self._lane = lane
        self._lanes: dict[int, Lanes] = {}  # of each session
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        channel = grpc.intercept_channel(self._channel, *interceptors) if interceptors else self._channel
        self._stubs = {name: stub(channel, verb.path, verb.streams) for name, verb in VERBS.items()}
        # On the network there is no difference between one message and a stream of one.
        self._push_whole = stub(channel, VERBS["Push"].path, (False, True))
        self._metadata: Metadata = ()  # set by `open`
        self._silent_since: float | None = None  # when the answers stopped; the next one resets it
        self._failed = threading.Event()  # wakes who pauses
        self._lock = threading.Lock()  # guards the two below, and the counters
        self._calls: set[Any] = set()
        self._failure: PSError | None = None

    # ---- The verbs ----

    def open(self, task: Task, replicas: int, session: int, drives: bool, mode: Mode = "sync") -> Opened:
        """As `ParameterServer.open`; binds later calls to the incarnation that answered."""
        request = pb.OpenRequest(
            task=codec.task_to_pb(task),
            replicas=replicas,
            session=session,
            drives=drives,
            mode=codec.mode_to_pb(mode),
        )
        m = parse(pb.OpenReply, self._ask("Open", request))
        self._metadata = ((INCARNATION_KEY, str(m.incarnation)),)
        if replicas:
            host = self.address.rpartition(":")[0].strip("[]")
            offer = Offer(m.session, m.lane_token, host, m.data_port, m.data_path, m.in_flight)
            old = self._lanes.get(m.session)
            self._lanes[m.session] = Lanes(str(self.task), offer, self._timeouts.lease, self._threads, self._lane)
            if old is not None:
                old.close("the session was opened again")
        return Opened(m.session, m.incarnation, m.token, m.server, m.device)

    def beat(self, session: int, round: int, plan_id: bytes) -> None:
        """As `ParameterServer.beat`."""
        self._ask("Beat", pb.BeatRequest(session=session, round=round, plan_id=plan_id))

    def leave(self, session: int, error: str) -> None:
        """As `ParameterServer.leave`."""
        self._ask("Leave", pb.LeaveRequest(session=session, error=error))

    def create(
        self,
        session: int,
        ordinal: int,
        id: int,
        spec: VariableSpec,
        servers: tuple[int, ...],
        value: Payload | None,
    ) -> CreateReply:
        """As `ParameterServer.create`."""
        header = pb.CreateHeader(
            session=session,
            ordinal=ordinal,
            id=id,
            spec=codec.spec_to_pb(spec),
            servers=servers,
            has_value=value is not None,
        ).SerializeToString()

        def once(seconds: float) -> bytes:
            parts = value.parts() if value else ()
            call = self._start(self._stubs["Create"].future, self._frames(header, parts), seconds)
            with self._under_way(call):
                return bytes(call.result())

        extra = value.size / SLOWEST if value else 0.0
        m = parse(pb.CreateReply, self._until_answered(VERBS["Create"], once, extra))
        return CreateReply(m.id, tuple(m.servers), m.initialized, m.restored)

    def propose(self, session: int, plan: Plan | None, entry: str, start: Start | None) -> None:
        """As `ParameterServer.propose`."""
        request = pb.ProposeRequest(
            session=session,
            plan=codec.plan_to_pb(plan) if plan else None,
            entry=entry,
            start=codec.start_to_pb(start) if start else None,
        )
        self._ask("Propose", request)

    def watch(self, session: int, after: int, version: int) -> Future[Watched]:
        """As `ParameterServer.watch`; of long news it may give the first part, the next call the rest."""
        request = pb.WatchRequest(session=session, after=after, version=version)
        return self._threads.submit(lambda: replies.watched_from_pb(parse(pb.WatchReply, self._ask("Watch", request))))

    def approve(self, token: int, index: int, entries: Sequence[Entry]) -> int:
        """As `ParameterServer.approve`; a long list travels in several calls."""
        length = index
        for batch in batches([codec.entry_to_pb(entry) for entry in entries]):
            request = pb.ApproveRequest(token=token, index=index, entries=batch)
            length = parse(pb.ApproveReply, self._ask("Approve", request)).length
            index += len(batch)
            if length < index:
                break
        return length

    def push(self, contribution: Contribution, payload: Payload, begun: Begun | None = None) -> Future[RoundReply]:
        """As `ParameterServer.push`; the payload may still grow. A broken stream is sent again, whole."""
        header = replies.contribution_to_pb(contribution, payload.size).SerializeToString()

        def once(seconds: float) -> RoundReply:
            alone, parts = payload.whole and payload.size <= PART_BYTES, Parts(payload)
            messages = self._frames(header, parts)
            start, request = (self._push_whole, next(messages)) if alone else (self._stubs["Push"], messages)
            try:
                call = self._start(start, request, seconds)
                return replies.round_from_pb(*self._receive(call, pb.RoundHeader))
            finally:
                parts.end()  # gRPC's thread would wait for them, however the call has ended

        def over(lane: Lane) -> Future[Answered]:
            with self._lock:
                self.bytes_sent += payload.size
            return lane.push(header, payload)

        again = partial(self._until_answered, VERBS["Push"], once)
        return self._ask_on_lane(contribution.session, over, replies.round_from_pb, again)

    def pull(self, session: int, variables: Sequence[int], after: int) -> Future[PullReply]:
        """As `ParameterServer.pull`."""
        data = pb.PullRequest(session=session, variables=variables, after=after).SerializeToString()

        def once(seconds: float) -> PullReply:
            return replies.pull_from_pb(*self._receive(self._start(self._stubs["Pull"], data, seconds), pb.PullHeader))

        again = partial(self._until_answered, VERBS["Pull"], once)
        return self._ask_on_lane(session, lambda lane: lane.pull(data), replies.pull_from_pb, again)

    def _ask_on_lane(
        self,
        session: int,
        ask: Callable[[Lane], Future[Answered]],
        decode: Callable[[Any, Payload], T],
        otherwise: Callable[[], T],
    ) -> Future[T]:
        """Calls on the best lane of a session that works; over gRPC where none does."""
        self._check()

        def over_grpc() -> Future[T]:
            self._check()
            return self._threads.submit(otherwise)

        def read(header: Any, payload: Payload) -> T:
            with self._lock:
                self.bytes_received += payload.size
            return decode(header, payload)

        lanes = self._lanes.get(session)
        return lanes.ask(ask, read, over_grpc) if lanes else over_grpc()

    def snapshot(self, token: int, plan_id: bytes, manifest: str) -> Future[Shard]:
        """As `ParameterServer.snapshot`."""
        request = pb.SnapshotRequest(token=token, plan_id=plan_id, manifest=manifest)
        ask = partial(self._ask, "Snapshot", request)
        return self._threads.submit(lambda: replies.shard_from_pb(parse(pb.SnapshotReply, ask())))

    def restore(self, session: int, path: str, ordinal: int, order: RestoreOrder = ALL) -> Future[RestoreReply]:
        """As `ParameterServer.restore`."""
        request = pb.RestoreRequest(session=session, path=path, ordinal=ordinal, order=replies.order_to_pb(order))
        ask = partial(self._ask, "Restore", request)
        return self._threads.submit(lambda: replies.restored_from_pb(parse(pb.RestoreReply, ask())))

    def status(self) -> ServerStatus:
        """As `ParameterServer.status`."""
        return replies.status_from_pb(parse(pb.StatusReply, self._ask("Status", pb.Empty())))

    # ---- The end ----

    def fail(self, error: PSError) -> None:
        """Makes all calls under way, and all that come, raise an error at once; the first one stays."""
        with self._lock:
            self._failure = self._failure or error
            calls = list(self._calls)
        self._failed.set()
        for lanes in list(self._lanes.values()):
            lanes.close(error.message)
        for call in calls:
            call.cancel()

    def close(self) -> None:
        """Ends the connection; calls under way and later ones raise `PSError`."""
        self.fail(PSError(f"the connection to {self.address} is closed", str(self.task)))
        self._channel.close()
        self._threads.close()

    # ---- One attempt ----

    def _start(self, start: Callable[..., Any], request: bytes | Iterator[bytes], seconds: float) -> Any:
        """Starts a call; it is a future, or an iterator over the frames of its reply."""
        try:
            return start(request, timeout=seconds, metadata=self._metadata)
        except ValueError:  # so gRPC says that `close` came first
            self._check()
            raise

    @contextmanager
    def _under_way(self, call: Any) -> Iterator[None]:
        """Lets `fail` cancel a call."""
        with self._lock:
            self._calls.add(call)
        try:
            if self._failed.is_set():
                call.cancel()
            yield
        finally:
            call.cancel()  # does nothing to a call that has ended
            with self._lock:
                self._calls.discard(call)

    def _ask(self, name: str, request: Message) -> bytes:
        """A verb of one request and one reply, until it is answered."""
        data = request.SerializeToString()

        def once(seconds: float) -> bytes:
            call = self._start(self._stubs[name].future, data, seconds)
            with self._under_way(call):
                return bytes(call.result())

        return self._until_answered(VERBS[name], once)

    def _frames(self, header: bytes, parts: Iterable[Part]) -> Iterator[bytes]:
        for frame in frames(header, parts):
            message = frame.encode()
            with self._lock:
                self.bytes_sent += _size(frame)
            yield message

    def _receive(self, call: Any, kind: type[Header]) -> tuple[Header, Payload]:
        """The header and the payload of a stream."""
        header: Header | None = None
        with self._under_way(call):
            for message in call:
                frame = Frame.decode(message)
                if header is None or frame.header:
                    # Of an answer that is sent while it is made the first header has the size, and the last one all.
                    told = parse(kind, frame.header)
                    if header is None:
                        assembly = Assembly(told.size)
                    header = told
                assembly.add(frame.offset, frame.data or ())
                with self._lock:
                    self.bytes_received += _size(frame)
        if header is None:
            raise InvalidRequest(f"{self.address} answered without a header", str(self.task))
        return header, assembly.check_whole()

    # ---- Until it is answered ----

    def _until_answered(self, verb: Verb, once: Callable[[float], T], extra: float = 0.0) -> T:
        """Repeats an attempt until it is answered, its deadline has passed, or the server is lost."""
        limit = getattr(self._timeouts, verb.deadline) + extra if verb.deadline else float("inf")
        started = time.monotonic()
        spoke, pause = started, FIRST_PAUSE
        while True:
            self._check()
            now = time.monotonic()
            try:
                result = once(self._attempt_seconds(verb, limit - (now - started), extra))
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                self._check()
                why = self._unanswered(verb, error, now)
            else:
                self._silent_since = None
                return result
            self._give_up(verb, limit, time.monotonic() - started, why)
            if time.monotonic() - spoke > self._timeouts.word:
                spoke = time.monotonic()
                log.warning("no answer from %s at %s (%s) yet; trying on", self.task, self.address, why)
            self._failed.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LAST_PAUSE)

    def _attempt_seconds(self, verb: Verb, left: float, extra: float) -> float:
        """A prompt verb's answer counts as lost after half a lease: the network may have swallowed it."""
        longest = WAIT_SECONDS if verb.waits else self._timeouts.lease / 2 + extra
        return max(min(left, longest), 0.001)

    def _unanswered(self, verb: Verb, error: Exception, began: float) -> str:
        """Why an attempt has no answer; raises the error that the server answered with, if it did."""
        if not isinstance(error, grpc.Call):
            return "cancelled"
        code, details = error.code().name, error.details() or ""
        answer = refused(details, error.trailing_metadata() or ())
        if answer is not None or code not in UNANSWERED:
            self._silent_since = None
            raise (answer or self._foreign(code, details)) from None
        if code == "DEADLINE_EXCEEDED" and verb.waits:
            return "it has not answered yet"  # which it may do on purpose
        if self._silent_since is None:
            self._silent_since = began if code == "DEADLINE_EXCEEDED" else time.monotonic()
        found = (words for part, words in REASONS.items() if part in details)
        return next(found, code.lower().replace("_", " "))

    def _foreign(self, code: str, details: str) -> PSError:
        """What answers is no server of ours, or is one that a message is too large for."""
        if code == "UNIMPLEMENTED":
            return Unreachable(
                f"what answers at {self.address} is no parameter server of this version; correct the address",
                str(self.task),
            )
        return InvalidRequest(f"the call was refused: {details} ({code})", str(self.task))

    def _give_up(self, verb: Verb, limit: float, elapsed: float, why: str) -> None:
        """Raises what is to be told to the caller, if there is no use in trying again."""
        since = self._silent_since
        silence = 0.0 if since is None else time.monotonic() - since
        if verb.guarded and self._metadata and silence >= self._timeouts.lease:
            raise ServerLost(
                f"was lost (no answer at {self.address} for {silence:.3g} s); "
                "its variables are gone; restart from a checkpoint",
                str(self.task),
            )
        if elapsed >= limit:
            raise self._late(verb, elapsed, why)

    def _late(self, verb: Verb, elapsed: float, why: str) -> PSError:
        if verb.waits:
            text = f"{verb.name} did not complete within {elapsed:.3g} s{self._missing()}"
            return BY_NAME[verb.late](text, str(self.task))
        return Unreachable(
            f"no answer at {self.address} for {elapsed:.3g} s ({why}); "
            "start this task, or correct its address in TF_CONFIG",
            str(self.task),
        )

    def _missing(self) -> str:
        """Whom the server waits for, in words, if it can still say it."""
        try:
            call = self._start(self._stubs["Status"].future, b"", self._timeouts.beat)
            status = replies.status_from_pb(parse(pb.StatusReply, call.result()))
        except (grpc.RpcError, grpc.FutureCancelledError, PSError):
            return "; the server does not answer"
        tasks = sorted({task for waiting in status.waiting for task in waiting.missing})
        return f"; it waits for {', '.join(map(str, tasks))}" if tasks else ""

    def _check(self) -> None:
        """Raises what `fail` was told; anew, since one exception cannot be raised by two threads."""
        if self._failure:
            raise type(self._failure)(self._failure.message, self._failure.task)


def _size(frame: Frame) -> int:
    return sum(len(buffer) for buffer in frame.data or ())


def connect(cluster: ClusterSpec, timeouts: Timeouts, lane: LaneName = "grpc") -> list[RemoteServer]:
    """A connection to each parameter server of a cluster, in order; `lane` is the fastest one that may be used."""
    return [RemoteServer(cluster.address(task), task, timeouts, lane=lane) for task in cluster.tasks("ps")]
