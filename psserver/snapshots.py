"""Checkpoints that are being taken and read: which round's values are frozen, and who waits."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from safetensors import SafetensorError

from psserver import checkpoint
from psserver.answers import Answer, Submit, working
from psserver.checkpoint import Frozen, Restored
from psserver.job import Job
from psserver.store import Store
from pswire.api import RestoreOrder, RestoreReply, Shard
from pswire.cluster import Task
from pswire.errors import CheckpointError, PSError
from pswire.spec import Variable
from pswire.tensor import Array


class Snapshots:
    """Guarded by the core's lock, but for `read` and `first_value`, which work on files.

    Args:
        task: this server.
        store: the variables.
        root: the directory below which checkpoints are.
        submit: runs the work on files.

    Attributes:
        begun: numbers of the variables whose first value here was a restored checkpoint's.
    """

    def __init__(self, task: Task, store: Store, root: Path, submit: Submit) -> None:
        self._task = task
        self._store = store
        self._root = root
        self._submit = submit
        self._frozen: dict[bytes, Frozen] = {}
        self._waiting: list[tuple[bytes, str, Future[Shard]]] = []
        self._restores: dict[tuple[str, int], Future[RestoreReply]] = {}
        self._restored: Restored | None = None
        self.begun: set[int] = set()

    def clear(self) -> list[Future[Shard]]:
        """Forgets all; returns who still waits."""
        waiting = [future for *_, future in self._waiting]
        self._waiting.clear()
        self._frozen.clear()
        self._restores.clear()
        self._restored = None
        self.begun.clear()
        return waiting

    # ---- Saving ----

    def freeze(self, job: Job) -> None:
        """After a round: keeps its values if its plan orders a checkpoint. Arrays never change: this is free."""
        order, server = job.plan.snapshot, self._store.server
        if order is None or server not in order.servers:
            return
        # One without a value has lost its creator, and whoever creates it next gives it one.
        mine = [v for v in self._saved() if min(v.servers) == server and self._store.initialized(v.id)]
        values = {v.spec.saved_name: self._store.value(v.id) for v in mine}
        self._frozen[job.plan.id] = Frozen(order, server, job.round, job.positions, values)

    def _saved(self) -> list[Variable]:
        """What all servers save together: of variables that always have one value the first created."""
        first: dict[str, Variable] = {}
        for _, variable in sorted(self._store.variables.items()):
            first.setdefault(variable.spec.saved_name, variable)
        return [variable for name, variable in first.items() if name]

    def thaw(self, plan_id: bytes) -> None:
        """A checkpoint is complete, or failed: its values are not needed any more."""
        self._frozen.pop(plan_id, None)

    def ask(self, plan_id: bytes, manifest: str, future: Future[Shard]) -> None:
        """Somebody waits for a shard, or for the manifest, to be written."""
        self._waiting.append((plan_id, manifest, future))

    def answers(self) -> list[Answer]:
        """Work for those whose round has run."""
        ready = [waiter for waiter in self._waiting if waiter[0] in self._frozen]
        self._waiting = [waiter for waiter in self._waiting if waiter not in ready]
        return [self._work(self._frozen[plan_id], manifest, future) for plan_id, manifest, future in ready]

    def _work(self, frozen: Frozen, manifest: str, future: Future[Shard]) -> Answer:
        return lambda: self._submit(working(future, lambda: self._write(frozen, manifest)))

    def _write(self, frozen: Frozen, manifest: str) -> Shard:
        try:
            return checkpoint.write(self._root, frozen, manifest, self._store.device.get)
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            if isinstance(error, PSError):
                raise
            raise CheckpointError(f"cannot write {frozen.order.path}: {error}", str(self._task)) from error

    # ---- Restoring ----

    def restoring(self, path: str, ordinal: int) -> tuple[Future[RestoreReply], bool]:
        """The future of a restore, and whether this process is the first that asks for it.

        All processes run one script, so the n-th restore of each is the same one. The first does it; whoever comes to
        it later must not undo what has been pushed since.
        """
        known = self._restores.get((path, ordinal))
        if known is not None:
            return known, False
        future = self._restores[path, ordinal] = Future()
        return future, True

    def open(self, path: str) -> Restored:
        """Opens a checkpoint, without the lock; raises `PSError` if that is not possible."""
        try:
            return Restored.open(self._root, path)
        except OSError as error:
            if isinstance(error, PSError):
                raise
            raise CheckpointError(f"cannot read {path!r}: {error}", str(self._task)) from error

    def read(self, path: str, order: RestoreOrder, variables: list[Variable]) -> tuple[Restored, dict[int, Array]]:
        """Reads a checkpoint's values, without the lock; raises `PSError` if one is missing or does not fit."""
        restored = self.open(path)
        if order.names is None:
            names = {v.id: v.spec.saved_name for v in variables if v.spec.saved_name}
        else:
            names = {id: name for name, id in order.names.items()}
        put = self._store.device.put
        found = [(v, names[v.id]) for v in variables if v.id in names]
        return restored, {v.id: put(restored.read(name, v.spec.tensor, order.cast)) for v, name in found}

    def restored(self, restored: Restored, values: dict[int, Array], order: RestoreOrder) -> None:
        """The variables have the checkpoint's values; those created later will get theirs."""
        self._store.commit(values)
        self._restored = restored if order.late else None

    def failed(self, future: Future[RestoreReply]) -> None:
        """A restore failed; who asks again tries again."""
        self._restores = {key: other for key, other in self._restores.items() if other is not future}

    def first_value(self, variable: Variable) -> Array | None:
        """What the restored checkpoint has for a variable that is created only now; None if it has nothing.

        One that is saved as another begins as its creator says: the other may have changed since the restore.
        """
        restored = self._restored
        if restored is None or variable.spec.saved_as is not None or variable.spec.name not in restored:
            return None
        value: Array = self._store.device.put(restored.read(variable.spec.name, variable.spec.tensor))
        return value
