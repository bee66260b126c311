"""The values of variables that this process has read: kept until a round changes them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from psclient._src.interpreter.lifetimes import weakly
from psclient._src.network.session import Session
from psclient._src.rounds.awaited import Awaited
from psclient._src.rounds.buffers import Targets
from psclient._src.rounds.counters import RoundCounters
from psclient._src.rounds.membership import Group
from psclient._src.rounds.prepared import WantedVariables
from psclient._src.rounds.under_way import Lookup, UnderWay
from pswire.api import PullReply, RowRead, TableRead
from pswire.cluster import Task
from pswire.errors import RoundTimeout, ServerGone
from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable
from pswire.model.rows import Int64s, Rows, row_specs
from pswire.model.tensor import Array, TensorSpec

AHEAD_BYTES = 16 * PART_BYTES
"""Bytes of values that were read with others and that nobody has asked for yet."""


ROWS_AT_A_TIME = 1 << 17
"""Most rows that one call asks for: their ids are part of its header. What a round may not ask for is pulled."""


@dataclass(frozen=True)
class _Ask:
    """What one server is asked for.

    Attributes:
        named: a variable of the server, which is named where the answer takes long.
        variables: those of which the value is wanted.
        rows: rows that are wanted of one, with their spec.
        table: a question to a part of a dynamic table.
    """

    named: PlacedVariable
    variables: Sequence[PlacedVariable] = ()
    rows: tuple[RowRead, TensorSpec] | None = None
    table: TableRead | None = None

    @classmethod
    def of_rows(cls, variable: PlacedVariable, ids: Int64s) -> _Ask:
        """Returns what asks for rows of a variable."""
        return cls(variable, rows=(RowRead.of(variable.id, ids), row_specs(variable.spec.tensor, len(ids))[1]))

    def specs(self, reply: PullReply) -> list[TensorSpec]:
        """Returns what the answer has."""
        found = [each.spec.tensor for each in self.variables]
        if self.rows is not None:
            found.append(self.rows[1])
        if self.table is not None and self.table.what != "size":
            keys, rows = row_specs(self.named.spec.tensor, reply.rows[0])
            found += [keys] if self.table.what == "keys" else [keys, rows]
        return found


T = TypeVar("T")


class _Pulls:
    """Asks servers for values. May be used by any thread.

    Args:
        session, group, awaited, measures: as of `ReadCache`.
        looked: told of each answer: which server, and the round that its values have seen.

    Attributes:
        touched: for each server the last round of this process that touched it.
    """

    def __init__(
        self,
        session: Session,
        group: Group,
        awaited: Awaited,
        measures: RoundCounters,
        looked: Callable[[int, int], object],
    ) -> None:
        self.touched = [-1] * len(session.servers)
        self._session = session
        self._group = group
        self._awaited = awaited
        self._measures = measures
        self._looked = looked

    def values(self, variables: Sequence[PlacedVariable]) -> list[Array]:
        """Returns the values of variables of one server."""
        return self.ask([_Ask(variables[0], variables)])[0]

    def values_by_server(self, variables: Sequence[PlacedVariable]) -> list[Array]:
        """Returns the values of variables of several servers, as `values` does of one."""
        by_server: dict[int, list[PlacedVariable]] = {}
        for variable in variables:
            by_server.setdefault(self._home(variable), []).append(variable)
        found: dict[int, Array] = {}
        asked = list(by_server.values())
        for some, arrays in zip(asked, self.ask([_Ask(some[0], some) for some in asked]), strict=True):
            found |= zip([variable.id for variable in some], arrays, strict=True)
        return [found[variable.id] for variable in variables]

    def ask(self, asked: Sequence[_Ask]) -> list[list[Array]]:
        """Asks servers, all at once; returns of each the values of variables, or rows of one."""
        answers = zip(asked, self._answers(asked), strict=True)
        return [reply.payload.tensors(ask.specs(reply), shared=True) for ask, reply in answers]

    def tables(self, asked: Sequence[tuple[PlacedVariable, TableRead]]) -> list[tuple[int, list[Array]]]:
        """Asks parts of dynamic tables: see `ReadCache.ask_tables`."""
        asks = [_Ask(part, table=question) for part, question in asked]
        answers = zip(asks, self._answers(asks), strict=True)
        return [(reply.rows[0], reply.payload.tensors(ask.specs(reply))) for ask, reply in answers]

    def _home(self, variable: PlacedVariable) -> int:
        """Returns the server that is asked for a variable."""
        return self._session.hosting.home(variable.servers)

    def _answers(self, asked: Sequence[_Ask]) -> list[PullReply]:
        began = time.monotonic()
        while True:
            try:
                found = self._answers_of(asked)
                break
            except ServerGone:  # all once more, of those that are left: what was asked of one lay on others as well
                self._session.check()
        self._measures.read(time.monotonic() - began)
        return found

    def _answers_of(self, asked: Sequence[_Ask]) -> list[PullReply]:
        session, limit = self._session, self._session.round_limit
        homes = [self._home(ask.named) for ask in asked]
        futures = [
            session.servers[server].pull(
                session.number,
                [each.id for each in ask.variables],
                # The rounds of asynchronous workers are no places in time; a push is answered when it was applied.
                -1 if self._group.alone else self.touched[server],
                [] if ask.rows is None else [ask.rows[0]],
                *([] if ask.table is None else [[ask.table]]),
            )
            for server, ask in zip(homes, asked, strict=True)
        ]
        return [self._answer(*one, limit) for one in zip(homes, asked, futures, strict=True)]

    def _answer(self, server: int, ask: _Ask, future: Future[PullReply], limit: float) -> PullReply:
        session, name = self._session, repr(ask.named.spec.name)
        reply = session.wait(
            future,
            session.deadline(limit),
            lambda: RoundTimeout(
                f"reading {name} of {Task('ps', server)}{self._awaited.held_up(server)} took longer than {limit:g} s"
            ),
            lambda: f"waits for variable {name} of {Task('ps', server)}{self._awaited.held_up(server)}",
            lambda: False,
        )
        self._looked(server, reply.round)
        return reply


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
        targets: the arrays into which rounds write values.
        idle: False while a section is open that may assign what is read, and once the strategy is closed.
    """

    idle = True

    def __init__(self, session: Session, group: Group, awaited: Awaited, measures: RoundCounters) -> None:
        self._session = session
        self._group = group
        self._pulls = _Pulls(session, group, awaited, measures, self._looked)
        # The lock guards what was read: replicas read in threads of their own.
        self._lock = threading.Lock()
        self._values: dict[int, Array] = {}
        os.register_at_fork(after_in_child=weakly(self._forget_in_fork))
        self._seen: dict[int, int] = {}  # of each server the oldest round that values read before taking part have seen
        self._brought: set[int] = set()
        self._seen_as = session.change  # the consistency of then
        self._renewed = False
        self._read: set[int] = set()
        self._changing: dict[int, UnderWay] = {}  # variables with the last round under way that assigns them
        self.take: Callable[[UnderWay], object] = lambda round: None
        self._known: dict[int, PlacedVariable] = {}
        self._alone: set[int] = set()  # variables that each worker updates alone
        # Of each server those that come with the next that is pulled.
        self._ahead: list[dict[int, PlacedVariable]] = [{} for _ in session.servers]
        # What rounds bring, by variable: increasing ids, in pieces that are joined where a round asks for them.
        self._ahead_rows: dict[int, tuple[PlacedVariable, Sequence[Int64s]]] = {}
        # What the next round that assigns a variable hints at, as above.
        self._hinted: dict[int, tuple[PlacedVariable, Sequence[Int64s]]] = {}
        self._rows_brought: set[int] = set()
        self._rows: dict[int, Rows] = {}  # rows that came with the last round that assigns the variable
        self._unasked: dict[int, int] = {}  # bytes of values that came so and that nobody has asked for
        self.targets = Targets()

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
        if now and (self._group.alone or variable.spec.alone):
            return self.pull([variable])[0]
        if not self._renewed:
            self.renew()
        with self._lock:
            self._read.add(variable.id)
            self._brought.discard(variable.id)
            self._unasked.pop(variable.id, None)
            if variable.id not in self._values:
                wanted = [variable, *self._take_ahead(variable)]
                self._values |= zip([v.id for v in wanted], self.pull(wanted), strict=True)
            return self._values[variable.id]

    def read_all(self, variables: Sequence[PlacedVariable], now: bool = False, waits: bool = True) -> list[Array]:
        """Returns the values of variables of several servers, which are asked together; else as `read`."""
        changing = [round for v in variables if waits and (round := self._changing.get(v.id)) is not None]
        for round in dict.fromkeys(changing):
            self.take(round)
        if now and (self._group.alone or any(variable.spec.alone for variable in variables)):
            return self._pulls.values_by_server(variables)
        self.renew()
        with self._lock:
            ids = [variable.id for variable in variables]
            self._read.update(ids)
            self._brought.difference_update(ids)
            missing = [variable for variable in variables if variable.id not in self._values]
            for variable in variables:
                self._unasked.pop(variable.id, None)
                self._ahead[self._home(variable)].pop(variable.id, None)
            self._values |= zip([v.id for v in missing], self._pulls.values_by_server(missing), strict=True)
            return [self._values[id] for id in ids]

    def created(self, variables: Iterable[PlacedVariable]) -> None:
        """Takes variables that this process has created, and that have a value."""
        with self._lock:
            for variable in variables:
                if variable.spec.alone:
                    self._alone.add(variable.id)
                if variable.spec.part is None and variable.spec.tensor.nbytes <= PART_BYTES:
                    self._known[variable.id] = self._ahead[self._home(variable)][variable.id] = variable

    def refresh(self) -> None:
        """Writes values of now into the targets that have others, if any: see `Targets`."""
        self.renew()
        with self._lock:
            outdated = self.targets.outdated
        if outdated:
            values = self.read_all(outdated)
            with self._lock:
                self.targets.write(outdated, values)
                for variable in outdated:
                    self._values.pop(variable.id, None)

    def fetch_targets(self, ids: Set[int]) -> None:
        """Fetches what a round has not brought into targets, since the server that was asked is gone."""
        with self._lock:
            missing = [variable for variable in self.targets.among(ids) if variable.id not in self._changing]
        if missing:
            values = self._pulls.values_by_server(missing)
            with self._lock:
                self.targets.write(missing, values)

    def _take_ahead(self, variable: PlacedVariable) -> list[PlacedVariable]:
        """Returns the variables that come with one that is pulled."""
        ahead, room = self._ahead[self._home(variable)], AHEAD_BYTES - sum(self._unasked.values())
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
            self._ahead[self._home(self._known[id])][id] = self._known[id]
        self._values.clear()
        self._rows.clear()
        self.targets.outdate()

    def kept(self, variable: PlacedVariable) -> Array | None:
        """Returns a variable's value if no round has changed it since it was read; None if `read` must look closer.

        Without the lock: another thread's round changes such a value before or after it is read here.
        """
        id = variable.id
        here = self.idle and self._renewed and id not in self._changing and not variable.spec.alone
        value = self._values.get(id) if here else None
        if value is not None:
            self._read.add(id)
            self._unasked.pop(id, None)
        return value

    def known(self, ids: Iterable[int]) -> dict[int, Array]:
        """Returns what `kept` has of some variables; rounds do not bring them by this. Without the lock, as `kept`."""
        if not self._renewed:
            return {}
        found = ((id, self._values.get(id)) for id in ids if id not in self._changing)
        return {id: value for id, value in found if value is not None}

    def _forget_in_fork(self) -> None:
        """Forgets all values in a fork of the process, where no round would ever change them. Takes no lock."""
        self._values = {}

    def begin_anew(self) -> None:
        """Forgets all values, where all rounds so far were applied for everybody: a change has begun."""
        with self._lock:
            self._pulls.touched = [-1] * len(self._pulls.touched)
            self._renewed = True
            self._forget_all()

    def _begin_step(self) -> None:
        """Begins a step: of what each worker updates alone only what its last round brought is still up to date."""
        if self._group.alone or self._alone:
            own = None if self._group.alone else self._alone
            with self._lock:
                self._values = _fresh(self._values, self._brought, own)
                self._rows = _fresh(self._rows, self._rows_brought, own)

    def renew(self) -> bool:
        """Forgets values read before this process was taken in, if rounds were made since; returns True if any were.

        To an asynchronous worker it is all the same who made rounds in the meantime.
        """
        with self._lock:
            if self._renewed or self._group.generation is None or self._group.alone:
                return False
            self._renewed = True
            stale = any(self._has_moved_on(*seen) for seen in self._seen.items())
            stale |= bool(self._seen) and self._seen_as is not self._session.change  # whose rounds count otherwise
            if stale:
                self._forget_all()
            return stale

    def _has_moved_on(self, server: int, round: int) -> bool:
        """Returns whether rounds were made since a server was read, or may have been: it is gone since then."""
        try:
            return self._session.servers[server].status().round != round
        except ServerGone:
            return True

    def read_rows(self, variable: PlacedVariable, ids: Int64s, waits: bool = True) -> Array:
        """Returns rows of a variable, as of the last round of this process that touched its server; keeps nothing.

        Args:
            variable: the variable to read.
            ids: int64[n], which rows.
            waits: as of `read`.
        """
        return self.read_rows_of_all([(variable, ids)], waits)[0]

    def read_rows_of_all(self, wanted: Sequence[tuple[PlacedVariable, Int64s]], waits: bool = True) -> list[Array]:
        """Returns rows of each of some variables, whose servers are asked together; else as `read_rows`."""
        found = [[rows] if (rows := self._rows_here(*one, waits)) is not None else [] for one in wanted]
        missing = [(parts, *one) for parts, one in zip(found, wanted, strict=True) if not parts]
        for first in range(0, max((len(ids) or 1 for _, _, ids in missing), default=0), ROWS_AT_A_TIME):
            asked = [
                (parts, _Ask.of_rows(variable, ids[first : first + ROWS_AT_A_TIME]))
                for parts, variable, ids in missing
                if first < (len(ids) or 1)
            ]
            for (parts, _), more in zip(asked, self._pulls.ask([ask for _, ask in asked]), strict=True):
                parts += more
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in found]

    def _rows_here(self, variable: PlacedVariable, ids: Int64s, waits: bool) -> Array | None:
        """Returns rows of a variable, if they are here already."""
        # Not `kept`, which counts as a read of the whole: it would come back with each round that changes a row.
        here = self._renewed and variable.id not in self._changing and not variable.spec.alone
        value = self._values.get(variable.id) if here else None
        if value is not None:
            return value[ids]
        changing = self._changing.get(variable.id) if waits else None
        if changing is not None:
            self.take(changing)
        self.renew()
        return self._looked_up(variable.id, ids)

    def _looked_up(self, id: int, ids: Int64s) -> Array | None:
        """Returns rows that came with the last round; None if one of them did not."""
        rows = self._rows.get(id)
        if rows is None:
            return None
        first = int(np.searchsorted(rows.ids, ids[0])) if len(ids) else 0
        behind = slice(first, first + len(ids))
        if np.array_equal(rows.ids[behind], ids):
            return cast(Array, rows.values[behind])
        places = np.searchsorted(rows.ids, ids)
        there = places[-1] < len(rows.ids) and bool((rows.ids[places] == ids).all())
        return rows.values[places] if there else None

    def prefetch(self, variable: PlacedVariable, *ids: Int64s) -> None:
        """Rounds that assign a variable bring these rows of it, until others are named.

        Args:
            variable: the variable.
            ids: int64[n] each; one behind another in increasing order, each once, all of them rows of it.
        """
        self._ahead_rows[variable.id] = variable, ids

    def rows_beside(self, written: Iterable[int], server: int) -> tuple[tuple[Lookup, ...], tuple[RowRead, ...]]:
        """Returns the rows that come back with a round, and those that it hints at, once each.

        Args:
            written: the variables that the round assigns on a server.
            server: the server.
        """
        if not (self._ahead_rows or self._hinted):
            return (), ()
        lookups = self._lookups(written, server)
        return lookups, self._hints(written, server, lookups)

    def _lookups(self, written: Iterable[int], server: int) -> tuple[Lookup, ...]:
        named = [self._ahead_rows[id] for id in written if id in self._ahead_rows]
        found, room = list[Lookup](), ROWS_AT_A_TIME
        for variable, pieces in named:
            count = sum(map(len, pieces))
            if self._home(variable) == server and count <= room:
                room -= count
                ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
                self._ahead_rows[variable.id] = variable, [ids]
                found.append(Lookup(variable.id, ids, row_specs(variable.spec.tensor, count)[1]))
        return tuple(found)

    def _takes_hints(self, variable: PlacedVariable) -> bool:
        """Returns whether a hint is of use to the server that is asked for a variable."""
        return self._home(variable) in self._session.hosting.taking_hints

    def hint(self, variable: PlacedVariable, *ids: Int64s) -> None:
        """The next round that assigns a part of a table hints at these rows of it; ids are as of `prefetch`."""
        self._hinted[variable.id] = variable, ids

    def _hints(self, written: Iterable[int], server: int, lookups: Sequence[Lookup]) -> tuple[RowRead, ...]:
        # What lookups leave of the header is for hints.
        found, room = list[RowRead](), ROWS_AT_A_TIME - sum(len(each.ids) for each in lookups)
        for id in [id for id in written if id in self._hinted]:
            variable, pieces = self._hinted[id]
            if self._home(variable) != server:
                continue
            del self._hinted[id]
            count = sum(map(len, pieces))
            if 0 < count <= room:
                room -= count
                found.append(RowRead.of(id, np.concatenate(pieces)))
        return tuple(found)

    def pull(self, variables: Sequence[PlacedVariable]) -> list[Array]:
        """Returns the values of variables as their first server has them, which is the same; keeps nothing."""
        return self._pulls.values(variables)

    def ask_tables(
        self, asked: Sequence[tuple[PlacedVariable, TableRead]], waits: bool
    ) -> list[tuple[int, list[Array]]]:
        """Asks parts of dynamic tables, all at once, as of the last round of this process.

        Args:
            asked: parts, with a question to each.
            waits: as of `read`.

        Returns:
            Of each how many rows it has there, and then keys and rows, as far as they are asked for.
        """
        changing = [round for part, _ in asked if waits and (round := self._changing.get(part.id)) is not None]
        for round in dict.fromkeys(changing):
            self.take(round)
        self.renew()
        return self._pulls.tables(asked)

    def _home(self, variable: PlacedVariable) -> int:
        """Returns the server that is asked for a variable."""
        return self._session.hosting.home(variable.servers)

    def _looked(self, server: int, round: int) -> None:
        """A server has answered with values of a round; told before this process takes part, too."""
        if not self._renewed:
            self._seen_as = self._seen_as if self._seen else self._session.change
            self._seen[server] = min(round, self._seen.get(server, round))

    # ---- What rounds do to it ----

    def change(self, written: frozenset[int], round: UnderWay, everything: bool) -> None:
        """A round was sent that assigns variables; with `everything` all of them."""
        with self._lock:
            changed = {*written, *self._values} if everything else written
            self._read -= changed
            self._changing.update(dict.fromkeys(changed, round))

    def wanted(self, returns: WantedVariables) -> WantedVariables:
        """Returns those of a round's variables that have targets, or were read since they were assigned."""
        with self._lock:
            return returns.among(self._read, self.targets.ids)

    def forget(self, written: frozenset[int], round: UnderWay, everything: bool) -> None:
        """Forgets values of variables that a round has assigned, which is over; with `everything` all values."""
        with self._lock:
            if everything:
                self._forget_all()
            for kept in (self._values, self._rows):
                for id in written & kept.keys():
                    del kept[id]
            for id in [*self._changing] if everything else written:
                if self._changing.get(id) is round:
                    del self._changing[id]

    def bring(self, fresh: Mapping[int, Array], rows: Mapping[int, Rows], servers: Collection[int], round: int) -> None:
        """Keeps the values, and rows, that a round brought back.

        Args:
            fresh: values by number.
            rows: rows by number.
            servers: those that it touched; none for a round of this process alone, beside those of all.
            round: its number, by which later reads ask these servers.
        """
        for server in servers:
            self._pulls.touched[server] = round
        with self._lock:
            self._values |= fresh
            self._rows |= rows
            if bool(self._group.alone) == bool(servers):
                self._brought, self._rows_brought = set(fresh), set(rows)


def _fresh(kept: dict[int, T], brought: Set[int], alone: Set[int] | None) -> dict[int, T]:
    """Returns what is kept without what others may have changed, of some variables alone or, for None, of all."""
    return {id: value for id, value in kept.items() if id in brought or (alone is not None and id not in alone)}
