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
from collections.abc import Collection, Iterable, Mapping, Set
from contextlib import ExitStack
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from psserver.devices import Device
from psserver.sizes import human
from psserver.state.held import Held, HeldTable
from psserver.state.missed import Group, MissedUpdates, Unsettled
from pswire.api import RowRead
from pswire.cluster import Task
from pswire.errors import InvalidRequest, MemoryLimit, VariableMismatch
from pswire.model.plan import PlacedVariable
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

Missed = Mapping[int, MissedUpdates | None]
"""What rows of variables have missed, by the numbers of these; None for nothing."""

NOTHING: Missed = MappingProxyType({})


class Store:
    """Declared variables, and the values of those that live here. Guarded by the core's lock.

    Args:
        server: the number of this server.
        device: the device of the values.
        memory_limit: bytes that the values may take, 0 for no limit.

    Attributes:
        task: this server's task.
        lent: numbers of the variables that the running round assigns.
    """

    def __init__(self, server: int, device: Device, memory_limit: int) -> None:
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
        self.nbytes = 0
        self.lent: frozenset[int] = frozenset()

    def clear(self) -> None:
        """Drops all variables."""
        self.variables.clear()
        self._values.clear()
        self._spares.clear()
        self._missed.clear()
        self._tables.clear()
        self._held.clear()
        self.nbytes = 0
        self.lent = frozenset()

    def declare(self, variable: PlacedVariable) -> None:
        """Declares a variable; reserves its memory if it lives here. A second declaration changes nothing.

        Raises:
            InvalidRequest: the spec is not valid.
            MemoryLimit: it does not fit.
            VariableMismatch: its number is another variable's.
        """
        variable.spec.check()
        known = self.variables.get(variable.id)
        if known is not None:
            if known != variable:
                raise VariableMismatch(f"variable {variable.id} is {known.spec}, not {variable.spec}")
            return
        nbytes = variable.spec.tensor.nbytes if self.server in variable.servers else 0
        if self.memory_limit and self.nbytes + nbytes > self.memory_limit:
            ways = "raise --memory-limit" + (" or add a server" if nbytes <= self.memory_limit else "")
            raise MemoryLimit(
                f"variable {variable.spec} needs {human(nbytes)}, and this server holds {human(self.nbytes)} of "
                f"its limit of {human(self.memory_limit)}; {ways}",
                str(self.task),
            )
        self.variables[variable.id] = variable
        self.nbytes += nbytes

    def forget(self, id: int) -> None:
        """Drops a variable that no round knows yet."""
        known = self.variables.pop(id)
        if self.server in known.servers:
            self.nbytes -= known.spec.tensor.nbytes
        self._values.pop(id, None)
        self._spares.pop(id, None)

    def initialized(self, id: int) -> bool:
        """Returns True if the variable has a value here."""
        return id in self._values

    def initialize(self, id: int, value: Array) -> bool:
        """Gives a variable its first value, an array with no other holder; returns False if it has a value already."""
        if self.server not in self.variables[id].servers:
            raise InvalidRequest(f"variable {self.variables[id].spec.name!r} does not live on this server")
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

    def views(self, ids: Iterable[int]) -> list[Array | Unsettled]:
        """Returns values of variables for who reads them later; raises `InvalidRequest` if one has none here."""
        if not self._missed:
            return [self.value(id) for id in ids]
        groups: dict[MissedUpdates, Group] = {}
        found: list[Array | Unsettled] = []
        for id in ids:
            value, missed = self.value(id), self._missed.get(id)
            if missed is None or not missed.behind:
                found.append(value)
                continue
            if missed not in groups:
                groups[missed] = Group(missed, [self._values[table] for table in missed.tables])
            found.append(Unsettled(groups[missed], missed.tables.index(id)))
        return found

    def hold(self, ids: Iterable[int]) -> list[Array | HeldTable | Unsettled]:
        """Returns values of variables as they are now, for who reads each of them once, while rounds go on."""
        found: list[Array | HeldTable | Unsettled] = []
        groups: dict[MissedUpdates, Group] = {}
        for id in ids:
            missed = self._missed.get(id)
            if missed is None or not missed.behind:
                found.append(self._hold(id))
                continue
            if missed not in groups:
                groups[missed] = Group(missed.copy(), list(map(self._hold, missed.tables)))
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
            raise InvalidRequest(f"variable {name} has no value on this server", str(self.task))
        return value

    def check_rows(self, reads: Iterable[RowRead]) -> None:
        """Raises `InvalidRequest` if a variable has no value here, or one of the ids asked for is no row of it."""
        for read in reads:
            shape, ids = self.value(read.variable).shape, read.numbers()
            if not shape or (ids.size and int(ids.view(np.uint64).max()) >= shape[0]):  # a negative one is large
                name = self.variables[read.variable].spec.name
                bad = next((int(i) for i in ids if not (shape and 0 <= i < shape[0])), "")
                raise InvalidRequest(f"id {bad} is no row of variable {name!r}, whose shape is {shape}", str(self.task))

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


def take_rows(table: Array | Unsettled, ids: Int64s, xp: Any) -> Any:
    """Returns rows of a variable as a new array, on its device; `xp` is the device's array namespace."""
    if isinstance(table, Unsettled):
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
