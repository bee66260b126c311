"""Stimuli: what came into a server, in order. The last of them are kept for people, all of them for a replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from psserver.effects import Work
from psserver.registry import Registry
from pswire.api import Contribution
from pswire.errors import PSError
from pswire.model.status import Happened
from pswire.security.session_numbers import count_of
from pswire.servers.requests import ServerRequest
from pswire.servers.votes import Vote
from pswire.sizes import counted, human

KEPT = 100
"""How many are kept."""

LONGEST = 1000
"""Characters that are kept of a text: a peer may say it at any length."""


@cache
def _named(name: str, queue: str) -> str:
    return f"{name.strip('_').replace('_', ' ')} ({queue})"


WORDS: dict[str, Callable[..., tuple[int | None, str]]] = {
    "initialize_batch": lambda batch, *_: (None, f"{counted(len(batch), 'variable')}, with values of a checkpoint"),
    "part": lambda session: (session, "watches no more"),
    "holds": lambda _: (None, "a chief's token"),
    "hear": lambda server, vote: (None, f"server {server} votes in round {vote.round}{_voted(vote)}"),
    "testify": lambda server, said: (
        None,
        f"server {server} has heard {counted(len(said.votes), 'vote')} of server {said.gone}, which is gone",
    ),
    "outlive": lambda error: (None, error.message),
    "introduce": lambda server, _: (None, f"server {server}"),
    "meet": lambda server: (None, f"server {server} is connected"),
    "miss": lambda server, reason: (None, f"server {server} is not connected: {reason}"),
    "worked": lambda work, *_: (None, _named(work.call.__name__, work.queue)),
    "close": lambda: (None, "the server ends"),
}
"""For each stimulus that is no request the session that it comes from, if it does, and its arguments in words."""


def _voted(vote: Vote) -> str:
    return (", again" if vote.attempt else "") + (f": {vote.error.message}" if vote.error else "")


QUIET = frozenset(
    ("tick", "heartbeat", "enlist", "watch", "offer", "holds", "initialize_batch", "look", "asked", "miss")
)
"""Stimuli that come by themselves or with another one, and say little: they are kept only where they were refused."""

Push = tuple[int, int, int, int]
"""The round of a push, its generation, the number of its first values, and its bytes."""

Short = tuple[float, str, int | None, str | Push, str]
"""A stimulus as it is kept: its time, its name, the session that it comes from, its words, and why it was refused.

There are many pushes: one is put in words when somebody asks."""


@dataclass(frozen=True, slots=True)
class Stimulus:
    """One stimulus of a server.

    Attributes:
        time: when it came, in monotonic seconds.
        name: which method of `Machine` took it.
        args: its arguments after the time.
    """

    time: float
    name: str
    args: tuple[Any, ...]


class Stimuli:
    """The last stimuli of a server. Guarded by the core's lock.

    Attributes:
        record: is told of each, whole; None while nobody records.
    """

    def __init__(self) -> None:
        self.record: Callable[[Stimulus], None] | None = None
        self._last: deque[Short] = deque(maxlen=KEPT)

    def note(self, time: float, name: str, args: tuple[Any, ...]) -> None:
        """Notes a stimulus before it is let in; work that is over may bring its own error."""
        if self.record is not None:
            self.record(Stimulus(time, name, args))
        if name not in QUIET:
            self.keep(time, name, args, args[2] if name == "worked" else None)

    def made(self, time: float, work: Work, result: object, error: PSError | None) -> None:
        """Notes work that is over and that the machine does not hear of; it is kept only where it failed."""
        if self.record is not None:
            self.record(Stimulus(time, "made", (work, result, error)))
        if error is not None:
            self.keep(time, "worked", (work,), error)

    def refused(self, time: float, name: str, args: tuple[Any, ...], error: PSError) -> None:
        """Notes why the newest was refused."""
        if name not in QUIET:
            self._last.pop()
        self.keep(time, name, args, error)

    def keep(self, time: float, name: str, args: tuple[Any, ...], error: PSError | None) -> None:
        """Keeps the newest in words, for people: no payload, array or traceback may be held by it."""
        first = args[0] if args else None
        why = "" if error is None else f"{type(error).__name__}: {error.message}"[:LONGEST]
        if isinstance(first, Contribution):
            said, payload = args[:2]
            push = said.round, said.generation, len(said.first_values), payload.size
            self._last.append((time, name, said.session, push, why))
            return
        if isinstance(first, ServerRequest):
            session, words = first.words()
        else:
            session, words = WORDS[name](*args) if name in WORDS else (None, "")
        self._last.append((time, name, session, words[:LONGEST], why))

    def last(self) -> tuple[Short, ...]:
        """Returns what is kept, the oldest first."""
        return tuple(self._last)


def told(last: Iterable[Short], now: float, registry: Registry) -> tuple[Happened, ...]:
    """Says in words what was kept; `registry` knows whose sessions it names. Needs no lock."""

    def line(session: int | None, said: str | Push) -> str:
        words = said if isinstance(said, str) else _push(*said)
        return _line(words if session is None else ": ".join(filter(None, (_whose(session, registry), words))))

    return tuple(
        Happened(max(now - time, 0.0), name, line(session, words), _line(error))
        for time, name, session, words, error in last
    )


def _push(round: int, generation: int, first_values: int, nbytes: int) -> str:
    what = counted(first_values, "first value") if first_values else f"round {round} of generation {generation}"
    return f"{what}, {human(nbytes)}"


def _whose(number: int, registry: Registry) -> str:
    """Names a session. Its whole number, with what was drawn by lot, is not said."""
    if not number:
        return "no session"
    found = registry.find(number)
    session = f"session {count_of(number)}"
    return session if found is None else f"{found.task}, {session}"


def _line(text: str) -> str:
    """One line of a text without what a terminal takes for an order: peers have said some of it."""
    text = text[:LONGEST]
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)
