"""Output of the processes of a local cluster, line by line, on one terminal.

A `Relay` reads all their pipes in one thread, so that no process ever waits for a full pipe, and keeps
the last lines of each. A `Printer` shows them, each with its task's name in its task's colour.
"""

from __future__ import annotations

import os
import re
import selectors
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TextIO

from pswire.cluster import Task
from pswire.telemetry import logging_setup

KEPT_LINES = 400
"""Lines of each stream that a relay remembers; a traceback fits."""

MAX_LINE = 1 << 16
"""Bytes after which a line is broken, so that a stream without lines takes no memory."""

BAR_SECONDS = 5.0
"""Pause between two states of one progress bar where there is no terminal to draw it on."""

PREFIX_COLUMNS = 12
"""Columns that a task's name takes of a terminal."""

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")
_ERROR = re.compile(r"(psworker: \S+: error: )(.*?)( \(\S+:\d+\))?")
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


@dataclass(frozen=True)
class Line:
    """One line that a task printed.

    Attributes:
        task: the task that printed it.
        error: True if it went to stderr.
        text: without its end, and without codes that would move the terminal's cursor.
        bar: True if it ended in a carriage return: a state of a progress bar, to be overwritten.
    """

    task: Task
    error: bool
    text: str
    bar: bool = False


class Relay:
    """Reads pipes until they end. `lines` may be called from any thread, the others from one.

    Args:
        sink: called with each line, in the relay's own thread.
    """

    def __init__(self, sink: Callable[[Line], None] | None = None) -> None:
        self._sink = sink
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # guards _new and _kept
        self._new: list[tuple[IO[bytes], Task, bool]] = []
        self._kept: dict[tuple[Task, bool], deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))
        self._closed = False
        self._waker, self._wake = os.pipe()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def watch(self, pipe: IO[bytes], task: Task, error: bool) -> None:
        """Reads one more pipe, and closes it at its end."""
        with self._lock:
            self._new.append((pipe, task, error))
        os.write(self._wake, b"+")

    def lines(self, task: Task, error: bool) -> list[str]:
        """The last lines of one stream of one task."""
        with self._lock:
            return list(self._kept[task, error])

    def close(self, timeout: float = 1.0) -> None:
        """Ends when all pipes have; a pipe that a stranger holds open is waited for `timeout` seconds."""
        if not self._closed:
            self._closed = True
            os.write(self._wake, b".")
        self._thread.join(timeout)

    def _run(self) -> None:
        closing = False
        while not closing or len(self._selector.get_map()) > 1:
            for key, _ in self._selector.select():
                if key.fd != self._waker:
                    key.data.read()
                    continue
                closing = b"." in os.read(self._waker, 64) or closing
                self._take_new()
        self._selector.close()
        os.close(self._waker)
        os.close(self._wake)

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for pipe, task, error in new:
            self._selector.register(pipe, selectors.EVENT_READ, _ChildStream(self, pipe, task, error))

    def _end(self, stream: _ChildStream) -> None:
        self._selector.unregister(stream.pipe)
        stream.pipe.close()

    def _emit(self, line: Line) -> None:
        if not line.bar:
            with self._lock:
                self._kept[line.task, line.error].append(line.text)
        if self._sink is not None:
            self._sink(line)


class _ChildStream:
    """One pipe and the line in it that has no end yet. Used by the relay's thread alone."""

    def __init__(self, relay: Relay, pipe: IO[bytes], task: Task, error: bool) -> None:
        self.pipe = pipe
        self._relay, self._task, self._error = relay, task, error
        self._rest = b""

    def read(self) -> None:
        data = os.read(self.pipe.fileno(), 1 << 16)
        self._split(self._rest + data)
        if not data:
            if last := self._rest.rstrip(b"\r"):
                self._emit(last, bar=False)
            self._relay._end(self)

    def _split(self, data: bytes) -> None:
        start = 0
        for end in _LINE_END.finditer(data):
            text, bar = data[start : end.start()], end[0] == b"\r"
            start = end.end()
            if text or not bar:
                self._emit(text, bar)
        self._rest = data[start:]
        if len(self._rest) > MAX_LINE:
            self._emit(self._rest, bar=False)
            self._rest = b""

    def _emit(self, text: bytes, bar: bool) -> None:
        shown = _CURSOR.sub("", text.decode("utf-8", "replace"))
        if shown or not text:  # else it was nothing but codes, such as the one that shows the cursor again
            self._relay._emit(Line(self._task, self._error, shown, bar))


class Printer:
    """Shows lines on stdout and stderr; on a terminal a progress bar stays below them.

    May be called from any thread.

    Args:
        out: stream for lines of stdout, and for progress bars; None for `sys.stdout`.
        err: stream for lines of stderr; None for `sys.stderr`.
        colour: True to use colours on a terminal.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, colour: bool = True) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._terminal = self._out.isatty()
        self._colour = colour and self._terminal
        self._bars: dict[Task, str] = {}
        self._shown: dict[Task, float] = {}
        self._gone = False
        self._said: dict[str, Task] = {}  # errors that ended a process, each with the first of those that it ended
        self._lock = threading.Lock()  # guards all of the above, and the terminal

    def __call__(self, line: Line) -> None:
        with self._lock:
            if self._gone:
                return
            try:
                (self._show_bar if line.bar else self._show_line)(line)
            except OSError:  # nobody reads any more; the processes must be heard all the same, or they block
                self._gone = True

    def terminal(self) -> dict[str, str]:
        """Returns environment variables that tell processes of the terminal, if it is one: rich draws its bars then."""
        if not self._terminal:
            return {}
        columns = os.get_terminal_size(self._out.fileno()).columns or 80
        return {"TTY_COMPATIBLE": "1", "COLUMNS": str(max(columns - PREFIX_COLUMNS, 20))}

    def finish(self) -> None:
        """Leaves the terminal with the cursor on a line of its own."""
        with self._lock:
            self._bars.clear()
            if not self._gone:
                self._clear_bar()

    def _show_line(self, line: Line) -> None:
        self._bars.pop(line.task, None)
        self._clear_bar()
        stream = self._err if line.error else self._out
        # A line in JSON says itself whose it is, and is for a program.
        prefix = "" if line.error and logging_setup.read(line.text) else self._prefix(line.task)
        stream.write(f"{prefix}{self._once(line)}\n")
        stream.flush()
        self._draw_bar()

    def _once(self, line: Line) -> str:
        """Returns a line as it is shown: of an error that ends all workers the first one says what it is."""
        found = _ERROR.fullmatch(line.text)
        if found is None:
            return line.text
        first = self._said.setdefault(found[2], line.task)
        return line.text if first == line.task else f"{found[1]}same error as {first}"

    def _show_bar(self, line: Line) -> None:
        if self._terminal:
            self._bars[line.task] = line.text
            if line.task == min(self._bars):
                self._draw_bar()
        elif time.monotonic() - self._shown.get(line.task, -BAR_SECONDS) >= BAR_SECONDS:
            self._shown[line.task] = time.monotonic()
            self._show_line(line)

    def _clear_bar(self) -> None:
        if self._terminal:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def _draw_bar(self) -> None:
        if self._bars:
            task = min(self._bars)
            self._out.write(f"\r\x1b[K{self._prefix(task)}{self._bars[task]}")
            self._out.flush()

    def _prefix(self, task: Task) -> str:
        name = f"[{short_name(task)}]"
        return f"\x1b[{_colour(task)}m{name}\x1b[0m " if self._colour else f"{name} "


def short_name(task: Task) -> str:
    """`worker 0`; `chief`, of which there is one."""
    return task.job if task.job == "chief" else f"{task.job} {task.index}"


def _colour(task: Task) -> int:
    offset = {"worker": 0, "ps": 4, "chief": 3}.get(task.job, 0)
    return _COLOURS[(offset + task.index) % len(_COLOURS)]
