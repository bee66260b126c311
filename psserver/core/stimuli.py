"""Stimuli: what came into a server, in order. The last of them are kept for people, all of them for a replay."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from psserver.core.waiting import Asked
from psserver.effects import Work
from psserver.plans.prepared import PreparedPlan
from psserver.registry import Registry
from pswire.api import UNTIL_ENDED, UNTIL_GONE, Contribution, RestoreOrder
from pswire.cluster import Task
from pswire.errors import PSError, ServerGone
from pswire.model.chunks import ChunkAsk
from pswire.model.closures import ClosureOrder, ClosureResult
from pswire.model.log import Member, Start
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.status import Happened
from pswire.network.payload import Payload
from pswire.security.session_numbers import count_of
from pswire.servers.votes import Testimony, Vote
from pswire.sizes import human

KEPT = 100
"""How many are kept."""

LONGEST = 1000
"""Characters that are kept of a text: a peer may say it at any length."""


def _cut(text: str) -> str:
    return text[:LONGEST]


def _entries(entries: list[Any]) -> str:
    """Entries of the log by their kinds: `2 created, 1 generation closed`."""
    kinds = Counter(re.sub(r"\B(?=[A-Z])", " ", type(entry).__name__).lower() for entry in entries)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


@cache
def _named(name: str, queue: str) -> str:
    return f"{name.strip('_').replace('_', ' ')} ({queue})"


SHORTEN: dict[type, Callable[[Any], object]] = {
    **dict.fromkeys((bool, int, float, type(None), Task), lambda same: same),
    str: _cut,
    bytes: lambda id: id[:4].hex(),
    tuple: len,
    list: _entries,
    Asked: lambda asked: (len(asked.variables) + len(asked.rows) + len(asked.tables), asked.after),
    ChunkAsk: lambda ask: (ask.dataset, ask.epoch, len(ask.done), ask.want, ask.needs),
    ClosureOrder: lambda order: (order.number, _cut(order.function), order.joins),
    ClosureResult: lambda result: (result.number, _cut(result.kind)),
    Contribution: lambda said: (said.session, said.round, said.generation, len(said.first_values)),
    Member: lambda member: (member.task, member.replicas, member.consistency.mode),
    Payload: lambda payload: payload.size,
    PlacedVariable: lambda variable: _cut(str(variable.spec)),
    PreparedPlan: lambda prepared: prepared.plan.id[:4].hex(),
    RestoreOrder: lambda order: order.stage,
    Start: lambda start: (start.generation, start.round),
    ServerGone: lambda error: _cut(error.message),
    Testimony: lambda said: (said.gone, len(said.votes)),
    Vote: lambda vote: (vote.round, vote.attempt, _cut(vote.error.message) if vote.error else ""),
    VariableSpec: lambda spec: _cut(str(spec)),
    Work: lambda work: _named(work.call.__name__, work.queue),
}
"""What is kept of an argument, by its type; of others nothing. No payload, array or traceback may be held by it."""


WATCHED = {UNTIL_ENDED: "its end", UNTIL_GONE: "the loss of a server"}
"""What a call waits for that has no version of the log, in words."""

QUIET = frozenset(("tick", "heartbeat", "enlist", "watch", "holds", "initialize_batch", "look", "asked", "miss"))
"""Stimuli that come by themselves or with another one, and say little: they are kept only where they were refused."""

Short = tuple[float, str, tuple[Any, ...], str]
"""A stimulus as it is kept: its time, its name, its arguments made short, and why it was refused."""


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
        """Keeps the newest, made short, for people."""
        short = tuple([SHORTEN.get(type(arg), _nothing)(arg) for arg in args])
        why = "" if error is None else _cut(f"{type(error).__name__}: {error.message}")
        self._last.append((time, name, short, why))

    def last(self) -> tuple[Short, ...]:
        """Returns what is kept, the oldest first."""
        return tuple(self._last)


def told(last: Iterable[Short], now: float, registry: Registry) -> tuple[Happened, ...]:
    """Says in words what was kept; `registry` knows whose sessions it names. Needs no lock."""
    return tuple(
        Happened(max(now - time, 0.0), name, _line(_words(name, args, registry)), _line(error))
        for time, name, args, error in last
    )


def _nothing(_: object) -> None:
    return None


def _line(text: str) -> str:
    """One line of a text without what a terminal takes for an order: peers have said some of it."""
    text = _cut(text)
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _words(name: str, args: tuple[Any, ...], registry: Registry) -> str:
    """One stimulus in words, without its name. Tokens are not said, nor what was drawn by lot."""

    def who(session: int) -> str:
        if not session:
            return "no session"
        found, number = registry.find(session), count_of(session)
        return f"session {number}" if found is None else f"{found.task}, session {number}"

    match name, args:
        case "open", ((Task() as task, int(replicas), str(mode)), _, bool(drives), *_):
            return f"{task}: " + ("drives" if drives else f"{_counted(replicas, 'replica')}, {mode}")
        case "enlist", (task, _):
            return "asks for an index" if task is None else str(task)
        case "leave", (int(session), str(error)):
            return f"{who(session)}: {error or 'cleanly'}"
        case "heartbeat", (int(session), int(round), *_):
            return who(session) + (f": waits in round {round}" if round >= 0 else "")
        case "create_batch", (int(session), int(count)):
            return f"{who(session)}: {_counted(count, 'variable')}"
        case "initialize_batch", (int(count), *_):
            return f"{_counted(count, 'variable')}, with values of a checkpoint"
        case "pull", (int(session), (int(count), int(after)), *_):
            return f"{who(session)}: {_counted(count, 'variable')}" + (f" after round {after}" if after >= 0 else "")
        case "propose", (int(session), plan, str(point), start, _):
            said = [f"plan {plan}"] if plan else []
            said += [f"waits at {point[:13]}"] if point else []  # of a plan as many digits as above
            said += [f"new members of generation {start[0]} begin with round {start[1]}"] if start else []
            return f"{who(session)}: {', '.join(said)}"
        case "watch", (int(session), int(after), int(version), *_):
            return f"{who(session)}: " + WATCHED.get(version, f"the log from {after} on")
        case "part", (int(session),):
            return f"{who(session)}: watches no more"
        case "holds", _:
            return "a chief's token"
        case "approve", (_, int(index), str(entries), *_):
            return f"the log from {index} on: {entries or 'nothing'}"
        case "push", ((int(session), _, _, int(values)), int(size), *_) if values:
            return f"{who(session)}: {_counted(values, 'first value')}, {human(size)}"
        case "push", ((int(session), int(round), int(generation), _), int(size), *_):
            return f"{who(session)}: round {round} of generation {generation}, {human(size)}"
        case "hear", (int(server), (int(round), int(attempt), error)):
            return f"server {server} votes in round {round}" + (", again" if attempt else "") + (error and f": {error}")
        case "testify", (int(server), (int(gone), int(votes))):
            return f"server {server} has heard {_counted(votes, 'vote')} of server {gone}, which is gone"
        case "outlive", (str(why),):
            return why
        case "introduce", (int(server), _):
            return f"server {server}"
        case "meet", (int(server),):
            return f"server {server} is connected"
        case "miss", (int(server), str(reason)):
            return f"server {server} is not connected: {reason}"
        case "snapshot", (_, str(plan), str(manifest), *_):
            return f"plan {plan}, " + ("the manifest" if manifest else "the shard")
        case "restore", (int(session), str(path), _, str(stage), *_):
            return f"{who(session)}: {stage} {path!r}"
        case "schedule", (int(session), (int(number), str(function), bool(joins)), *_):
            what = f"closure {number} of {function}" if number else "waits for all closures" if joins else "looks"
            return f"{who(session)}: {what}"
        case "take", (int(session), _, result, *_):
            told = f"closure {result[0]} is over{result[1] and ': ' + result[1]}, " if result else ""
            return f"{who(session)}: {told}waits for a closure"
        case "fetch", (int(session), int(number), *_):
            return f"{who(session)}: the result of closure {number}"
        case "assign_batches", (int(session), (int(dataset), int(epoch), int(done), int(want), bool(needs))):
            what = _counted(want, "chunk") + ("" if needs else " ahead")
            asks = f"asks for {what} of dataset {dataset}, pass {epoch}" if want else f"looks at dataset {dataset}"
            return f"{who(session)}: {asks}" + (f", {done} done" if done else "")
        case "worked", (str(call), *_):
            return call
        case "close", _:
            return "the server ends"
    return ""
