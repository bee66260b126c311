"""The variables of one server.

An array with another holder than the store never changes. So a reader that still sends it and a snapshot that is still
being written need neither copy nor lock. A round replaces such an array, and writes in place into an array that only
the store holds. A read of a variable that the running round assigns waits for the round's end.

A round that streams on trial writes second arrays. Those that they replace serve the next such round: fresh memory
costs several times as much as the writing.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from psserver.devices import ServerDevice
from psserver.state.held import Held, HeldTable
from psserver.state.key_tables import KeyedRows, StoredTable, TableTensor
from psserver.state.known_tables import KnownTables
from psserver.state.missed import DeferredUpdates, MissedUpdates, Unsettled
from psserver.tables.native import Native
from psserver.tables.table import Table
from pswire.api import RowRead, TableRead
from pswire.cluster import Task
from pswire.errors import InvalidRequest, MemoryLimit, VariableMismatch
from pswire.limits import LOOKUP_BYTES
from pswire.model.hashing import BUCKETS
from pswire.model.log import in_order
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.rows import ID_BYTES, Int64s, row_bytes
from pswire.model.tables import TablePart
from pswire.model.tensor import Array
from pswire.sizes import human

FirstValue = Array | Table | KeyedRows
"""The first value of a variable: an array, or of a part of a dynamic table what a checkpoint has of it."""

Missed = Mapping[int, MissedUpdates | None]
"""What rows of variables have missed, by the numbers of these; None for nothing."""

NOTHING: Missed = MappingProxyType({})


class Store:
    """Declared variables, and the values of those that live here. Guarded by the core's lock.

    Args:
        server: the number of this server.
        device: the device of the values.
        memory_limit: bytes that the values may take, 0 for no limit.
        native: compiled functions of dynamic tables.

    Attributes:
        task: this server's task.
        native: the compiled functions.
        lent: numbers of the variables that the running round assigns.
        gone: the servers that are gone, without which the job goes on, with the reason of each.
        losses: the servers that were lost, one after the other; those that have come back included.
        copied: True if the job's variables have copies.
    """

    def __init__(self, server: int, device: ServerDevice, memory_limit: int, native: Native | None = None) -> None:
        self.server = server
        self.task = Task("ps", server)
        self.device = device
        self.memory_limit = memory_limit
        self.variables: dict[int, PlacedVariable] = {}
        self._values: dict[int, Array] = {}
        self._spares: dict[int, Array] = {}  # the arrays that the last round on trial has replaced
        self._missed: dict[int, MissedUpdates] = {}  # by each of their variables
        self._tables = set[int]()  # variables of which rounds update rows
        self._held: dict[int, list[weakref.ref[HeldTable]]] = {}
        self.native = native or Native()
        self._parts: dict[int, TableTensor] = {}  # dynamic tables, by the variables that are their tensors
        self._known = KnownTables(self.task)
        self._declared = 0
        self.lent: frozenset[int] = frozenset()
        self.gone: dict[int, str] = {}
        self.losses: list[int] = []
        self.copied = False

    def clear(self) -> None:
        """Drops all variables."""
        self.variables.clear()
        self._values.clear()
        self._spares.clear()
        self._missed.clear()
        self._tables.clear()
        self._held.clear()
        self._parts.clear()
        self._known.clear()
        self._declared = 0
        self.lent = frozenset()
        self.gone.clear()
        self.losses.clear()
        self.copied = False

    def leads(self, servers: Iterable[int]) -> bool:
        """Returns whether this server alone, of these, does what one has to do.

        It is the first that is not gone, in the order of `in_order`.
        """
        return in_order((s for s in servers if s not in self.gone), self.losses)[:1] == [self.server]

    def declare(self, variable: PlacedVariable) -> None:
        """Declares a variable; reserves its memory if it lives here. A second declaration changes nothing.

        Raises:
            InvalidRequest: the spec is not valid, or a part of a table that does not go with those that are declared.
            MemoryLimit: it does not fit.
            VariableMismatch: its number is another variable's.
        """
        variable.spec.check()
        known = self.variables.get(variable.id)
        if known is not None:
            if known != variable:
                raise VariableMismatch(f"variable {variable.id} is {known.spec}, not {variable.spec}")
            return
        here, part = self.server in variable.servers, variable.spec.part
        if part is not None:
            self._known.check(variable, part, self.copied)
        nbytes = variable.spec.nbytes if here else 0
        self._check_room(variable.spec, nbytes)
        if part is None:
            self._declared += nbytes
        else:
            if here:
                self._parts[variable.id] = self._table_of(variable, part).put(variable, part)
            self._known.add(variable, part)
        self.variables[variable.id] = variable

    def _check_room(self, spec: VariableSpec, nbytes: int) -> None:
        if self.memory_limit and self.nbytes + nbytes > self.memory_limit:
            reserved = self._tier_bytes + sum(tensor.reserved for tensor in self._parts.values())
            raise MemoryLimit(_no_room(spec, nbytes, self.nbytes, reserved, self.memory_limit), str(self.task))

    def _table_of(self, variable: PlacedVariable, part: TablePart) -> StoredTable:
        """Returns the table that a variable is a tensor of; a new one for its rows."""
        rows = None if part.slot is None else self._known.rows_of(variable, part)
        if rows is not None:
            return self._parts[rows].stored
        try:
            return StoredTable(variable, part, self.native, self.task)
        except MemoryLimit as error:
            raise MemoryLimit(f"variable {variable.spec}: {error.message}", str(self.task)) from error

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the variables of this server take, dynamic tables as they are now, and all of a tier."""
        return self._declared + self._tier_bytes + sum(tensor.nbytes for tensor in self._parts.values())

    @property
    def _tier_bytes(self) -> int:
        return self.native.tier.memory if self.native.tier else 0

    def tables(self) -> list[StoredTable]:
        """Returns the dynamic tables of which a part is here."""
        return list({id(tensor.stored): tensor.stored for tensor in self._parts.values()}.values())

    def tables_of(self, ids: Iterable[int]) -> dict[int, TableTensor]:
        """Returns those of some variables that are tensors of dynamic tables."""
        if not self._parts:
            return {}
        return {id: self._parts[id] for id in ids if id in self._parts}

    def room(self) -> int:
        """Returns the bytes by which dynamic tables may grow; -1 without a limit."""
        return max(self.memory_limit - self.nbytes, 0) if self.memory_limit else -1

    def ask(self, reads: Sequence[TableRead]) -> list[tuple[StoredTable, TableRead]]:
        """Returns the table of each question.

        Raises:
            InvalidRequest: a variable is none here, or some of its buckets are asked for twice.
            MemoryLimit: the answers would be too large.
        """
        found = [(self._tensor(read.variable).stored, read) for read in reads]
        counts = Counter[int]()
        for read in reads:
            counts[read.variable] += read.count
        if max(counts.values(), default=0) > BUCKETS:
            raise InvalidRequest("some buckets of a dynamic table are requested twice", str(self.task))
        rows = {read.variable: stored for stored, read in found if read.what == "rows"}
        self._check_answer(len(stored.table) * row_bytes(self.variables[id].spec.tensor) for id, stored in rows.items())
        return found

    def _check_answer(self, sizes: Iterable[int]) -> None:
        """Raises `MemoryLimit` if what is asked for takes more than all that may be here: a few words ask for much."""
        wanted, limit = sum(sizes), max(self.memory_limit, LOOKUP_BYTES)
        if self.memory_limit and wanted > limit:
            raise MemoryLimit(
                f"the requested rows take {human(wanted)}, and the limit is {human(limit)}; request fewer at a time",
                str(self.task),
            )

    def _tensor(self, id: int) -> TableTensor:
        if id not in self._parts:
            name = repr(self.variables[id].spec.name) if id in self.variables else str(id)
            raise InvalidRequest(f"variable {name} is not a dynamic table on this server", str(self.task))
        return self._parts[id]

    def rivals(self, variable: PlacedVariable) -> list[int]:
        """Returns the numbers of declared variables that have the number, or the place in a table, of another one."""
        found = [variable.id] if self.variables.get(variable.id, variable) != variable else []
        part = variable.spec.part
        return found if part is None else [*found, *(each.id for each in self._known.rivals(variable, part))]

    def forget(self, id: int) -> None:
        """Drops a variable that no round knows yet."""
        known = self.variables.pop(id)
        if known.spec.part is not None:
            for beside in self._known.forget(known, known.spec.part):
                self.forget(beside)
        elif self.server in known.servers:
            self._declared -= known.spec.nbytes
        tensor = self._parts.pop(id, None)
        if tensor is not None:
            tensor.stored.tensors.pop(id, None)
        self._values.pop(id, None)
        self._spares.pop(id, None)

    def initialized(self, id: int) -> bool:
        """Returns True if the variable has a value here."""
        return id in self._values or id in self._parts

    def is_settled(self, id: int) -> bool:
        """Returns True if the variable has an array here, and rows of it have missed no updates."""
        return id in self._values and id not in self._missed

    def initialize(self, id: int, value: FirstValue) -> bool:
        """Gives a variable its first value, an array with no other holder; returns False if it has a value already.

        A part of a dynamic table, which nobody has used yet, takes what it begins with each time.
        """
        if self.server not in self.variables[id].servers:
            raise InvalidRequest(f"variable {self.variables[id].spec.name!r} is not on this server")
        if isinstance(value, Table | KeyedRows):
            self._tensor(id).begin(value)
            return True
        if id in self._parts:
            raise InvalidRequest(
                f"variable {self.variables[id].spec.name!r} is a part of a dynamic table, which begins empty"
            )
        return self._values.setdefault(id, value) is value

    def commit(self, values: Mapping[int, Array], missed: Missed = NOTHING) -> None:
        """Replaces the values of several variables, all at once.

        Args:
            values: the new values.
            missed: what rows of variables have missed, where that has changed; None for nothing.
        """
        self._values.update(values)
        for id, found in missed.items():
            if found is None:
                self._missed.pop(id, None)
            else:
                self._missed[id] = found

    def exchange(self, values: Mapping[int, Array], missed: Missed = NOTHING) -> None:
        """Does as `commit`; keeps the old arrays, and no older ones."""
        self._spares = {id: self._values[id] for id in values if self.device.gpu is None}
        self.commit(values, missed)

    def take_spare(self, id: int) -> Array | None:
        """Takes the kept array of a variable, into which a round may write; None if there is none, or if it is read."""
        return self._spares.pop(id) if _writable(self._spares, id) else None

    def missed_of(self, ids: Iterable[int]) -> dict[int, MissedUpdates]:
        """Returns what rows of some variables have missed, by the numbers of these and of all variables beside them."""
        if not self._missed:
            return {}
        found = (self._missed[id] for id in ids if id in self._missed)
        return {id: missed for missed in found for id in missed.tables}

    @property
    def any_missed(self) -> bool:
        """True if rows of some variable may have missed updates."""
        return bool(self._missed)

    def beside(self, ids: Collection[int], every: bool) -> Collection[int]:
        """Returns variables, and those that are made up together with them, or `every` one that may be."""
        if not self._missed:
            return ids
        return frozenset(self._missed if every else self.missed_of(ids)).union(ids)

    def row_views(self, reads: Iterable[RowRead]) -> list[Array | Unsettled | TableTensor]:
        """Returns the variables of which rows are read, for who takes the rows later; raises as `views`."""
        ids = [read.variable for read in reads]
        if not self._parts:
            return [*self.views(ids)]
        return [self._parts[id] if id in self._parts else self.views([id])[0] for id in ids]

    def views(self, ids: Iterable[int]) -> list[Array | Unsettled]:
        """Returns values of variables for who reads them later; raises `InvalidRequest` if one has none here."""
        if not self._missed:
            return [self.value(id) for id in ids]
        groups: dict[MissedUpdates, DeferredUpdates] = {}
        found: list[Array | Unsettled] = []
        for id in ids:
            value, missed = self.value(id), self._missed.get(id)
            if missed is None or not missed.behind:
                found.append(value)
                continue
            if missed not in groups:
                groups[missed] = DeferredUpdates(missed, [self._values[table] for table in missed.tables])
            found.append(Unsettled(groups[missed], missed.tables.index(id)))
        return found

    def hold(self, ids: Iterable[int]) -> list[Array | HeldTable | Unsettled]:
        """Returns values of variables as they are now, for who reads each of them once, while rounds go on."""
        found: list[Array | HeldTable | Unsettled] = []
        groups: dict[MissedUpdates, DeferredUpdates] = {}
        for id in ids:
            missed = self._missed.get(id)
            if missed is None or not missed.behind:
                found.append(self._hold(id))
                continue
            if missed not in groups:
                groups[missed] = DeferredUpdates(missed.copy(), list(map(self._hold, missed.tables)))
            found.append(Unsettled(groups[missed], missed.tables.index(id)))
        return found

    def _hold(self, id: int) -> Array | HeldTable:
        value = self.value(id)
        if id not in self._tables or self.device.gpu is not None or not value.flags.c_contiguous or not value.ndim:
            return value
        held = HeldTable(value)
        self._held[id] = [*self._living(id), weakref.ref(held)]
        return held

    def _living(self, id: int) -> list[weakref.ref[HeldTable]]:
        return [one for one in self._held.get(id, ()) if one() is not None]

    def held_of(self, ids: Iterable[int], alone: Set[int]) -> dict[int, Held]:
        """Returns the variables that nobody holds but the store and a `HeldTable`, with these: rows may be written.

        Args:
            ids: the variables.
            alone: those of them that nobody else holds.
        """
        if not self._held:
            return {}
        found: dict[int, Held] = {}
        for id in self._held.keys() & set(ids) - alone:
            living = [one for one in (ref() for ref in self._held[id]) if one is not None]
            with ExitStack() as stack:
                holding = [one for one in living if stack.enter_context(one.looked_at())]
                mine = [one for one in holding if one.array is self._values[id]]
                if mine and _writable(self._values, id, len(mine)):
                    found[id] = mine
            if not holding:
                del self._held[id]
        return found

    def note_tables(self, ids: Iterable[int]) -> None:
        """Rounds update rows of these variables."""
        self._tables.update(ids)

    def value(self, id: int) -> Array:
        """Returns a variable's array, on the device; raises `InvalidRequest` if it has none here."""
        value = self._values.get(id)
        if value is None:
            name = repr(self.variables[id].spec.name) if id in self.variables else str(id)
            if id in self._parts:
                raise InvalidRequest(
                    f"variable {name} is a part of a dynamic table, which has no size; look its rows up",
                    str(self.task),
                )
            raise InvalidRequest(f"variable {name} has no value on this server", str(self.task))
        return value

    def check_rows(self, reads: Sequence[RowRead], hints: Sequence[RowRead] = ()) -> None:
        """Checks what rows are asked for, and what rows are hinted at, which no answer has.

        Raises:
            InvalidRequest: a variable has no value here, or one of the ids is no row of it.
            MemoryLimit: the answer would be too large.
        """
        for read in (*reads, *hints):
            if read.variable in self._parts:
                self._parts[read.variable].stored.check_keys(read.numbers())
                continue
            shape, ids = self.value(read.variable).shape, read.numbers()
            if not shape or (ids.size and int(ids.view(np.uint64).max()) >= shape[0]):  # a negative one is large
                name = self.variables[read.variable].spec.name
                bad = next((int(i) for i in ids if not (shape and 0 <= i < shape[0])), "")
                raise InvalidRequest(
                    f"id {bad} is not a row of variable {name!r}, whose shape is {shape}", str(self.task)
                )
        self._check_answer(
            len(read.ids) // ID_BYTES * row_bytes(self.variables[read.variable].spec.tensor) for read in reads
        )

    def values(self) -> dict[int, Array]:
        """Returns all values, by number."""
        return dict(self._values)

    def values_of(self, ids: Collection[int]) -> dict[int, Array | None]:
        """Returns the values of some variables, by number; None for a variable without a value."""
        return dict(zip(ids, map(self._values.get, ids), strict=True))

    def lend(self, ids: Iterable[int], exchanges: bool) -> None:
        """Blocks reads of the variables that a round is about to assign, until its end.

        Args:
            ids: the variables.
            exchanges: the round ends with `exchange`. What is kept of other variables is dropped: the memory limit has
                room for the second arrays of one round.
        """
        self.lent = frozenset(ids)
        if exchanges:
            self._spares = {id: self._spares[id] for id in self._spares.keys() & self.lent}

    def alone(self, ids: Iterable[int]) -> frozenset[int]:
        """Returns the variables whose arrays only the store holds: a round may write into them."""
        if self.device.gpu is not None:
            return frozenset()
        known = self._values.keys() & ids
        # No line of Python for each: there may be thousands.
        counts = map(sys.getrefcount, map(self._values.__getitem__, known))
        flags = map(_FLAGS, map(self._values.__getitem__, known))
        found = zip(known, counts, flags, strict=True)
        return frozenset([id for id, count, flag in found if count <= _COUNTED and flag & _OWN == _OWN])

    def end_loan(self) -> None:
        """Ends a round's loan: all values may be read again."""
        self.lent = frozenset()


def take_rows(table: Array | Unsettled | TableTensor, ids: Int64s, xp: Any) -> Any:
    """Returns rows of a variable as a new array, on its device; `xp` is the device's array namespace.

    Those of a dynamic table are on the host, and `ids` are keys.
    """
    if isinstance(table, Unsettled | TableTensor):
        return table.rows(ids)
    return xp.take(table, xp.asarray(ids), axis=0)


def _writable(values: Mapping[int, Array], id: int, others: int = 0) -> bool:
    """Returns True if only this mapping holds an array, and so many others; a view of it counts as a holder."""
    if id not in values or _holders(values, id) > _ALONE + others:
        return False
    flags = values[id].flags
    return flags.owndata and flags.c_contiguous and flags.writeable


_FLAGS = attrgetter("flags.num")
_OWN = 0x1 | 0x4 | 0x400
"""NumPy's flags of an array that is contiguous, owns its memory, and may be written."""


def _holders(values: Mapping[int, Array], id: int) -> int:
    """Counts the references to an array, including those of the count itself."""
    return sys.getrefcount(values[id])


_ALONE = _holders({0: np.empty(0)}, 0)
"""The result of `_holders` for an array that only the mapping holds."""

_COUNTED = next(map(sys.getrefcount, map({0: np.empty(0)}.__getitem__, (0,))))
"""The same for an array that is counted without a line of Python."""


def _no_room(spec: VariableSpec, nbytes: int, held: int, reserved: int, limit: int) -> str:
    """Says that a variable has no room beside what a server holds; `reserved` is what of that is counted unused."""
    ways = "raise --memory-limit" + (" or add a server" if nbytes <= limit else "")
    needs = f"needs {human(nbytes)}" + ("" if spec.part is None else " for its filter")
    needs = "has no room" if spec.part is not None and not nbytes else needs
    of_these = f", {human(reserved)} of these reserved for filters and --tier-memory" if reserved else ""
    return (
        f"variable {spec} {needs}, and this server holds {human(held)} of its limit of {human(limit)}{of_these}; {ways}"
    )
