"""Stimuli: what came into a server, in order. The last of them are kept for people, all of them for a replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psserver.effects import Work
from psserver.plans.prepared import PreparedPlan
from psserver.registry import Registry
from psserver.sizes import human
from pswire.api import Contribution, RestoreOrder
from pswire.cluster import Task
from pswire.errors import PSError
from pswire.model.log import Start
from pswire.model.plan import PlacedVariable, Turn, VariableSpec
from pswire.model.status import Happened
from pswire.transport.payload import Payload

KEPT = 100
"""How many are kept."""

SHORTEN: dict[type, Callable[[Any], object]] = {
    **dict.fromkeys((bool, int, float, str, type(None)), lambda same: same),
    **dict.fromkeys((Task, Contribution, RestoreOrder, Start, PlacedVariable, Turn, VariableSpec), lambda same: same),
    bytes: bytes.hex,
    Payload: lambda payload: payload.size,
    PreparedPlan: lambda prepared: prepared.plan.id.hex(),
    Work: lambda work: f"{work.call.__name__.strip('_')} ({work.queue})",
    list: lambda entries: tuple(type(entry).__name__ for entry in entries),
    tuple: lambda values: len(values),
}
"""What is kept of an argument, by its type; of others nothing. No payload, array or traceback may be held by it."""


QUIET = frozenset(("tick", "beat", "look", "asked"))
"""Stimuli that are too many to be kept, and say little."""

_Short = tuple[float, str, tuple[Any, ...], str]


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
        self._last: deque[_Short] = deque(maxlen=KEPT)

    def note(self, time: float, name: str, args: tuple[Any, ...]) -> None:
        """Notes a stimulus before it is let in."""
        if self.record is not None:
            self.record(Stimulus(time, name, args))
        if name not in QUIET:
            self._last.append((time, name, tuple(SHORTEN.get(type(arg), _nothing)(arg) for arg in args), ""))

    def refused(self, error: PSError) -> None:
        """Notes why the newest was refused; quiet ones are not."""
        time, name, args, _ = self._last.pop()
        self._last.append((time, name, args, f"{type(error).__name__}: {error.message}"))

    def told(self, now: float, registry: Registry) -> tuple[Happened, ...]:
        """Says the last of them in words, the oldest first; `registry` knows whose sessions they name."""
        return tuple(
            Happened(max(now - time, 0.0), name, _words(name, args, registry), error)
            for time, name, args, error in self._last
        )


def _nothing(_: object) -> None:
    return None


def _words(name: str, args: tuple[Any, ...], registry: Registry) -> str:
    """One stimulus in words, without its name."""

    def who(session: int) -> str:
        found = registry.find(session)
        return f"session {session}" if found is None else f"{found.task}, session {session}"

    match name, args:
        case "push", (Contribution() as said, int(size), *_):
            return f"{who(said.session)}: round {said.round} of epoch {said.epoch}, {human(size)}"
        case "open", (Task() as task, *_):
            return str(task)
        case "leave", (int(session), str(error)):
            return who(session) + (f": {error}" if error else "")
        case "create", (int(session), _, int(id), VariableSpec() as spec, *_):
            return f"{who(session)}: {spec}" + (f", number {id}" if id >= 0 else "")
        case "initialize", (PlacedVariable() as variable, *_):
            return str(variable.spec)
        case "pull", (int(session), int(count), int(after), *_):
            return f"{who(session) if session else 'a reader'}: {count} variables after round {after}"
        case "watch", (int(session), int(after), *_):
            return f"{who(session) if session else 'a reader'}: the log from {after} on"
        case "propose", (int(session), plan, str(point), start):
            parts = plan and f"plan {plan[:8]}", point and f"waits at {point}", start and f"new members begin: {start}"
            return f"{who(session)}: {', '.join(part for part in parts if part)}"
        case "approve", (_, int(index), (*entries,), *_):
            return f"the log from {index} on: {', '.join(entries) or 'nothing new'}"
        case "snapshot", (_, str(plan), str(manifest), *_):
            return f"plan {plan[:8]}, " + ("the manifest" if manifest else "this server's part")
        case "restore", (int(session), str(path), _, RestoreOrder() as order, *_):
            return f"{who(session)}: {order.stage} {path}"
        case "part", (int(session),):
            return who(session)
        case "worked", (str(call), _, error):
            return call
    return ""
