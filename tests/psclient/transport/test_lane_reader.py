"""A caller that waits reads the lanes itself, for all threads; between two waits the lanes' own threads do."""

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
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from psclient._src.transport.lane import Lane
from psclient._src.transport.lane_reader import LaneReader
from pswire.api import RoundReply
from pswire.errors import PSError
from pswire.transport.traffic import LaneName
from tests.kit.certificates import Certificates
from tests.kit.lanes import SIZE, Site
from tests.kit.rig import SOON, eventually

SMALL = 64
"""Elements of variables whose rounds are one part."""


@pytest.fixture(params=["tcp", "shm"])
def name(request: pytest.FixtureRequest) -> LaneName:
    """A lane that is no gRPC."""
    return request.param  # type: ignore[no-any-return]


class Waiting:
    """Callers of a reader on a site's lanes.

    Args:
        sites: their members' lanes are read.

    Attributes:
        end: ends all waits.
        reader: the reader.
        pushed: the answer of `then_push`.
    """

    def __init__(self, *sites: Site) -> None:
        self.end: Future[None] = Future()
        self.sites = sites
        self.pushed: list[Future[RoundReply]] = []
        self.reader = LaneReader(self.end)

    def lanes(self) -> list[Lane]:
        """The lanes with calls under way."""
        found = [site.server.lane(worker.session) for site in self.sites for worker in site.workers]
        return [lane for lane in found if lane is not None and lane.waits]

    def taken(self) -> bool:
        """Whether a caller receives on all these lanes now."""
        lanes = self.lanes()
        return bool(lanes) and all(lane._leader is not None for lane in lanes)

    def wait(self, future: Future[Any], seconds: float) -> None:
        """Waits once."""
        self.reader.wait(future, seconds, self.lanes)

    def then_push(self, number: float) -> Callable[[], None]:
        """Has the last member of the first site contribute once a caller receives."""
        self.pushed.clear()
        site = self.sites[0]

        def push() -> None:
            eventually(self.taken)
            self.pushed.append(site.push(site.workers[-1], number))

        return push

    def answer(self, future: Future[Any]) -> Any:
        """Waits for an answer."""
        while not future.done():
            self.wait(future, SOON)
        return future.result()


def pushed(site: Site, *numbers: float) -> list[Future[RoundReply]]:
    """All members of a site contribute."""
    return [site.push(worker, number) for worker, number in zip(site.workers, numbers, strict=True)]


@contextmanager
def beside(*works: Callable[[], object]) -> Iterator[None]:
    """Does some work in other threads meanwhile, and takes what it raises."""
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
        yield
        for future in futures:
            future.result(SOON)


def thread_of(answer: Future[Any]) -> list[str]:
    """The name of the thread that answers, once it has."""
    names: list[str] = []
    answer.add_done_callback(lambda _: names.append(threading.current_thread().name))
    return names


def test_who_waits_receives(stack: ExitStack, name: LaneName) -> None:
    """The answers to all calls, in its own thread, and every time."""
    site, here = Site(stack, name, elements=SMALL), threading.current_thread().name
    waiting = Waiting(site)
    for turn in range(5):
        first = site.push(site.workers[0], 1)
        names = thread_of(first)
        with beside(waiting.then_push(2)):
            waiting.answer(first)
        site.whole([1, 2], first, *waiting.pushed)
        assert names == [here], turn
    assert not any(lane._leader for lane in waiting.lanes())


def test_what_comes_while_nobody_waits_is_handled_at_once(stack: ExitStack, name: LaneName) -> None:
    """Before the first wait, and after one."""
    site = Site(stack, name, elements=SMALL)
    waiting = Waiting(site)
    for _ in range(3):
        first = site.push(site.workers[0], 1)
        names = thread_of(first)  # before the round can be over
        answers = [first, site.push(site.workers[1], 2)]
        eventually(lambda answers=answers: all(answer.done() for answer in answers))
        assert names == [f"lane {name}"]
        site.whole([1, 2], *answers)
        answers = pushed(site, 3, 4)
        for answer in answers:
            waiting.answer(answer)
        site.whole([3, 4], *answers)


def test_large_answers_and_contributions_go_both_ways(stack: ExitStack, name: LaneName) -> None:
    """The caller receives while the lane's thread sends the rest of what it pushed, and both make room."""
    site = Site(stack, name, elements=3 * SIZE, variables=2)
    waiting = Waiting(site)
    answers = pushed(site, 1, 2)
    for answer in answers:
        waiting.answer(answer)
    site.whole([1, 2], *answers)


def test_one_wait_receives_from_several_servers(stack: ExitStack, name: LaneName) -> None:
    """Also the answers that it does not wait for yet."""
    sites = [Site(stack, name, workers=1, elements=SMALL) for _ in range(3)]
    waiting, here = Waiting(*sites), threading.current_thread().name
    late = [site.server.pull(site.workers[0].session, [site.variables[0].id], 0) for site in sites]
    names = [thread_of(answer) for answer in late]
    pushes: list[Future[RoundReply]] = []

    def push() -> None:
        eventually(waiting.taken)
        for site in reversed(sites):  # the one that is waited for comes last
            pushes.append(site.push(site.workers[0], 1))

    with beside(push):
        waiting.answer(late[0])
    for site, answer, answered, found in zip(sites, reversed(pushes), late, names, strict=True):
        waiting.answer(answered)
        waiting.answer(answer)
        site.whole([1], answer)
        assert found == [here] or site is not sites[0]


def test_a_caller_that_waits_serves_the_others(stack: ExitStack, name: LaneName) -> None:
    """Those that wait beside it, and those whose answer comes when it has gone."""
    site = Site(stack, name, elements=SMALL)
    waiting = Waiting(site)
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


def test_a_lane_that_breaks_while_it_is_read_is_opened_anew(stack: ExitStack, name: LaneName) -> None:
    """What was under way on it is sent again, and the caller waits for that."""
    site = Site(stack, name, elements=SMALL)
    waiting = Waiting(site)
    first = site.push(site.workers[0], 1)
    broken = site.lane(site.workers[0])

    def breaks() -> None:
        eventually(waiting.taken)
        broken._sock.shutdown(socket.SHUT_RDWR)
        eventually(lambda: site.lane(site.workers[0]) is not broken)

    with beside(breaks):
        waiting.wait(first, 1.0)
    second = site.push(site.workers[1], 2)
    waiting.answer(first)
    waiting.answer(second)
    site.whole([1, 2], first, second)
    eventually(lambda: broken._over)
    site.round()


def test_a_lane_that_is_closed_while_it_is_read_is_let_go(stack: ExitStack, name: LaneName) -> None:
    """By whoever closes it: its caller is woken, and its thread ends."""
    site = Site(stack, name, elements=SMALL)
    waiting = Waiting(site)
    answer = site.push(site.workers[0], 1)
    lane = site.lane(site.workers[0])

    def close() -> None:
        eventually(waiting.taken)
        site.server.fail(PSError("it is over"))

    with beside(close), pytest.raises(PSError, match="it is over"):
        waiting.answer(answer)
    eventually(lambda: lane._over and lane._events.closed and lane._sock.fileno() < 0)


def test_the_end_of_all_waits_is_told_at_once(stack: ExitStack, name: LaneName) -> None:
    """Though nothing comes on the lane; and it receives by its own thread again."""
    site = Site(stack, name, elements=SMALL)
    waiting = Waiting(site)
    answer = site.push(site.workers[0], 1)

    def end() -> None:
        eventually(waiting.taken)
        waiting.end.set_result(None)

    with beside(end):
        waiting.wait(answer, SOON)
    assert not answer.done()
    site.whole([1, 2], answer, site.push(site.workers[1], 2))


def test_a_wait_ends_in_time(stack: ExitStack, name: LaneName) -> None:
    """Whether it receives, or another caller does."""
    site = Site(stack, name, elements=SMALL)
    waiting = Waiting(site)
    answer = site.push(site.workers[0], 1)
    began = time.monotonic()
    waiting.wait(answer, 0.05)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(waiting.answer, answer)
        eventually(waiting.taken)
        waiting.wait(answer, 0.05)
        assert 0.1 <= time.monotonic() - began < SOON / 2
        assert not answer.done()
        site.whole([1, 2], answer, site.push(site.workers[1], 2))


def test_an_answer_that_another_thread_brings_wakes_the_caller(stack: ExitStack, name: LaneName) -> None:
    """One that comes over gRPC, for example."""
    site = Site(stack, name, elements=SMALL)
    waiting = Waiting(site)
    pending, other = site.push(site.workers[0], 1), Future[int]()

    def answer() -> None:
        eventually(waiting.taken)
        other.set_result(5)

    with beside(answer):
        assert waiting.answer(other) == 5
    site.whole([1, 2], pending, site.push(site.workers[1], 2))


def test_a_reader_is_gone_with_its_last_user() -> None:
    """Without the garbage collector: a session that is over, and all that it holds, would stay until that comes."""
    end: Future[None] = Future()
    reader = LaneReader(end)
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
def interrupt() -> Iterator[int]:
    """A signal whose handler raises `Interrupted`."""

    def handle(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_a_caller_that_is_interrupted_gives_the_lane_back(stack: ExitStack, name: LaneName, interrupt: int) -> None:
    """What it has waited for still comes, on the same lane."""
    site = Site(stack, name, elements=SMALL)
    waiting = Waiting(site)
    answer = site.push(site.workers[0], 1)
    lane = site.lane(site.workers[0])

    def signalled() -> None:
        eventually(waiting.taken)
        os.kill(os.getpid(), interrupt)

    with beside(signalled), pytest.raises(Interrupted):
        waiting.answer(answer)
    site.whole([1, 2], answer, site.push(site.workers[1], 2))
    assert site.lane(site.workers[0]) is lane


def test_an_interrupt_while_it_is_read_breaks_the_lane(
    stack: ExitStack, name: LaneName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how far it was read: what is under way is sent again, and no thread waits in vain."""
    site = Site(stack, name, elements=SMALL)
    waiting = Waiting(site)
    answer = site.push(site.workers[0], 1)
    lane = site.lane(site.workers[0])
    handle = Lane._handle
    failed: list[bool] = []

    def handled(self: Lane, message: object) -> None:
        if self is lane and not failed and threading.current_thread() is threading.main_thread():
            failed.append(True)
            raise Interrupted
        handle(self, message)  # type: ignore[arg-type]

    monkeypatch.setattr(Lane, "_handle", handled)
    with beside(waiting.then_push(2)), pytest.raises(Interrupted):
        waiting.answer(answer)
    assert lane.lost
    site.whole([1, 2], answer, *waiting.pushed)
    site.round()


def test_a_fork_leaves_its_parent_alone(stack: ExitStack, name: LaneName) -> None:
    """It is made while a caller receives; what it has of the lane is gone with it."""
    site = Site(stack, name, elements=SMALL)
    waiting = Waiting(site)
    answer = site.push(site.workers[0], 1)

    def fork() -> None:
        eventually(waiting.taken)
        child = os.fork()
        if not child:
            os._exit(0 if site.lane(site.workers[0]).lost else 1)
        assert os.waitpid(child, 0)[1] == 0
        waiting.then_push(2)()

    with beside(fork):
        waiting.answer(answer)
    site.whole([1, 2], answer, *waiting.pushed)


def test_an_encrypted_lane_is_read_whole(stack: ExitStack, certificates: Certificates) -> None:
    """Nothing stays behind within TLS that no socket tells of."""
    everybody = certificates.signed(["chief-0.paramserver", "worker-0.paramserver"], -1, 1)
    site = Site(stack, "tcp", workers=1, elements=SIZE, shown=(certificates.of("ps-0"), everybody))
    waiting = Waiting(site)
    for turn in range(6):
        answer = site.push(site.workers[0], 1)
        if turn % 2:
            waiting.answer(answer)
        site.whole([1], answer)
