"""Restores: the checkpoint that is being read, the values held for a round, and those left for later variables."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from psserver.checkpoints.bases import Bases
from psserver.checkpoints.wanted import RestoredValues, WantedTable, WantedValues, first_of_part
from psserver.effects import Effect, Fail, Reply, Work, naming
from psserver.plans.round import ReadyRound
from psserver.rounds.participants import RoundParticipant
from psserver.state.counters import ServerCounters
from psserver.state.variables import FirstValue, Store
from psserver.values.value import Value
from pswire.checkpoint import strict_json
from pswire.checkpoint.arrays_of_tables import read_arrays
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.storage import Storage
from pswire.checkpoint.table_tensors import BESIDE, beside
from pswire.checkpoint.writer import set_aside
from pswire.errors import Diverged, InvalidRequest, PSError
from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable, Turn
from pswire.model.saved import RestoreOrder, RestoreReply, RestoreStage
from pswire.model.tensor import Array

log = logging.getLogger("psserver")


@dataclass(frozen=True)
class _Wish:
    """A request to restore a checkpoint.

    Attributes:
        session: the session that asked first.
        path: the checkpoint's path, as the process gave it.
        turn: the turn of the restore.
        order: the stage and the names to restore.
        future: answered once the values are read.
    """

    session: int
    path: str
    turn: Turn
    order: RestoreOrder
    future: Future[RestoreReply]


@dataclass(frozen=True)
class _Prepared:
    """The values that a round will commit.

    Attributes:
        wish: the request.
        saved: the checkpoint they were read from.
        values: the values.
    """

    wish: _Wish
    saved: SavedCheckpoint
    values: RestoredValues


@dataclass(frozen=True)
class DeferredRestore:
    """The tensors of a restored checkpoint that are left for variables created later.

    Attributes:
        saved: the restored checkpoint.
        names: names of tensors that the restore gave to no variable.
        cast: True if a variable may have another dtype than its tensor.
    """

    saved: SavedCheckpoint
    names: frozenset[str]
    cast: bool


class Restores(RoundParticipant):
    """The restores of one server. Guarded by the core's lock, but for `first_value`.

    Every server prepares a restore before the round that commits it on all of them, so it fails before anything has
    changed. Every process of a turn gets the same answer.

    Args:
        store: the variables.
        bases: the checkpoints to which changes may be saved.
        place: the storage of checkpoints.
        tally: counts restores.

    Attributes:
        begun: numbers of the variables that got their first value here from a restored checkpoint.
    """

    def __init__(self, store: Store, bases: Bases, place: Storage, tally: ServerCounters) -> None:
        self._store = store
        self._bases = bases
        self._place = place
        self._tally = tally
        self._told: dict[tuple[Turn, RestoreStage], tuple[str, Future[RestoreReply]]] = {}
        self._preparing: _Wish | None = None
        self._prepared: _Prepared | None = None
        self._committed: Turn | None = None
        self._late: DeferredRestore | None = None
        self.begun: set[int] = set()

    def abandon(self, error: PSError) -> list[Effect]:
        """Fails all calls that wait for a restore."""
        return [Fail(future, error) for _, future in self._told.values()]

    # ---- Reading ----

    def ask(
        self, session: int, path: str, turn: Turn, order: RestoreOrder, future: Future[RestoreReply]
    ) -> tuple[Future[RestoreReply], list[Effect]]:
        """Begins a stage of a restore; returns the future of its answer, and the effects.

        The first process of a turn starts the work. Later ones get the same future.
        """
        key = (turn, order.stage)
        if order.stage != "look":
            if key in self._told:
                asked, told = self._told[key]
                # Synchronous processes are told apart by the round that commits: their plans differ.
                differs = asked != path and not turn.generation
                return (future, [Fail(future, _another(path, asked))]) if differs else (told, [])
            newest = max((other for other, _ in self._told), default=turn)
            if turn < newest:
                return future, [Fail(future, _given_up(path, turn))]
            # Restores of earlier rounds are answered to every process.
            self._told = {other: told for other, told in self._told.items() if other[0].round >= turn.round}
            self._told[key] = path, future
        if order.stage != "prepare":
            return future, [Work("files", self._find, (path, order), future=future)]
        wish = _Wish(session, path, turn, order, future)
        self._prepared, self._preparing = None, wish
        server = self._store.server
        variables = [v for v in self._store.variables.values() if server in v.servers]
        wanted = WantedValues.of(self._store, _tensors(order, variables, self._store.variables), order)
        return future, [Work("files", self._prepare, (wish, wanted), then=partial(self._hold, wish))]

    def _prepare(self, wish: _Wish, wanted: WantedValues) -> _Prepared:
        """Reads and checks the values, and checks the tensors left for later variables; in the thread for files."""
        order = wish.order
        with naming(self._store.task):
            saved = SavedCheckpoint.open(self._place, wish.path, PART_BYTES)
            _ = saved.bases  # which are read now, and may be needed later
            values = wanted.read(saved, self._store, order.cast)
            if order.checkers:
                saved.check_rest(_taken(order, wanted.tables), self._store.server, order.checkers)
        return _Prepared(wish, saved, values)

    def _hold(self, wish: _Wish, prepared: _Prepared | None, error: PSError | None, now: float) -> list[Effect]:
        """Keeps the values for the round that commits them, and answers."""
        if error is None and self._preparing is not wish:
            error = _given_up(wish.path, wish.turn)
        if error is not None or prepared is None:
            self._tally.restores["failed"] += 1
            return [Fail(wish.future, error or PSError("the restore contains no values"))]
        self._prepared = prepared
        return [Reply(wish.future, prepared.saved.reply)]

    def _find(self, path: str, order: RestoreOrder) -> RestoreReply:
        """Finds the checkpoint at a path: in a directory the newest one that is not known to be damaged."""
        with naming(self._store.task):
            saved, damaged = SavedCheckpoint.open_whole(self._place, path, order.damaged, PART_BYTES)
        return replace(saved.reply, damaged=damaged)

    # ---- The round that commits ----

    def assigns(self, job: ReadyRound) -> Mapping[int, Value]:
        """Returns the restored values that a round assigns, by the number of their variable.

        Raises:
            InvalidRequest: the round's restore was not prepared here.
        """
        commit = job.prepared.plan.restore
        if commit is None:
            return {}
        prepared = self._prepared
        if prepared is not None and prepared.wish.turn == commit.turn:
            return prepared.values.arrays
        # Every asynchronous process runs this round, and only the first restores: later ones must not undo pushes.
        if job.sequence is not None and self._committed is not None and commit.turn <= self._committed:
            return {}
        raise InvalidRequest(f"the restore of {commit.path!r} was not prepared on this server", str(self._store.task))

    def committed(self, job: ReadyRound, given: Mapping[int, Value]) -> Sequence[Effect]:
        """Lets go of prepared values after a round that committed them, or that shows that their restore was given up.

        Dynamic tables become what was prepared; the thread for arrays does nothing else meanwhile.

        Returns:
            The effects: the server that reads the manifests sets aside the damaged checkpoints that the restore passed
                over.
        """
        prepared = self._prepared
        if prepared is None:
            return ()
        wish, commit = prepared.wish, job.plan.restore
        if commit is not None and commit.turn == wish.turn:
            self._committed = wish.turn
            self._replace(prepared)
            self._tally.restores["restored"] += 1
            if self._store.leads(commit.servers):
                log.info("restored %s, saved after round %d", prepared.saved.full, prepared.saved.manifest.round)
            if wish.order.late:
                self._late = self._left(prepared)
            self._prepared = None
            if wish.order.damaged and self._store.leads(commit.servers):
                return [Work("files", set_aside, (self._place, prepared.saved.path, wish.order.damaged))]
        elif (job.sequence is None and job.round >= wish.turn.round) or wish.session in _makers(job):
            self._prepared = None
        return ()

    def _replace(self, prepared: _Prepared) -> None:
        rounds = dict[str, int]()
        for each in prepared.values.tables:
            each.put()
            self._bases.restart(each.key)
            if each.is_base:
                rounds[each.key] = each.round
        self._bases.note(prepared.saved.path, rounds)

    # ---- Variables that are created later ----

    def _left(self, prepared: _Prepared) -> DeferredRestore:
        order = prepared.wish.order
        given = _tensors(order, list(self._store.variables.values()), self._store.variables)
        names = frozenset(prepared.saved.manifest.variables) - set(given.values())
        return DeferredRestore(prepared.saved, names, order.cast)

    @property
    def needed(self) -> frozenset[str]:
        """Full paths of the checkpoints from which later variables would take their values."""
        late = self._late
        created = {variable.spec.saved_name for variable in self._store.variables.values()}
        if late is None or not late.names - created:
            return frozenset()
        return frozenset(saved.full for saved in (late.saved, *late.saved.bases))

    @property
    def later(self) -> bytes:
        """What this server has of a restored checkpoint beside its variables, as JSON."""
        late = self._late
        said = None if late is None else [late.saved.path, sorted(late.names), late.cast]
        return json.dumps([said, sorted(self.begun)]).encode()

    def adopt(self, text: bytes) -> Callable[[], None]:
        """Reads what another server, with the same variables, gave as `later`; in the thread for files.

        Returns:
            What takes it over, under the lock.

        Raises:
            DamagedCheckpoint, CheckpointError: the checkpoint cannot be opened.
        """
        said, begun = strict_json.items(strict_json.parse(text))
        late = None
        if said is not None:
            path, names, cast = strict_json.items(said)
            saved = SavedCheckpoint.open(self._place, strict_json.text(path), PART_BYTES)
            late = DeferredRestore(saved, frozenset(map(strict_json.text, strict_json.items(names))), cast is True)

        def take() -> None:
            self._late = late
            self.begun.update(map(strict_json.integer, begun))

        return take

    def awaits(self, variable: PlacedVariable) -> bool:
        """Returns True if a part of a dynamic table, which needs no first value, has to get what a checkpoint has."""
        late, spec = self._late, variable.spec
        if late is None or spec.part is None or variable.id in self.begun:
            return False
        return self._store.server in variable.servers and spec.saved_name in late.names

    def first_value(self, variable: PlacedVariable) -> FirstValue | None:
        """Returns the value that the restored checkpoint has for a new variable. Called without the lock.

        A variable that is saved under another's name takes its creator's value: the other may have changed since the
        restore.

        Returns:
            An array on the device, or what a part of a dynamic table begins with; None if the checkpoint has nothing
            for the variable.

        Raises:
            CheckpointError: the tensor cannot be read.
            VariableMismatch: the tensor does not fit the variable.
        """
        late, spec = self._late, variable.spec
        if late is None or spec.saved_as is not None or spec.saved_name not in late.names:
            return None
        with naming(self._store.task):
            if spec.part is not None:
                return first_of_part(late.saved, spec.part, late.cast, self._store.native)
            (array,) = read_arrays(late.saved, [(spec.saved_name, spec.tensor)], late.cast, [spec.shard])
        value: Array = self._store.device.put(array)
        return value


def _taken(order: RestoreOrder, tables: Sequence[WantedTable]) -> set[str]:
    """Returns the tensors that are read for the variables of an order: of a table also what is known of its rows."""
    rows = [table.rows for table in tables if table.rows is not None]
    return {*(order.names or ()), *(beside(name, kind) for name in rows for kind in BESIDE)}


def _makers(job: ReadyRound) -> set[int]:
    return {part.said.session for part in job.parts}


def _another(path: str, asked: str) -> PSError:
    """Returns the error for an asynchronous process that restores another checkpoint than the first process did."""
    return InvalidRequest(
        f"this process restores {path!r}, but another process restored {asked!r} first. Asynchronous processes must "
        "restore the same checkpoints in the same order"
    )


def _given_up(path: str, turn: Turn) -> PSError:
    """Returns the error for a restore that another process has left for a later one; `Diverged` in synchronous mode."""
    why = f"the restore of {path!r} was cancelled, because another process began a later restore"
    if turn.generation:
        return Diverged(f"the processes do not run the same program: {why}")
    return InvalidRequest(why)


def _tensors(
    order: RestoreOrder, variables: list[PlacedVariable], known: Mapping[int, PlacedVariable]
) -> dict[int, str]:
    """Maps the number of each restored variable to its tensor's name; `known` are all servers' variables."""
    if order.names is None:
        return {v.id: v.spec.saved_name for v in variables if v.spec.saved_name}
    # Variables that are saved as one always have one value; only one of them can be named.
    by_saved_name = {known[id].spec.saved_name: name for name, id in order.names.items() if id in known}
    return {v.id: by_saved_name[v.spec.saved_name] for v in variables if v.spec.saved_name in by_saved_name}
