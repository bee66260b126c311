"""Where SIGINT is raised: in code of the user, or where our code returns to it. `OURS` stands for code of ours."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
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


def calls(ours: Any) -> None:
    try:
        ours.seen.append(ours.comes())
    finally:
        ours.seen.append("finally")


def handles_errors(ours: Any) -> None:
    with suppress(ValueError):
        ours.fails()
    ours.seen.append("goes on")


def is_interrupted(ours: Any) -> None:
    signal.raise_signal(signal.SIGINT)
    ours.seen.append("goes on")


def loops(batches: Any) -> None:
    for _ in batches:
        pass


def delegates(batches: Any) -> None:
    def inner() -> Iterator[Any]:
        yield from batches

    for _ in inner():
        pass


def handles_the_end(batches: Any) -> None:
    with suppress(StopIteration):
        next(batches)


def within(ours: Any, block: Any) -> None:
    with block:
        ours.seen.append("within")


def spans(ours: Any) -> None:
    ours.begins()
    ours.seen.append("between")
    ours.ends()
    ours.seen.append("goes on")


RAISED: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "a call is whole, the interrupt is its result": (calls, ["whole", "finally"]),
    "an error of the call gives way": (lambda ours: ours.fails(), ["whole"]),
    "though the script handles it": (handles_errors, ["whole"]),
    "code of the user is left at once": (is_interrupted, []),
    "also where ours calls it": (lambda ours: ours.runs(lambda: is_interrupted(ours)), ["left"]),
    "a call that the user's makes is whole": (lambda o: o.runs(lambda: calls(o)), ["whole", "finally", "left"]),
    "it comes behind a loop": (lambda ours: loops(ours.Pass()), ["whole"]),
    "behind a list": (lambda ours: list(ours.Pass()), ["whole"]),
    "behind a comprehension": (lambda ours: [number + 1 for number in ours.Pass()], ["whole"]),
    "behind `yield from`": (lambda ours: delegates(ours.Pass()), ["whole"]),
    "behind `next`": (lambda ours: next(ours.Pass()), ["whole"]),
    "behind the end of a pass": (lambda ours: handles_the_end(ours.Pass()), ["whole"]),
    "a pass over data is over": (lambda ours: loops(ours.batches()), ["whole", "left"]),
    "a block that is entered is left": (lambda o: within(o, o.Scope("enter")), ["whole", "entered", "left"]),
    "a block is left first": (lambda o: within(o, o.Scope("exit")), ["entered", "within", "whole", "left"]),
    "what spans calls is held between them": (spans, ["whole", "between", "ended"]),
    "a second one is raised at once": (lambda ours: ours.comes(lambda: signal.raise_signal(signal.SIGINT)), ["whole"]),
}
"""Scripts, and what is done by then."""


@pytest.mark.parametrize("case", RAISED)
def test_where_it_is_raised(ours, case):
    """Once; the next one is a first one."""
    script, seen = RAISED[case]
    interrupted(lambda: script(ours))
    assert ours.seen == seen
    interrupted(ours.comes)


def test_a_block_of_a_generator_is_not_entered_or_left(ours):
    interrupted(lambda: within(ours, ours.block()))
    assert ours.seen in (["whole"], ["whole", "left"])


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


def test_handlers_of_others_are_called_once(ours):
    """One that calls the handler that it has replaced, and one that is taken away again; where one raises nothing the
    call returns what it returns, and the script goes on."""
    ours_in_front = signal.getsignal(signal.SIGINT)

    def theirs(number: int, frame: object) -> None:
        ours.seen.append("theirs")
        ours_in_front(number, frame)

    signal.signal(signal.SIGINT, theirs)
    ours.INTERRUPTS.guard()
    ours.INTERRUPTS.guard()
    interrupted(ours.comes)
    assert ours.seen == ["whole", "theirs"]
    signal.signal(signal.SIGINT, ours_in_front)
    interrupted(ours.comes)
    assert ours.seen == ["whole", "theirs", "whole"]
    signal.signal(signal.SIGINT, lambda number, frame: ours.seen.append("noted"))
    ours.INTERRUPTS.guard()
    assert ours.comes() == 1
    assert ours.seen[3:] == ["whole", "noted"]
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
