"""Passes over distributed datasets, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from psclient._src.arrays.nest import Nest
from psclient._src.interpreter.lifetimes import Unpicklable


class DistributedIterator(Unpicklable):
    """One pass over a distributed dataset. Used by one thread at a time.

    Args:
        batches: yields the batches of the pass.
        dataset: the distributed dataset.
    """

    def __init__(self, batches: Iterator[Nest], dataset: Any) -> None:
        self._batches = batches
        self._dataset = dataset

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for checkpoints: that of the dataset."""
        found: dict[str, Any] = self._dataset.state_dict()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the batch at which the checkpoint was saved.

        Args:
            state: the result of `state_dict`.
        """
        self._dataset.load_state_dict(state)
        self._batches = self._dataset._going_on()

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Nest:
        return next(self._batches)

    def next(self) -> Nest:
        """Returns the next batch, as `next(iterator)`; raises `StopIteration` at the end of the pass."""
        return next(self._batches)

    def get_next(self) -> Nest:
        """Returns the next batch, as `next(iterator)`; raises `StopIteration` at the end of the pass."""
        return next(self._batches)

    def get_next_as_optional(self) -> Optional:
        """Returns the next batch, if there is one; the end of the pass is not an error."""
        batch = next(self._batches, _NOTHING)
        return Optional(batch, lambda: self.element_spec)

    @property
    def element_spec(self) -> Nest:
        """The shapes and dtypes of a batch, as `element_spec` of the dataset."""
        return self._dataset.element_spec


_NOTHING = object()


class Optional:
    """A batch that may be missing.

    Source: `tf.experimental.Optional`.

    Args:
        value: the batch.
        spec: returns `element_spec`.
    """

    def __init__(self, value: object, spec: Callable[[], Nest]) -> None:
        self._value = value
        self._spec = spec

    def has_value(self) -> bool:
        """Returns whether there is a batch."""
        return self._value is not _NOTHING

    def get_value(self) -> Nest:
        """Returns the batch; raises `ValueError` if there is none."""
        if self._value is _NOTHING:
            raise ValueError("the pass over the dataset has ended; call has_value() first")
        return self._value

    @property
    def element_spec(self) -> Nest:
        """The shapes and dtypes of a batch, as `element_spec` of the dataset."""
        return self._spec()
