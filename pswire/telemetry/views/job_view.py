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
from pswire.model.status import OpenRound, ProcessStatus, ServerStatus, SessionState, held_up
from pswire.security.session_numbers import count_of
from pswire.telemetry.views.columns import Cell, cells_of, column
from pswire.telemetry.views.looked import Looked, gone_of, keeper_of, why_silent
from pswire.telemetry.views.numbers import count, duration, short, size, used

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


def _told(
    default: Any,
    read: Callable[[ServerStatus, ProcessStatus], Any] | None = None,
    heading: str = "",
    cell: Cell | None = None,
) -> Any:
    """A field that is read of a server's status, where it is the field of that name if no other way is given.

    Where there is no status it is its default, or what that returns. `heading` and `cell` are those of `column`.
    """
    if heading:
        return column(heading, cell, default, read=read)
    key = "default_factory" if callable(default) else "default"
    return field(metadata={"read": read}, **{key: default})


@dataclass(frozen=True)
class WaitingRound:
    """A round that is open on a server.

    Attributes:
        round: number of the round.
        section: the effects of the compiled step.
        approved: true once the chief has approved the step.
        missing: tasks that have not pushed.
    """

    round: int
    section: str
    approved: bool
    missing: tuple[str, ...]


@dataclass(frozen=True)
class SavingView:
    """A checkpoint that a server writes.

    Attributes:
        path: path of the checkpoint.
        round: the round that it saves.
        bytes: bytes that the server writes.
    """

    path: str
    round: int
    bytes: int


@dataclass(frozen=True)
class ServerView:
    """One server. If it does not answer, whatever its status would tell is 0 or empty.

    Attributes:
        task, address, domain, device, version: identity.
        state: `up`, `broken`, `unreachable`, `refused`.
        incarnation, started_at, up_seconds: number of the process; its start in seconds since 1970; its age.
        generation, round, lag: membership, last complete round, rounds behind the newest server.
        waiting: open rounds: `round`, `section`, `approved`, `missing`.
        waits_for: tasks, or `the chief`.
        log: length of the job's log.
        variables, variable_bytes, memory_limit, resident_bytes: number and bytes of variables, limit (0 for none),
            memory of the process.
        snapshot_bytes, snapshot_limit, saving: old values kept for checkpoints, limit, checkpoints in progress
            (`path`, `round`, `bytes`).
        transports, traffic: tasks per transport; payload bytes by transport and direction.
        phases: seconds of all rounds: `waiting`, `applying`, `answering`.
        table_rows, table_bytes: by dynamic table.
        tier_bytes, tier_resident_bytes, tier_memory: table rows in files, their bytes in memory, the limit.
        page: URL of the status page, or `""`.
    """

    task: str = column("server", lambda v: short(v.task))
    address: str = column("address")
    state: str = column("state")
    up_seconds: float = _told(0.0, lambda s, p: p.uptime, "up", lambda v: duration(v.up_seconds))
    generation: int = _told(0, lambda s, p: s.generation.number if s.generation else 0, "generation")
    round: int = _told(-1, None, "round", lambda v: _number(v.round))
    lag: int = column("lag", default=0)
    variables: int = _told(0, None, "variables")
    variable_bytes: int = _told(0, None, "bytes", lambda v: used(v.variable_bytes, v.memory_limit))
    tier_bytes: int = _told(0, None, "in files", lambda v: size(v.tier_bytes) if v.tier_memory else "")
    tier_resident_bytes: int = _told(
        0, None, "of these in memory", lambda v: used(v.tier_resident_bytes, v.tier_memory) if v.tier_memory else ""
    )
    resident_bytes: int = _told(
        0, lambda s, p: p.resident, "memory", lambda v: size(v.resident_bytes) if v.resident_bytes else ""
    )
    device: str = _told("", None, "device")
    transports: Mapping[str, int] = _told(
        dict,
        lambda s, p: _transports(s.generation, p),
        "transports",
        lambda v: ", ".join(f"{count} {transport}" for transport, count in sorted(v.transports.items())),
    )
    waits_for: tuple[str, ...] = _told(
        (), lambda s, p: _awaited(s.waiting), "waits for", lambda v: ", ".join(map(short, v.waits_for))
    )
    saving: tuple[SavingView, ...] = _told(
        (),
        lambda s, p: tuple(SavingView(each.path, each.round, each.nbytes) for each in s.saving),
        "saves",
        lambda v: ", ".join(f"{each.path} (round {each.round})" for each in v.saving),
    )
    snapshot_bytes: int = _told(
        0,
        None,
        "old values",
        lambda v: used(v.snapshot_bytes, v.snapshot_limit) if v.snapshot_bytes or v.snapshot_limit else "",
    )
    incarnation: int = _told(0)
    started_at: float = _told(0.0, lambda s, p: p.clock - p.uptime)
    waiting: tuple[WaitingRound, ...] = _told((), lambda s, p: tuple(map(_open_round, s.waiting)))
    log: int = _told(0)
    memory_limit: int = _told(0)
    snapshot_limit: int = _told(0)
    domain: str = _told("")
    version: str = _told("", lambda s, p: p.versions.get("paramserver", ""))
    traffic: Mapping[str, int] = _told(dict, lambda s, p: p.traffic)
    phases: Mapping[str, float] = _told(dict)
    table_rows: Mapping[str, int] = _told(dict)
    table_bytes: Mapping[str, int] = _told(dict)
    tier_memory: int = _told(0)
    page: str = _told("", lambda s, p: p.page)

    def cells(self) -> dict[str, str]:
        """The row of the table; of a server that does not answer, who it is and why."""
        cells = cells_of(self)
        return cells if self.incarnation else {heading: cells[heading] for heading in OF_SILENT}


OF_SILENT = ("server", "address", "state")
"""Columns of a server that does not answer."""


@dataclass(frozen=True)
class TaskView:
    """One session of a task that is no server; a task that drives and trains has two.

    Attributes:
        task, session, replicas, mode: identity.
        drives: true for the chief's session, which makes no rounds.
        state: `open`, `left`, `failed`, `lost`, `hung`, `missing`.
        silent_seconds, opened_seconds: time since the last heartbeat and since the session began (0 if unknown).
        takes_part: member of the current generation.
        round, lag: last round with its gradients (asynchronous jobs: its own count); rounds behind the fastest task.
        waits_for, transports: as above.
        steps, rounds, waits: calls of `strategy.run`, rounds, blocking waits.
        local_steps, local_steps_since_exchange, exchange_seconds: local steps, those since the last exchange, and how
            long ago that was (-1 before the first one).
        tokens, bytes_per_local_step: tokens or examples of local steps (0 if not counted); payload bytes, sent and
            received, per local step.
        page: URL of the chief's status page.
    """

    drives: bool
    task: str = column("task", lambda v: short(v.task) + (" (drives)" if v.drives else ""))
    state: str = column("state")
    session: int = column("session", lambda v: str(count_of(v.session)) if v.session else "", 0)
    replicas: int = column("replicas", lambda v: str(v.replicas) if v.session and not v.drives else "", 0)
    opened_seconds: float = column("opened", lambda v: _ago(v.opened_seconds) if v.opened_seconds else "", 0.0)
    silent_seconds: float = column("last heard", lambda v: _ago(v.silent_seconds) if v.session else "", 0.0)
    round: int = column("round", lambda v: _number(v.round), -1)
    lag: int = column("lag", lambda v: str(v.lag) if v.takes_part else "", 0)
    steps: int = column("steps", lambda v: str(v.steps) if v.steps else "", 0)
    rounds: int = column(
        "rounds, waits a step", lambda v: f"{v.rounds / v.steps:.1f}, {v.waits / v.steps:.1f}" if v.steps else "", 0
    )
    local_steps: int = column("local steps", lambda v: str(v.local_steps) if v.local_steps else "", 0)
    exchange_seconds: float = column("last exchange", lambda v: _exchanged(v) if v.local_steps else "", -1.0)
    tokens: float = column("tokens", lambda v: count(v.tokens) if v.tokens else "", 0.0)
    bytes_per_local_step: float = column(
        "bytes a local step", lambda v: size(v.bytes_per_local_step) if v.local_steps else "", 0.0
    )
    transports: tuple[str, ...] = column("transports", lambda v: ", ".join(v.transports), ())
    waits_for: tuple[str, ...] = column("waits for", lambda v: ", ".join(map(short, v.waits_for)), ())
    mode: str = ""
    takes_part: bool = False
    waits: int = 0
    local_steps_since_exchange: int = 0
    page: str = ""


def _exchanged(v: TaskView) -> str:
    """How many local steps ago the last exchange was, and how long."""
    if v.exchange_seconds < 0:
        return "never"
    return f"{v.local_steps_since_exchange} steps, {_ago(v.exchange_seconds)}"


def _ago(seconds: float) -> str:
    return f"{duration(seconds)} ago"


def _number(round: int) -> str:
    return str(round) if round >= 0 else "-"


@dataclass(frozen=True)
class StandbyView:
    """A process that waits for the place of a server.

    Attributes:
        address: its address.
        domain: its failure domain.
        place: the server that it replaces, or `""`.
    """

    address: str
    domain: str
    place: str


@dataclass(frozen=True)
class JobView:
    """The state of a job.

    Attributes:
        state: `none` (no job), `starting`, `running`, `over`, `broken` (a round failed halfway), `unknown` (no server
            answers).
        mode: `sync`, `async`, `bounded`, or `""` without workers.
        staleness, gap: bounded staleness: k, and the rounds between the fastest and the slowest worker; else 0.
        generation, round, replicas: number of the current membership; newest round of any server, -1 for none;
            replicas of the job.
        servers: see below.
        tasks: see below.
        standbys: standby servers: `address`, `domain`, `place` (the server that it replaces, or `""`).
        problems: `kind`, `task` (or `""`), `message`.
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
    told = {each.name: _read(each, status, process) for each in fields(ServerView) if "read" in each.metadata}
    state = "broken" if status.broken else "up"
    return ServerView(str(found.task), found.address, state, lag=newest - status.round, **told)


def _read(told: Field[Any], status: ServerStatus, process: ProcessStatus) -> Any:
    read = told.metadata["read"]
    return getattr(status, told.name) if read is None else read(status, process)


def _transports(generation: Generation | None, process: ProcessStatus) -> dict[str, int]:
    return dict(
        Counter(process.transports.get(member.session, "grpc") for member in (generation.members if generation else ()))
    )


def _open_round(open: OpenRound) -> WaitingRound:
    return WaitingRound(open.round, open.section, open.approved, tuple(map(str, open.missing)))


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
        yield from (TaskView(task.job == "chief", str(task), "missing") for task in expected if task not in came)


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
        **_local(session),
    )


def _local(session: SessionState) -> dict[str, Any]:
    """The fields of a task that makes local steps."""
    local = session.pace.local
    if local is None:
        return {}
    return {
        "local_steps": local.steps,
        "local_steps_since_exchange": local.since,
        "exchange_seconds": local.seconds if local.seconds < 0 else local.seconds + session.silent,
        "tokens": local.tokens,
        "bytes_per_local_step": local.moved / max(local.steps, 1),
    }


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
