"""The state of a job: what its log says, entry by entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from pswire.model.changes import change_of
from pswire.model.log import (
    Approved,
    Created,
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
)
from pswire.model.plan import PlacedVariable, Plan


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
