"""Progress of this process through its datasets: the batches in use and the next ones, and the replicas that worked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from pswire.cluster import Task
from pswire.model.log import Examples, Position

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
        dealt: which examples of the batch in use each task has; empty where they are not handed out again.
        out: tasks that were left out of a round of updates with the batch in use, though they may live.
    """

    dataset: int
    more: bool
    empty: frozenset[int]
    worked: frozenset[int]
    fraction: float | None = None
    made_round: bool = False
    any_more: bool | None = None
    given: bool = False
    dealt: Mapping[Task, tuple[Examples, ...]] = field(default_factory=dict)
    out: frozenset[Task] = frozenset()


class Progress:
    """The passes that are under way, the innermost last: one over another dataset may stand inside of one.

    Args:
        replicas: number of local replicas.

    Attributes:
        passing: told whether a pass is under way, each time that one goes on, or has ended.
    """

    def __init__(self, replicas: int) -> None:
        self.passing: Callable[[bool], object] = lambda under_way: None
        self._everybody = frozenset(range(replicas))
        self._passes: list[Pass] = []
        self._holding = False
        self._trained: set[int] = set()  # datasets whose steps make rounds of updates
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
        returned: tuple[Examples, ...] = (),
    ) -> None:
        """Notes what an iterator took: see `DatasetGroup.advance`."""
        self._positions[dataset] = Position(dataset, epoch, index, returned)
        before = next((item for item in self._passes if item.dataset == dataset), None)
        worked = NOBODY if before is None or before.given else before.worked | (self._everybody - before.empty)
        self.finish(dataset)
        self._passes.append(Pass(dataset, more, empty, worked, fraction))
        self.passing(True)

    def finish(self, dataset: int) -> None:
        """A pass has ended, or was broken off; the one around it is in use again."""
        numbers = [item.dataset for item in self._passes]
        if dataset in numbers:
            del self._passes[numbers.index(dataset) :]
        if not self._passes:
            self.passing(False)

    def made_round(self, dataset: int) -> bool:
        """Returns whether this process has made a round since `advance`, answered or not."""
        return any(item.made_round for item in self._passes if item.dataset == dataset)

    def any_more(self, dataset: int) -> bool | None:
        """Returns whether any process had a further batch in the last round since `advance`; None without a round.

        Who was left out has its batch once more.
        """
        found = next((item for item in self._passes if item.dataset == dataset), None)
        return None if found is None or found.any_more is None else found.any_more or bool(found.out)

    def returned(self, dataset: int) -> tuple[Examples, ...]:
        """Returns the examples of a pass that were left out of a round, and are to be handed out again, in order."""
        at = self._positions.get(dataset)
        return () if at is None else at.returned

    def come_back(self, passed: Pass, tasks: Set[Task]) -> None:
        """Some tasks were left out of a round of updates, which belongs to a pass: what they had comes back."""
        new = sorted(tasks - passed.out)
        passed.out |= tasks
        at = self._positions[passed.dataset]
        back = (each for task in new for each in passed.dealt.get(task, ()))
        self._positions[passed.dataset] = replace(at, returned=(*at.returned, *back))

    def sent(self, trains: bool = False) -> Pass | None:
        """A round was sent, and what was held back is in it; returns the pass that it belongs to.

        Args:
            trains: True if it applies what the processes contribute.
        """
        if not self._passes:
            return None
        now = self._passes[-1]
        now.made_round = True
        if trains:
            self._trained.add(now.dataset)
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
