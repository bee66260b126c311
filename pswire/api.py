"""The verbs between clients and servers: the request of each, and its answer.

`ParameterServer` stands at both ends: `Core` of `psserver.core` is one, `RemoteServer` of `psclient._src.network`
speaks it over gRPC. A verb that may wait returns a future; all others answer at once. Every verb raises `PSError` only,
and may be sent again: its idempotency key is named at the request, and a resend gets the recorded answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pswire.cluster import Task
from pswire.errors import InvalidRequest, PSError
from pswire.model.closures import ClosureName
from pswire.model.consistency import SYNC, Consistency
from pswire.model.log import Generation, LogEntry, Position, Start
from pswire.model.plan import PlacedVariable, Plan
from pswire.model.rows import Int64s
from pswire.model.status import STILL, Happened, Pace, ServerStatus, SessionState
from pswire.network.payload import Payload
from pswire.servers.checkpoints import RestoreRequest, SnapshotRequest
from pswire.servers.chunks import AssignBatchesRequest
from pswire.servers.closures import FetchRequest, ScheduleRequest, TakeRequest
from pswire.servers.places import MoveRequest, OfferRequest
from pswire.servers.requests import R, ServerRequest, verb
from pswire.sizes import counted


@dataclass(frozen=True)
class Opened:
    """The answer to `open`.

    Attributes:
        session: number of the session; unique in the job, given by server 0.
        incarnation: number of this server's incarnation.
        token: the fencing token of a chief, larger than all before; 0 for others.
        server: index of the server that answered.
        device: the device on which the server holds its variables, "cpu" or "gpu:0".
        term: the greatest term of a chief that this server has seen; a token's high bits.
        window: the most rounds of a session that may be under way at a time.
        domain: the part of the machines that fails as one, in which this server runs; by default its host.
        takes_hints: True if rows of its dynamic tables lie in files, so that `Contribution.hints` are of use.
    """

    session: int
    incarnation: int
    token: int
    server: int
    device: str
    term: int = 0
    window: int = 0
    domain: str = ""
    takes_hints: bool = False


@dataclass(frozen=True)
class Enlisted:
    """The answer to `enlist`: the task of a worker that joins a running job.

    Attributes:
        task: the task that the process is to be.
        opened: True if a session of that task is open: it keeps the place by itself.
    """

    task: Task
    opened: bool


@dataclass(frozen=True)
class CreateBatchReply:
    """The answer to `create_batch`.

    Attributes:
        count: the variables that are there, from the first of the batch on; all of them, where there is no error.
        initialized: numbers of those that have a value on this server.
        restored: numbers of those whose first value was a restored checkpoint's, whatever their creators gave.
        error: why the variable behind these was refused.
    """

    count: int
    initialized: tuple[int, ...] = ()
    restored: tuple[int, ...] = ()
    error: PSError | None = None


@dataclass(frozen=True)
class RowRead:
    """A read of rows of a variable.

    Attributes:
        variable: number of the variable.
        ids: which rows: int64 as bytes, the lowest byte first.
    """

    variable: int
    ids: bytes

    @classmethod
    def of(cls, variable: int, ids: Int64s) -> RowRead:
        """Makes one of ids as numbers."""
        return cls(variable, ids.astype("<i8", copy=False).tobytes())

    def numbers(self) -> Int64s:
        """Returns the ids, int64; raises `InvalidRequest` if the bytes are none."""
        if len(self.ids) % 8:
            raise InvalidRequest(f"{len(self.ids)} bytes are not ids of 8 bytes each")
        return np.frombuffer(self.ids, "<i8").astype(np.int64, copy=False)


TableQuestion = Literal["size", "keys", "rows"]
"""What is asked of a dynamic table: how many rows it has; their keys; keys and rows."""


@dataclass(frozen=True)
class TableRead:
    """A read of some buckets of a dynamic table, in the order of the keys' hashes.

    Attributes:
        variable: number of the variable, a part of a table or what lies beside one.
        what: what is asked.
        first, count: the buckets; of a number of rows all that are held.
    """

    variable: int
    what: TableQuestion
    first: int = 0
    count: int = 0


@dataclass(frozen=True)
class Contribution:
    """One worker's contribution to one round on one server; its payload comes beside it.

    Attributes:
        session: number of the sender's session.
        generation: the newest generation that the worker has taken in.
        round: number of the round; of an asynchronous worker its own count.
        plan_id: the plan of the section.
        weights: for each reduction of the plan the weight of this contribution: a number of replicas, or of
            elements where an axis is reduced. Where it is 0 the payload has no bytes for it.
        more: True if this worker has a batch after this one.
        positions: the batch that each dataset gives next.
        want: ids of the variables whose values the worker wants back.
        observes: True if it takes part without contributing, operands included: this worker computed its section
            before it was taken in.
        start: the first round of this session: a difference in that round is the newcomer's alone; -1 does not say.
        nonfinite: numbers of the reductions to which it contributes NaN or infinity, where the plan asks for them.
        first_values: numbers of the variables whose first values the payload has, in order; then it is a part of no
            round, and of the other fields only `session` counts.
        previous: the round before this one that the sender has pushed to this server; -1 for none. Several may be
            under way, and arrive in any order.
        rows: for each reduction of the plan that is of rows, how many of them the payload has; 0 where the weight is 0.
        lookups: rows of variables that the worker wants back, as they are after the round.
        seconds: the worker's time, in seconds since 1970, where the plan updates a table whose rows have a time to
            live; else 0.
        closure: the closure that makes it: `round` is then its own count, from 0, whichever worker runs it; None for no
            closure.
        chunks: tickets of the batches that were handed out and that it is made of: once it is applied, they are done.
        alone: True for a round of its sender alone, in a job whose workers make rounds together: `round` is then the
            session's own count of such rounds, from 0, and its plan updates variables that are `alone`, and no others.
        trace: the span that sends it, as W3C's traceparent, where the worker traces this step; else "".
        host: a number of the sender's host, whose workers' contributions are summed before others; 0 for none.
        parts: where the payload is the sum of what several workers of a host contribute: what each of them says, the
            sender included. Then `weights` are the sums of theirs, and `want` is what any of them wants.
        hints: rows of dynamic tables that the worker will look up with the round after the next one. Nothing is
            answered, and no result depends on them: a server whose rows lie in files reads them meanwhile.
        batch: the global batch of which the sender computes its share, in words; "" where it does not say. All members
            of a round that say it have to say the same.
    """

    session: int
    generation: int
    round: int
    plan_id: bytes
    weights: tuple[float, ...] = ()
    more: bool = False
    positions: tuple[Position, ...] = ()
    want: tuple[int, ...] = ()
    observes: bool = False
    start: int = -1
    nonfinite: tuple[int, ...] = ()
    first_values: tuple[int, ...] = ()
    previous: int = -1
    rows: tuple[int, ...] = ()
    lookups: tuple[RowRead, ...] = ()
    seconds: int = 0
    closure: ClosureName | None = None
    chunks: tuple[int, ...] = ()
    alone: bool = False
    trace: str = ""
    host: int = 0
    parts: tuple[Contribution, ...] = ()
    hints: tuple[RowRead, ...] = ()
    batch: str = ""

    def at(self, round: int, previous: int, positions: tuple[Position, ...]) -> Contribution:
        """Returns what the same worker says to another round, of which only these differ."""
        found = object.__new__(Contribution)
        found.__dict__.update(self.__dict__, round=round, previous=previous, positions=positions)
        return found


@dataclass(frozen=True)
class RoundReply:
    """A server's answer when a round is complete; the same to every member, but for `payload`.

    Attributes:
        round: number of the round.
        generation: the newest generation that the server knew when the round completed.
        more: True if any member has a batch after this one.
        excluded: members whose contribution is not in this round.
        payload: the wanted variables, then the plan's returned values of this server, then ids and rows of each reduced
            value that is rows, then the rows that the member has asked for.
        warnings: messages about the round for people; each is told once.
        observers: members that took part without contributing.
        rows: for each returned value that is rows, how many there are.
        over: rounds that are over on this server when it answers, counted from 0: a member that was left out is behind
            them.
    """

    round: int
    generation: Generation
    more: bool
    excluded: tuple[Task, ...]
    payload: Payload
    warnings: tuple[str, ...] = ()
    observers: tuple[Task, ...] = ()
    rows: tuple[int, ...] = ()
    over: int = 0


@dataclass(frozen=True)
class PullReply:
    """Values of variables.

    Attributes:
        round: the last round that the values have seen on this server, -1 before the first.
        payload: the values, in the order asked for, then rows in theirs, then of each table the keys, int64 as bits,
            and the rows, where these are asked for.
        rows: for each table that was asked, how many rows it has there.
    """

    round: int
    payload: Payload
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Watched:
    """The answer to `watch`.

    Attributes:
        version: grows with everything that a chief may have to act on; to be handed back.
        start: index of the first of `entries` in the log.
        entries: the log from there on.
        plans: proposed, not yet approved; none where the log alone was asked for.
        sessions: all sessions of the job; none likewise.
        traces: the spans in which plans were proposed whose steps are traced, as W3C's traceparents, by the plan's id
            in hexadecimal.
    """

    version: int
    start: int
    entries: tuple[LogEntry, ...]
    plans: tuple[Plan, ...]
    sessions: tuple[SessionState, ...]
    traces: Mapping[str, str] = field(default_factory=dict)


UNTIL_ENDED = -2
"""The version of a `watch` that waits for the end of its session."""

UNTIL_GONE = -3
"""The version of a `watch` that waits for the loss of a server: `after` counts the losses that are known, and the
answer has all of them, and nothing else of the log."""

WATCHED = {UNTIL_ENDED: "its end", UNTIL_GONE: "the loss of a server"}
"""What a watch waits for that has no version of the log, in words."""

RESTS = -1
"""What a worker with bounded staleness says in place of its clock while it has no data: nobody waits for it."""

Begun = Callable[[Payload], object]
"""Told, once, of the payload of an answer that begins to grow."""


@dataclass(frozen=True)
class OpenRequest(ServerRequest[Opened]):
    """Begins a session. Key: at server 0 the number drawn by lot, `session`.

    Attributes:
        task: the task that opens it; a session that the task had before ends, if its process is gone.
        replicas: local replicas, 0 for a process that runs no script.
        session: at server 0, which gives the number, what this process has drawn by lot for its resends
            to be known by, or 0; at the others the number.
        drives: True for a chief's session, which gets a new fencing token.
        consistency: how its rounds are made; of no meaning where it drives.
        job: the identity of its job.
        term: the greatest term of a chief that it has heard of, where it drives.

    Raises:
        TaskTaken: another process is this task, and is alive.
        ConfigError: the servers hold another job; another process of this one makes its rounds otherwise.
    """

    task: Task
    replicas: int
    session: int
    drives: bool
    consistency: Consistency = SYNC
    job: str = ""
    term: int = 0

    @property
    def sender(self) -> str:
        return str(self.task)

    def words(self) -> tuple[None, str]:
        how = f"{counted(self.replicas, 'replica')}, {self.consistency.mode}"
        return None, f"{self.task}: {'drives' if self.drives else how}"


@dataclass(frozen=True)
class EnlistRequest(ServerRequest[Enlisted]):
    """Gives a worker a place in the running job. Key: `key`, drawn by lot; a repeat keeps the place for a lease.

    Attributes:
        task: the worker that it wants to be; None for the first index above the cluster's own that is free.
        key: names the process.

    Raises:
        TaskTaken: another process is that worker.
        ConfigError: it is one of the cluster's own.
        InvalidRequest: there is no job here, or it is over; another server keeps the sessions.
    """

    task: Task | None
    key: int

    @property
    def sender(self) -> str:
        return str(self.task or "a worker that joins")

    def words(self) -> tuple[None, str]:
        return None, "asks for an index" if self.task is None else str(self.task)


@dataclass(frozen=True)
class HeartbeatRequest(ServerRequest[bool]):
    """Renews a lease. Key: the session.

    It is answered with True if nobody drives the job any more, and this process is to: it is the lowest worker that
    lives.

    Attributes:
        session: number of the session.
        round: the oldest round of the process that is not answered, -1 for none.
        plan_id: that round's plan; tells the servers of two processes that wait for each other.
        pace: what the process has done; None if the heartbeat says nothing but that the process lives.
        clock: with bounded staleness the next round of which something may come to this server, rounds that only
            save not counted; `RESTS` while the process has no data, so that nobody waits for it.

    Raises:
        Fenced: the session was ended.
        Diverged: the processes of this job do different things.
        InvalidRequest: it has no pace, and this server has heard no other heartbeat since it keeps the sessions.
    """

    session: int
    round: int
    plan_id: bytes
    pace: Pace | None = STILL
    clock: int = 0

    def words(self) -> tuple[int, str]:
        return self.session, f"waits in round {self.round}" if self.round >= 0 else ""


@dataclass(frozen=True)
class LeaveRequest(ServerRequest[None]):
    """Ends a session. Key: the session.

    Attributes:
        session: number of the session.
        error: "" at a clean end, else the reason; a divergence is told to everyone.

    Raises:
        PSError: the reason why a session cannot end cleanly: it has failed, which its process may not know yet.
    """

    session: int
    error: str

    def words(self) -> tuple[int, str]:
        return self.session, self.error or "cleanly"


@dataclass(frozen=True)
class CreateBatchRequest(ServerRequest[CreateBatchReply]):
    """Gets or creates several variables, in the order of their numbers. Key: the names; the first value wins.

    Server 0 names all of them and keeps their places; each server that holds some declares those. A `push` with
    `first_values` brings their first values. The first variable that is refused ends the batch: its error is in the
    answer.

    Attributes:
        session: number of the session that creates.
        variables: of server 0 all, of another server those that it holds; each with the number and the servers
            that every process finds by itself.
    """

    session: int
    variables: Sequence[PlacedVariable]

    def words(self) -> tuple[int, str]:
        return self.session, counted(len(self.variables), "variable")


@dataclass(frozen=True)
class ProposeRequest(ServerRequest[None]):
    """Tells server 0 what the chief or a new member needs to know. Key: the content.

    Attributes:
        session: number of the session that proposes.
        plan: a plan that needs approval.
        join_point: place at which this new member wants to be taken in.
        start: place at which the new members of a generation begin.
        trace: the span in which the plan is proposed, as W3C's traceparent, for the chief; "" for none.
    """

    session: int
    plan: Plan | None
    join_point: str
    start: Start | None
    trace: str = ""

    def words(self) -> tuple[int, str]:
        said = [f"plan {self.plan.id[:4].hex()}"] if self.plan else []
        said += [f"waits at {self.join_point[:13]}"] if self.join_point else []  # of a plan as many digits as above
        begin = self.start
        said += [f"new members of generation {begin.generation} begin with round {begin.round}"] if begin else []
        return self.session, ", ".join(said)


@dataclass(frozen=True)
class WatchRequest(ServerRequest[Future[Watched]]):
    """Waits until server 0's log is longer than `after` or its version is not `version`.

    With version -1 it is told of the log alone. With version `UNTIL_ENDED` it is answered by nothing but the error
    that ends the session. A caller that goes away cancels the future: its process may be gone. Who only looks says
    0 for the session, and is answered at once.
    """

    session: int
    after: int
    version: int

    def words(self) -> tuple[int, str]:
        return self.session, WATCHED.get(self.version, f"the log from {self.after} on")


@dataclass(frozen=True)
class ApproveRequest(ServerRequest[int]):
    """Appends to the log; the holder of the newest token alone may. Key: the index.

    It is answered with up to where the log and the chief's agree: the end of `entries` if all were taken, `index` if
    others stand in their place, less if entries before `index` are missing.

    Attributes:
        token: a chief's fencing token.
        index: place of the first entry; entries that are there already must be equal.
        entries: the entries to append.

    Raises:
        Fenced: there is a newer chief.
    """

    token: int
    index: int
    entries: Sequence[LogEntry]

    def words(self) -> tuple[None, str]:
        kinds = Counter(re.sub(r"\B(?=[A-Z])", " ", type(entry).__name__).lower() for entry in self.entries)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return None, f"the log from {self.index} on: {told or 'nothing'}"


@dataclass(frozen=True)
class PullRequest(ServerRequest[Future[PullReply]]):
    """Reads variables, rows of variables, and dynamic tables, once this server has completed round `after`.

    -1 reads them as they are. Who only looks says 0 for the session, and reads them as they are.

    Raises:
        InvalidRequest: a variable has no value here, or is a dynamic table, which has no whole; an id is none of
            its rows, or a key is of a bucket that is not here.
    """

    session: int
    variables: Sequence[int]
    after: int
    rows: Sequence[RowRead] = ()
    tables: Sequence[TableRead] = ()

    def words(self) -> tuple[int, str]:
        said = counted(len(self.variables) + len(self.rows) + len(self.tables), "variable")
        return self.session, said + (f" after round {self.after}" if self.after >= 0 else "")


@dataclass(frozen=True)
class StatusRequest(ServerRequest[ServerStatus]):
    """What a server holds and whom it waits for. The answer's `process` is None where there is no network between."""


@dataclass(frozen=True)
class EventsRequest(ServerRequest[tuple[Happened, ...]]):
    """What a server was told last, in words, the oldest first.

    Heartbeats, watches and ticks of the clock are left out, unless they were refused.
    """


class ParameterServer:
    """One server, as its clients see it. All methods may be called from any thread.

    Each verb but `push` has a request, which says what it does: `server.leave(7, "")` is
    `server.call(LeaveRequest(7, ""))`.

    Attributes:
        address: the address at which this process reaches it, `host:port`; "" if it is in this process.
    """

    address: str

    def call(self, request: ServerRequest[R]) -> R:
        """Does what a request asks for; returns its answer, or raises a `PSError`."""
        raise NotImplementedError

    def push(self, contribution: Contribution, payload: Payload, begun: Begun | None = None) -> Future[RoundReply]:
        """Contributes to a round, and waits for its completion. Key: (task, session, round).

        In async mode the round is the sender's own: it is complete with this contribution alone. Where it says
        `first_values` it gives variables their values, unless they have one, and is a part of no round.

        Args:
            contribution: the header: session, round, plan and weights.
            payload: operands of the plan, then contributions; it may still grow.
            begun: called for a large round with the answer's payload, before the answer is there: it grows as variables
                are updated. Where the round fails, or where it is small, never called.
        """
        raise NotImplementedError

    open = verb(OpenRequest)
    enlist = verb(EnlistRequest)
    heartbeat = verb(HeartbeatRequest)
    leave = verb(LeaveRequest)
    create_batch = verb(CreateBatchRequest)
    propose = verb(ProposeRequest)
    watch = verb(WatchRequest)
    approve = verb(ApproveRequest)
    pull = verb(PullRequest)
    snapshot = verb(SnapshotRequest)
    restore = verb(RestoreRequest)
    schedule = verb(ScheduleRequest)
    take = verb(TakeRequest)
    fetch = verb(FetchRequest)
    assign_batches = verb(AssignBatchesRequest)
    offer = verb(OfferRequest)
    move = verb(MoveRequest)
    status = verb(StatusRequest)
    events = verb(EventsRequest)
