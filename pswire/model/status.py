"""Status of a server: its sessions, rounds, variables and process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pswire.cluster import Task
from pswire.model.log import Generation, Member, Position, in_order
from pswire.model.places import Moved, Standby


@dataclass(frozen=True)
class LocalProgress:
    """What a process has trained by local steps, between exchanges.

    Attributes:
        steps: local steps that it has made.
        since: of these, those since its last exchange.
        seconds: since its last exchange; -1 before the first one.
        tokens: tokens, or examples, of all local steps; 0 where they are not counted.
        moved: payload bytes sent and received since the first local step began.
        rate: local steps per second between the last two exchanges, without these; 0 before the first one.
    """

    steps: int = 0
    since: int = 0
    seconds: float = -1.0
    tokens: float = 0.0
    moved: int = 0
    rate: float = 0.0


@dataclass(frozen=True)
class Pace:
    """Counts of what a process has done.

    Attributes:
        steps: calls of `strategy.run`.
        rounds: rounds that it has made.
        waits: times that it has waited for rounds.
        leaving: True if it was told to end, and leaves at the beginning of a step.
        saving: True if it asks for a checkpoint before that.
        page: URL of its status page, "" for none.
        local: its local steps; None if it makes none.
    """

    steps: int = 0
    rounds: int = 0
    waits: int = 0
    leaving: bool = False
    saving: bool = False
    page: str = ""
    local: LocalProgress | None = None


STILL = Pace()
"""Of a process that has done nothing, or does not tell."""


@dataclass(frozen=True)
class SessionState:
    """One session as server 0 sees it.

    Attributes:
        member: task, session and replicas.
        state: "open", "left" (cleanly), "failed", "lost" (its lease ended) or "hung" (it heartbeat, and held a round
            up).
        join_point: place at which a new member waits to be taken in, as `Generation.join_point`; "" while it is not
            ready.
        silent: seconds since its last sign of life.
        drives: True for a chief's session, which takes part in no round.
        pace: its steps, rounds and waits, as its last heartbeat has told them.
        opened: seconds since it was opened; 0 where the server does not tell.
    """

    member: Member
    state: str
    join_point: str
    silent: float
    drives: bool = False
    pace: Pace = STILL
    opened: float = 0.0


@dataclass(frozen=True)
class Happened:
    """One thing that a server was told, in words: a call, work that is over.

    Attributes:
        seconds: how long ago.
        what: "push", "open", "worked" and so on.
        said: by whom, and about what.
        refused: why it was not done; "" if it was.
    """

    seconds: float
    what: str
    said: str
    refused: str = ""


@dataclass(frozen=True)
class OpenRound:
    """A round that waits.

    Attributes:
        round: number of the round.
        section: the section's effects, in words.
        missing: members whose contribution is not whole.
        approved: True if its plan is approved.
        computing: those of `missing` that compute, not much longer than they did in earlier rounds.
    """

    round: int
    section: str
    missing: tuple[Task, ...]
    approved: bool
    computing: tuple[Task, ...] = ()


@dataclass(frozen=True)
class WorkerProgress:
    """The progress of a task that makes rounds of its own.

    Attributes:
        task: the task.
        round: its last round that this server has heard of, complete or not; -1 for none.
        positions: the datasets' positions that it told with it.
        clock: with bounded staleness the next round of which something may come to this server, those that only save
            not counted.
    """

    task: Task
    round: int
    positions: tuple[Position, ...]
    clock: int = 0


@dataclass(frozen=True)
class Saving:
    """A checkpoint that a server is writing.

    Attributes:
        path: path of the checkpoint, below the checkpoint root.
        round: number of the round after which the values are saved.
        nbytes: bytes of values that are not written yet.
    """

    path: str
    round: int
    nbytes: int


@dataclass(frozen=True)
class ProcessStatus:
    """The status of a server's process and of its machine.

    Attributes:
        clock: its wall clock, in seconds since 1970.
        resident: resident memory of the process, in bytes.
        versions: versions of this package, of Python, and of its requirements, by name.
        data_port: the port of the tcp transport.
        data_path: the Unix socket of the shm transport; "" where there is none.
        transports: kind of transport by session, of sessions with a transport other than grpc.
        traffic: payload bytes so far by transport and direction, "shm received" and its like.
        uptime: seconds since it began.
        page: URL of its status page, "" for none.
    """

    clock: float
    resident: int
    versions: Mapping[str, str]
    data_port: int
    data_path: str
    transports: Mapping[int, str]
    traffic: Mapping[str, int]
    uptime: float
    page: str = ""


@dataclass(frozen=True)
class MissedPeer:
    """Another server that a server has votes for and no connection to.

    Attributes:
        server: index of the other server.
        round: the newest round that it has a vote for; the other server lacks it if its last round is an earlier one.
        seconds: how long there has been none.
        reason: why, in words.
    """

    server: int
    round: int
    seconds: float
    reason: str


@dataclass(frozen=True)
class Difference:
    """Another server that has other values of the same variables.

    Attributes:
        server: index of the other server.
        round: the round after which that was found.
        variables: names of the variables that differ, the first of them.
        more: how many more of them there are.
        agreed: how often the two were found to have the same values since they both are there.
    """

    server: int
    round: int
    variables: tuple[str, ...]
    more: int = 0
    agreed: int = 0

    @property
    def told(self) -> str:
        """The variables in words."""
        return ", ".join(map(repr, self.variables)) + (f" and {self.more} more" if self.more else "")


def held_up(statuses: Sequence[ServerStatus]) -> Iterator[tuple[int, MissedPeer]]:
    """Yields the missed servers that hold a round up, each with the server that misses it."""
    rounds = {status.server: status.round for status in statuses}
    for status in statuses:
        for missed in status.missed:
            if rounds.get(missed.server, -1) < missed.round:
                yield status.server, missed


@dataclass(frozen=True)
class ServerStatus:
    """The answer to `status`.

    Attributes:
        server: index of the server.
        incarnation: number of this incarnation.
        log: length of its log.
        generation: the generation that it knows, if any.
        round: the last complete round, -1 before the first; where workers are asynchronous how many rounds are
            complete on this server, less one.
        positions: the datasets' positions that that round's members told; of asynchronous workers see `places`.
        waiting: rounds that wait.
        variables: number of variables that it holds.
        variable_bytes: size of those that are here.
        memory_limit: bytes that it may hold, 0 for no limit.
        chief: seconds since server 0 heard of the chief; infinite where it never did.
        places: progress of each asynchronous worker, in task order; of those that died, too.
        snapshot_bytes: bytes of old values that it holds for checkpoints which are being written.
        snapshot_limit: bytes of those that it may hold, 0 for no limit.
        saving: checkpoints that it is writing.
        sessions: sessions at server 0: of all tasks, chiefs included, in the order in which they were opened.
        incarnations: incarnations of all servers of the job, in their order; none before a job.
        over: True if the job is done.
        broken: reason why its variables are of no use any more, "" if they are.
        device: the device on which it holds its variables, "cpu" or "gpu:0".
        process: status of its process; None where there is no network in between.
        job: the identity of the job that this server holds, "" for the one without a name.
        missed: servers that it has votes for and no connection to.
        gap: with bounded staleness the rounds between the foremost and the hindmost worker that counts.
        gone: the job's servers that are lost, and without which it goes on.
        losses: the job's servers that were lost, one after the other; those that have come back included.
        standbys: processes that wait for the place of a server.
        moved: the job's servers that are not where they were when it began.
        domain: the part of the machines that fails as one in which the server runs.
        differences: other servers that have other values of the same variables.
        phases: seconds of all rounds so far by phase: "waiting", "applying", "answering"; empty where it does not tell.
        table_rows, table_bytes: rows of each dynamic table here, and the bytes that it takes, by the table's name.
        recovering: True if it is back, and does not have its variables as they are now: it reads them, or makes rounds
            up.
        tier_bytes, tier_resident_bytes, tier_memory: bytes of files that rows of dynamic tables lie in, how many of
            these are in memory, and how many may be; 0 where all rows are in memory.
    """

    server: int
    incarnation: int
    log: int
    generation: Generation | None
    round: int
    positions: tuple[Position, ...]
    waiting: tuple[OpenRound, ...]
    variables: int
    variable_bytes: int
    memory_limit: int
    chief: float
    places: tuple[WorkerProgress, ...] = ()
    snapshot_bytes: int = 0
    snapshot_limit: int = 0
    saving: tuple[Saving, ...] = ()
    sessions: tuple[SessionState, ...] = ()
    incarnations: tuple[int, ...] = ()
    over: bool = False
    broken: str = ""
    device: str = ""
    process: ProcessStatus | None = None
    job: str = ""
    missed: tuple[MissedPeer, ...] = ()
    gap: int = 0
    gone: tuple[int, ...] = ()
    losses: tuple[int, ...] = ()
    standbys: tuple[Standby, ...] = ()
    moved: tuple[Moved, ...] = ()
    domain: str = ""
    differences: tuple[Difference, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    table_rows: Mapping[str, int] = field(default_factory=dict)
    table_bytes: Mapping[str, int] = field(default_factory=dict)
    recovering: bool = False
    tier_bytes: int = 0
    tier_resident_bytes: int = 0
    tier_memory: int = 0

    @property
    def keeper(self) -> int:
        """Index of the server that keeps the log and the sessions of the job that it tells of."""
        live = set(range(len(self.incarnations))) - set(self.gone)
        return next(iter(in_order(live, self.losses or self.gone)), 0)

    @property
    def takes_part(self) -> bool:
        """True if it is a part of the job that it tells of, and no new process in the place of one that was."""
        return self.server < len(self.incarnations) and self.incarnations[self.server] == self.incarnation


def newest_of(statuses: Iterable[ServerStatus]) -> ServerStatus | None:
    """Returns the status with the longest log of a job; None where there is no job."""
    return max((status for status in statuses if status.incarnations), key=lambda status: status.log, default=None)
