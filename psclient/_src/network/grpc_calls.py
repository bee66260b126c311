"""The calls of one gRPC connection: single attempts, of bytes, all of which can be ended at once.

Pushes and pulls follow one another on a stream that stays open. Where another one is under way there, after the stream
has broken, and with servers and proxies that know no such stream, one is a call of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import grpc

from psclient._src.network import tls_diagnosis
from psclient._src.network.daemon_threads import check_startable
from psclient._src.network.forks import Owner
from psclient._src.network.staging import StagedParts
from pswire.cluster import Task
from pswire.encoding.verbs import (
    INCARNATION_KEY,
    TOKEN_KEY,
    UNANSWERED,
    VERBS,
    Metadata,
    bearer,
    parse,
    refusal_from_pb,
    refused,
)
from pswire.errors import InvalidRequest, PSError
from pswire.limits import PART_BYTES
from pswire.network.grpc_channel import Interceptor, open_channel, stub
from pswire.network.grpc_frames import Frame, frames, within
from pswire.network.parts import Assembly, Part
from pswire.network.payload import Payload
from pswire.network.traffic import Traffic, TransportName
from pswire.pb import parameter_server_pb2 as pb
from pswire.security.identity import Security

log = logging.getLogger("psclient.calls")

Header = TypeVar("Header", pb.RoundHeader, pb.PullHeader)

MAX_BREAKS = 4
"""Streams in a row that break before they have carried a call; then there are none any more."""

PUSH, PULL = 1, 2
"""Fields of `ExchangeHeader`."""

WHOLE_PUSH, HELD_WATCH = "Push of one message", "Watch without a stream"
"""Stubs beside those of the verbs."""


LIVES = 2.0
"""A stream lives for as many times the seconds of the call for which it was opened, and then makes room for another."""


class StreamEnded(grpc.RpcError):
    """The stream has ended before the call was answered, which says nothing of the server."""


class CallStream:
    """One stream. Used by one call after the other, in any thread; ended by any.

    Args:
        start: starts a stream of these messages, which may take so many seconds; returns gRPC's call.
        seconds: the seconds that its first call may take.

    Attributes:
        between_calls: False while a call is under way, and after one that was left in its middle.
    """

    def __init__(self, start: Callable[[Iterator[bytes], float], Any], seconds: float) -> None:
        self.between_calls = True
        self._outgoing = SimpleQueue[Iterable[bytes] | None]()
        self._end = time.monotonic() + LIVES * seconds
        self._call = start(self._messages(), LIVES * seconds)

    def _messages(self) -> Iterator[bytes]:
        """Yields what is to be sent, in gRPC's thread. Keeps nothing of what was."""
        while (messages := self._outgoing.get()) is not None:
            yield from messages
            del messages

    def serves(self, seconds: float) -> bool:
        """Returns True if it has not ended, and lives for so many seconds more."""
        return bool(self._call.is_active()) and time.monotonic() + seconds <= self._end

    def exchange(self, messages: Iterable[bytes]) -> Iterator[Frame]:
        """Sends the messages of a call; yields the frames of its answer.

        Raises:
            PSError: the server has refused the call; the stream goes on.
            grpc.RpcError: the stream has ended.
        """
        self.between_calls = False
        self._outgoing.put(messages)
        for message in self._call:
            frame = Frame.decode(message)
            self.between_calls = frame.end is not None
            if frame.end:
                raise refusal_from_pb(parse(pb.Refusal, frame.end))
            yield frame
            if self.between_calls:
                return
        raise StreamEnded

    def cancel(self) -> None:
        """Ends it, and the call under way on it."""
        self._outgoing.put(None)
        self._call.cancel()


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
        streams: False for a call of its own for each push and pull.

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
        traffic: Mapping[TransportName, Traffic],
        streams: bool = True,
    ) -> None:
        self.failed = threading.Event()
        self._address = address
        self._task = str(task)
        self._traffic = traffic["grpc"]
        self._security, self._name, self._interceptors = security, name, interceptors
        self.owner = Owner()
        self._open = partial(open_channel, address, name=name, lease=lease)
        self._shown = security.newest()
        self._channel: grpc.Channel | None = self._open(security=self._shown)
        self._stubs = self._made_stubs(self._channel)
        self._token: Metadata = ((TOKEN_KEY, bearer(security.token)),) if security.token else ()
        self._metadata: Metadata = self._token  # of every call; `bind` adds to it
        self._lock = threading.Lock()  # guards all below
        self._under_way: set[Any] = set()
        self._failure: PSError | None = None
        # Interceptors are for calls: they would see one for all pushes.
        self._streams = streams and not interceptors
        self._stream: CallStream | None = None  # of the call that has it to itself, if there is one
        self._occupied = self._broken = self._unbound = False
        self._breaks = 0

    def _made_stubs(self, opened: grpc.Channel) -> dict[str, Any]:
        channel = grpc.intercept_channel(opened, *self._interceptors) if self._interceptors else opened
        # On the network there is no difference between one message and a stream of one, for which gRPC needs no thread.
        found = {n: stub(channel, v.path, v.streams if v.streams[0] else (False, True)) for n, v in VERBS.items()}
        # A call that is held for as long as the process lives is ended while it waits: a stream that is read by the
        # thread that waits for it may then keep its connection for good.
        found[HELD_WATCH] = stub(channel, VERBS["Watch"].path, (False, False))
        found[WHOLE_PUSH] = stub(channel, VERBS["Push"].path, (False, True))
        return found

    def renew(self) -> bool:
        """Opens another connection, after this one has failed, if certificates have changed since it was opened.

        gRPC connects a channel again with those that it was opened with. Calls under way on it are sent again.

        Returns:
            True if there is another one.
        """
        newest = self._security.newest()
        with self._lock:
            if newest is self._shown or self._channel is None:
                return False
            old, self._shown = self._channel, newest
            self._channel = self._open(security=newest)
            self._stubs = self._made_stubs(self._channel)
        self._drop_stream()
        old.close()
        return True

    def mismatch(self) -> str:
        """Returns why both ends cannot speak, in words, "" if that is not known: gRPC does not tell it."""
        return "" if self.renew() else tls_diagnosis.mismatch(self._address, self._security.newest(), self._name)

    def bind(self, incarnation: int) -> None:
        """Binds later calls to a life of the server."""
        self._show((*self._token, (INCARNATION_KEY, str(incarnation))))

    def _show(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """Sends this with later calls, and no call on a stream that was opened with something else."""
        self._metadata = metadata
        with self._lock:
            free = not self._occupied
            self._unbound = not free  # then who has the stream ends it
        if free:
            self._drop_stream()

    # ---- One attempt, which takes so many seconds at most ----

    def once(self, name: str, data: bytes, seconds: float) -> bytes:
        """Calls a verb of one request and one reply. Starts no thread."""
        call = self._start(name, data, seconds)
        with self._endable(call):
            return b"".join(call)

    def watch(self, data: bytes, seconds: float) -> bytes:
        """Calls `Watch`, which the server may hold for long."""
        call = self._start(HELD_WATCH, data, seconds, future=True)
        with self._endable(call):
            return bytes(call.result())

    def push(self, header: bytes, payload: Payload, seconds: float) -> tuple[pb.RoundHeader, Payload]:
        """Calls `Push`; the payload may still grow."""
        alone, parts = payload.whole and payload.size <= PART_BYTES, StagedParts(payload)
        try:
            with self._taken(seconds) as stream:
                messages = self._frames(within(PUSH, header) if stream else header, parts)
                if stream:
                    asked = [next(messages)] if alone else messages  # one is encoded here, and not in gRPC's thread
                    return self._collect(stream.exchange(asked), pb.RoundHeader)
                name, request = (WHOLE_PUSH, next(messages)) if alone else ("Push", messages)
                return self._receive(self._start(name, request, seconds), pb.RoundHeader)
        finally:
            parts.end()  # gRPC's thread would wait for them, however the call has ended

    def pull(self, data: bytes, seconds: float) -> tuple[pb.PullHeader, Payload]:
        """Sends a `Pull`; returns the answer's header and payload."""
        with self._taken(seconds) as stream:
            if stream:
                return self._collect(stream.exchange([Frame(within(PULL, data)).encode()]), pb.PullHeader)
            return self._receive(self._start("Pull", data, seconds), pb.PullHeader)

    def _start(self, name: str, request: bytes | Iterator[bytes], seconds: float, future: bool = False) -> Any:
        """Starts a call; it is a future, or an iterator over the frames of its reply."""
        if not isinstance(request, bytes):
            check_startable()  # gRPC needs threads to send more than one message, and would wait for them for good
        stubs = self._stubs
        try:
            call = stubs[name].future if future else stubs[name]
            return call(request, timeout=seconds, metadata=self._metadata)
        except (KeyError, ValueError):  # `close` came first: gRPC says so by a ValueError
            self.check()
            if stubs is not self._stubs:  # `renew` came in between
                return self._start(name, request, seconds, future)
            raise

    def _frames(self, header: bytes, parts: Iterable[Part]) -> Iterator[bytes]:
        for frame in frames(header, parts):
            message = frame.encode()
            self._traffic.add(sent=sum(map(len, frame.data or ())))
            yield message

    def _receive(self, call: Any, kind: type[Header]) -> tuple[Header, Payload]:
        with self._endable(call):
            return self._collect(map(Frame.decode, call), kind)

    def _collect(self, answer: Iterator[Frame], kind: type[Header]) -> tuple[Header, Payload]:
        header: Header | None = None
        for frame in answer:
            if header is None or frame.header:
                # Of an answer that is sent while it is made the first header has the size, and the last one all.
                told = parse(kind, frame.header)
                if header is None:
                    assembly = Assembly(told.size, self._traffic)
                header = told
            assembly.add(frame.offset, frame.data or ())
        if header is None:
            raise InvalidRequest(f"{self._address} sent a response without a header", self._task)
        return header, assembly.check_whole()

    # ---- The stream ----

    @contextmanager
    def _taken(self, seconds: float) -> Iterator[CallStream | None]:
        """Lends the stream to one call that may take so many seconds; None for a call of its own.

        Raises:
            grpc.RpcError: the stream has broken. The next call, the same one again in most cases, is one of its own.
        """
        with self._lock:
            after_break, self._broken = self._broken, False
            free = self._streams and not (self._occupied or after_break)
            self._occupied = self._occupied or free
        if not free:
            yield None
            if after_break:
                self._count_break()
            return
        try:
            stream = self._open_stream(seconds)
            yield stream
        except grpc.RpcError as error:
            with self._lock:
                self._broken = True
            if _passes_on(error):
                raise
            raise StreamEnded from None  # a call of its own tells what it is
        finally:
            self._give_back()

    def _open_stream(self, seconds: float) -> CallStream | None:
        """Returns the stream, opened anew if it has ended or ends too soon; None where no thread can be started."""
        if self._stream is not None and self._stream.serves(seconds):
            return self._stream
        self._drop_stream()
        try:
            stream = CallStream(partial(self._start, "Exchange"), seconds)
        except PSError:
            self.check()
            return None
        with self._lock:
            self._stream = stream
            self._under_way.add(stream)
        if self.failed.is_set():
            stream.cancel()
        return stream

    def _give_back(self) -> None:
        """Ends the loan; a stream on which a call was left in its middle is ended."""
        stream = self._stream
        if stream is not None and stream.between_calls:
            self._breaks = 0
        else:
            self._drop_stream()
        with self._lock:
            self._occupied = False
            unbound, self._unbound = self._unbound, False
        if unbound:
            self._drop_stream()

    def _drop_stream(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
            self._under_way.discard(stream)
        if stream is not None:
            stream.cancel()

    def _count_break(self) -> None:
        """Counts a stream that broke where a call of its own was answered: something may let no stream through."""
        with self._lock:
            self._breaks += 1
            ends, self._streams = self._breaks >= MAX_BREAKS, self._streams and self._breaks < MAX_BREAKS
        if ends:
            log.info("%s uses single calls, because streams to %s break repeatedly", self._task, self._address)

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

    def begin_anew(self) -> None:
        """Takes back what `fail` was told: another life of the server is there. No call is under way."""
        with self._lock:
            self._failure = None
        self._show(self._token)
        self.failed.clear()

    def check(self) -> None:
        """Raises what `fail` was told, and in a fork of the process that the connection cannot be used."""
        self.owner.check()
        if self._failure:  # anew, since one exception cannot be raised by two threads
            raise type(self._failure)(self._failure.message, self._failure.task)

    def close(self) -> None:
        """Ends the connection, after `fail`.

        Keeps nothing of gRPC: a call that is deleted at the end of the interpreter waits for its lock, which a thread
        of gRPC's may have held when the interpreter stopped it, for good.
        """
        with self._lock:
            channel, self._channel, self._stubs, self._stream = self._channel, None, {}, None
            self._under_way.clear()
        if channel is not None:
            channel.close()


def _passes_on(error: grpc.RpcError) -> bool:
    """Returns True for what a call of its own would have met as well: the server's word, or a network that failed."""
    if not isinstance(error, grpc.Call):
        return True
    return (
        error.code().name in UNANSWERED or refused(error.details() or "", error.trailing_metadata() or ()) is not None
    )
