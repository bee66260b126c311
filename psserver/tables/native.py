"""What tables share: compiled functions, which are asked for until they are there, and where rows lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from psserver.programs.kernels.compiler import Compiler, NumbaKernel, Tools
from psserver.tables import first_values, index_functions, marks, new_keys
from psserver.tiers.tier import Tier
from pswire.model import first_values as first_values_by_numpy
from pswire.model import hashing

Definition = Callable[[Tools], Callable[..., None]]
Signature = tuple[Definition, int, tuple[str, ...]]

_ANYWHERE = ("uint64", "uint64", "int64")
"""The table of places, and all memory as words and as entries."""

INDEX: dict[str, Signature] = {
    "find": (index_functions.finding, 3, ("uint64", "uint64", *_ANYWHERE, "int64")),
    "put": (index_functions.putting, 1, ("uint64", "int64", "uint64", "uint64", "uint64", "int64", "uint64")),
    "remove": (index_functions.removing, 1, ("uint64", "uint64", "uint64", "uint64", "int64")),
    "reserve": (index_functions.reserving, 1, ("uint64", *_ANYWHERE, "uint64")),
    "release": (index_functions.releasing, 1, ("uint64",)),
    "scan": (index_functions.scanning, 2, ("uint64", "uint64", *_ANYWHERE, "uint64", "int64", "int64")),
    "follow": (index_functions.following, 5, ("uint64", *_ANYWHERE, "uint32", "uint64", "int64")),
}
"""The functions of `IndexFunctions`: their definitions, numbers of integers, and dtypes of pointers."""

FIRST_VALUES: dict[str, Signature] = {
    dtype: (first_values.filling, 4, ("uint64", "float64", "float64", "float64", dtype))
    for dtype in first_values_by_numpy.COMPUTED
}
"""The functions of first values, by the dtype that they write."""

MARK: Signature = (marks.marking, 3, ("int64", "int64", "uint32", "float32", "uint32"))
"""The function that marks the rows of a round."""

COUNT: Signature = (new_keys.counting, 2, ("uint64", "int64", "int64"))
"""The function that finds out which of a round's new keys are the same."""

_SOURCES: tuple[ModuleType, ...] = (hashing, index_functions, first_values, first_values_by_numpy, marks, new_keys)


@dataclass(frozen=True)
class IndexFunctions:
    """The functions of an index, compiled. Each takes integers, then addresses, and releases the GIL."""

    find: NumbaKernel
    put: NumbaKernel
    remove: NumbaKernel
    reserve: NumbaKernel
    release: NumbaKernel
    scan: NumbaKernel
    follow: NumbaKernel


class Native:
    """What all tables of a server share: compiled functions, and the tier. May be called from any thread.

    Args:
        compiler: compiles them in the background; None to do without.
        tier: where rows lie; None for memory.

    Attributes:
        tier: where rows lie.
    """

    def __init__(self, compiler: Compiler | None = None, tier: Tier | None = None) -> None:
        self._compiler = compiler
        self.tier = tier
        self._index: IndexFunctions | None = None
        self._first: dict[str, NumbaKernel] = {}
        self._mark: NumbaKernel | None = None
        self._count: NumbaKernel | None = None

    def index(self) -> IndexFunctions | None:
        """Returns the functions of an index; None until all are compiled."""
        if self._index is None:
            found: dict[str, Any] = {f.name: self._get(INDEX[f.name]) for f in fields(IndexFunctions)}
            if None not in found.values():
                self._index = IndexFunctions(**found)
        return self._index

    def mark(self) -> NumbaKernel | None:
        """Returns the function that marks rows; None until it is compiled."""
        self._mark = self._mark or self._get(MARK)
        return self._mark

    def count(self) -> NumbaKernel | None:
        """Returns the function that finds out which new keys are the same; None until it is compiled."""
        self._count = self._count or self._get(COUNT)
        return self._count

    def first_values(self, dtype: str) -> NumbaKernel | None:
        """Returns the function that writes first values of a dtype of `FIRST_VALUES`; None until it is compiled."""
        found = self._first.get(dtype) or self._get(FIRST_VALUES[dtype])
        if found is not None:
            self._first[dtype] = found
        return found

    def _get(self, signature: Signature) -> NumbaKernel | None:
        if self._compiler is None:
            return None
        definition, sizes, dtypes = signature
        return self._compiler.function(definition, sizes, dtypes, _SOURCES)
