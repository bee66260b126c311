"""The values of variables that this process has read: kept until a round changes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from psclient._src.rounds.awaited import Awaited
from psclient._src.rounds.counters import RoundCounters
from psclient._src.rounds.membership import Group
from psclient._src.rounds.under_way import Lookup, UnderWay
from psclient._src.transport.session import Session
from pswire.api import RowRead
from pswire.cluster import Task
from pswire.errors import RoundTimeout
from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable
from pswire.model.rows import Int64s, Rows, row_specs
from pswire.model.tensor import Array, TensorSpec

AHEAD_BYTES = 16 * PART_BYTES
"""Bytes of values that were read with others and that nobody has asked for yet."""


ROWS_AT_A_TIME = 1 << 17
"""Most rows that one call asks for: their ids are part of its header. What a round may not ask for is pulled."""


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
        self._ahead_rows: dict[int, tuple[Lookup, PlacedVariable]] = {}  # what rounds bring, by variable
        self._rows_brought: set[int] = set()
        self._rows: dict[int, Rows] = {}  # rows that came with the last round that assigns the variable
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
        self._rows.clear()

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
                self._rows = {id: rows for id, rows in self._rows.items() if id in self._rows_brought}

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

    def read_rows(self, variable: PlacedVariable, ids: Int64s, waits: bool = True) -> Array:
        """Returns rows of a variable, as of the last round of this process that touched its server; keeps nothing.

        Args:
            variable: the variable to read.
            ids: int64[n], which rows.
            waits: as of `read`.
        """
        # Not `kept`, which counts as a read of the whole: it would come back with each round that changes a row.
        value = self._values.get(variable.id) if self._renewed and variable.id not in self._changing else None
        if value is not None:
            return value[ids]
        changing = self._changing.get(variable.id) if waits else None
        if changing is not None:
            self.take(changing)
        self.renew()
        brought = self._looked_up(variable.id, ids)
        if brought is not None:
            return brought
        whole = variable.spec.tensor
        found = [
            array
            for first in range(0, len(ids) or 1, ROWS_AT_A_TIME)
            for part in [ids[first : first + ROWS_AT_A_TIME]]
            for array in self._pull([], variable, [(RowRead.of(variable.id, part), row_specs(whole, len(part))[1])])
        ]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _looked_up(self, id: int, ids: Int64s) -> Array | None:
        """Returns rows that came with the last round; None if one of them did not."""
        rows = self._rows.get(id)
        if rows is None:
            return None
        if len(rows.ids) == len(ids) and (rows.ids == ids).all():
            return cast(Array, rows.values)
        places = np.searchsorted(rows.ids, ids)
        there = len(ids) == 0 or (places[-1] < len(rows.ids) and bool((rows.ids[places] == ids).all()))
        return rows.values[places] if there else None

    def look_ahead(self, variable: PlacedVariable, ids: Int64s) -> None:
        """Rounds that assign a variable bring these rows of it, until others are named.

        Args:
            variable: the variable.
            ids: int64[n], in increasing order, each once, all of them rows of it.
        """
        self._ahead_rows[variable.id] = Lookup(variable.id, ids, row_specs(variable.spec.tensor, len(ids))[1]), variable

    def lookups(self, written: Iterable[int], server: int) -> tuple[Lookup, ...]:
        """Returns the rows to ask back with a round that assigns variables on a server."""
        if not self._ahead_rows:
            return ()
        named = [self._ahead_rows[id] for id in written if id in self._ahead_rows]
        found, room = list[Lookup](), ROWS_AT_A_TIME
        for lookup, variable in named:
            if variable.servers[0] == server and len(lookup.ids) <= room:
                room -= len(lookup.ids)
                found.append(lookup)
        return tuple(found)

    def pull(self, variables: Sequence[PlacedVariable]) -> list[Array]:
        """Returns the values of variables as their first server has them, which is the same; keeps nothing."""
        return self._pull(variables, variables[0])

    def _pull(
        self,
        variables: Sequence[PlacedVariable],
        variable: PlacedVariable,
        rows: Sequence[tuple[RowRead, TensorSpec]] = (),
    ) -> list[Array]:
        """Pulls variables and rows of a variable's first server; the variable is named where that takes long."""
        server = variable.servers[0]
        session, limit = self._session, self._session.round_limit
        # The rounds of asynchronous workers are no places in time; a push is answered when it was applied.
        after = -1 if self._group.alone else self._touched[server]
        began = time.monotonic()
        future = session.servers[server].pull(
            session.number, [each.id for each in variables], after, [read for read, _ in rows]
        )
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
        specs = [each.spec.tensor for each in variables] + [spec for _, spec in rows]
        return [frozen(array) for array in reply.payload.tensors(specs)]

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
            for id in written & self._rows.keys():
                del self._rows[id]
            if self._changing:
                self._changing = {id: last for id, last in self._changing.items() if last is not round}

    def bring(self, fresh: Mapping[int, Array], servers: Iterable[int], round: int, rows: Mapping[int, Rows]) -> None:
        """Keeps the values, and rows, that a round brought back from the servers that it touched."""
        for server in servers:
            self._touched[server] = round
        with self._lock:
            self._values |= fresh
            self._brought = set(fresh)
            self._rows |= rows
            self._rows_brought = set(rows)


def frozen(array: Array) -> Array:
    """Makes an array read-only and returns it: all its readers share it."""
    array.flags.writeable = False
    return array
