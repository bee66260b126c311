"""The variables of one server.

A read of a variable that the running round assigns waits for the round's end. What may be written in place `values`
says.

A round that streams on trial writes second arrays. Those that they replace serve the next such round: fresh memory
costs several times as much as the writing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter

from psserver.devices import ServerDevice
from psserver.effects import Effect, Work
from psserver.tables.native import Native
from psserver.tables.table import Table
from psserver.values.dense import Dense, owned
from psserver.values.keyed import Keyed, KeyedRows, StoredTable
from psserver.values.known_tables import KnownTables
from psserver.values.lazy import FrozenValue
from psserver.values.step import StepVariables
from psserver.values.value import Memo, Value
from pswire.api import RowRead, TableRead
from pswire.cluster import Task
from pswire.errors import InvalidRequest, MemoryLimit, VariableMismatch
from pswire.limits import LOOKUP_BYTES
from pswire.model.hashing import BUCKETS
from pswire.model.log import in_order
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.rows import ID_BYTES, row_bytes
from pswire.model.tables import TablePart
from pswire.model.tensor import Array
from pswire.sizes import human

FirstValue = Array | Table | KeyedRows
"""The first value of a variable: an array, or of a part of a dynamic table what a checkpoint has of it."""


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
        self._values: dict[int, Value] = {}
        self._spares: dict[int, Value] = {}  # what the last round on trial has replaced
        self._row_tables = set[int]()  # variables of which rounds update rows
        self._frozen = set[int]()  # variables that a checkpoint may read while their rows are written
        self.native = native or Native()
        self._keyed: dict[int, Keyed] = {}  # the values that are tensors of dynamic tables
        self._known = KnownTables(self.task)
        self._declared = 0
        self.lent: frozenset[int] = frozenset()
        self.gone: dict[int, str] = {}
        self.losses: list[int] = []
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
                keyed = self._table_of(variable, part).put(variable, part)
                self._values[variable.id] = self._keyed[variable.id] = keyed
            self._known.add(variable, part)
        self.variables[variable.id] = variable

    def _check_room(self, spec: VariableSpec, nbytes: int) -> None:
        if self.memory_limit and self.nbytes + nbytes > self.memory_limit:
            reserved = self._tier_bytes + sum(tensor.reserved for tensor in self._keyed.values())
            raise MemoryLimit(_no_room(spec, nbytes, self.nbytes, reserved, self.memory_limit), str(self.task))

    def _table_of(self, variable: PlacedVariable, part: TablePart) -> StoredTable:
        """Returns the table that a variable is a tensor of; a new one for its rows."""
        rows = None if part.slot is None else self._known.rows_of(variable, part)
        if rows is not None:
            return self._keyed[rows].stored
        try:
            return StoredTable(variable, part, self.native, self.task)
        except MemoryLimit as error:
            raise MemoryLimit(f"variable {variable.spec}: {error.message}", str(self.task)) from error

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the variables of this server take, dynamic tables as they are now, and all of a tier."""
        return self._declared + self._tier_bytes + sum(tensor.nbytes for tensor in self._keyed.values())

    @property
    def _tier_bytes(self) -> int:
        return self.native.tier.memory if self.native.tier else 0

    def tables(self) -> list[StoredTable]:
        """Returns the dynamic tables of which a part is here."""
        return list({id(tensor.stored): tensor.stored for tensor in self._keyed.values()}.values())

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

    def _tensor(self, id: int) -> Keyed:
        if id not in self._keyed:
            name = repr(self.variables[id].spec.name) if id in self.variables else str(id)
            raise InvalidRequest(f"variable {name} is not a dynamic table on this server", str(self.task))
        return self._keyed[id]

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
        keyed = self._keyed.pop(id, None)
        if keyed is not None:
            del keyed.stored.tensors[id]
        self._values.pop(id, None)
        self._spares.pop(id, None)

    def initialized(self, id: int) -> bool:
        """Returns True if the variable has a value here."""
        return id in self._values

    def initialize(self, id: int, value: FirstValue) -> bool:
        """Gives a variable its first value, an array with no other holder; returns False if it has a value already.

        A part of a dynamic table, which nobody has used yet, takes what it begins with each time.
        """
        if self.server not in self.variables[id].servers:
            raise InvalidRequest(f"variable {self.variables[id].spec.name!r} is not on this server")
        known = self._values.get(id)
        if known is not None:
            return known.begin(value)
        self._values[id] = Dense(value)
        return True

    def commit(self, values: Mapping[int, Value]) -> None:
        """Replaces the values of several variables, all at once."""
        self._values.update(values)

    def exchange(self, values: Mapping[int, Value]) -> None:
        """Does as `commit`; keeps the old arrays, and no older ones."""
        self._spares = {id: self._values[id] for id in values if self.device.gpu is None}
        self.commit(values)

    def take_spare(self, id: int) -> Array | None:
        """Takes the kept array of a variable, into which a round may write; None if there is none, or if it is read."""
        if id not in self._spares or not owned([id], self._spares):
            return None
        spare: Array = self._spares.pop(id).array
        return spare

    # ---- Readers ----

    def find(self, id: int) -> Value:
        """Returns a variable's value; raises `InvalidRequest` if it has none here."""
        value = self._values.get(id)
        if value is None:
            name = repr(self.variables[id].spec.name) if id in self.variables else str(id)
            raise InvalidRequest(f"variable {name} has no value on this server", str(self.task))
        return value

    def at_hand(self, ids: Sequence[int]) -> dict[int, Array] | None:
        """Returns arrays on the host, by number; None if that takes array work. Raises `InvalidRequest` as `find`."""
        values = list(map(self.find, ids))
        if values and (self.device.gpu is not None or not all(map(_IS_PLAIN, values))):
            return None
        return dict(zip(ids, map(_ARRAY, values), strict=True))

    def views(self, ids: Iterable[int]) -> list[Value]:
        """Returns variables as they are now, for who reads them later; raises `InvalidRequest` as `find`."""
        memo: Memo = {}
        return [self.find(id).view(memo) for id in ids]

    def freeze(self, ids: Iterable[int]) -> list[FrozenValue]:
        """Freezes values of variables as they are now, for who reads each of them once, while rounds go on."""
        memo: Memo = {}
        by_rows = self._row_tables if self.device.gpu is None else frozenset[int]()
        ids = list(ids)
        self._frozen |= by_rows.intersection(ids)
        return [self.find(id).freeze(id in by_rows, memo) for id in ids]

    def check_rows(self, reads: Sequence[RowRead], hints: Sequence[RowRead] = ()) -> None:
        """Checks what rows are asked for, and what rows are hinted at, which no answer has.

        Raises:
            InvalidRequest: a variable has no value here, or one of the ids is no row of it.
            MemoryLimit: the answer would be too large.
        """
        for read in (*reads, *hints):
            value = self.find(read.variable)
            value.check_rows(read.numbers(), self.variables[read.variable].spec.name, str(self.task))
        self._check_answer(
            len(read.ids) // ID_BYTES * row_bytes(self.variables[read.variable].spec.tensor) for read in reads
        )

    def read_ahead(self, reads: Sequence[RowRead], hint: bool = False) -> list[Effect]:
        """Returns the work that begins to read rows that are wanted after a round, of tables in a tier, from the disk.

        With `hint` they are wanted after the next round, and others first.
        """
        if self.native.tier is None or not reads:
            return []
        return [Work("arrays", _read_ahead, ([(self.find(read.variable), read) for read in reads], hint))]

    def values(self) -> dict[int, Array]:
        """Returns the arrays of all variables that have one, by number."""
        return {id: value.array for id, value in self._values.items() if id not in self._keyed}

    # ---- Rounds ----

    def note_tables(self, ids: Iterable[int]) -> None:
        """Rounds update rows of these variables."""
        self._row_tables.update(ids)

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

    def end_loan(self) -> None:
        """Ends a round's loan: all values may be read again."""
        self.lent = frozenset()

    def lazy(self) -> set[int]:
        """Returns the variables of which updates of rows may be deferred."""
        return {id for id, value in self._values.items() if value.group is not None}

    def borrow(self, ids: Collection[int], in_place: bool, newer: Mapping[int, Value]) -> StepVariables:
        """Returns variables for a step of a round.

        Args:
            ids: the variables.
            in_place: True if the step may write into arrays that nobody else holds.
            newer: values that the round's steps before have assigned.
        """
        values = dict(zip(ids, map(self._values.get, ids), strict=True))
        exclusive = own = self.exclusive(ids) if in_place else frozenset[int]()
        if self._frozen:
            self._frozen = {id for id in self._frozen & self._values.keys() if self._values[id].is_frozen}
            exclusive -= self._frozen
        if newer:
            values |= {id: newer[id] for id in newer.keys() & values.keys()}
        return StepVariables(values, exclusive, own.union(self._keyed) if self._keyed else own, bool(self._row_tables))

    def exclusive(self, ids: Collection[int]) -> frozenset[int]:
        """Returns the variables whose arrays only their values hold: a round may write into them, or into rows."""
        if self.device.gpu is not None:
            return frozenset()
        return owned(set(ids) - self._keyed.keys() if self._keyed else ids, self._values)


_ARRAY, _IS_PLAIN = attrgetter("array"), attrgetter("is_plain")


def _read_ahead(wanted: Sequence[tuple[Value, RowRead]], hint: bool) -> None:
    for value, read in wanted:
        value.read_ahead(read.numbers(), hint)


def _no_room(spec: VariableSpec, nbytes: int, held: int, reserved: int, limit: int) -> str:
    """Says that a variable has no room beside what a server holds; `reserved` is what of that is counted unused."""
    ways = "raise --memory-limit" + (" or add a server" if nbytes <= limit else "")
    needs = f"needs {human(nbytes)}" + ("" if spec.part is None else " for its filter")
    needs = "has no room" if spec.part is not None and not nbytes else needs
    of_these = f", {human(reserved)} of these reserved for filters and --tier-memory" if reserved else ""
    return (
        f"variable {spec} {needs}, and this server holds {human(held)} of its limit of {human(limit)}{of_these}; {ways}"
    )
