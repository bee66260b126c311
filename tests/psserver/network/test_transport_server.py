"""A server's transports: who is let in, what is believed, and that whatever one client does, others are served."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from psserver.network import transport_connection as connection_of
from psserver.network import transport_server as server_transports
from psserver.network import unix_socket
from psserver.network.client_memory import ClientMemory
from pswire.encoding import plain_votes
from pswire.encoding.verbs import parse, refusal_from_pb
from pswire.errors import Fenced, InvalidRequest, MemoryLimit, PSError, ServerLost
from pswire.network.shared_memory import CLIENT_BYTES, SEALS
from pswire.network.sockets import HEAD, INLINE, MAX_HEADER_BYTES, MAX_PART_BYTES, MessageKind
from pswire.pb import parameter_server_pb2 as pb
from pswire.servers.votes import Vote
from tests.kit import transports
from tests.kit.cases import search
from tests.kit.rig import SOON, Worker
from tests.kit.transports import Hand, Site, eventually, mappings

SMALL = 64
"""Elements of variables whose rounds are one part."""


@pytest.fixture(params=["tcp", "shm"])
def name(request: pytest.FixtureRequest) -> str:
    """The transport that is attacked; the members use the same."""
    return str(request.param)


@pytest.fixture
def site(stack: ExitStack, name: str) -> Site:
    """Two members, who make a round after each test."""
    found = Site(stack, name, elements=SMALL)  # type: ignore[arg-type]
    stack.callback(found.round)
    return found


def hand(stack: ExitStack, site: Site, name: str) -> Hand:
    return stack.enter_context(Hand(site.transports, name))


def readable(sock: socket.socket) -> bool:
    """Whether something has come; its number may be above what `select` takes."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def member(stack: ExitStack, site: Site, name: str) -> Hand:
    return hand(stack, site, name).welcomed(site.workers[-1].session, site.transports)


def pulling(site: Site, waits: bool = False, worker: Worker | None = None) -> bytes:
    """The header of a pull of all variables, by the last member if nobody is named; one may wait for its next round."""
    worker = worker or site.workers[-1]
    ids, after = [variable.id for variable in site.variables], worker.round if waits else -1
    return pb.PullRequest(session=worker.session, variables=ids, after=after).SerializeToString()


def refusal(guest: Hand) -> tuple[int, PSError]:
    """Hears a refusal: of which call, and why."""
    message = guest.hear()
    assert message.kind is MessageKind.REFUSAL
    return message.call, refusal_from_pb(parse(pb.Refusal, message.header))


# ---- Who is let in ----


def hello_of(site: Site, case: str) -> dict[str, Any]:
    """What a stranger says first that is no hello, or one that is not believed."""
    here, other = site.workers
    token = site.core.registry.transport_token
    right = pb.TransportHello(session=here.session, token=token(here.session)).SerializeToString()
    return {
        "no token": {"session": here.session, "token": b""},
        "a wrong token": {"session": here.session, "token": bytes(16)},
        "a shorter token": {"session": here.session, "token": token(here.session)[:15]},
        "the token of another session": {"session": here.session, "token": token(other.session)},
        "of no session": {"session": 1 << 60, "token": bytes(16)},
        "garbage": {"kind": 0xFF, "header": b"x" * 100},
        "a header of 4 GiB": {"raw": bytes([MessageKind.HELLO, 0, 0, 0]) + b"\xff" * 4 + bytes(32)},
        "data": {"kind": MessageKind.HELLO, "size": 1},
        "no protobuf": {"kind": MessageKind.HELLO, "header": b"\xff" * 20},
    }.get(case) or {"kind": MessageKind[case], "header": right}


UNBELIEVED = ["no token", "a wrong token", "a shorter token", "the token of another session", "of no session"]
UNBELIEVED += ["garbage", "a header of 4 GiB", "data", "no protobuf"]
UNBELIEVED += ["PUSH", "PULL", "PART", "FREED", "WELCOME", "ANSWER"]


@pytest.mark.parametrize("case", UNBELIEVED)
def test_who_does_not_say_who_it_is_is_shown_out(stack: ExitStack, site: Site, name: str, case: str) -> None:
    """Without a word, and without the memory in which the answers to others are; a bad hello is refused by its head:
    none of what it announces is waited for."""
    stranger, said = hand(stack, site, name), hello_of(site, case)
    if "raw" in said:
        stranger.sock.sendall(said["raw"])
    elif "token" in said:
        stranger.hello(**said)
    else:
        stranger.say(**said)
    if name == "shm" and "token" in said:
        assert socket.recv_fds(stranger.sock, 1, 1)[:2] == (b"", [])
    assert stranger.is_closed()


def test_many_that_say_nothing(stack: ExitStack, site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 of them: the oldest have to go, and whoever says who it is gets in. A hello that does not come is waited for
    as long as is said, and no longer."""
    strangers = [hand(stack, site, name) for _ in range(300)]
    guest = member(stack, site, name)
    assert len(site.open([None])) <= server_transports.MAX_STRANGERS
    for stranger in strangers[:40]:
        assert stranger.is_closed()
    site.round()
    assert not readable(guest.sock)
    monkeypatch.setattr(connection_of, "HELLO_SECONDS", 0.1)
    assert hand(stack, site, name).is_closed()


@contextmanager
def no_more_files(spare: int = 0) -> Iterator[None]:
    """This process can open no file more than it has, but for some that are closed within."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1 + spare, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in taken:
            os.close(file)


def test_a_server_without_files_does_not_spin(
    stack: ExitStack, site: Site, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who cannot be let in waits; the server says so once, serves the others, and lets them in when it can."""
    monkeypatch.setattr(server_transports, "REST_SECONDS", 0.05)
    caplog.set_level(logging.WARNING, "psserver.transports")
    sock = stack.enter_context(socket.socket(socket.AF_INET if name == "tcp" else socket.AF_UNIX))
    before = len(site.transports.connections)
    with no_more_files():
        sock.connect(("127.0.0.1", site.transports.port) if name == "tcp" else site.transports.path)
        eventually(lambda: caplog.messages)
        began = time.process_time()
        threading.Event().wait(0.5)
        assert time.process_time() - began < 0.2
        # It has tried ten times since; other tests may have left one or two servers in this process.
        assert 1 <= len(caplog.messages) <= 3
        assert "too many open files" in caplog.messages[0].lower()
    eventually(lambda: len(site.transports.connections) > before)
    member(stack, site, name)


def test_a_session_speaks_for_itself_only(stack: ExitStack, site: Site, name: str) -> None:
    """Its pushes and pulls for another are refused; the transport stays. One connection is enough: of too many the
    oldest has to go, and the others of the job stay."""
    guest = member(stack, site, name)
    here, last = site.workers
    header, parts = guest.push(site, here, 1)
    guest.say(MessageKind.PUSH, 1, header, data=parts[0][1])
    guest.say(MessageKind.PULL, 2, pulling(site, worker=here))
    for call in (1, 2):
        refused, error = refusal(guest)
        assert (refused, type(error)) == (call, Fenced)
    guest.say(MessageKind.PULL, 3, pulling(site))
    assert guest.hear().kind is MessageKind.ANSWER
    guests = [member(stack, site, name) for _ in range(connection_of.MAX_CONNECTIONS + 2)]
    assert len(site.open([last.session])) <= connection_of.MAX_CONNECTIONS
    assert guest.is_closed()
    assert guests[0].is_closed()
    site.round()


# ---- What a member may say ----


BAD_HEADS = {
    "a header of 4 GiB": (MessageKind.PUSH, 0xFFFFFFFF, 0, 0, INLINE),
    "a header that is too large": (MessageKind.PULL, MAX_HEADER_BYTES + 1, 0, 0, INLINE),
    "a part of an exabyte": (MessageKind.PART, 0, 0, 1 << 60, INLINE),
    "a part that is too large": (MessageKind.PART, 0, 0, MAX_PART_BYTES + 1, 0),
    "an unknown kind": (9, 0, 0, 0, INLINE),
    "kind 0": (0, 0, 0, 0, INLINE),
    "what only servers say": (MessageKind.ANSWER, 0, 0, 0, INLINE),
    "a second hello": (MessageKind.HELLO, 0, 0, 0, INLINE),
    "memory that it was never told of": (MessageKind.FREED, 0, 0, 0, 0),
    "memory that there cannot be": (MessageKind.FREED, 0, 0, 0, 1 << 63),
    "data past the end of its memory": (MessageKind.PART, 0, 0, 64, CLIENT_BYTES),
    "data that end past the end of its memory": (MessageKind.PART, 0, 0, 128, CLIENT_BYTES - 64),
    "data in no place": (MessageKind.PART, 0, 0, 64, INLINE - 1),
    "data between lines": (MessageKind.PART, 0, 0, 64, 32),
}


@pytest.mark.parametrize("case", BAD_HEADS)
def test_nonsense_ends_a_transport(stack: ExitStack, site: Site, name: str, case: str) -> None:
    guest = member(stack, site, name)
    kind, header, offset, size, place = BAD_HEADS[case]
    guest.sock.sendall(HEAD.pack(kind, header, 7, offset, size, place))
    assert guest.is_closed()


@pytest.mark.parametrize("cut", [0, 5])
def test_votes_of_a_worker_end_its_transport(
    stack: ExitStack, site: Site, name: str, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole or cut off, the reason is in the server's log, and the others of the job stay."""
    vote = plain_votes.pack(Vote(1, 0, b"plan", 1, whole=frozenset((7, 8))))
    assert vote is not None
    guest = member(stack, site, name)
    guest.say(MessageKind.PLAIN_VOTE, header=vote[: len(vote) - cut])
    assert guest.is_closed()
    why = "a vote of 55 bytes is not whole" if cut else "only a server that has introduced itself can vote here"
    assert why in caplog.text
    site.round()


def test_parts_out_of_place_end_a_transport(stack: ExitStack, site: Site, name: str) -> None:
    """What came before stays half a contribution, and a good push completes it."""
    guest = member(stack, site, name)
    header, [(_, data)] = guest.push(site, site.workers[-1], 2)
    guest.say(MessageKind.PUSH, 1, header, data=data[:64])
    guest.say(MessageKind.PART, 1, offset=32, data=data[64:])
    assert guest.is_closed()


@pytest.mark.parametrize("limit", [1 << 40, 100])
def test_a_failed_push_is_refused_by_its_header(stack: ExitStack, site: Site, name: str, limit: int) -> None:
    """One that is too large before anything is kept of it. Its parts may be on their way then: they are no nonsense,
    and are read past."""
    site.transports.max_payload_bytes = limit
    guest = member(stack, site, name)
    header, [(_, data)] = guest.push(site, site.workers[-1], 2)
    guest.say(MessageKind.PUSH, 1, header if limit == 100 else b"\xff" * 9, data=data if limit == 100 else b"")
    for _ in range(20):
        guest.say(MessageKind.PART, 1, data=data)
    _, error = refusal(guest)
    assert isinstance(error, MemoryLimit if limit == 100 else InvalidRequest)
    assert not readable(guest.sock)
    site.transports.max_payload_bytes = 1 << 40


def test_the_memory_of_a_refused_push_is_free_again(stack: ExitStack) -> None:
    """Whatever it is refused for, or the client would run out of memory and wait for ever."""
    site = Site(stack, "shm", elements=SMALL)
    site.transports.max_payload_bytes = 100
    guest = member(stack, site, "shm")
    header, [(_, data)] = guest.push(site, site.workers[-1], 2)
    foreign, _ = guest.push(site, site.workers[0], 2)
    for place, wrong in ((0, header), (1 << 20, foreign), (2 << 20, b"\xff" * 9)):
        guest.say(MessageKind.PUSH, 1, wrong, size=len(data), place=place)
        heard = {(message.kind, message.place) for message in (guest.next(), guest.next())}
        assert heard == {(MessageKind.REFUSAL, INLINE), (MessageKind.FREED, place)}


def test_calls_under_way_are_bounded(stack: ExitStack, site: Site, name: str) -> None:
    """What is too much is refused, and the transport stays; answers make room."""
    guest = member(stack, site, name)
    for call in range(connection_of.MAX_CALLS + 2):
        guest.say(MessageKind.PULL, call, pulling(site, waits=True))
    header, parts = guest.push(site, site.workers[-1], 2)
    guest.say(MessageKind.PUSH, 1000, header, data=parts[0][1])
    for call in (connection_of.MAX_CALLS, connection_of.MAX_CALLS + 1, 1000):
        refused, error = refusal(guest)
        assert (refused, type(error)) == (call, InvalidRequest)
        assert str(connection_of.MAX_CALLS) in str(error)
    site.round()
    assert sorted(guest.hear().call for _ in range(connection_of.MAX_CALLS)) == [*range(connection_of.MAX_CALLS)]
    guest.say(MessageKind.PULL, 2000, pulling(site))
    assert guest.hear().call == 2000


def test_what_comes_while_a_server_ends_is_refused(stack: ExitStack, name: str) -> None:
    """As what waits is: at once, and whatever grace is given to answers under way."""
    site = Site(stack, name, elements=SMALL)  # type: ignore[arg-type]
    guest = member(stack, site, name)
    guest.say(MessageKind.PULL, 1, pulling(site, waits=True))
    eventually(lambda: site.core.machine.job.reads.calls)
    site.thread._loop.call_soon_threadsafe(site.thread._server._service.close)
    header, parts = guest.push(site, site.workers[-1], 2)
    for call in (1, 2):
        refused, error = refusal(guest)
        assert (refused, type(error)) == (call, ServerLost)
        guest.say(MessageKind.PUSH, 2, header, data=parts[0][1])


def test_what_is_left_of_an_answered_push_is_not_kept(stack: ExitStack, site: Site, name: str) -> None:
    """One that is sent again is answered by its header; its sender sends no more of it."""
    site.round()
    guest = member(stack, site, name)
    worker = site.workers[-1]
    worker.round -= 1
    header, [(_, data)] = guest.push(site, worker, 2)
    worker.round += 1
    guest.say(MessageKind.PUSH, 1, header, data=data[:64])
    assert guest.hear().kind is MessageKind.ANSWER
    (connection,) = [
        one for one in site.open([worker.session]) if one._assemblies or one is site.transports.connections[-1]
    ]
    eventually(lambda: not connection._assemblies)


# ---- Memory that is handed over ----


def sealed(nbytes: int, seals: int = SEALS) -> int:
    """A file in memory that can neither grow nor shrink."""
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, nbytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def plain(tmp: Path) -> int:
    (tmp / "file").write_bytes(bytes(4096))
    return os.open(tmp / "file", os.O_RDWR)


BAD_FILES: dict[str, Callable[[Path], list[int]]] = {
    "none": lambda tmp: [],
    "not sealed": lambda tmp: [sealed(4096, 0)],
    "sealed against growth only": lambda tmp: [sealed(4096, fcntl.F_SEAL_GROW)],
    "sealed against shrinking only": lambda tmp: [sealed(4096, fcntl.F_SEAL_SHRINK)],
    "empty": lambda tmp: [sealed(0)],
    "huge": lambda tmp: [sealed(1 << 50)],
    "much larger than a client's": lambda tmp: [sealed(1 << 39)],
    "on a disk": lambda tmp: [plain(tmp)],
    "a pipe": lambda tmp: [os.open(_fifo(tmp), os.O_RDWR)],
    "a directory": lambda tmp: [os.open(tmp, os.O_RDONLY)],
    "a path only": lambda tmp: [os.open(tmp, os.O_PATH)],
    "a socket": lambda tmp: [socket.socket().detach()],
}


def _fifo(tmp: Path) -> Path:
    os.mkfifo(tmp / "pipe")
    return tmp / "pipe"


@pytest.mark.parametrize("case", BAD_FILES)
def test_memory_that_is_none_is_not_taken(tmp_path: Path, stack: ExitStack, case: str) -> None:
    """Nothing is mapped that could shrink while it is read, or that is larger than a client has any use for."""
    site = Site(stack, "shm", elements=SMALL)
    before = mappings()
    guest = stack.enter_context(Hand(site.transports, "shm", introduce=False))
    files = BAD_FILES[case](tmp_path)
    if files:
        guest.hand_over(*files)
    else:
        guest.sock.sendall(b"\0")
    with suppress(OSError):
        guest.hello(site.workers[0].session, site.core.registry.transport_token(site.workers[0].session))
    assert guest.is_closed()
    assert mappings() == before
    site.round()


def test_files_that_come_later_are_nobodys(stack: ExitStack) -> None:
    """A client can send more with every message: the server keeps none. A small segment is enough for small values: its
    size is the client's choice, and places are checked against it."""
    site = Site(stack, "shm", elements=SMALL)
    guest = stack.enter_context(Hand(site.transports, "shm", nbytes=4096))
    guest.welcomed(site.workers[-1].session, site.transports)
    request, before = pulling(site), len(os.listdir("/proc/self/fd"))
    for call in range(20):
        mine = [os.dup(0) for _ in range(10)]
        socket.send_fds(guest.sock, [HEAD.pack(MessageKind.PULL, len(request), call, 0, 0, INLINE) + request], mine)
        for file in mine:
            os.close(file)
        assert guest.hear().kind is MessageKind.ANSWER
    assert len(os.listdir("/proc/self/fd")) <= before
    header, [(_, data)] = guest.push(site, site.workers[-1], 2)
    guest.memory[: len(data)] = data
    guest.say(MessageKind.PUSH, 1, header, size=len(data), place=0)
    first = site.push(site.workers[0], 1)
    site.whole([1, 2], first)
    assert guest.freed() == 0
    site.round()


def test_clients_cannot_write_where_answers_are(stack: ExitStack) -> None:
    """They all read the same memory: neither a mapping, nor the file, nor a new opening of it writes."""
    site = Site(stack, "shm", elements=1 << 16)
    guest = member(stack, site, "shm")
    guest.say(MessageKind.PULL, 1, pulling(site))
    answer = guest.hear()
    assert answer.place != INLINE
    file, size = guest.outbox, os.fstat(guest.outbox).st_size
    again = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    stack.callback(os.close, again)
    for each in (file, again):
        with pytest.raises(PermissionError):
            mmap.mmap(each, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError):
            os.pwrite(each, b"x", answer.place)
        for length in (0, size - 1, size + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(each, length)
        with pytest.raises(OSError):
            fcntl.fcntl(each, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    seen = mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ)
    with pytest.raises(TypeError):
        seen[answer.place] = 1
    assert (np.frombuffer(seen, "float32", 1 << 16, answer.place) == 0).all()
    site.round()


def test_who_looks_at_an_answer_does_not_hold_the_variable(stack: ExitStack) -> None:
    """What it looks at is a copy in shared memory: the next round may write where the variable is."""
    site = Site(stack, "shm", elements=1 << 16)
    site.round()
    value = site.pulled(site.workers[0])
    ids = [variable.id for variable in site.variables]
    eventually(lambda: site.core.machine.job.store.exclusive(ids) == frozenset(ids))
    site.round()
    assert (value == 3.0).all()


# ---- Clients that are slow, loud, or gone ----


def test_a_client_that_goes_frees_what_it_was_told_of(stack: ExitStack) -> None:
    site = Site(stack, "shm", elements=1 << 16)
    site.round()
    ring, _ = site.transports.outbox()
    for _ in range(3):
        guest = member(stack, site, "shm")
        guest.say(MessageKind.PULL, 1, pulling(site, waits=True))
        guest.say(MessageKind.PULL, 2, pulling(site))
        assert guest.hear().place != INLINE
        before = len(site.transports.connections)
        guest.sock.close()
        eventually(lambda before=before: len(site.transports.connections) < before)
        site.round()
    # What stays are the members' own values of the last round, if anything.
    eventually(lambda: not ring._entries)


def test_who_asks_without_reading_is_not_listened_to(stack: ExitStack, site: Site, name: str) -> None:
    """Answers that nobody takes are bounded, and the others are served."""
    guest = member(stack, site, name)
    session, request = site.workers[-1].session, pulling(site)
    head = HEAD.pack(MessageKind.PULL, len(request), 0, 0, 0, INLINE)
    guest.sock.settimeout(0.5)
    asks = (head + request) * 1000
    said = 0

    def waiting() -> int:
        """Asks until nothing more is taken; returns how many bytes of answers wait."""
        nonlocal said
        with suppress(TimeoutError):
            while said < 64 << 20:
                said += guest.sock.send(asks[said % len(asks) :])
        assert said < 64 << 20, "whatever it asks is taken"
        found = max(connection._link.waiting for connection in site.open([session]))
        assert found < 100_000
        return found

    eventually(lambda: waiting() > 0)
    site.round()
    eventually(lambda: waiting() > 0)


def test_a_loud_client_does_not_drown_the_others(stack: ExitStack, site: Site, name: str) -> None:
    guest = member(stack, site, name)
    noise = HEAD.pack(MessageKind.PART, 0, 0, 0, 0, INLINE) * 5000
    quiet = threading.Event()

    def shout() -> None:
        with suppress(OSError):
            while not quiet.is_set():
                guest.sock.sendall(noise)

    thread = threading.Thread(target=shout)
    thread.start()
    try:
        for _ in range(5):
            began = time.monotonic()
            site.round()
            assert time.monotonic() - began < SOON / 4
    finally:
        quiet.set()
        thread.join()


def test_a_host_that_is_cut_off_while_it_waits_is_forgotten(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words that it is told are not acknowledged: for as long as is said, and no longer. One that loses its power
    amid a push is forgotten, too: the system asks for signs of life."""
    monkeypatch.setattr(server_transports, "SILENCE_SECONDS", 0.5)
    site = Site(stack, "tcp", elements=SMALL)
    before = len(site.transports.connections)
    guest = hand(stack, site, "tcp").welcomed(site.workers[-1].session, site.transports, lease=0.4)
    for connection in site.transports.connections:
        sock = connection.sock
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        pause = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        count = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + pause * count <= 60
    guest.say(MessageKind.PULL, 1, pulling(site, waits=True))
    assert guest.hear().kind is MessageKind.ALIVE
    transports.drop(guest.sock)
    eventually(lambda: len(site.transports.connections) == before)
    site.round()


def test_who_waits_is_told_that_the_server_is_there(stack: ExitStack, site: Site, name: str) -> None:
    """While a call is under way, with what was received by then; before and after nothing is said."""
    guest = hand(stack, site, name).welcomed(site.workers[-1].session, site.transports, lease=0.4)
    (connection,) = [one for one in site.open([site.workers[-1].session]) if one._heartbeat.seconds == 0.1]
    assert connection._heartbeat._next is None
    header = pulling(site, waits=True)
    guest.say(MessageKind.PULL, 1, header)
    for _ in range(3):
        word = guest.hear()
        assert word.kind is MessageKind.ALIVE
        said = parse(pb.TransportAlive, word.header)
        assert (said.received, said.paused) == (HEAD.size + len(header), False)
    site.round()
    while (answer := guest.hear()).kind is MessageKind.ALIVE:
        pass
    assert (answer.kind, answer.call) == (MessageKind.ANSWER, 1)
    eventually(lambda: connection._heartbeat._next is None)


@pytest.mark.parametrize("lease", [float("nan"), float("inf"), -1.0, 1e-300, 1e300])
def test_no_lease_makes_a_server_talk_without_end(stack: ExitStack, site: Site, name: str, lease: float) -> None:
    """Whatever a client says: words are few, others are served, and nothing stays of who goes."""
    before = site.open([site.workers[-1].session])
    guest = hand(stack, site, name).welcomed(site.workers[-1].session, site.transports, lease=lease)
    (connection,) = [one for one in site.open([site.workers[-1].session]) if one not in before]
    guest.say(MessageKind.PULL, 1, pulling(site, waits=True))
    eventually(lambda: connection._under_way)
    seconds = connection._heartbeat.seconds
    assert seconds == 0 or seconds >= connection_of.LEAST_WORD_SECONDS
    word = connection._heartbeat._next
    guest.sock.close()
    eventually(lambda: connection._closed)
    assert word is None or word.cancelled() or lease == 1e-300


# ---- Memory that is free again ----


PART = 1 << 16
"""Bytes of a part in these tests."""


class Slowly:
    """A member by hand that puts a push into its memory, part by part. Args: stack: ends it; site: whose last member it
    is."""

    def __init__(self, stack: ExitStack, site: Site) -> None:
        self.hand = member(stack, site, "shm")
        self.header, parts = self.hand.push(site, site.workers[-1], 2)
        self.data = b"".join(data for _, data in parts)
        self.places: list[int] = []

    def send(self, end: int) -> None:
        for offset in range(len(self.places) * PART, end, PART):
            data = self.data[offset : offset + PART]
            self.hand.memory[offset : offset + len(data)] = data
            kind, header = (MessageKind.PART, b"") if self.places else (MessageKind.PUSH, self.header)
            self.hand.say(kind, 1, header, offset, len(data), offset)
            self.places.append(offset)

    def hear(self, count: int) -> list[int]:
        return sorted(self.hand.freed() for _ in range(count))


def test_free_places_wake_the_loop_seldom(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wake costs who computes: they are told many at a time, and none is forgotten."""
    site = Site(stack, "shm", elements=1 << 20, variables=6)
    woken: list[str] = []
    wake = site.thread._loop.call_soon_threadsafe

    def count(call: Callable[..., object], *args: object) -> object:
        woken.append(getattr(call, "__name__", ""))
        return wake(call, *args)  # type: ignore[arg-type]

    guest = Slowly(stack, site)
    monkeypatch.setattr(site.thread._loop, "call_soon_threadsafe", count)
    guest.send(len(guest.data))
    first = site.push(site.workers[0], 1)
    assert guest.hear(len(guest.places)) == guest.places
    site.whole([1, 2], first)
    assert woken.count("_tell_freed") < len(guest.places) // 10


def test_much_that_is_free_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is less waits for the next message."""
    monkeypatch.setattr("psserver.network.client_memory.TELL_SECONDS", 2 * SOON)
    told: list[int] = []

    async def read(*sizes: int) -> None:
        channel: Any = SimpleNamespace(let_go=lambda place, size: size, tell_freed=lambda: told.append(size))
        memory = ClientMemory(memoryview(bytearray(64 << 10)), 64 << 10, lambda: channel)
        for size in sizes:
            memory.read(0, size, 0)
            await asyncio.sleep(0)

    asyncio.run(read(4 << 10, 8 << 10))
    assert told == [8 << 10]


def test_free_places_are_told_with_the_answer(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of their own would wake the client up for what it does not need yet."""
    monkeypatch.setattr("psserver.network.client_memory.TELL_SECONDS", 2 * SOON)
    site = Site(stack, "shm", elements=PART // 4, variables=1)
    guest = Slowly(stack, site)
    for comes_last in (False, False, True, False, True):  # the first round runs beside the event loop
        guest.places.clear()
        if comes_last:
            first = site.push(site.workers[0], 1)
            site.job.arrived(site.workers[0])
        guest.send(len(guest.data))
        if not comes_last:
            first = site.push(site.workers[0], 1)
        assert [guest.hand.next().kind for _ in range(2)] == [MessageKind.FREED, MessageKind.ANSWER]
        site.whole([1, 2], first)
        guest.header = guest.hand.push(site, site.workers[-1], 2)[0]


def test_what_is_free_is_told_while_the_rest_is_held(stack: ExitStack) -> None:
    """Though it is little: a client that has no other room waits for it, and the server for what comes then."""
    site = Site(stack, "shm", elements=1 << 20)
    guest = Slowly(stack, site)
    one = 4 << 20
    guest.send(one + PART)
    first = site.push(site.workers[0], 1)
    free = one // PART
    assert guest.hear(free) == guest.places[:free]
    assert any(one._memory._view.looked_at for one in site.open([site.workers[-1].session]))
    guest.send(len(guest.data))
    assert guest.hear(len(guest.places) - free) == guest.places[free:]
    site.whole([1, 2], first)


# ---- Names in the file system ----


def test_names_of_dead_servers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next server; those of servers that listen, and what is no socket of ours, stay. A server that ends in good
    order takes its own along."""
    monkeypatch.setattr(unix_socket, "SHARED", tmp_path)
    with ExitStack() as stack:
        living = Site(stack, "shm", elements=SMALL)
        dead, other = tmp_path / "paramserver-0123456789abcdef", tmp_path / "paramserver-notes"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(dead))
            sock.listen()
        other.write_text("mine")
        assert dead.exists()
        second = Site(stack, "shm", elements=SMALL)
        found = {path.name for path in tmp_path.iterdir()}
        assert found == {other.name, Path(living.transports.path).name, Path(second.transports.path).name}
        living.round()
        second.round()
    assert [*tmp_path.iterdir()] == [other]


# ---- Many ----


def test_many_clients_cost_no_threads(stack: ExitStack, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of them on one server, each with its round: as many threads serve them as serve two."""
    monkeypatch.setattr(connection_of, "MAX_CONNECTIONS", 64)  # two sessions stand for all
    site = Site(stack, name, elements=SMALL)  # type: ignore[arg-type]
    site.round()
    process = psutil.Process()
    threads, memory = process.num_threads(), process.memory_info().rss
    guests = [hand(stack, site, name).welcomed(site.workers[n % 2].session, site.transports) for n in range(64)]
    for guest, worker in zip(guests, site.workers * 32, strict=True):
        guest.say(MessageKind.PULL, 1, pulling(site, worker=worker))
    assert [guest.hear().kind for guest in guests] == [MessageKind.ANSWER] * 64
    assert process.num_threads() <= threads
    assert (process.memory_info().rss - memory) / 64 < 256 << 10
    site.round()


# ---- Whatever else ----


KINDS = st.one_of(st.sampled_from([*MessageKind]), st.integers(0, 255))
SIZES = st.one_of(st.integers(0, 300), st.sampled_from([MAX_PART_BYTES, MAX_PART_BYTES + 1, 1 << 63]))
PLACES = st.one_of(st.just(INLINE), st.sampled_from([0, 64, 4096, CLIENT_BYTES - 64, CLIENT_BYTES, 1, 1 << 63]))
HEADERS = st.one_of(st.just(b""), st.binary(max_size=40), st.sampled_from(["push", "pull", "wide"]))
SAID = st.tuples(KINDS, st.integers(0, 2), HEADERS, st.sampled_from([0, 16, 64, 256, 1 << 63]), SIZES, PLACES)


@pytest.fixture(scope="module", params=["tcp", "shm"])
def attacked(request: pytest.FixtureRequest) -> Iterator[tuple[str, Site]]:
    """One server for all attacks on a transport; nothing that it does not foresee may reach its event loop."""
    surprises: list[object] = []
    with ExitStack() as stack:
        site = Site(stack, request.param, elements=SMALL)
        site.thread._loop.set_exception_handler(lambda loop, context: surprises.append(context))
        yield request.param, site
    assert not surprises


@search(suppress=(HealthCheck.function_scoped_fixture,))
@given(st.booleans(), st.lists(SAID, min_size=1, max_size=8), st.binary(max_size=64))
def test_whatever_is_sent_others_are_served(
    attacked: tuple[str, Site], known: bool, messages: list[tuple[int, int, bytes | str, int, int, int]], rest: bytes
) -> None:
    """Messages of the right form with any content, by a member or a stranger, and then anything."""
    name, site = attacked
    last = site.workers[-1]
    with Hand(site.transports, name) as guest:
        header, _ = guest.push(site, last, 2)
        wide = pb.PushHeader(session=last.session, generation=1 << 63, round=1 << 62, size=1 << 38).SerializeToString()
        headers = {"push": header, "pull": pulling(site), "wide": wide}
        if known:
            guest.welcomed(last.session, site.transports)
        with suppress(ConnectionError):
            for kind, call, chosen, offset, size, place in messages:
                content = headers[chosen] if isinstance(chosen, str) else chosen
                inline = size if place == INLINE and size <= 300 else 0
                guest.say(kind, call, content, offset, size, place, bytes(inline))
            guest.sock.sendall(rest)
    assert site.server.status().variables == 3
    assert np.isfinite(site.pulled(site.workers[0])).all()
