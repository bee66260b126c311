"""The verbs between clients and servers.

`ParameterServer` stands at both ends: `Core` of `psserver.core` is one, `RemoteServer` of `psclient._src.network`
speaks it over gRPC. A verb that may wait returns a future; all others answer at once. Every verb raises `PSError` only,
and may be sent again: its idempotency key is named at the verb, and a resend gets the recorded answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from pswire.cluster import Task
from pswire.errors import InvalidRequest, PSError
from pswire.model.closures import ClosureName
from pswire.model.consistency import SYNC, Consistency
from pswire.model.log import Generation, LogEntry, Position, Start
from pswire.model.plan import PlacedVariable, Plan, Turn
from pswire.model.rows import Int64s
from pswire.model.saved import Shard
from pswire.model.status import STILL, Happened, Pace, ServerStatus, SessionState
from pswire.network.payload import Payload
from pswire.servers.chunks import ChunkServer
from pswire.servers.closures import ClosureServer
from pswire.servers.places import PlaceServer


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
class RestoreReply:
    """The answer to `restore`: a checkpoint was read.

    Attributes:
        path: the checkpoint's path, below the checkpoint root: where a directory was asked for, of its newest one.
        positions: the datasets' positions in it.
        manifest: the text of its manifest.
        damaged: names of those beside it that were passed over, since they are damaged, with what is wrong.
    """

    path: str
    positions: tuple[Position, ...]
    manifest: str = ""
    damaged: Mapping[str, str] = field(default_factory=dict)


RestoreStage = Literal["look", "open", "prepare"]


@dataclass(frozen=True)
class RestoreOrder:
    """The extent of a restore: the variables that it changes, and the way.

    Attributes:
        stage: how far it goes: "look" tells what there is, without a turn; "open" tells what there was when the first
            process asked in this turn; "prepare" reads the values, and holds them for the round that commits them.
        names: for each tensor of the checkpoint the number of the variable that gets it; None: each variable gets the
            one with its own saved name, and misses none.
        late: True if variables that are created later get theirs, by their saved names.
        cast: True to cast values to the variable's dtype; else another dtype is refused.
        damaged: names of checkpoints, in the directory that was asked for, which are known to be damaged, with what is
            wrong: they are passed over, and set aside once another one is restored.
        checkers: number of servers that each check a share of what no variable takes; 0: only what is read is checked.
    """

    stage: RestoreStage = "prepare"
    names: Mapping[str, int] | None = None
    late: bool = True
    cast: bool = False
    damaged: Mapping[str, str] = field(default_factory=dict)
    checkers: int = 0


ALL = RestoreOrder()
"""Every variable gets what is saved under its own name."""


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

RESTS = -1
"""What a worker with bounded staleness says in place of its clock while it has no data: nobody waits for it."""

Begun = Callable[[Payload], object]
"""Told, once, of the payload of an answer that begins to grow."""


class ParameterServer(ClosureServer, ChunkServer, PlaceServer, Protocol):
    """One server, as its clients see it. All methods may be called from any thread.

    Attributes:
        address: the address at which this process reaches it, `host:port`; "" if it is in this process.
    """

    address: str

    def open(
        self,
        task: Task,
        replicas: int,
        session: int,
        drives: bool,
        consistency: Consistency = SYNC,
        job: str = "",
        term: int = 0,
    ) -> Opened:
        """Begins a session. Key: at server 0 the number drawn by lot, `session`.

        Args:
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
        ...

    def enlist(self, task: Task | None, key: int) -> Enlisted:
        """Gives a worker a place in the running job. Key: `key`, drawn by lot; a repeat keeps the place for a lease.

        Args:
            task: the worker that it wants to be; None for the first index above the cluster's own that is free.
            key: names the process.

        Raises:
            TaskTaken: another process is that worker.
            ConfigError: it is one of the cluster's own.
            InvalidRequest: there is no job here, or it is over; another server keeps the sessions.
        """
        ...

    def heartbeat(self, session: int, round: int, plan_id: bytes, pace: Pace = STILL, clock: int = 0) -> bool:
        """Renews a lease. Key: the session.

        Args:
            session: number of the session.
            round: the oldest round of the process that is not answered, -1 for none.
            plan_id: that round's plan; tells the servers of two processes that wait for each other.
            pace: what the process has done.
            clock: with bounded staleness the next round of which something may come to this server, rounds that only
                save not counted; `RESTS` while the process has no data, so that nobody waits for it.

        Returns:
            True if nobody drives the job any more, and this process is to: it is the lowest worker that lives.

        Raises:
            Fenced: the session was ended.
            Diverged: the processes of this job do different things.
        """
        ...

    def leave(self, session: int, error: str) -> None:
        """Ends a session. Key: the session.

        Args:
            session: number of the session.
            error: "" at a clean end, else the reason; a divergence is told to everyone.

        Raises:
            PSError: the reason why a session cannot end cleanly: it has failed, which its process may not know yet.
        """
        ...

    def create_batch(self, session: int, variables: Sequence[PlacedVariable]) -> CreateBatchReply:
        """Gets or creates several variables, in the order of their numbers. Key: the names; the first value wins.

        Server 0 names all of them and keeps their places; each server that holds some declares those. A `push` with
        `first_values` brings their first values. The first variable that is refused ends the batch: its error is in the
        answer.

        Args:
            session: number of the session that creates.
            variables: of server 0 all, of another server those that it holds; each with the number and the servers
                that every process finds by itself.
        """
        ...

    def propose(self, session: int, plan: Plan | None, join_point: str, start: Start | None, trace: str = "") -> None:
        """Tells server 0 what the chief or a new member needs to know. Key: the content.

        Args:
            session: number of the session that proposes.
            plan: a plan that needs approval.
            join_point: place at which this new member wants to be taken in.
            start: place at which the new members of a generation begin.
            trace: the span in which the plan is proposed, as W3C's traceparent, for the chief; "" for none.
        """
        ...

    def watch(self, session: int, after: int, version: int) -> Future[Watched]:
        """Waits until server 0's log is longer than `after` or its version is not `version`.

        With version -1 it is told of the log alone. With version `UNTIL_ENDED` it is answered by nothing but the error
        that ends the session. A caller that goes away cancels the future: its process may be gone. Who only looks says
        0 for the session, and is answered at once.
        """
        ...

    def approve(self, token: int, index: int, entries: Sequence[LogEntry]) -> int:
        """Appends to the log; the holder of the newest token alone may. Key: the index.

        Args:
            token: a chief's fencing token.
            index: place of the first entry; entries that are there already must be equal.
            entries: the entries to append.

        Returns:
            Up to where the log and the chief's agree: the end of `entries` if all were taken, `index` if
            others stand in their place, less if entries before `index` are missing.

        Raises:
            Fenced: there is a newer chief.
        """
        ...

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
        ...

    def pull(
        self,
        session: int,
        variables: Sequence[int],
        after: int,
        rows: Sequence[RowRead] = (),
        tables: Sequence[TableRead] = (),
    ) -> Future[PullReply]:
        """Reads variables, rows of variables, and dynamic tables, once this server has completed round `after`.

        -1 reads them as they are. Who only looks says 0 for the session, and reads them as they are.

        Raises:
            InvalidRequest: a variable has no value here, or is a dynamic table, which has no whole; an id is none of
                its rows, or a key is of a bucket that is not here.
        """
        ...

    def snapshot(self, token: int, plan_id: bytes, manifest: str) -> Future[Shard]:
        """Waits for a checkpoint's shard, or writes its manifest. Key: the plan, and the step: shard or manifest.

        A server begins to write its shard by itself, when the round that ordered it has run.

        Args:
            token: the chief's fencing token.
            plan_id: the plan that ordered it.
            manifest: the JSON text of the manifest, which comes after all shards, or "" for the shard.

        Raises:
            CheckpointError: the file cannot be written; its round failed, or will not come; it is over.
        """
        ...

    def restore(self, session: int, path: str, turn: Turn, order: RestoreOrder = ALL) -> Future[RestoreReply]:
        """Makes a checkpoint ready to be restored; variables change in the round that commits it. Key: (turn, stage).

        Args:
            session: number of the session that asks; every process does. The first request is done, and its outcome, an
                error too, is told to the others.
            path: a checkpoint directory, below the servers' checkpoint root, or a directory of them.
            turn: the restore's place among those of the job.
            order: the stage, the variables that it changes, and the way.

        Raises:
            NoCheckpoint: there is no checkpoint.
            DamagedCheckpoint: its files are not as they were saved; of a directory, those of all that may be meant.
            CheckpointError: the checkpoint cannot be read.
            VariableMismatch: the checkpoint has a variable with another shape or dtype.
            Diverged, InvalidRequest: another process has gone on to a later restore; the latter where workers are
                asynchronous.
        """
        ...

    def status(self) -> ServerStatus:
        """Returns what this server holds and whom it waits for."""
        ...

    def events(self) -> tuple[Happened, ...]:
        """Returns what this server was told last, in words, the oldest first.

        Heartbeats, watches and ticks of the clock are left out, unless they were refused.
        """
        ...
