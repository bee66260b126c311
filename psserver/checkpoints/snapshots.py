"""Snapshots: values frozen after a round, and the calls that wait until they are written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath

from psserver.checkpoints.bases import Bases
from psserver.checkpoints.handover import LATER, name_of
from psserver.checkpoints.restores import Restores
from psserver.checkpoints.tables import FrozenPart
from psserver.effects import Effect, Fail, Run, Work, naming, settle
from psserver.plans.round import ReadyRound
from psserver.rounds.participants import RoundParticipant
from psserver.rounds.rounds import Rounds
from psserver.state.counters import ServerCounters
from psserver.state.variables import Store
from psserver.values.lazy import FrozenValue
from psserver.values.value import Value
from pswire.checkpoint.assembly import base_of
from pswire.checkpoint.safetensors_stream import told
from pswire.checkpoint.storage import Storage
from pswire.checkpoint.writer import Frozen, FrozenTable, remove_shard, write_manifest, write_shard
from pswire.cluster import Task
from pswire.errors import CheckpointError, PSError
from pswire.model.log import Snapshotted
from pswire.model.plan import PlacedVariable, Plan, SnapshotOrder
from pswire.model.saved import Shard
from pswire.model.status import Saving
from pswire.model.tensor import Array

log = logging.getLogger("psserver")


@dataclass(eq=False)
class _Save:
    """A checkpoint from its order until the log settles it as complete or failed.

    Attributes:
        order: the plan's order.
        closed: number of rounds closed here when its plan was approved; the next round is its own.
        frozen: this server's values, without those already written; None before its round has run.
        rounds: the rounds of the dynamic tables that it has.
        shard: answered when the shard is written.
        manifest: answered when the manifest is written; None before the chief asks for it.
        spare: with copies, all values that lie here, from which it saves anew where a server is gone; None once they
            are used, or were given up.
        older: what it has saved before it did so.
        led: names of what this server saves of it, as it was when the values were frozen.
        back: the server that comes back and reads it; None for an ordinary checkpoint.
    """

    order: SnapshotOrder
    closed: int
    frozen: Frozen | None = None
    rounds: Mapping[str, int] = field(default_factory=dict)
    shard: Future[Shard] = field(default_factory=Future)
    manifest: Future[Shard] | None = None
    spare: Frozen | None = None
    older: list[Frozen] = field(default_factory=list)
    led: Set[str] = frozenset()
    back: int | None = None


@dataclass(frozen=True)
class Needed:
    """The checkpoints that the writer of a new manifest must not remove.

    Attributes:
        busy: paths of other checkpoints that are being written.
        later: full paths of checkpoints from which later variables take their values.
    """

    busy: Collection[str]
    later: Collection[str]


class Snapshots(RoundParticipant):
    """The checkpoints that one server is taking. Guarded by the core's lock.

    A server begins to write its shard as soon as the round has run, and does not wait for the chief to ask. So it holds
    the old values no longer than its disk takes.

    Args:
        store: the variables.
        rounds: the rounds after which values are frozen.
        restores: the restores, which need some checkpoints kept.
        bases: the checkpoints to which changes may be saved.
        place: the storage of checkpoints.
        limit: bytes of old values that may be held for checkpoints being written; 0 for no limit.
        tally: counts shards and bytes.

    Attributes:
        saves: the checkpoints, by the ids of the plans that order them.
    """

    def __init__(
        self,
        store: Store,
        rounds: Rounds,
        restores: Restores,
        bases: Bases,
        place: Storage,
        limit: int,
        tally: ServerCounters,
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._restores = restores
        self._bases = bases
        self._place = place
        self.limit = limit
        self._tally = tally
        self.saves: dict[bytes, _Save] = {}
        self._excess = 0  # bytes by which the waiting round would exceed the limit

    def __len__(self) -> int:
        return len(self.saves)

    def abandon(self, error: PSError) -> list[Effect]:
        """Gives up all saves, and fails the calls that wait for them."""
        saves, self.saves = self.saves, {}
        return [Fail(future, error) for save in saves.values() for future in (save.shard, save.manifest) if future]

    # ---- From the order to the end ----

    def order(self, plan: Plan) -> None:
        """Registers the checkpoint that an approved plan orders, if it orders one."""
        if plan.snapshot is not None:
            self.saves[plan.id] = _Save(plan.snapshot, self._rounds.closed)

    def committed(self, job: ReadyRound, given: Mapping[int, Value]) -> Sequence[Effect]:
        """Freezes the values after a round whose plan orders a checkpoint. Costs no copy.

        Held arrays never change, and of held tables rounds set aside the rows that they write. Where there are dynamic
        tables, the thread for arrays does nothing else meanwhile.
        """
        save = self.saves.get(job.plan.id) if self.saves else None
        if save is None:
            return ()  # no checkpoint ordered, or it has failed on another server already
        try:
            return self._freeze(job, save)
        except Exception as bug:  # our bug: the round is done, and the checkpoint alone has failed
            log.exception("the values of round %d could not be kept for %s", job.round, save.order.path)
            return [Fail(save.shard, self._error(f"internal error: {bug!r}; see the server's log"))]

    def _freeze(self, job: ReadyRound, save: _Save) -> list[Effect]:
        generation = self._rounds.generations.get(save.order.returns)
        save.back = generation.returns.server if generation is not None and generation.returns is not None else None
        save.led = self._led(save)
        if save.back == self._store.server and not save.led:
            return []  # the others save what it has
        try:
            frozen = self._hold(job, save, partial(self._leads, save))
            spare = self._hold(job, save, self._has) if self._store.copied else None
        except PSError as error:  # the round is over, and is not touched by it
            return [Fail(save.shard, self._error(f"a table cannot be saved: {error.message}"))]
        save.frozen, save.spare = frozen, spare
        return self._write(save, frozen)

    def _leads(self, save: _Save, variable: PlacedVariable) -> bool:
        """Returns whether this server is the one to save a variable; one that moves leaves it to another, if it can."""
        others = [s for s in variable.servers if s != save.back and s not in self._store.gone]
        return self._store.leads(others or variable.servers)

    def _has(self, variable: PlacedVariable) -> bool:
        return self._store.server in variable.servers

    def _hold(self, job: ReadyRound, save: _Save, which: Callable[[PlacedVariable], bool]) -> Frozen:
        """Holds some of the variables, and of the dynamic tables."""
        # A variable without a value has lost its creator; the next creator gives it one.
        found = {name: v for name, v in self._named(save) if which(v) and self._store.initialized(v.id)}
        values = dict(zip(found, self._store.freeze(v.id for v in found.values()), strict=True))
        shards = {name: v.spec.shard for name, v in found.items() if save.back is None and v.spec.shard is not None}
        tables = self._hold_tables(save, which)
        return Frozen(save.order, self._store.server, job.round, job.positions, values, shards=shards, tables=tables)

    def _write(self, save: _Save, frozen: Frozen) -> list[Effect]:
        save.shard.add_done_callback(partial(self._tally.written, self._tally.clock()))
        done, ask = partial(self._written, frozen), partial(self._let_go, save, frozen)
        later = None if save.back is None else self._restores.later
        return [Work("files", self._write_shard, (frozen, later), done, save.shard, ask)]

    def _hold_tables(self, save: _Save, which: Callable[[PlacedVariable], bool]) -> dict[str, FrozenTable]:
        """Holds dynamic tables, or what has changed in them since the base that is ordered."""
        tables = sorted((t for t in self._store.tables() if which(t.variable)), key=lambda t: t.part.first)
        if not tables:
            return {}
        base, found = base_of(save.order), dict[str, FrozenTable]()
        path = str(PurePosixPath(save.order.path).with_name(base)) if base else ""
        earlier = [other.rounds for other in self.saves.values() if other.frozen is not None]
        for stored in tables:
            key, table = stored.part.key, stored.table
            least = [self._bases.least(key, table.round), *(rounds[key] for rounds in earlier if key in rounds)]
            table.forget_deletions(min(least))
            frozen = stored.freeze(self._bases.since(path, key))
            found[key] = FrozenPart(stored.part.table, table, frozen, bool(base), stored.slots)
        save.rounds = {**save.rounds, **{stored.part.key: stored.table.round for stored in tables}}
        return found

    def lose(self, server: int) -> list[Effect]:
        """A server is gone: where it would have saved what lies here as well, this one saves anew, of the same round.

        Args:
            server: its number.
        """
        return [effect for save in self.saves.values() for effect in self._stand_in(save, server)]

    def _stand_in(self, save: _Save, server: int) -> list[Effect]:
        frozen, spare, led = save.frozen, save.spare, self._led(save)
        if frozen is None or save.manifest is not None or led <= save.led:
            return []  # the values are not frozen yet, or all parts are written, or it would save the same
        if spare is None:
            save.shard, lost = Future(), Task("ps", server)
            why = (
                f"{lost} was lost while the checkpoint was written, and its values of that round are no longer "
                "kept; save again"
            )
            return [Fail(save.shard, self._error(why))]
        values = {name: value for name, value in spare.values.items() if name in led}
        again = replace(spare, values=values, tables={name: t for name, t in spare.tables.items() if name in led})
        save.older.append(frozen)
        save.frozen, save.spare, save.shard, save.led = again, None, Future(), led
        return self._write(save, again)

    def _led(self, save: _Save) -> Set[str]:
        """Returns names of what this server is the one to save."""
        tables = {each.part.key for each in self._store.tables() if self._leads(save, each.variable)}
        return tables.union(name for name, variable in self._named(save) if self._leads(save, variable))

    def _named(self, save: _Save) -> Iterator[tuple[str, PlacedVariable]]:
        """Returns the arrays that are saved, by their names in a file."""
        if save.back is None:
            return ((_name_in_file(variable), variable) for variable in self._saved())
        return ((name_of(variable), variable) for variable in self._held_by(save.back))

    def _saved(self) -> list[PlacedVariable]:
        """Returns the arrays that all servers save together; of those that share a saved name, the first created."""
        first: dict[str, PlacedVariable] = {}
        for _, variable in sorted(self._store.variables.items()):
            if variable.spec.part is None:
                first.setdefault(_name_in_file(variable), variable)
        return [variable for name, variable in first.items() if name]

    def _held_by(self, server: int) -> list[PlacedVariable]:
        """Returns the arrays that a server held which comes back."""
        return [v for _, v in sorted(self._store.variables.items()) if v.spec.part is None and server in v.servers]

    def settle(self, entry: Snapshotted) -> list[Effect]:
        """Drops a checkpoint that is complete or failed; removes the shard of a failed one."""
        save = self.saves.pop(entry.plan_id, None)
        if save is None:
            return []
        effects: list[Effect] = [Work("files", self._remove, (older,)) for older in save.older]
        if not entry.error:
            self._bases.note(save.order.path, save.rounds)
            return effects
        self._bases.forget(save.order.path)
        effects.append(Fail(save.shard, self._error(f"the checkpoint was cancelled: {entry.error}")))
        if save.frozen is not None:
            effects.append(Work("files", self._remove, (save.frozen,)))
        return effects

    def hopeless(self) -> list[Effect]:
        """Fails the saves whose round will not come."""
        found = ((save.shard, self._why_never(plan_id, save)) for plan_id, save in self.saves.items())
        return [Fail(shard, error) for shard, error in found if error is not None]

    def _error(self, why: str) -> CheckpointError:
        return CheckpointError(why, str(self._store.task))

    def _why_never(self, plan_id: bytes, save: _Save) -> CheckpointError | None:
        """Returns why a save will get no values; None if it has some, or may still get them."""
        if save.frozen is not None:
            return None
        refused = self._rounds.refused.get(plan_id)
        if refused is not None:
            return self._error(f"the compiled step that saves it was rejected: {refused.message}")
        if self._rounds.closed > save.closed:
            return self._error(
                f"the round to be saved as {save.order.path!r} failed, or the workers that began it were lost; save "
                "again"
            )
        return None

    # ---- What it holds ----

    @property
    def held(self) -> int:
        """Bytes of old values that are held for checkpoints."""
        return self._held(())

    @property
    def saving(self) -> tuple[Saving, ...]:
        """The checkpoints that are being written here, with their bytes not yet written."""
        return tuple(
            Saving(
                frozen.order.path,
                frozen.round,
                sum(value.nbytes for value in (*frozen.values.values(), *frozen.tables.values())),
            )
            for frozen in self._frozen()
        )

    def blocks(self, job: ReadyRound) -> bool:
        """Returns True if a round must wait, as too many old values would be held with those that it replaces.

        What is held for the loss of a server is given up before that.
        """
        if not (self.limit and self.saves):
            self._excess = 0
            return False
        blocked, ids = self._excess > 0, job.prepared.replaces
        self._excess = self._held(ids) - self.limit
        if self._excess > 0 and any(save.spare for save in self.saves.values()):
            for save in self.saves.values():
                save.spare = None
            self._excess = self._held(ids) - self.limit
        if self._excess > 0 and not blocked:
            log.info("round %d waits until more of a checkpoint is written (--snapshot-limit)", job.round)
        return self._excess > 0

    def _held(self, replaced: Iterable[int]) -> int:
        """Returns the bytes of frozen values that no variable has any more once the `replaced` ones have new values."""
        writes = frozenset(replaced)
        kept = {id(value) for number, value in self._store.values().items() if number not in writes}
        holding = [one for save in self.saves.values() for one in (save.frozen, save.spare, *save.older) if one]
        memory: dict[int, int] = {}
        for value in (value for frozen in holding for value in frozen.values.values()):
            memory |= value.memory()
        held = sum(nbytes for key, nbytes in memory.items() if key not in kept)
        return held + sum(table.aside for frozen in holding for table in frozen.tables.values())

    def _frozen(self) -> Iterator[Frozen]:
        return (save.frozen for save in self.saves.values() if save.frozen is not None)

    # ---- For the chief ----

    def ask(self, plan_id: bytes, manifest: str, future: Future[Shard]) -> list[Effect]:
        """Answers the chief once the shard is written, or writes the manifest and then answers.

        A resend gets the same answer.
        """
        save = self.saves.get(plan_id)
        if save is None or (manifest and save.frozen is None):
            return [Fail(future, self._error("this server is not writing the checkpoint that was asked for"))]
        if not manifest:
            return [Run(save.shard.add_done_callback, (partial(_follow, future),))]
        if save.manifest is not None:
            return [Run(save.manifest.add_done_callback, (partial(_follow, future),))]
        save.manifest = Future()
        save.manifest.add_done_callback(partial(_follow, future))
        work = self._write_manifest, (save.frozen, manifest)
        return [Work("files", *work, future=save.manifest, asks=partial(self._needed, save))]

    # ---- While and after files are written; under the lock ----

    def _let_go(self, save: _Save, frozen: Frozen, name: str) -> tuple[None, bool]:
        """Releases the array of a variable whose bytes are written; answers True if a waiting round may run."""
        if save not in self.saves.values():
            raise CheckpointError(
                "the checkpoint is no longer wanted, because it was cancelled or the job was restarted"
            )
        # Rounds look again only once this may let one run: a look at many small variables takes longer than a write.
        waited = self._excess > 0
        if name not in frozen.values:  # of a dynamic table, which lets go of its rows by itself
            return None, waited
        self._excess -= frozen.values.pop(name).nbytes
        return None, waited and self._excess <= 0

    def _written(self, frozen: Frozen, shard: Shard | None, error: PSError | None, now: float) -> list[Effect]:
        frozen.values.clear()
        frozen.tables.clear()
        return []

    def _needed(self, but: _Save) -> tuple[Needed, bool]:
        others = {str(PurePosixPath(save.order.path)) for save in self.saves.values() if save is not but}
        return Needed(others, self._restores.needed), False

    # ---- In the thread for files ----

    def _write_shard(self, frozen: Frozen, later: bytes | None, let_go: Callable[[str], None]) -> Shard:
        with naming(self._store.task):
            if later is not None:
                path = str(frozen.directory / LATER)
                with told(self._place.full(path), "written"):
                    self._place.put(path, later)  # the same from each server
            return write_shard(self._place, frozen, self._get, let_go)

    def _get(self, value: FrozenValue) -> Iterator[Array]:
        return map(self._store.device.get, value.pieces())

    def _write_manifest(self, frozen: Frozen, text: str, needed: Callable[[], Needed]) -> Shard:
        with naming(self._store.task):
            return write_manifest(self._place, frozen, text, lambda: needed().busy, needed().later)

    def _remove(self, frozen: Frozen) -> None:
        try:
            remove_shard(self._place, frozen)
        except Exception as error:  # object stores have errors of their own
            log.warning("cannot remove the part of the failed checkpoint %s: %s", frozen.order.path, error)


def _name_in_file(variable: PlacedVariable) -> str:
    """Returns the name of a variable's tensor in its file: shards of one variable have names of their own."""
    return variable.spec.saved_name if variable.spec.shard is None else variable.spec.name


def _follow(future: Future[Shard], other: Future[Shard]) -> None:
    """Answers a future like another one, unless its caller has gone away."""
    error = other.exception()
    settle(future, None if error else other.result(), error)
