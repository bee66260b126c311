"""Datasets whose batches server 0 assigns, whole, to whichever worker asks next."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from psclient._src.arrays.nest import Nest
from psclient._src.data.adapters import Batch, Indexable
from psclient._src.data.assigned import AssignedBatches
from psclient._src.data.distributed import DatasetStep, DistributedDataset, cut
from psclient._src.data.learned import takes_hints
from pswire.model.log import Position


class DynamicDataset(DistributedDataset):
    """A dataset whose global batches server 0 assigns, whole, to whichever worker asks next.

    A fast worker gets more of them, and one that comes late gets work at once. All workers have the same dataset, with
    the same seed, and know a batch by its number. Within a worker a batch is cut into slices, one for each replica.

    Args:
        dataset: of global batches, of which any can be read by its number: an `ArrayDataset`, a list of batches, or a
            `MapDataset` of grain.
        group: the workers, each of which makes rounds of its own.
        number: the dataset's number, in the order in which the script distributes its datasets.
        passes: shared by all datasets of a strategy.
        options: the device that batches are put on.

    Raises:
        TypeError: the dataset is of no known kind, or its batches have to be read one after the other.
        ValueError: the workers make their rounds together; the dataset is not batched.
        ConfigError: server 0 is of a version that assigns no batches.
    """

    def _set_up(self, dataset: object) -> None:
        super()._set_up(dataset)
        group, number, source = self._group, self._number, self._source
        if group.chunk_calls is None:
            raise ValueError(
                "AutoShardPolicy.DYNAMIC assigns whole batches to asynchronous workers, but in this "
                "strategy all replicas split each batch; use AUTO, or consistency=ps.Async() or "
                "ps.BoundedStaleness(k)"
            )
        if not isinstance(source, Indexable):
            raise TypeError(
                "AutoShardPolicy.DYNAMIC needs batches that can be read by number, but a "
                f"{type(dataset).__name__} is read in order; pass a ps.ArrayDataset, a list of batches or a "
                "grain MapDataset, or use AUTO"
            )
        least = 2 * self._depth if self._options.prefetch else 1  # those that rounds look up, or hint at, are known
        begins, trains = partial(group.begins, number), partial(group.trains, number)
        self._assigned = AssignedBatches(group.chunk_calls, number, begins, trains, source, least)
        self._begun: tuple[tuple[Position, ...], int] | None = None
        self._at = Position(number, 0, 0)

    @property
    def _depth(self) -> int:
        # A batch that is known here is one that no other worker gets.
        return 1 + any(map(takes_hints, self._wanted))

    def _standing(self) -> Position:
        """Where the workers are: who comes late begins there, and nobody does again what others have done."""
        if self._group.chunk_calls is None:
            raise RuntimeError(
                f"dataset {self._number} uses AutoShardPolicy.DYNAMIC, which needs asynchronous workers, "
                "but set_consistency made them synchronous; iterate a dataset with AUTO here, or change "
                "the consistency back before this pass"
            )
        begun = self._group.begins(self._number), self._group.restores
        if begun != self._begun:
            self._begun = begun
            self._group.assigned[self._number] = self._assigned
            *before, last = self._assigned.look()
            # Where the newest pass is done, and something is missing of one before it, that is to be done first.
            self._at = before[-1] if before and not (last.index or last.returned) else last
        return self._at

    def _steps(self, epoch: int, index: int) -> Iterator[DatasetStep]:
        assigned, depth = self._assigned, self._depth
        assigned.begin(epoch)
        while True:
            assigned.coming(depth)
            self._group.boundary(self._number)
            chunk = assigned.next()
            if chunk is None:
                break
            batch = assigned.batch(chunk)
            parts = self._slices(batch)
            assigned.ask_ahead()
            index = chunk.examples.index + 1 if chunk.epoch == epoch else index
            ahead = map(self._slices, assigned.coming(depth)) if self._options.prefetch else ()
            yield DatasetStep(epoch, index, True, parts, ahead, batch.examples)
        assigned.end()

    def _slices(self, batch: Batch) -> list[Nest]:
        local = len(self._group.devices)
        return cut(batch, 0, local, -(-batch.examples // local))
