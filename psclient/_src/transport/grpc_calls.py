"""The calls of one gRPC connection: single attempts, of bytes, all of which can be ended at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from psclient._src.transport.daemon_threads import check_startable
from psclient._src.transport.staging import StagedParts
from pswire.cluster import Task
from pswire.encoding.verbs import INCARNATION_KEY, TOKEN_KEY, VERBS, Metadata, bearer, parse
from pswire.errors import InvalidRequest, PSError
from pswire.limits import PART_BYTES
from pswire.pb import parameter_server_pb2 as pb
from pswire.security.identity import Security
from pswire.transport.grpc_channel import Interceptor, open_channel, stub
from pswire.transport.grpc_frames import Frame, frames
from pswire.transport.parts import Assembly, Part, parts_of
from pswire.transport.payload import Payload
from pswire.transport.traffic import LaneName, Traffic

Header = TypeVar("Header", pb.RoundHeader, pb.PullHeader)


class GrpcCalls:
    """One connection over gRPC. May be used by any thread.

    Args:
        address: the server's address, `host:port`.
        task: the server's task, for messages.
        security: certificate and token that this process shows, and the CA that it asks for.
        name: the name that the server's certificate must have.
        lease: as in `open_channel`.
        interceptors: the first is the outermost.
        traffic: counts payload bytes.

    Attributes:
        failed: set once all calls have ended; wakes callers that pause between two of them.
    """

    def __init__(
        self,
        address: str,
        task: Task,
        security: Security,
        name: str,
        lease: float,
        interceptors: Sequence[Interceptor],
        traffic: Mapping[LaneName, Traffic],
    ) -> None:
        self.failed = threading.Event()
        self._address = address
        self._task = str(task)
        self._traffic = traffic["grpc"]
        self._channel = open_channel(address, security, name, lease)
        channel = grpc.intercept_channel(self._channel, *interceptors) if interceptors else self._channel
        # On the network there is no difference between one message and a stream of one, for which gRPC needs no thread.
        self._stubs = {n: stub(channel, v.path, v.streams if v.streams[0] else (False, True)) for n, v in VERBS.items()}
        # A call that is held for as long as the process lives is ended while it waits: a stream that is read by the
        # thread that waits for it may then keep its connection for good.
        self._watch = stub(channel, VERBS["Watch"].path, (False, False))
        self._push_whole = stub(channel, VERBS["Push"].path, (False, True))
        self._token: Metadata = ((TOKEN_KEY, bearer(security.token)),) if security.token else ()
        self._metadata: Metadata = self._token  # of every call; `bind` adds to it
        self._lock = threading.Lock()  # guards the two below
        self._under_way: set[Any] = set()
        self._failure: PSError | None = None

    def bind(self, incarnation: int) -> None:
        """Binds later calls to a life of the server."""
        self._metadata = (*self._token, (INCARNATION_KEY, str(incarnation)))

    # ---- One attempt, which takes so many seconds at most ----

    def once(self, name: str, data: bytes, seconds: float) -> bytes:
        """Calls a verb of one request and one reply. Starts no thread."""
        call = self._start(self._stubs[name], data, seconds)
        with self._endable(call):
            return b"".join(call)

    def create(self, header: bytes, value: Payload | None, seconds: float) -> bytes:
        """Calls `Create`, with or without a value."""
        parts = parts_of(value) if value else ()
        return self._answer(self._start(self._stubs["Create"].future, self._frames(header, parts), seconds))

    def watch(self, data: bytes, seconds: float) -> bytes:
        """Calls `Watch`, which the server may hold for long."""
        return self._answer(self._start(self._watch.future, data, seconds))

    def push(self, header: bytes, payload: Payload, seconds: float) -> tuple[pb.RoundHeader, Payload]:
        """Calls `Push`; the payload may still grow."""
        alone, parts = payload.whole and payload.size <= PART_BYTES, StagedParts(payload)
        messages = self._frames(header, parts)
        start, request = (self._push_whole, next(messages)) if alone else (self._stubs["Push"], messages)
        try:
            return self._receive(self._start(start, request, seconds), pb.RoundHeader)
        finally:
            parts.end()  # gRPC's thread would wait for them, however the call has ended

    def pull(self, data: bytes, seconds: float) -> tuple[pb.PullHeader, Payload]:
        """Sends a `Pull`; returns the answer's header and payload."""
        return self._receive(self._start(self._stubs["Pull"], data, seconds), pb.PullHeader)

    def _start(self, start: Callable[..., Any], request: bytes | Iterator[bytes], seconds: float) -> Any:
        """Starts a call; it is a future, or an iterator over the frames of its reply."""
        if not isinstance(request, bytes):
            check_startable()  # gRPC needs threads to send more than one message, and would wait for them for good
        try:
            return start(request, timeout=seconds, metadata=self._metadata)
        except ValueError:  # so gRPC says that `close` came first
            self.check()
            raise

    def _answer(self, call: Any) -> bytes:
        with self._endable(call):
            return bytes(call.result())

    def _frames(self, header: bytes, parts: Iterable[Part]) -> Iterator[bytes]:
        for frame in frames(header, parts):
            message = frame.encode()
            self._traffic.add(sent=sum(map(len, frame.data or ())))
            yield message

    def _receive(self, call: Any, kind: type[Header]) -> tuple[Header, Payload]:
        """Returns the header and the payload of a stream."""
        header: Header | None = None
        with self._endable(call):
            for message in call:
                frame = Frame.decode(message)
                if header is None or frame.header:
                    # Of an answer that is sent while it is made the first header has the size, and the last one all.
                    told = parse(kind, frame.header)
                    if header is None:
                        assembly = Assembly(told.size, self._traffic)
                    header = told
                assembly.add(frame.offset, frame.data or ())
        if header is None:
            raise InvalidRequest(f"{self._address} answered without a header", self._task)
        return header, assembly.check_whole()

    # ---- The end ----

    @contextmanager
    def _endable(self, call: Any) -> Iterator[None]:
        """Lets `fail` cancel a call."""
        with self._lock:
            self._under_way.add(call)
        try:
            if self.failed.is_set():
                call.cancel()
            yield
        finally:
            call.cancel()  # does nothing to a call that has ended
            with self._lock:
                self._under_way.discard(call)

    def fail(self, error: PSError) -> None:
        """Ends all calls under way, and all that come; the first error stays."""
        with self._lock:
            self._failure = self._failure or error
            calls = list(self._under_way)
        self.failed.set()
        for call in calls:
            call.cancel()

    def check(self) -> None:
        """Raises what `fail` was told; anew, since one exception cannot be raised by two threads."""
        if self._failure:
            raise type(self._failure)(self._failure.message, self._failure.task)

    def close(self) -> None:
        """Ends the connection, after `fail`."""
        self._channel.close()
