"""Ears on the wire: bare ends of gRPC that know bytes alone, and a tap that stands within a transport.

Nothing here comes from the code that it listens to, so that what is written down is what was said.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import grpc
import numpy as np

from tests.kit.transports import SECONDS, Between, shut

RUN = 64
"""Equal bytes in a row from which on they are counted, and not written."""

Metadata = dict[str, str]
"""Values by keys, in the order of these."""


# ---- Bytes as text ----


def spell(data: bytes) -> str:
    """Bytes as hexadecimal text, in which many equal ones are written as `07*4096`."""
    array = np.frombuffer(data, np.uint8)
    edges = [0, *(np.flatnonzero(array[1:] != array[:-1]) + 1).tolist(), len(data)]
    words, at = [], 0
    for begin, end in pairwise(edges):
        if end - begin >= RUN:
            words += [data[at:begin].hex(), f"{data[begin : begin + 1].hex()}*{end - begin}"]
            at = end
    return " ".join(word for word in [*words, data[at:].hex()] if word)


def read(text: str) -> bytes:
    """The bytes that `spell` wrote."""
    found = b""
    for word in text.split():
        piece, _, count = word.partition("*")
        found += bytes.fromhex(piece) * int(count or 1)
    return found


# ---- gRPC ----


@dataclass
class Call:
    """One call of gRPC, as bytes.

    Attributes:
        path: of the method.
        metadata: of the request, but for what gRPC adds itself.
        request, reply: the messages, in order.
        status, details, trailing: how it ended, if not well.
    """

    path: str
    metadata: Metadata
    request: list[bytes]
    reply: list[bytes] = field(default_factory=list)
    status: str = "OK"
    details: str = ""
    trailing: Metadata = field(default_factory=dict)

    def asked(self) -> dict[str, Any]:
        """The request as JSON has it."""
        return {"path": self.path, "metadata": self.metadata, "request": [spell(each) for each in self.request]}

    def answered(self) -> dict[str, Any]:
        """The answer as JSON has it."""
        if self.status == "OK":
            return {"reply": [spell(each) for each in self.reply]}
        return {"status": self.status, "details": self.details, "trailing": self.trailing}

    @classmethod
    def of(cls, found: dict[str, Any]) -> Call:
        """The call that JSON tells of."""
        messages = {name: [read(each) for each in found.get(name, ())] for name in ("request", "reply")}
        return cls(**{**found, **messages})


def _metadata(given: Any) -> Metadata:
    """What is ours of some metadata."""
    return {key: value for key, value in sorted(given or ()) if key != "user-agent"}


def ask(channel: grpc.Channel, call: Call) -> Call:
    """Makes a call with the request and the metadata of another; returns it with the answer."""
    method = channel.stream_stream(call.path)  # on the network one message is a stream of one
    going = method(iter(call.request), timeout=SECONDS, metadata=list(call.metadata.items()))
    found = Call(call.path, call.metadata, call.request)
    try:
        found.reply.extend(going)
    except grpc.RpcError:
        found.status, found.details = going.code().name, going.details()
        found.trailing = _metadata(going.trailing_metadata())
    return found


class BareServer(grpc.GenericRpcHandler):
    """A gRPC server that knows no verbs.

    Args:
        stack: ends it.
        answer: gives the answer to a call's request.

    Attributes:
        address: `host:port`.
        heard: the calls that came, with their answers.
    """

    def __init__(self, stack: ExitStack, answer: Callable[[Call], Call]) -> None:
        self.heard: list[Call] = []
        self._answer = answer
        server = grpc.server(ThreadPoolExecutor(4), handlers=(self,), options=[("grpc.so_reuseport", 0)])
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        stack.callback(lambda: server.stop(0).wait(SECONDS))

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """The handler of any method."""
        return grpc.stream_stream_rpc_method_handler(partial(self._handle, details.method))

    def _handle(self, path: str, request: Iterator[bytes], context: Any) -> Iterator[bytes]:
        call = Call(path, _metadata(context.invocation_metadata()), list(request))
        answer = self._answer(call)
        self.heard.append(answer)
        yield from answer.reply
        if answer.status != "OK":
            context.set_trailing_metadata(list(answer.trailing.items()))
            context.abort(grpc.StatusCode[answer.status], answer.details)


# ---- Transports ----

HEAD = struct.Struct("<B3xIQQQQ")
"""Kind, size of the header, call, offset, size of the data, place: as the protocol has it today."""

INLINE = (1 << 64) - 1
FREED, ALIVE = 8, 9
MOST = 16 << 20
"""Bytes: what announces more is no message."""

_REFERENCE = " in memory: "


@dataclass
class Heard:
    """One connection.

    Attributes:
        up, down: what the client, and what the server has said, message by message. Data in shared memory follow the
            message that tells their place.
    """

    up: list[str] = field(default_factory=list)
    down: list[str] = field(default_factory=list)

    @property
    def quiet(self) -> bool:
        """Whether each end has freed all of the memory that it was told of."""
        return all(
            sum(_REFERENCE in message for message in told) == sum(_kind(message) == FREED for message in freed)
            for told, freed in ((self.up, self.down), (self.down, self.up))
        )

    def written(self) -> dict[str, list[str]]:
        """As JSON has it. In which order memory is freed at a time says nothing, and is by place."""
        return {name: _in_order(said) for name, said in vars(self).items()}


def _in_order(said: list[str]) -> list[str]:
    runs = [list(run) for _, run in groupby(said, lambda message: _kind(message) == FREED)]
    return [message for run in runs for message in (sorted(run) if _kind(run[0]) == FREED else run)]


def _kind(message: str) -> int:
    return int(message[:2], 16) if len(message) >= 2 * HEAD.size else 0


class Tap(Between):
    """Writes down what is said on a transport. Hands on whole messages.

    A word that the server says again, since time has passed, is written once.

    Args:
        stack, transports, name: as of `Between`.
        lost: the kind of a client's message that the first connection breaks at, and that nobody gets.
    """

    def __init__(self, stack: ExitStack, transports: Any, name: str, lost: int = -1) -> None:
        self.heard: list[Heard] = []
        self._news = threading.Condition()
        self._lost = lost
        self._shared = name == "shm"
        super().__init__(stack, transports, name)

    def until(self, condition: Callable[[Heard], bool]) -> None:
        """Waits until something is so of the last connection."""
        with self._news:
            assert self._news.wait_for(lambda: bool(self.heard) and condition(self.heard[-1]), SECONDS), self.heard

    def connected(self, near: socket.socket, far: socket.socket) -> None:
        """Listens in both directions."""
        heard, lost = Heard(), self._lost if not self.heard else -1
        self.heard.append(heard)
        self.start(partial(self._pump, near, far, heard.up, lost))
        self.start(partial(self._pump, far, near, heard.down))

    def _pump(self, source: socket.socket, sink: socket.socket, said: list[str], lost: int = -1) -> None:
        """Hands on what comes, until an end is gone."""
        with suppress(OSError):
            memory = self._hand_over(source, sink, said) if self._shared else None
            while True:
                message = _message(source)
                kind, _, _, _, size, place = HEAD.unpack_from(message)
                told = spell(message)
                if size and place != INLINE:
                    assert memory is not None
                    told += _REFERENCE + spell(memory[place : place + size])
                if not (kind == ALIVE and said[-1] == told):
                    self._note(said, told)
                if kind == lost:
                    break
                sink.sendall(message)
        for sock in (source, sink):
            shut(sock)

    def _hand_over(self, source: socket.socket, sink: socket.socket, said: list[str]) -> mmap.mmap:
        """The first byte brings memory."""
        byte, files, _, _ = socket.recv_fds(source, 1, 4)
        if not byte:
            raise ConnectionResetError
        sizes = [os.fstat(file).st_size for file in files]
        memory = mmap.mmap(files[0], sizes[0], mmap.MAP_SHARED, mmap.PROT_READ)
        self._note(said, f"{byte.hex()} with files of {sizes} bytes")
        socket.send_fds(sink, [byte], files)
        for file in files:
            os.close(file)
        return memory

    def _note(self, said: list[str], told: str) -> None:
        with self._news:
            said.append(told)
            self._news.notify_all()


def _message(source: socket.socket) -> bytes:
    """The next message on the socket of a transport."""
    head = _exactly(source, HEAD.size)
    _, header, _, _, size, place = HEAD.unpack(head)
    rest = header + (size if place == INLINE else 0)
    if rest > MOST:
        raise ConnectionAbortedError(f"this is no message: {head.hex()}")
    return head + _exactly(source, rest)


def _exactly(source: socket.socket, count: int) -> bytes:
    """So many bytes; raises `ConnectionError` where they do not come."""
    found = bytearray()
    begun = 0.0
    while len(found) < count:
        more = source.recv(min(count - len(found), 1 << 20))
        begun = begun or time.monotonic()
        if not more or time.monotonic() - begun > SECONDS:
            raise ConnectionResetError("the other end has closed the connection, or says less than it said")
        found += more
    return bytes(found)


class BareClient:
    """A client's end of a tcp transport, which says bytes.

    Args:
        stack: ends it.
        port: of the transport.

    Attributes:
        heard: what was said.
    """

    def __init__(self, stack: ExitStack, port: int) -> None:
        self.heard = Heard()
        self._sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))

    def say(self, *messages: bytes) -> None:
        """Says some messages at once."""
        self._sock.sendall(b"".join(messages))
        self.heard.up += map(spell, messages)

    def hear(self, kind: int) -> None:
        """Waits for a message of a kind; other words that the server is there are passed over."""
        while True:
            message = _message(self._sock)
            if message[0] == kind:
                self.heard.down.append(spell(message))
                return
            assert message[0] == ALIVE, message


def split(message: str) -> tuple[int, bytes, int]:
    """Kind, header, and size of the data of a message of a transport."""
    data = read(re.split(_REFERENCE, message)[0])
    kind, header, _, _, size, _ = HEAD.unpack_from(data)
    return kind, data[HEAD.size : HEAD.size + header], size
