"""R19: received bytes are data. Nothing is executed, allocated for what it announces, kept, or written elsewhere; and
whatever strangers send, in calls or on transports, the rounds of the job go on and are exact."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from psserver.rounds.open_rounds import open_rounds
from pstesting.processes import CALM, PS0, SECONDS, W0
from tests.kit import internals as inside
from tests.kit.attacks import BOMB, STRANGER, Attacker, Process, Stranger, foreseen, streams
from tests.kit.cases import search
from tests.kit.certificates import Certificates, client, guarded, listening
from tests.kit.internals import messages, pb
from tests.kit.rig import CHIEF, WORKERS, core, eventually
from tests.kit.transports import Hand, Site

SOME_MIB = 64 << 10
"""In KiB, as the system counts resident memory: a thousandth of what is announced."""


class Bomb:
    """What tells of itself if anybody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Attacked:
    """A secured server with a root of checkpoints, and a member that says what the test wants."""

    def __init__(self, certificates: Certificates, root: Path, stack: ExitStack) -> None:
        self.root = root
        self.core = core(root=root, memory_limit=1 << 30)
        self.thread = stack.enter_context(guarded(certificates.of("ps-0"), self.core, memory_limit=1 << 30))
        self.server = stack.enter_context(client(self.thread, certificates.of("worker-0")))
        self.chief = stack.enter_context(client(self.thread, certificates.of("chief-0")))
        self.session = self.server.open(WORKERS[0], 1, 0, False).session
        self.token = self.chief.open(CHIEF, 0, 0, True).token

    def say(self, verb: str, message: bytes) -> str:
        """Sends bytes as the request of a verb; returns the name of the error, "" for an answer."""
        stub: Any = self.server._calls._stubs[verb]
        asks = inside.VERBS[verb].streams[0]
        call = stub if streams(verb) else stub.future
        try:
            reply = call(iter([message]) if asks else message, metadata=self.server._calls._metadata, timeout=SECONDS)
            list(reply) if streams(verb) else reply.result()
        except grpc.RpcError as error:
            trailing: Any = dict(error.trailing_metadata() or ())  # type: ignore[attr-defined]
            return str(trailing.get(inside.ERROR_KEY, error))
        return ""

    def serves(self) -> None:
        self.server.heartbeat(self.session, -1, b"")


@pytest.fixture(scope="module")
def attacked(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """One server for all attacks; none may surprise it."""
    with foreseen(), ExitStack() as stack:
        yield Attacked(certificates, tmp_path_factory.mktemp("below") / "root", stack)


KNOWN = {"", *inside.BY_NAME} - {"PSError"}
"""What may be said of a message: nothing, or an error that is no internal one."""


@pytest.mark.parametrize("verb", inside.VERBS)
def test_a_pickle(attacked: Attacked, tmp_path: Path, verb: str) -> None:
    """Is bytes like any others, as a message, as a header, and as data."""
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    for message in (bomb, inside.Frame(bomb, 0, (memoryview(bomb),)).encode()):
        assert attacked.say(verb, message) in KNOWN
    assert not (tmp_path / "exploded").exists()
    attacked.serves()


SHAPES = [(1 << 40,), (1 << 33, 1 << 33), (1 << 20, 1 << 10, 1 << 10), (0, 1 << 63)]


@pytest.mark.parametrize("announced", [2 << 30, 1 << 60, (1 << 64) - 1, *SHAPES])
def test_what_is_announced_takes_no_memory(attacked: Attacked, announced: int | tuple[int, ...]) -> None:
    """A push of more than the server may hold is refused, and so is a variable; the value of its size never comes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    few = (memoryview(b"x" * 64),)
    if isinstance(announced, int):
        push = pb.PushHeader(session=attacked.session, generation=1, round=0, plan_id=b"p" * 32, size=announced)
        assert attacked.say("Push", inside.Frame(push.SerializeToString(), 0, few).encode()) == "MemoryLimit"
    else:
        spec = pb.VariableSpec(name="huge", tensor=pb.TensorSpec(dtype="float32", shape=announced))
        create = pb.CreateBatchRequest(session=attacked.session, variables=[pb.Variable(spec=spec, servers=[0])])
        assert attacked.say("CreateBatch", create.SerializeToString()) in KNOWN
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < SOME_MIB
    attacked.serves()


def test_a_message_that_is_too_long(attacked: Attacked) -> None:
    """One message has a limit, which gRPC holds before anybody looks into it."""
    with pytest.raises(inside.InvalidRequest, match="larger than max"):
        attacked.server.propose(attacked.session, None, "x" * (8 << 20), None)
    attacked.serves()


# ---- The sockets ----


@given(said=st.lists(st.binary(max_size=300), max_size=4), data_port=st.booleans())
def test_whatever_comes_before_a_handshake(attacked: Attacked, said: list[bytes], data_port: bool) -> None:
    """Bytes of any kind, in any pieces, cost their connection and nothing else."""
    port = attacked.thread._server._transports.port if data_port else attacked.thread.port
    with socket.create_connection(("127.0.0.1", port), SECONDS) as sock, contextlib.suppress(OSError):
        for part in said:
            sock.sendall(part)
        sock.shutdown(socket.SHUT_WR)
        if data_port:
            while sock.recv(4096):
                pass
    attacked.serves()


def test_nothing_is_left_of_them(attacked: Attacked) -> None:
    """Of all that came before, no connection is kept."""
    transports = attacked.thread._server._transports
    eventually(lambda: not transports._handshakes and not [c for c in transports.connections if c.session is None])


# ---- Who may reach it ----


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("has", ["nothing", "a token", "TLS"])
def test_other_machines_are_kept_out(certificates: Certificates, host: str, has: str) -> None:
    """A server that they can reach has TLS and a token, or does not start; it says which flags are missing."""
    if host == "::" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    full = certificates.of("ps-0")
    tls = inside.Security(full.certificate, full.key, full.ca)
    security = {"nothing": inside.Security(), "a token": inside.Security(token=full.token), "TLS": tls}[has]
    thread = inside.ServerThread(core(), inside.ServerConfig(PS0, host=host, security=security))
    with pytest.raises(inside.ConfigError, match=r"other machines.*without.*--tls-cert.*--token-file.*--insecure"):
        thread.__enter__()


def test_other_machines_with_all_of_it(certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    """TLS and a token open the door; so does --insecure, which says loudly that it does."""
    with guarded(certificates.of("ps-0"), host="0.0.0.0") as thread:
        assert thread.port
    assert "INSECURE" not in caplog.text
    with guarded(inside.Security(), host="0.0.0.0", insecure=True) as thread:
        assert thread.port
    assert "INSECURE: /job:ps/task:0 would accept other machines on 0.0.0.0 without TLS and a token" in caplog.text


TOKEN = "t" * 32
MIB = 1 << 20
CONNECTIONS, STREAMS = 4, 64
ATTACK_SECONDS = 3.0
"""Seconds in which strangers send as fast as the server takes it."""

MOST_GROWTH = 96 * MIB
"""Bytes by which a server may grow: 64 KiB of each stream, 4 whole messages, and what gRPC needs. All have 1 GiB."""

MOST_LOG = 16 << 10
"""Bytes of log."""

METHODS = {
    "a call": inside.VERBS["Status"].path,
    "a stream": inside.VERBS["Push"].path,
    "health": "/grpc.health.v1.Health/Check",
    "reflection": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}


@pytest.mark.parametrize("case", METHODS)
def test_messages_that_never_end_are_not_kept(stack: ExitStack, tmp_path: Path, case: str) -> None:
    """Of calls, and of the services that ask for no token: a stranger has a few buffers, and is told of once."""
    log, security = tmp_path / "log", inside.SecurityOptions(token=TOKEN)
    with log.open("wb") as file:
        keys = {"security": security, "stderr": file.fileno(), "flags": ["--metrics-port", "0"]}
        started, address = listening(stack, **keys)
    process = psutil.Process(started.pid)

    def works() -> None:
        """A worker opens a session, and heartbeats, in time."""
        with closing(inside.RemoteServer(address, PS0, CALM, security=inside.Security(token=TOKEN))) as client:
            session = client.open(W0, 1, time.monotonic_ns(), False).session
            client.heartbeat(session, -1, b"")
            client.leave(session, "")

    works()
    before, most = process.memory_info().rss, 0
    host, _, port = address.rpartition(":")
    socks = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS)]
    strangers = [Stranger(sock, METHODS[case], 4 * MIB) for sock in socks]
    for stranger in strangers:
        stranger.begin(STREAMS)
    threads = [threading.Thread(target=stranger.pump, args=(ATTACK_SECONDS,)) for stranger in strangers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, process.memory_info().rss - before)
        time.sleep(0.05)
    began = time.monotonic()
    works()
    assert time.monotonic() - began < SECONDS / 3
    sent = sum(stranger.sent for stranger in strangers)
    assert most < MOST_GROWTH, f"grown by {most / MIB:.1f} MiB, of {sent / MIB:.1f} that were sent"
    assert log.stat().st_size < MOST_LOG
    for stranger in strangers:
        stranger.sock.close()


# ---- Whatever strangers send, in whatever pieces, the job's rounds go on and are exact ----

LIFE = 0x5EED << 44
"""Of a server: the numbers of its sessions are none that an attack guesses."""

FEW = 8
"""Descriptors or threads that a server may have more after a storm: of its pools, and of gRPC's."""


@dataclass
class Siege:
    """A server with a job on it, who attacks it, and what the server did not foresee."""

    site: Site
    attacker: Attacker
    surprises: list[str]


@pytest.fixture(scope="module", params=["open", "secured"])
def siege(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Siege]:
    """One server for all attacks; where it asks for certificates, the sessions of others are said, too."""
    shown, own = (inside.Security(), inside.Security()), inside.Security()
    if request.param == "secured":
        members = certificates.signed([f"{name}.paramserver" for name in ("worker-0", "worker-1", "chief-0")], -1, 1)
        shown, own = (certificates.of("ps-0"), members), certificates.signed(["worker-7.paramserver"], -1, 1)
    above = tmp_path_factory.mktemp("above")
    with foreseen() as surprises, ExitStack() as stack:
        more: dict[str, Any] = {"root": above / "root", "memory_limit": 256 * MIB, "incarnation": LIFE}
        site = Site(stack, "grpc", elements=64, shown=shown, **more)
        others = [one.session for one in site.workers] if shown[0].tls else []
        site.thread._loop.set_exception_handler(lambda loop, context: surprises.append(str(context)))
        yield Siege(site, Attacker(site, own, others), surprises)
    assert [path.name for path in above.iterdir() if path.name != "root"] == []


@search(2)
@given(data=st.data())
def test_whatever_is_called_the_job_goes_on(siege: Siege, data: st.DataObject) -> None:
    """Each call is answered or waits, with no internal error, in whatever order; every round has its exact sums."""
    for _ in range(data.draw(st.integers(1, 4))):
        verb, messages = siege.attacker.attack(data.draw)
        said = siege.attacker.send(verb, messages, leaves=data.draw(st.integers(0, 9)) == 0)
        event(f"{verb}: {said}")
        if said == "Fenced":
            siege.attacker.open()
    siege.site.round()
    assert siege.surprises == []


def test_nothing_is_left_of_a_siege(siege: Siege) -> None:
    """No more calls wait than one session may have, no bell is kept, and no memory is reserved."""
    site, attacker = siege.site, siege.attacker
    attacker.open()  # ends the session that it had
    attacker.server.leave(attacker.session, "")
    core = site.core
    eventually(lambda: not site.thread._server._service._bells)
    watches = core.machine.watches
    assert all(len(calls) <= inside.MAX_CALLS for calls in (watches.ends, watches.news, core.machine.job.reads.calls))
    assert open_rounds(core.machine.job.rounds) == ()
    site.round()


# ---- A process ----


@pytest.mark.ci  # thousands of connections
def test_a_process_has_nothing_left_of_thousands(tmp_path: Path) -> None:
    """Of thousands of calls that are refused, wait, or are given up: no descriptor, no thread, little memory."""
    with ExitStack() as stack:
        site = Process(stack, tmp_path, "grpc", ["--memory-limit", "256MiB"])
        attacker, process = Attacker(site), site.process
        storm(attacker, 50)
        site.round()
        files, threads, memory = process.num_fds(), process.num_threads(), process.memory_info().rss
        storm(attacker, 250)
        site.round()
        eventually(lambda: process.num_fds() <= files + FEW and process.num_threads() <= threads + FEW)
        assert process.memory_info().rss - memory < 64 * MIB
        assert [path.name for path in tmp_path.iterdir()] == []


def storm(attacker: Attacker, count: int) -> None:
    """Many calls of each kind at once, of clients who go away; and connections that say nothing of use."""
    site = attacker.site
    attacker.open()
    log = site.server.status().log
    watch = pb.WatchRequest(session=attacker.session, after=log, version=-1)
    pull = pb.PullRequest(session=attacker.session, variables=[site.variables[0].id], after=1 << 40)
    push = pb.PushHeader(session=attacker.session, generation=99, size=1 << 20, plan_id=b"p" * 32)
    spec = messages.MAPPER.pairs[inside.VariableSpec].to_pb(site.variables[0].spec)
    create = pb.CreateBatchRequest(session=attacker.session, variables=[pb.Variable(spec=spec, servers=[0])])
    calls: dict[str, list[bytes]] = {
        "Watch": [watch.SerializeToString()],
        "Pull": [pull.SerializeToString()],
        "Push": [inside.Frame(push.SerializeToString(), 0, (memoryview(bytes(5000)),)).encode()],
        "CreateBatch": [create.SerializeToString()],
        "Propose": [pb.ProposeRequest(session=attacker.session, join_point="x" * 10_000).SerializeToString()],
    }
    for _ in range(count // 50):
        begun = [attacker.begin(verb, said, 60.0) for verb, said in calls.items() for _ in range(50)]
        site.server.status()
        for call in begun:
            call.cancel()
    host, _, port = attacker.server.address.rpartition(":")
    for _ in range(count // 5):
        with socket.create_connection((host, int(port)), 5) as sock, contextlib.suppress(OSError):
            sock.sendall(BOMB)


# ---- Transports ----

RESET = struct.pack("ii", 1, 0)
"""So that a socket that is closed says nothing of an end."""

TASKS = ("worker-0", "worker-1", "worker-7", "chief-0")


@pytest.mark.parametrize("transport", ["tcp", "tls", "shm"])
def test_connections_by_the_hundred(certificates: Certificates, stack: ExitStack, transport: str) -> None:
    """Torn at once, after some bytes, or after a hello: no connection is left, and no descriptor, thread or memory.
    Nothing that the server does not foresee reaches its event loop. The transport "tls" is tcp with certificates."""
    shown, surprises = (inside.Security(), inside.Security()), stack.enter_context(foreseen())
    if transport == "tls":
        everyone = certificates.signed([f"{name}.paramserver" for name in TASKS], -1, 1)
        shown = certificates.of("ps-0"), everyone
    name: Any = "shm" if transport == "shm" else "tcp"
    site = Site(stack, name, elements=64, shown=shown)
    site.thread._loop.set_exception_handler(lambda loop, context: surprises.append(str(context)))
    session = site.connect("grpc").open(STRANGER, 1, 0, False).session
    hello = pb.TransportHello(session=session, token=site.core.registry.transport_token(session))
    said = inside.Message(inside.MessageKind.HELLO, header=hello.SerializeToString()).head()
    site.round()
    process = psutil.Process()
    files, threads = process.num_fds(), process.num_threads()
    for number in range(300 if transport != "tls" else 60):
        with contextlib.suppress(OSError), Hand(site.transports, name) as guest:
            if transport == "tls":
                context = shown[1].client_context()
                guest.sock = context.wrap_socket(guest.sock, server_hostname="ps-0.paramserver")
            if number % 3:
                guest.sock.sendall(said if number % 3 == 1 else b"\x03" * number)
            if transport == "tcp":
                guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    del guest  # and the memory that it had
    left = site.transports
    eventually(lambda: not site.open([None, session]) and not left.leaving and not left._handshakes)
    if left._outbox is not None:
        eventually(lambda: not left._outbox[0]._entries)
    eventually(lambda: process.num_fds() <= files)
    assert process.num_threads() <= threads
    site.round()
    assert surprises == []


# ---- Memory that changes while it is read ----


def test_memory_that_is_scribbled_over(tmp_path: Any) -> None:
    """Who changes what the server reads has contributed something else, and nothing worse: the round ends for all."""
    with ExitStack() as stack:
        site = Site(stack, "shm", elements=1 << 16)
        here, last = site.workers
        guest = stack.enter_context(Hand(site.transports, "shm")).welcomed(last.session, site.transports)
        over = threading.Event()
        scribble = np.frombuffer(guest.memory, np.uint8)

        def run() -> None:
            rng = np.random.default_rng(0)
            while not over.is_set():
                scribble[: 2 << 20] = rng.integers(0, 256, 2 << 20, np.uint8)

        writer = threading.Thread(target=run)
        writer.start()
        try:
            for call in range(1, 11):
                header, parts = guest.push(site, last, 2)
                answer = site.push(here, 1)
                place = 0 if call % 2 else 1 << 20  # what the round before told may not be free yet
                for number, (offset, data) in enumerate(parts):
                    kind, said = (inside.MessageKind.PART, b"") if number else (inside.MessageKind.PUSH, header)
                    guest.say(kind, call, said, offset, len(data), place)
                    place += -(-len(data) // 4096) * 4096
                values = answer.result(10).payload.tensors([one.spec.tensor for one in site.variables])
                assert [value.shape for value in values] == [(1 << 16,)] * 3
                guest.hear()
                for worker in site.workers:
                    worker.round += 1
        finally:
            over.set()
            writer.join()
        assert site.server.status().variables == 3
