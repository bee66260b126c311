"""A stream of gRPC on which pushes and pulls follow one another, so that each needs no call of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from pswire.encoding.verbs import parse, refusal_from_pb
from pswire.pb import parameter_server_pb2 as pb
from pswire.transport.grpc_frames import Frame

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
