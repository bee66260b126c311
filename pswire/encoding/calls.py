"""Calls of one request and one reply: how each is encoded, of its class, its row in `VERBS`, and the .proto."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import Message

from pswire.encoding.mapper import MessageCodec
from pswire.encoding.messages import MAPPER
from pswire.encoding.protocol import check_protocol, spoken
from pswire.encoding.verbs import MAX_BATCH_BYTES, VERBS, Verb, parse
from pswire.servers.requests import REQUESTS, ServerRequest

R = TypeVar("R")


@dataclass(frozen=True)
class CallCodec(Generic[R]):
    """The codecs of a verb's request and of its answer. May be used by any thread.

    Processes that speak different protocols do not work together: each message with a field for it says which its
    sender speaks.

    Attributes:
        verb: the verb.
    """

    verb: Verb
    _request: MessageCodec[Any, Message]
    _reply: MessageCodec[Any, Message]

    def encode(self, request: ServerRequest[Any]) -> bytes:
        """Encodes a request."""
        return _saying(self._request.to_pb(request)).SerializeToString()

    def request_from(self, message: Message, server: str) -> ServerRequest[Any]:
        """Reads a request; `server` reads it, for messages. Raises `PSError` for one that cannot be."""
        request: ServerRequest[Any] = self._request.from_pb(message)
        if "spoken" in message.DESCRIPTOR.fields_by_name:
            check_protocol(cast(Any, message).spoken, request.sender, server)
        return request

    def reply(self, answer: R) -> Message:
        """Makes the message of an answer."""
        return _saying(self._reply.to_pb(answer))

    def answer_from(self, data: bytes, server: str) -> R:
        """Reads an answer of a server; raises `PSError` for one that cannot be."""
        message = parse(self.verb.reply, data)
        if "spoken" in message.DESCRIPTOR.fields_by_name:
            check_protocol(cast(Any, message).spoken, server, "this process")
        answer: R = self._reply.from_pb(message)
        return answer


def _saying(message: Message) -> Message:
    """Says in a message which protocol this process speaks, where it has a field for that."""
    if "spoken" in message.DESCRIPTOR.fields_by_name:
        cast(Any, message).spoken.CopyFrom(spoken())
    return message


def _codec(kind: type[ServerRequest[Any]], verb: Verb) -> CallCodec[Any]:
    return CallCodec(verb, MAPPER.known(kind, verb.request), MAPPER.answer(kind.answer, verb.reply))


CALLS: dict[str, CallCodec[Any]] = {
    name: _codec(kind, VERBS[name]) for name, kind in REQUESTS.items() if not any(VERBS[name].streams)
}
"""By the verb's name. Pushes and pulls are not among them: their payload comes beside the message."""


Q = TypeVar("Q", bound=ServerRequest[Any])


def cut(request: Q, field: str, most: int = sys.maxsize, limit: int = MAX_BATCH_BYTES) -> Iterator[tuple[Q, bytes]]:
    """Cuts a request with a long list into several, in order, that each fit one message; yields them, and encoded.

    Args:
        request: the request.
        field: the name of its field with the list, of which a single item is not cut.
        most: the most items of a message.
        limit: the most bytes.
    """
    items = getattr(request, field)
    data = CALLS[request.verb].encode(request) if len(items) <= most else b""
    if len(items) < 2 or 0 < len(data) <= limit:
        yield request, data
        return
    for half in items[: len(items) // 2], items[len(items) // 2 :]:
        yield from cut(replace(cast(Any, request), **{field: half}), field, most, limit)
