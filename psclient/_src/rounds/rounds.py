"""Rounds: sends what a section reduces and updates, and takes what comes back.

Per server and round there is one push. Its answer brings back, besides what the section returns, the
variables that it assigned and that this process read before: the next step's reads cost no call.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from psclient._src.arrays.devices import Coming
from psclient._src.data.adapters import GlobalBatch
from psclient._src.distribute.compressed import compress
from psclient._src.distribute.reduction import SentRows
from psclient._src.distribute.strands import Marks, PlanCutter, PlanPart
from psclient._src.interpreter.interrupts import INTERRUPTS
from psclient._src.network.pacing import passes
from psclient._src.network.remote_server import RemoteServer
from psclient._src.network.session import Session
from psclient._src.network.staging import Sent, any_pending, fill, host, keep, pack
from psclient._src.processes.aggregation.host_group import HostGroup
from psclient._src.processes.aggregation.pushes import Pushes
from psclient._src.rounds.awaited import Awaited
from psclient._src.rounds.buffers import Buffer, Buffers
from psclient._src.rounds.buffers import pack as pack_buffers
from psclient._src.rounds.counters import RoundCounters
from psclient._src.rounds.creation import Creation
from psclient._src.rounds.membership import Group
from psclient._src.rounds.numbering import ClosureRounds, Numbering, OwnRounds, SharedRounds
from psclient._src.rounds.prepared import PlanShares, ServerShare, WantedVariables
from psclient._src.rounds.read_cache import ReadCache
from psclient._src.rounds.under_way import Lookup, UnderWay
from psclient._src.rounds.window import OwnWindow, Window
from psclient._src.tracing.diagnostics import users_line
from psclient._src.variables.feedback import Feedback
from pswire.api import Contribution, RoundReply, RowRead
from pswire.cluster import Task
from pswire.errors import Fenced, PSError, ServerGone
from pswire.limits import PART_BYTES
from pswire.model.closures import ClosureName
from pswire.model.finite import is_finite
from pswire.model.plan import Plan, Ref, SnapshotOrder
from pswire.model.rows import Rows
from pswire.model.status import Pace
from pswire.model.tensor import Array
from pswire.network.payload import EMPTY, Payload
from pswire.telemetry.reminder import Reminder

if TYPE_CHECKING:
    from psclient._src.telemetry.traces.worker import Flush, StepTraces

log = logging.getLogger("psclient")


@dataclass(frozen=True)
class Outgoing:
    """The contribution of this process to a round of a section.

    Attributes:
        plan: the section's plan.
        weights: for each reduction the weight of this process's contribution.
        contributions: for each reduction, a host array, or one on its way from a GPU, or rows; None where the weight is
            0.
        operands: for each operand, a host array.
        feedback: for each reduction what compresses the contribution; None where it travels as it is.
        flawed: numbers of the reductions to which NaN or infinity is contributed, of those that were compressed.
        own: the `id` of each array that was made of what is sent; nobody changes them.
        batch: the global batch that was in use when the section began; None for none that all workers read.
    """

    plan: Plan
    weights: tuple[float, ...]
    contributions: tuple[Sent | SentRows | None, ...]
    operands: tuple[Array, ...]
    feedback: tuple[Feedback | None, ...] = ()
    flawed: frozenset[int] = frozenset()
    own: frozenset[int] = frozenset()
    batch: GlobalBatch | None = None

    def compressed(self) -> Outgoing:
        """Returns what is sent of it, which is compressed here, once; see `compress`."""
        found = compress(self.plan, self.contributions, self.feedback, host)
        return replace(
            self,
            contributions=tuple(found.contributions),
            flawed=frozenset(found.flawed),
            own=frozenset(map(id, found.own)),
        )

    def part(self, part: PlanPart) -> Outgoing:
        """Returns what is sent of it in one of the rounds of its section."""
        return Outgoing(
            part.plan,
            part.of_reductions(self.weights),
            part.of_reductions(self.contributions),
            part.of_operands(self.operands),
            part.of_reductions(self.feedback),
            batch=self.batch,
        )

    def nonfinite(self) -> tuple[int, ...]:
        """Returns the numbers of the applied reductions to which it contributes NaN or infinity.

        Waits for copies from a GPU: this goes ahead of all that is sent.
        """
        arrays = self.arrays
        sent = ((number, arrays[number]) for number in self.plan.applied)
        found = (number for number, array in sent if array is not None and not is_finite(host(array)))
        return tuple(sorted({*found, *self.flawed.intersection(self.plan.applied)}))

    @property
    def rows(self) -> tuple[int, ...]:
        """For each of the plan's reductions of rows, how many are sent."""
        found = (self.contributions[number] for number in self.plan.rows)
        return tuple([each.number if isinstance(each, SentRows) else 0 for each in found])

    @property
    def arrays(self) -> Sequence[Sent | None]:
        """What is sent of contributions, in the order in which their copies from a GPU were begun."""
        if not self.plan.rows:
            sent: Any = self.contributions
            return sent  # type: ignore[no-any-return]
        return [each.values if isinstance(each, SentRows) else each for each in self.contributions]

    def sent(self, share: ServerShare) -> list[Sent]:
        """Returns the arrays that go to one server, in their order."""
        sent: list[Any] = list(map(self.operands.__getitem__, share.operands))
        for each in map(self.contributions.__getitem__, share.reductions):
            if each is not None:
                sent.append(each)
        for place in share.rows:
            if (rows := self.contributions[place]) is not None:
                sent += cast(SentRows, rows)
        return sent

    def payload(self, share: ServerShare, kept: bool, buffers: Mapping[int, Buffer | None]) -> Payload:
        """Returns what goes to one server.

        Args:
            share: the server's share of the plan.
            kept: True for memory of its own: the arrays may change before it is sent, or has to be sent again.
            buffers: those of the arrays that do not change, by their `id`, and the buffers that they are.
        """
        arrays: list[Any] = self.sent(share)
        if any_pending(arrays):
            return keep(arrays) if kept else pack(arrays)
        if not buffers:
            return Payload.copied(arrays) if kept else Payload.pack(arrays)
        if kept:
            arrays = [array if id(array) in buffers else array.copy() for array in arrays]
        return pack_buffers(arrays, buffers)


TWICE = (
    "interrupted twice in round {}; this process's part of the round is lost, so the job cannot continue. "
    "Restart the job"
)


class Exchange:
    """The rounds of this process. Used by the thread that runs cross-replica code.

    Those of all members come one after the other; beside them may be those of this process alone, of variables that
    each worker updates alone. Neither waits for the other.

    Args:
        session: this process's session, open.
        group: this process's place among the members.

    Attributes:
        measures: counters of rounds and reads.
        creation: creates variables.
        reads: the variables' values as they were read between the rounds.
        window: the rounds under way.
        own: those of this process alone that are under way.
        buffers: arrays that are sent from where they are.
        traces: the traces of its rounds; None where they are off.
        pushes: its pushes, by themselves or in sums.
    """

    traces: StepTraces | None = None

    def __init__(self, session: Session, group: Group) -> None:
        self.session = session
        self.group = group
        self.measures = RoundCounters()
        session.pace = self._pace
        self._awaited = Awaited(session, group)
        self.reads = ReadCache(session, group, self._awaited, self.measures)
        self.window = Window(session, group, self.reads, self._awaited, self.measures)
        self.own = OwnWindow(session, group, self.reads, self._awaited, self.measures)
        group.settle, self.reads.take = self.window.settle, self._take
        self.buffers = Buffers(session.transport, self._take)
        self.creation = Creation(session, group, self.reads)
        self._variables = self.creation.variables
        self.pushes = Pushes(session.servers)
        self._proposed: set[bytes] = set()
        self._prepared: dict[bytes, PlanShares] = {}
        self._shared: SharedRounds | ClosureRounds = SharedRounds(group, self._none_pushed())
        self._alone = OwnRounds(self._none_pushed())
        self._cutter = PlanCutter()

    def _none_pushed(self) -> list[int]:
        """For each server the last round that it was sent, before the first."""
        return [-1] * len(self.session.servers)

    def join_host(self) -> None:
        """Sums what it contributes with other workers of this host, from now on."""
        session, begun = self.session, self.session.begun
        job = repr((begun.job, begun.incarnations)).encode()
        lease, servers = session.timeouts.session_timeout, len(session.servers)
        self.sum_with(HostGroup(job, session.number, lease, servers, self.pushes.once, self._variables.__getitem__))

    def sum_with(self, near: HostGroup) -> None:
        """Sums what it contributes with others, from now on."""
        self.pushes.near, self._shared = near, SharedRounds(self.group, self._none_pushed(), near.number)

    @property
    def bytes_transferred(self) -> tuple[int, int]:
        """Payload bytes sent and received so far."""
        servers = cast(Sequence[RemoteServer], self.session.servers)
        transports = [each for server in servers for each in server.traffic.values()]
        return sum(each.sent for each in transports), sum(each.received for each in transports)

    def begin_run(self) -> None:
        """The program begins a `run` that is within no other."""
        self.window._begin_step()
        self.group.begin_run()

    def _pace(self) -> Pace:
        """Returns the content of heartbeats: the counts, and for the chief whether this process was asked to end."""
        notice, alone = self.group.departure.notice, self.group.alone
        asks = notice.leaving and not alone
        saves = asks and notice.saves
        pace = self.measures.pace()
        return replace(pace, leaving=asks, saving=saves)

    @contextmanager
    def closure(self, name: ClosureName) -> Iterator[None]:
        """Makes the rounds within those of a closure: each is made once, whichever workers have run that before.

        On return all of them are answered.
        """
        self.window.settle()
        self.reads._begin_step()
        shared, self.group.apart = self._shared, True
        self._shared = ClosureRounds(self.group, name, self._none_pushed())
        try:
            yield
        finally:
            try:
                self.window.settle()
            finally:
                self._shared, self.group.apart = shared, False

    # ---- What was sent ----

    def _take(self, round: UnderWay) -> None:
        """Waits for a round, and for those before it in its strand; see `Window.take`."""
        (self.own if round.alone else self.window).take(round)

    def settle(self) -> None:
        """Takes in the answers to all rounds, of both strands."""
        self.window.settle()
        self.own.take_all()

    def take_all(self) -> None:
        """Waits for all rounds that were sent, and takes their values."""
        self.window.take_all()
        self.own.take_all()

    @property
    def mine(self) -> bool:
        """True in the thread that has sent the last rounds, or where none was sent."""
        return self.window.mine and self.own.mine

    @property
    def busy(self) -> bool:
        """True while rounds are under way whose values were not taken."""
        return self.window.busy or self.own.busy

    # ---- Rounds ----

    def make(self, outgoing: Outgoing, marks: Marks | None, observes: bool) -> Callable[[], Mapping[Ref, Array | Rows]]:
        """Sends the rounds of a section, whose place was entered: that of all members, and this process's own.

        Args:
            outgoing: this process's contribution.
            marks: what of the section each worker makes alone; None for nothing.
            observes: True if nothing shall count of what all make together.

        Returns:
            Waits for the values that the section returns, and returns them.

        Raises:
            PSError: as `send`.
        """
        if not marks:
            return partial(self.window.values, self.send(outgoing, observes=observes))
        # An error of the first is every process's, and then none makes the second.
        sent = [
            (part, self.send(outgoing.part(part), observes=observes and not part.alone, alone=part.alone))
            for part in self._cutter.cut(outgoing.plan, marks)
        ]
        return partial(self._values_of, sent)

    def _values_of(self, sent: Sequence[tuple[PlanPart, UnderWay]]) -> dict[Ref, Array | Rows]:
        found: dict[Ref, Array | Rows] = {}
        for part, round in sent:
            values = (self.own if part.alone else self.window).values(round)
            found |= {name: values[ref] for ref, name in part.names.items()}
        return found

    def enter(self, plan: Plan) -> bool:
        """Comes to where a section's round is made; a process that does not take part yet waits until it does.

        Returns:
            Whether the section was computed with what is out of date by now, values, R or the job's consistency.
        """
        group = self.group
        self.window.take_in(group.round - self.window.size + 1)
        waiting, change = group.generation is None, self.session.change
        group.enter(f"plan:{plan.id.hex()}")
        stale = self.reads.renew()
        changed = self.session.change is not change
        return waiting and (stale or changed or group.given not in (None, group.slice()))

    def send(self, outgoing: Outgoing, observes: bool = False, alone: bool = False) -> UnderWay:
        """Sends one round of a section, whose place was entered.

        It returns once the contribution's arrays may be changed. Waits for the round if an error may have to be told
        here: it is the first of its plan, or its plan may refuse a value. Waits as well if it streams from arrays that
        may change. It waits for nothing if the program still computes a part of it.

        Args:
            outgoing: this process's contribution.
            observes: True if nothing of it shall count.
            alone: True for a round of this process alone, beside those of all members.

        Returns:
            The round, whose values are taken by `Window.values`.

        Raises:
            PSError: the reason why the round did not happen; the same on every process.
        """
        plan = outgoing.plan
        window, strand = (self.own, self._alone) if alone else (self.window, self._shared)
        shares = self._prepared.get(plan.id)
        first = shares is None
        traced = None if self.traces is None else _flush(self.traces, plan, self.group, self._alone if alone else None)
        if plan.id not in self._proposed:
            self._propose(plan, "" if traced is None else traced.text)
        if shares is None:
            shares = self._prepare(plan)
        arrays = outgoing.arrays
        buffers = self.buffers.among(arrays)
        coming = [array for array in arrays if isinstance(array, Coming)] if any_pending(arrays) else []
        if plan.compressed and not observes:
            with self._copied():
                outgoing = outgoing.compressed()
        unchanged = {**buffers, **dict.fromkeys(outgoing.own)} if outgoing.own else buffers
        waits = not coming and (first or shares.refuses or (not alone and window.size == 1))
        if shares.large and not (waits or coming):
            waits = any(_nbytes(outgoing.sent(share), unchanged) > PART_BYTES for share in shares.shares.values())
        if plan.streams and not alone:
            self.own.take_all()  # what lies on its way unused would leave no room on the transport for what streams
        if alone:
            self.own.make_room()
        INTERRUPTS.guard()
        round = self._push_all(outgoing, shares, observes, waits, unchanged, strand, traced)
        window.add(round)
        for buffer in buffers.values():
            buffer.round = round
        for each in coming:
            each.when(partial(self._came, round))
        if waits:
            window.values(round)
        return round

    def _came(self, round: UnderWay, array: Array) -> None:
        """Hands in a buffer of which a round was sent before it was there."""
        buffer = self.buffers.hand_in(array)
        if buffer is not None:
            buffer.round = round

    def _push_all(
        self,
        outgoing: Outgoing,
        shares: PlanShares,
        observes: bool,
        waits: bool,
        buffers: Mapping[int, Buffer | None],
        strand: Numbering,
        traced: Flush | None,
    ) -> UnderWay:
        """Pushes a contribution to all servers of its plan, and goes on to the next round of its strand."""
        plan, group, hosting = outgoing.plan, self.group, self.session.hosting
        want, payloads, futures = dict[int, WantedVariables](), dict[int, Payload](), dict[int, Future[RoundReply]]()
        lookups, hints = dict[int, tuple[Lookup, ...]](), dict[int, tuple[RowRead, ...]]()
        gone = hosting.gone
        for server, share in shares.shares.items():
            if server not in gone:
                returns = share.returned_by(server, self._variables, hosting.home) if gone else share.returns
                want[server] = self.reads.wanted(returns)
                lookups[server], hints[server] = self.reads.rows_beside(share.writes, server)
        alone = isinstance(strand, OwnRounds)
        if self.session.waits[0] < 0 and not (group.alone or alone):
            self.session.waits = (group.round, plan.id)
        try:
            for server in want:
                payloads[server] = EMPTY if observes else outgoing.payload(shares.shares[server], not waits, buffers)
            nonfinite: tuple[int, ...] = ()
            if plan.nonfinite != "apply" and not observes:
                with self._copied():
                    nonfinite = outgoing.nonfinite()
            grows = False
            for server, payload in payloads.items():
                grows = grows or payload.end < payload.size
                said = self._said(
                    outgoing,
                    server,
                    want[server].ids,
                    lookups[server],
                    hints[server],
                    observes,
                    nonfinite,
                    server in shares.timed,
                    strand,
                    "" if traced is None else traced.push(server, payload.size),
                )
                whole = not self.session.consistency.own_rounds and len(plan.servers) > 1 and server in plan.streams
                again = whole or said.closure is not None  # else it uses up nothing before all have voted
                futures[server] = self.pushes.push(server, plan, said, payload, group.generation, again)
            if traced is not None:
                traced.sent(futures)
            if grows:
                with self._copied():  # until all of it is on the host, while what is there is sent
                    fill(outgoing.arrays, payloads.values())
            if plan.id not in self._proposed:
                self._stand_in(plan, futures.values())
        except BaseException as error:
            if traced is not None:
                traced.fail(error)
            if not isinstance(error, PSError):
                # A second interrupt: some servers have this contribution, and others wait for it.
                self.session.end(Fenced(TWICE.format(strand.round)))
            raise
        number, line = strand.round if alone else group.round, "" if waits else users_line()
        passed, now = strand.sent(plan.trains), group.generation
        round = UnderWay(number, plan, shares, want, lookups, futures, now, passed, waits, line, alone, traced)
        if self.session.clock is not None:
            group.saved += plan.snapshot is not None
            here = range(len(self.session.servers))
            passes(self.session, [server for server in here if server not in shares.shares], group.round - group.saved)
        self.reads.change(shares.written, round, everything=shares.restores)
        return round

    def _propose(self, plan: Plan, trace: str = "") -> None:
        """Asks for a plan's approval; of one that saves only one process does, whose state it has."""
        if plan.snapshot is not None and not self.group.saves():
            return
        self.session.propose(plan, trace=trace)
        self._proposed.add(plan.id)
        if plan.snapshot is not None and self.group.late:
            _warn_of_state(self.session.task, plan.snapshot)

    def _stand_in(self, plan: Plan, futures: Iterable[Future[RoundReply]]) -> None:
        """Waits until a plan that others have to propose is answered; proposes it should all of them be gone."""
        deadline, timeouts = self.session.deadline(self.session.timeouts.round_timeout), self.session.timeouts
        reminder = Reminder(timeouts.report_interval, lambda: _say_who_saves(self.group, self._awaited, plan))
        while plan.id not in self._proposed and deadline.left() > 0:
            if not wait(futures, timeouts.heartbeat_interval).not_done:
                return
            self.session.check()
            self._propose(plan)
            reminder.look()

    def _prepare(self, plan: Plan) -> PlanShares:
        """Returns a plan prepared for its rounds; keeps it, unless it saves or restores, and so has a single round."""
        found = self._prepared.get(plan.id)
        if found is None:
            found = PlanShares(plan, self._variables)
            if plan.snapshot is None and plan.restore is None:
                self._prepared[plan.id] = found
        return found

    @contextmanager
    def _copied(self) -> Iterator[None]:
        """Ends the session with a device's error."""
        try:
            yield
        except Exception as error:
            # The servers wait for the rest of it, and nobody can send that.
            failure = PSError(
                f"gradients of round {self.group.round} could not be copied from the GPU ({error}); restart",
                str(self.session.task),
            )
            self.session.end(failure)
            raise failure from error

    def _said(
        self,
        outgoing: Outgoing,
        server: int,
        want: tuple[int, ...],
        lookups: Sequence[Lookup],
        hints: tuple[RowRead, ...],
        observes: bool,
        nonfinite: tuple[int, ...],
        timed: bool,
        strand: Numbering,
        trace: str,
    ) -> Contribution:
        """Returns what this process says to a server that it contributes to."""
        generation, round = self.group.generation, strand.round
        previous, strand.pushed[server] = strand.pushed[server], round
        return Contribution(
            self.session.number,
            generation.number if generation else 0,
            round,
            outgoing.plan.id,
            (0.0,) * len(outgoing.weights) if observes else outgoing.weights,
            want=want,
            observes=observes,
            nonfinite=nonfinite,
            previous=previous,
            rows=outgoing.rows if outgoing.plan.rows and not observes else (),
            lookups=tuple([RowRead.of(each.variable, each.ids) for each in lookups]) if lookups else (),
            # The time at which rows were updated, where some live for a time: it goes no further than to their tables.
            seconds=int(time.time()) if timed else 0,
            trace=trace,
            hints=hints,
            **strand.said(observes, outgoing.batch),
        )


def _flush(traces: StepTraces, plan: Plan, group: Group, own: OwnRounds | None) -> Flush | None:
    """Begins the trace of a round; `own` numbers it where this process makes it alone, beside those of all members."""
    round = group.round if own is None else own.round
    return traces.flush(plan.id, round, own is not None or group.alone or group.apart)


def _say_who_saves(group: Group, awaited: Awaited, plan: Plan) -> None:
    names = dict[str, None]()
    for server in plan.servers:
        with suppress(ServerGone):  # nobody waits there
            names |= dict.fromkeys(awaited.names(server))
    log.warning("%s waits in round %d for %s", group.session.task, group.round, ", ".join(names))


def _warn_of_state(task: Task, order: SnapshotOrder) -> None:
    """Says whose state a checkpoint has, where nobody is left who began the job."""
    own = [repr(path) for path in json.loads(order.state or "{}").get("state", {}) if not path.startswith(".")]
    if own:
        log.warning(
            "%s joined a running job and saves checkpoint %r, in which the state of %s is only that of "
            "this process: it was not restored, and the state of the workers that began the job is lost. "
            "Keep state that must survive in variables",
            task,
            order.path,
            ", ".join(own),
        )


def _nbytes(arrays: Iterable[Sent], buffers: Mapping[int, Buffer | None]) -> int:
    """Returns the size of arrays that may change after their call."""
    return sum(array.nbytes for array in arrays if id(array) not in buffers)
