"""The view of a job that the servers' answers give together: servers, tasks, and problems. No network here.

The fields of these classes are the keys of `psctl status --json`; tasks are written as `/job:ps/task:0`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from pswire.cluster import Task
from pswire.model.log import Generation
from pswire.model.status import OpenRound, ProcessStatus, Saving, ServerStatus, SessionState, held_up
from pswire.telemetry.views.looked import Looked, gone_of, keeper_of, why_silent

DIFFERS = (
    "the two machines compute differently, or one has faulty memory. The chief removes one server once; start it "
    "again, and if this comes back, run both on the same kind of processor"
)
"""What becomes of two servers with other values, and what to do."""

CATCHING_UP = "it is recovering its variables; do not end another server before this is done"
"""What a server does that is back, and what not to do."""

CHIEF = "the chief"
"""The one that a plan waits for that nobody has approved."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        kind: one word for machines; `docs/psctl.md` lists them.
        task: the task that it is about, "" for none.
        message: the problem and its remedy.
    """

    kind: str
    task: str
    message: str


def _told(default: Any, read: Callable[[ServerStatus, ProcessStatus], Any] | None = None) -> Any:
    """A field that is read of a server's status, where it is the field of that name if no other way is given.

    Where there is no status it is its default, or what that returns.
    """
    key = "default_factory" if callable(default) else "default"
    return field(metadata={"read": read}, **{key: default})


@dataclass(frozen=True)
class ServerView:
    """One server. Of one that does not answer all is 0, or empty, that its status would tell.

    Attributes:
        task, address: the server, and the address at which it was asked.
        state: "up", "broken" (a round failed halfway), "unreachable", or "refused": it does not answer us.
        lag: number of rounds that its last complete one is behind the newest of any server.
        waits_for: tasks that are missing in any open round.
        transports: sessions of tasks by the transport that they use to it.
        version: version of this package there.
        traffic: payload bytes so far by transport and direction, such as "shm received".
        up_seconds: seconds since its process began.
        phases: seconds of all rounds so far by phase: "waiting", "applying", "answering".
        table_rows, table_bytes: rows of each dynamic table there, and the bytes that it takes, by name.
        tier_bytes, tier_resident_bytes, tier_memory: bytes of files that rows of dynamic tables lie in there, how many
            of these are in memory, and how many may be; 0 where all rows are in memory.
        page: URL of its status page, "" for none.
    """

    task: str
    address: str
    state: str
    lag: int = 0
    incarnation: int = _told(0)
    started_at: float = _told(0.0, lambda s, p: p.clock - p.uptime)
    generation: int = _told(0, lambda s, p: s.generation.number if s.generation else 0)
    round: int = _told(-1)
    waiting: tuple[Mapping[str, object], ...] = _told((), lambda s, p: tuple(map(_open_round, s.waiting)))
    waits_for: tuple[str, ...] = _told((), lambda s, p: _awaited(s.waiting))
    log: int = _told(0)
    variables: int = _told(0)
    variable_bytes: int = _told(0)
    memory_limit: int = _told(0)
    snapshot_bytes: int = _told(0)
    snapshot_limit: int = _told(0)
    resident_bytes: int = _told(0, lambda s, p: p.resident)
    transports: Mapping[str, int] = _told(dict, lambda s, p: _transports(s.generation, p))
    saving: tuple[Mapping[str, object], ...] = _told((), lambda s, p: tuple(map(_saving, s.saving)))
    device: str = _told("")
    domain: str = _told("")
    version: str = _told("", lambda s, p: p.versions.get("paramserver", ""))
    traffic: Mapping[str, int] = _told(dict, lambda s, p: p.traffic)
    up_seconds: float = _told(0.0, lambda s, p: p.uptime)
    phases: Mapping[str, float] = _told(dict)
    table_rows: Mapping[str, int] = _told(dict)
    table_bytes: Mapping[str, int] = _told(dict)
    tier_bytes: int = _told(0)
    tier_resident_bytes: int = _told(0)
    tier_memory: int = _told(0)
    page: str = _told("", lambda s, p: p.page)


@dataclass(frozen=True)
class TaskView:
    """One session of a task that is no server; a task that drives and trains has two.

    Attributes:
        task: name of the task.
        drives: True if it is the chief's, which makes no rounds.
        state: "open", "left" (cleanly), "failed", "lost" (its lease ended), "hung" (it held a round up), or "missing".
        session: number of the session, 0 for a missing one.
        replicas: number of its replicas.
        mode: as in `JobView`; "" where it makes no rounds.
        silent_seconds: seconds since its last sign of life.
        takes_part: True if it is in the newest generation.
        round: the last round that it has contributed to; -1 for none. Of an asynchronous task its own count.
        lag: number of rounds that it is behind the newest of any task.
        waits_for: tasks that it waits for; none while it computes.
        transports: kinds of transports that it uses, to any server.
        steps, rounds, waits: its calls of `strategy.run`, the rounds that it has made, and how often it has waited
            for rounds.
        opened_seconds: seconds since its session was opened; 0 where the server does not tell.
        page: URL of its status page, "" for none.
    """

    task: str
    drives: bool
    state: str
    session: int = 0
    replicas: int = 0
    mode: str = ""
    silent_seconds: float = 0.0
    takes_part: bool = False
    round: int = -1
    lag: int = 0
    waits_for: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    steps: int = 0
    rounds: int = 0
    waits: int = 0
    opened_seconds: float = 0.0
    page: str = ""


@dataclass(frozen=True)
class StandbyView:
    """A process that waits for the place of a server.

    Attributes:
        address: its address.
        domain: the part of the machines that fails as one in which it runs.
        place: the server whose place it gets; "" for none yet.
    """

    address: str
    domain: str
    place: str


@dataclass(frozen=True)
class JobView:
    """The state of a job.

    Attributes:
        state: "none" (no chief has begun a job), "starting" (nobody takes part yet), "running", "over", "broken", or
            "unknown" (no server answers).
        mode: "sync", "async" or "bounded"; "" while nobody takes part.
        generation: number of the newest generation, 0 for none.
        round: the newest round of any server, complete or not; -1 for none.
        replicas: R, of the newest generation.
        staleness: in the mode "bounded" the most rounds that an answered task may be ahead of another; else 0.
        gap: in the mode "bounded" the rounds between the foremost and the hindmost task that is waited for, on any
            server; one more than `staleness` where the foremost has pushed, and waits for its answer.
        servers, tasks: the view of each.
        standbys: processes that wait for the place of a server.
        problems: all problems that were found.
    """

    state: str
    mode: str
    generation: int
    round: int
    replicas: int
    staleness: int
    gap: int
    servers: tuple[ServerView, ...]
    tasks: tuple[TaskView, ...]
    problems: tuple[Problem, ...]
    standbys: tuple[StandbyView, ...] = ()


def view_of(looked: Sequence[Looked], expected: Sequence[Task] = ()) -> JobView:
    """Returns what the servers' answers say.

    Args:
        looked: the answers, in the order of the addresses.
        expected: workers and chief of the cluster, if they are known.
    """
    statuses = [found.status for found in looked if found.status]
    keeper = keeper_of(statuses)
    log_server = next((status for status in statuses if status.server == keeper), None)
    newest = max(
        (s.generation for s in statuses if s.generation), key=lambda generation: generation.number, default=None
    )
    servers = tuple(_server(found, max(map(_newest_round, statuses), default=-1)) for found in looked)
    tasks = tuple(_tasks(statuses, log_server, newest, expected))
    return JobView(
        state=_state(statuses, newest),
        mode=newest.members[0].consistency.mode if newest and newest.members else "",
        generation=newest.number if newest else 0,
        round=max(map(_newest_round, statuses), default=-1),
        replicas=newest.replicas if newest else 0,
        staleness=newest.members[0].consistency.staleness if newest and newest.members else 0,
        gap=max((status.gap for status in statuses), default=0),
        servers=servers,
        tasks=tasks,
        problems=(*_problems_of_servers(looked, log_server), *_problems_of_tasks(tasks, log_server)),
        standbys=tuple(_standbys(statuses)),
    )


def _standbys(statuses: Iterable[ServerStatus]) -> Iterable[StandbyView]:
    """Returns the processes that wait, without those that are a server already."""
    serve = {(moved.server, moved.address) for status in statuses for moved in status.moved}
    found = {standby.address: standby for status in statuses for standby in status.standbys}
    for standby in found.values():
        if (standby.place, standby.address) not in serve:
            yield StandbyView(
                standby.address, standby.domain, str(Task("ps", standby.place)) if standby.place >= 0 else ""
            )


def _state(statuses: Sequence[ServerStatus], newest: Generation | None) -> str:
    if not statuses:
        return "unknown"
    if any(status.broken for status in statuses):
        return "broken"
    if any(status.over for status in statuses):
        return "over"
    if not any(status.incarnations for status in statuses):
        return "none"
    return "running" if newest and newest.members else "starting"


def _newest_round(status: ServerStatus) -> int:
    """The newest round that a server has heard of, complete or not; asynchronous ones it counts when complete."""
    alone = status.generation is not None and any(member.alone for member in status.generation.members)
    return status.round if alone else max([status.round, *(waiting.round for waiting in status.waiting)])


# ---- Servers ----


UNTOLD = ProcessStatus(0.0, 0, {}, 0, "", {}, {}, 0.0)
"""The process of a server that says nothing of it."""


def _server(found: Looked, newest: int) -> ServerView:
    status = found.status
    if status is None:
        return ServerView(str(found.task), found.address, why_silent(found))
    process = status.process or UNTOLD
    told = {each.name: _read(each, status, process) for each in fields(ServerView) if each.metadata}
    state = "broken" if status.broken else "up"
    return ServerView(str(found.task), found.address, state, newest - status.round, **told)


def _read(told: Field[Any], status: ServerStatus, process: ProcessStatus) -> Any:
    read = told.metadata["read"]
    return getattr(status, told.name) if read is None else read(status, process)


def _transports(generation: Generation | None, process: ProcessStatus) -> dict[str, int]:
    return dict(
        Counter(process.transports.get(member.session, "grpc") for member in (generation.members if generation else ()))
    )


def _saving(saving: Saving) -> dict[str, Any]:
    return {"path": saving.path, "round": saving.round, "bytes": saving.nbytes}


def _open_round(waiting: OpenRound) -> dict[str, Any]:
    return {
        "round": waiting.round,
        "section": waiting.section,
        "approved": waiting.approved,
        "missing": [str(task) for task in waiting.missing],
    }


def _awaited(waiting: Iterable[OpenRound]) -> tuple[str, ...]:
    """Returns whom rounds wait for."""
    rounds = list(waiting)
    missing = sorted({task for each in rounds for task in each.missing})
    chief = [CHIEF] if any(not each.approved for each in rounds) else []
    return (*map(str, missing), *chief)


def _problems_of_servers(looked: Sequence[Looked], log_server: ServerStatus | None) -> Iterable[Problem]:
    job = next((s.incarnations for s in (log_server, *(found.status for found in looked)) if s and s.incarnations), ())
    gone = gone_of([found.status for found in looked if found.status])
    seen: dict[int, str] = {}
    for found in looked:
        task, status = str(found.task), found.status
        if found.task.index in gone:
            yield Problem(
                "gone",
                task,
                "it was lost, and the job goes on with copies; start it again, or start a standby server with "
                "psserver --join",
            )
            continue
        if status is None:
            yield Problem(why_silent(found), task, found.error.message if found.error else "it does not answer")
            continue
        if status.incarnation in seen:
            message = f"{found.address} and {seen[status.incarnation]} are the same server; correct the addresses"
            yield Problem("same_server", task, message)
        seen[status.incarnation] = found.address
        if status.broken:
            yield Problem("broken", task, status.broken)
        if status.recovering:
            yield Problem("recovering", task, CATCHING_UP)
        if status.incarnations not in ((), job):
            message = f"{found.address} belongs to another job than the other servers; correct the addresses"
            yield Problem("other_job", task, message)
        elif job and status.incarnation not in job:
            message = "it was restarted after the job began, and its variables are lost"
            yield Problem("replaced", task, f"{message}; restart the job from a checkpoint")
    for server, missed in held_up([found.status for found in looked if found.status]):
        said = (
            f"it has not reached {Task('ps', missed.server)} for {missed.seconds:.0f} s ({missed.reason}), so rounds "
            "wait; check the network between them"
        )
        yield Problem("cut_off", str(Task("ps", server)), said)
    for status in (found.status for found in looked if found.status):
        for each in status.differences:
            said = f"it has different values than {Task('ps', each.server)} since round {each.round} ({each.told})"
            yield Problem("differs", str(Task("ps", status.server)), f"{said}; {DIFFERS}")
    if log_server is None and seen:
        keeper = str(Task("ps", keeper_of([found.status for found in looked if found.status])))
        yield Problem("no_keeper", keeper, "it does not answer, and only this server knows the state of the workers")
    if job and len(job) != len(looked):
        message = f"the job has {len(job)} servers, but {len(looked)} were asked; name all of them, in order"
        yield Problem("incomplete", "", message)


# ---- Tasks ----


def _tasks(
    statuses: Sequence[ServerStatus],
    log_server: ServerStatus | None,
    newest: Generation | None,
    expected: Sequence[Task],
) -> Iterable[TaskView]:
    """Of each task the newest session, and of those that drive and train both; then those that never came."""
    latest = {(s.member.task, not s.drives): s for s in (log_server.sessions if log_server else ())}
    furthest = max([_round_of(s, statuses) for s in latest.values() if not s.drives], default=-1)
    for _, session in sorted(latest.items()):
        yield _task(session, statuses, newest, furthest)
    came = {session.member.task for session in latest.values()}
    if log_server:
        yield from (TaskView(str(task), task.job == "chief", "missing") for task in expected if task not in came)


def _task(
    session: SessionState, statuses: Sequence[ServerStatus], newest: Generation | None, furthest: int
) -> TaskView:
    member, drives = session.member, session.drives
    takes_part = newest is not None and member in newest.members
    round = -1 if drives else _round_of(session, statuses)
    used = [s.process.transports.get(member.session, "grpc") for s in statuses if s.process]
    return TaskView(
        task=str(member.task),
        drives=drives,
        state=session.state,
        session=member.session,
        replicas=member.replicas,
        mode="" if drives else member.consistency.mode,
        silent_seconds=session.silent,
        takes_part=takes_part,
        round=round,
        lag=furthest - round if takes_part else 0,
        waits_for=() if drives or session.state != "open" else _waits_for(session, statuses, takes_part),
        transports=() if drives else tuple(sorted(set(used))),
        steps=session.pace.steps,
        rounds=session.pace.rounds,
        waits=session.pace.waits,
        opened_seconds=session.opened,
        page=session.pace.page,
    )


def _round_of(session: SessionState, statuses: Sequence[ServerStatus]) -> int:
    """The last round to which a task has contributed."""
    task = session.member.task
    if session.member.alone:
        return max((place.round for s in statuses for place in s.places if place.task == task), default=-1)
    begun = [w.round for s in statuses for w in s.waiting if task not in w.missing]
    return max([*begun, *(status.round for status in statuses)], default=-1)


def _waits_for(session: SessionState, statuses: Sequence[ServerStatus], takes_part: bool) -> tuple[str, ...]:
    """Returns whom a task waits for that has contributed to an open round, or that nobody has taken in yet."""
    if not takes_part:
        return (CHIEF,)
    own, alone = _round_of(session, statuses), session.member.alone
    waiting = (w for s in statuses for w in s.waiting if session.member.task not in w.missing)
    return _awaited(w for w in waiting if not alone or w.round == own)


def _problems_of_tasks(tasks: Sequence[TaskView], log_server: ServerStatus | None) -> Iterable[Problem]:
    if log_server is None or log_server.over:
        return
    drivers = [task for task in tasks if task.drives]
    if not any(task.state == "open" for task in drivers):
        yield _no_chief(drivers)
    for task in tasks:
        if task.drives or task.state not in GONE:
            continue
        yield Problem(task.state, task.task, GONE[task.state].format(silent=task.silent_seconds))


def _no_chief(drivers: Sequence[TaskView]) -> Problem:
    """Nobody approves plans, closes generations or commits checkpoints."""
    gone = next((task for task in drivers if task.session), None)
    if gone is None:
        what = "the chief has not connected yet; start the chief task, or worker 0 if the cluster has no chief"
        return Problem("no_chief", "", what)
    silent = (
        f"the chief has not answered for {gone.silent_seconds:.0f} s ({gone.state}); new compiled steps, new workers"
    )
    return Problem("no_chief", gone.task, f"{silent} and checkpoints need one; start it again")


GONE = {
    "lost": "it sent no heartbeat for {silent:.0f} s, and rounds go on without it; start it again",
    "failed": "its process failed {silent:.0f} s ago, and rounds go on without it; see its log, and start it again",
    "hung": "it sent heartbeats, but held up a round for PS_ROUND_TIMEOUT; rounds go on without it: end its process",
    "missing": "it has not connected yet; start it with its TF_CONFIG",
}
"""Messages about a task by the state that is a problem."""
