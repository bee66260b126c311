"""Progress of this process through its datasets: the batches in use and the next ones, and the replicas that worked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction

from psclient._src.data.adapters import GlobalBatch
from psclient._src.data.assigned import AssignedBatches
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
        dealt: which examples of the batch in use each task has; empty where they are not assigned again.
        out: tasks that were left out of a round of updates with the batch in use, though they may live.
        batch: the global batch in use; None where the others do not read the same one.
    """

    dataset: int
    more: bool
    empty: frozenset[int]
    worked: frozenset[int]
    fraction: Fraction | None = None
    made_round: bool = False
    any_more: bool | None = None
    given: bool = False
    dealt: Mapping[Task, tuple[Examples, ...]] = field(default_factory=dict)
    out: frozenset[Task] = frozenset()
    batch: GlobalBatch | None = None


class Progress:
    """The passes that are under way, the innermost last: one over another dataset may stand inside of one.

    Args:
        replicas: number of local replicas.

    Attributes:
        passing: told whether a pass is under way, each time that one goes on, or has ended.
        restores: positions of checkpoints that a dataset goes on from.
        assigned: of each dataset whose batches server 0 assigns, which this process has.
    """

    def __init__(self, replicas: int) -> None:
        self.passing: Callable[[bool], object] = lambda under_way: None
        self._everybody = frozenset(range(replicas))
        self._passes: list[Pass] = []
        self._holding = False
        self._trained: set[int] = set()  # datasets whose steps make rounds of updates
        self.restores = 0
        self.assigned: dict[int, AssignedBatches] = {}
        self._begins: dict[int, tuple[Position, ...]] = {}
        self._positions: dict[int, tuple[Position, ...]] = {}
        self._restored: dict[tuple[int, int], tuple[Position, ...]] = {}
        """Of checkpoints, for which no loop has asked yet, by the number and the digest of the dataset then."""

    @property
    def under_way(self) -> int | None:
        """The dataset over which the innermost pass is under way; None for no pass."""
        return self._passes[-1].dataset if self._passes else None

    @property
    def positions(self) -> tuple[Position, ...]:
        """The batch that each dataset gives next; of one whose batches are assigned it may be in several passes."""
        if not (self._positions or self._restored):
            return ()
        used = tuple([each for dataset in sorted(self._positions) for each in self._positions[dataset]])
        if not self._restored:
            return used
        # One in use stays where it is, and this is what others are told who come.
        known = {(each.dataset, each.source) for each in used}
        return (*used, *(each for key in sorted(self._restored.keys() - known) for each in self._restored[key]))

    def position(self, dataset: int) -> Position | None:
        """Returns where a dataset stood when this process joined, or in the checkpoint from which it goes on.

        Where something was missing of several passes, it is the last one.
        """
        found = self.begins(dataset)
        return found[-1] if found else None

    def begins(self, dataset: int) -> tuple[Position, ...]:
        """Returns what `position` does, pass by pass."""
        return self._begins.get(dataset, ())

    def begin_at(self, positions: Sequence[Position]) -> None:
        """This process comes to others whose datasets stand at these positions."""
        self._begins, self._restored = {}, {}
        for position in sorted(positions, key=lambda each: (each.dataset, each.epoch)):
            if position.restored:
                self._wait(position)
            else:
                self._begins[position.dataset] = (*self.begins(position.dataset), position)
        self._positions |= self._begins

    def restore(self, positions: Sequence[Position]) -> None:
        """A checkpoint was restored that has these positions: datasets go on from them whose loops ask for it."""
        self._restored = {}
        for position in sorted(positions, key=lambda each: (each.dataset, each.epoch)):
            self._wait(replace(position, restored=True))

    def _wait(self, position: Position) -> None:
        key = position.dataset, position.source
        self._restored[key] = (*self._restored.get(key, ()), position)

    def restored(self, dataset: int, source: int) -> Position | None:
        """Returns where a dataset stood in the checkpoint that was restored; None once it goes on, or begins anew.

        It is looked for under its number, then by its digest, since a script may make another dataset before it; what
        is found last is of another dataset that had its number.
        """
        own = [key for key in self._restored if key[0] == dataset]
        same = [key for key in own if key[1] in (0, source)] or [key for key in self._restored if key[1] == source]
        found = min(same or own, default=None)
        return None if found is None else self._restored[found][-1]

    def go_on(self, dataset: int, saved: Position) -> None:
        """A dataset goes on from where one stood in the checkpoint that was restored."""
        self.restores += 1
        found = self._restored.pop((saved.dataset, saved.source))
        self._begins[dataset] = self._positions[dataset] = tuple(
            [replace(each, dataset=dataset, restored=False) for each in found]
        )

    def forget(self, saved: Position) -> None:
        """No dataset goes on from where one stood in the checkpoint that was restored."""
        self._restored.pop((saved.dataset, saved.source), None)

    def stand(self) -> None:
        """Asks where the datasets stand of which batches are assigned; called before a checkpoint."""
        for dataset, assigned in self.assigned.items():
            before = self._positions.get(dataset, ())
            stands = [replace(each, source=before[-1].source if before else 0) for each in assigned.stands()]
            self._positions[dataset] = tuple(stands) or before

    def advance(
        self,
        dataset: int,
        epoch: int,
        index: int,
        more: bool,
        empty: frozenset[int],
        fraction: Fraction | None = None,
        returned: tuple[Examples, ...] = (),
        batch: GlobalBatch | None = None,
        source: int = 0,
    ) -> None:
        """Notes what an iterator took: which batch is next, whether this worker has it, whose batch is empty.

        Also which fraction of the batch's examples this worker has, None where it does not know those of the others;
        which examples of earlier batches are to be assigned later; the global batch, where all workers read it; and
        the digest of the dataset.
        """
        for known in (0, source):  # what waits of another one, which had this number, does so on
            self._restored.pop((dataset, known), None)
        self._positions[dataset] = (Position(dataset, epoch, index, returned, source),)
        before = next((item for item in self._passes if item.dataset == dataset), None)
        worked = NOBODY if before is None or before.given else before.worked | (self._everybody - before.empty)
        self.finish(dataset)
        self._passes.append(Pass(dataset, more, empty, worked, fraction, batch=batch))
        self.passing(True)

    def finish(self, dataset: int) -> None:
        """A pass has ended, or was broken off; the one around it is in use again."""
        numbers = [item.dataset for item in self._passes]
        if dataset in numbers:
            del self._passes[numbers.index(dataset) :]
        if not self._passes:
            self.passing(False)

    def trains(self, dataset: int) -> bool:
        """Returns whether rounds of updates were made in passes over a dataset."""
        return dataset in self._trained

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
        """Returns the examples of a pass that were left out of a round, and are to be assigned again, in order."""
        at = self._positions.get(dataset)
        return at[-1].returned if at else ()

    def come_back(self, passed: Pass, tasks: Set[Task]) -> None:
        """Some tasks were left out of a round of updates, which belongs to a pass: what they had comes back."""
        new = sorted(tasks - passed.out)
        passed.out |= tasks
        at = self._positions[passed.dataset][-1]
        back = (each for task in new for each in passed.dealt.get(task, ()))
        self._positions[passed.dataset] = (replace(at, returned=(*at.returned, *back)),)

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
            if now.dataset in self.assigned:
                self.assigned[now.dataset].sent()
        if not self._holding:
            now.given, now.worked = True, NOBODY
        return now

    @property
    def chunks(self) -> tuple[int, ...]:
        """The tickets of the batches that the next round of updates is made of; empty where none are assigned."""
        found = self.assigned.get(self._passes[-1].dataset) if self._passes else None
        return () if found is None else found.tickets

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
    def batch(self) -> GlobalBatch | None:
        """The global batch in use; None where the others do not read the same one, or none is."""
        return self._passes[-1].batch if self._passes else None

    @property
    def fraction(self) -> Fraction | None:
        """Of the examples of the batch in use those that this process has; None where it is not known, or none is."""
        return self._passes[-1].fraction if self._passes else None

    @property
    def empty(self) -> frozenset[int]:
        """Local replicas that contribute nothing: they had no examples since the last round, or in the batch in use."""
        return self._passes[-1].empty - self._passes[-1].worked if self._passes else NOBODY
