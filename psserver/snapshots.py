"""Checkpoints that are being taken and read: which round's values are frozen, and who waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import PurePosixPath

from psserver import checkpoint
from psserver.answers import Answer, Submit, do, working
from psserver.checkpoint import Frozen, Restored
from psserver.job import Job
from psserver.places import Place
from psserver.store import Store
from pswire.api import RestoreOrder, RestoreReply, Shard
from pswire.cluster import Task
from pswire.errors import CheckpointError, NoCheckpoint, ServerLost
from pswire.spec import Variable
from pswire.tensor import Array


class Snapshots:
    """Guarded by the core's lock, but for `first_value`, which reads files.

    Args:
        task: this server.
        lock: the core's.
        store: the variables.
        place: where checkpoints are.
        limit: bytes of old values that are held for checkpoints which are being written; 0 for no limit.
        submit: runs array work, one piece after another.
        files: runs work on files, one piece after another.
        progress: what can be answered or run after a change; called under the lock.

    Attributes:
        begun: numbers of the variables whose first value here was a restored checkpoint's.
    """

    def __init__(
        self,
        task: Task,
        lock: threading.Lock,
        store: Store,
        place: Place,
        limit: int,
        submit: Submit,
        files: Submit,
        progress: Callable[[], list[Answer]],
    ) -> None:
        self._task = task
        self._lock = lock
        self._store = store
        self._place = place
        self._limit = limit
        self._submit = submit
        self._files = files
        self._progress = progress
        self._frozen: dict[bytes, Frozen] = {}
        self._newest: dict[PurePosixPath, bytes] = {}
        self._shards: dict[bytes, Future[Shard]] = {}
        self._waiting: list[tuple[bytes, str, Future[Shard]]] = []
        self._restores: dict[tuple[str, int], Future[RestoreReply]] = {}
        self._late: tuple[Restored, bool] | None = None
        self._life = 0
        self.begun: set[int] = set()

    def clear(self) -> list[Future[Shard]]:
        """Forgets all; returns who still waits."""
        waiting = [future for *_, future in self._waiting]
        self._life += 1
        self._waiting.clear()
        self._frozen.clear()
        self._newest.clear()
        self._shards.clear()
        self._restores.clear()
        self._late = None
        self.begun.clear()
        return waiting

    # ---- Saving ----

    def freeze(self, job: Job) -> None:
        """After a round: keeps its values if its plan orders a checkpoint. Held arrays never change: this is free."""
        order, server = job.plan.snapshot, self._store.server
        if order is None or server not in order.servers:
            return
        # One without a value has lost its creator, and whoever creates it next gives it one.
        mine = [v for v in self._saved() if min(v.servers) == server and self._store.initialized(v.id)]
        values = {v.spec.saved_name: self._store.value(v.id) for v in mine}
        self._frozen[job.plan.id] = Frozen(order, server, job.round, job.positions, values)
        self._newest[PurePosixPath(order.path)] = job.plan.id

    def _saved(self) -> list[Variable]:
        """What all servers save together: of variables that always have one value the first created."""
        first: dict[str, Variable] = {}
        for _, variable in sorted(self._store.variables.items()):
            first.setdefault(variable.spec.saved_name, variable)
        return [variable for name, variable in first.items() if name]

    def thaw(self, plan_id: bytes) -> None:
        """A checkpoint is complete, or failed: its values are not needed any more."""
        self._frozen.pop(plan_id, None)
        self._shards.pop(plan_id, None)

    @property
    def held(self) -> int:
        """Bytes of old values that are held for checkpoints."""
        return self._held(())

    def blocks(self, ids: Iterable[int]) -> bool:
        """Whether a round that replaces these variables has to wait: more old values would be held than may be."""
        return bool(self._limit and self._frozen) and self._held(ids) > self._limit

    def _held(self, replaced: Iterable[int]) -> int:
        """Bytes of values that are to be written, and that no variable has once these are replaced."""
        writes = frozenset(replaced)
        kept = {id(value) for number, value in self._store.values().items() if number not in writes}
        held = {id(value): value.nbytes for frozen in self._frozen.values() for value in frozen.values.values()}
        return sum(nbytes for key, nbytes in held.items() if key not in kept)

    def ask(self, plan_id: bytes, manifest: str, future: Future[Shard]) -> None:
        """Somebody waits for a shard, or for the manifest, to be written."""
        self._waiting.append((plan_id, manifest, future))

    def answers(self) -> list[Answer]:
        """Work for those whose round has run."""
        ready = [waiter for waiter in self._waiting if waiter[0] in self._frozen]
        self._waiting = [waiter for waiter in self._waiting if waiter not in ready]
        return [self._work(*waiter) for waiter in ready]

    def _work(self, plan_id: bytes, manifest: str, future: Future[Shard]) -> Answer:
        frozen = self._frozen[plan_id]
        if manifest:
            busy = {str(PurePosixPath(other.order.path)) for other in self._frozen.values() if other is not frozen}
            return lambda: self._files(working(future, lambda: self._write_manifest(plan_id, frozen, manifest, busy)))
        known = self._shards.get(plan_id)
        shard = self._shards.setdefault(plan_id, Future())
        write: Answer = working(shard, lambda: self._write_shard(plan_id, frozen))
        return lambda: self._begin(shard, future, write if known is None else None)

    def _begin(self, shard: Future[Shard], future: Future[Shard], write: Answer | None) -> None:
        """Answers as a shard is written. A resend must not have it written again: its values may be let go of."""
        shard.add_done_callback(partial(_follow, future))
        if write:
            self._files(write)

    def _write_shard(self, plan_id: bytes, frozen: Frozen) -> Shard:
        try:
            with self._naming_itself():
                self._check_newest(plan_id, frozen)
                written = partial(self._let_go, plan_id, frozen)
                return checkpoint.write_shard(self._place, frozen, self._store.device.get, written)
        finally:
            with self._lock:
                frozen.values.clear()
                answers = self._progress()
            do(answers)

    def _let_go(self, plan_id: bytes, frozen: Frozen, name: str) -> None:
        """A variable's bytes are written: rounds need not spare its array, and one may run that waited for this."""
        with self._lock:
            if self._frozen.get(plan_id) is not frozen:
                raise CheckpointError("nobody waits for it any more: it was given up, or the job was started anew")
            del frozen.values[name]
            answers = self._progress() if self._limit else []
        do(answers)

    def _write_manifest(self, plan_id: bytes, frozen: Frozen, text: str, busy: set[str]) -> Shard:
        with self._naming_itself():
            self._check_newest(plan_id, frozen)
            return checkpoint.write_manifest(self._place, frozen, text, busy)

    def _check_newest(self, plan_id: bytes, frozen: Frozen) -> None:
        """Of two orders for one path the later one's files are to stay: those of both would be a mixture."""
        with self._lock:
            newest = self._newest.get(PurePosixPath(frozen.order.path))
        if newest != plan_id:
            raise CheckpointError(f"{frozen.order.path} was given up: a later save has the same path")

    @contextmanager
    def _naming_itself(self) -> Iterator[None]:
        """Has an error of a checkpoint say which server has it."""
        try:
            yield
        except CheckpointError as error:
            raise type(error)(error.message, str(self._task)) from error

    # ---- Restoring ----

    def restore(
        self, path: str, ordinal: int, order: RestoreOrder, future: Future[RestoreReply]
    ) -> tuple[Future[RestoreReply], list[Answer]]:
        """Begins a restore; gives the future of its answer, and what is to be done.

        All processes run one script, so the n-th restore of each is the same one. The first does it; whoever comes to
        it later must not undo what has been pushed since.
        """
        if order.look:
            return future, [lambda: self._files(working(future, lambda: self._open(path).reply))]
        known = self._restores.get((path, ordinal))
        if known is not None:
            return known, []
        self._restores[path, ordinal] = future
        server = self._store.server
        variables = [v for v in self._store.variables.values() if server in v.servers]
        read = partial(self._read, path, order, variables, future, self._life)
        return future, [lambda: self._files(read)]

    def _read(
        self, path: str, order: RestoreOrder, variables: list[Variable], future: Future[RestoreReply], life: int
    ) -> None:
        """Reads the values; what then changes the variables is array work, so that no round runs meanwhile."""
        found: Future[tuple[Restored, dict[int, Array]]] = Future()
        working(found, lambda: self._values(path, order, variables))()
        commit = partial(self._commit, found, order, future, life)
        self._submit(working(future, commit))

    def _values(self, path: str, order: RestoreOrder, variables: list[Variable]) -> tuple[Restored, dict[int, Array]]:
        restored = self._open(path)
        wanted = _tensors(order, variables, self._store.variables)
        specs = {v.id: v.spec.tensor for v in variables}
        with self._naming_itself():
            arrays = restored.read([(name, specs[id]) for id, name in wanted.items()], order.cast)
        put = self._store.device.put
        return restored, {id: put(array) for id, array in zip(wanted, arrays, strict=True)}

    def _commit(
        self,
        found: Future[tuple[Restored, dict[int, Array]]],
        order: RestoreOrder,
        future: Future[RestoreReply],
        life: int,
    ) -> RestoreReply:
        """The variables have the checkpoint's values; those created later will get theirs."""
        with self._lock:
            if life != self._life:
                raise ServerLost("the job was started anew; restart the process", str(self._task))
            error = found.exception()
            # Where there is none the others are told so, too: the first process goes on without one.
            if error is not None and not isinstance(error, NoCheckpoint):
                # Who asks again tries again.
                self._restores = {key: other for key, other in self._restores.items() if other is not future}
            restored, values = found.result()
            self._store.commit(values)
            if order.late:
                self._late = restored, order.cast
        return restored.reply

    def _open(self, path: str) -> Restored:
        with self._naming_itself():
            return Restored.open(self._place, path)

    def first_value(self, variable: Variable) -> Array | None:
        """What the restored checkpoint has for a variable that is created only now; None if it has nothing.

        One that is saved as another begins as its creator says: the other may have changed since the restore.
        """
        restored, cast = self._late or (None, False)
        if restored is None or variable.spec.saved_as is not None or variable.spec.name not in restored:
            return None
        (array,) = restored.read([(variable.spec.name, variable.spec.tensor)], cast)
        value: Array = self._store.device.put(array)
        return value


def _tensors(order: RestoreOrder, variables: list[Variable], known: Mapping[int, Variable]) -> dict[int, str]:
    """For each of these variables that a restore changes the name of its tensor; `known` are those of all servers."""
    if order.names is None:
        return {v.id: v.spec.saved_name for v in variables if v.spec.saved_name}
    # Variables that are saved as one always have one value; only one of them can be named.
    by_saved_name = {known[id].spec.saved_name: name for name, id in order.names.items() if id in known}
    return {v.id: by_saved_name[v.spec.saved_name] for v in variables if v.spec.saved_name in by_saved_name}


def _follow(future: Future[Shard], other: Future[Shard]) -> None:
    """Answers a future as another was, unless its caller has gone away."""
    error = other.exception()
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(other.result())
