"""Progress of this process through its datasets: the batches in use and the next ones, and the replicas that worked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pswire.model.log import Position

NOBODY: frozenset[int] = frozenset()


@dataclass(eq=False)
class Pass:
    """A pass over a dataset that is under way.

    Attributes:
        dataset: the dataset's number.
        more: True if this process has a batch after the one in use.
        empty: local replicas whose batch in use has no examples.
        worked: local replicas that had examples in batches before it, and may hold back what they made of them.
        made_round: True once this process has made a round since the batch was taken.
        any_more: True if any process had a further batch in the last of these rounds; None until one was answered.
        given: True once a round took what replicas had held back.
        fraction: of the examples of the batch in use those that this process has; None where that is not known.
    """

    dataset: int
    more: bool
    empty: frozenset[int]
    worked: frozenset[int]
    fraction: float | None = None
    made_round: bool = False
    any_more: bool | None = None
    given: bool = False


class Progress:
    """The passes that are under way, the innermost last: one over another dataset may stand inside of one.

    Args:
        replicas: number of local replicas.
    """

    def __init__(self, replicas: int) -> None:
        self._everybody = frozenset(range(replicas))
        self._passes: list[Pass] = []
        self._holding = False
        self._begins: dict[int, Position] = {}
        self._positions: dict[int, Position] = {}

    @property
    def positions(self) -> tuple[Position, ...]:
        """The batch that each dataset gives next."""
        return tuple(self._positions[dataset] for dataset in sorted(self._positions))

    def position(self, dataset: int) -> Position | None:
        """Returns where a dataset stood when this process joined, or in the checkpoint that was restored."""
        return self._begins.get(dataset)

    def begin_at(self, positions: Sequence[Position]) -> None:
        """Datasets go on from these positions."""
        self._begins = {position.dataset: position for position in positions}
        self._positions.update(self._begins)

    def advance(
        self,
        dataset: int,
        epoch: int,
        index: int,
        more: bool,
        empty: frozenset[int],
        fraction: float | None = None,
    ) -> None:
        """Notes what an iterator took: see `DatasetGroup.advance`."""
        self._positions[dataset] = Position(dataset, epoch, index)
        before = next((item for item in self._passes if item.dataset == dataset), None)
        worked = NOBODY if before is None or before.given else before.worked | (self._everybody - before.empty)
        self.finish(dataset)
        self._passes.append(Pass(dataset, more, empty, worked, fraction))

    def finish(self, dataset: int) -> None:
        """A pass has ended, or was broken off; the one around it is in use again."""
        numbers = [item.dataset for item in self._passes]
        if dataset in numbers:
            del self._passes[numbers.index(dataset) :]

    def made_round(self, dataset: int) -> bool:
        """Returns whether this process has made a round since `advance`, answered or not."""
        return any(item.made_round for item in self._passes if item.dataset == dataset)

    def any_more(self, dataset: int) -> bool | None:
        """Returns whether any process had a further batch in the last round since `advance`; None without a round."""
        return next((item.any_more for item in self._passes if item.dataset == dataset), None)

    def sent(self) -> Pass | None:
        """A round was sent, and what was held back is in it; returns the pass that it belongs to."""
        if not self._passes:
            return None
        now = self._passes[-1]
        now.made_round = True
        if not self._holding:
            now.given, now.worked = True, NOBODY
        return now

    @contextlib.contextmanager
    def holding_back(self) -> Iterator[None]:
        """The rounds made within carry nothing of what replicas hold back."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    @property
    def more(self) -> bool:
        """True if this process has a batch after the one in use."""
        return bool(self._passes) and self._passes[-1].more

    @property
    def fraction(self) -> float | None:
        """Of the examples of the batch in use those that this process has; None where it is not known, or none is."""
        return self._passes[-1].fraction if self._passes else None

    @property
    def empty(self) -> frozenset[int]:
        """Local replicas that contribute nothing: they had no examples since the last round, or in the batch in use."""
        return self._passes[-1].empty - self._passes[-1].worked if self._passes else NOBODY
