"""The bytes on the wire are those of the golden file: what a client says, what a server answers, on each transport.

`golden/wire.json` has calls of every verb, with every field of the protocol, and what both ends of a tcp and of a shm
transport say to each other. A change of these bytes after a release is a change of the protocol: it needs a new number,
`pswire.encoding.protocol.PROTOCOL`. Then, and when a call is added here,

    python -m tests.pswire.encoding.test_golden

in the root of the repository writes the file anew. Read the difference before it is committed: each line that has
changed is something that the last release says otherwise.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as Protobuf
from google.protobuf.unknown_fields import UnknownFieldSet

from psclient._src.network.grpc_calls import CallStream
from psclient._src.network.remote_server import RemoteServer
from psclient._src.network.silence import Silence
from psserver import registry
from psserver.config import ServerConfig
from psserver.effects import Peer
from psserver.network import grpc_service
from psserver.network.peers import Peers
from psserver.network.server import ServerThread
from pstesting import processes
from pswire.encoding import messages
from pswire.encoding.protocol import spoken
from pswire.encoding.verbs import INCARNATION_KEY, TOKEN_KEY, VERBS, bearer
from pswire.errors import BY_NAME, Fenced, PSError
from pswire.limits import Timeouts
from pswire.model.log import LogEntry
from pswire.model.status import STILL
from pswire.network.parts import parts_of
from pswire.network.sockets import Message, MessageKind
from pswire.network.traffic import TransportName
from pswire.pb import parameter_server_pb2 as pb
from pswire.security.identity import Security
from tests.kit import samples
from tests.kit.samples import INCARNATION, PEER, SAMPLES, SESSION, VOTES, plain, walk
from tests.kit.tap import SECONDS, BareClient, BareServer, Call, Heard, Tap, ask, read, split

FILE = Path(__file__).parent / "golden" / "wire.json"
EMPTY: dict[str, Any] = {"calls": {}, "servers": {}, "streams": {}, "transports": {}}
GOLDEN: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else EMPTY
SECURITY = Security(token=samples.TOKEN)
BY_SAMPLE = {str(sample): sample for sample in SAMPLES}
OPEN = BY_SAMPLE["Open full"]


# ---- Both ends ----


def connect(
    stack: ExitStack, address: str, transport: TransportName = "grpc", lease: float = 600.0, streams: bool = False
) -> RemoteServer:
    """A client, whose transports say by themselves nothing for minutes."""
    timeouts = Timeouts(session_timeout=lease, call_timeout=SECONDS, round_timeout=SECONDS, start_timeout=SECONDS)
    server = RemoteServer(address, samples.PS, timeouts, transport=transport, security=SECURITY, streams=streams)
    stack.callback(server.close)
    return server


def serve(stack: ExitStack, core: samples.Fixed, in_flight: int = samples.IN_FLIGHT) -> ServerThread:
    """A server without what is random, and without what is of this process and of now."""
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    # Of the registry alone: the name of the Unix socket is from chance as ever, else tests at a time would share it.
    patch.setattr(registry, "secrets", SimpleNamespace(token_bytes=lambda count: samples.TRANSPORT_TOKEN[:count]))
    patch.setattr(grpc_service.GrpcService, "process", lambda self: samples.PROCESS)
    stack.callback(setattr, spoken(), "version", spoken().version)
    spoken().version = "1.2.3"
    config = ServerConfig(samples.PS, security=SECURITY, shared_memory=samples.IN_FLIGHT, in_flight=in_flight)
    return stack.enter_context(ServerThread(core, config, grace=0.0))


def make(server: RemoteServer, sample: samples.Sample) -> Any:
    """Makes a call by the client's method; gives the answer, or the error that is raised, as a plain value."""
    try:
        method = re.sub(r"\B(?=[A-Z])", "_", sample.verb).lower()
        found = getattr(server, method)(*sample.args)
        return plain(found.result(SECONDS) if isinstance(found, Future) else found)
    except PSError as error:
        return plain(error)


# ---- gRPC ----


class Wire:
    """A real server that answers what a sample says, and between it and its clients what hears all that is said.
    Attributes: core: what the server stands on; address: of the server itself; between: what stands between; raw: makes
    calls of bytes on the server."""

    def __init__(self, stack: ExitStack) -> None:
        self.core = samples.Fixed()
        thread = serve(stack, self.core)
        transports = thread._server._transports
        stack.callback(setattr, transports, "path", transports.path)  # which the server removes at its end
        transports.port, transports.path = samples.DATA_PORT, samples.DATA_PATH  # always the same, and nobody is there
        self.refused = transports.access.refused
        self.address = thread.address
        channel = grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.raw = partial(ask, stack.enter_context(channel))
        self.between = BareServer(stack, self.raw)

    def call(self, name: str) -> dict[str, Any]:
        """A call as it is between the real client and the real server, each of which gets what the other gave."""
        sample = BY_SAMPLE[name]
        with ExitStack() as stack:
            self.make(connect(stack, self.between.address), sample, self.between.heard.clear)
        (call,) = self.between.heard
        assert plain(self.core.asked) == plain([sample.args])
        return {**call.asked(), **call.answered()}

    def make(self, server: RemoteServer, sample: samples.Sample, before: Callable[[], object] = lambda: None) -> None:
        """Makes a call of a session; the server tells of no caller that it has refused in another test."""
        self.refused._found.clear()
        if sample.verb != "Open":
            self.core.tell(OPEN)
            make(server, OPEN)
        before()
        self.core.tell(sample)
        assert make(server, sample) == plain(sample.answer)

    def on_a_stream(self, name: str) -> dict[str, Any]:
        """A push or a pull as it is on a stream of them, which neither an answer nor an error ends."""
        sample, sent, plainly = BY_SAMPLE[name], list[bytes](), CallStream._messages

        def messages(stream: CallStream) -> Iterator[bytes]:
            for message in plainly(stream):
                sent.append(message)
                yield message

        with ExitStack() as stack:
            server = connect(stack, self.address, streams=True)
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            self.make(server, sample, lambda: patch.setattr(CallStream, "_messages", messages))
        metadata = {INCARNATION_KEY: str(INCARNATION), TOKEN_KEY: bearer(samples.TOKEN)}
        call = self.raw(Call(VERBS["Exchange"].path, dict(sorted(metadata.items())), sent))
        assert plain(self.core.asked) == plain([sample.args] * 2)
        return {**call.asked(), **call.answered()}

    def votes(self) -> dict[str, Any]:
        """Each call of another server that introduces itself and votes, where it does not reach the transport."""
        self.between.heard.clear()
        self.core.heard.clear()
        with ExitStack() as stack:
            vote_at(stack, self.between.address)
            until(lambda: len(self.between.heard) == len(HEARD))
        assert plain(self.core.heard) == plain(HEARD)
        names = ("Introduce", *(f"Vote {number}" for number in range(len(VOTES))))
        heard = zip(names, self.between.heard, strict=True)
        return {name: {**call.asked(), **call.answered()} for name, call in heard}


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    """One for all calls."""
    with ExitStack() as stack:
        yield Wire(stack)


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_both_ends_of_a_call_say_the_golden_bytes(wire: Wire, name: str) -> None:
    """Path, metadata, messages and error are those of the file, and each end has what the other one gave."""
    assert wire.call(name) == GOLDEN["calls"][name]


ON_STREAMS = [name for name, sample in BY_SAMPLE.items() if sample.verb in ("Push", "Pull")]


@pytest.mark.parametrize("name", ON_STREAMS)
def test_both_ends_of_a_stream_say_the_golden_bytes(wire: Wire, name: str) -> None:
    """The messages of each push and pull are those of the file, also where they share a stream."""
    assert wire.on_a_stream(name) == GOLDEN["streams"][name]


# ---- Between servers ----

HEARD = [(PEER.index, samples.PEER_INCARNATION), *((PEER.index, vote) for vote in VOTES)]
"""What the core is told of another server: who it is, and what it said."""


def vote_at(stack: ExitStack, address: str) -> None:
    """Another server introduces itself, and votes."""
    connected = threading.Event()
    told = {"meet": lambda server: connected.set(), "miss": lambda *args: pytest.fail(str(args))}
    core: Any = SimpleNamespace(incarnation=samples.PEER_INCARNATION, **told)
    peers = Peers(core, ServerConfig(PEER, security=SECURITY))
    stack.callback(peers.close)
    peers.know([Peer(address, INCARNATION)])
    peers.say(0, VOTES[0])  # lost: the first only makes the connection
    assert connected.wait(SECONDS)
    for vote in VOTES:
        peers.say(0, vote)


def until(true: Callable[[], bool]) -> None:
    """Waits until something is so."""
    processes.until(true, SECONDS, lambda: "it is not so yet")


def test_servers_say_the_golden_bytes_to_each_other(wire: Wire) -> None:
    """One introduces itself, and votes, over gRPC where it does not reach the transport; a vote's answer is that it
    came."""
    assert wire.votes() == GOLDEN["servers"]


# ---- The other transports ----

ALIVE_LEASE = 1.0
"""Seconds; of a client that the server tells every quarter of them that it is there."""


def tapped(stack: ExitStack, transport: TransportName = "tcp", lost: int = -1) -> tuple[samples.Fixed, str, Tap]:
    """A server, its address, and what hears all that is said on a transport of it."""
    core = samples.Fixed()
    thread = serve(stack, core)
    return core, thread.address, Tap(stack, thread._server._transports, transport, lost)


def opened(stack: ExitStack, core: samples.Fixed, *where: Any) -> RemoteServer:
    """A client with a session; see `connect`."""
    server = connect(stack, *where)
    core.tell(OPEN)
    make(server, OPEN)
    return server


def talk(stack: ExitStack, transport: TransportName, calls: list[samples.Sample], lost: int = -1) -> list[Heard]:
    """What is said in calls on a transport, one after another; the memory of each is free before the next."""
    core, address, tap = tapped(stack, transport, lost)
    server = opened(stack, core, address, transport)
    for sample in calls:
        core.tell(sample)
        assert make(server, sample) == plain(sample.answer)
        assert plain(core.asked) == plain([sample.args])
        core.asked.clear()
        tap.until(lambda heard: heard.quiet)
    return tap.heard


def waiting(stack: ExitStack) -> list[Heard]:
    """A pull waits, and the server says that it is there."""
    words: list[tuple[int, bool]] = []
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(Silence, "word", lambda self, received, paused, *rest: words.append((received, paused)))
    core, address, tap = tapped(stack)
    server, sample = opened(stack, core, address, "tcp", ALIVE_LEASE), BY_SAMPLE["Pull full"]
    core.tell(sample)
    core.holds = True
    future = server.pull(*sample.args)
    tap.until(lambda heard: any(split(message)[0] == MessageKind.ALIVE for message in heard.down))
    core.let_go()
    assert plain(future.result(SECONDS)) == plain(sample.answer)
    assert set(words) == {(len(read(tap.heard[-1].up[-1])), False)}
    return tap.heard


def by_hand(lease: float) -> list[bytes]:
    """What a client says that pushes a contribution in parts, as bytes: a hello, the push, and two parts."""
    payload = samples.reply(samples.small()).payload
    data = b"".join(b"".join(buffers) for _, buffers in parts_of(payload))
    hello = pb.TransportHello(session=SESSION, token=samples.TRANSPORT_TOKEN, lease=lease)
    header = messages.contribution_to_pb(samples.contribution(), len(data))
    pieces = [data[:16], data[16:32], data[32:]]
    pushed = [
        Message(kind, 5, said, 16 * at, len(pieces[at])).head() + pieces[at]
        for at, (kind, said) in enumerate(
            [(MessageKind.PUSH, header.SerializeToString()), (MessageKind.PART, b""), (MessageKind.PART, b"")]
        )
    ]
    return [Message(MessageKind.HELLO, header=hello.SerializeToString()).head(), *pushed]


def crowded(stack: ExitStack) -> list[Heard]:
    """A server that has enough of a contribution says how far it has read, and that it reads no more for now."""
    core = samples.Fixed()
    thread = serve(stack, core, in_flight=16)
    opened(stack, core, thread.address)
    pushed = samples.contribution(), samples.small()
    sample = samples.Sample("Push", "in parts", pushed, samples.reply(samples.small()))
    core.tell(sample)
    core.reader = 8
    client = BareClient(stack, thread._server._transports.port)
    hello, push, part, last = by_hand(0.2)
    client.say(hello)
    client.hear(MessageKind.WELCOME)
    client.say(push, part)
    client.hear(MessageKind.ALIVE)
    client.say(last)
    ((said, payload),) = core.asked
    assert plain(said) == plain(samples.contribution())
    assert not payload.whole
    payload.discard()
    client.hear(MessageKind.ANSWER)
    return [client.heard]


def heartbeats(stack: ExitStack) -> list[Heard]:
    """A process that does nothing heartbeats over gRPC first, and then on its transport, where it may be refused."""
    core, address, tap = tapped(stack)
    server = opened(stack, core, address, "tcp")
    first = samples.Sample("Heartbeat", "first", (SESSION, -1, b"", STILL, 0), False)
    again = (SESSION, -1, b"", None, 0)
    refused = samples.Sample("Heartbeat", "refused", first.args, Fenced("this session was ended", "/job:worker/task:3"))
    for sample, *asked in (
        (first, first.args),
        (first, again),
        (samples.Sample("Heartbeat", "to drive", first.args, True), again),
        (refused, again, first.args),
    ):
        core.tell(sample)
        assert make(server, sample) == plain(sample.answer)
        assert plain(core.asked) == plain(asked)
    return tap.heard


def servers(stack: ExitStack) -> list[Heard]:
    """Another server votes, on the tcp transport."""
    core, address, tap = tapped(stack)
    vote_at(stack, address)
    until(lambda: plain(core.heard) == plain(HEARD))
    return tap.heard


TALKS: dict[str, Callable[[ExitStack], list[Heard]]] = {
    # All calls and all errors, and a payload of several parts, each of which has a place in shared memory.
    "tcp": lambda stack: talk(stack, "tcp", samples.transport_samples(samples.LARGE, list(BY_NAME))),
    "shm": lambda stack: talk(stack, "shm", samples.transport_samples(200_001, ["MemoryLimit"])),
    # It breaks when a push is sent: the client opens another, and says that it replaces the first.
    "a transport that breaks": lambda stack: talk(stack, "tcp", [BY_SAMPLE["Push full"]], MessageKind.PUSH),
    "a call that waits": waiting,
    "a server that has enough": crowded,
    "heartbeats": heartbeats,
    "servers": servers,
}


def recorded_transport(name: str) -> list[dict[str, list[str]]]:
    """What both ends say in each connection of a talk."""
    with ExitStack() as stack:
        return [heard.written() for heard in TALKS[name](stack)]


@pytest.mark.parametrize("name", TALKS)
def test_both_ends_of_a_transport_say_the_golden_bytes(name: str) -> None:
    """Between the real ends go the bytes of the file, each way, and each end has what the other one gave."""
    assert recorded_transport(name) == GOLDEN["transports"][name]


# ---- All of it is in the file ----


HEADERS: Mapping[str, type[Protobuf]] = {
    "PushFrame": pb.PushHeader, "RoundFrame": pb.RoundHeader, "PullFrame": pb.PullHeader, "AskFrame": pb.ExchangeHeader,
}  # fmt: skip

TRANSPORT_HEADERS: Mapping[int, type[Protobuf]] = {
    MessageKind.HELLO: pb.TransportHello, MessageKind.PUSH: pb.PushHeader, MessageKind.PULL: pb.PullRequest,
    MessageKind.PART: pb.RoundHeader, MessageKind.REFUSAL: pb.Refusal, MessageKind.ALIVE: pb.TransportAlive,
    MessageKind.VOTE: pb.ServerVote,
}  # fmt: skip


def messages_of_calls() -> Iterator[Protobuf]:
    """All messages of gRPC in the file, and the headers within."""
    methods = {method.name: method for method in pb.DESCRIPTOR.services_by_name["ParameterServer"].methods}
    for found in (*GOLDEN["calls"].values(), *GOLDEN["servers"].values(), *GOLDEN["streams"].values()):
        call = Call.of(found)
        method = methods[call.path.rpartition("/")[2]]
        for kind, sent in ((method.input_type, call.request), (method.output_type, call.reply)):
            for data in sent:
                yield (message := getattr(pb, kind.name).FromString(data))
                if kind.name in HEADERS:
                    yield HEADERS[kind.name].FromString(message.header)


def messages_of_transports() -> Iterator[tuple[int, Protobuf | None]]:
    """The kinds of all messages of transports in the file, and their headers."""
    for heard in (heard for talk in GOLDEN["transports"].values() for heard in talk):
        for told in (*heard["up"], *heard["down"]):
            if "with files" not in told:
                kind, header, _ = split(told)
                known = TRANSPORT_HEADERS.get(kind)
                yield kind, known.FromString(header) if known is not None else None


def every_field() -> set[str]:
    """The fields of all messages of the protocol, and the words of its enumerations."""
    found = set()
    kinds = list(pb.DESCRIPTOR.message_types_by_name.values())
    enums = list(pb.DESCRIPTOR.enum_types_by_name.values())
    for kind in kinds:
        if not kind.GetOptions().map_entry:
            found |= {field.full_name for field in kind.fields}
            enums += kind.enum_types
    return found | {f"{enum.full_name} {value.name}" for enum in enums for value in enum.values if value.number}


def fields_of(message: Protobuf) -> Iterator[str]:
    """The fields of a message that are set, and the words in them."""
    for field, value in message.ListFields():
        yield field.full_name
        if field.type == FieldDescriptor.TYPE_ENUM:
            yield f"{field.enum_type.full_name} {field.enum_type.values_by_number[value].name}"


def test_the_golden_file_has_every_field() -> None:
    """Every field of every message is set somewhere, every word of an enumeration is used, and nothing is unknown."""
    transports = [header for _, header in messages_of_transports() if header is not None]
    found = [below for message in [*messages_of_calls(), *transports] for below in walk(message)]
    assert every_field() - {name for message in found for name in fields_of(message)} == set()
    assert [message for message in found if len(UnknownFieldSet(message))] == []


def test_the_golden_file_has_every_call_and_no_other() -> None:
    """All verbs, errors, entries of the log and kinds of messages of transports are there, and what is there is
    tried."""
    assert list(GOLDEN["calls"]) == list(BY_SAMPLE)
    assert list(GOLDEN["transports"]) == list(TALKS)
    between = {name.partition(" ")[0] for name in GOLDEN["servers"]}
    assert between == {"Introduce", "Vote"}
    assert list(GOLDEN["streams"]) == ON_STREAMS
    assert {sample.verb for sample in SAMPLES} | between | {"Exchange"} == set(VERBS)
    assert {kind for kind, _ in messages_of_transports()} == {*MessageKind}
    entries = next(sample.args[2] for sample in SAMPLES if str(sample) == "Approve full")
    assert {type(entry) for entry in entries} == {*get_args(LogEntry)}
    refused = {type(sample.answer) for sample in SAMPLES if isinstance(sample.answer, PSError)}
    assert refused == {*BY_NAME.values()}


def test_what_is_large_is_cut() -> None:
    """The file has requests and answers of several frames, and of several parts, inline and in shared memory."""
    assert len(GOLDEN["calls"]["Push large"]["request"]) > 1
    assert {len(GOLDEN["calls"][name]["reply"]) > 1 for name in ("Push large", "Push growing", "Pull large")} == {True}
    for name, shared in (("tcp", False), ("shm", True)):
        (heard,) = GOLDEN["transports"][name]
        for said in heard["up"], heard["down"]:
            parts = Counter("in memory" in told for told in said if "with files" not in told and split(told)[2])
            assert parts[shared] >= 2


def write() -> None:
    """Writes the file anew."""
    with ExitStack() as stack:
        wire = Wire(stack)
        found = {
            "calls": {name: wire.call(name) for name in BY_SAMPLE},
            "servers": wire.votes(),
            "streams": {name: wire.on_a_stream(name) for name in ON_STREAMS},
            "transports": {name: recorded_transport(name) for name in TALKS},
        }
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
    sys.exit()
