"""What many processes print, on one terminal."""

from __future__ import annotations

import io
import logging
import os

import pytest

from psclient._src.processes.output import MAX_LINE, Line, Printer, Relay
from pswire.cluster import Task
from pswire.telemetry import logging_setup

WORKER, OTHER = Task("worker", 0), Task("worker", 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def relayed(*pieces: bytes) -> tuple[list[Line], Relay]:
    """What a relay makes of bytes that come in these pieces."""
    lines: list[Line] = []
    relay = Relay(lines.append)
    reader, writer = os.pipe()
    relay.watch(os.fdopen(reader, "rb", buffering=0), WORKER, error=False)
    for piece in pieces:
        os.write(writer, piece)
    os.close(writer)
    relay.close(timeout=30)
    return lines, relay


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb\n"], [("a", False), ("b", False)]),
        ([b"a\r\nb"], [("a", False), ("b", False)]),
        ([b"a\r", b"\nb\n"], [("a", False), ("b", False)]),
        ([b"\r10%\r20%\n"], [("10%", True), ("20%", False)]),
        ([b"10%\r20%\r"], [("10%", True), ("20%", False)]),
        ([b"\n"], [("", False)]),
        ([b"\x1b[2K\x1b[1Ared \x1b[31mx\x1b[0m\n"], [("red \x1b[31mx\x1b[0m", False)]),
        (["gr\u00fc\u00df".encode()[:3], "gr\u00fc\u00df\n".encode()[3:]], [("gr\u00fc\u00df", False)]),
        ([b"\xff\n"], [("\ufffd", False)]),
    ],
)
def test_lines(pieces, expected):
    """Lines come whole however the bytes came; a carriage return makes a state of a bar."""
    lines, _ = relayed(*pieces)
    assert [(line.text, line.bar) for line in lines] == expected


def test_a_stream_without_lines_takes_no_memory():
    """What has no line end is broken into lines."""
    lines, _ = relayed(*[b"x" * 60_000] * 3)
    assert all(len(line.text) <= 2 * MAX_LINE for line in lines)
    assert sum(len(line.text) for line in lines) == 180_000


def test_the_last_lines_are_kept():
    """A launcher can show a traceback after the end; bars are not kept."""
    _, relay = relayed(b"1%\r2%\r", b"end\n")
    assert relay.lines(WORKER, error=False) == ["end"]
    assert relay.lines(WORKER, error=True) == []


def test_every_line_has_its_task():
    """Without a terminal there is a prefix, and no code of a terminal."""
    out, err = io.StringIO(), io.StringIO()
    printer = Printer(out, err)
    printer(Line(WORKER, False, "one"))
    printer(Line(Task("chief", 0), True, "two"))
    assert (out.getvalue(), err.getvalue()) == ("[worker 0] one\n", "[chief] two\n")


def test_tasks_have_colours_on_a_terminal():
    """Two workers can be told apart; who wants no colour gets none."""
    out = Terminal()
    printer = Printer(out, out)
    printer(Line(WORKER, False, "x"))
    printer(Line(OTHER, False, "x"))
    first, second = (line.partition("[worker")[0] for line in out.getvalue().split("\n")[:2])
    assert first != second
    plain = Terminal()
    Printer(plain, plain, colour=False)(Line(WORKER, False, "x"))
    assert plain.getvalue().endswith("[worker 0] x\n")


def test_one_bar_stays_below_the_lines():
    """Of several bars the first task's is drawn; a line is printed above it."""
    out = Terminal()
    printer = Printer(out, out, colour=False)
    printer(Line(WORKER, False, "10%", bar=True))
    printer(Line(OTHER, False, "90%", bar=True))
    printer(Line(OTHER, False, "line"))
    assert "90%" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K[worker 1] line\n\r\x1b[K[worker 0] 10%")


def test_a_bar_in_a_file_is_short():
    """Where nothing can be overwritten, a bar's states are a line now and then."""
    out = io.StringIO()
    printer = Printer(out, out)
    for percent in range(100):
        printer(Line(WORKER, False, f"{percent}%", bar=True))
    assert out.getvalue() == "[worker 0] 0%\n"


def test_a_terminal_that_is_gone_stops_nobody():
    """The processes are heard all the same, or they would wait for a full pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as out:
        printer = Printer(out, out)
        printer(Line(WORKER, False, "x"))
        printer(Line(WORKER, False, "y"))
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def test_lines_in_json_pass_as_they_are():
    """Those of a log, which say themselves whose they are; what a script prints has its task's name before it."""
    out, err = io.StringIO(), io.StringIO()
    printer = Printer(out, err)
    line = '{"time": "2026-11-21T21:58:51.123Z", "level": "info", "message": "a\\u001b[2Kb"}'
    for error, text in ((True, line), (True, "plain"), (True, '{"level": 1}'), (False, line)):
        printer(Line(WORKER, error, text))
    assert err.getvalue().splitlines() == [line, "[worker 0] plain", '[worker 0] {"level": 1}']
    assert out.getvalue() == f"[worker 0] {line}\n"


def test_a_line_of_a_log_is_never_broken():
    """However long its message and its traceback are, and whatever they are written in."""
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "\U0001f600" * 100_000, (), None)
    text = logging_setup.Json().format(record)
    lines, _ = relayed(text.encode() + b"\n")
    assert [line.text for line in lines] == [text]
