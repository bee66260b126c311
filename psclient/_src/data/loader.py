"""The loader of a front end: a distributed dataset with batches on the host, as a loop and a checkpoint see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from psclient._src.data.distributed import DistributedDataset
from psclient._src.options import InputOptions


class BaseLoader:
    """Batches that workers share.

    Args:
        strategy: the strategy that distributes them.
        data: as `experimental_distribute_dataset` takes it.
        prefetch: functions of a batch that return the ids to be looked up next, by where they are looked up; None to
            find them out.
    """

    _saved_by_name_alone: ClassVar[bool] = True

    def __init__(self, strategy: Any, data: object, prefetch: Mapping[Any, Callable[[Any], Any]] | None) -> None:
        options = InputOptions(experimental_prefetch_to_device=False, prefetch=prefetch)
        self._batches: DistributedDataset = strategy.experimental_distribute_dataset(data, options)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `ps.train.Checkpoint(data=loader)`, from which any loop continues."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues after the batch at which the restored checkpoint was saved."""
        self._batches.load_state_dict(state_dict)

    def epochs(self, count: int) -> Iterator[int]:
        """Returns an iterator over the remaining epochs, so that a script that resumes or joins skips finished ones.

        Args:
            count: the number of all epochs, finished ones included.
        """
        return self._batches.epochs(count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)
