"""A caller that waits reads the transports itself, for all threads; between two waits the transports' own threads
do."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from psclient._src.network.transport import Transport
from psclient._src.network.transport_reader import TransportReader
from pswire.api import RoundReply
from pswire.errors import PSError
from tests.kit.rig import SOON, eventually
from tests.kit.transports import SIZE, SMALL, Site


class Waiting:
    """Callers of a reader on the transports of some sites' members, until `end` is set."""

    def __init__(self, *sites: Site) -> None:
        self.end: Future[None] = Future()
        self.sites, self.site = sites, sites[0]
        self.pushed: list[Future[RoundReply]] = []
        self.reader = TransportReader(self.end)

    def transports(self) -> list[Transport]:
        """The transports with calls under way."""
        found = [site.server.transport(worker.session) for site in self.sites for worker in site.workers]
        return [transport for transport in found if transport is not None and transport.waits]

    def taken(self) -> bool:
        """Whether a caller receives on all these transports now."""
        transports = self.transports()
        return bool(transports) and all(transport._leader is not None for transport in transports)

    def wait(self, future: Future[Any], seconds: float) -> None:
        self.reader.wait(future, seconds, self.transports)

    @contextmanager
    def once_taken(self, work: Callable[[], object]) -> Iterator[None]:
        """Does some work in another thread once a caller receives, and takes what it raises."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(lambda: (eventually(self.taken), work()))
            yield
            done.result(SOON)

    def push_once_taken(self, number: float) -> Any:
        """Has the last member of the first site contribute once a caller receives."""
        self.pushed.clear()
        return self.once_taken(lambda: self.pushed.append(self.site.push(self.site.workers[-1], number)))

    def answer(self, future: Future[Any]) -> Any:
        while not future.done():
            self.wait(future, SOON)
        return future.result()


@pytest.fixture
def waiting(stack, name):
    return Waiting(Site(stack, name, elements=SMALL))


def pushed(site: Site, *numbers: float) -> list[Future[RoundReply]]:
    return [site.push(worker, number) for worker, number in zip(site.workers, numbers, strict=True)]


def thread_of(answer: Future[Any]) -> list[str]:
    """The name of the thread that answers, once it has."""
    names: list[str] = []
    answer.add_done_callback(lambda _: names.append(threading.current_thread().name))
    return names


def test_who_waits_receives(waiting):
    """The answers to all calls, in its own thread, and every time."""
    site, here = waiting.site, threading.current_thread().name
    for turn in range(5):
        first = site.push(site.workers[0], 1)
        names = thread_of(first)
        with waiting.push_once_taken(2):
            waiting.answer(first)
        site.whole([1, 2], first, *waiting.pushed)
        assert names == [here], turn
    assert not any(transport._leader for transport in waiting.transports())


def test_what_comes_while_nobody_waits_is_handled_at_once(waiting, name):
    """Before the first wait, and after one."""
    site = waiting.site
    for _ in range(3):
        first = site.push(site.workers[0], 1)
        names = thread_of(first)  # before the round can be over
        answers = [first, site.push(site.workers[1], 2)]
        eventually(lambda answers=answers: all(answer.done() for answer in answers))
        assert names == [f"transport {name}"]
        site.whole([1, 2], *answers)
        answers = pushed(site, 3, 4)
        for answer in answers:
            waiting.answer(answer)
        site.whole([3, 4], *answers)


def test_a_caller_that_takes_over_is_waited_for(waiting, monkeypatch):
    """The transport's own thread does not look again and again while a caller that is about to receive has not said so:
    on a busy machine it would keep the processor from that caller."""
    site, turns = waiting.site, list[None]()
    own = Transport._turn
    monkeypatch.setattr(Transport, "_turn", lambda transport: (turns.append(None), own(transport)))
    first = site.push(site.workers[0], 1)
    transport = site.server.transport(site.workers[0].session)
    with transport._heeding:
        assert transport._reading.acquire(timeout=SOON)
        answers = [first, site.push(site.workers[1], 2)]
        eventually(answers[1].done)  # the first one's is there as well
        turns.clear()
        time.sleep(0.1)
        assert len(turns) <= 2
        transport._reading.release()
    site.whole([1, 2], *answers)


def test_one_wait_receives_from_several_servers(stack, name):
    sites = [Site(stack, name, workers=1, elements=SMALL) for _ in range(3)]
    waiting, here = Waiting(*sites), threading.current_thread().name
    late = [site.server.pull(site.workers[0].session, [site.variables[0].id], 0) for site in sites]
    names = [thread_of(answer) for answer in late]
    pushes: list[Future[RoundReply]] = []

    # The one that is waited for comes last.
    with waiting.once_taken(lambda: pushes.extend(site.push(site.workers[0], 1) for site in reversed(sites))):
        waiting.answer(late[0])
    for site, answer, answered, found in zip(sites, reversed(pushes), late, names, strict=True):
        waiting.answer(answered)
        waiting.answer(answer)
        site.whole([1], answer)
        assert found == [here] or site is not sites[0]


def test_a_caller_that_waits_serves_the_others(waiting):
    """Those that wait beside it, and those whose answer comes when it has gone."""
    site = waiting.site
    with ThreadPoolExecutor(3) as pool:
        slow = site.server.pull(site.workers[0].session, [site.variables[0].id], 0)
        leads = pool.submit(waiting.answer, slow)
        eventually(waiting.taken)
        quick = [site.server.pull(worker.session, [site.variables[0].id], -1) for worker in site.workers]
        follow = [pool.submit(waiting.answer, each) for each in quick]
        assert [each.result(SOON).round for each in follow] == [-1, -1]
        assert not leads.done()
        answers = pushed(site, 1, 2)
        assert leads.result(SOON).round == 0
        site.whole([1, 2], *answers)


def test_a_transport_that_breaks_while_it_is_read_is_opened_anew(waiting):
    """What was under way on it is sent again, and the caller waits for that."""
    site = waiting.site
    first = site.push(site.workers[0], 1)
    broken = site.transport(site.workers[0])

    def breaks():
        broken._sock.shutdown(socket.SHUT_RDWR)
        eventually(lambda: site.transport(site.workers[0]) is not broken)

    with waiting.once_taken(breaks):
        waiting.wait(first, 1.0)
    second = site.push(site.workers[1], 2)
    waiting.answer(first)
    waiting.answer(second)
    site.whole([1, 2], first, second)
    eventually(lambda: broken._over)
    site.round()


def test_a_transport_that_is_closed_while_it_is_read_is_let_go(waiting):
    """By whoever closes it: its caller is woken, and its thread ends."""
    site = waiting.site
    answer = site.push(site.workers[0], 1)
    transport = site.transport(site.workers[0])
    fails = waiting.once_taken(lambda: site.server.fail(PSError("it is over")))
    with fails, pytest.raises(PSError, match="it is over"):
        waiting.answer(answer)
    eventually(lambda: transport._over and transport._events.closed and transport._sock.fileno() < 0)


def test_what_ends_a_wait(waiting):
    """Its time, beside another wait too; an answer that another thread brings; the end of all waits, though nothing
    comes on the transport, which its own thread reads again."""
    site, other = waiting.site, Future[int]()
    answer = site.push(site.workers[0], 1)
    began = time.monotonic()
    waiting.wait(answer, 0.05)
    with ThreadPoolExecutor(1) as pool:
        longer = pool.submit(waiting.wait, other, SOON)
        eventually(waiting.taken)
        waiting.wait(answer, 0.05)
        assert 0.1 <= time.monotonic() - began < SOON / 2
        other.set_result(5)
        longer.result(SOON / 2)
    with waiting.once_taken(lambda: waiting.end.set_result(None)):
        waiting.wait(answer, SOON)
    assert not answer.done()
    site.whole([1, 2], answer, site.push(site.workers[1], 2))


def test_a_reader_is_gone_with_its_last_user():
    """Without the garbage collector: a session that is over, and all that it holds, would stay until that comes."""
    end: Future[None] = Future()
    reader = TransportReader(end)
    gone = weakref.ref(reader)
    gc.disable()
    try:
        del reader
        assert gone() is None
        end.set_result(None)
    finally:
        gc.enable()


class Interrupted(BaseException):
    """What a signal's handler raises."""


@pytest.fixture
def interrupt():
    """A signal whose handler raises `Interrupted`."""

    def handle(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_a_caller_that_is_interrupted_gives_the_transport_back(waiting, interrupt):
    """What it has waited for still comes, on the same transport."""
    site = waiting.site
    answer = site.push(site.workers[0], 1)
    transport = site.transport(site.workers[0])
    with waiting.once_taken(lambda: os.kill(os.getpid(), interrupt)), pytest.raises(Interrupted):
        waiting.answer(answer)
    site.whole([1, 2], answer, site.push(site.workers[1], 2))
    assert site.transport(site.workers[0]) is transport


def test_an_interrupt_while_it_is_read_breaks_the_transport(waiting, monkeypatch):
    """Nobody knows how far it was read: what is under way is sent again, and no thread waits in vain."""
    site = waiting.site
    answer = site.push(site.workers[0], 1)
    transport = site.transport(site.workers[0])
    handle = Transport._handle
    failed: list[bool] = []

    def handled(self: Transport, message: object) -> None:
        if self is transport and not failed and threading.current_thread() is threading.main_thread():
            failed.append(True)
            raise Interrupted
        handle(self, message)

    monkeypatch.setattr(Transport, "_handle", handled)
    with waiting.push_once_taken(2), pytest.raises(Interrupted):
        waiting.answer(answer)
    assert transport.lost
    site.whole([1, 2], answer, *waiting.pushed)
    site.round()


def test_a_fork_leaves_its_parent_alone(waiting):
    """It is made while a caller receives; what it has of the transport is gone with it."""
    site = waiting.site
    answer = site.push(site.workers[0], 1)

    def fork():
        child = os.fork()
        if not child:
            os._exit(0 if site.transport(site.workers[0]).lost else 1)
        assert os.waitpid(child, 0)[1] == 0
        waiting.pushed.append(site.push(site.workers[1], 2))

    with waiting.once_taken(fork):
        waiting.answer(answer)
    site.whole([1, 2], answer, *waiting.pushed)


def test_an_encrypted_transport_is_read_whole(stack, certificates):
    """Nothing stays behind within TLS that no socket tells of."""
    everybody = certificates.signed(["chief-0.paramserver", "worker-0.paramserver"], -1, 1)
    site = Site(stack, "tcp", workers=1, elements=SIZE, shown=(certificates.of("ps-0"), everybody))
    waiting = Waiting(site)
    for turn in range(6):
        answer = site.push(site.workers[0], 1)
        if turn % 2:
            waiting.answer(answer)
        site.whole([1], answer)
