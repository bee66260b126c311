"""The log of a process on stderr: as text for people, or as JSON, one object on a line, for programs.

Each line in JSON says which task wrote it, in which round, and for which session. Nobody who writes a line has to: the
process is asked where it stands, and a server's core notes whose call it answers.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from pswire import variables
from pswire.options import LOGGING, Option
from pswire.security.given import printable

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

LOG_LEVEL = Option(
    "Lowest level of log lines.",
    choices=LEVELS,
    variable=variables.LOG_LEVEL,
    otherwise="warning; for servers info",
    group=LOGGING,
)
LOG_FORMAT = Option("Format of the log on stderr.", choices=FORMATS, variable=variables.LOG_FORMAT, group=LOGGING)

MAX_CHARACTERS = 5_000
"""Of a message, and of a traceback: whoever relays lines has to take them whole."""

Where = tuple[int, int]
"""The round, -1 for none; and the session, 0 for none."""

SESSION: ContextVar[int] = ContextVar("session", default=0)
"""Session of the call that is answered here, or of the process itself; 0 for none."""


class _Process:
    """Task, round and session of this process, for all of its threads."""

    task = ""
    where: Callable[[], Where] = staticmethod(lambda: (-1, 0))


def configure(kind: str, level: str, relayed: bool = False) -> None:
    """Makes the log go to stderr; does nothing where the program that this is a part of has set one up already.

    Args:
        kind: one of `FORMATS`.
        level: one of `LEVELS`.
        relayed: True if a reader of the lines puts this process's task before them.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if kind == "json" else Text(not relayed))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if structured():
        logging.captureWarnings(True)


def name(task: str) -> None:
    """Sets the task of this process, as its lines say it."""
    _Process.task = task


def follow(where: Callable[[], Where] | None) -> None:
    """Sets the function that tells where this process stands, without a lock; None once there is nothing to tell."""
    _Process.where = staticmethod(where or (lambda: (-1, 0)))


def structured() -> bool:
    """Returns whether the log is written as JSON: then all that goes to stderr has to be."""
    return any(isinstance(handler.formatter, Json) for handler in logging.getLogger().handlers)


class Text(logging.Formatter):
    """A time of day, the level's first letter, the task, the logger's name and the message.

    Args:
        named: True if a line says the task.
    """

    def __init__(self, named: bool) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(who)s%(name)s: %(message)s", "%H:%M:%S")
        self._named = named

    def format(self, record: logging.LogRecord) -> str:
        record.who = f"{_Process.task} " if self._named and _Process.task else ""
        return printable(super().format(record))


class Json(logging.Formatter):
    """One JSON object: time, level, logger, message, task, round, session; exception where there is one.

    A session is written as a string: its number has more digits than programs keep that read numbers as floats.
    """

    def format(self, record: logging.LogRecord) -> str:
        round, session = _Process.where()
        session = SESSION.get() or session
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(_message(record)),
            "task": _Process.task or None,
            "round": round if round >= 0 else None,
            "session": str(session) if session else None,
        }
        if record.exc_info:
            said["exception"] = _cut(self.formatException(record.exc_info))
        return json.dumps(said)


def line_of(text: str, logger: str) -> str:
    """Returns a line for stdout, written as the log is: the text itself, or one JSON object.

    Args:
        text: what the line says.
        logger: name of the logger that would say it.
    """
    if not structured():
        return text
    return Json().format(logging.makeLogRecord({"name": logger, "levelname": "INFO", "msg": text}))


def _message(record: logging.LogRecord) -> str:
    """Formats a record, also where its arguments do not fit: else the error would be printed, and not as JSON."""
    try:
        return record.getMessage()
    except Exception as error:
        return f"{record.msg!r}, with arguments that cannot be formatted: {error!r}"


def _cut(text: str) -> str:
    """A text, without its middle if it is long: the end of a traceback says most, and its beginning what it is."""
    excluded = len(text) - MAX_CHARACTERS
    head, tail = text[: MAX_CHARACTERS // 4], text[-3 * MAX_CHARACTERS // 4 :]
    return text if excluded <= 0 else f"{head} [{excluded} characters] {tail}"


def read(line: str) -> dict[str, Any] | None:
    """Returns what a line in JSON says; None if it is another line."""
    if not line.startswith("{"):
        return None
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):  # a script prints what it likes
        return None
    return said if isinstance(said, dict) and {"level", "message"} <= said.keys() else None
