"""A server that comes back reads the variables that it held before, as the others save them.

They save its arrays by the numbers of their variables, also those that no checkpoint has, and all dynamic tables. What
a restored checkpoint has for variables that are created later goes with them. Who has read it all removes it. The log
tells that all is saved; until then, and while it reads, the server puts rounds off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from psserver.checkpoints.restores import Restores
from psserver.checkpoints.wanted import RestoredValues, WantedValues
from psserver.effects import Effect, Work, naming
from psserver.rounds.rounds import Rounds
from psserver.state.variables import Store
from pswire.checkpoint.manifest import MANIFEST
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.safetensors_stream import told
from pswire.checkpoint.storage import Storage
from pswire.errors import CheckpointError, PSError
from pswire.limits import PART_BYTES
from pswire.model.log import LogEntry, Snapshotted
from pswire.model.plan import PlacedVariable, SnapshotOrder
from pswire.model.saved import RestoreOrder

log = logging.getLogger("psserver")

LATER = "later.json"
"""The file that tells what a restored checkpoint has for later variables."""

_Read = tuple[RestoredValues, Callable[[], None]]
"""The values, and what takes over what is for later variables."""


def name_of(variable: PlacedVariable) -> str:
    """Returns the name of an array that is handed over."""
    return f"#{variable.id}"


class Handover:
    """Reads what is handed over to this server: a restore whose round is over. Guarded by the core's lock.

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
            prepared = self._rounds.plans.get(entry.plan_id)
            order = prepared.plan.snapshot if prepared else None
            if order is not None and order.returns == generation:
                self._begun = generation
                return self._give_up(now, CheckpointError(entry.error)) if entry.error else self._begin(order)
        return []

    def _begin(self, order: SnapshotOrder) -> list[Effect]:
        mine = [v for v in self._store.variables.values() if self._store.server in v.servers]
        names = {v.id: name_of(v) if v.spec.part is None else v.spec.saved_name for v in mine}
        wanted = WantedValues.of(self._store, names, RestoreOrder())
        return [Work("files", self._read, (order.path, wanted), then=partial(self._put, order.returns))]

    def _read(self, path: str, wanted: WantedValues) -> _Read:
        """Reads and removes it; in the thread for files."""
        with naming(self._store.task):
            saved = SavedCheckpoint.open(self._place, path, PART_BYTES)
            known = saved.manifest.variables
            wanted = replace(wanted, arrays={v: name for v, name in wanted.arrays.items() if name in known})
            values = wanted.read(saved, self._store, sharded=False)
            with told(self._place.full(f"{path}/{LATER}")), self._place.open(f"{path}/{LATER}") as file:
                take = self._restores.adopt(file.read(PART_BYTES))
            for name in (MANIFEST, LATER, *saved.manifest.shards):
                try:
                    self._place.remove(f"{path}/{name}")
                except Exception as error:  # object stores have errors of their own; all is read
                    log.warning("cannot remove %s, which is no longer needed: %s", f"{saved.full}/{name}", error)
        return values, take

    def _put(self, generation: int, found: _Read | None, error: PSError | None, now: float) -> list[Effect]:
        backlog = self._rounds.backlog
        if (
            found is None
        ):  # the end of this server, if the job counts on it; else the chief is told, and goes on without
            why = error or PSError("the server's own copy of its variables could not be read")
            return self._give_up(now, why) if backlog.awaits else []
        values, take = found
        self._store.commit(values.arrays)
        for table in values.tables:
            table.put()
        take()
        backlog.has_read(generation)
        log.info("%s has read its variables; it still has to apply %d rounds", self._store.task, len(backlog))
        return []
