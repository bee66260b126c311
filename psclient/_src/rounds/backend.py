"""The backend of parameter servers: what is reduced and updated is recorded in sections, and sent as rounds."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from psclient._src import context
from psclient._src.arrays.devices import Device, Value
from psclient._src.arrays.nest import Nest
from psclient._src.context import StrategyFace
from psclient._src.distribute.backend import LocalContributions
from psclient._src.distribute.destinations import ServerIds, ValueHome
from psclient._src.distribute.host_buffers import HostBuffers
from psclient._src.distribute.on_read import Copies
from psclient._src.distribute.prepared_step import PreparedStep
from psclient._src.distribute.reduction import LocalValue
from psclient._src.distribute.replicas import RunAgain
from psclient._src.distribute.strands import Marks
from psclient._src.options import Consistency
from psclient._src.rounds.checkpoints import ServerCheckpoints
from psclient._src.rounds.placement import Placement
from psclient._src.rounds.reader import VariableReader
from psclient._src.rounds.rounds import Exchange, Outgoing
from psclient._src.rounds.section import ReducedValue, Section, ServerValue
from psclient._src.rounds.variables import ServerVariables
from psclient._src.tracing.symbolic_numbers import Number
from psclient._src.variables.kinds import ServerVariable
from psclient._src.variables.partitioners import PartitionFn
from psclient._src.variables.tables import PartOfTable, TableVariable, refuse_whole
from psclient._src.variables.variable import Variable
from pswire.cluster import Task
from pswire.model.plan import Nonfinite, Plan, Ref
from pswire.model.plan import PlacedVariable as Handle
from pswire.model.rows import Rows
from pswire.model.tensor import Array

log = logging.getLogger("psclient")

LOOK_SECONDS = 0.1
"""Seconds between two looks at whether the thread that records a section has ended."""

T = TypeVar("T")


class RemoteBackend:
    """Variables on parameter servers.

    One section is open at a time, and one thread records it. All threads may read variables.

    Args:
        exchange: the rounds of this process.
        placement: chooses the servers of new variables.
        nonfinite: what becomes of updates if a contribution has NaN or infinity.
        partitioner: says into how many shards a variable is cut; None for one.

    Attributes:
        between_graph: True: every worker runs the script.
        exchange: the rounds of this process.
        group: the processes that train together.
        reader: reads variables.
        variables: creates variables.
        create: see `Backend.create`.
        check_process: raises `PSError` in a fork of the process that opened the strategy.
        parts: the ON_READ variables of asynchronous workers.
        checkpoints: those that this process saves and restores.
    """

    between_graph = True

    def __init__(
        self,
        exchange: Exchange,
        placement: Placement,
        nonfinite: Nonfinite = "apply",
        partitioner: PartitionFn | None = None,
    ) -> None:
        self.exchange = self._exchange = exchange
        self.group, self._creation, self._with_copies = exchange.group, exchange.creation, placement.with_copies
        self.check_process = exchange.session.owner.check
        self._closed = False
        self._task = exchange.session.task
        self.parameter_devices = exchange.session.devices
        self.worker_devices = tuple(map(self.full_name, exchange.group.devices))
        self._reads = exchange.reads
        self.reader = VariableReader(exchange, self._end_written)
        self.parts = Copies(self.group, self._record_own, lambda: exchange.mine, self._read_now)
        self.variables = ServerVariables(exchange, placement, self.reader, self.parts, self.check_open, partitioner)
        self.create = self.variables.create
        self.checkpoints = ServerCheckpoints(exchange, self._order_snapshot, self.variables.residuals)
        self.group.departure.hand_over = self._order_snapshot
        exchange.session.nonfinite = nonfinite
        self._host_buffers = HostBuffers()
        self._lock = threading.RLock()  # guards that one section is open, and no other is opened beside it
        self._ended, self._awaited = threading.Condition(self._lock), False  # the latter where a thread may wait
        self._section: Section | None = None
        self._together = False  # while updates are recorded that are of one round; of the thread that records

    @property
    def nonfinite(self) -> Nonfinite:
        """The policy for updates to which a contribution has NaN or infinity: that of the job, which may change."""
        return self._exchange.session.nonfinite

    def check_open(self) -> None:
        """Raises `RuntimeError` once the strategy is closed, and `PSError` in a fork of the process."""
        self.check_process()
        if self._closed:
            raise RuntimeError("this strategy is closed; use its servers before close(), or create another strategy")

    def is_apart(self, consistency: Consistency, name: str) -> bool:
        """Returns whether a variable with a consistency is updated by each worker alone; see `Backend.is_apart`."""
        return self.variables.consistencies(consistency, name)

    def full_name(self, device: Device) -> str:
        """Returns the device's name, `/job:worker/task:1/device:GPU:0`."""
        return device.full_name(self._task)

    def _end_written(self, handles: Sequence[Handle]) -> None:
        """Sends what was created, and the calling thread's open section if that assigns one of some variables."""
        self.check_open()
        self._creation.send()
        section = self._mine()
        if section is not None and any(section.writes(handle.id) for handle in handles):
            self.flush()

    def buffer(self, variable: Variable, replica: int) -> Array:
        """Returns the array in which a replica computes its next contribution to a variable: see `Buffers`."""
        if isinstance(variable, TableVariable):
            refuse_whole(variable.name)
        devices = self.group.devices
        if len(devices) > 1 or not isinstance(variable, ServerVariable):
            return self._host_buffers.give(variable, replica, devices[replica])
        self.check_open()
        return self._exchange.buffers.give(variable.handle, devices[0])

    # ---- Sections ----

    def reduce(self, contributions: Sequence[tuple[LocalValue, ValueHome | None]]) -> list[Value]:
        """Records reductions; their values are lazy.

        Where one comes here, outside of a merge call, they are sent at once, whoever looks at the value.
        """
        section = self.section_here
        comes_here = any(to is None for _, to in contributions)
        if not (comes_here or context.in_merge_call()):
            # The section stays open after this call, and what is reduced may be the caller's buffer.
            hand_in = self._exchange.buffers.hand_in
            contributions = [(local if hand_in(local.total) else local.kept(), to) for local, to in contributions]
        reduced = [_reduced(section, local, to, self._with_copies) for local, to in contributions]
        if comes_here:
            section.give_back(reduced)
            if not context.in_merge_call():
                self._send(section)
        return reduced

    def apply(
        self,
        strategy: StrategyFace,
        place: ServerIds,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> list[Nest]:
        """Traces the function and records its application.

        Outside of a merge call it is sent at once, unless reductions are there that later updates may take.
        """
        section = self.section_here
        result = section.apply(self._with_copies(place), fn, args, kwargs)
        self._send_alone(section)
        return [result]

    def trim(self, parts: Sequence[PartOfTable], rows: int) -> None:
        """Records that a table, of which these are the parts, is cut to a number of rows; it is sent as by `apply`."""
        section = self.section_here
        for part in parts:
            section.trim(part.handle, rows)
        self._send_alone(section)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Updates within are of one round, as in a merge call: all of them are made, or none where one fails."""
        section = self.section_here
        before, updates, self._together = self._together, section.updates, True
        try:
            yield
        except BaseException:
            if section.updates > updates:
                self.drop()
            raise
        finally:
            self._together = before
        self._send_alone(section)

    def _send_alone(self, section: Section) -> None:
        """Sends a section outside of a merge call, unless reductions are there that later updates may take."""
        if not (context.in_merge_call() or self._together or section.reduces or section.flushed):
            self._send(section)

    def bring(self, values: Sequence[object]) -> list[Array]:
        """Brings values here, arrays or located ones of one section, in one round; that ends the section."""
        for section in {value.section for value in values if isinstance(value, ServerValue)}:
            section.give_back(values)
        return [np.asarray(value) for value in values]

    def section(self, call: Callable[[], T]) -> T:
        """Runs what `merge_call` was given: a section of its own, sent when it returns."""
        try:
            result = call()
        except BaseException:
            self.drop()
            raise
        self.flush(returned=result)
        return result

    def repeat(
        self,
        prepared: PreparedStep,
        key: object,
        numbers: list[Number],
        local: LocalContributions,
        record: Callable[[], list[Value]],
        extras: int = 0,
    ) -> list[Value]:
        """Makes a prepared step in the calling thread's section, or records it there: see `Backend.repeat`."""
        prepared.numbers = numbers
        template = prepared.find(key)
        if template is not None:
            reductions, section = template.plan.reductions, self.section_here
            found = local(reductions)
            if found is not None and section.repeat(template, numbers, found):
                first = enumerate(reductions[:extras])
                return [ReducedValue(section, Ref("reduction", number), each.tensor, None) for number, each in first]
        values, recorded = record(), self._mine()
        prepared.keep(key, None if recorded is None else recorded.complete(numbers))
        return values

    def skip_nonfinite(self) -> None:
        """Records that nothing of the calling thread's section is applied if a contribution has NaN or infinity."""
        self.section_here.skip_nonfinite()

    @property
    def section_here(self) -> Section:
        """The section that the calling thread records; a new one if it records none.

        Waits while another thread records one, as long as for a call.

        Raises:
            RuntimeError: another thread records one all that time, or the strategy is closed.
        """
        self.check_open()
        until = time.monotonic() + self._exchange.session.timeouts.call_timeout
        with self._lock:
            while (section := self._section) is not None and not section.mine:
                if not section.alive:
                    log.warning("a thread ended inside a scope; the operations it recorded there are lost")
                    self._section = None
                elif time.monotonic() > until:
                    section.check_thread()
                else:
                    self._awaited = True
                    self._ended.wait(LOOK_SECONDS)  # the end of a thread tells nobody
            if section is None:
                self._reads.idle = False
                marks = Marks() if self._creation.any_alone and not self.group.alone else None
                how = self._exchange.session.nonfinite, self._with_copies, marks, self.group.batch
                section = self._section = Section(len(self.parameter_devices), self._send, *how)
            return section

    def _mine(self) -> Section | None:
        """Returns the section that the calling thread records; None if it records none."""
        section = self._section
        return section if section is not None and section.mine else None

    def settle(self) -> None:
        """Ends the calling thread's open section, and takes in the answers to all rounds."""
        self.flush()
        self._exchange.settle()

    def flush(self, returned: object = None) -> None:
        """Ends the calling thread's open section, if there is one: sends what it recorded.

        Sends the variables that were created before.

        Args:
            returned: a nest; located values in it are wanted after the end.
        """
        section = self._section
        if section is not None and section.mine:
            if returned is not None:
                section.give_back(returned)
            self._send(section)
        elif self._creation.waits and not self._closed:
            self._creation.send()

    def run(self, replicas: Callable[[], T]) -> T:
        """Runs replicas, behind what was begun; asynchronous ones read anew.

        Where this process takes part only from a section of this run on, and what they read until then is out of date,
        they run again, in the same round: what they wrote into their copies of variables is readmitted. Within a
        merge call it is the outer run that runs again.
        """
        traces, group = self._exchange.traces, self.group
        if context.in_merge_call():
            return self._run(replicas, inner=True)
        if traces is None:
            return self._run(replicas)
        with traces.step(group.round, group.alone or group.apart):
            return self._run(replicas)

    def _run(self, replicas: Callable[[], T], inner: bool = False) -> T:
        section = self._mine()
        if section is not None:
            section.give_back_unused()  # The merge function may look at what it began.
        elif not inner:
            self._reads._begin_step()
        if not inner:
            self._exchange.begin_run()
        self.flush()
        takes_part = self.group.generation is not None or self.variables.before is not None
        result = replicas() if takes_part else self._run_first(replicas)
        if self.group.alone and not (inner or self.group.apart):
            self.parts.hand_in(ends=False)
        return result

    def _run_first(self, replicas: Callable[[], T]) -> T:
        """Runs replicas; again if what they have computed with was out of date."""
        try:
            with self.variables.kept_for_again():
                return replicas()
        except RunAgain:
            log.info("%s was added to the job in its first step, which runs again with the current values", self._task)
        return replicas()

    def _order_snapshot(self, path: str, state: str = "", returns: int = 0) -> bytes:
        """Ends the open section with a checkpoint; servers are writing it when this returns its plan's id.

        With the number of a generation it is of what a server held that comes back by it, as the servers have it.
        """
        if not returns:
            self._save_copies()
            self.variables.residuals.save(lambda local, to: self.reduce([(local, to)])[0])
        if self.section_here.marks:
            self.flush()  # what this worker makes alone is no part of it, and comes before
        self._exchange.settle()  # It is of the values that all rounds before it have left.
        section = self.section_here
        section.order_snapshot(path, self.group.round, state, returns)
        return self._send(section).id

    def _save_copies(self) -> None:
        """Records that servers keep the aggregates of now, which a checkpoint is to have."""
        if self.group.alone:
            self.parts.hand_in()
        else:
            self.parts.leave_in_round()

    def _record_own(self, strategy: StrategyFace, record: Callable[[], object]) -> None:
        """Sends updates in a round of this process alone: outside of a closure one beside those of all."""
        self.flush()
        with strategy.scope(), context.enter_cross_replica(strategy):
            section = self.section_here
            section.own = not self.group.apart
            try:
                record()
                self._send(section)
            except BaseException:
                self.drop()
                raise

    def _read_now(self, handles: Sequence[Handle]) -> list[Array]:
        self._creation.send()
        return self._reads.read_all(handles, now=True, waits=self._exchange.mine)

    def drop(self) -> None:
        """Forgets the calling thread's open section: what recorded it failed."""
        # The others wait in this section's round. If this process goes on, its next section is in that.
        if self._mine() is not None:
            self._end_section()

    # ---- The end ----

    def close(self) -> None:
        """Closes the backend: nothing can be read, created or recorded any more."""
        self._closed = True
        self._end_section()

    def _send(self, section: Section) -> Plan:
        if section is not self._section:
            self.check_open()
            raise RuntimeError("this value was not computed, because an error ended the step that recorded it")
        if not context.in_merge_call():
            section.give_back_unused()
        try:
            self._creation.send()
            outgoing = section.outgoing()
            section.sent(self._make_rounds(outgoing, section) if outgoing.plan.servers else dict)
        finally:
            # Only now: a section of another thread would be a second round at the same time.
            self._end_section()
        return outgoing.plan

    def _end_section(self) -> None:
        with self._lock:
            self._section, self._reads.idle = None, not self._closed
            if self._awaited:
                self._awaited = False
                self._ended.notify_all()

    def _make_rounds(self, outgoing: Outgoing, section: Section) -> Callable[[], Mapping[Ref, Array | Rows]]:
        outdated = self._exchange.enter(outgoing.plan)
        if section.own:
            self._exchange.send(outgoing, alone=True)
            return dict
        if outdated and self.variables.before is not None:
            raise RunAgain
        if outdated and any(outgoing.weights):
            _warn_of_loss(self._task, outgoing.plan, self.group.round)
        return self._exchange.make(outgoing, section.marks, observes=outdated)


def _reduced(
    section: Section, local: LocalValue, to: ValueHome | None, with_copies: Callable[[ServerIds], ServerIds]
) -> ServerValue:
    if to is None:
        return section.reduce(local, None)
    return section.reduce(local, with_copies(to.place), to.label, to.feedback, to.alone)


def _warn_of_loss(task: Task, plan: Plan, round: int) -> None:
    names = ", ".join(sorted({reduction.target or f"a {reduction.op}" for reduction in plan.reductions}))
    log.warning(
        "%s joined a running job; its gradient push for %s in round %d was computed with old values and is "
        "excluded. It cannot be recomputed, because it was not made in strategy.run: make the first "
        "reduction in strategy.run, or iterate over a dataset of the strategy",
        task,
        names,
        round,
    )
