"""Push and pull: sends what a section reduces and updates, keeps the variables that were read.

Per server and round there is one push. Its answer brings back, besides what the section returns, the
variables that it assigned and that this process read before: the next step's reads cost no call.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

from psclient._src.rounds.counters import Counters
from psclient._src.rounds.membership import Group
from psclient._src.rounds.prepared import PreparedPlan, ServerShare
from psclient._src.transport.patience import Deadline
from psclient._src.transport.session import Session
from psclient._src.transport.staging import Sent, fill, pack
from pswire.api import Contribution, CreateReply, RoundReply
from pswire.cluster import Task
from pswire.errors import Fenced, MemoryLimit, ProgramError, PSError, RoundTimeout
from pswire.limits import PART_BYTES
from pswire.model.log import Snapshotted
from pswire.model.plan import Plan, Ref, SnapshotOrder, Variable, VariableSpec
from pswire.model.tensor import Array, portable
from pswire.telemetry.reminder import Reminder
from pswire.transport.payload import EMPTY, Payload

log = logging.getLogger("psclient")

FAILED_ROUND = (ProgramError, MemoryLimit)
"""Errors that a round ended with, for every process alike: nothing of it was applied where it failed."""


@dataclass(frozen=True)
class Outgoing:
    """What a section sends.

    Attributes:
        plan: the section's plan.
        weights: for each reduction, by how much this process's contribution counts.
        contributions: for each reduction, a host array, or one on its way from a GPU; None where the weight is 0.
        operands: for each operand, a host array.
    """

    plan: Plan
    weights: tuple[float, ...]
    contributions: tuple[Sent | None, ...]
    operands: tuple[Array, ...]

    def payload(self, share: ServerShare) -> Payload:
        """What goes to one server."""
        sent = [self.contributions[place] for place in share.reductions]
        return pack([*(self.operands[place] for place in share.operands), *(x for x in sent if x is not None)])


class Exchange:
    """What travels between this process and the servers.

    Reads may come from the threads of several replicas; all else from the thread that runs cross-replica
    code, while the replicas wait.

    Args:
        session: this process's session, open.
        group: where it stands.

    Attributes:
        measures: what is counted of it.
    """

    def __init__(self, session: Session, group: Group) -> None:
        self.session = session
        self.group = group
        self.measures = Counters()
        self._variables: dict[int, Variable] = {}
        self._proposed: set[bytes] = set()
        self._prepared: dict[bytes, PreparedPlan] = {}
        self._touched = [-1] * len(session.servers)
        # The lock guards what was read: replicas read in threads of their own.
        self._lock = threading.Lock()
        self._cache: dict[int, Array] = {}
        self._seen: dict[int, int] = {}  # of each server the oldest round that values read before taking part have seen
        self._brought: set[int] = set()
        self._renewed = False
        self._read: set[int] = set()
        self._restored: set[int] = set()

    # ---- Variables ----

    def create(self, spec: VariableSpec, servers: tuple[int, ...], value: Array) -> Variable:
        """Gets or creates a variable; the first process's value wins.

        Args:
            spec: name, dtype and shape.
            servers: who shall hold it; never empty for a new one.
            value: this process's first value, of that dtype and shape.

        Raises:
            VariableMismatch: another process created something else.
            MemoryLimit: it does not fit.
        """
        self.session.check()
        number, ordinal = self.session.number, len(self._variables)
        named = self.session.log_server.create(number, ordinal, -1, spec, servers, None)
        variable = self._variables[named.id] = Variable(named.id, spec, named.servers)
        first, *copies = variable.servers
        given = named if first == 0 and named.initialized else self._give(variable, ordinal, first, value)
        if given.restored:
            self._restored.add(variable.id)
        if copies:
            # Copies must be equal: all of them get the value that won on the first.
            value = self._pull(variable)
            for server in copies:
                self._give(variable, ordinal, server, value)
        return variable

    def _give(self, variable: Variable, ordinal: int, server: int, value: Array) -> CreateReply:
        create, number = self.session.servers[server].create, self.session.number
        # A large value travels only where it is wanted, a small one is sent sooner than asked for.
        if value.nbytes > PART_BYTES:
            found = create(number, ordinal, variable.id, variable.spec, variable.servers, None)
            if found.initialized:
                return found
        payload = Payload.pack([portable(value)])
        return create(number, ordinal, variable.id, variable.spec, variable.servers, payload)

    def was_restored(self, id: int) -> bool:
        """Whether the first value of a variable that this process created was a restored checkpoint's."""
        return id in self._restored

    def restored_names(self) -> frozenset[str]:
        """The names of the variables of which `was_restored` holds."""
        return frozenset(self._variables[id].spec.name for id in self._restored)

    def read(self, variable: Variable, now: bool = False) -> Array:
        """A variable's value, read-only, as of the last round of this process that touched its server.

        What was read is kept until a round changes it. Where workers are asynchronous it is kept for one step, so
        that a step computes with one value.

        Args:
            variable: which.
            now: where workers are asynchronous, not what is kept, but what the server has now.
        """
        if now and self.group.alone:
            return self._pull(variable)
        self._renew()
        with self._lock:
            self._read.add(variable.id)
            self._brought.discard(variable.id)
            value = self._cache.get(variable.id)
            if value is None:
                value = self._cache[variable.id] = self._pull(variable)
            return value

    def kept(self, id: int) -> Array | None:
        """A variable's value, where no round has changed it since it was read; None where `read` has to look closer.

        Without the lock: another thread's round changes such a value before or after it is read here.
        """
        value = self._cache.get(id) if self._renewed else None
        if value is not None:
            self._read.add(id)
        return value

    def begin_step(self) -> None:
        """What was read before is out of date where workers are asynchronous; what the last round brought is not."""
        if self.group.alone:
            with self._lock:
                self._cache = {id: value for id, value in self._cache.items() if id in self._brought}

    def _renew(self) -> bool:
        """Once taken in, forgets what was read before, if rounds were made since; returns whether any were.

        To an asynchronous worker it is all the same who made rounds in the meantime.
        """
        with self._lock:
            if self._renewed or self.group.epoch is None or self.group.alone:
                return False
            self._renewed = True
            stale = any(self.session.servers[s].status().round != round for s, round in self._seen.items())
            if stale:
                self._cache.clear()
            return stale

    def _pull(self, variable: Variable) -> Array:
        server = variable.servers[0]
        # The rounds of asynchronous workers are no places in time; a push is answered when it was applied.
        after = -1 if self.group.alone else self._touched[server]
        began = time.monotonic()
        future = self.session.servers[server].pull(self.session.number, [variable.id], after)
        name = repr(variable.spec.name)
        reply = self.session.wait(
            future,
            self.session.deadline(self._limit),
            lambda: RoundTimeout(
                f"reading {name} of {Task('ps', server)}{self._held_up(server)} took longer than {self._limit:g} s"
            ),
            lambda: f"waits for variable {name} of {Task('ps', server)}{self._held_up(server)}",
            lambda: False,
        )
        self.measures.read(time.monotonic() - began)
        if not self._renewed:
            self._seen[server] = min(reply.round, self._seen.get(server, reply.round))
        return _frozen(reply.payload.tensors([variable.spec.tensor])[0])

    # ---- Rounds ----

    def enter(self, plan: Plan) -> bool:
        """Comes to where a section's round is made; a process that does not take part yet waits until it does.

        Returns:
            Whether the section was computed with what is out of date by now, values or R: rounds were made since.
        """
        waiting = self.group.epoch is None
        self.group.enter(f"plan:{plan.id.hex()}")
        stale = self._renew()
        return waiting and (stale or self.group.given not in (None, self.group.slice()))

    def flush(self, outgoing: Outgoing, observes: bool = False) -> dict[Ref, Array]:
        """Makes one round of a section, whose place was entered, and waits for it.

        Args:
            outgoing: the section.
            observes: whether nothing of it shall count.

        Returns:
            The plan's returned values.

        Raises:
            PSError: why the round did not happen; the same on every process.
        """
        with self.measures:
            return self._make_round(outgoing, observes)

    def _make_round(self, outgoing: Outgoing, observes: bool) -> dict[Ref, Array]:
        plan = outgoing.plan
        self._propose(plan)
        prepared = self._prepare(plan)
        want = {server: self._want(share.writes, server) for server, share in prepared.shares.items()}
        if not self.group.alone:
            self.session.waits = (self.group.round, plan.id)
        try:
            payloads = {
                server: EMPTY if observes else outgoing.payload(share) for server, share in prepared.shares.items()
            }
            futures = {
                server: self._push(outgoing, payload, server, want[server], observes)
                for server, payload in payloads.items()
            }
            self._fill(outgoing, payloads.values())
            self._stand_in(plan, futures.values())
            replies, failure = self._gather(futures)
        except BaseException as error:
            if not isinstance(error, PSError):
                # An interrupt: the servers have this contribution, and would take the next section's for a resend.
                self.session.end(Fenced(f"interrupted in round {self.group.round}, which was on its way; restart"))
            raise
        finally:
            self.session.waits = (-1, b"")
        values = self._take(prepared, want, replies)
        if failure is not None:
            raise failure
        return values

    def _propose(self, plan: Plan) -> None:
        """Asks for a plan's approval, once; of one that saves only one process does, whose state it has."""
        if plan.id in self._proposed or (plan.snapshot is not None and not self.group.saves()):
            return
        self.session.log_server.propose(self.session.number, plan, "", None)
        self._proposed.add(plan.id)
        if plan.snapshot is not None and self.group.late:
            self._warn_of_state(plan.snapshot)

    def _warn_of_state(self, order: SnapshotOrder) -> None:
        """Says whose state a checkpoint has, where nobody is left who began the job."""
        own = [repr(path) for path in json.loads(order.state or "{}").get("state", {}) if not path.startswith(".")]
        if own:
            log.warning(
                "%s came to a running job, and saves: in checkpoint %r the state of %s is what this process has, "
                "which was not restored; what those had who began the job is lost. Keep in variables what must not be",
                self.session.task,
                order.path,
                ", ".join(own),
            )

    def _stand_in(self, plan: Plan, futures: Iterable[Future[RoundReply]]) -> None:
        """Waits until a plan that others have to propose is answered; proposes it should all of them be gone."""
        deadline = self.session.deadline(self.session.timeouts.round)
        reminder = Reminder(self.session.timeouts.word, lambda: self._say_who_saves(plan))
        while plan.id not in self._proposed and deadline.left() > 0:
            if not wait(futures, self.session.timeouts.beat).not_done:
                return
            self.session.check()
            self._propose(plan)
            reminder.look()

    def _say_who_saves(self, plan: Plan) -> None:
        names = dict.fromkeys(name for server in plan.servers for name in self._awaited(server))
        log.warning("%s waits in round %d for %s", self.session.task, self.group.round, ", ".join(names))

    def _prepare(self, plan: Plan) -> PreparedPlan:
        """A plan as its rounds are made; one that saves or restores is of one round, and is not kept."""
        found = self._prepared.get(plan.id)
        if found is None:
            found = PreparedPlan(plan)
            if plan.snapshot is None and plan.restore is None:
                self._prepared[plan.id] = found
        return found

    def _want(self, writes: Iterable[int], server: int) -> tuple[int, ...]:
        """What to ask back: of the variables that a round assigns those that were read since their last assignment."""
        with self._lock:
            written = [id for id in writes if id in self._read]
            return tuple([id for id in written if self._variables[id].servers[0] == server])

    def _fill(self, outgoing: Outgoing, payloads: Iterable[Payload]) -> None:
        """Waits until all of a contribution is on the host, while what is there is sent."""
        try:
            fill(outgoing.contributions, payloads)
        except Exception as error:
            # The servers wait for the rest of it, and nobody can send that.
            failure = PSError(
                f"the contribution to round {self.group.round} could not be copied from the GPU ({error}); restart",
                str(self.session.task),
            )
            self.session.end(failure)
            raise failure from error

    def _push(
        self, outgoing: Outgoing, payload: Payload, server: int, want: tuple[int, ...], observes: bool
    ) -> Future[RoundReply]:
        epoch = self.group.epoch
        said = Contribution(
            self.session.number,
            epoch.number if epoch else 0,
            self.group.round,
            outgoing.plan.id,
            (0.0,) * len(outgoing.weights) if observes else outgoing.weights,
            self.group.more,
            self.group.positions,
            want,
            observes,
            self.group.start,
        )
        return self.session.servers[server].push(said, payload)

    def _gather(self, futures: Mapping[int, Future[RoundReply]]) -> tuple[dict[int, RoundReply], PSError | None]:
        """The answers, and why the round failed on some server: then it did for every process."""
        deadline = self.session.deadline(self._limit)
        failure: PSError | None = None
        replies: dict[int, RoundReply] = {}
        for server, future in futures.items():
            try:
                replies[server] = self._await(server, future, deadline)
            except FAILED_ROUND as error:
                failure = error
            except PSError as error:
                # The others may have made this round: this process has lost its place among them.
                self.session.end(error)
        if failure is not None and replies:
            # It is applied where it did not fail: nobody may compute on half a round.
            self.session.end(failure)
        self.session.check()
        return replies, failure

    def _await(self, server: int, future: Future[RoundReply], deadline: Deadline) -> RoundReply:
        session, round = self.session, self.group.round
        return session.wait(
            future,
            deadline,
            lambda: RoundTimeout(
                f"round {round} did not complete within {self._limit:g} s: it waits for {self._named(server)}"
            ),
            lambda: f"waits in round {round} for {', '.join(self._awaited(server))}",
            lambda: "the chief" in self._awaited(server),
        )

    @property
    def _limit(self) -> float:
        """How long this process waits for a round: longer than the chief, who drops those that hold it up."""
        return self.session.timeouts.round + 2 * self.session.timeouts.lease

    def _named(self, server: int) -> str:
        """Whom a round of a server waits for, in words, as far as it still answers."""
        try:
            return ", ".join(self._awaited(server))
        except (PSError, TimeoutError) as error:
            return f"what it could not say ({error})"

    def _held_up(self, server: int) -> str:
        """Whom a server waits for, in words, if it is somebody else."""
        named = self._named(server)
        return "" if named == str(Task("ps", server)) else f", which waits for {named}"

    def _awaited(self, server: int) -> list[str]:
        """Whom a round waits for: members, or the chief to approve it or to drop members that are gone."""
        open_rounds = self.session.servers[server].status().waiting
        if self.group.alone:
            open_rounds = tuple(item for item in open_rounds if item.round == self.group.round)
        missing = [task for item in open_rounds for task in item.missing]
        gone = [s.member.task for s in self.session.look().sessions if s.state != "open"]
        chief = any(not item.approved for item in open_rounds) or bool(set(missing) & set(gone))
        return [*map(str, missing), *(["the chief"] if chief else [])] or [str(Task("ps", server))]

    def _take(
        self, prepared: PreparedPlan, want: Mapping[int, tuple[int, ...]], replies: Mapping[int, RoundReply]
    ) -> dict[Ref, Array]:
        """Keeps what came back; returns what the plan returns."""
        with self._lock:  # first, so that there is never room for more than one value of a variable that spans parts
            self._read -= prepared.written
            for id in set(self._cache) if prepared.restores else prepared.written & self._cache.keys():
                del self._cache[id]
        values: dict[Ref, Array] = {}
        fresh: dict[int, Array] = {}
        for server, reply in replies.items():
            given = prepared.shares[server].given
            wanted = [self._variables[id].spec.tensor for id in want[server]]
            tensors = [_frozen(array) for array in reply.payload.tensors(wanted + [spec for _, spec in given])]
            fresh |= zip(want[server], tensors, strict=False)
            values |= zip([ref for ref, _ in given], tensors[len(wanted) :], strict=True)
            for task in reply.left_out:
                self.measures.left_out += 1
                log.warning("round %d of server %d is complete without %s", reply.round, server, task)
        # Of a variable that several servers hold each of them says the same.
        for words in dict.fromkeys(words for reply in replies.values() for words in reply.warnings):
            log.warning("%s", words)
        for server in prepared.shares:
            self._touched[server] = self.group.round
        with self._lock:
            self._cache |= fresh
            self._brought = set(fresh)
        epochs = [reply.epoch for reply in replies.values()]
        newest = max(epochs, key=lambda epoch: epoch.number, default=None)
        self.group.round_over(newest, any(reply.more for reply in replies.values()))
        return values

    # ---- Checkpoints ----

    def snapshot(self, plan_id: bytes) -> Snapshotted:
        """Waits until the checkpoint that a flushed plan ordered is complete, or failed."""
        return self.group.snapshotted(plan_id, self.session.deadline(self.session.timeouts.round))


def _frozen(array: Array) -> Array:
    """The array, read-only: it is shared by all who read it."""
    array.flags.writeable = False
    return array
