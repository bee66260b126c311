"""The dynamic tables that variables are parts of, wherever they lie: what may be declared beside what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from psserver.tables.policies import checked_limit
from pswire.cluster import Task
from pswire.errors import InvalidRequest
from pswire.limits import MAX_BESIDE, MAX_PARTS
from pswire.model.plan import PlacedVariable
from pswire.model.tables import SlotTensor, TablePart, TableSpec


class KnownTables:
    """The declared parts of dynamic tables, and what lies beside them. Guarded by the core's lock.

    Server 0 knows all of a job, and refuses first; each server has a say, as it may be asked first.

    Args:
        task: this server's task, for messages.
    """

    def __init__(self, task: Task) -> None:
        self._task = str(task)
        self._rows: dict[str, dict[int, tuple[PlacedVariable, TablePart]]] = {}  # by the table's name
        self._beside: dict[int, dict[str, tuple[PlacedVariable, TablePart]]] = {}  # by rows, and by the tensor's name
        self._counts = Counter[int]()  # parts of each server

    def clear(self) -> None:
        """Forgets all of them."""
        self._rows.clear()
        self._beside.clear()
        self._counts.clear()

    def check(self, variable: PlacedVariable, part: TablePart, copied: bool = False) -> None:
        """Raises `InvalidRequest` if a variable cannot be this part of a table, after those that are known.

        With `copied` variables have copies, a part of a table one as well.
        """
        if len(variable.servers) != 1 + copied:
            where = "on a server and its copy" if copied else "on one server"
            raise self._refusal(
                variable, f"is on servers {variable.servers[:8]}, but a part of a table must be {where}"
            )
        for rival in self.rivals(variable, part):
            raise self._refusal(
                variable,
                f"has buckets {part.first} to {part.buckets.stop - 1} of {part.whole!r}, but {rival.spec.name!r} has "
                "some of them or is another table; give each table its own name",
            )
        if part.slot is None:
            self._check_rows(variable, part)
        else:
            self._check_beside(variable, part)

    def _check_rows(self, variable: PlacedVariable, part: TablePart) -> None:
        self._check_limit(variable, part.spec, ())
        server = max(variable.servers, key=self._counts.__getitem__)
        if self._counts[server] >= MAX_PARTS:
            raise self._refusal(variable, f"exceeds the limit of {MAX_PARTS} tables on server {server}; group tables")

    def _check_beside(self, variable: PlacedVariable, part: TablePart) -> None:
        rows = self.rows_of(variable, part)
        if rows is None:
            raise self._refusal(
                variable, f"belongs to table {part.table!r}, but this server has no such part of that table"
            )
        others = self._beside[rows].values()
        if len(others) >= MAX_BESIDE:
            raise self._refusal(variable, f"exceeds the limit of {MAX_BESIDE} slot variables of table {part.table!r}")
        slots = [each.slot for _, each in (*others, (variable, part)) if each.slot is not None]
        self._check_limit(variable, part.spec, slots)

    def _check_limit(self, variable: PlacedVariable, spec: TableSpec, slots: Sequence[SlotTensor]) -> None:
        try:
            checked_limit(spec, slots)
        except InvalidRequest as error:
            raise self._refusal(variable, f"does not fit: {error.message}") from error

    def _refusal(self, variable: PlacedVariable, why: str) -> InvalidRequest:
        return InvalidRequest(f"variable {variable.spec} {why}", self._task)

    def rows_of(self, variable: PlacedVariable, part: TablePart) -> int | None:
        """Returns the number of the variable that is the rows of the same buckets, on the same server."""
        place = variable.servers, part.spec, part.buckets
        found = self._rows.get(part.table, {}).items()
        return next((id for id, (rows, known) in found if (rows.servers, known.spec, known.buckets) == place), None)

    def rivals(self, variable: PlacedVariable, part: TablePart) -> list[PlacedVariable]:
        """Returns the other variables that are known, and have the place that this one would take."""
        if part.slot is not None:
            rows = self.rows_of(variable, part)
            found = None if rows is None else self._beside[rows].get(part.slot.name)
            return [] if found is None or found[0].id == variable.id else [found[0]]
        return [
            rows
            for id, (rows, known) in self._rows.get(part.table, {}).items()
            if id != variable.id and (known.spec != part.spec or _overlap(known.buckets, part.buckets))
        ]

    def add(self, variable: PlacedVariable, part: TablePart) -> None:
        """Takes a variable that was checked."""
        if part.slot is None:
            self._rows.setdefault(part.table, {})[variable.id] = variable, part
            self._beside[variable.id] = {}
            self._counts.update(variable.servers)
        elif (rows := self.rows_of(variable, part)) is not None:
            self._beside[rows][part.slot.name] = variable, part

    def forget(self, variable: PlacedVariable, part: TablePart) -> list[int]:
        """Forgets a variable; returns the numbers of those beside it, which are nothing without it."""
        if part.slot is not None:
            rows = self.rows_of(variable, part)
            if rows is not None:
                del self._beside[rows][part.slot.name]
            return []
        del self._rows[part.table][variable.id]
        self._counts.subtract(variable.servers)
        return [beside.id for beside, _ in self._beside.pop(variable.id).values()]


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
