"""The variables of one server.

An array that somebody holds never changes: a reader that still sends it, and a snapshot that is still being written,
need no copy and no lock. A round replaces such an array. Into an array that nobody but the store holds the round may
write. Whoever wants to read what a round assigns waits for its end.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from psserver.devices import Device
from psserver.sizes import human
from pswire.cluster import Task
from pswire.errors import InvalidRequest, MemoryLimit, VariableMismatch
from pswire.model.plan import PlacedVariable
from pswire.model.tensor import Array


class Store:
    """Declared variables, and the values of those that live here. Guarded by the core's lock.

    Args:
        server: the number of this server.
        device: where the values live.
        memory_limit: bytes that the values may take, 0 for no limit.

    Attributes:
        task: this server.
        lent: variables that the round which runs assigns.
    """

    def __init__(self, server: int, device: Device, memory_limit: int) -> None:
        self.server = server
        self.task = Task("ps", server)
        self.device = device
        self.memory_limit = memory_limit
        self.variables: dict[int, PlacedVariable] = {}
        self._values: dict[int, Array] = {}
        self.nbytes = 0
        self.lent: frozenset[int] = frozenset()

    def clear(self) -> None:
        """Drops everything."""
        self.variables.clear()
        self._values.clear()
        self.nbytes = 0
        self.lent = frozenset()

    def declare(self, variable: PlacedVariable) -> None:
        """Makes a variable known; reserves its memory if it lives here. Declaring it again changes nothing.

        Raises:
            InvalidRequest: there can be no such variable.
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

    def initialized(self, id: int) -> bool:
        """Returns whether the variable has a value here."""
        return id in self._values

    def initialize(self, id: int, value: Array) -> bool:
        """Gives a variable its first value, which must be its own; says whether it did: a later one is ignored."""
        if self.server not in self.variables[id].servers:
            raise InvalidRequest(f"variable {self.variables[id].spec.name!r} does not live on this server")
        return self._values.setdefault(id, value) is value

    def commit(self, values: Mapping[int, Array]) -> None:
        """Replaces the values of several variables, all at once."""
        self._values.update(values)

    def value(self, id: int) -> Array:
        """A variable's array, on the device; raises `InvalidRequest` where there is none."""
        value = self._values.get(id)
        if value is None:
            name = repr(self.variables[id].spec.name) if id in self.variables else str(id)
            raise InvalidRequest(f"variable {name} has no value on this server", str(self.task))
        return value

    def values(self) -> dict[int, Array]:
        """All values, by number."""
        return dict(self._values)

    def values_of(self, ids: Collection[int]) -> dict[int, Array | None]:
        """The values of some variables, by number; None where there is none."""
        return dict(zip(ids, map(self._values.get, ids), strict=True))

    def lend(self, ids: Iterable[int]) -> None:
        """A round that is going to assign these variables begins; nobody reads them before its end."""
        self.lent = frozenset(ids)

    def alone(self, ids: Iterable[int]) -> frozenset[int]:
        """Those of these variables whose arrays nobody else holds: a round may write into them."""
        return frozenset(id for id in ids if self._alone(id))

    def end_loan(self) -> None:
        """The round has ended: all values may be read again."""
        self.lent = frozenset()

    def _alone(self, id: int) -> bool:
        """Whether nobody but this store holds a variable's array, or a view of it, which would hold the array."""
        if self.device.gpu is not None or id not in self._values or _holders(self._values, id) > _ALONE:
            return False
        flags = self._values[id].flags
        return flags.owndata and flags.c_contiguous and flags.writeable


def _holders(values: Mapping[int, Array], id: int) -> int:
    """References to an array, those of the counting included."""
    return sys.getrefcount(values[id])


_ALONE = _holders({0: np.empty(0)}, 0)
"""What `_holders` counts for an array that only the mapping holds."""
