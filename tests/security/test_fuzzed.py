"""R19: whatever strangers send, in calls or on transports, in whatever pieces, the job's rounds go on and are exact."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from psserver.rounds.open_rounds import open_rounds
from tests.kit import internals as inside
from tests.kit.attacks import BOMB, STRANGER, Attacker, Process, foreseen
from tests.kit.cases import search
from tests.kit.certificates import Certificates
from tests.kit.internals import messages, pb
from tests.kit.rig import eventually
from tests.kit.transports import Hand, Site

MIB = 1 << 20

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


def test_nothing_is_left_of_them(siege: Siege) -> None:
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
