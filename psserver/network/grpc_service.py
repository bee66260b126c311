"""The gRPC rim of a server: protobuf in, our values inside, protobuf out. It decides nothing.

Messages come as raw bytes and are decoded here, so that a malformed one is refused as `InvalidRequest`.
Waiting verbs are called on the event loop and must return their future at once; a call that waits is a
coroutine and costs no thread. Of the others, those that do work run in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from psserver.network.access import Access, Names
from psserver.network.grpc_answers import Bell, Frames, GrpcAnswer, StreamedCalls
from psserver.network.process import process_status
from psserver.network.refused_callers import reason_of
from psserver.network.served import Served
from psserver.network.transport_server import TransportServer
from pswire.api import EventsRequest, Opened, OpenRequest, RoundReply, Watched, WatchRequest
from pswire.cluster import Task
from pswire.encoding import messages
from pswire.encoding.calls import CALLS, CallCodec
from pswire.encoding.protocol import check_protocol
from pswire.encoding.verbs import INCARNATION_KEY, VERBS, Verb, fitting, parse, refusal, refusal_to_pb
from pswire.errors import Forbidden, InvalidRequest, PSError, ServerLost, Unauthenticated
from pswire.model.status import Happened, ProcessStatus
from pswire.network.grpc_frames import Frame
from pswire.network.parts import Assembly, parts_of
from pswire.network.payload import EMPTY, Payload
from pswire.pb import parameter_server_pb2 as pb
from pswire.servers.requests import REQUESTS, ServerRequest

log = logging.getLogger("psserver")

WHOLE = Frame(b"")
"""Stands for the first frame of a request that is no stream."""

HEADER_SECONDS = 10.0
"""How long a stream may take to begin."""

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
Call = Context | StreamedCalls
"""Of a push or a pull: a call of its own, or the one under way on a stream of them."""
Handler = Callable[[Any, Context, Frame], Awaitable[Any]]
"""Answers a request, given as a message that was checked. Where requests are streams it came in the first frame."""
Method = Callable[[Any, Context], Awaitable[Any]]


def _watched(asked: WatchRequest, watched: Watched) -> Message:
    """News, cut to one message. The rest comes with the next call, at once: its version is still the old."""
    reply: Any = CALLS["Watch"].reply(replace(watched, entries=(), plans=()))
    # A log may be long: what does not fit is not encoded.
    entries, plans = map(messages.ENTRY.to_pb, watched.entries), map(messages.PLAN.to_pb, watched.plans)
    found: list[Any] = fitting(chain[Message](entries, plans))
    reply.entries.extend(found[: len(watched.entries)])
    reply.plans.extend(found[len(watched.entries) :])
    if len(found) < len(watched.entries) + len(watched.plans):
        reply.version = asked.version
    return reply  # type: ignore[no-any-return]


# ---- The service ----


class GrpcService(grpc.GenericRpcHandler):
    """Answers every verb over a core. All methods but `close` are called by gRPC, on its event loop.

    Args:
        core: the server proper, which is called from the event loop and from threads.
        task: which task this is, for messages.
        incarnation: the core's life; calls that name another are refused with `ServerLost`.
        transports: the other ways to push and pull; what bounds their messages bounds ours.
        access: checks every call.
    """

    def __init__(self, core: Served, task: Task, incarnation: int, transports: TransportServer, access: Access) -> None:
        self._core = core
        self._transports = transports
        self._access = access
        self._task = str(task)
        self._incarnation = str(incarnation)
        self._bells: set[Bell] = set()
        self._idle: set[asyncio.Task[Any]] = set()  # of streams between two calls
        self._frames = Frames(transports.traffic["grpc"])
        self._closed = False
        self.page = ""
        """URL of this server's status page, "" for none."""
        self._replies: dict[str, Callable[[Any, Any], Message]] = {
            "Open": self._opened,
            "Watch": _watched,
            "Status": lambda _, status: CALLS["Status"].reply(replace(status, process=self.process())),
            "Events": lambda _, told: CALLS["Events"].reply(self._with_refused(*told)),
        }
        """Of calls whose reply has more than the core's answer, or less."""
        handlers: dict[str, Handler] = {name: self._handler(codec) for name, codec in CALLS.items()}
        handlers |= {"Push": self._push, "Pull": self._pull, "Exchange": self._exchange}
        handlers |= {"Introduce": self._introduce, "Vote": self._vote}
        self._methods, self._refusing = {}, {}
        for name, handler in handlers.items():
            told = self._told(VERBS[name], handler)
            self._methods[VERBS[name].path] = _method(VERBS[name].streams, told)
            # Who is refused is never read from.
            self._refusing[VERBS[name].path] = _method((True, VERBS[name].streams[1]), told)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method, None for a method that is none of ours.

        A caller without the token is refused here: the message of a call that is no stream is read before its handler
        is called, and a stranger could have the server keep as many as it likes.
        """
        found = self._methods.get(details.method)
        if found is not None:
            try:
                self._access.admit_token(details.invocation_metadata or ())
            except Unauthenticated:
                return self._refusing[details.method]
        return found

    def process(self) -> ProcessStatus:
        """Returns the status of this process. On the event loop."""
        found = process_status(self._transports)
        return replace(found, page=self.page) if self.page else found

    def close(self) -> None:
        """Ends all calls that wait, and all that come, with `ServerLost`. On the event loop."""
        self._closed = True
        for bell in self._bells:
            bell.ring()
        for stream in self._idle:
            stream.cancel()
        self._transports.end(self._ended())

    def _ended(self) -> ServerLost:
        return ServerLost(
            "was stopped, and its variables are lost; start it again, and restart the job from a checkpoint", self._task
        )

    # ---- What every call goes through ----

    def _told(self, verb: Verb, handler: Handler) -> Method:
        """Adds to a handler what all have: checks of the caller, and errors that reach the client as such."""

        async def told(request: Any, context: Context) -> Any:
            try:
                metadata = context.invocation_metadata() or ()
                names = self._access.admit(metadata, context.auth_context)
                if verb.guarded:
                    self._guard(metadata)
                first = await _first(context) if verb.streams[0] else WHOLE
                message = parse(verb.request, first.header if verb.streams[0] else request)
                self._access.check(verb, message, names)
                return await handler(message, context, first)
            except PSError as error:
                if isinstance(error, Unauthenticated | Forbidden):
                    why = f"{type(error).__name__}: {error.message}"
                    self._access.refused.note(verb.name.lower(), context.peer(), reason_of(error), why)
                status, details, trailing = refusal(error)
            except Exception:  # a bug of ours must reach the client as an error, not as silence
                log.exception("internal error in %s", verb.name)
                status, details, trailing = refusal(self._internal(verb.name))
            return await context.abort(grpc.StatusCode[status], details, trailing)

        return told

    def _guard(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        for key, value in metadata:
            if key == INCARNATION_KEY and value != self._incarnation:
                raise ServerLost(
                    "was replaced by a new process, and its variables are lost; restart the job from a checkpoint",
                    self._task,
                )

    def _internal(self, name: str) -> PSError:
        return PSError(f"internal error in {name}; see the log of {self._task}", self._task)

    async def _wait(self, future: Future[T]) -> T:
        """Waits for a future of the core without owning it: a client that goes away cancels nothing."""
        if not future.done():
            bell = Bell()
            future.add_done_callback(lambda _: bell.ring())
            await self._hear(bell)
        return future.result()

    async def _hear(self, bell: Bell) -> None:
        """Waits for a bell, or for the end of this server."""
        if not self._closed:
            self._bells.add(bell)
            try:
                await bell.heard()
            finally:
                self._bells.discard(bell)
        if self._closed:
            raise self._ended()

    # ---- One request, one reply ----

    def _handler(self, codec: CallCodec[Any]) -> Handler:
        """Makes the handler of a call: the core does what the request asks for."""
        reply = self._replies.get(codec.verb.name, lambda _, answer: codec.reply(answer))

        def ask(m: Message) -> tuple[ServerRequest[Any], Any]:
            request = codec.request_from(m, self._task)
            return request, self._core.call(request)

        async def handler(m: Message, context: Context, first: Frame) -> bytes:
            waits = REQUESTS[codec.verb.name].waits
            request, answer = ask(m) if waits or codec.verb.inline else await asyncio.to_thread(ask, m)
            if waits:
                future = answer
                try:
                    answer = await self._wait(future)
                except asyncio.CancelledError:
                    if isinstance(request, WatchRequest):
                        future.cancel()  # that its caller went away says that a process may be gone
                    raise
            return reply(request, answer).SerializeToString()

        return handler

    def _opened(self, _: OpenRequest, opened: Opened) -> Message:
        reply: Any = CALLS["Open"].reply(opened)
        reply.data_port, reply.data_path = self._transports.port, self._transports.path
        reply.transport_token = self._access.registry.transport_token(opened.session)
        reply.in_flight, reply.buffer_bytes = self._transports.in_flight, self._transports.buffer_bytes
        return reply  # type: ignore[no-any-return]

    def events(self) -> tuple[Happened, ...]:
        """Returns what this server was told last, the newest last, with the callers that it refused. Any thread."""
        return self._with_refused(*self._core.call(EventsRequest()))

    def _with_refused(self, *told: Happened) -> tuple[Happened, ...]:
        return tuple(sorted([*told, *self._access.refused.recent()], key=lambda each: -each.seconds))

    async def _introduce(self, m: pb.IntroduceRequest, context: Context, first: Frame) -> bytes:
        check_protocol(m.spoken, str(Task("ps", m.server)), self._task)
        self._core.introduce(m.server, m.incarnation)
        token = self._access.registry.transport_token(m.incarnation)
        return pb.IntroduceReply(data_port=self._transports.port, transport_token=token).SerializeToString()

    async def _vote(self, m: pb.ServerVote, context: Context, first: Frame) -> bytes:
        await asyncio.to_thread(self._core.hear, self._access.voter(m.session), messages.said_from_pb(m))
        return pb.Empty().SerializeToString()

    # ---- Streams ----

    # Messages are read through the context, which is what gRPC's iterator over them does, with a generator more.

    async def _exchange(self, header: pb.ExchangeHeader, context: Context, first: Frame) -> None:
        """Answers the pushes and pulls of a stream, one after the other; an error ends an answer, not the stream."""
        names = self._access.admit(context.invocation_metadata() or (), context.auth_context)
        calls, task = StreamedCalls(context), asyncio.current_task()
        assert task is not None
        try:
            following: Frame | None = first
            while following is not None:
                header = parse(pb.ExchangeHeader, following.header)
                if error := await self._refused(header, calls, following, names):
                    await calls.write(Frame(end=refusal_to_pb(error).SerializeToString()).encode())
                self._idle.add(task)
                try:
                    following = None if self._closed else await calls.next(grpc.aio.EOF)
                finally:
                    self._idle.discard(task)
        except asyncio.CancelledError:
            if not self._closed:
                raise
        finally:
            calls.close()

    async def _refused(
        self, header: pb.ExchangeHeader, calls: StreamedCalls, first: Frame, names: Names
    ) -> PSError | None:
        """Answers one call of a stream; returns the error if it is refused."""
        try:
            match header.WhichOneof("call"):
                case "push":
                    self._access.check(VERBS["Push"], header.push, names)
                    await self._push(header.push, calls, first)
                case "pull":
                    self._access.check(VERBS["Pull"], header.pull, names)
                    await self._pull(header.pull, calls, first)
                case _:
                    raise InvalidRequest("a frame of a stream has an unexpected header")
        except PSError as error:
            return error
        except Exception:  # as in `_told`
            log.exception("internal error in %s", "Exchange")
            return self._internal("Exchange")
        return None

    async def _push(self, header: pb.PushHeader, context: Call, first: Frame) -> None:
        assembly = self._assembly(first, header.size)
        answer = GrpcAnswer()
        future = self._core.push(messages.contribution_from_pb(header), assembly.payload, answer.begin)
        future.add_done_callback(lambda _: answer.bell.ring())
        rest = partial(_rest, context, assembly, self._transports.in_flight)
        receiving = None if assembly.payload.whole else asyncio.ensure_future(answer.receive(rest))
        try:
            await self._send_answer(context, future, answer)
        finally:
            if receiving:
                receiving.cancel()

    async def _send_answer(self, context: Call, future: Future[RoundReply], answer: GrpcAnswer) -> None:
        """Sends an answer, and its parts as they come to be. The first header tells their size, the last one all."""
        while not future.done() or not answer.sent:
            part = answer.next()
            if part is None:
                if future.done() and (answer.cutter is None or future.exception()):
                    break
                await self._hear(answer.bell)
            else:
                await context.write(self._frames.encoded(answer.header(), answer.payload or EMPTY, part))
        reply = future.result()
        header = self._transports.encoder.encode(reply)
        if answer.cutter is None:
            await self._send(context, header, reply.payload)
        else:
            await context.write(Frame(header, end=_end(context)).encode())

    async def _pull(self, m: pb.PullRequest, context: Call, first: Frame) -> None:
        reply = await self._wait(self._core.call(messages.PULL.from_pb(m)))
        await self._send(context, messages.pull_to_pb(reply).SerializeToString(), reply.payload)

    async def _send(self, context: Call, header: bytes, payload: Payload) -> None:
        """Sends an answer that is whole; its first part rides with the header, and its last with the end."""
        left = payload.size
        for part in parts_of(payload):
            left -= sum(map(len, part[1]))
            await context.write(self._frames.encoded(header, payload, part, None if left else _end(context)))
            header = b""
        if not payload.size:
            await context.write(Frame(header, end=_end(context)).encode())

    def _assembly(self, first: Frame, size: int) -> Assembly:
        """Returns where a payload is collected whose first part is there."""
        self._transports.check_size(size)
        assembly = Assembly(size, self._transports.traffic["grpc"])
        assembly.add(first.offset, first.data or ())
        return assembly

    async def _received(self, first: Frame, context: Context, size: int) -> Payload:
        """A payload whose first part is there, once it is whole."""
        assembly = self._assembly(first, size)
        await _rest(context, assembly, self._transports.in_flight)
        return assembly.payload


def _method(streams: tuple[bool, bool], handler: Method) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of raw bytes: without serializers, gRPC hands them through."""
    kinds: dict[tuple[bool, bool], Callable[[Any], grpc.RpcMethodHandler[Any, Any]]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[streams](handler)


def _end(context: Call) -> bytes | None:
    """Returns the end of an answer: on a stream of many calls it is said."""
    return b"" if isinstance(context, StreamedCalls) else None


async def _rest(context: Call, assembly: Assembly, in_flight: int) -> None:
    """Collects the parts of a payload until it is whole; reads no more than `in_flight` bytes before they are used."""
    bell = Bell()
    while not assembly.payload.whole:
        if assembly.payload.crowded(in_flight, bell.ring):
            await bell.heard()
        message = await context.read()
        if message is grpc.aio.EOF:
            break
        frame = Frame.decode(message)
        if frame.header or frame.data is None:
            raise InvalidRequest("a frame within a stream has a header or has no data")
        assembly.add(frame.offset, frame.data)
    assembly.check_whole()


async def _first(context: Context) -> Frame:
    try:
        async with asyncio.timeout(HEADER_SECONDS):
            message = await context.read()
    except TimeoutError:
        raise InvalidRequest(f"a stream's header did not come within {HEADER_SECONDS:g} s") from None
    if message is grpc.aio.EOF:
        raise InvalidRequest("a stream ended before its header")
    return Frame.decode(message)
