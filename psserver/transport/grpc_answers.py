"""Answers on their way out over gRPC: woken from other threads, sent while they are made, encoded once for all."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

from pswire.pb import parameter_server_pb2 as pb
from pswire.transport.grpc_frames import Frame
from pswire.transport.payload import Cutter, Part, Payload
from pswire.transport.traffic import Traffic

KEPT = 4
"""Frames of one payload that are kept for others who are sent it: all are at about the same place."""


class Bell:
    """Wakes a coroutine of the running loop, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wakes who waits now, or next."""
        try:
            self._loop.call_soon_threadsafe(self._rung.set)
        except RuntimeError:  # the loop is closed: the server has ended, and nobody waits
            pass

    async def heard(self) -> None:
        """Waits for it."""
        await self._rung.wait()
        self._rung.clear()


class GrpcAnswer:
    """An answer to a push on its way over gRPC, which may be sent while it grows.

    Attributes:
        bell: rings when there is more of it.
        cutter: cuts it; None where it is not sent before it is whole.
        payload: what is sent, once it begins to grow.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.cutter: Cutter | None = None
        self.payload: Payload | None = None
        self._untold = 0
        self._error: Exception | None = None

    def begin(self, payload: Payload) -> None:
        """It begins to grow; called from any thread."""
        self._untold, self.payload = payload.size, payload
        self.bell.ring()

    async def receive(self, rest: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Waits for the rest of the request, while the answer is sent."""
        try:
            await rest()
        except Exception as error:
            # The answer ends by itself: gRPC takes no error while a write is under way.
            self._error = error
            self.bell.ring()

    @property
    def sent(self) -> bool:
        """Whether all of it is."""
        return self.cutter is not None and self.cutter.done

    def header(self) -> bytes:
        """The next frame's header: the first one has the size, those after it nothing."""
        size, self._untold = self._untold, 0
        return pb.RoundHeader(size=size).SerializeToString()

    def next(self) -> Part | None:
        """The next part; the bell rings when there may be another. Raises what is wrong with the request."""
        if self._error:
            raise self._error
        if self.cutter is None and self.payload is not None and self.payload.size:
            self.cutter = Cutter(self.payload)
        part = self.cutter.next() if self.cutter else None
        if part is None and self.cutter and not self.cutter.done:
            self.cutter.when(0, self.bell.ring)
        return part


class Frames:
    """Encodes the parts of payloads, and those that several clients are sent once. Belongs to the event loop.

    Args:
        traffic: counts what is sent.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._kept: WeakKeyDictionary[Payload, OrderedDict[tuple[bytes, int, int], bytes]] = WeakKeyDictionary()

    def encoded(self, header: bytes, payload: Payload, part: Part) -> bytes:
        """A part's frame.

        Args:
            header: of the frame.
            payload: whose part it is.
            part: where it begins, and its buffers.
        """
        kept = self._kept.setdefault(payload, OrderedDict())
        size = sum(map(len, part[1]))
        self._traffic.add(sent=size)
        key = header, part[0], size
        if key not in kept:
            kept[key] = Frame(header, *part).encode()
            if len(kept) > KEPT:
                kept.popitem(last=False)
        return kept[key]
