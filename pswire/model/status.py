"""What a server tells of itself, and of who is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pswire.cluster import Task
from pswire.model.log import Epoch, Member, Position
from pswire.model.program import PROGRAM_VERSION


@dataclass(frozen=True)
class SessionState:
    """One session as server 0 sees it.

    Attributes:
        member: task, session and replicas.
        state: "open", "left" (cleanly), "failed", "lost" (its lease ended) or "hung" (it beat, and held a round up).
        join_point: where a new member waits to be taken in, as `Epoch.join_point`; "" while it is not ready.
        silent: seconds since its last sign of life.
        drives: whether it is a chief's, which takes part in no round.
    """

    member: Member
    state: str
    join_point: str
    silent: float
    drives: bool = False


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
        round: which round.
        section: what it does, in words.
        missing: members whose contribution is not whole.
        approved: whether its plan is.
    """

    round: int
    section: str
    missing: tuple[Task, ...]
    approved: bool


@dataclass(frozen=True)
class WorkerProgress:
    """Where a task stands that makes rounds of its own.

    Attributes:
        task: which.
        round: its last round that this server has heard of, complete or not.
        positions: the datasets' positions that it told with it.
    """

    task: Task
    round: int
    positions: tuple[Position, ...]


@dataclass(frozen=True)
class Saving:
    """A checkpoint that a server is writing.

    Attributes:
        path: below the checkpoint root.
        round: whose values it has.
        nbytes: bytes of values that are not written yet.
    """

    path: str
    round: int
    nbytes: int


@dataclass(frozen=True)
class ProcessStatus:
    """What a server's process tells of itself and of its machine.

    Attributes:
        clock: its wall clock, in seconds since 1970.
        resident: bytes of memory that the process has.
        versions: of this package, of Python, and of what it needs, by name.
        data_port: the port of the tcp lane.
        data_path: the Unix socket of the shm lane; "" where there is none.
        lanes: for each session with a lane other than grpc which one it is.
        traffic: payload bytes so far by lane and direction, "shm received" and its like.
        uptime: seconds since it began.
    """

    clock: float
    resident: int
    versions: Mapping[str, str]
    data_port: int
    data_path: str
    lanes: Mapping[int, str]
    traffic: Mapping[str, int]
    uptime: float


@dataclass(frozen=True)
class ServerStatus:
    """The answer to `status`.

    Attributes:
        server: which server.
        incarnation: its life.
        log: length of its log.
        epoch: the epoch that it knows, if any.
        round: the last complete round, -1 before the first; where workers are asynchronous how many rounds are
            complete on this server, less one.
        positions: the datasets' positions that that round's members told; of asynchronous workers see `places`.
        waiting: rounds that wait.
        variables: how many it holds.
        nbytes: bytes of them.
        memory_limit: bytes that it may hold, 0 for no limit.
        chief: seconds since server 0 heard of the chief; infinite where it never did.
        places: where each asynchronous worker stands, in task order; of those that died, too.
        program_version: the version of the update programs that it runs.
        held: bytes of old values that it holds for checkpoints which are being written.
        snapshot_limit: bytes of those that it may hold, 0 for no limit.
        saving: checkpoints that it is writing.
        sessions: those of server 0: of all tasks, chiefs included, in the order in which they were opened.
        incarnations: the lives of all servers of the job, in order; none before a job.
        over: whether the job is done.
        broken: why its variables are of no use any more, "" if they are.
        device: where it holds its variables, "cpu" or "gpu:0".
        process: of its process; None where there is no network in between.
        job: the identity of the job that server 0 holds, "" for the one without a name.
    """

    server: int
    incarnation: int
    log: int
    epoch: Epoch | None
    round: int
    positions: tuple[Position, ...]
    waiting: tuple[OpenRound, ...]
    variables: int
    nbytes: int
    memory_limit: int
    chief: float
    places: tuple[WorkerProgress, ...] = ()
    program_version: int = PROGRAM_VERSION
    held: int = 0
    snapshot_limit: int = 0
    saving: tuple[Saving, ...] = ()
    sessions: tuple[SessionState, ...] = ()
    incarnations: tuple[int, ...] = ()
    over: bool = False
    broken: str = ""
    device: str = ""
    process: ProcessStatus | None = None
    job: str = ""
