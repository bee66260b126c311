"""`Checkpoint`: saves and restores what is reached from a few objects."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from psclient._src import context
from psclient._src.distribute.strategy import Strategy
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.variables.variable import Variable
from psclient.train.backend import CheckpointBackend, Content, OpenedCheckpoint
from psclient.train.file_backend import FileBackend
from psclient.train.object_graph import Tracked, check_trackable, children, explore
from psclient.train.options import DEFAULT, CheckpointOptions
from psclient.train.server_backend import ServerBackend
from psclient.train.states import of_json
from psclient.train.status import COUNTER, LoadStatus, NothingRestored
from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.reader import listed

log = logging.getLogger("psclient")


class Checkpoint:
    """Saves and restores variables, optimizers, metrics and other state, by the paths at which they are found.

    Variables are found in lists, tuples, dicts and the attributes of objects. Of an optimizer all state is saved, of an
    object with `state_dict` and `load_state_dict` the state that these exchange; random generators are saved as well. A
    dataset that is given by name continues where it was. With servers a checkpoint also has all other variables of the
    job. State that is not tracked is not restored, except variables that are created after a restore: they begin with
    the value that has their name.

    Every process of a synchronous job makes the same calls, in cross-replica context or outside of every scope. With
    asynchronous processes only the one whose `strategy.is_main_process` is True saves.

    Source: `tf.train.Checkpoint`.

    Args:
        root: an object whose attributes, keys or indices are tracked as if they were given by name.
        objects: objects to track, by the first part of their paths; each becomes an attribute.

    Raises:
        ValueError: an object has nothing to save, or variables belong to different strategies.

    Examples:
        >>> import tempfile
        >>> import psclient as ps
        >>> with ps.MirroredStrategy().scope():
        ...     w = ps.Variable([1.0, 2.0])
        >>> checkpoint = ps.train.Checkpoint(w=w)
        >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
        >>> _ = w.assign([0.0, 0.0])
        >>> _ = checkpoint.restore(path)
        >>> w.numpy()
        array([1., 2.], dtype=float32)
    """

    def __init__(self, root: object = None, **objects: object) -> None:
        if root is not None:
            check_trackable("root", root)
        for name, thing in objects.items():
            check_trackable(name, thing)
            if hasattr(type(self), name) or name.startswith("_"):
                raise ValueError(f"Checkpoint({name}=...): this name is reserved; choose another one")
            setattr(self, name, thing)
        self._root = root
        self._strategy = context.get_strategy() if context.has_strategy() else None
        self._backend: CheckpointBackend | None = None
        self._counter: Variable | None = None
        if self._strategy is not None or self._explore().variables:
            _ = self.save_counter  # So that all processes create it at the same place.

    # ---- What it tracks ----

    def _trackable_children(self) -> Mapping[str, Any]:
        """Returns what is tracked, by name. In any context."""
        own = {name: thing for name, thing in vars(self).items() if not name.startswith("_")}
        counter = {} if self._counter is None else {COUNTER: self._counter}
        return {**dict(children(self._root)), **own, **counter}

    def _explore(self) -> Tracked:
        return explore(self._trackable_children())

    @property
    def strategy(self) -> Any:
        """The strategy of the scope in which it was made, else that of its variables.

        Raises:
            ValueError: the variables belong to several strategies.
        """
        found = {id(v.strategy): v.strategy for v in self._explore().variables.values()}
        found |= {} if self._strategy is None else {id(self._strategy): self._strategy}
        if len(found) > 1:
            raise ValueError(
                "the variables of a checkpoint belong to different strategies; create all of them in one "
                "strategy's scope"
            )
        if self._strategy is None and found:
            (self._strategy,) = found.values()
        return context.get_strategy() if self._strategy is None else self._strategy

    @property
    def save_counter(self) -> Variable:
        """The number of calls of `save`, those before a restore included; int64. In cross-replica context."""
        if self._counter is None:
            extended = self.strategy.extended
            # Its place is said, so that it does not advance the turn of the user's variables.
            with self.strategy.scope(), extended.colocate_vars_with(extended.parameter_devices[:1]):
                self._counter = Variable(np.int64(0), False, "checkpoint/saves")
        return self._counter

    @property
    def backend(self) -> CheckpointBackend:
        """The backend that stores checkpoints for this strategy."""
        if self._backend is None:
            self._backend = backend_of(self.strategy)
        return self._backend

    # ---- Saving ----

    def save(self, file_prefix: str, options: CheckpointOptions | None = None) -> str:
        """Saves a checkpoint with the next number. In cross-replica context, or outside of every scope.

        It returns when the values are frozen; by default the servers write them while training continues.

        Args:
            file_prefix: such as "run/ckpt": a path below the servers' checkpoint root, with `/` between its parts;
                without servers a local path.
            options: how to write it; None for the defaults.

        Returns:
            The path for `restore`, such as "run/ckpt-3"; in an asynchronous process that does not save, its directory.

        Raises:
            CheckpointError: the path is not valid; the checkpoint before could not be written, or is still being
                written with `if_busy="refuse"`; without `enable_async` also if this one could not be written.
            TypeError: the state of an object cannot be written as JSON.
        """
        self.backend.check_path(f"{file_prefix}-1")
        if not self.backend.take_part():
            return posixpath.dirname(file_prefix) or "."
        return self._save_numbered(file_prefix, int(self.save_counter) + 1, options)

    def _save_numbered(
        self,
        file_prefix: str,
        number: int,
        options: CheckpointOptions | None = None,
        delete: tuple[str, ...] = (),
        note: Mapping[str, object] | None = None,
        base: str = "",
    ) -> str:
        """Does what `save` does, with a given number.

        Args:
            file_prefix: as `save` takes them.
            options: as `save` takes them.
            number: last part of the checkpoint's name.
            delete: names of checkpoints beside it that are to be deleted when this one is complete.
            note: more JSON beside the states of objects; its keys begin with a dot.
            base: name of a checkpoint beside it: of dynamic tables only what has changed since is saved; "" for all.
        """
        counter, path = self.save_counter, f"{file_prefix}-{number}"
        self.backend.check_path(path)
        # As in a merge call: the count is part of the round that the checkpoint is of.
        with self._saving("save", options or DEFAULT), context.enter_cross_replica(self.strategy):
            counter.assign_add(1)
            tracked = self._explore()
            state = {**tracked.states(), **(note or {})}
            self.backend.save(path, Content(tracked.variables, state, delete, True, base))
        return path

    def write(self, file_prefix: str, options: CheckpointOptions | None = None) -> str:
        """Saves a checkpoint at a path, without a number and without counting; else as `save`.

        It does not become the newest checkpoint of its directory if there is one already.

        Args:
            file_prefix: path of the checkpoint, as in `save`.
            options: how to write it; None for the defaults.

        Returns:
            The checkpoint's path.
        """
        self.backend.check_path(file_prefix)
        if not self.backend.take_part():
            return posixpath.dirname(file_prefix) or "."
        with self._saving("write", options or DEFAULT):
            tracked = self._explore()
            self.backend.save(file_prefix, Content(tracked.variables, tracked.states()))
        return file_prefix

    @contextmanager
    def _saving(self, verb: str, options: CheckpointOptions) -> Iterator[None]:
        """Around a save: nothing else is being saved, and what comes out of it is waited for where that is asked."""
        with self.strategy.scope():
            context.require_cross_replica(self.strategy, verb)
            self.backend.check_free(options)
            self.sync()
            yield
            if not options.enable_async:
                self.sync()

    def sync(self) -> None:
        """Waits until saved checkpoints are complete. In any process that saves, in any context except a replica's.

        Raises:
            CheckpointError: a checkpoint could not be written; raised once.
        """
        self.backend.sync()

    # ---- Restoring ----

    def restore(self, save_path: str | None, options: CheckpointOptions | None = None) -> LoadStatus:
        """Reads a checkpoint into the tracked objects. In cross-replica context, or outside of every scope.

        Values are matched by path; in a checkpoint without paths by the names of variables. A variable that is created
        later begins with the value that has its name. A process that joins a running job changes nothing: the variables
        on the servers are newer.

        For a directory, a damaged checkpoint is skipped with a warning, and the one before is restored; the damaged one
        is then renamed, for example to "ckpt-7.damaged". A file that cannot be read may be intact, and raises an error.

        Values that are only in the program or only in the checkpoint are listed in one warning of the process in which
        `strategy.is_main_process` is True, at the end of the first step: when `strategy.run` is called a second time,
        or the strategy is closed. `expect_partial` of the status silences it. If nothing matches, the warning comes at
        once.

        Args:
            save_path: a result of `save`, or a directory for its newest checkpoint; None for no checkpoint.
            options: how to read it; None for the defaults.

        Returns:
            The status, to check which values were matched.

        Raises:
            NoCheckpoint: there is none; nothing has changed.
            DamagedCheckpoint: the checkpoint differs from what was saved; for a directory, all checkpoints do.
            CheckpointError: the checkpoint cannot be read, or the one saved before could not be written.
            VariableMismatch: a variable has another shape in the checkpoint, or, without `cast`, another dtype.
        """
        if save_path is None:
            return NothingRestored()
        given: dict[str, Variable] = {}

        def choose(manifest: Manifest) -> Mapping[str, Variable]:
            given.clear()
            given.update(matched(self._explore(), manifest))
            return given

        _ = self.save_counter
        with self.strategy.scope():
            context.require_cross_replica(self.strategy, "restore")
            opened = self.backend.restore(save_path, choose, (options or DEFAULT).cast)
        if opened is None:
            return LoadStatus(save_path, None, self._explore, {})
        leads = self.strategy.is_main_process
        if opened.damaged and leads:
            log.warning(
                "%r was restored instead of a newer checkpoint that is damaged and was renamed to *.damaged: %s",
                opened.path,
                listed(opened.damaged),
            )
        self._load_states(opened)
        status = LoadStatus(opened.path, opened.manifest, self._explore, given, self.backend, opened.damaged)
        if leads:
            status._warn_at_once()
            self.strategy._after_step(status.warn)
        return status

    def read(self, save_path: str, options: CheckpointOptions | None = None) -> LoadStatus:
        """Reads a checkpoint that `write` has written; as `restore`.

        Source: `tf.train.Checkpoint.read`.

        Args:
            save_path: as in `restore`.
            options: as in `restore`.
        """
        return self.restore(save_path, options)

    def _load_states(self, opened: OpenedCheckpoint) -> None:
        for path, thing in self._explore().stateful.items():
            if path in opened.manifest.state:
                thing.load_state_dict(of_json(opened.manifest.state[path]))


def backend_of(strategy: Strategy) -> CheckpointBackend:
    """Returns what keeps the checkpoints of a strategy."""
    return ServerBackend(strategy) if isinstance(strategy.backend, RemoteBackend) else FileBackend(strategy)


def matched(tracked: Tracked, manifest: Manifest) -> dict[str, Variable]:
    """For each tensor that a tracked variable takes that variable: by paths, else by names."""
    variables = manifest.variables
    if manifest.objects:
        pairs = [(manifest.objects.get(path, ""), v) for path, v in tracked.variables.items()]
    else:
        pairs = [(v.name, v) for v in tracked.variables.values()]
    return {name: v for name, v in pairs if name in variables}
