"""SIGINT, which is raised where it does no harm: in the user's code, or where a call of this package returns to that.

An interrupt in the middle of a step would leave a round half sent, or a context entered. There it is held, and raised
in the frame that has called this package, as if the call had raised it. Where the call waits for other processes for
more than `PATIENCE`, it is raised in the wait. A second one, while the first is held, is raised at once.

`waits` and `calls_user` mark the functions of this package in which one does no harm.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed has only its public face
import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

PATIENCE = 1.0
"""Seconds for which an interrupt waits for the end of a call that waits for others."""

_OURS = ("psclient", "pswire")

_WAITS: set[CodeType] = set()
_CALLS: set[CodeType] = set()

_handler: Callable[[int], Any] = _signal.getsignal
"""`signal.getsignal` without the search for an enum of the answer, which takes 3 us in each round."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any]


def waits(function: F) -> F:
    """Marks a function that waits for others, perhaps for long, and that an interrupt may leave at any line."""
    _WAITS.add(function.__code__)
    return function


def calls_user(function: F) -> F:
    """Marks a function that calls the user's code, and nothing else that is not of this package."""
    _CALLS.add(function.__code__)
    return function


@calls_user
def call(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls a function of the user, in which interrupts are raised."""
    return fn(*args, **kwargs)


class _Place(NamedTuple):
    """Where the main thread is.

    Attributes:
        outer: the user's frame that has called this package; None in the user's own code, or where there is none.
        waits: True in a function that waits.
    """

    outer: FrameType | None
    waits: bool = False


def _place_of(frame: FrameType | None) -> _Place:
    inner, ours, outermost = frame, None, None
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS:
            if frame.f_code in _CALLS and frame is not inner:
                break
            ours, outermost = ours or frame, frame
        frame = frame.f_back
    if ours is None or outermost is None:
        return _Place(None)
    return _Place(outermost.f_back, ours.f_code in _WAITS)


class _Front:
    """The handler that stands in front of another one, such as that which Jupyter sets for each cell."""

    def __init__(self, owner: Interrupts, theirs: Handler) -> None:
        self._owner, self._theirs = owner, theirs

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._owner.came(self._theirs, frame)


class Interrupts:
    """Holds SIGINT back in the main thread, which is the one that it interrupts."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._held: Handler | None = None  # whom to call with the one that is held
        self._number = 0  # of the one that is held
        self._late = False  # it comes once more, in case that the thread waits
        self._holds = 0
        self._outer: FrameType | None = None  # the frame in which it is raised
        self._tracers: tuple[Any, Any] = None, None  # what had traced the thread, and that frame
        self._raising = False

    def guard(self) -> None:
        """Stands in front of the handler that is there now. Called where rounds and contexts begin."""
        if threading.get_ident() != self._main:
            return
        theirs = _handler(signal.SIGINT)
        if type(theirs) is not _Front and callable(theirs):  # else SIGINT ends the process, or is ignored
            signal.signal(signal.SIGINT, _Front(self, theirs))

    @property
    def held(self) -> bool:
        """True if one is held: it will be raised in place of what the call returns that this is part of."""
        return self._held is not None

    def hold(self) -> None:
        """Holds interrupts until `release`, in the user's code as well, where a later call ends what was begun."""
        self.guard()
        self._holds += 1
        self._unwatch()  # one that came before

    def release(self) -> None:
        """Ends a `hold`; what has come meanwhile is raised where the call that this is part of returns."""
        self._holds -= 1
        if self._held is not None and not self._holds:
            self._watch(_place_of(sys._getframe()).outer)

    def came(self, theirs: Handler, frame: FrameType | None) -> None:
        """SIGINT has come, for a handler that ours stands in front of."""
        late, self._late = self._late, False
        if self._raising:  # that handler has called the one that was there before it
            theirs(signal.SIGINT, frame)
        elif late:
            if self._held is not None and not self._holds and _place_of(frame).waits:
                self._raise(frame)
        elif self._held is not None:
            self._raise(frame)
        else:
            self._held, self._number = theirs, self._number + 1
            outer = _place_of(frame).outer
            if not (self._holds or outer):
                self._raise(frame)
                return
            if not self._holds:
                self._watch(outer)
            # No `threading.Thread`: the main thread may hold the lock that this takes.
            _thread.start_new_thread(self._remind, (self._number,))

    def _remind(self, number: int) -> None:
        while True:
            time.sleep(PATIENCE)
            front = type(_handler(signal.SIGINT)) is _Front
            if self._held is None or self._number != number or not front:
                return
            self._late = True
            signal.pthread_kill(self._main, signal.SIGINT)

    def _watch(self, outer: FrameType | None) -> None:
        """Raises the one that is held as soon as a frame goes on: an opcode, since a line may lie behind a `with`."""
        if outer is None:
            self._raise(None)
            return
        self._outer, self._tracers = outer, (sys.gettrace(), outer.f_trace)
        outer.f_trace_opcodes = True
        outer.f_trace = self._goes_on
        sys.settrace(self._goes_on)

    def _unwatch(self) -> None:
        if self._outer is not None:
            tracer, self._outer.f_trace = self._tracers
            self._outer.f_trace_opcodes = False
            self._outer, self._tracers = None, (None, None)
            sys.settrace(tracer)

    def _goes_on(self, frame: FrameType, event: str, arg: Any) -> Any:
        # Python clears whatever a tracer raises at the end of a `for`: the next opcode follows, or the frame returns.
        ends_a_loop = event == "exception" and issubclass(arg[0], StopIteration)
        if frame is self._outer and not ends_a_loop:  # so it is within the blocks of the call
            self._raise(frame)
        return None

    def _raise(self, frame: FrameType | None) -> None:
        theirs, self._held = self._held, None
        self._unwatch()
        self._raising = True
        try:
            if theirs is not None:
                theirs(signal.SIGINT, frame)
        finally:
            self._raising = False

    def _forget(self) -> None:
        """In a fork of the process: nothing that it holds is its own."""
        self._main, self._holds, self._held = threading.get_ident(), 0, None
        self._unwatch()


INTERRUPTS = Interrupts()
"""Those of this process."""

os.register_at_fork(after_in_child=INTERRUPTS._forget)
