"""`CheckpointManager`: several checkpoints in a directory, of which the old ones are deleted."""

from __future__ import annotations

import logging
import posixpath
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from psclient._src import context
from psclient._src.distribute.strategy import Strategy
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.variables.variable import Variable, VariableAggregation
from psclient.train.checkpoint import Checkpoint, backend_of
from psclient.train.options import DEFAULT, CheckpointOptions
from pswire.checkpoint import strict_json
from pswire.checkpoint.reader import listed
from pswire.checkpoint.strict_json import Malformed
from pswire.errors import CheckpointError, NoCheckpoint
from pswire.model.plan import VariableSpec
from pswire.model.tensor import spec_of

log = logging.getLogger("psclient")

FULL_EVERY = 20
"""One of so many checkpoints is whole, where others are deltas."""

NOTE = ".manager"
"""Under which key of a manifest's `state` the list of checkpoints stands."""


def latest_checkpoint(checkpoint_dir: str, strategy: Strategy | None = None) -> str | None:
    """Finds the newest complete checkpoint in a directory, None if there is none. In any context.

    Processes of one job may get different results while one of them saves; in a script that all of them run, give the
    directory itself to `restore`. A checkpoint with a damaged manifest is skipped with a warning.

    Source: `tf.train.latest_checkpoint`.

    Args:
        checkpoint_dir: a path below the servers' checkpoint root; without servers a local directory.
        strategy: the strategy whose servers are asked; by default the current one.

    Returns:
        The checkpoint's path, or None.

    Raises:
        DamagedCheckpoint: the manifests of all checkpoints are damaged.
        CheckpointError: the directory cannot be read.
    """
    try:
        found = backend_of(strategy or context.get_strategy()).look(checkpoint_dir)
    except NoCheckpoint:
        return None
    if found.damaged:
        log.warning("%r is the newest undamaged checkpoint: %s", found.path, listed(found.damaged))
    return found.path


class CheckpointManager:
    """Keeps the newest checkpoints of a directory, and deletes older ones when a new one is complete.

    Every process of a synchronous job makes the same calls. The list of kept checkpoints is in the newest one, so that
    a script that restarts continues with it.

    Source: `tf.train.CheckpointManager`.

    Args:
        checkpoint: the `Checkpoint` that saves and restores.
        directory: path of the directory, as in `Checkpoint.save`.
        max_to_keep: number of checkpoints to keep; None for all.
        keep_checkpoint_every_n_hours: one of the checkpoints to be deleted in this number of hours is kept permanently.
        checkpoint_name: the first part of their names.
        step_counter: a variable, or a value that `int` accepts, that counts the steps.
        checkpoint_interval: `save` saves only if this number of steps has passed since the last save.
        init_fn: called by `restore_or_initialize` if there is no checkpoint.
        delta_interval: as `checkpoint_interval`, but saves deltas between full checkpoints: of a dynamic table only the
            rows that have changed since the checkpoint before, and the keys that were removed. Everything else is
            complete in each checkpoint. Checkpoints that a delta needs are kept as long as the delta, beyond
            `max_to_keep`.
        full_every: one of this number of checkpoints is full, beginning with the first; 20 with a `delta_interval`,
            else 1.

    Attributes:
        checkpoint: the constructor's argument.
        directory: the constructor's argument.
        checkpoint_interval: the number of steps between saves, full or delta.

    Raises:
        ValueError: `max_to_keep` or `full_every` is not positive; the name has a slash; an interval without a counter;
            or both intervals.

    Examples:
        >>> import tempfile
        >>> import psclient as ps
        >>> with ps.MirroredStrategy().scope():
        ...     w = ps.Variable([1.0, 2.0])
        >>> checkpoint = ps.train.Checkpoint(w=w)
        >>> manager = ps.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=2)
        >>> for _ in range(3):
        ...     path = manager.save()
        >>> [path.rpartition("/")[2] for path in manager.checkpoints]
        ['ckpt-2', 'ckpt-3']
        >>> path = manager.restore_or_initialize()
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str,
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        delta_interval: int | None = None,
        full_every: int | None = None,
    ) -> None:
        if max_to_keep is not None and max_to_keep <= 0:
            raise ValueError(
                f"max_to_keep={max_to_keep} would keep no checkpoint; use a positive number, or None to keep all"
            )
        if full_every is not None and full_every <= 0:
            raise ValueError(f"full_every={full_every} would never make a full checkpoint; use a positive number")
        if delta_interval is not None and checkpoint_interval is not None:
            raise ValueError("delta_interval already sets the interval of all saves; leave checkpoint_interval out")
        interval = checkpoint_interval if delta_interval is None else delta_interval
        if interval is not None and step_counter is None:
            raise ValueError("an interval counts steps, so pass step_counter, such as optimizer.iterations")
        if "/" in checkpoint_name:
            raise ValueError(
                f"checkpoint_name={checkpoint_name!r} contains a slash; put the part before it into directory"
            )
        self.checkpoint = checkpoint
        self.directory = directory.rstrip("/") if directory else "."
        self.checkpoint_interval = interval
        self._full_every = full_every or (1 if delta_interval is None else FULL_EVERY)
        self._max_to_keep = max_to_keep
        self._keep_seconds = (keep_checkpoint_every_n_hours or 0) * 3600
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._init_fn = init_fn
        self._recovered = False
        self._damaged = set[str]()  # set aside, or to be passed over
        # Checkpoints go by their names here: a directory that was copied deletes nothing of what it is a copy of.
        self._kept: dict[str, float] = {}  # oldest first, with the times at which they were saved
        self._bases: dict[str, str] = {}  # of those that are deltas, or were to be, the checkpoints before them
        self._preserved = 0.0
        self._doomed: tuple[str, ...] = ()  # to be deleted with the next save, and not known to be gone
        self._remaining = set[str]()  # of those, which the log has
        self._unconfirmed = ""  # saved last
        self._replaced: tuple[float, str] | None = None  # when what it replaces was saved, and the base of that
        self._last_step: int | None = None
        # Who comes to a running job has to save when the others do, whose last step it does not know.
        self._shared_step = None if interval is None else _shared_step(step_counter)
        self._known = False  # to its strategy, by which it is asked to save before processes leave
        if not context.is_default(checkpoint.strategy):
            self._be_known()

    # ---- What there is ----

    @property
    def checkpoints(self) -> list[str]:
        """The managed checkpoints, oldest first, without those that are kept permanently."""
        self._recover()
        self._forget_failed()
        return [self._path(name) for name in self._kept]

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest checkpoint; None if there is none."""
        return next(reversed(self.checkpoints), None)

    def _path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def _be_known(self) -> None:
        """Of several managers of a strategy the last one made saves for those who leave; so it is in every process."""
        if not self._known:
            self._known = True
            self.checkpoint.backend.saves_by(lambda: self.save(check_interval=False))

    def _recover(self) -> None:
        """Goes on with the list that the newest checkpoint has."""
        self._be_known()
        if self._recovered:
            return
        self._recovered = True
        try:
            newest = self.checkpoint.backend.look(self.directory)
        except NoCheckpoint:
            self._preserved = time.time()
            return
        try:
            note = _Note.of(newest.manifest.state.get(NOTE, {}))
        except Malformed as error:
            log.warning(
                "the list of checkpoints in %s is malformed (%s) and was replaced by an empty one", newest.path, error
            )
            note = _Note({}, (), None, {})
        self._kept, self._bases = {**note.kept}, {**note.bases}
        if newest.manifest.base is not None:
            self._bases[_name(newest.path)] = newest.manifest.base.name
        self._kept.setdefault(_name(newest.path), newest.manifest.saved_at)
        self._doomed = tuple(name for name in note.doomed if name not in self._kept)
        self._preserved = time.time() if note.preserved is None else note.preserved
        self._forget_damaged()

    def _forget_damaged(self) -> None:
        """Removes damaged checkpoints from the list; they are never deleted."""
        self._kept = {name: when for name, when in self._kept.items() if name not in self._damaged}
        self._doomed = tuple(name for name in self._doomed if name not in self._damaged)

    # ---- Saving and restoring ----

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: CheckpointOptions | None = None,
    ) -> str | None:
        """Saves a checkpoint, and deletes the oldest. In cross-replica context, or outside of every scope.

        Args:
            checkpoint_number: last part of its name; by default the value of `checkpoint.save_counter`.
            check_interval: True to save only if `checkpoint_interval` steps have passed.
            options: how to write it; None for the defaults.

        Returns:
            The checkpoint's path; None if the interval has not passed, or this asynchronous process does not save.

        Raises:
            CheckpointError: as `Checkpoint.save`.
        """
        self._check_path()
        if (check_interval and not self._is_due()) or not self.checkpoint.backend.take_part():
            return None
        self._recover()
        self.checkpoint.backend.check_free(options or DEFAULT)
        self.sync()
        number = int(self.checkpoint.save_counter) + 1 if checkpoint_number is None else checkpoint_number
        return self._save(number, options or DEFAULT)

    def _check_path(self) -> None:
        """Raises `CheckpointError` where no checkpoint can be saved, in every process and before anything is done."""
        self.checkpoint.backend.check_path(self._path(f"{self._name}-1"))

    def _save(self, number: int, options: CheckpointOptions) -> str:
        name = f"{self._name}-{number}"
        self._damaged.discard(name)
        base = self._base(name)
        when = self._kept.pop(name, None)
        self._replaced = None if when is None else (when, self._bases.get(name, ""))
        self._kept[name] = time.time()
        self._bases = {old: of for old, of in self._bases.items() if old != name} | ({name: base} if base else {})
        self._doomed = tuple(old for old in self._doomed + self._surplus() if old not in self._kept)
        note = {"checkpoints": list(self._kept.items()), "preserved": self._preserved, "deleting": self._doomed}
        note |= {"bases": self._bases} if self._bases else {}
        self._unconfirmed = name
        prefix = self._path(self._name)
        self._count_from_here()
        try:
            more = self._doomed, {NOTE: note}, base
            path = self.checkpoint._save_numbered(prefix, number, CheckpointOptions(), *more)
        except BaseException:
            self._forget()
            raise
        if not options.enable_async:
            self.sync()
        return path

    def _base(self, name: str) -> str:
        """Returns the checkpoint since which changes suffice for a new one: the last; "" where it is to be whole."""
        last = next(reversed(self._kept), "")
        needed = self._needed([last])
        return "" if not last or name in needed or len(needed) >= self._full_every else last

    def _needed(self, names: Iterable[str]) -> list[str]:
        """Returns checkpoints, and those that they need: what a delta has the changes to."""
        found = dict.fromkeys(names)
        for name in [*found]:
            while (name := self._bases.get(name, "")) and name not in found:
                found[name] = None
        return [*found]

    def sync(self) -> None:
        """Waits until saved checkpoints are complete, and the ones they replace are deleted; as `Checkpoint.sync`."""
        try:
            self.checkpoint.sync()
        finally:
            self._forget_failed()
        if self._unconfirmed:
            self._doomed = tuple(name for name in self._doomed if self._remains(name))
            self._unconfirmed = ""

    def _forget_failed(self) -> None:
        """As `_forget`, if what was saved last has failed, whoever was told so."""
        if self._unconfirmed and self.checkpoint.backend.failed(self._path(self._unconfirmed)):
            self._forget()

    def _forget(self) -> None:
        """Forgets what was saved last, for it is no checkpoint; what it was to replace is to be deleted with the next.

        It is itself, should it be complete all the same: only to say that it is the newest may have failed.
        """
        del self._kept[self._unconfirmed]
        self._bases.pop(self._unconfirmed, None)
        if self._replaced is None:
            self._doomed += (self._unconfirmed,)
        else:  # It is whole, where it was.
            when, base = self._replaced
            self._kept = {self._unconfirmed: when, **self._kept}
            self._bases |= {self._unconfirmed: base} if base else {}
        self._unconfirmed = ""

    def _remains(self, name: str) -> bool:
        """Returns whether a checkpoint is still there, though its deletion was ordered."""
        try:
            self.checkpoint.backend.look(self._path(name))
        except NoCheckpoint:
            return False
        except CheckpointError:
            pass  # Broken ones are deleted as well.
        if name not in self._remaining:
            log.info(
                "%s could not be deleted yet: later variables need it, or a server failed (see the "
                "servers' logs); deletion is retried with each save",
                self._path(name),
            )
        self._remaining.add(name)
        return True

    def _is_due(self) -> bool:
        if self.checkpoint_interval is None:
            return True
        last = self._last_step
        if last is None and self._shared_step is not None:
            last = int(self._shared_step)
        return last is None or last < 0 or int(self._step_counter) >= last + self.checkpoint_interval

    def _count_from_here(self) -> None:
        """The interval begins with this step, for whoever comes later as well."""
        self._last_step = None if self._step_counter is None else int(self._step_counter)
        if self._shared_step is not None:
            with self._shared_step.strategy.scope():
                self._shared_step.assign(self._last_step)

    def _surplus(self) -> tuple[str, ...]:
        """Takes out of the list what is more than is kept; what of it is to be deleted."""
        if self._max_to_keep is None:
            return ()
        names = [*self._kept]
        needed = self._needed(names[-self._max_to_keep :])
        surplus = [name for name in names[: -self._max_to_keep] if name not in needed]
        preserved = list[str]()
        for name in surplus:
            if self._keep_seconds and self._kept[name] >= self._preserved + self._keep_seconds:
                self._preserved = self._kept[name]
                preserved.append(name)
        preserved = self._needed(preserved)
        for name in {*surplus, *preserved}:
            self._kept.pop(name, None)
        self._bases = {name: base for name, base in self._bases.items() if name in self._kept}
        return tuple(name for name in surplus if name not in preserved)

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint; if there is none, calls `init_fn`. In the contexts of `save`.

        A damaged checkpoint is skipped with a warning, and the one before is restored. The damaged one is renamed, for
        example to "ckpt-7.damaged", and from then on neither restored, counted nor deleted.

        Returns:
            The path of the restored checkpoint; None if there is none. A process that joins a running job, whose
            variables are newer than any checkpoint, gets the directory, and changes nothing.

        Raises:
            DamagedCheckpoint: all checkpoints are damaged; `init_fn` is not called.
            CheckpointError: as `Checkpoint.restore`.
            VariableMismatch: as `Checkpoint.restore`.
        """
        self._check_path()
        try:
            status = self.checkpoint.restore(self.directory)
        except NoCheckpoint:
            if self._init_fn is not None:
                self._init_fn()
            return None
        self._damaged |= set(status.damaged)
        self._forget_damaged()
        if status.restored:
            self._count_from_here()
        return status.path


@dataclass(frozen=True)
class _Note:
    """A checkpoint's record of the managed ones.

    Attributes:
        kept: by name, oldest first, the times at which they were saved.
        doomed: names of those whose deletion was ordered.
        preserved: time at which the last one was saved that is kept for good; None where that is not said.
        bases: of deltas the names of those to which they have the changes.
    """

    kept: Mapping[str, float]
    doomed: tuple[str, ...]
    preserved: float | None
    bases: Mapping[str, str]

    @classmethod
    def of(cls, state: object) -> _Note:
        """Reads it; older versions noted paths. Raises `Malformed` where it is not such."""
        said, kept = strict_json.fields(state), dict[str, float]()
        for pair in strict_json.items(said.get("checkpoints", [])):
            if len(strict_json.items(pair)) != 2:
                raise Malformed("it is not a list of names and times")
            if name := _name(strict_json.text(pair[0])):
                kept[name] = strict_json.number(pair[1])
        doomed = map(strict_json.text, strict_json.items(said.get("deleting", [])))
        preserved, bases = said.get("preserved"), strict_json.fields(said.get("bases", {}))
        return cls(
            kept,
            tuple(name for path in doomed if (name := _name(path))),
            None if preserved is None else strict_json.number(preserved),
            {name: strict_json.text(base) for name, base in bases.items()},
        )


def _shared_step(step_counter: object) -> Variable | None:
    """The step of the last save, -1 before: on the first server, and in no checkpoint.

    Returns:
        None where nobody has to save when others do, or where steps are counted by each process for itself.
    """
    strategy = step_counter.strategy if isinstance(step_counter, Variable) else None
    if strategy is None or not isinstance(strategy.backend, RemoteBackend) or strategy.backend.group.alone:
        return None
    value = np.array(-1, "int64")
    spec = VariableSpec("checkpoint/step", spec_of(value), False, saved_as="")
    with strategy.scope():
        made: Variable = strategy.extended.create_variable(spec, value, (0,), False, VariableAggregation.NONE)
    return made


def _name(path: object) -> str:
    """The last part of a path; "" where it has none that names something."""
    name = posixpath.basename(str(path))
    return name if name.strip(".") else ""
