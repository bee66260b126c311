"""Reads of variables by their owners' code: what has to be sent before is sent, then servers are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from psclient._src import context
from psclient._src.rounds.buffers import Memory
from psclient._src.rounds.read_cache import ReadCache
from psclient._src.rounds.rounds import Exchange
from psclient._src.variables.device_copies import DeviceCopies
from psclient._src.variables.kinds import ServerVariable
from psclient._src.variables.server_reader import TableContent, TableQuestion
from psclient._src.variables.sharded import ShardedVariable
from psclient._src.variables.variable import Variable
from pswire.api import TableRead
from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable as Handle
from pswire.model.rows import ID_BYTES, Int64s, row_bytes, row_specs
from pswire.model.tables import TablePart
from pswire.model.tensor import DTYPES, Array

PAGE_BYTES = PART_BYTES
"""Size of an answer, about: how many keys a bucket has is known on average."""


class VariableReader:
    """Reads variables, and rows of them, on the host, as of the last round of this process. For any thread.

    Args:
        exchange: the rounds of this process.
        end_written: ends the calling thread's open section if it assigns one of some variables; raises `RuntimeError`
            if the strategy is closed.

    Attributes:
        kept: see `ReadCache.kept`.
    """

    def __init__(self, exchange: Exchange, end_written: Callable[[Sequence[Handle]], None]) -> None:
        self._exchange = exchange
        self._reads = exchange.reads
        self._creation = exchange.creation
        self._end_written = end_written
        self.kept = exchange.reads.kept
        self.copy_to = DeviceCopies(exchange.reads.known).copy_to

    def read(self, handle: Handle) -> Array:
        """Returns a variable's value.

        Flushes this thread's open section first if that assigns the variable.
        """
        in_replica = self._begin([handle])
        # Threads that make no rounds see what came last: they wait for nobody.
        return self._reads.read(handle, now=not in_replica, waits=in_replica or self._exchange.mine)

    def read_all(self, handles: Sequence[Handle]) -> list[Array]:
        """Returns the values of variables, as `read`; their servers are asked together."""
        found = [value for handle in handles if (value := self.kept(handle)) is not None]
        if len(found) == len(handles):
            return found
        in_replica = self._begin(handles)
        return self._reads.read_all(handles, now=not in_replica, waits=in_replica or self._exchange.mine)

    def read_rows(self, handle: Handle, ids: Int64s) -> Array:
        """Returns rows of a variable, as `read` would have them in its value."""
        return self.read_rows_of_all([(handle, ids)])[0]

    def read_rows_of_all(self, wanted: Sequence[tuple[Handle, Int64s]]) -> list[Array]:
        """Returns rows of each of some variables, as `read_rows`; their servers are asked together."""
        in_replica = self._begin([handle for handle, _ in wanted])
        return self._reads.read_rows_of_all(wanted, waits=in_replica or self._exchange.mine)

    def read_tables(self, handles: Sequence[Handle], what: TableQuestion) -> list[TableContent]:
        """Returns what parts of dynamic tables have."""
        in_replica = self._begin(handles)
        return _contents(self._reads, handles, what, in_replica or self._exchange.mine)

    def prefetch(self, handle: Handle, *ids: Int64s) -> None:
        """Rounds that assign a variable bring these rows of it: see `ReadCache.prefetch`."""
        self._reads.prefetch(handle, *ids)

    def _takes_hints(self, handle: Handle) -> bool:
        """Returns whether a hint is of use to the server of a part of a table."""
        return self._reads._takes_hints(handle)

    def hint(self, handle: Handle, *ids: Int64s) -> None:
        """The next round that assigns a part of a table hints at these rows of it: see `ReadCache.hint`."""
        self._reads.hint(handle, *ids)

    def into(self, memory: Sequence[tuple[Variable, Memory | None]]) -> None:
        """Has rounds write the values of variables into arrays, where they are now and after each round that assigns.

        A variable then comes with every such round, whether it was read or not, and no copy of it is kept here. What
        a round brings is written when its values are taken; see `take_all`.

        Args:
            memory: variables on servers, each with what says where its array is; it is asked each time, and replaces
                the one before. None for no array any more.
        """
        targets = self._reads.targets
        for variable, where in memory:
            for part, rows in _parts(variable):
                if where is None:
                    targets.remove(part.handle.id)
                else:
                    targets.add(part.handle, where if rows is ... else partial(_rows_of, where, rows))
        if any(where is not None for _, where in memory):
            self.refresh()

    def refresh(self) -> None:
        """Writes the values of now into arrays that have others, as after a restore: see `into`."""
        self._creation.send()
        self._reads.refresh()

    def take_all(self) -> None:
        """Waits for all rounds that were sent, and takes their values."""
        self._exchange.take_all()

    def _begin_step(self) -> None:
        """A step of a loop without `strategy.run` begins: asynchronous workers read anew, and its waits are counted."""
        self._reads._begin_step()
        self._exchange.window._begin_step()

    def _begin(self, handles: Sequence[Handle]) -> bool:
        """Sends what a read has to wait for; returns whether a replica reads."""
        self._end_written(handles)
        return context.has_strategy() and not context.crosses_replicas()


def _rows_of(memory: Memory, rows: Any) -> Array | None:
    whole = memory()
    return None if whole is None else whole[rows]


def _parts(variable: Variable) -> list[tuple[ServerVariable, Any]]:
    """Returns what servers have of a variable, each with where it is in an array of the whole."""
    if isinstance(variable, ServerVariable):
        return [(variable, ...)]
    if not isinstance(variable, ShardedVariable):
        raise TypeError(f"variable {variable.name!r} has no single value on the servers that could be read as an array")
    return [*zip(variable.variables, variable.sharding.bounds, strict=True)]


def _contents(reads: ReadCache, parts: Sequence[Handle], what: TableQuestion, waits: bool) -> list[TableContent]:
    """Returns what parts of dynamic tables have: in pages of some buckets each, of all servers at once."""
    sizes = [size for size, _ in reads.ask_tables([(part, TableRead(part.id, "size")) for part in parts], waits)]
    found: list[list[list[Array]]] = [[_empty(part)] for part in parts]
    ahead = [[] if what == "size" else _pages(*each, what) for each in zip(parts, sizes, strict=True)]
    for nth in range(max(map(len, ahead))):
        asked = [(number, pages[nth]) for number, pages in enumerate(ahead) if nth < len(pages)]
        answers = reads.ask_tables([(parts[number], page) for number, page in asked], waits)
        for (number, _), (_, arrays) in zip(asked, answers, strict=True):
            found[number].append(arrays)
    return [_joined(each, size) for each, size in zip(found, sizes, strict=True)]


def _pages(part: Handle, size: int, what: TableQuestion) -> list[TableRead]:
    buckets = cast(TablePart, part.spec.part).buckets
    nbytes = size * (ID_BYTES + (row_bytes(part.spec.tensor) if what == "rows" else 0))
    step = max(1, PAGE_BYTES * len(buckets) // max(nbytes, 1))
    pages = [buckets[first : first + step] for first in range(0, len(buckets), step)] if size else []
    return [TableRead(part.id, what, page.start, len(page)) for page in pages]


def _empty(part: Handle) -> list[Array]:
    return [np.empty(spec.shape, DTYPES[spec.dtype]) for spec in row_specs(part.spec.tensor, 0)]


def _joined(pages: Sequence[Sequence[Array]], size: int) -> TableContent:
    (keys, rows), *more = pages
    keys = np.concatenate([keys, *(page[0] for page in more)])
    rows = np.concatenate([rows, *(page[1] for page in more if len(page) > 1)])
    return TableContent(size, keys, rows)
