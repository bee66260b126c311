"""What the core leaves to be done outside of its lock."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier

import pytest

from psserver.effects import settle
from pswire.errors import ServerLost


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads that alternate as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_who_answers_first_is_heard(hasty: None) -> None:
    """A server that ends fails what its threads are about to answer: neither of them is told of the other."""
    futures = [Future[int]() for _ in range(2000)]
    both = Barrier(2)

    def each(error: bool) -> None:
        both.wait()
        for number, future in enumerate(futures):
            settle(future, number, ServerLost("it ends") if error else None)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(each, error) for error in (True, False)]:
            done.result()
    for number, future in enumerate(futures):
        assert future.exception() is not None or future.result() == number


def test_a_caller_that_has_gone_away_is_not_answered() -> None:
    future = Future[int]()
    future.cancel()
    settle(future, 1)
    settle(future, None, ServerLost("it ends"))
    assert future.cancelled()
