"""Where SIGINT is raised: in code of the user, or where our code returns to it. `OURS` stands for code of ours."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from psclient._src.interpreter import interrupts

OURS = """
import contextlib

def comes(end=lambda: None):
    signal.raise_signal(signal.SIGINT)
    seen.append("whole")
    end()
    return 1

def fails():
    signal.raise_signal(signal.SIGINT)
    seen.append("whole")
    raise ValueError

class Scope:
    def __init__(self, *ends):
        self.ends = ends
    def __enter__(self):
        "enter" in self.ends and comes()
        seen.append("entered")
    def __exit__(self, *error):
        "exit" in self.ends and comes()
        seen.append("left")

@contextlib.contextmanager
def block():
    comes()
    try:
        yield
    finally:
        seen.append("left")

def batches():
    try:
        for number in range(3):
            comes()
            yield number
    finally:
        seen.append("left")

class Pass:
    def __iter__(self):
        return self
    def __next__(self):
        comes()
        raise StopIteration

def runs(fn):
    try:
        call(fn)
    finally:
        seen.append("left")

@waits
def waits_long(event):
    event.wait(60)

def step(event):
    try:
        waits_long(event)
    finally:
        seen.append("left")

def begins():
    comes()
    INTERRUPTS.hold()

def ends():
    INTERRUPTS.release()
    seen.append("ended")
"""


@pytest.fixture
def ours() -> Iterator[Any]:
    """Code of ours, with `seen`, what it has done; SIGINT is handled as in a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    own = interrupts.Interrupts()
    names: dict[str, Any] = {"__name__": "psclient.example", "signal": signal, "seen": [], "INTERRUPTS": own}
    names |= {"call": interrupts.call, "waits": interrupts.waits}
    exec(OURS, names)
    own.guard()
    yield SimpleNamespace(**names)
    signal.signal(signal.SIGINT, before)


def interrupted(script: Any) -> None:
    """Expects one interrupt; nothing traces after it."""
    with pytest.raises(KeyboardInterrupt):
        script()
    assert sys.gettrace() is None
    for _ in range(10):
        pass  # a second one would come here


def test_a_call_is_whole_and_the_interrupt_is_its_result(ours):
    """In the line that has called it: the user's `finally` and `except` see it there."""

    def script() -> None:
        try:
            ours.seen.append(ours.comes())
        finally:
            ours.seen.append("finally")

    interrupted(script)
    assert ours.seen == ["whole", "finally"]


def test_an_error_of_the_call_gives_way(ours):
    """It is the interrupt that the script sees, whether it handles the error or not."""

    def handles() -> None:
        try:
            ours.fails()
        except ValueError:
            ours.seen.append("handled")

    interrupted(handles)
    interrupted(ours.fails)
    assert ours.seen == ["whole", "whole"]


def loops(batches: Any) -> None:
    for _ in batches:
        pass


def lists(batches: Any) -> None:
    list(batches)


def comprehends(batches: Any) -> None:
    [number + 1 for number in batches]


def delegates(batches: Any) -> None:
    def inner() -> Iterator[Any]:
        yield from batches

    for _ in inner():
        pass


def asks(batches: Any) -> None:
    next(batches)


def handles(batches: Any) -> None:
    try:
        next(batches)
    except StopIteration:
        return


@pytest.mark.parametrize("passes", [loops, lists, comprehends, delegates, asks, handles])
def test_the_call_that_ends_a_pass_is_as_any_other(ours, passes):
    """However the script asks for batches: the interrupt comes behind the loop."""
    interrupted(lambda: passes(ours.Pass()))
    assert ours.seen == ["whole"]


@pytest.mark.parametrize("ends", ["enter", "exit"])
def test_what_is_entered_is_left(ours, ends):
    """An interrupt as a block is entered, or left, comes within it, or behind it; never between."""

    def script() -> None:
        with ours.Scope(ends):
            ours.seen.append("within")

    interrupted(script)
    within = {"enter": ["whole", "entered", "left"], "exit": ["entered", "within", "whole", "left"]}
    assert ours.seen == within[ends]


def test_generators_and_blocks_of_them_end(ours):
    """A pass over data is over, and a block that was not entered is left."""

    def over_data() -> None:
        for number in ours.batches():
            ours.seen.append(number)

    def in_block() -> None:
        with ours.block():
            ours.seen.append("within")

    interrupted(over_data)
    assert ours.seen == ["whole", "left"]
    ours.seen.clear()
    interrupted(in_block)
    assert ours.seen in (["whole"], ["whole", "left"])


def test_in_code_of_the_user_it_is_raised_at_once(ours):
    """Also where our code calls that."""

    def users() -> None:
        signal.raise_signal(signal.SIGINT)
        ours.seen.append("goes on")

    interrupted(users)
    interrupted(lambda: ours.runs(users))
    assert ours.seen == ["left"]


def test_a_call_that_ours_makes_of_the_users_is_whole_too(ours):
    """What the user's function calls returns to that function."""

    def users() -> None:
        try:
            ours.comes()
        finally:
            ours.seen.append("the user's")

    interrupted(lambda: ours.runs(users))
    assert ours.seen == ["whole", "the user's", "left"]


def test_a_wait_is_left_after_a_while(ours, monkeypatch):
    """Not before: mostly the call ends by itself."""
    monkeypatch.setattr(interrupts, "PATIENCE", 0.3)
    event, main = threading.Event(), threading.main_thread().ident
    threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
    began = time.monotonic()
    interrupted(lambda: ours.step(event))
    assert 0.3 < time.monotonic() - began < 30
    assert ours.seen == ["left"]
    ours.seen.clear()

    def comes_and_goes() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        event.set()

    threading.Timer(0.1, comes_and_goes).start()
    interrupted(lambda: ours.step(event))
    assert ours.seen == ["left"]


def test_a_second_one_is_raised_at_once(ours):
    """In the middle of the call."""
    interrupted(lambda: ours.comes(lambda: signal.raise_signal(signal.SIGINT)))
    assert ours.seen == ["whole"]
    ours.comes.__globals__["seen"].clear()
    interrupted(ours.comes)  # the next one is a first one


def test_what_spans_calls_is_held_between_them(ours):
    """One that came before it as well."""

    def script() -> None:
        ours.begins()
        ours.seen.append("between")
        signal.raise_signal(signal.SIGINT) if len(ours.seen) > 3 else None
        ours.ends()
        ours.seen.append("never")

    interrupted(script)
    assert ours.seen == ["whole", "between", "ended"]


def test_handlers_of_others_are_called_once(ours):
    """One that calls the handler that it has replaced, and one that is taken away again."""
    ours_in_front = signal.getsignal(signal.SIGINT)

    def theirs(number: int, frame: object) -> None:
        ours.seen.append("theirs")
        assert callable(ours_in_front)
        ours_in_front(number, frame)

    signal.signal(signal.SIGINT, theirs)
    ours.INTERRUPTS.guard()
    ours.INTERRUPTS.guard()
    interrupted(ours.comes)
    assert ours.seen == ["whole", "theirs"]
    signal.signal(signal.SIGINT, ours_in_front)
    interrupted(ours.comes)
    assert ours.seen == ["whole", "theirs", "whole"]


def test_a_handler_that_raises_nothing_changes_nothing(ours):
    """The call returns what it returns, and the script goes on."""
    signal.signal(signal.SIGINT, lambda number, frame: ours.seen.append("noted"))
    ours.INTERRUPTS.guard()
    assert ours.comes() == 1
    assert ours.seen == ["whole", "noted"]
    assert sys.gettrace() is None


def test_what_ends_the_process_or_is_ignored_stays_so(ours):
    """No handler of ours stands in front of these."""
    for default in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, default)
        ours.INTERRUPTS.guard()
        assert signal.getsignal(signal.SIGINT) is default


def test_a_fork_holds_nothing_of_its_parents(ours):
    """In the middle of a call that is interrupted."""

    def forks() -> None:
        if (child := os.fork()) == 0:
            ours.INTERRUPTS._forget()
            os._exit(ours.INTERRUPTS.held or sys.gettrace() is not None)
        ours.seen.append(os.waitpid(child, 0)[1])

    interrupted(lambda: ours.comes(forks))
    assert ours.seen == ["whole", 0]
