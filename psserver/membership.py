"""Who is there: the sessions of a job, their leases, and the chief's fencing token. Server 0 keeps it.

A plain state machine: it has no clock (time is an argument) and no network. It decides nothing about
epochs: it says what happened, and the chief closes an epoch.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from psserver.words import compared
from pswire.cluster import Task
from pswire.errors import ConfigError, Diverged, Fenced, InvalidRequest, PSError
from pswire.log import Epoch, Member, Mode
from pswire.status import SessionState

MAX_SESSIONS = 1024
"""That may be open at a time, if nobody says another number."""

REMEMBERED = 64
"""How many times as many are remembered that have ended: the chief has to hear of them."""

STILL_SECONDS = 5.0
"""How long nobody may have looked at leases and deadlines: it is done a few times a second."""

COARSE = 28
"""Of `first`, that many low bits are not told by tokens."""

DRAWN = 30
"""Bits of a token that are drawn by lot, so that nobody can guess it; those above count."""

ENTRY = re.compile(r"dataset:[0-9]{1,10}|plan:[0-9a-f]{64}|save")
"""Where new members wait; everybody is told."""

ENDED = {
    "left": "it left",
    "failed": "it failed",
    "lost": "its lease ended",
    "replaced": "the task was started again",
}


@dataclass
class _Session:
    member: Member
    drives: bool
    seen: float
    key: int
    token: int
    state: str = "open"
    entry: str = ""
    error: PSError | None = None
    waits: tuple[int, bytes] = (-1, b"")


class Membership:
    """All sessions of the job. Guarded by the core's lock.

    Args:
        lease: seconds after which a silent session is lost.
        first: below all numbers of sessions that are given; those of an earlier server 0 are smaller, its tokens too.
        limit: sessions that may be open at a time.
        epoch: gives the newest, whose members alone decide for all; None while there is none, and all do.
    """

    def __init__(
        self,
        lease: float,
        first: int = 0,
        limit: int = MAX_SESSIONS,
        epoch: Callable[[], Epoch | None] = lambda: None,
    ) -> None:
        self.lease = lease
        self.token = first >> COARSE << DRAWN
        """The newest; its holder alone is chief."""
        self.version = 0
        self._limit = limit
        self._epoch = epoch
        self._last = first
        self._sessions: dict[int, _Session] = {}

    def open(
        self, task: Task, replicas: int, drives: bool, key: int, now: float, mode: Mode = "sync"
    ) -> tuple[int, int]:
        """Begins a session and ends the one that the task had; one with the same key is the same session.

        Returns:
            Its number and its fencing token, 0 for those that do not drive.

        Raises:
            ConfigError: it takes part in rounds, and others make them in another mode; or there are too many.
        """
        for number, session in self._sessions.items():
            if key and session.key == key:
                return number, session.token
        if not drives:
            self._check_mode(task, mode)
        self._check_room(task)
        for other in self._sessions.values():
            if other.member.task == task and other.drives == drives:
                self._end(other, "replaced")
        self._last += 1
        if drives:
            self.token = (self.token >> DRAWN) + 1 << DRAWN | secrets.randbits(DRAWN)
        token = self.token if drives else 0
        self._sessions[self._last] = _Session(Member(task, self._last, replicas, mode), drives, now, key, token)
        self.version += 1
        return self._last, token

    def _check_room(self, task: Task) -> None:
        others = [session for session in self._open_or_driving() if session.member.task != task]
        if len(others) >= self._limit:
            raise ConfigError(
                f"{task} would be one more than the {self._limit} sessions that may be open here; end those that are "
                "not needed, or start the servers with a larger --max-sessions"
            )
        self.check_count(len(self._sessions))

    def check_count(self, known: int) -> None:
        """Raises `ConfigError` if there are too many sessions, those included that have ended."""
        if known >= REMEMBERED * self._limit:
            raise ConfigError(
                f"the tasks of this job were started {known} times already; start the job anew, or its "
                "servers with a larger --max-sessions"
            )

    def _check_mode(self, task: Task, mode: Mode) -> None:
        for other in (session.member for session in self._open()):
            if other.task != task and other.mode != mode:
                raise ConfigError(
                    f"{task} runs with consistency {mode!r}, and {other.task} with {other.mode!r}; "
                    "give every process of the job the same: ps.Sync() or ps.Async()"
                )

    def check(self, number: int) -> None:
        """Raises the reason if a session has ended, `Fenced` if there never was one."""
        session = self._sessions.get(number)
        if session is None:
            raise Fenced("this session is unknown here: its job is over, or was started anew; restart the process")
        if session.state != "open":
            raise session.error or Fenced(
                f"this session was ended: {ENDED[session.state]}; restart the process to take part again",
                str(session.member.task),
            )

    def _takes_part(self, number: int) -> bool:
        epoch = self._epoch()
        return epoch is None or epoch.session(number) is not None

    def check_part(self, number: int) -> None:
        """Raises `InvalidRequest` for a session that is no member: it decides nothing for those who are."""
        if not self._takes_part(number):
            raise InvalidRequest(f"session {number} takes part in no epoch yet; wait until the chief has taken it in")

    def task(self, number: int) -> Task:
        """Whose session it is."""
        return self._sessions[number].member.task

    def beat(self, number: int, waits: tuple[int, bytes], now: float, describe: Callable[[bytes], str]) -> None:
        """Renews an open session's lease; ends all sessions if two wait in one round for different plans."""
        session = self._sessions[number]
        session.seen = now
        if waits[0] < 0 or not self._takes_part(number):
            session.waits = (-1, b"")
            return
        session.waits = waits
        for other in self._open():
            if other.waits[0] == waits[0] and other.waits[1] != waits[1]:
                self.fail_all(diverged(waits[0], [(s.member.task, describe(s.waits[1])) for s in (other, session)]))

    def leave(self, number: int, error: str) -> None:
        """Ends a session, cleanly or not; a divergence ends all.

        Raises:
            PSError: why a session cannot end cleanly: it has failed, or its task was started again.
        """
        session = self._sessions.get(number)
        if session is None or session.state == "left":
            return
        if session.state in ("failed", "replaced"):
            if not error:
                self.check(number)
            return
        # Who was thought dead and says goodbye has done its part all the same; nobody else would say it.
        session.state = "open"
        self._end(session, "failed" if error else "left")
        if error.startswith(Diverged.__name__) and self._takes_part(number):
            self.fail_all(Diverged(error.partition(": ")[2]))

    def expire(self, now: float) -> list[Task]:
        """Ends the sessions whose lease is over; returns their tasks."""
        lost = [s for s in self._sessions.values() if s.state == "open" and now - s.seen > self.lease]
        for session in lost:
            self._end(session, "lost")
        return [session.member.task for session in lost]

    def fail_all(self, error: PSError) -> None:
        """Ends every session that takes part in rounds, with one error for all."""
        for session in self._open():
            session.error = error
            self._end(session, "failed")

    def begin_anew(self, numbers: Iterable[int]) -> None:
        """Ends the sessions of a job that is over, and forgets all that have ended: a new job waits for everyone."""
        for number in numbers:
            if number in self._sessions:
                self._end(self._sessions[number], "replaced")
        self._sessions = {number: session for number, session in self._sessions.items() if session.state == "open"}

    def forgive(self, seconds: float) -> None:
        """Prolongs all leases."""
        for session in self._open_or_driving():
            session.seen += seconds

    def enter(self, number: int, entry: str) -> None:
        """Notes where a new member waits to be taken in; raises `InvalidRequest` for what is no such place."""
        if not ENTRY.fullmatch(entry):
            raise InvalidRequest("new members wait at dataset:N, plan:HEX or save, and nowhere else")
        if self._sessions[number].entry != entry:
            self._sessions[number].entry = entry
            self.version += 1

    def touch(self, number: int, now: float) -> None:
        """Any call is a sign of life."""
        if number in self._sessions:
            self._sessions[number].seen = now

    def chief_silent(self, now: float) -> float:
        """Seconds since any chief was heard of; infinite where there never was one."""
        return min((now - s.seen for s in self._sessions.values() if s.drives), default=float("inf"))

    def chief_left(self) -> bool:
        """Whether the chief's session was ended by the chief itself."""
        drivers = [s for s in self._sessions.values() if s.drives]
        return bool(drivers) and drivers[-1].state == "left"

    def states(self, now: float, drivers: bool = False) -> tuple[SessionState, ...]:
        """All sessions that take part in rounds; with `drivers` those of chiefs as well."""
        return tuple(
            SessionState(s.member, "failed" if s.state == "replaced" else s.state, s.entry, now - s.seen, s.drives)
            for s in self._sessions.values()
            if drivers or not s.drives
        )

    def _open_or_driving(self) -> list[_Session]:
        return [s for s in self._sessions.values() if s.state == "open"]

    def _open(self) -> list[_Session]:
        return [s for s in self._sessions.values() if s.state == "open" and not s.drives]

    def _end(self, session: _Session, state: str) -> None:
        if session.state == "open":
            session.state = state
            session.waits = (-1, b"")
            self.version += 1


def diverged(round: int, positions: Iterable[tuple[Task, str]]) -> Diverged:
    """The error for processes that do different things in one round."""
    tasks, sections = zip(*positions, strict=True)
    words = "; ".join(f"{task} is at: {section}" for task, section in zip(tasks, compared(sections), strict=True))
    return Diverged(
        f"the processes do not run the same program: in round {round} {words}. "
        "Every process must make the same sequence of sections"
    )
