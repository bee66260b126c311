"""The values of variables that this process has read: kept until a round changes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from psclient._src.rounds.awaited import Awaited
from psclient._src.rounds.counters import RoundCounters
from psclient._src.rounds.membership import Group
from psclient._src.rounds.under_way import UnderWay
from psclient._src.transport.session import Session
from pswire.cluster import Task
from pswire.errors import RoundTimeout
from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable
from pswire.model.tensor import Array

AHEAD_BYTES = 16 * PART_BYTES
"""Bytes of values that were read with others and that nobody has asked for yet."""


class ReadCache:
    """Reads variables, and keeps what was read.

    A variable that was created and never read comes with the next one that is pulled from its server, as long as what
    came so and was not asked for is little: who comes back to many variables needs one call for all of them.

    Reads may come from the threads of several replicas; what a round does comes from the thread that runs
    cross-replica code, while the replicas wait.

    Args:
        session: this process's session, open.
        group: this process's place among the members.
        awaited: names the processes that a server waits for.
        measures: counts the seconds of reads.

    Attributes:
        take: waits for a round that is under way, and for all before it, and takes their values.
    """

    def __init__(self, session: Session, group: Group, awaited: Awaited, measures: RoundCounters) -> None:
        self._session = session
        self._group = group
        self._awaited = awaited
        self._measures = measures
        self._touched = [-1] * len(session.servers)
        # The lock guards what was read: replicas read in threads of their own.
        self._lock = threading.Lock()
        self._values: dict[int, Array] = {}
        self._seen: dict[int, int] = {}  # of each server the oldest round that values read before taking part have seen
        self._brought: set[int] = set()
        self._renewed = False
        self._read: set[int] = set()
        self._changing: dict[int, UnderWay] = {}  # variables with the last round under way that assigns them
        self.take: Callable[[UnderWay], object] = lambda round: None
        self._known: dict[int, PlacedVariable] = {}
        # Of each server those that come with the next that is pulled.
        self._ahead: list[dict[int, PlacedVariable]] = [{} for _ in session.servers]
        self._unasked: dict[int, int] = {}  # bytes of values that came so and that nobody has asked for

    def read(self, variable: PlacedVariable, now: bool = False, waits: bool = True) -> Array:
        """Returns a variable's value, read-only, as of the last round of this process that touched its server.

        What was read is kept until a round changes it. Where workers are asynchronous it is kept for one step, so
        that a step computes with one value.

        Args:
            variable: the variable to read.
            now: True to ask the server where workers are asynchronous, whatever is kept.
            waits: True to wait for a round under way that assigns it; else the value of before is returned.
        """
        changing = self._changing.get(variable.id) if waits else None
        if changing is not None:
            self.take(changing)
        if now and self._group.alone:
            return self.pull([variable])[0]
        self.renew()
        with self._lock:
            self._read.add(variable.id)
            self._brought.discard(variable.id)
            self._unasked.pop(variable.id, None)
            if variable.id not in self._values:
                wanted = [variable, *self._take_ahead(variable)]
                self._values |= zip([v.id for v in wanted], self.pull(wanted), strict=True)
            return self._values[variable.id]

    def created(self, variables: Iterable[PlacedVariable]) -> None:
        """Takes variables that this process has created, and that have a value."""
        with self._lock:
            for variable in variables:
                if variable.spec.tensor.nbytes <= PART_BYTES:
                    self._known[variable.id] = self._ahead[variable.servers[0]][variable.id] = variable

    def _take_ahead(self, variable: PlacedVariable) -> list[PlacedVariable]:
        """Returns the variables that come with one that is pulled."""
        ahead, room = self._ahead[variable.servers[0]], AHEAD_BYTES - sum(self._unasked.values())
        ahead.pop(variable.id, None)
        taken: list[PlacedVariable] = []
        for other in ahead.values():
            room -= other.spec.tensor.nbytes
            if room < 0:
                break
            taken.append(other)
        for other in taken:
            del ahead[other.id]
            self._unasked[other.id] = other.spec.tensor.nbytes
        return [other for other in taken if other.id not in self._values]

    def _forget_all(self) -> None:
        """Forgets all values; those that were read come again with the next that is pulled."""
        for id in self._values.keys() & self._known.keys():
            self._ahead[self._known[id].servers[0]][id] = self._known[id]
        self._values.clear()

    def kept(self, id: int) -> Array | None:
        """Returns a variable's value if no round has changed it since it was read; None if `read` must look closer.

        Without the lock: another thread's round changes such a value before or after it is read here.
        """
        value = self._values.get(id) if self._renewed and id not in self._changing else None
        if value is not None:
            self._read.add(id)
            self._unasked.pop(id, None)
        return value

    def begin_step(self) -> None:
        """Begins a step: where workers are asynchronous only what the last round brought is still up to date."""
        if self._group.alone:
            with self._lock:
                self._values = {id: value for id, value in self._values.items() if id in self._brought}

    def renew(self) -> bool:
        """Forgets values read before this process was taken in, if rounds were made since; returns True if any were.

        To an asynchronous worker it is all the same who made rounds in the meantime.
        """
        with self._lock:
            if self._renewed or self._group.epoch is None or self._group.alone:
                return False
            self._renewed = True
            stale = any(self._session.servers[s].status().round != round for s, round in self._seen.items())
            if stale:
                self._forget_all()
            return stale

    def pull(self, variables: Sequence[PlacedVariable]) -> list[Array]:
        """Returns the values of variables as their first server has them, which is the same; keeps nothing."""
        variable, server = variables[0], variables[0].servers[0]
        session, limit = self._session, self._session.round_limit
        # The rounds of asynchronous workers are no places in time; a push is answered when it was applied.
        after = -1 if self._group.alone else self._touched[server]
        began = time.monotonic()
        future = session.servers[server].pull(session.number, [each.id for each in variables], after)
        name = repr(variable.spec.name)
        reply = session.wait(
            future,
            session.deadline(limit),
            lambda: RoundTimeout(
                f"reading {name} of {Task('ps', server)}{self._awaited.held_up(server)} took longer than {limit:g} s"
            ),
            lambda: f"waits for variable {name} of {Task('ps', server)}{self._awaited.held_up(server)}",
            lambda: False,
        )
        self._measures.read(time.monotonic() - began)
        if not self._renewed:
            self._seen[server] = min(reply.round, self._seen.get(server, reply.round))
        return [frozen(array) for array in reply.payload.tensors([each.spec.tensor for each in variables])]

    # ---- What rounds do to it ----

    def change(self, written: frozenset[int], round: UnderWay, everything: bool) -> None:
        """A round was sent that assigns variables; with `everything` all of them."""
        with self._lock:
            changed = {*written, *self._values} if everything else written
            self._read -= changed
            self._changing.update(dict.fromkeys(changed, round))

    def wanted(self, written: Iterable[int]) -> list[int]:
        """Returns the variables that a round assigns and that were read since their last assignment."""
        with self._lock:
            return [id for id in written if id in self._read]

    def forget(self, written: frozenset[int], round: UnderWay, everything: bool) -> None:
        """Forgets values of variables that a round has assigned, which is over; with `everything` all values."""
        with self._lock:
            if everything:
                self._forget_all()
            for id in written & self._values.keys():
                del self._values[id]
            if self._changing:
                self._changing = {id: last for id, last in self._changing.items() if last is not round}

    def bring(self, fresh: Mapping[int, Array], servers: Iterable[int], round: int) -> None:
        """Keeps the values that a round brought back from the servers that it touched."""
        for server in servers:
            self._touched[server] = round
        with self._lock:
            self._values |= fresh
            self._brought = set(fresh)


def frozen(array: Array) -> Array:
    """Makes an array read-only and returns it: all its readers share it."""
    array.flags.writeable = False
    return array
