"""What became of a restore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from psclient.train.graph import Tracked
from psclient.variables import Variable
from pswire.manifest import Manifest

COUNTER = "save_counter"
"""The path of the count that each `Checkpoint` keeps; it is not asked for."""


class LoadStatus:
    """What `Checkpoint.restore` gives: says, as of when it is asked, what of a checkpoint has found its place.

    Source: the load status of `tf.train.Checkpoint.restore`.

    Args:
        path: of the checkpoint.
        manifest: what it has; None where nothing was restored, and nothing had to be.
        explore: finds what is tracked now.
        given: the variables that got a value when it was restored, with the names of their tensors.
        later: whether a variable that was created since began with a restored value.

    Attributes:
        path: as given.
        restored: False where nothing has changed, since this process has come back to a running job.
    """

    def __init__(
        self,
        path: str,
        manifest: Manifest | None,
        explore: Callable[[], Tracked],
        given: dict[str, Variable],
        later: Callable[[Variable], bool],
    ) -> None:
        self.path = path
        self.restored = manifest is not None
        self._manifest = manifest
        self._explore = explore
        self._given = dict(given)
        self._ids = {id(v) for v in given.values()}
        self._later = later

    def assert_consumed(self) -> Self:
        """Checks that each value of the checkpoint is some object's, and each object has got its value.

        Returns:
            Itself.

        Raises:
            AssertionError: it is not so; both lists are in it.
        """
        unused, without = self._unused(), self._without()
        if unused or without:
            raise AssertionError(
                f"of the checkpoint {self.path!r} nothing tracked takes {_listed(unused)}; it has nothing for "
                f"{_listed(without)}"
            )
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Checks that all that is tracked now has got its value; the checkpoint may have more.

        Returns:
            Itself.

        Raises:
            AssertionError: something has got none; also what the checkpoint has and nobody takes is in it.
        """
        without = self._without()
        if without:
            raise AssertionError(
                f"the checkpoint {self.path!r} has nothing for {_listed(without)}; what it has and nothing tracked "
                f"takes: {_listed(self._unused())}"
            )
        return self

    def assert_nontrivial_match(self) -> Self:
        """Checks that anything at all but the count of saves has got its value.

        Returns:
            Itself.

        Raises:
            AssertionError: nothing has.
        """
        tracked = self._explore()
        found = [path for path, v in tracked.variables.items() if path != COUNTER and self._has_value(v)]
        if self._manifest and not found and not set(tracked.stateful) & set(self._manifest.state):
            raise AssertionError(
                f"nothing of the checkpoint {self.path!r} was restored: it has {_listed(self._unused())}, and what is "
                f"tracked is {_listed(self._without())}"
            )
        return self

    def expect_partial(self) -> Self:
        """Itself: nothing here warns of values that nobody takes, so that there is nothing to silence."""
        return self

    def _has_value(self, v: Variable) -> bool:
        return id(v) in self._ids or self._later(v)

    def _without(self) -> list[str]:
        """The paths of what is tracked and has got no value."""
        if self._manifest is None:
            return []
        tracked = self._explore()
        found = [path for path, v in tracked.variables.items() if path != COUNTER and not self._has_value(v)]
        return found + [path for path in tracked.stateful if path not in self._manifest.state]

    def _unused(self) -> list[str]:
        """What the checkpoint has and nothing that is tracked takes: paths, or names where it has no paths."""
        if self._manifest is None:
            return []
        tracked = self._explore()
        taken = {path: v for path, v in tracked.variables.items() if self._has_value(v)}
        if self._manifest.objects:
            left = [path for path in self._manifest.objects if path != COUNTER and path not in taken]
        else:
            names = set(self._given) | {v.name for v in taken.values()}
            left = [name for name in self._manifest.tensors if name not in names]
        states = [path for path in self._manifest.state if not path.startswith(".") and path not in tracked.stateful]
        return left + states


class NothingRestored(LoadStatus):
    """What `restore(None)` gives: there was no checkpoint yet, and the variables are as they were created."""

    def __init__(self) -> None:
        super().__init__("", None, Tracked, {}, lambda v: False)

    def assert_consumed(self) -> Self:
        """Raises `AssertionError`: nothing was restored."""
        raise AssertionError("restore(None) restores nothing; there was no checkpoint")

    assert_existing_objects_matched = assert_nontrivial_match = assert_consumed


def _listed(words: list[str]) -> str:
    shown = ", ".join(repr(word) for word in sorted(words)[:20])
    more = f" and {len(words) - 20} more" if len(words) > 20 else ""
    return f"{shown}{more}" if words else "nothing"
