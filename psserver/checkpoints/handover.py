"""A server that comes back reads the variables that it held before, as the others save them.

They save its arrays by the numbers of their variables, also those that no checkpoint has, and all dynamic tables. What
a restored checkpoint has for variables that are created later goes with them. Who has read it all removes it. The log
tells that all is saved; until then, and while it reads, the server puts rounds off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from psserver.checkpoints.later import DeferredRestore
from psserver.checkpoints.restored_tables import RestoredTable, WantedTable
from psserver.checkpoints.restores import Restores
from psserver.effects import Effect, Fail, Reply, Work, naming
from psserver.rounds.rounds import Rounds
from psserver.state.variables import Store
from pswire.api import RestoreOrder
from pswire.checkpoint.arrays_of_tables import read_arrays
from pswire.checkpoint.manifest import MANIFEST
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.safetensors_stream import told
from pswire.checkpoint.storage import Storage
from pswire.errors import CheckpointError, PSError
from pswire.limits import PART_BYTES
from pswire.model.log import LogEntry, Snapshotted
from pswire.model.plan import PlacedVariable, SnapshotOrder
from pswire.model.saved import Shard
from pswire.model.tensor import Array

log = logging.getLogger("psserver")

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
    later: DeferredRestore
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
        rounds: the rounds, some of which are put off.
        give_up: ends this server, which cannot read its variables, given the time and the error; returns the effects.
    """

    def __init__(
        self,
        store: Store,
        restores: Restores,
        place: Storage,
        rounds: Rounds,
        give_up: Callable[[float, PSError], list[Effect]],
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._give_up = give_up
        self._begun = 0  # the generation by which that was handed over which is read
        self._restores = restores
        self._place = place

    def follow(self, entries: Sequence[LogEntry], now: float) -> list[Effect]:
        """Begins to read once the log tells that all is saved, if this server is back and has not read it."""
        generation = self._rounds.backlog.awaits
        if generation in (0, self._begun):
            return []
        for entry in (each for each in reversed(entries) if isinstance(each, Snapshotted)):
            order = self._ordered(entry.plan_id)
            if order is not None and order.returns == generation:
                self._begun = generation
                return self._lost(CheckpointError(entry.error), now) if entry.error else self._begin(order, Future())
        return []

    def _ordered(self, plan_id: bytes) -> SnapshotOrder | None:
        prepared = self._rounds.plans.get(plan_id)
        return prepared.plan.snapshot if prepared else None

    def _lost(self, error: PSError, now: float) -> list[Effect]:
        """Ends this server if the job counts on it; else the chief is told, and goes on without."""
        return self._give_up(now, error) if self._rounds.backlog.awaits else []

    def _begin(self, order: SnapshotOrder, future: Future[Shard]) -> list[Effect]:
        mine = [v for v in self._store.variables.values() if self._store.server in v.servers]
        arrays = {name_of(v): v for v in mine if v.spec.part is None}
        names = {v.id: v.spec.saved_name for v in mine if v.spec.part is not None}
        found = (WantedTable.of(stored, names, RestoreOrder()) for stored in self._store.tables())
        work = order, arrays, [table for table in found if table is not None]
        return [Work("files", self._read, work, then=partial(self._put, order, future))]

    def _read(
        self, order: SnapshotOrder, arrays: Mapping[str, PlacedVariable], tables: Sequence[WantedTable]
    ) -> _HandedOver:
        """Reads and removes it; in the thread for files."""
        with naming(self._store.task):
            saved = SavedCheckpoint.open(self._place, order.path, PART_BYTES)
            wanted = [(name, v) for name, v in arrays.items() if name in saved.manifest.variables]
            read = read_arrays(saved, [(name, v.spec.tensor) for name, v in wanted])
            parts = [table.restored(saved, self._store.native) for table in tables]
            path = f"{order.path}/{LATER}"
            with told(self._place.full(path)), self._place.open(path) as file:
                later = DeferredRestore.of(file.read(PART_BYTES))
            checkpoint = SavedCheckpoint.open(self._place, later.path, PART_BYTES) if later.path else None
            put = self._store.device.put
            values = {v.id: put(array) for (_, v), array in zip(wanted, read, strict=True)}
            shard = Shard(saved.full, "", saved.manifest.round, saved.manifest.positions, ())
            for file_name in (MANIFEST, LATER, *saved.manifest.shards):
                try:
                    self._place.remove(f"{order.path}/{file_name}")
                except Exception as error:  # object stores have errors of their own; all is read
                    log.warning("cannot remove %s, which is no longer needed: %s", f"{saved.full}/{file_name}", error)
        return _HandedOver(values, parts, later, checkpoint, shard)

    def _put(
        self,
        order: SnapshotOrder,
        future: Future[Shard],
        found: _HandedOver | None,
        error: PSError | None,
        now: float,
    ) -> list[Effect]:
        if found is None:
            error = error or PSError("the server's own copy of its variables could not be read")
            return [Fail(future, error), *self._lost(error, now)]
        self._store.commit(found.values)
        for table in found.tables:
            table.put()
        self._restores.adopt(found.checkpoint, found.later)
        self._rounds.backlog.has_read(order.returns)
        log.info(
            "%s has read its variables; it still has to apply %d rounds", self._store.task, len(self._rounds.backlog)
        )
        return [Reply(future, found.shard)]
