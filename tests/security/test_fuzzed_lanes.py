"""R19: whatever comes on the sockets of a server's lanes, in whatever pieces: the job's rounds go on and are exact."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.transport import lane_connection
from tests.kit.attacks import BOMB, BYTES, NUMBERS, STRANGER, mutated, question
from tests.kit.certificates import Certificates
from tests.kit.internals import CLIENT_BYTES, HEAD, INLINE, PROTOCOL, Kind, Message, Security, pb
from tests.kit.lanes import Hand, Site, eventually

SMALL = 64
RESET = struct.pack("ii", 1, 0)
"""So that a socket that is closed says nothing of an end."""

TASKS = ("worker-0", "worker-1", "worker-7", "chief-0")


@dataclass
class Front:
    """A server whose lanes are attacked, and members of a job that use them.

    Attributes:
        lane: which; "tls" is tcp with certificates.
        site: the server and the job.
        session: whose lane is attacked: no member's.
        security: with which it is.
        surprises: what the server did not foresee.
    """

    lane: str
    site: Site
    session: int
    security: Security
    surprises: list[str]

    def hand(self) -> Hand:
        """A connection that has said nothing."""
        found = Hand(self.site.lanes, "shm" if self.lane == "shm" else "tcp")
        if self.lane == "tls":
            context = self.security.client_context()
            found.sock = context.wrap_socket(found.sock, server_hostname="ps-0.paramserver")
        return found

    def hello(self) -> bytes:
        """What lets its session in."""
        said = pb.LaneHello(
            session=self.session, token=self.site.core.registry.lane_token(self.session), protocol=PROTOCOL
        )
        return Message(Kind.HELLO, header=said.SerializeToString()).head()

    def open(self) -> list[Any]:
        """The server's ends of connections that are not the job's."""
        return self.site.open([None, self.session])


@pytest.fixture(scope="module", params=["tcp", "tls", "shm"])
def front(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Front]:
    """One server for all attacks on a lane; nothing that it does not foresee may reach its event loop."""
    surprises: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: surprises.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("psserver").addHandler(handler)
    shown = (Security(), Security())
    if request.param == "tls":
        everyone = certificates.signed([f"{name}.paramserver" for name in TASKS], -1, 1)
        shown = certificates.of("ps-0"), everyone
    with ExitStack() as stack:
        lane: Any = "shm" if request.param == "shm" else "tcp"
        site = Site(stack, lane, elements=SMALL, shown=shown)
        site.thread._loop.set_exception_handler(lambda loop, context: surprises.append(str(context)))
        session = site.connect("grpc").open(STRANGER, 1, 0, False).session
        yield Front(request.param, site, session, shown[1], surprises)
        eventually(lambda: not site.lanes._handshakes)
    logging.getLogger("psserver").removeHandler(handler)
    assert surprises == []


# ---- What is said ----


PLACES = (INLINE, 0, 64, 4096, CLIENT_BYTES - 64, CLIENT_BYTES, 1, 1 << 63)
KINDS = (*Kind, 0, max(Kind) + 1, 255)
EMPTY = Kind.PART, Kind.FREED, Kind.BEAT


@st.composite
def messages(draw: Any, front: Front) -> bytes:
    """A message of a lane: a push or a pull that makes sense, or what comes after one, or neither."""
    site = front.site
    session = draw(st.sampled_from([front.session] * 4 + [0, site.workers[0].session]))
    ids = [one.id for one in site.variables]
    data = draw(st.sampled_from([*BYTES, bytes(768)]))
    place = draw(st.sampled_from([INLINE, INLINE, *PLACES]))
    push = pb.PushHeader(
        session=session,
        epoch=draw(st.sampled_from([1, 2, 1 << 63])),
        round=site.workers[0].round,
        plan_id=site.plan.id,
        weights=[draw(st.sampled_from([1.0, 0.0, -1.0, float("nan")]))] * 3,
        want=ids * draw(st.sampled_from([0, 1, 2])),
        size=draw(st.sampled_from([0, 16, 768, len(data), 1 << 33, 1 << 63])),
        rows=draw(st.sampled_from([[], [], [1], [1 << 40]])),
        lookups=draw(st.sampled_from([[], [pb.RowRead(variable=ids[0], ids=bytes(16))]])),
    )
    pull = pb.PullRequest(
        session=session,
        variables=ids,
        after=draw(st.sampled_from([-1, 1 << 40])),
        tables=draw(st.sampled_from([[], [question(draw, ids[0])]])),
    )
    kind, header = draw(
        st.sampled_from([(Kind.PUSH, push), (Kind.PULL, pull), *((kind, pb.Empty()) for kind in EMPTY)])
    )
    kind = draw(st.sampled_from([kind] * 6 + [*KINDS]))
    size = len(data) if place == INLINE else draw(st.sampled_from([0, 64, 768, 4 << 20]))
    size = draw(st.sampled_from([size] * 8 + [*NUMBERS]))
    encoded = header.SerializeToString()
    head = HEAD.pack(
        kind,
        draw(st.sampled_from([len(encoded)] * 12 + [0, 1, (1 << 32) - 1])),
        draw(st.integers(0, 2)),
        draw(st.sampled_from([0, 0, 0, 16, 64, 1 << 63])),
        size,
        place,
    )
    whole = head + encoded + (data if place == INLINE else b"")
    return mutated(draw, whole) if draw(st.integers(0, 9)) == 0 else whole


@given(data=st.data())
def test_whatever_is_said_the_job_goes_on(front: Front, data: st.DataObject) -> None:
    """Before and after a hello that is right, in any pieces; the connection is read from, left open, or torn."""
    draw = data.draw
    said = b"".join(draw(st.lists(messages(front), max_size=6))) + draw(st.sampled_from([b"", BOMB, b"\xff" * 40]))
    if draw(st.integers(0, 4)):
        said = front.hello() + said
    guest = front.hand()
    with guest, contextlib.suppress(OSError):
        guest.sock.settimeout(0.01)
        cut = draw(st.integers(0, len(said)))
        guest.sock.sendall(said[:cut])
        if draw(st.booleans()) and front.lane != "tls":
            guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        elif draw(st.booleans()):
            guest.sock.sendall(said[cut:])
            while guest.sock.recv(1 << 16):
                pass
    front.site.round()
    assert front.surprises == []


def test_nothing_is_left_of_them(front: Front) -> None:
    """No connection, no call that waits, and no place in the memory of answers."""
    eventually(lambda: not front.open())
    eventually(lambda: not front.site.lanes.leaving)
    if front.site.lanes._outbox is not None:
        eventually(lambda: not front.site.lanes._outbox[0]._entries)
    front.site.round()


# ---- What is torn, or slow ----


def test_connections_by_the_hundred(front: Front) -> None:
    """Torn at once, after some bytes, or after a hello: none is left, and no descriptor, thread or memory."""
    process = psutil.Process()
    front.site.round()
    files, threads = process.num_fds(), process.num_threads()
    for number in range(300 if front.lane != "tls" else 60):
        touch(front, number)
    eventually(lambda: not front.open())
    eventually(lambda: process.num_fds() <= files)
    assert process.num_threads() <= threads
    front.site.round()


def touch(front: Front, number: int) -> None:
    """A connection that is made, and torn."""
    with contextlib.suppress(OSError), front.hand() as guest:
        if number % 3:
            guest.sock.sendall(front.hello() if number % 3 == 1 else b"\x03" * number)
        if front.lane == "tcp":
            guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def test_a_byte_now_and_then(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not say who it is in time is closed, though it never stops to say something."""
    monkeypatch.setattr(lane_connection, "HELLO_SECONDS", 0.3)  # behind the handshake, which may take its time
    with ExitStack() as stack:
        slow = [stack.enter_context(front.hand()) for _ in range(20)]
        said = front.hello()
        for at in range(len(said)):
            for guest in slow:
                with contextlib.suppress(OSError):
                    guest.sock.sendall(said[at : at + 1])
            if not front.open():
                break
            threading.Event().wait(0.05)
        assert not front.open()
        front.site.round()


def test_a_handshake_that_is_nonsense(front: Front) -> None:
    """Ends at once."""
    if front.lane != "tls":
        pytest.skip("only TLS has one")
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(300), BOMB, front.hello()):
        with socket.create_connection(("127.0.0.1", front.site.lanes.port), 5) as sock:
            sock.sendall(said)
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                while sock.recv(4096):
                    pass
    eventually(lambda: not front.site.lanes._handshakes)
    assert front.site.lanes.access.refused.counts["handshake"] >= 3  # a greeting that is cut off is no failure
    front.site.round()


# ---- Memory that changes while it is read ----


def test_memory_that_is_scribbled_over(tmp_path: Any) -> None:
    """Who changes what the server reads has contributed something else, and nothing worse: the round ends for all."""
    with ExitStack() as stack:
        site = Site(stack, "shm", elements=1 << 16)
        here, last = site.workers
        guest = stack.enter_context(Hand(site.lanes, "shm")).welcomed(last.session, site.lanes)
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
                    kind, said = (Kind.PART, b"") if number else (Kind.PUSH, header)
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
