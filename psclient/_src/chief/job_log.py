"""A job's log as a chief has it: read from server 0, appended to there, and copied to the other servers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from psclient._src.network.session import Session
from pswire.api import ParameterServer, Watched
from pswire.cluster import ClusterSpec
from pswire.errors import ConfigError, Fenced, ServerGone, ServerLost, Unreachable
from pswire.model.changes import change_of
from pswire.model.log import (
    Approved,
    Created,
    Done,
    Generation,
    GenerationClosed,
    Gone,
    JobStarted,
    LogEntry,
    Member,
    Return,
    Snapshotted,
    Start,
    Started,
    forget_state,
    holds_job,
)
from pswire.model.plan import PlacedVariable, Plan

log = logging.getLogger("psclient.chief")

NO_CLUSTER = ClusterSpec({})
"""Of a process that begins no job."""


@dataclass
class JobState:
    """A job as its log tells it.

    Attributes:
        log: all entries so far.
        approved: ids of the plans that may run.
        generation: the newest one.
        started: sessions of members whose place to begin is known.
        generations: all of them, by number.
        saves: plans that ordered a checkpoint which is neither complete nor failed, by id, in order.
        saved: checkpoints so far, by how they ended: "saved" or "failed".
        gone: the servers that are lost, and without which the job goes on.
        losses: the servers that were lost, one after the other; those that have come back included.
        returned: how servers came back the last time, by their numbers.
        handed_over: by the number of the generation by which a server comes back how the checkpoint ended that it
            reads.
        variables: all variables.
        changes: changes of the job's consistency so far.
        changed: place from which the last of them holds; None before the first.
        model: a member of the last generation that had some: all make their rounds as it does. None before the first.
    """

    log: list[LogEntry] = field(default_factory=list)
    approved: set[bytes] = field(default_factory=set)
    generation: Generation | None = None
    started: set[int] = field(default_factory=set)
    generations: dict[int, Generation] = field(default_factory=dict)
    saves: dict[bytes, Plan] = field(default_factory=dict)
    saved: Counter[str] = field(default_factory=lambda: Counter(saved=0, failed=0))
    gone: frozenset[int] = frozenset()
    losses: list[int] = field(default_factory=list)
    returned: dict[int, Return] = field(default_factory=dict)
    handed_over: dict[int, Snapshotted] = field(default_factory=dict)
    variables: list[PlacedVariable] = field(default_factory=list)
    changes: int = 0
    changed: Start | None = None
    model: Member | None = None

    def take(self, entries: Sequence[LogEntry]) -> None:
        """Takes in the next entries of the log."""
        for entry in entries:
            self.log.append(entry)
            match entry:
                case Approved():
                    self._approve(entry.plan)
                case GenerationClosed():
                    self._close(entry.generation)
                case Created():
                    self.variables.append(entry.variable)
                case Gone():
                    self.gone |= {entry.server}
                    self.losses.append(entry.server)
                case Started():
                    self.started |= {m.session for m in self.generations[entry.start.generation].members}
                case Snapshotted():
                    plan = self.saves.pop(entry.plan_id, None)
                    if plan is not None and plan.snapshot is not None and plan.snapshot.returns:
                        self.handed_over[plan.snapshot.returns] = entry
                    self.saved["failed" if entry.error else "saved"] += 1
                    forget_state(self.log, entry.plan_id)

    def _close(self, generation: Generation) -> None:
        self.generation = self.generations[generation.number] = generation
        if generation.start:
            self.started = {member.session for member in generation.members}
        if generation.members:
            self.model = generation.members[0]
        if generation.returns is not None and generation.returns.ready:
            self.gone -= {generation.returns.server}
            self.returned[generation.returns.server] = generation.returns
        if change_of(generation) is not None:
            self.changes, self.changed = self.changes + 1, generation.start

    def _approve(self, plan: Plan) -> None:
        self.approved.add(plan.id)
        if plan.snapshot is not None:
            self.saves[plan.id] = plan

    def beside(self, server: int) -> set[int]:
        """Returns the servers that have copies of a server's variables, or whose variables it has copies of."""
        begun = self.log[0] if self.log else None
        copies = begun.copies if isinstance(begun, JobStarted) else ()
        return {copies[server]} | {other for other, copy in enumerate(copies) if copy == server} if copies else set()

    def survives(self, gone: Set[int]) -> bool:
        """Returns whether all variables lie on some server that is not gone."""
        return all(set(variable.servers) - gone for variable in self.variables)


class JobOver(Fenced):
    """There is no job to go on with: it is over, or the servers hold another one."""


class JobLog:
    """The log of a job, for its chief. Used by the thread that drives.

    Args:
        servers: all of them; server 0 has the log.
        session: the chief's session, opened before anything else is done here.
        takes_over: see below.
        cluster: the tasks that begin a job together, which the log tells to workers that join.

    Attributes:
        state: the job's state, as far as the log was read.
        takes_over: True for a chief that only goes on with a job that is there.
    """

    def __init__(
        self,
        servers: Sequence[ParameterServer],
        session: Session,
        takes_over: bool = False,
        cluster: ClusterSpec = NO_CLUSTER,
    ) -> None:
        self.state = JobState()
        self.takes_over = takes_over
        self._cluster = cluster
        self._servers = servers
        self._session = session
        self._copied = [0] * len(servers)
        self._prepared: dict[str, int] = {}  # entries that processes have which are to be servers, by address

    def attach(self) -> None:
        """Begins a job, or goes on with the one that the servers hold; call `copy` then.

        Raises:
            JobOver: there is none to go on with, and none is to be begun.
        """
        session, entries = self._session, self._read()
        if holds_job(entries, session.incarnations, session.job):
            self.state.take(entries)
            log.info("continuing job %s at log entry %d", entries[0], len(entries))
        elif self.takes_over:
            raise JobOver("there is no job to take over: it has ended, or the servers hold another one")
        else:
            addresses = tuple(server.address for server in self._servers)
            copies = copies_by(session.domains) if session.copied else ()
            workers, chief = (
                tuple(map(self._cluster.address, self._cluster.tasks(job))) for job in ("worker", "chief")
            )
            begin = JobStarted(
                session.number, session.incarnations, session.job, addresses, copies, workers, "".join(chief)
            )
            # Server 0 last: once it has the job, clients create variables, which another server that began
            # the job only then would drop.
            for server in reversed(self._servers):
                try:
                    server.approve(session.token, 0, [begin])
                except ServerLost as error:
                    if not (session.copied and session.hosting.overlook(error)):
                        raise
                except ServerGone:
                    session.check()
            self.state.take([begin])

    def _read(self) -> list[LogEntry]:
        """Reads the log that there is; where the server that keeps it is lost meanwhile, that of the next one."""
        session = self._session
        while True:
            entries: list[LogEntry] = []
            try:
                # A long log comes in several answers.
                while len(entries) < self._keeper.status().log:
                    entries += session.look(len(entries)).entries
            except ServerLost as error:
                if not (session.copied and session.hosting.overlook(error)):
                    raise
            except ServerGone:
                session.check()  # this process has just been told so, and asks the next one
            else:
                return entries

    @property
    def _keeper(self) -> ParameterServer:
        return self._servers[self._session.hosting.keeper]

    def take(self, watched: Watched) -> None:
        """Takes in news; what this chief appended in the meantime comes back to it."""
        self.state.take(watched.entries[len(self.state.log) - watched.start :])

    def append(self, entries: Sequence[LogEntry]) -> bool:
        """Appends to the log of the server that keeps it, if nothing else was appended in between."""
        index = len(self.state.log)
        agreed = self._keeper.approve(self._session.token, index, entries)
        if agreed != index + len(entries):
            return False
        self.state.take(entries)
        return True

    def insist(self, entry: LogEntry, seconds: float) -> None:
        """Appends to that log, whatever else is appended; raises TimeoutError if news take so long."""
        while not self.append([entry]):
            self.take(self._keeper.watch(0, len(self.state.log), 0).result(seconds))

    def lose(self, losses: Sequence[Gone], more: Sequence[LogEntry], seconds: float) -> None:
        """Appends that servers are gone, and more; where one of them kept the log, to that of the next one.

        What this chief has of the log, that one gets first. What only the server that is gone has had of it, those
        say again who were told.
        """
        gone = self._session.hosting.gone | {entry.server for entry in losses}
        keeper = next(server for server in self._session.hosting.live if server not in gone)
        if keeper == self._session.hosting.keeper:
            for entry in (*losses, *more):
                self.insist(entry, seconds)
        else:
            self._copy_to(keeper, [*self.state.log, *losses, *more])
            self.state.take([*losses, *more])
        self._session.lose([entry for entry in self.state.log if isinstance(entry, Gone)])

    def prepare(self, server: ParameterServer) -> None:
        """Copies the whole log to a process that is to be a server, and takes no part yet."""
        self._prepared[server.address] = self._send(server, 0, self.state.log)

    def take_back(self, server: int) -> None:
        """A server is back, with what was copied to its process before."""
        self._copied[server] = self._prepared.pop(self._servers[server].address, 0)

    def copy(self) -> None:
        """Copies the log to the servers that lack its end."""
        entries = self.state.log
        for number in self._session.hosting.live[1:]:
            try:
                self._copy_to(number, entries)
            except (Unreachable, ServerLost) as error:
                if not isinstance(entries[-1], Done):
                    raise
                # It ends by this very entry, so that a lost answer cannot be asked for again.
                log.info("server %d did not confirm the end of the job: %s", number, error)

    def _copy_to(self, number: int, entries: Sequence[LogEntry]) -> None:
        self._copied[number] = self._send(self._servers[number], self._copied[number], entries)

    def _send(self, server: ParameterServer, length: int, entries: Sequence[LogEntry]) -> int:
        """Sends what a server lacks that has so many entries, or fewer; returns how many it has then."""
        while length < len(entries):
            length = server.approve(self._session.token, length, entries[length:])
        return length


def copies_by(domains: Sequence[str]) -> tuple[int, ...]:
    """Returns for each server which one has the copies of its variables: the next one of another failure domain.

    Args:
        domains: of each server the part of the machines that fails as one in which it runs.

    Raises:
        ConfigError: there is one server.
    """
    count = len(domains)
    if count < 2:
        raise ConfigError("PS_REPLICATION_FACTOR=2 needs at least two servers; add a ps task")
    found = list[int]()
    for server, domain in enumerate(domains):
        behind = [(server + step) % count for step in range(1, count)]
        found.append(next((other for other in behind if domains[other] != domain), behind[0]))
    if len(set(domains)) == 1:
        log.warning(
            "all servers run in failure domain %r, so copies protect only against the loss of a process; "
            "spread the servers",
            domains[0],
        )
    return tuple(found)
