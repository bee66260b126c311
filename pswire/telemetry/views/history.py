"""What has happened in a job: the lives of its sessions, and the decisions in its log, with their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pswire.cluster import Task
from pswire.model.log import (
    Created,
    Done,
    Generation,
    GenerationClosed,
    Gone,
    JobStarted,
    LogEntry,
    Lost,
    Member,
    Snapshotted,
)
from pswire.model.plan import PlacedVariable
from pswire.model.status import SessionState
from pswire.telemetry.views.numbers import short

KEPT = 200
"""Events that are kept: the newest."""

LIVES = 8
"""Sessions of a task that are shown: the newest."""

ReadLog = Callable[[int], tuple[LogEntry | None, Sequence[LogEntry]]]
"""Returns the first entry of a log, None where there is none, and the entries from an index on."""


@dataclass(frozen=True)
class Life:
    """The life of a session.

    Attributes:
        task: name of its task.
        drives: True for a chief's, which makes no rounds.
        state: as in `SessionState`.
        began, ended: how many seconds ago; `ended` is 0 for one that is open. One that is lost ended when it was heard
            of last.
    """

    task: str
    drives: bool
    state: str
    began: float
    ended: float


def lives_of(sessions: Iterable[SessionState]) -> list[Life]:
    """Returns the lives of sessions, by task and time; of a server that does not tell when they began none."""
    found: dict[tuple[Task, bool], list[Life]] = {}
    for each in sessions:
        ended = 0.0 if each.state == "open" else each.silent
        life = Life(str(each.member.task), each.drives, each.state, each.opened, ended)
        if each.opened:
            found.setdefault((each.member.task, not each.drives), []).append(life)
    return [life for _, lives in sorted(found.items()) for life in sorted(lives, key=lambda life: -life.began)[-LIVES:]]


@dataclass(frozen=True)
class Event:
    """A decision in the log.

    Attributes:
        time: when it was seen, in monotonic seconds; None where it was there before anybody looked.
        what: "generation", "checkpoint", "loss", "begin" or "end".
        said: what was decided, in words.
        entry: the entry of the log.
    """

    time: float | None
    what: str
    said: str
    entry: LogEntry


class JobHistory:
    """What a job's log has said so far. Used by one thread.

    Args:
        read: reads the log.

    Attributes:
        events: the events, the oldest first.
        variables: the variables, in the order of their creation.
    """

    def __init__(self, read: ReadLog) -> None:
        self._read = read
        self._looked = False
        self._forget(None)

    def _forget(self, first: LogEntry | None) -> None:
        """Begins anew, with the log that has this first entry."""
        self.events: list[Event] = []
        self.variables: list[PlacedVariable] = []
        self._first = first
        self._length = 0
        self._members: tuple[Member, ...] = ()

    def follow(self, now: float) -> None:
        """Takes in what is new; `now` is the time in monotonic seconds."""
        seen = now if self._looked else None
        self._looked = True
        first, entries = self._read(self._length)
        if first != self._first:
            self._forget(first)
            _, entries = self._read(0)
        self._length += len(entries)
        for entry in entries:
            self._take(entry, seen)
        del self.events[:-KEPT]

    def _take(self, entry: LogEntry, time: float | None) -> None:
        match entry:
            case Created():
                self.variables.append(entry.variable)
            case JobStarted():
                self._add(time, "begin", f"a chief started the job on {len(entry.incarnations)} servers", entry)
            case GenerationClosed():
                self._add(time, "generation", self._generation_words(entry.generation), entry)
            case Snapshotted(error=""):
                self._add(time, "checkpoint", f"{entry.path} is saved, after round {entry.round}", entry)
            case Snapshotted():
                self._add(time, "checkpoint", f"{entry.path} failed: {entry.error}", entry)
            case Gone() | Lost():
                stays = "the job goes on with copies" if isinstance(entry, Gone) else "the job ends"
                self._add(time, "loss", f"{short(str(Task('ps', entry.server)))}: {entry.reason}; {stays}", entry)
            case Done():
                self._add(time, "end", "the job is over", entry)

    def _add(self, time: float | None, what: str, said: str, entry: LogEntry) -> None:
        self.events.append(Event(time, what, said, entry))

    def _generation_words(self, generation: Generation) -> str:
        """Says who takes part, who came, and who is not there any more."""
        before, self._members = self._members, generation.members
        said = f"generation {generation.number}: {_names(generation.members) or 'nobody'}"
        came = [m for m in generation.members if m.session not in {each.session for each in before}]
        went = [m for m in before if m.session not in {each.session for each in generation.members}]
        said += f"; joined: {_names(came)}" if came and before else ""
        said += f"; left: {_names(went)}" if went else ""
        if generation.returns is not None:
            back = short(str(Task("ps", generation.returns.server)))
            said += f"; {back} was readmitted" if generation.returns.ready else f"; {back} is being readmitted"
        return said


def _names(members: Iterable[Member]) -> str:
    return ", ".join(short(str(member.task)) for member in members)
