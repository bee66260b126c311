"""Decisions that server 0 takes and keeps: the members of rounds, and the log of all decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pswire.cluster import Task
from pswire.model.consistency import SYNC, Consistency
from pswire.model.plan import PlacedVariable, Plan


@dataclass(frozen=True)
class Examples:
    """Some examples of a batch.

    Attributes:
        index: number of the global batch in its pass.
        first, stop: the examples, from one number to another.
    """

    index: int
    first: int
    stop: int


@dataclass(frozen=True)
class Position:
    """The place at which a dataset stands.

    Attributes:
        dataset: the dataset's number, in the order in which the script distributed its datasets.
        epoch: passes over it that were begun, minus one.
        index: the next global batch of that pass.
        returned: examples of batches before it that were left out of a round, and are to be handed out again.
        source: a digest of the dataset and its options; 0 where it is not known.
        restored: True while it comes from a checkpoint, and no loop has asked for it: else the dataset begins anew.
    """

    dataset: int
    epoch: int
    index: int
    returned: tuple[Examples, ...] = ()
    source: int = 0
    restored: bool = False


@dataclass(frozen=True)
class Start:
    """The place at which members that are new to a generation begin.

    Attributes:
        generation: number of the generation.
        round: number of their first round.
        positions: the datasets' positions then.
    """

    generation: int
    round: int
    positions: tuple[Position, ...] = ()


@dataclass(frozen=True)
class Member:
    """One process that takes part in rounds.

    Attributes:
        task: the task that the process is.
        session: number of the process's session.
        replicas: number of local replicas.
        consistency: the way in which it makes its rounds; all members of a generation have the same.
    """

    task: Task
    session: int
    replicas: int
    consistency: Consistency = SYNC

    @cached_property
    def alone(self) -> bool:
        """True if it makes rounds of its own."""
        return self.consistency.own_rounds


STEP = "step"
"""The join point of a generation that some members leave, or by which a server comes back: the beginning of a step,
which is a batch, or outside of every pass a `run`."""


@dataclass(frozen=True)
class Return:
    """The return of a server that was gone, as a new process. Two generations tell of it, and those closed in between.

    A server that is there moves in the same way: it is lost where the last of these generations begins.

    The members of the first hand over its variables where a step begins, in a round that orders a checkpoint of them,
    and wait. The last one tells that the server has them, or, without a return, that it does not come back.

    Attributes:
        server: index of the server.
        incarnation: its new life.
        generation: number of the first of these generations.
        ready: True in the last one.
        round: in that one the first round that it takes part in.
        address: its address, where it is another one than before; "" where it is the same.
    """

    server: int
    incarnation: int
    generation: int
    ready: bool = False
    round: int = 0
    address: str = ""

    @property
    def path(self) -> str:
        """The path below the checkpoint root at which its variables are handed over."""
        return f"handover/{self.incarnation:016x}"

    def among(self, incarnations: Sequence[int]) -> tuple[int, ...]:
        """Returns the lives of all servers once it is ready; `incarnations` are those before."""
        return tuple(self.incarnation if n == self.server else life for n, life in enumerate(incarnations))


@dataclass(frozen=True)
class Generation:
    """The members of rounds from some round on. Approves, by being committed, every plan that was approved before.

    Attributes:
        number: the generation's number; counts from 1.
        members: the members, in task order.
        join_point: place at which the older members take the new ones in: `dataset:<number>` before its next batch,
            `plan:<hex>` before a round of that plan, or "" where the generation has no new members; `step` where some
            leave; a `Change` where all members make their rounds in another way from here on.
        start: place at which new members begin, if no older member is there to say it; all of them at a change.
        leaving: members of earlier generations that make rounds with the others up to this generation's join point, and
            leave there. They are not fenced.
        save: number of the generation that has ordered a checkpoint, which its older members save before they take it
            in; 0 for none.
        returns: the server that is being readmitted, or is back with this generation; None for none.
    """

    number: int
    members: tuple[Member, ...]
    join_point: str = ""
    start: Start | None = None
    leaving: tuple[Member, ...] = ()
    save: int = 0
    returns: Return | None = None

    @property
    def awaited(self) -> Return | None:
        """The return for which its members wait, and make no round; None where there is none, or it is ready."""
        return None if self.returns is None or self.returns.ready else self.returns

    @cached_property
    def replicas(self) -> int:
        """R, the replicas of all members."""
        return sum(member.replicas for member in self.members)

    @property
    def alone(self) -> bool:
        """True if each of its members makes rounds of its own."""
        return any(member.alone for member in self.members)

    @cached_property
    def leaves_out(self) -> bool:
        """True if its rounds may be made without members that live."""
        return any(member.consistency.leaves_out for member in self.members)

    def session(self, number: int) -> Member | None:
        """The member with a session, or None."""
        return self.by_session.get(number)

    @cached_property
    def by_session(self) -> dict[int, Member]:
        """The members by their sessions; a server looks there with each push."""
        return {member.session: member for member in self.members}

    @property
    def everybody(self) -> tuple[Member, ...]:
        """Who makes rounds while this is the newest generation: its members, and those who leave."""
        return (*self.members, *self.leaving)

    def takes_part(self, number: int) -> bool:
        """Returns whether a session, of a member or a leaving one, makes rounds while this generation is the newest."""
        return number in self.by_session or number in self._leavers

    @cached_property
    def _leavers(self) -> frozenset[int]:
        return frozenset(member.session for member in self.leaving)


# Entries of the log that server 0 keeps and the chief copies to the others.


@dataclass(frozen=True)
class JobStarted:
    """A chief began a job; servers drop what they held before.

    Attributes:
        job: the session of the chief that began it: no two jobs of a server 0 have the same.
        incarnations: the lives of all servers.
        name: the job's identity, "" for the one without a name.
        addresses: the addresses at which the chief reaches the servers, `host:port`.
        copies: for each server the one that has a copy of its variables; empty where there are no copies.
        workers: the addresses of the cluster's workers, in their order.
        chief: the address of the chief task; "" where the cluster has none, and worker 0 drives.
    """

    job: int
    incarnations: tuple[int, ...]
    name: str = ""
    addresses: tuple[str, ...] = ()
    copies: tuple[int, ...] = ()
    workers: tuple[str, ...] = ()
    chief: str = ""


@dataclass(frozen=True)
class Created:
    """A variable exists."""

    variable: PlacedVariable


@dataclass(frozen=True)
class Approved:
    """A plan may run, from now on."""

    plan: Plan


@dataclass(frozen=True)
class GenerationClosed:
    """The generation before this one has ended; this one holds."""

    generation: Generation


@dataclass(frozen=True)
class Started:
    """An older member says where the new ones of its generation begin."""

    start: Start


@dataclass(frozen=True)
class Snapshotted:
    """A checkpoint is complete, or failed with an error.

    Attributes:
        plan_id: the plan that asked for it.
        round: the round whose state it holds.
        path: the directory, as the server resolved it.
        error: why it failed; "" if it did not.
    """

    plan_id: bytes
    round: int
    path: str
    error: str = ""


@dataclass(frozen=True)
class Done:
    """The job is over: all members have left cleanly, it was given up, or discarded."""


@dataclass(frozen=True)
class Lost:
    """The loss of a server, with its variables: nobody goes on.

    Attributes:
        server: index of the server.
        reason: the chief's reason, as `ServerLost` says it.
    """

    server: int
    reason: str


@dataclass(frozen=True)
class Gone:
    """The loss of a server whose variables have copies elsewhere: all go on without it.

    Attributes:
        server: index of the server.
        reason: the chief's reason.
    """

    server: int
    reason: str


LogEntry = JobStarted | Created | Approved | GenerationClosed | Started | Snapshotted | Done | Lost | Gone


def in_order(servers: Iterable[int], losses: Sequence[int]) -> list[int]:
    """Returns servers in the order in which they lead: the first keeps the log. Who was lost last comes last.

    Args:
        servers: some that are there.
        losses: the servers that were lost, one after the other.
    """
    last = {server: number for number, server in enumerate(losses)}
    return sorted(servers, key=lambda server: (last.get(server, -1), server))


def holds_job(entries: Iterable[LogEntry], incarnations: Sequence[int], name: str) -> bool:
    """Returns whether entries of a log, from its first one on, are of a job on these servers that is not over.

    Args:
        entries: the entries.
        incarnations: the lives of all servers, as a process has found them at some time: of one that came back since,
            the one before may be among them.
        name: the job's identity.
    """
    lives: tuple[int, ...] = ()
    found = False
    for entry in entries:
        match entry:
            case JobStarted():
                lives, found = entry.incarnations, False
                if entry.name != name:
                    return False
            case GenerationClosed(generation=Generation(returns=Return(ready=True) as back)):
                lives = back.among(lives)
            case Done() | Lost():
                return False
        found = found or (bool(lives) and lives == tuple(incarnations))
    return found


def forget_state(entries: list[LogEntry], plan_id: bytes) -> Plan | None:
    """Once a checkpoint is complete, or failed, drops from a log the state that was to be saved in it: it may be large.

    Args:
        entries: the log; the plan's approval is replaced by one that is equal to it.
        plan_id: the plan that ordered it.

    Returns:
        The plan without the state; None where it was not approved, or orders nothing.
    """
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if isinstance(entry, Approved) and entry.plan.id == plan_id and entry.plan.snapshot is not None:
            plan = replace(entry.plan, snapshot=replace(entry.plan.snapshot, state=""))
            entries[index] = Approved(plan)
            return plan
    return None
