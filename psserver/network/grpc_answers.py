"""Answers over gRPC: woken from other threads, sent while they grow, encoded once for all clients."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

from pswire.network.grpc_frames import Frame
from pswire.network.parts import Cutter, Part
from pswire.network.payload import Payload
from pswire.network.traffic import Traffic
from pswire.pb import parameter_server_pb2 as pb

KEPT = 4
"""Frames of one payload kept for its other receivers: all are at about the same offset."""


class Bell:
    """A signal for a coroutine of the running loop, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wakes the coroutine that waits now, or else the next one."""
        try:
            self._loop.call_soon_threadsafe(self._rung.set)
        except RuntimeError:  # the loop is closed: the server has ended, and nobody waits
            pass

    async def heard(self) -> None:
        """Waits for a ring."""
        await self._rung.wait()
        self._rung.clear()


class GrpcAnswer:
    """An answer to a push over gRPC, which may be sent while it grows.

    Attributes:
        bell: rings when there is more of it.
        cutter: cuts it into parts; None if it is not sent before it is whole.
        payload: the payload, once it begins to grow.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.cutter: Cutter | None = None
        self.payload: Payload | None = None
        self._untold = 0
        self._error: Exception | None = None

    def begin(self, payload: Payload) -> None:
        """Begins to send a payload that grows. Called from any thread."""
        self._untold, self.payload = payload.size, payload
        self.bell.ring()

    async def receive(self, rest: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Waits for the rest of the request while the answer is sent."""
        try:
            await rest()
        except Exception as error:
            # The answer ends by itself: gRPC takes no error while a write is under way.
            self._error = error
            self.bell.ring()

    @property
    def sent(self) -> bool:
        """True once all of it is sent."""
        return self.cutter is not None and self.cutter.done

    def header(self) -> bytes:
        """Returns the next frame's header: the first one has the size, later ones are empty."""
        size, self._untold = self._untold, 0
        return pb.RoundHeader(size=size).SerializeToString()

    def next(self) -> Part | None:
        """Returns the next part, or None; then the bell rings when there may be another.

        Raises:
            Exception: the error of the request.
        """
        if self._error:
            raise self._error
        if self.cutter is None and self.payload is not None and self.payload.size:
            self.cutter = Cutter(self.payload)
        part = self.cutter.next() if self.cutter else None
        if part is None and self.cutter and not self.cutter.done:
            self.cutter.when(0, self.bell.ring)
        return part


class StreamedCalls:
    """The calls of one stream, each with the methods of gRPC's context that a call of its own has. On the event loop.

    A read that is cancelled loses nothing: the next one gets its message, as a call may be over before it was read.

    Args:
        context: gRPC's, of the stream.

    Attributes:
        write: writes a message.
    """

    def __init__(self, context: Any) -> None:
        self.write: Callable[[bytes], Coroutine[Any, Any, None]] = context.write
        self._context = context
        self._reading: asyncio.Future[Any] | None = None

    async def read(self) -> Any:
        """Returns the next message, or `grpc.aio.EOF`."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._context.read())
        message = await asyncio.shield(self._reading)
        self._reading = None
        return message

    async def next(self, end: object) -> Frame | None:
        """Passes over the rest of the last call; returns the first frame of the next one, None at the stream's end.

        Args:
            end: what is read at the end.
        """
        while True:
            message = await (self._context.read() if self._reading is None else self.read())
            if message is end:
                return None
            frame = Frame.decode(message)
            if frame.header:
                return frame

    def close(self) -> None:
        """Ends a read that nobody waits for."""
        if self._reading is not None:
            self._reading.cancel()


class Frames:
    """The encoder of payloads' parts. Encodes a part that several clients get only once. Belongs to the event loop.

    Args:
        traffic: counts sent bytes.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._kept: WeakKeyDictionary[Payload, OrderedDict[tuple[bytes, int, int, bytes | None], bytes]] = (
            WeakKeyDictionary()
        )

    def encoded(self, header: bytes, payload: Payload, part: Part, end: bytes | None = None) -> bytes:
        """Returns a part's frame, encoded.

        Args:
            header: the frame's header.
            payload: the payload of the part.
            part: its offset, and its buffers.
            end: the frame's end.
        """
        kept = self._kept.setdefault(payload, OrderedDict())
        size = sum(map(len, part[1]))
        self._traffic.add(sent=size)
        key = header, part[0], size, end
        if key not in kept:
            kept[key] = Frame(header, *part, end).encode()
            if len(kept) > KEPT:
                kept.popitem(last=False)
        return kept[key]
