"""Answers of calls: as the futures of the standard library, whoever waits and whoever answers."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import FIRST_COMPLETED, InvalidStateError, ThreadPoolExecutor, wait

import pytest

from pswire.network.futures import LeanFuture, follow, settle

SOON = 60.0


@pytest.mark.parametrize("fails", [False, True], ids=["a result", "an error"])
def test_who_waits_gets_the_answer(fails: bool) -> None:
    """Whether it waits by itself or with `wait`, before or after the answer is there; and callbacks come once."""
    future, calls = LeanFuture[int](), list[bool]()
    future.add_done_callback(lambda done: calls.append(done.done()))
    assert not future.done()
    assert not future.cancel()
    with pytest.raises(TimeoutError):
        future.result(0.01)
    with ThreadPoolExecutor(2) as pool:
        alone = pool.submit(future.exception, SOON)
        beside = pool.submit(wait, [future, LeanFuture[int]()], SOON, FIRST_COMPLETED)
        assert not wait([alone, beside], 0.05, FIRST_COMPLETED).done
        error = ValueError("no")
        settle(future, lambda: 1 // 0) if fails else future.set_result(7)
    assert isinstance(alone.result(), ZeroDivisionError if fails else type(None))
    future.add_done_callback(lambda done: calls.append(done.done()))
    assert calls == [True, True]
    assert not future.cancelled()
    other = LeanFuture[int]()
    follow(other, future)
    if fails:
        with pytest.raises(ZeroDivisionError):
            other.result()
    else:
        assert other.result() == future.result() == 7
    with pytest.raises(InvalidStateError):
        future.set_exception(error)


def test_threads_that_answer_and_wait_at_once_miss_nothing() -> None:
    """Two threads answer, of which one is refused; one waits and one adds callbacks, and each gets the answer once."""
    refused, seen, called = list[int](), list[int](), list[int]()
    count = 300
    futures = [LeanFuture[int]() for _ in range(count)]
    together = threading.Barrier(4)

    def answer(mine: int) -> None:
        for future in futures:
            together.wait(SOON)
            try:
                future.set_result(mine)
            except InvalidStateError:
                refused.append(mine)

    def read() -> None:
        for future in futures:
            together.wait(SOON)
            seen.append(future.result(SOON))

    def call() -> None:
        for future in futures:
            together.wait(SOON)
            future.add_done_callback(lambda done: called.append(done.result()))

    threads = [threading.Thread(target=work) for work in (lambda: answer(1), lambda: answer(2), read, call)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert seen == [future.result() for future in futures] == called
    assert len(refused) == count
    assert [3 - mine for mine in seen] == refused


def test_an_error_and_its_future_do_not_hold_each_other() -> None:
    """Else only the garbage collector would let go of what the call has held."""
    gc.collect()
    gc.disable()
    try:
        future = LeanFuture[int]()
        future.set_exception(ValueError("no"))
        gone = threading.Event()
        future.held = Held(gone)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="no"):
            future.result()
        del future
        assert gone.is_set()
    finally:
        gc.enable()


class Held:
    def __init__(self, gone: threading.Event) -> None:
        self._gone = gone

    def __del__(self) -> None:
        self._gone.set()
