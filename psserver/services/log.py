"""The log: the decisions of a job, in one order. Server 0's copy is authoritative; the chief copies it to the others.

Server 0 appends creations and starts itself, since clients ask it for them. The chief appends all other entries.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from psserver.checkpoints.snapshots import Snapshots
from psserver.effects import NOWHERE, Effect, Know, Peer
from psserver.plans.divergence import PlanText
from psserver.plans.prepared import PreparedPlan
from psserver.rounds.rounds import Rounds
from psserver.state.variables import Store
from pswire.cluster import Task
from pswire.errors import Diverged, InvalidRequest, MemoryLimit, PSError, ServerLost, VariableMismatch
from pswire.limits import MAX_PLANS, MAX_SAVES, MAX_VARIABLES
from pswire.model.log import (
    Approved,
    Created,
    Done,
    GenerationClosed,
    Gone,
    JobStarted,
    LogEntry,
    Lost,
    Return,
    Snapshotted,
    Start,
    Started,
    forget_state,
)
from pswire.model.plan import PlacedVariable, Plan, VariableSpec, are_some_of
from pswire.sizes import human

log = logging.getLogger("psserver")


class Log:
    """The entries of the log, and their consequences for variables and plans. Guarded by the core's lock.

    Args:
        store: declares variables.
        rounds: approves plans and closes generations.
        snapshots: orders checkpoints.
        incarnation: this server's life.
        addresses: the addresses of all servers, as this server's configuration says; empty if it says none.
    """

    def __init__(
        self,
        store: Store,
        rounds: Rounds,
        snapshots: Snapshots,
        incarnation: int,
        addresses: tuple[str, ...] = (),
    ) -> None:
        self._incarnation = incarnation
        self._addresses = addresses
        self._store = store
        self._rounds = rounds
        self._snapshots = snapshots
        self.entries: list[LogEntry] = []
        self.proposed: dict[bytes, Plan] = {}
        self.traces: dict[str, str] = {}
        """The spans in which plans among them were proposed, by the plan's id in hexadecimal."""
        self._names: dict[str, int] = {}
        self._creators: dict[int, Task] = {}
        self._ordered = 0
        self.moved: dict[int, str] = {}
        """The addresses of servers that are not where they were when the job began."""
        self.incarnations: tuple[int, ...] = ()
        """The incarnations of all servers of the job, as they are now; empty while there is no job."""
        self.lost_incarnations: set[int] = set()
        """The incarnations of servers that were lost, in whose place others may have come since."""
        self.started = JobStarted(0, ())
        """The beginning of the job; of no meaning while there is none."""
        self.over = False
        """True once the job is done."""
        self.lost: ServerLost | None = None
        """The error of a job that has lost a server; None while it has lost none."""
        self.keeps = store.server == 0
        """True if this server keeps the log and the sessions: it is the first that is not gone."""

    def begins_anew(self, entries: Sequence[LogEntry]) -> bool:
        """Returns True if these entries are of another job than the log's."""
        return bool(entries) and isinstance(entries[0], JobStarted) and entries[0] not in self.entries[:1]

    def removed_by(self, index: int, entries: Sequence[LogEntry]) -> str:
        """Returns why the job goes on without this server, as it is, by new entries of the log from an index on.

        It is "" where they say nothing of that, or tell a new process of those before it.
        """
        mine = self._store.server
        told, known = (
            [entry for entry in log if isinstance(entry, Gone) and entry.server == mine]
            for log in (entries, self.entries[index:])
        )
        new = told[len(known) :]
        return new[-1].reason if new and self.incarnations and not self.away else ""

    @property
    def away(self) -> bool:
        """True while the job is one that this server, a new process, has not been readmitted into."""
        mine = self._store.server
        return mine < len(self.incarnations) and self.incarnations[mine] != self._incarnation

    @property
    def gone(self) -> Mapping[int, str]:
        """The servers that are gone, without which the job goes on, with the reason of each."""
        return self._store.gone

    @property
    def losses(self) -> Sequence[int]:
        """The servers that were lost, one after the other; those that have come back included."""
        return self._store.losses

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all servers, in their order; empty where nobody has said them.

        They are where this server's own configuration says, else where the chief does, unless they have moved.
        """
        begun = self._addresses or self.started.addresses
        return tuple(self.moved.get(server, address) for server, address in enumerate(begun))

    @property
    def servers(self) -> int:
        """The job's number of servers; raises `InvalidRequest` while there is no job."""
        if not self.incarnations:
            raise InvalidRequest("the chief has not started a job on this server yet", str(self._store.task))
        return len(self.incarnations)

    # ---- By the chief ----

    def append(
        self, index: int, entries: Sequence[LogEntry], prepared: Mapping[bytes, PreparedPlan]
    ) -> tuple[int, list[Effect]]:
        """Appends the new entries of the chief's log.

        Args:
            index, entries: the index of the first entry, and the chief's entries from there on.
            prepared: the plans among the entries, by id.

        Returns:
            The length up to which the two logs agree, and the effects.
        """
        have, end = len(self.entries), index + len(entries)
        if index > have:
            return have, []
        if list(entries[: have - index]) != self.entries[index:end]:
            # Server 0 has appended entries itself: the chief has to read them before it decides.
            return index, []
        return end, [effect for entry in entries[have - index :] for effect in self._take(entry, prepared)]

    def _take(self, entry: LogEntry, prepared: Mapping[bytes, PreparedPlan]) -> list[Effect]:
        """Appends one entry and applies it."""
        effects: list[Effect] = []
        match entry:
            case Created():
                self._declare(entry.variable)
            case Approved():
                effects = self._approve(prepared[entry.plan.id])
                self.proposed.pop(entry.plan.id, None)
                self.traces.pop(entry.plan.id.hex(), None)
            case JobStarted():
                self._store.copied = bool(entry.copies)
                self._rounds.votes.begin(entry.job)
                self.incarnations, self.started = entry.incarnations, entry
                self._find_keeper()
                effects += self._introduce()
            case GenerationClosed():
                back = entry.generation.returns
                effects = self._take_back(back) if back is not None and back.ready else []
                effects += self._rounds.close_generation(entry.generation)
            case Snapshotted():
                effects = self._settle(entry)
            case Done():
                self.over = True  # whatever late processes still create
            case Lost():
                self.lost = ServerLost(entry.reason, str(Task("ps", entry.server)))
            case Gone():
                return self._lose(entry)
        self.entries.append(entry)
        return effects

    def _find_keeper(self) -> None:
        self.keeps = self._store.leads(range(self.servers)) and not self.away

    def _introduce(self) -> list[Effect]:
        """Tells where the other servers are.

        Not while this server is away: they would refuse it.
        """
        if self.away:
            return []
        places = map(Peer, self.addresses or ("",) * len(self.incarnations), self.incarnations)
        return [Know(tuple(NOWHERE if number in self.gone else place for number, place in enumerate(places)))]

    def _take_back(self, back: Return) -> list[Effect]:
        """Goes on with a server that was gone, which has its variables again; raises nothing."""
        self._store.gone.pop(back.server, None)
        self.incarnations = back.among(self.incarnations)
        if back.address:
            self.moved[back.server] = back.address
        self._find_keeper()
        if back.server != self._store.server:
            self._rounds.votes.take_back(back.server, back.round - 1)
        elif not self.away:
            # The others have made the rounds before, and may have told of some that were under way meanwhile.
            self._rounds.sequences[None].begin_at(back.round)
            self._rounds.last = back.round - 1
            self._rounds.votes.close(self._rounds.last)
            self._rounds.backlog.begin(back.generation)
            log.info("%s was readmitted, and takes part from round %d on", self._store.task, back.round)
        return self._introduce()

    def _lose(self, entry: Gone) -> list[Effect]:
        """Goes on without a server; the next one that is there keeps the log from now on."""
        self.entries.append(entry)
        self._store.losses.append(entry.server)
        self._store.gone[entry.server] = entry.reason
        self.lost_incarnations.add(self.incarnations[entry.server])
        self._find_keeper()
        if self.keeps:
            named = self._named()
            # Their creators were answered, and the one that kept the log may have told nobody else.
            self.entries += [Created(v) for id, v in sorted(self._store.variables.items()) if id not in named]
            for variable in self._store.variables.values():
                self._names[variable.spec.name] = variable.id
                self._creators.setdefault(variable.id, Task("ps", entry.server))
        others = set[int]() if self.away else set(range(self.servers)) - {self._store.server, *self.gone}
        votes = self._rounds.votes.lose(entry.server, sorted(others), self._rounds.sequences[None].last)
        return [*self._introduce(), *votes, *self._snapshots.lose(entry.server)]

    # Decisions stand: a server that cannot carry one out tells the callers that need it, and not the chief.

    def _declare(self, variable: PlacedVariable) -> None:
        for rival in self._store.rivals(variable):
            if rival not in self._named():
                self._store.forget(rival)  # declared here by another process than its creator
        try:
            self._store.declare(variable)
        except PSError as error:
            log.warning("cannot create a variable: %s", error)

    def _named(self) -> set[int]:
        """Returns the numbers of all variables in the log."""
        return {entry.variable.id for entry in self.entries if isinstance(entry, Created)}

    def _approve(self, prepared: PreparedPlan) -> list[Effect]:
        plan = prepared.plan
        try:
            self._verify(prepared)
        except PSError as error:
            log.warning("rejected a compiled step: %s", error)
            effects = self._rounds.refuse(prepared, error)
        else:
            effects = self._rounds.approve(prepared)
        if plan.snapshot is not None:
            self._ordered += plan.id in self._rounds.plans
            self._snapshots.order(plan)
        return effects

    def _settle(self, entry: Snapshotted) -> list[Effect]:
        effects = self._snapshots.settle(entry)
        plan = forget_state(self.entries, entry.plan_id)
        if plan is not None and plan.id in self._rounds.plans:
            self._rounds.plans[plan.id] = PreparedPlan(plan, self._store.server)
        return effects

    # ---- By clients, at server 0 ----

    def name(self, task: Task, ordinal: int, spec: VariableSpec, servers: tuple[int, ...]) -> PlacedVariable:
        """Finds a variable, or creates a new one.

        Args:
            task: the creating task.
            ordinal: number of variables that its process created before.
            spec: the variable's spec.
            servers: the servers that hold it.

        Raises:
            VariableMismatch: another process created something else in its place, or placed it elsewhere.
            Diverged: the ordinal leaves out a variable.
            InvalidRequest: there are no such servers, or too many variables.
            MemoryLimit: it does not fit on this server.
        """
        known = self._names.get(spec.name)
        if known is not None or ordinal < len(self._creators):
            there = self._store.variables[ordinal if known is None else known]
            if there.spec != spec or there.id != ordinal:
                raise VariableMismatch(
                    f"{task} creates variable {spec} as number {ordinal}, but {self._creators[there.id]} created "
                    f"{there.spec} as number {there.id}. Every process must create the same variables in the same "
                    "order"
                )
            if set(servers) != set(there.servers):
                raise VariableMismatch(
                    f"{task} creates variable {spec} on servers {servers}, but {self._creators[there.id]} created it "
                    f"on {there.servers}. Give every process the same ps_strategy and the same colocate_vars_with"
                )
            return there
        if ordinal > len(self._creators):
            raise Diverged(
                f"{task} creates variable number {ordinal}, but the job has only {len(self._creators)} "
                "variables. Every process must create the same variables in the same order"
            )
        count = self.servers
        if not are_some_of(servers, count):
            raise InvalidRequest(f"servers {servers[:8]} are not distinct servers of a job with {count} servers")
        if ordinal >= MAX_VARIABLES:
            raise InvalidRequest(f"a job has at most {MAX_VARIABLES} variables; put several into one tensor")
        variable = PlacedVariable(ordinal, spec, servers)
        self._store.declare(variable)
        self._names[spec.name] = variable.id
        self._creators[variable.id] = task
        self.entries.append(Created(variable))
        return variable

    def start(self, start: Start) -> None:
        """Records the round in which the new members of a generation begin.

        Raises:
            InvalidRequest: the generation is not known.
            Diverged: another start of the generation is recorded.
        """
        newest = self._rounds.generation
        if newest is None or not 0 < start.generation <= newest.number:
            raise InvalidRequest(f"generation {start.generation} is not known on this server")
        for item in self.entries:
            if isinstance(item, Started) and item.start.generation == start.generation:
                if item.start != start:
                    raise Diverged(f"generation {start.generation} begins at {item.start}, not at {start}")
                return
        self.entries.append(Started(start))

    def propose(self, prepared: PreparedPlan, trace: str) -> bool:
        """Keeps a plan for the chief to approve, and the span in which it is proposed; returns True if it is new.

        Raises:
            PSError: why the plan may not run.
        """
        plan = prepared.plan
        if plan.id in self._rounds.plans or plan.id in self.proposed:
            return False
        self._check_room(plan)
        self._verify(prepared)
        self.proposed[plan.id] = plan
        if trace:
            self.traces[plan.id.hex()] = trace
        return True

    def _check_room(self, plan: Plan) -> None:
        """Raises `InvalidRequest` if there are too many plans.

        Plans that save are counted apart, as each has one round.
        """
        saves = sum(one.snapshot is not None for one in self.proposed.values())
        if plan.snapshot is not None:
            if len(self._snapshots) + saves >= MAX_SAVES:
                raise InvalidRequest(
                    f"{MAX_SAVES} checkpoints are not complete yet, which is the limit; check that the chief runs, "
                    "and call checkpoint.sync() before the next save"
                )
        elif len(self._rounds.plans) - self._ordered + len(self.proposed) - saves >= MAX_PLANS:
            raise InvalidRequest(
                f"the job has run {MAX_PLANS} different compiled steps, which is the limit; a step is compiled again "
                "when its shapes change: pad the batches, or reduce over an axis first"
            )

    def _verify(self, prepared: PreparedPlan) -> None:
        """Raises `PSError` if a plan may not run here."""
        plan = prepared.plan.verify(self._store.variables, self.servers)
        prepared.look(self._store.variables)
        limit, need = self._store.memory_limit, prepared.nbytes
        if self._rounds.generation is not None and not self._rounds.generation.alone:
            need += self._second_bytes(prepared)
        if need > limit:
            raise MemoryLimit(
                f"a compiled step needs {human(need)} while it runs, and the limit is {human(limit)}; raise "
                f"--memory-limit, or split the step ({PlanText(plan, self._store.variables)})",
                str(self._store.task),
            )

    def _second_bytes(self, prepared: PreparedPlan) -> int:
        """Returns the bytes of the second arrays that a round of several servers writes while it streams."""
        if not (self._store.memory_limit and prepared.streams and len(prepared.plan.servers) > 1):
            return 0
        return sum(self._store.variables[id].spec.nbytes for id in prepared.writes)

    def describe(self, plan_id: bytes) -> str:
        """Returns a section in words, for messages; a `PlanText` if the plan is known here."""
        approved = self._rounds.plans.get(plan_id)
        plan = approved.plan if approved else self.proposed.get(plan_id)
        # Proposals are kept on server 0 only; the other servers know approved plans.
        if plan is None:
            return f"a compiled step that is not approved yet ({plan_id.hex()[:8]})"
        return PlanText(plan, self._store.variables)
