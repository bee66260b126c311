"""The values of variables that this process has read: kept until a round changes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from psclient._src.rounds.awaited import Awaited
from psclient._src.rounds.counters import RoundCounters
from psclient._src.rounds.membership import Group
from psclient._src.rounds.under_way import UnderWay
from psclient._src.transport.session import Session
from pswire.cluster import Task
from pswire.errors import RoundTimeout
from pswire.model.plan import PlacedVariable
from pswire.model.tensor import Array


class ReadCache:
    """Reads variables, and keeps what was read.

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
            return self.pull(variable)
        self.renew()
        with self._lock:
            self._read.add(variable.id)
            self._brought.discard(variable.id)
            value = self._values.get(variable.id)
            if value is None:
                value = self._values[variable.id] = self.pull(variable)
            return value

    def kept(self, id: int) -> Array | None:
        """Returns a variable's value if no round has changed it since it was read; None if `read` must look closer.

        Without the lock: another thread's round changes such a value before or after it is read here.
        """
        value = self._values.get(id) if self._renewed and id not in self._changing else None
        if value is not None:
            self._read.add(id)
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
                self._values.clear()
            return stale

    def pull(self, variable: PlacedVariable) -> Array:
        """Returns a variable's value as its first server has it; keeps nothing."""
        server = variable.servers[0]
        session, limit = self._session, self._session.round_limit
        # The rounds of asynchronous workers are no places in time; a push is answered when it was applied.
        after = -1 if self._group.alone else self._touched[server]
        began = time.monotonic()
        future = session.servers[server].pull(session.number, [variable.id], after)
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
        return frozen(reply.payload.tensors([variable.spec.tensor])[0])

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
            for id in set(self._values) if everything else written & self._values.keys():
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
