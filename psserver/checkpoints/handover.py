"""A server that comes back reads the variables that it held before, as the others have just saved them.

They save its arrays by the numbers of their variables, also those that no checkpoint has, and all dynamic tables. What
a restored checkpoint has for variables that are created later goes with them. Who has read it all removes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from psserver.checkpoints.later import Later
from psserver.checkpoints.restored_tables import RestoredTable, WantedTable
from psserver.checkpoints.restores import Restores
from psserver.effects import Effect, Fail, Reply, Work, naming
from psserver.state.variables import Store
from pswire.api import RestoreOrder
from pswire.checkpoint.arrays_of_tables import read_arrays
from pswire.checkpoint.manifest import MANIFEST
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.storage import Storage
from pswire.errors import CheckpointError, PSError
from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable, SnapshotOrder
from pswire.model.saved import Shard
from pswire.model.tensor import Array

LATER = "later.json"
"""The file that tells what a restored checkpoint has for later variables."""


@dataclass(frozen=True)
class _HandedOver:
    """What was read.

    Attributes:
        values: arrays on the device, by the numbers of their variables.
        tables: parts of dynamic tables.
        later: what a restored checkpoint has for later variables.
        checkpoint: that one; None for none.
        shard: the answer to the chief.
    """

    values: dict[int, Array]
    tables: list[RestoredTable]
    later: Later
    checkpoint: SavedCheckpoint | None
    shard: Shard


def name_of(variable: PlacedVariable) -> str:
    """Returns the name of an array that is handed over."""
    return f"#{variable.id}"


class Handover:
    """Reads what is handed over to this server. Guarded by the core's lock.

    Args:
        store: gets the values.
        restores: gets what is for later variables.
        place: the storage of checkpoints.
    """

    def __init__(self, store: Store, restores: Restores, place: Storage) -> None:
        self._store = store
        self._restores = restores
        self._place = place

    def read(self, order: SnapshotOrder | None, future: Future[Shard]) -> list[Effect]:
        """Reads what an order has saved for this server, and answers the chief."""
        if order is None or not order.returns:
            return [Fail(future, CheckpointError("nothing was handed over by this plan", str(self._store.task)))]
        mine = [v for v in self._store.variables.values() if self._store.server in v.servers]
        arrays = {name_of(v): v for v in mine if v.spec.part is None}
        names = {v.id: v.spec.saved_name for v in mine if v.spec.part is not None}
        found = (WantedTable.of(stored, names, RestoreOrder()) for stored in self._store.tables())
        work = order, arrays, [table for table in found if table is not None]
        return [Work("files", self._read, work, then=partial(self._put, future))]

    def _read(
        self, order: SnapshotOrder, arrays: Mapping[str, PlacedVariable], tables: Sequence[WantedTable]
    ) -> _HandedOver:
        """Reads and removes it; in the thread for files."""
        with naming(self._store.task):
            saved = SavedCheckpoint.open(self._place, order.path, PART_BYTES)
            wanted = [(name, v) for name, v in arrays.items() if name in saved.manifest.variables]
            read = read_arrays(saved, [(name, v.spec.tensor) for name, v in wanted])
            parts = [table.restored(saved, self._store.native) for table in tables]
            with self._place.open(f"{order.path}/{LATER}") as file:
                later = Later.of(file.read(PART_BYTES))
            checkpoint = SavedCheckpoint.open(self._place, later.path, PART_BYTES) if later.path else None
            put = self._store.device.put
            values = {v.id: put(array) for (_, v), array in zip(wanted, read, strict=True)}
            shard = Shard(saved.full, "", saved.manifest.round, saved.manifest.positions, ())
            for file_name in (MANIFEST, LATER, *saved.manifest.shards):
                self._place.remove(f"{order.path}/{file_name}")
        return _HandedOver(values, parts, later, checkpoint, shard)

    def _put(self, future: Future[Shard], found: _HandedOver | None, error: PSError | None, now: float) -> list[Effect]:
        if error is not None or found is None:
            return [Fail(future, error or PSError("nothing was read"))]
        self._store.commit(found.values)
        for table in found.tables:
            table.put()
        self._restores.adopt(found.checkpoint, found.later)
        return [Reply(future, found.shard)]
