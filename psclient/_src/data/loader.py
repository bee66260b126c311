"""What the loaders of the front ends share: a dataset that was distributed, as a loop and a checkpoint see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from psclient._src.data.distributed import DistributedDataset


class BaseLoader:
    """Batches that workers share.

    Args:
        batches: the dataset that was distributed.
    """

    _saved_by_name_alone: ClassVar[bool] = True

    def __init__(self, batches: DistributedDataset) -> None:
        self._batches = batches

    def state_dict(self) -> dict[str, Any]:
        """Its state in `ps.train.Checkpoint(data=loader)`, by which it goes on in any loop."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next batch is the one that followed when the checkpoint was saved that was restored."""
        self._batches.load_state_dict(state_dict)

    def epochs(self, count: int) -> Iterator[int]:
        """Returns the epochs that are still to be done, so that a script that resumes or joins skips the others.

        Args:
            count: of all epochs, those included that are done.
        """
        return self._batches.epochs(count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)
