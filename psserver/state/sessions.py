"""Sessions: the processes of a job, their leases, and the chief's fencing token. Server 0 keeps them.

A plain state machine without clock (time is an argument) and network. It decides nothing about generations: it reports
states, and the chief closes generations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from psserver.plans.divergence import compared
from psserver.registry import Registry
from psserver.state.changes import as_all, differing
from pswire.cluster import Task
from pswire.errors import (
    ConfigError,
    Diverged,
    Fenced,
    InvalidRequest,
    NewcomerDiverged,
    PSError,
    ScriptFailed,
    TaskTaken,
)
from pswire.limits import Timeouts
from pswire.model.changes import Change
from pswire.model.log import Generation, Member
from pswire.model.status import STILL, Pace, SessionState
from pswire.security.session_numbers import number_for

STILL_SECONDS = 5.0
"""Seconds without a look at leases after which a server is not healthy: normally it looks a few times a second."""

DRAWN = 30
"""Random bits of a token, so that nobody can guess it; the bits above are the chief's term."""

MAX_TERM = 1 << 32
"""The greatest term of a chief; a greater one was made up."""

PARTED_HEARTBEATS = 2
"""Heartbeats: a connection that ends within so many of the last sign of life means that its process has ended.

One that ends later may be cut off.
"""

DEPUTY_HEARTBEATS = 2
"""Heartbeats for which a chief that stands by has the first word once a chief is gone; then a worker takes its
place."""

JOIN_POINT = re.compile(r"dataset:[0-9]{1,10}|plan:[0-9a-f]{64}|save")
"""Form of a join point, which every process is told."""

ENDED = {
    "left": "it left",
    "failed": "it failed",
    "lost": "it sent no heartbeat for PS_SESSION_TIMEOUT",
    "replaced": "the task was started again",
    "hung": "it sent heartbeats, but held up a round for longer than PS_ROUND_TIMEOUT, because its script hangs or "
    "is slow",
}


@dataclass
class _SessionRecord:
    member: Member
    drives: bool
    seen: float
    opened: float
    key: int
    token: int
    state: str = "open"
    join_point: str = ""
    error: PSError | None = None
    waits: tuple[int, bytes] = (-1, b"")
    pace: Pace = STILL
    joined: int | None = None  # once it takes part: its first round, or -1 where it began together with all others
    parted: float | None = None  # when its connection ended, if nothing was heard since
    described: bool = False  # whether it has said here what it does

    def told(self, now: float) -> SessionState:
        """Returns what others are told of it."""
        state = "failed" if self.state == "replaced" else self.state
        silent, opened = now - self.seen, now - self.opened
        return SessionState(self.member, state, self.join_point, silent, self.drives, self.pace, opened)

    def differs(self, waits: tuple[int, bytes]) -> bool:
        """Returns True if it waits in a round, and has another section there."""
        return self.waits[0] == waits[0] and self.waits[1] != waits[1] and self.state == "open" and not self.drives

    @property
    def last_sign(self) -> float:
        """When it was last here: its last sign of life, or the end of its connection."""
        return self.seen if self.parted is None else self.parted

    def vanished(self, heartbeat: float) -> bool:
        """Returns True if its connection ended as it does with a process, and not as with a network that is cut."""
        return self.parted is not None and self.parted - self.seen <= PARTED_HEARTBEATS * heartbeat


class _Sessions(dict[int, _SessionRecord]):
    """All sessions, by number, in the order in which they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self._newest: dict[Task | None, _SessionRecord] = {}  # of each task, and of all chiefs

    def add(self, session: _SessionRecord) -> None:
        """Adds a session, which is its task's newest from now on."""
        self[session.member.session] = session
        self._newest[None if session.drives else session.member.task] = session

    @property
    def chief(self) -> _SessionRecord | None:
        """The newest chief's, whatever has become of it."""
        return self._newest.get(None)

    def rival(self, task: Task, drives: bool) -> _SessionRecord | None:
        """Returns the open session of a task, or, for one that drives, of any chief; None where there is none."""
        found = self._newest.get(None if drives else task)
        return found if found is not None and found.state == "open" else None

    def open_or_driving(self) -> list[_SessionRecord]:
        """Returns the sessions that have not ended."""
        return [session for session in self.values() if session.state == "open"]

    def open(self) -> list[_SessionRecord]:
        """Returns those of them that take part in rounds."""
        return [session for session in self.values() if session.state == "open" and not session.drives]

    def heirs(self, since: float) -> tuple[set[int], bool]:
        """Returns the workers of which one may drive, by number, and whether they stay: the lowest, or all who leave.

        Args:
            since: the time since when they were heard of.
        """
        workers = [session for session in self.open() if session.seen >= since and session.member.task.job == "worker"]
        stay = [session.member for session in workers if not session.pace.leaving]
        if stay:
            return {min(stay, key=lambda member: member.task).session}, True
        return {session.member.session for session in workers}, False

    def leave(self, since: float) -> bool | None:
        """As `Membership.leave_now`, of those of which something was heard since a time."""
        here = [s for s in self.open_or_driving() if s.parted is None and s.seen >= since]
        return True if any(s.pace.leaving for s in here if not s.drives) else None if here else False

    def forget_ended(self) -> None:
        """Forgets the sessions that have ended."""
        for number in [number for number, session in self.items() if session.state != "open"]:
            del self[number]
        self._newest = {key: session for key, session in self._newest.items() if session.state == "open"}


class Membership:
    """The sessions of the job, and their leases. Guarded by the core's lock.

    Args:
        registry: the registry of sessions.
        lease: seconds after which a silent session is lost.
        heartbeat: seconds between two signs of life.
        incarnation: of this server, which is in the numbers that it gives; those of an earlier one differ, by chance.
        generation: returns the newest generation, whose members alone decide for all; None while there is none, and all
            decide.
        held: returns True if there is a job with variables that is not over.
        generations: returns all generations of the job, by number.
    """

    def __init__(
        self,
        registry: Registry,
        lease: float,
        heartbeat: float = Timeouts.heartbeat_interval,
        incarnation: int = 0,
        generation: Callable[[], Generation | None] = lambda: None,
        held: Callable[[], bool] = lambda: False,
        generations: Callable[[], Mapping[int, Generation]] = dict,
    ) -> None:
        self.lease = lease
        self.token = 0
        """The newest token; its holder alone is chief."""
        self.job = ""
        """The identity of the sessions' job."""
        self.version = 0
        self.ends = 0
        """Changes with every session that ends or is forgotten."""
        self._pause = heartbeat
        self._held = held
        self._generations = generations
        self._heard = -inf  # the last sign of life of any process that takes part in rounds
        self._registry = registry
        self._generation = generation
        self._incarnation, self._given = incarnation, 0  # how many numbers
        self._sessions = _Sessions()
        self._changing = False  # somebody waits for a change of consistency

    def open(
        self,
        opens: Member,
        drives: bool,
        key: int,
        now: float,
        job: str = "",
        term: int = 0,
        drawn: int = 0,
    ) -> tuple[int, int]:
        """Opens a session, and ends the task's earlier one; a call with the same key returns the same session.

        So does one with the number of a session as its key: it was opened while another server kept the sessions.

        Returns:
            Its number and its fencing token, 0 for a session that does not drive.

        Raises:
            TaskTaken: another process is this task, or chief, and is alive.
            ConfigError: there is another job, or the other sessions have another consistency, or there are too many.
            Forbidden: another task's session has the same key.
        """
        task = opens.task
        for known, session in self._sessions.items():
            if key and key in (session.key, known):
                self._registry.enter(known, task)
                if drives and session.state == "open" and term > self.term:
                    session.token = self._next_token(term, drawn)
                return known, session.token
        if not drives:
            self._hear(now)
        self._check_job(task, job)
        number = number_for(task, self._incarnation, self._given + 1)
        opens = replace(opens, session=number)
        if not drives:
            opens = as_all(opens, (other.member for other in self._sessions.open()), self._generations())
        rival = self._sessions.rival(task, drives)
        if rival is not None:
            self._check_gone(rival, task, now)
        self._check_room(task)
        if rival is not None:
            self._end(rival, "replaced")
        self.job = job
        self._given += 1
        token = self._next_token(term, drawn) if drives else 0
        self._registry.enter(number, task)
        self._sessions.add(_SessionRecord(opens, drives, now, now, key, token))
        self.version += 1
        return number, token

    def know(self, member: Member, drives: bool, job: str, now: float) -> None:
        """Notes a session that was opened on the server that keeps them: this one may have to keep them one day."""
        known = self._sessions.get(member.session)
        if known is not None and known.member.task == member.task:
            return
        rival = self._sessions.rival(member.task, drives)
        if rival is not None:
            self._end(rival, "replaced")
        self.job = job
        self._sessions.add(_SessionRecord(member, drives, now, now, 0, 0))

    def take_over(self, token: int, now: float) -> None:
        """Keeps the sessions from now on: everybody gets a whole lease to be heard of.

        So does who takes part, and has not opened its session here, where this server is just back; but where another
        process of the task has, that session is over.

        Args:
            token: of the chief that says so.
            now: monotonic seconds.
        """
        generation = self._generation()
        for member in generation.everybody if generation else ():
            if self._sessions.rival(member.task, False) is None:
                self.know(member, False, self.job, now)
        self.token, self._heard = token, now
        self.version += 1
        for session in self._sessions.open_or_driving():
            session.seen, session.parted = now, None

    @property
    def term(self) -> int:
        """The term of the newest chief known here."""
        return self.token >> DRAWN

    def _next_token(self, term: int, drawn: int) -> int:
        """Makes a new token, above all that this server has given, and above the term that the caller knows."""
        if term > MAX_TERM:
            raise InvalidRequest(f"chief term {term} is not known")
        self.token = max(self.term, term) + 1 << DRAWN | drawn
        return self.token

    def _check_job(self, task: Task, job: str) -> None:
        """Raises `ConfigError` for another job than the current one, while that is not over."""
        if job == self.job:
            return
        here = ", ".join(str(session.member.task) for session in self._sessions.open_or_driving())
        if self._held() or here:
            raise _other_job(task, job, self.job, here)

    def _is_gone(self, session: _SessionRecord, now: float) -> bool:
        """Returns False while the process of a session may be alive."""
        return now - session.seen > self.lease or (session.parted is not None and now - session.parted >= self._pause)

    def _check_gone(self, rival: _SessionRecord, task: Task, now: float) -> None:
        """Raises `TaskTaken` while the process of a session may be alive."""
        if not self._is_gone(rival, now):
            raise _taken(task, rival.member.task, rival.drives, now - rival.seen)

    def is_to_drive(self, number: int, now: float) -> bool:
        """Returns True if the chief is gone, nobody has taken its place in `DEPUTY_HEARTBEATS`, and this worker is to.

        It is the lowest that lives and stays. Where all leave it is the one that asks, at once: they have seconds to
        leave, and need a chief for it. Nobody takes the place of a coordinator, whose script is its own.
        """
        chief = self._sessions.chief
        if chief is None or chief.state == "left" or not self._held():
            return False
        if chief.state == "open" and not self._is_gone(chief, now):
            return False
        scripts = [s.member for s in self._sessions.values() if not s.drives and s.member.task == chief.member.task]
        if chief.member.task.job == "chief" and any(member.alone for member in scripts):
            return False
        limit = DEPUTY_HEARTBEATS * self._pause
        heirs, stays = self._sessions.heirs(now - limit)
        return number in heirs and (not stays or now - chief.last_sign >= limit)

    def leave_now(self, now: float) -> bool | None:
        """Returns True while a process leaves that was told to end, None while one is here that may be told so yet.

        A chief is here until it has told that the job is over. Who heartbeats no more is not: where another server
        keeps the sessions, this one hears of no farewell.
        """
        return self._sessions.leave(now - DEPUTY_HEARTBEATS * self._pause)

    def part(self, number: int, now: float) -> None:
        """Notes that the connection of a session has ended. Unless the process is heard of again, it has ended too."""
        if number in self._sessions:
            self._sessions[number].parted = now

    def _hear(self, now: float) -> None:
        """Notes a sign of life of a process that takes part in rounds.

        After a long silence of all of them this server was cut off: then every process gets a whole lease to be heard
        of again.
        """
        if now - self._heard > self.lease / 2:
            for session in self._sessions.open():
                if not session.vanished(self._pause):
                    session.seen = now
        self._heard = now

    def _check_room(self, task: Task) -> None:
        others = [session for session in self._sessions.open_or_driving() if session.member.task != task]
        if len(others) >= self._registry.limit:
            raise _one_too_many(task, self._registry.limit)
        self._registry.check_room()

    def check(self, number: int) -> None:
        """Raises the error of a session that has ended; `Fenced` if it is unknown."""
        session = self._sessions.get(number)
        if session is None:
            raise Fenced(
                "this session is not known on this server, because its job is over or was restarted; "
                "restart the process"
            )
        if session.state != "open":
            raise session.error or Fenced(
                f"this process was removed from the job, because {ENDED[session.state]}; restart it to take part again",
                str(session.member.task),
            )

    def _takes_part(self, number: int) -> bool:
        return (generation := self._generation()) is None or generation.takes_part(number)

    def check_part(self, number: int) -> None:
        """Raises `InvalidRequest` for a session that is no member of the generation: it decides nothing for members."""
        if not self._takes_part(number):
            raise InvalidRequest(f"session {number} is not in a generation yet; wait until the chief has admitted it")

    def heartbeat(
        self,
        number: int,
        waits: tuple[int, bytes],
        now: float,
        describe: Callable[[bytes], str],
        pace: Pace | None = STILL,
    ) -> None:
        """Renews an open session's lease; ends all sessions if two have made different plans of one round.

        If one of the two is a newcomer in its first round, it ends alone. A heartbeat without a pace says nothing new.

        Raises:
            InvalidRequest: it says nothing, and no other one has come here: this server did not keep the sessions then.
        """
        self.touch(number, now)
        session = self._sessions[number]
        if pace is None:
            if not session.described:
                raise InvalidRequest("this session must send its first heartbeat over gRPC")
            return
        self.version += _asks(session.pace) != _asks(pace)  # the chief is told at once
        session.pace, session.described = pace, True
        if waits[0] < 0 or not self._takes_part(number):
            session.waits = (-1, b"")
            return
        session.waits = waits
        for other in [*self._sessions.values()]:
            if other.differs(waits):  # looked at now: the one before may have ended all
                self._tell_apart(other, session, waits[0], describe)
        if self._changing:
            self._compare_changes()

    def _compare_changes(self) -> None:
        """Ends all sessions if two members do not come to one change of consistency."""
        here = self._sessions.open()
        self._changing = any(Change.parse(each.join_point) is not None for each in here)
        members = [each for each in here if self._takes_part(each.member.session)]
        error = differing([(each.member, each.join_point, each.waits[0]) for each in members], self._generations())
        if error is not None:
            self.fail_all(error)

    def move(self, model: Member) -> None:
        """All who are here make their rounds as this member from now on."""
        for session in self._sessions.open():
            session.member = replace(session.member, consistency=model.consistency)

    def _tell_apart(
        self, one: _SessionRecord, other: _SessionRecord, round: int, describe: Callable[[bytes], str]
    ) -> None:
        """Ends the sessions that are wrong after two ran different sections in one round."""
        newcomers = [session for session in (one, other) if session.joined == round]
        positions = [(session.member.task, describe(session.waits[1])) for session in (one, other)]
        if not newcomers:
            self.fail_all(diverged(round, positions))
        elif len(newcomers) == 1:  # which of two newcomers is wrong is decided by an older member
            newcomers[0].error = newcomer_diverged(newcomers[0].member.task, round, positions)
            self._end(newcomers[0], "failed")

    def take_part(self, members: Iterable[Member], round: int) -> None:
        """Sets the first round of members that took no part before; -1 where all begin together."""
        for member in members:
            session = self._sessions.get(member.session)
            if session is not None and session.joined is None:
                session.joined = round

    def exclude(self, numbers: Iterable[int]) -> None:
        """Ends the sessions that a generation has left out: those that still heartbeat have held the others up."""
        for number in numbers:
            if number in self._sessions:
                self._end(self._sessions[number], "hung")

    def leave(self, number: int, error: str) -> None:
        """Ends a session, cleanly or with an error; a divergence, or a script that failed for good, ends all.

        Raises:
            PSError: why the session cannot end cleanly: it has failed, or its task was started again.
        """
        session = self._sessions.get(number)
        if session is None or session.state == "left":
            return
        if session.state in ("failed", "replaced", "hung"):
            if not error:
                self.check(number)
            return
        # A lost process that leaves cleanly has done its part: the goodbye holds.
        session.state = "open"
        self._end(session, "failed" if error else "left")
        if (kind := error.partition(": ")[0]) in _OF_ALL and self._takes_part(number):
            self.fail_all(_OF_ALL[kind](error.partition(": ")[2]))

    def expire(self, now: float) -> list[Task]:
        """Ends the sessions whose lease is over; returns their tasks.

        If no process that takes part in rounds is heard of, this server is probably cut off: that all have died at once
        is less likely. Then only sessions whose connections ended as with their process are lost.
        """
        cut = now - self._heard > self.lease / 2
        late = [s for s in self._sessions.open_or_driving() if now - s.seen > self.lease]
        lost = [s for s in late if s.drives or not cut or s.vanished(self._pause)]
        for session in lost:
            self._end(session, "lost")
        return [session.member.task for session in lost]

    def fail_all(self, error: PSError) -> None:
        """Ends every session that takes part in rounds, with one error for all."""
        for session in self._sessions.open():
            session.error = error
            self._end(session, "failed")

    def begin_anew(self, numbers: Iterable[int]) -> None:
        """Ends the sessions of a job that is over, and forgets ended ones: a new job waits for all tasks."""
        for number in numbers:
            if number in self._sessions:
                self._end(self._sessions[number], "replaced")
        self._registry.retire({*numbers, *(n for n, session in self._sessions.items() if session.state != "open")})
        self._sessions.forget_ended()
        self.ends += 1

    def forgive(self, seconds: float) -> None:
        """Extends all leases by some seconds."""
        self._heard += seconds
        for session in self._sessions.open_or_driving():
            session.seen += seconds
            session.parted = None if session.parted is None else session.parted + seconds

    def enter(self, number: int, join_point: str) -> None:
        """Sets the join point where a new member waits, or all for a change; `InvalidRequest` for a malformed one."""
        change = Change.parse(join_point)
        if not (change or JOIN_POINT.fullmatch(join_point)):
            raise InvalidRequest("new members can wait only at dataset:N, plan:HEX or save")
        if self._sessions[number].join_point != join_point:
            self._sessions[number].join_point = join_point
            self.version += 1
        if change is not None:
            self._compare_changes()

    def touch(self, number: int, now: float, pace: Pace | None = None) -> None:
        """Renews a session's lease: any call is a sign of life. With a pace: another server keeps it."""
        session = self._sessions.get(number)
        if session is None:
            return
        session.seen, session.parted, session.pace = now, None, pace or session.pace
        if not session.drives:
            self._hear(now)

    def chief_silent(self, now: float) -> float:
        """Returns the seconds since a chief was heard of; infinite if there was none."""
        return min((now - s.seen for s in self._sessions.values() if s.drives), default=float("inf"))

    def chief_left(self) -> bool:
        """Returns True if the chief itself has ended its session."""
        chief = self._sessions.chief
        return chief is not None and chief.state == "left"

    def states(self, now: float, drivers: bool = False) -> tuple[SessionState, ...]:
        """Returns the states of all sessions that take part in rounds; with `drivers` those of chiefs as well."""
        return tuple(session.told(now) for session in self._sessions.values() if drivers or not session.drives)

    def _end(self, session: _SessionRecord, state: str) -> None:
        if session.state == "open":
            session.state = state
            session.waits = (-1, b"")
            self.version += 1
            self.ends += 1


def _other_job(task: Task, job: str, held: str, here: str) -> ConfigError:
    mine, theirs = (f"the job {name!r}" if name else "a job without a name" for name in (job, held))
    join = f"set PS_JOB={held}" if held else "unset PS_JOB"
    why = (
        f"{here} of its processes are still connected"
        if here
        else "it was not closed cleanly, and its variables are still there"
    )
    return ConfigError(
        f"{task} belongs to {mine}, but these servers hold {theirs}: {why}. To take part in that job, {join}; to "
        "discard it after its processes have ended, run psctl job delete"
    )


def _one_too_many(task: Task, limit: int) -> ConfigError:
    return ConfigError(
        f"{task} cannot connect, because {limit} sessions are open, which is the limit; end processes that are not "
        "needed, or start the servers with a larger --max-sessions"
    )


def _asks(pace: Pace) -> tuple[bool, bool]:
    """Returns what a process asks the chief for."""
    return pace.leaving, pace.saving


def _taken(task: Task, other: Task, drives: bool, silent: float) -> TaskTaken:
    what = "chief of this job" if drives else f"{task} of this job"
    known = "" if other == task else f", as {other}"
    return TaskTaken(
        f"another process is {what}{known}, and sent a heartbeat {silent:.1f} s ago; end it first, or correct the "
        "task in this process's TF_CONFIG",
        str(task),
    )


def _told(positions: Iterable[tuple[Task, str]]) -> str:
    """Returns the tasks with their sections, in words."""
    tasks, sections = zip(*positions, strict=True)
    return "; ".join(f"{task} runs: {section}" for task, section in zip(tasks, compared(sections), strict=True))


_OF_ALL = {kind.__name__: kind for kind in (Diverged, ScriptFailed)}
"""Errors of one process that end all."""


def diverged(round: int, positions: Iterable[tuple[Task, str]]) -> Diverged:
    """Returns the error for processes that run different sections in one round."""
    return Diverged(
        f"the processes do not run the same program: in round {round} {_told(positions)}. Every process must run the "
        "same steps in the same order"
    )


def newcomer_diverged(task: Task, round: int, positions: Iterable[tuple[Task, str]]) -> NewcomerDiverged:
    """Returns the error for a process that joins a running job with another program than its members'."""
    return NewcomerDiverged(
        f"it joined a running job, but runs another program: in its first round, {round}, {_told(positions)}. Start "
        "it with the script and arguments of the other workers, which go on without it",
        str(task),
    )
