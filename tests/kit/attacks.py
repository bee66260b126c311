"""Attacks on a server: messages of any content, and a stranger who speaks HTTP/2 and has no token."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from hypothesis import strategies as st

from pswire.network.health_probe import DATA, HEADERS, PREFACE, SETTINGS
from pswire.network.health_probe import _frame as frame
from pswire.servers.requests import REQUESTS
from tests.kit import internals as inside
from tests.kit.certificates import listening
from tests.kit.internals import ERROR_KEY, VERBS, Frame, Security, messages, pb, spoken
from tests.kit.samples import SAMPLES, VOTES, walk
from tests.kit.transports import Site

STRANGER = inside.Task("worker", 7)
"""Who attacks: a task that no generation has taken in."""

SOON = 60.0
"""Seconds within which an attack is answered, where its verb does not wait: far longer than it takes."""

MAX_SPOILT_BYTES = 1 << 18
"""Bytes of a repeated field of messages. Without a bound, 5,000 messages of 5,000 words each take minutes."""

PATIENCE = 0.03
"""Seconds for which an attack waits where its verb does."""

BOMB = pickle.dumps(os.getcwd)
"""What would be run if anybody unpickled it."""

NUMBERS = (0, 1, 2, 7, 100, 1 << 20, 1 << 31, 1 << 40, 1 << 63, *((1 << bits) - 1 for bits in (31, 32, 63, 64)))
SIGNED = (0, 1, -1, 7, -(1 << 31), (1 << 31) - 1, 1 << 40, -(1 << 63), (1 << 63) - 1)
REALS = (0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324)
WORDS = (
    *("", "x", "w", "v0", "../x", "/etc/passwd", "a\0b", "\n", "s3://bucket/x", "~", "é\u202e", "Diverged: x"),
    *("{}", "[", "dataset:0", "plan:" + "0" * 64, "sum", "add", "object", "__class__", "axis", "keepdims", "x" * 513),
    *("f()", "127.0.0.1:1", "127.0.0.1", "worker", "ps"),
    *inside.OPS,
    *inside.DTYPES,
)
BYTES = (b"", b"x", bytes(32), BOMB, b"\xff" * 40, bytes(5000))
RANGES = {
    Field.CPPTYPE_UINT64: list(NUMBERS),
    Field.CPPTYPE_UINT32: [n for n in NUMBERS if n < 1 << 32],
    Field.CPPTYPE_INT64: [*SIGNED],
    Field.CPPTYPE_INT32: [n for n in SIGNED if -(1 << 31) <= n < 1 << 31],
    Field.CPPTYPE_DOUBLE: [*REALS],
    Field.CPPTYPE_BOOL: [False, True],
    Field.CPPTYPE_ENUM: [0, 1, 2, 3, 4, 99, -1],
}


@contextmanager
def foreseen() -> Iterator[list[str]]:
    """Gives what servers of this process log as errors, which is what they did not foresee: at the end, nothing."""
    surprises: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: surprises.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("psserver").addHandler(handler)
    try:
        yield surprises
    finally:
        logging.getLogger("psserver").removeHandler(handler)
    assert surprises == []


def spoil(draw: Any, message: Message) -> None:
    """Gives one field of a message, or of one within it, another value of its own type."""
    if fields := list(message.DESCRIPTOR.fields):
        _spoil(draw, message, draw(st.sampled_from(fields)))


def _spoil(draw: Any, message: Message, field: Any) -> None:
    if draw(st.integers(0, 9)) == 0:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, held = (_value(draw, field.message_type.fields_by_name[half]) for half in ("key", "value"))
        getattr(message, field.name)[key] = held
    elif field.is_repeated:
        _spoil_many(draw, getattr(message, field.name), field)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        for _ in range(draw(st.integers(1, 4))):
            spoil(draw, inner)
    else:
        setattr(message, field.name, _value(draw, field))


def _spoil_many(draw: Any, items: Any, field: Any) -> None:
    many = draw(st.sampled_from([1, 1, 1, 2, 50, 1000, 5000]))
    if field.message_type is None:
        items.extend([_value(draw, field)] * many)
    elif items and draw(st.booleans()):
        spoil(draw, items[draw(st.integers(0, len(items) - 1))])
    else:
        new = field.message_type._concrete_class()
        if items and draw(st.booleans()):
            new.CopyFrom(items[0])
        spoil(draw, new)
        items.extend([new] * min(many, 1 + MAX_SPOILT_BYTES // (1 + new.ByteSize())))


def _value(draw: Any, field: Any) -> Any:
    if field.type == Field.TYPE_STRING:
        return draw(st.sampled_from(WORDS))
    if field.type == Field.TYPE_BYTES:
        return draw(st.sampled_from(BYTES))
    return draw(st.sampled_from(RANGES[field.cpp_type]))


def mutated(draw: Any, data: bytes) -> bytes:
    """Some bytes replaced, inserted or left out."""
    out = bytearray(data)
    for at, byte, kind in draw(
        st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255), st.integers(0, 2)), max_size=3)
    ):
        at %= len(out) + 1
        out[at : at + (kind > 0)] = bytes([byte])[: kind < 2]
    return bytes(out)


def _requests() -> dict[str, list[Message]]:
    """The requests of each verb, with all of their fields."""
    found: dict[str, list[Message]] = {verb: [] for verb in VERBS}
    for sample in SAMPLES:
        if sample.verb == "Push":
            found["Push"].append(messages.contribution_to_pb(sample.args[0], 64))
        else:
            request = REQUESTS[sample.verb]
            found[sample.verb].append(messages.MAPPER.pairs[request].to_pb(request(*sample.args)))
    found["Vote"] = [messages.said_to_pb(vote, 7) for vote in VOTES]
    found["Introduce"] = [pb.IntroduceRequest(server=1, incarnation=7, spoken=spoken())]
    pushed, pulled = ([pb.ExchangeHeader(**{verb.lower(): each}) for each in found[verb]] for verb in ("Push", "Pull"))
    found["Exchange"] = [*pushed, *pulled, pb.ExchangeHeader()]
    return found


_REQUESTS = _requests()


class Attacker:
    """Who has a session on a server, and is no member of the job there.

    Args:
        site: what is attacked.
        security: what it shows.
        sessions: that it says are its own, besides its own.
    """

    def __init__(self, site: Site, security: Security | None = None, sessions: Sequence[int] = ()) -> None:
        self.site = site
        self.server = site.connect("grpc", security)
        self._sessions = sessions
        self.session = 0
        self.open()

    def open(self) -> None:
        """Takes part in the job as far as anybody can; who was it before has gone."""
        for state in self.server.status().sessions:
            if state.member.task == STRANGER and state.state == "open":
                self.server.leave(state.member.session, "it ended")
        self.session = self.server.open(STRANGER, 1, 0, False).session

    def request(self, draw: Any, verb: str) -> Message:
        """A request of the samples, with the numbers of this job in place of theirs; of streams the header."""
        site, most = self.site, (1 << 64) - 1
        member, generation = site.workers[0], site.job.generation.number
        status = site.server.status()  # what was created here by an attack stays
        ids = [each.id for each in site.variables]
        numbers: dict[str, Sequence[Any]] = {
            "session": [*[self.session] * 4, 0, 1, most, *self._sessions],
            "plan_id": [site.plan.id],
            "generation": [0, generation, generation + 1, 1 << 63],
            "round": [member.round, member.round, 0, 1 << 62],
            "token": [0, 1, 1 << 63, most],
            "job": [0, site.job.token, 1 << 63],
            "after": [-1, 0, status.log, 1 << 40],
            "id": [ids[0], status.variables],
            "variable": [*ids, status.variables - 1],
            "index": [0],
            "size": [0, 64, 1 << 40],
        }
        request = draw(st.sampled_from(_REQUESTS[verb]))
        message = type(request)()
        message.CopyFrom(request)
        for below in walk(message):
            for field, value in below.ListFields():
                if isinstance(value, int | bytes) and field.name in numbers and draw(st.integers(0, 4)):
                    with suppress(ValueError):  # it is out of the field's range
                        setattr(below, field.name, draw(st.sampled_from(numbers[field.name])))
                elif field.is_repeated and field.name in ("variables", "want") and field.message_type is None:
                    value[:] = ids
        return message

    # ---- What is sent ----

    def attack(self, draw: Any) -> tuple[str, list[bytes]]:
        """A verb, and the messages of one call; as a strategy it is drawn from."""
        verb = draw(st.sampled_from(sorted(VERBS)))
        request = self.request(draw, verb)
        for _ in range(draw(st.integers(0, 3))):
            spoil(draw, request)
        if isinstance(request, pb.OpenRequest):
            _disguise(request)
        data = request.SerializeToString()
        if draw(st.integers(0, 3)) == 0 and verb != "Open":
            data = draw(st.binary(max_size=200)) if draw(st.integers(0, 3)) == 0 else mutated(draw, data)
        return verb, self._frames(draw, data) if VERBS[verb].streams[0] else [data]

    def _frames(self, draw: Any, header: bytes) -> list[bytes]:
        parts = draw(st.lists(st.tuples(st.sampled_from([0, 16, 64, 1 << 63]), st.sampled_from(BYTES)), max_size=3))
        found = [Frame(header)] * draw(st.sampled_from([0, 1, 1, 1, 2]))
        found += [Frame(b"", offset, (memoryview(data),)) for offset, data in parts]
        encoded = [frame.encode() for frame in found]
        return [mutated(draw, one) if draw(st.integers(0, 5)) == 0 else one for one in encoded]

    def begin(self, verb: str, messages: Sequence[bytes], seconds: float) -> Any:
        """Begins a call; what it gives has the answer, and can be cancelled."""
        stub: Any = self.server._calls._stubs[verb]
        asks, _ = VERBS[verb].streams
        call = stub if streams(verb) else stub.future
        return call(iter(messages) if asks else messages[0], metadata=self.server._calls._metadata, timeout=seconds)

    def send(self, verb: str, messages: Sequence[bytes], leaves: bool = False) -> str:
        """Makes a call; returns the name of the error, "" for an answer, "waits" where none has come so far.

        Args:
            verb: which.
            messages: what is sent.
            leaves: whether the client goes away without reading anything.
        """
        waits = VERBS[verb].waits or VERBS[verb].streams[0]
        began = time.monotonic()
        call = self.begin(verb, messages, PATIENCE if waits else SOON)
        if leaves:
            call.cancel()
            return "waits"
        try:
            reply = list(call) if streams(verb) else call.result()
            said = _refusal_in(reply) if verb == "Exchange" else ""
        except grpc.RpcError:
            said = _refusal(call)
        assert time.monotonic() - began < SOON + 1, f"{verb} took {time.monotonic() - began:.1f} s"
        assert said != "PSError", f"{verb} met an internal error"
        assert waits or said != "waits", f"{verb} was not answered within {SOON} s"
        return said


def streams(verb: str) -> bool:
    """Whether our client reads the answer as a stream: it does so for one message, too, where it has sent one."""
    asks, answers = VERBS[verb].streams
    return answers or not asks


def _refusal_in(reply: Sequence[bytes]) -> str:
    """The name of the last error on a stream of calls, "" where all were answered."""
    ends = [frame.end for frame in map(Frame.decode, reply) if frame.end]
    return pb.Refusal.FromString(ends[-1]).error if ends else ""


def _refusal(call: Any) -> str:
    """Why a call has failed: the name of the server's error, "waits" where the client's time was over."""
    if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in str(call.details()):
        return "too long"  # gRPC itself says it, before anybody looks into the message
    told = dict(call.trailing_metadata() or ())
    late = call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert ERROR_KEY in told or late, f"{call.code()}: {call.details()}"
    return str(told.get(ERROR_KEY, "waits"))


def _disguise(request: pb.OpenRequest) -> None:
    """Whoever opens a session as a task ends the one that it had; where there are no certificates anybody may."""
    if request.task.job in ("worker", "chief") and request.task.index < 2:
        request.task.CopyFrom(messages.TASK.to_pb(STRANGER))
    request.drives = False


class Process(Site):
    """As a `Site`, over a process of psserver.

    Args:
        stack: ends it.
        directory: below which it keeps checkpoints.
        transport: of the members.
        flags: of the server.

    Attributes:
        process: the server's.
    """

    def __init__(self, stack: ExitStack, directory: Path, transport: Any = "grpc", flags: Sequence[str] = ()) -> None:
        root = str(directory / "checkpoints")
        timeouts = inside.Timeouts(session_timeout=600.0, round_timeout=1800.0)
        options = inside.ServerOptions(checkpoint_root=root)
        process, address = listening(stack, timeouts=timeouts, flags=flags, options=options)
        self.process = psutil.Process(process.pid)
        self.begin(stack, address, transport, Security(), 2, 64, 3)


PING, WINDOW_UPDATE = 6, 8
CHUNK = 16 << 10


def call_headers(path: str) -> bytes:
    """The headers of a call of a method, neither indexed nor compressed."""
    said = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    said += [("te", "trailers"), ("content-type", "application/grpc")]
    return b"".join(b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in each) for each in said)


class Stranger:
    """One connection, on which messages are begun.

    Args:
        sock: the connection to a server.
        path: of the method.
        size: bytes that each message announces; one less is sent.

    Attributes:
        closed: whether the server has ended it.
    """

    def __init__(self, sock: socket.socket, path: str = "", size: int = 0) -> None:
        self.sock = sock
        self.sock.setblocking(False)
        self.closed = False
        self._path, self._size = path, size
        self._left: dict[int, int] = {}
        self._window: dict[int, int] = {}
        self._initial = self._connection = 65535
        self._out = bytearray(PREFACE + frame(SETTINGS, 0, 0))
        self._in = bytearray()
        self.sent = 0

    def begin(self, streams: int) -> None:
        """Begins messages."""
        block = call_headers(self._path)
        for number in range(1 + 2 * len(self._left), 1 + 2 * (len(self._left) + streams), 2):
            self._out += frame(HEADERS, 4, number, block)
            self._left[number] = self._size + 4  # of five bytes that say its size, and all but one of its own
            self._window[number] = self._initial

    def pump(self, seconds: float) -> None:
        """Sends as much as the server takes, for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            moved = self._send() + self._receive()
            if not moved:
                time.sleep(0.005)

    def _send(self) -> int:
        for number, left in self._left.items():
            size = min(left, CHUNK, self._window.get(number, 0), self._connection)
            if size > 0 and len(self._out) < 1 << 20:
                first = left == self._size + 4
                body = struct.pack(">BI", 0, self._size) if first else b""
                body += b"\0" * (size - len(body))
                self._out += frame(DATA, 0, number, body)
                self._left[number] -= len(body)
                self._window[number] -= len(body)
                self._connection -= len(body)
        try:
            sent = self.sock.send(self._out) if self._out else 0
        except OSError:
            return 0
        del self._out[:sent]
        self.sent += sent
        return sent

    def _receive(self) -> int:
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        except OSError:
            data = b""
        self.closed = not data
        self._in += data
        while len(self._in) >= 9:
            size = int.from_bytes(self._in[:3], "big")
            if len(self._in) < 9 + size:
                break
            kind, flags = self._in[3], self._in[4]
            stream = int.from_bytes(self._in[5:9], "big")
            self._take(kind, flags, stream, bytes(self._in[9 : 9 + size]))
            del self._in[: 9 + size]
        return len(data)

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & 1:
            for at in range(0, len(body), 6):
                key, value = struct.unpack(">HI", body[at : at + 6])
                if key == 4:
                    grown, self._initial = value - self._initial, value
                    self._window = {number: each + grown for number, each in self._window.items()}
            self._out += frame(SETTINGS, 1, 0)
        elif kind == PING and not flags & 1:
            self._out += frame(PING, 1, 0, body)
        elif kind == WINDOW_UPDATE:
            (more,) = struct.unpack(">I", body)
            if stream:
                self._window[stream] = self._window.get(stream, 0) + more
            else:
                self._connection += more
        elif (kind == HEADERS and flags & 1) or kind == 3:  # the server has answered, or ended it
            self._left.pop(stream, None)
            self._window.pop(stream, None)
