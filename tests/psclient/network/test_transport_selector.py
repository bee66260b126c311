"""A client's transports: which one is used and why, what becomes of calls on one that breaks, and what is left of
it."""

from __future__ import annotations

import gc
import logging
import os
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from psclient._src.network import transport as client_transport
from psclient._src.network import transport_selector as client_transports
from psclient._src.network.transport import Offer, Transport, TransportLost
from pswire.errors import Fenced, PSError, ServerLost
from pswire.network.sockets import HEAD, MessageKind
from pswire.network.traffic import TRANSPORTS, Traffic, TransportName
from tests.kit.rig import SOON, WORKERS
from tests.kit.strategies import refused
from tests.kit.transports import SIZE, SMALL, Proxy, Site, connecting, eventually, files, gone, held, mappings, threads


@pytest.fixture
def others():
    """Threads of transports that are not the test's."""
    return threads()


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "psclient.transports")
    return caplog


# ---- Which one ----


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_transport_that_is_wanted_is_used(stack, said, transport):
    """And said, once for each member."""
    site = Site(stack, transport, elements=SMALL)
    for _ in range(3):
        site.round()
    assert names(site) == [transport] * 2
    assert said.messages == [f"{transport} transport to {site.core.task}"] * 2


def nobody_listens(site_transports: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        site_transports.port = gone.getsockname()[1]


ELSEWHERE = f"{tempfile.gettempdir()}/of-another-file-system"
NOT_OFFERED = "transport to /job:ps/task:0: the server does not offer it"
SHARED = "do server and client share /dev/shm?"
REFUSED: dict[str, tuple[TransportName, Callable[[Any], object], str, str]] = {
    "no path": ("shm", lambda of: setattr(of, "path", ""), "tcp", f"no shm {NOT_OFFERED}"),
    "a path that is not here": ("shm", lambda of: setattr(of, "path", ELSEWHERE), "tcp", SHARED),
    "no port": ("tcp", lambda of: setattr(of, "port", 0), "grpc", f"no tcp {NOT_OFFERED}"),
    "a port that nobody listens at": ("tcp", nobody_listens, "grpc", "cannot be reached"),
}


def names(site: Site) -> list[str]:
    used = [site.transport(worker) for worker in site.workers]
    return [transport.name if transport else "grpc" for transport in used]


@pytest.mark.parametrize("case", REFUSED)
def test_a_transport_that_cannot_be_had(stack, said, case):
    """The next is used, and one line says why."""
    transport, between, otherwise, why = REFUSED[case]
    site = Site(stack, transport, elements=SMALL, between=between)
    site.round()
    assert names(site)[0] == otherwise
    assert len([line for line in said.messages if why in line]) == 2  # one for each member
    assert len(said.messages) == 4


def silent(stack: ExitStack, name: TransportName) -> socket.socket:
    if name == "tcp":
        return stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(f"{stack.enter_context(tempfile.TemporaryDirectory())}/silent")
    listener.listen()
    return listener


TIMES = 4
"""Attempts of which each would leave a file: gRPC may have been without its two when they were counted."""


def test_who_does_not_welcome_is_not_waited_for(stack, name, monkeypatch):
    """Something that only listens is no server; a server refuses a wrong token at once. Nothing is left of either."""
    listener, site = silent(stack, name), Site(stack, "grpc", elements=SMALL)
    address, before = listener.getsockname(), held()
    with monkeypatch.context() as patch:
        patch.setattr(client_transport, "CONNECT_SECONDS", 0.1)
        offer = Offer(1, b"token", "127.0.0.1", address[1] if name == "tcp" else 0, address if name == "shm" else "")
        for _ in range(TIMES):
            assert any(word in why_not(name, offer) for word in ("answer", "cannot be used"))
    monkeypatch.setattr(client_transport, "CONNECT_SECONDS", SOON)
    began = time.monotonic()
    for _ in range(TIMES):
        assert why_not(name, Offer(1, b"wrong", "127.0.0.1", site.transports.port, site.transports.path))
    assert time.monotonic() - began < SOON / 2
    eventually(lambda: gone(before, TIMES - 1))


def why_not(name: TransportName, offer: Offer) -> str:
    """Why a transport cannot be opened."""
    try:
        Transport(name, offer, 10.0, Traffic())
    except TransportLost as error:
        return str(error)
    return ""


# ---- One that breaks ----


def proxied(stack: ExitStack, name: TransportName, **more: Any) -> tuple[Site, Proxy]:
    proxies: list[Proxy] = []
    site = Site(stack, name, between=lambda transports: proxies.append(Proxy(stack, transports, name)), **more)
    return site, proxies[0]


@pytest.mark.parametrize(
    ("breaks", "rounds", "left"),
    [
        (client_transports.LOSSES, 1, False),
        (client_transports.LOSSES + 2, 1, True),
        (client_transports.LOSSES + 2, 2, False),
    ],
    ids=["between rounds", "again and again", "after it has served for a while"],
)
def test_a_transport_that_breaks_is_opened_again_or_left(stack, name, said, monkeypatch, breaks, rounds, left):
    """The next round does not see it. One that breaks too often is left for the next, with a line that says why; one
    that has served for a while may break as often as a new one. No contribution counts twice."""
    if rounds == 2:
        monkeypatch.setattr(client_transports, "FORGIVEN", 2)
    site, proxy = proxied(stack, name, elements=SMALL)
    for _ in range(breaks):
        for _ in range(rounds):
            site.round()
        used = map(site.transport, site.workers)
        lost = [transport for transport in used if transport is not None and transport.name == name]
        proxy.cut()
        eventually(lambda lost=lost: all(transport._why for transport in lost))
    site.round()
    assert names(site) == [TRANSPORTS[TRANSPORTS.index(name) + 1] if left else name] * 2
    assert said.messages.count(f"no {name} transport to {site.core.task}: it breaks repeatedly") == 2 * left


def test_a_transport_that_could_not_be_opened_is_tried_again(stack, others, name, said, monkeypatch):
    """Some calls later, and again; rounds are made meanwhile, however long that takes. A line says that it is used
    again."""
    monkeypatch.setattr(client_transports, "AGAIN", 8)
    site = Site(stack, name, elements=SMALL)
    answers, tried, go = threading.Event(), threading.Event(), threading.Event()

    def slowly(sock: socket.socket) -> socket.socket:
        if sock.family == (socket.AF_UNIX if name == "shm" else socket.AF_INET):
            if not answers.is_set():
                sock.close()
                raise ConnectionRefusedError("not now")
            tried.set()
            assert go.wait(SOON)
        return sock

    def rounds() -> None:
        for _ in range(20):
            began = time.monotonic()
            site.round()
            assert time.monotonic() - began < SOON / 2

    stack.callback(connecting(slowly))
    for each in site.workers:
        site.transport(each)._sock.shutdown(socket.SHUT_RDWR)
    rounds()
    assert names(site)[0] == TRANSPORTS[TRANSPORTS.index(name) + 1]
    assert len([line for line in said.messages if "cannot be" in line]) == 2
    answers.set()
    eventually(lambda: (site.round(), tried.is_set())[1])
    rounds()
    said.clear()
    go.set()
    eventually(lambda: (site.round(), names(site) == [name] * 2)[1])
    eventually(lambda: said.messages == [f"{name} transport to {site.core.task}"] * 2)  # once it is in use
    eventually(lambda: len(threads() - others) == 2)


def test_a_transport_breaks_once_for_all_calls_on_it(stack, name):
    """Many calls under way when it breaks: each goes on, on one new transport, and one loss is counted."""
    site, proxy = proxied(stack, name, elements=SMALL)
    reader = site.workers[0]
    ids = [variable.id for variable in site.variables]
    calls = [site.server.pull(reader.session, ids, reader.round) for _ in range(50)]
    before = proxy.count
    site.transport(reader)._sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: proxy.count == before + 1)
    site.round()
    for call in calls:
        assert (call.result(SOON).payload.tensors([v.spec.tensor for v in site.variables])[0] == 3.0).all()
    assert proxy.count == before + 1
    assert site.server._transports[reader.session]._losses == 1


def test_what_the_server_refuses_does_not_break_the_transport(stack, name):
    """An error of the server's is the call's answer, in the middle of a large push too."""
    site = Site(stack, name)
    here, other = site.workers
    transport = site.transport(other)
    site.job.close([here.member])
    refused(Fenced, "", lambda: site.push(other, 1).result(SOON))
    assert site.transport(other) is transport
    assert transport._why is None
    assert not transport._channel._streams


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_answer_holds_nothing_of_what_was_sent(stack, transport):
    """Its memory serves the next round, though nobody has looked at the answer of this one."""
    site = Site(stack, transport, workers=1, elements=SMALL)
    payload = site.payload(1)
    sent, answer = weakref.ref(payload), site.server.push(site.said(site.workers[0]), payload)
    del payload
    site.whole([1], answer)
    eventually(lambda: sent() is None)


def test_nonsense_of_a_server_is_no_answer(stack, name):
    """The transport is left, and the call is made on another: nobody waits for what cannot come."""
    site = Site(stack, name, elements=SMALL)
    worker = site.workers[0]
    connection = next(c for c in site.transports.connections if c.session == worker.session)
    late = site.server.pull(worker.session, [site.variables[0].id], worker.round)
    first = site.transport(worker)
    (call,) = first._calls
    connection.sock.send(HEAD.pack(MessageKind.ANSWER, 3, call, 0, 0, 0) + b"\xff\xff\xff")
    site.round()
    assert late.result(SOON).round == 0
    assert site.transport(worker) is not first


def test_a_fault_of_ours_in_the_receiver_lets_nobody_wait(stack, name, monkeypatch):
    """Whatever ends its thread: its calls go another way."""
    site = Site(stack, name, elements=SMALL)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    transport = site.transport(site.workers[0])
    monkeypatch.setattr(transport, "_handle", lambda message: 1 / 0)
    site.round()
    assert transport._why is not None


# ---- The end ----


def test_close_leaves_nothing(stack, others, name):
    """No thread, no file, no mapping; also where a transport has broken before."""
    site = Site(stack, "grpc", elements=SIZE)
    site.round()
    gc.collect()
    before = files(), mappings()
    for _ in range(2):
        server = site.connect(name)
        site.job.end(WORKERS[-1])
        session = server.open(WORKERS[-1], 1, 0, False).session
        for _ in range(2):
            assert server.pull(session, [site.variables[0].id], -1).result(SOON).payload.whole
            transport = server._transports[session].best()
            transport._sock.shutdown(socket.SHUT_RDWR)
        del transport
        server.close()
    del server
    own = name == "shm"  # the server's memory, which it keeps: a file, and a mapping, which has another
    eventually(lambda: threads() <= others)
    eventually(lambda: gc.collect() >= 0 and files() <= before[0] + 2 * own)
    eventually(lambda: gc.collect() >= 0 and mappings() <= before[1] + own)


def test_values_outlive_what_brought_them(stack, others, name):
    """They stay what they were after their transport has ended, though the server goes on, which forgets the client
    once nobody looks at them; and after the server has."""
    with ExitStack() as inner:
        site = Site(inner, name, elements=SIZE)
        site.round()
        guest = site.connect(name)
        session = guest.open(WORKERS[-1], 1, 0, False).session
        spec = site.variables[0].spec.tensor
        value = guest.pull(session, [site.variables[0].id], -1).result(SOON).payload.tensors([spec])[0]
        guest.close()
        eventually(lambda: len(threads() - others) == 2)
        del guest
        gc.collect()
        for _ in range(3):
            site.round()
        assert (value == 3.0).all()
        del value
        eventually(lambda: gc.collect() >= 0 and not site.open([session]))
        value = site.pulled(site.workers[0])
    gc.collect()
    assert (value == 12.0).all()


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("how", ["closed", "stopped"])
def test_an_end_is_not_waited_for(stack, name, large, how):
    """Of the connection, or of the server: whoever waits on a transport is told at once, and not after a lease."""
    site = Site(stack, name, elements=SIZE if large else SMALL)
    waiting: list[Future[object]] = [site.push(site.workers[0], 1)]
    waiting.append(site.server.pull(site.workers[1].session, [site.variables[0].id], 5))
    error, said = (PSError, "it is over") if how == "closed" else (ServerLost, "was stopped")
    if how == "closed":
        site.server.fail(PSError("it is over"))
    else:
        site.job.arrived(site.workers[0])
        site.thread.stop()
    for call in waiting:
        refused(error, said, lambda call=call: call.result(SOON))
    if how == "closed":
        refused(PSError, "it is over", lambda: site.push(site.workers[0], 1))


def test_an_end_while_a_transport_is_opened(stack, others, name):
    """It is not used, and closed when it is there."""
    site = Site(stack, name, elements=SMALL)
    arrived, go = threading.Event(), threading.Event()

    def slowly(sock: socket.socket) -> socket.socket:
        arrived.set()
        assert go.wait(SOON)
        return sock

    stack.callback(connecting(slowly))
    worker = site.workers[0]
    waiting = site.server.pull(worker.session, [site.variables[0].id], worker.round)
    site.transport(worker)._sock.shutdown(socket.SHUT_RDWR)
    assert arrived.wait(SOON)
    site.server.fail(PSError("it is over"))
    go.set()
    refused(PSError, "it is over", lambda: waiting.result(SOON))
    eventually(lambda: threads() <= others)


def test_a_session_that_is_opened_again_has_one_transport(stack, others, name):
    site = Site(stack, name, elements=SMALL)
    key = 77
    session = site.server.open(WORKERS[-1], 1, key, False).session
    first = site.server._transports[session].best()
    assert site.server.open(WORKERS[-1], 1, key, False).session == session
    assert first._why is not None
    eventually(lambda: len(threads() - others) == 3)
    site.round()


def test_a_transport_that_is_let_go_while_it_ends_is_gone(stack, monkeypatch):
    """Its thread finds that somebody looks at its memory, and before it can say so nobody does."""
    site = Site(stack, "shm", elements=SMALL)
    transport = site.transport(site.workers[0])
    mirror = transport._mirror

    class Late:
        """A mirror of which the last place is let go of by another thread when it has just been asked."""

        asked = False

        @property
        def looked_at(self) -> bool:
            first, self.asked = not self.asked, True
            if first:
                transport._leave()
            return first

        def __getattr__(self, name: str) -> object:
            return getattr(mirror, name)

    transport._mirror = Late()
    transport.close("it is over")
    eventually(lambda: transport._sock.fileno() < 0)
    assert transport not in client_transport._LINGERING


# ---- The server's memory ----


def test_free_memory_is_told(stack, monkeypatch):
    """With the next call, as a message of its own would wake the server up for what it does not need yet; where none
    comes a moment later, since all clients of a server share what it has; much of it at once."""

    def told_of() -> bool:
        gc.collect()
        return not site.transports.outbox()[0]._entries

    site = Site(stack, "shm", workers=1, elements=SIZE, variables=1)
    for _ in range(2):
        site.round()
        eventually(told_of)
    monkeypatch.setattr(client_transport, "TELL_SECONDS", 2 * SOON)
    site = Site(stack, "shm", workers=1, elements=SIZE, variables=1)
    for _ in range(3):
        site.round()
        gc.collect()
        assert site.transport(site.workers[0])._channel.untold == 4 * SIZE
        assert len(site.transports.outbox()[0]._entries) == 1  # of this round; the one before is told of
    monkeypatch.setattr(client_transport, "ENOUGH", 1 << 30)
    site = Site(stack, "shm", workers=1, elements=SIZE, variables=1)
    site.round()
    eventually(told_of)


# ---- Forks ----


class Forked:
    """A fork that looks at something, and says whether it is as it should be, each time that it is told to."""

    def __init__(self, stack: ExitStack, look: Callable[[], bool]) -> None:
        self._sock, theirs = socket.socketpair()
        self._child = os.fork()
        if not self._child:
            try:
                self._sock.close()
                while theirs.recv(1) == b"?":
                    theirs.send(b"+" if look() else b"-")
            finally:
                os._exit(0)
        theirs.close()
        self._sock.settimeout(SOON)
        stack.callback(self.end)

    def looks(self) -> bool:
        """What it sees when it looks."""
        self._sock.send(b"?")
        return self._sock.recv(1) == b"+"

    def end(self) -> None:
        """Has it end, and waits until it is gone: what it may look at is asked for when the next answer comes."""
        if self._child:
            with suppress(OSError):  # it has failed
                self._sock.send(b".")  # others have its socket, too: closing would not tell it
            self._sock.close()
            os.waitpid(self._child, 0)
            self._child = 0


def test_a_fork_may_look_at_what_was_read_before(stack, name):
    """It stays what it was, though the process goes on and does not look at it any more."""
    site = Site(stack, name, elements=SIZE)
    site.round()
    values = [site.pulled(site.workers[0])]
    fork = Forked(stack, lambda: bool((values[0] == 3.0).all()))
    assert fork.looks()
    values.clear()
    for _ in range(3):
        site.round()
        values = [site.pulled(site.workers[0])]
    assert (values[0] == 12.0).all()
    assert fork.looks()


def test_a_fork_neither_holds_a_transport_nor_breaks_it(stack, name):
    """When its parent goes the server sees it go, whatever the fork does."""
    site = Site(stack, name, elements=SMALL)
    site.round()
    transports = client_transport._TRANSPORTS
    fork = Forked(stack, lambda: all(each._why and each._sock.fileno() < 0 for each in transports))
    assert fork.looks()
    site.round()
    assert len(site.transports.connections) == 2
    site.server.close()
    eventually(lambda: not site.transports.connections)
    assert fork.looks()


def test_forks_that_overlap_hold_no_more_than_each_looks_at(stack):
    """There is always one; what a fork that is gone looked at is not held by those that came after it, and nothing is
    held when the last one is gone, though this process never waits for it."""
    site = Site(stack, "shm", elements=SIZE)
    ring, _ = site.transports.outbox()
    before: list[Forked] = []
    for _ in range(4):
        site.round()
        value = site.pulled(site.workers[0])
        fork = Forked(stack, lambda value=value, first=float(value[0]): bool((value == first).all()))
        del value
        for old in before:
            old.end()
        before = [fork]
        for _ in range(3):
            site.round()
        eventually(lambda: len(ring._entries) == 1)
        assert fork.looks()
    fork.end()
    site.round()
    eventually(lambda: not (ring._entries or site.transport(site.workers[0])._mirror.looked_at))
