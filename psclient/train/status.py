"""The outcome of a restore."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Self

from psclient._src.variables.variable import Variable
from psclient.train.backend import CheckpointBackend
from psclient.train.object_graph import Tracked
from pswire.checkpoint.manifest import Manifest

log = logging.getLogger("psclient")

COUNTER = "save_counter"
"""The path of the count that each `Checkpoint` keeps; it is not asked for."""

SHOWN = 10
"""Names in a warning."""


class LoadStatus:
    """The result of `Checkpoint.restore`: checks, as of each call, which values of a checkpoint were matched.

    Source: the load status of `tf.train.Checkpoint.restore`.

    Args:
        path: path of the checkpoint.
        manifest: the checkpoint's table of contents; None if nothing was or had to be restored.
        explore: returns the objects that are tracked now.
        given: the variables that were restored, with the names of their tensors.
        backend: knows which variables created since then began with a restored value.
        damaged: names of skipped checkpoints in its directory, with the damage.

    Attributes:
        path: the constructor's argument.
        damaged: the constructor's argument.
        restored: False if nothing has changed because this process has come back to a running job.
    """

    def __init__(
        self,
        path: str,
        manifest: Manifest | None,
        explore: Callable[[], Tracked],
        given: dict[str, Variable],
        backend: CheckpointBackend | None = None,
        damaged: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.damaged = dict(damaged or {})
        self.restored = manifest is not None
        self._manifest = manifest
        self._explore = explore
        self._given = dict(given)
        self._ids = {id(v) for v in given.values()}
        self._backend = backend
        self._partial = False
        self._told: tuple[list[str], list[str]] = [], []

    def assert_consumed(self) -> Self:
        """Checks that each value of the checkpoint was matched by an object, and each tracked object by a value.

        Returns:
            The status itself.

        Raises:
            AssertionError: a value or an object is unmatched; the message has both lists.
        """
        unused, without = self._unused(), self._without()
        if unused or without:
            raise AssertionError(
                f"the checkpoint {self.path!r} and this program differ; not used by the program: {_listed(unused)}; "
                f"not in the checkpoint: {_listed(without)}"
            )
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Checks that each tracked object was matched by a value; the checkpoint may have more.

        Returns:
            The status itself.

        Raises:
            AssertionError: an object is unmatched; the message also has the unmatched values.
        """
        without = self._without()
        if without:
            raise AssertionError(
                f"the checkpoint {self.path!r} does not contain {_listed(without)}; not used by the "
                f"program: {_listed(self._unused())}"
            )
        return self

    def assert_nontrivial_match(self) -> Self:
        """Checks that at least one value was matched, the count of saves aside.

        Returns:
            The status itself.

        Raises:
            AssertionError: no value was matched.
        """
        tracked = self._explore()
        found = [path for path, v in tracked.variables.items() if path != COUNTER and self._has_value(v)]
        if self._manifest and not found and not set(tracked.stateful) & set(self._manifest.state):
            raise AssertionError(
                f"nothing was restored from the checkpoint {self.path!r}: it contains "
                f"{_listed(self._unused())}, but the program has {_listed(self._without())}"
            )
        return self

    def expect_partial(self) -> Self:
        """Silences the warning about unmatched values at the end of the first step.

        Returns:
            The status itself.
        """
        self._partial = True
        return self

    def __repr__(self) -> str:
        if self._manifest is None:
            return f"<{type(self).__name__} of {self.path!r}: nothing was restored>"
        unused, without = self._unused(), self._without()
        matched = len([path for path, v in self._explore().variables.items() if path != COUNTER and self._has_value(v)])
        matched += len([path for path in self._explore().stateful if path in self._manifest.state])
        return (
            f"<{type(self).__name__} of {self.path!r}: {matched} matched; in the checkpoint and not used: "
            f"{_counted(unused)}; in the program and not in the checkpoint: {_counted(without)}>"
        )

    # ---- What is told without being asked for ----

    def _warn_at_once(self) -> None:
        """Warns where something is tracked, and nothing of it is in the checkpoint: then it is likely another one."""
        try:
            self.assert_nontrivial_match()
        except AssertionError:
            if without := self._without():
                self._told = self._unused(), without
                log.warning("%s. Check whether the checkpoint is from another program", self._mismatch(*self._told))

    def warn(self) -> None:
        """Warns of unmatched values, if they were neither reported before nor expected."""
        try:
            lists = self._unused(but_later=True), self._without()
        except ValueError:  # what was tracked is there no more, such as the optimizer of a module
            return
        if any(lists) and not self._partial and lists != self._told:
            log.warning(
                "%s. If this is intended, call expect_partial() on the status to silence this warning",
                self._mismatch(*lists),
            )

    def _mismatch(self, unused: list[str], without: list[str]) -> str:
        return (
            f"the checkpoint {self.path!r} and this program differ: in the checkpoint and not used: "
            f"{_counted(unused)}; in the program and not in the checkpoint: {_counted(without)}"
        )

    # ---- What has found its place ----

    def _has_value(self, v: Variable) -> bool:
        return id(v) in self._ids or (self._backend is not None and self._backend.was_restored(v))

    def _without(self) -> list[str]:
        """The paths of what is tracked and has got no value."""
        if self._manifest is None:
            return []
        tracked = self._explore()
        found = [path for path, v in tracked.variables.items() if path != COUNTER and not self._has_value(v)]
        return found + [path for path in tracked.stateful if path not in self._manifest.state]

    def _unused(self, but_later: bool = False) -> list[str]:
        """Returns what the checkpoint has and nothing tracked takes: paths, or names where it has no paths.

        Args:
            but_later: True to leave out, too, the values that variables have begun with since, tracked or not; and
                those that wait for an optimizer's first step.
        """
        if self._manifest is None:
            return []
        later = self._backend.restored_names() if self._backend and but_later else frozenset()
        tracked = self._explore()
        taken = {path: v for path, v in tracked.variables.items() if self._has_value(v)}
        if self._manifest.objects:
            objects = self._manifest.objects.items()
            left = [path for path, name in objects if path != COUNTER and path not in taken and name not in later]
            waiting = tuple(f"{path}/" for path in tracked.unbuilt) if but_later else ()
            left = [path for path in left if not path.startswith(waiting)]
        else:
            names = set(self._given) | {v.name for v in taken.values()} | later
            left = [name for name in self._manifest.variables if name not in names]
        states = [path for path in self._manifest.state if not path.startswith(".") and path not in tracked.stateful]
        return left + states


class NothingRestored(LoadStatus):
    """The result of `restore(None)`: there was no checkpoint yet, and the variables are as they were created."""

    def __init__(self) -> None:
        super().__init__("", None, Tracked, {})

    def assert_consumed(self) -> Self:
        """Raises `AssertionError`: nothing was restored."""
        raise AssertionError("restore(None) restores nothing, because there was no checkpoint")

    assert_existing_objects_matched = assert_nontrivial_match = assert_consumed


def _counted(words: list[str]) -> str:
    """Returns how many there are, and the first ten names."""
    shown = ", ".join(repr(word) for word in sorted(words)[:SHOWN])
    return f"{len(words)} ({shown}{', ...' if len(words) > SHOWN else ''})" if words else "nothing"


def _listed(words: list[str]) -> str:
    shown = ", ".join(repr(word) for word in sorted(words)[:20])
    more = f" and {len(words) - 20} more" if len(words) > 20 else ""
    return f"{shown}{more}" if words else "nothing"
