"""The workers that iterate over datasets together, as one of them sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from psclient._src.arrays.devices import Device
from psclient._src.data.adapters import GlobalBatch
from pswire.model.log import Examples, Position


class DatasetGroup(Protocol):
    """The workers that iterate together, as one of them sees it."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The local replicas' devices."""
        ...

    @property
    def coordinated(self) -> bool:
        """True once a coordinator schedules what this process runs: each has all batches of a dataset."""
        ...

    @property
    def pipeline(self) -> tuple[int, int]:
        """This process's place among those that make datasets of their own, and how many they are."""
        ...

    def join(self, dataset: int) -> None:
        """Takes part, if it does not yet; waits until it learns where the group stands."""
        ...

    def boundary(self, dataset: int) -> None:
        """Before each batch: takes in a newer generation of members."""
        ...

    def slice(self) -> tuple[int, int]:
        """Returns the number of this process's first replica, and how many make rounds together, as of now."""
        ...

    def share(self) -> tuple[int, int]:
        """Returns the number of this process's first replica among those that share the data, and their count."""
        ...

    def position(self, dataset: int) -> Position | None:
        """Returns where the group stood when this process joined, or what it goes on from; None at the beginning."""
        ...

    def restored(self, dataset: int, source: int) -> Position | None:
        """Returns where a dataset stood in the checkpoint that was restored; None once it goes on, or begins anew.

        It is looked for under its number, then by its digest, since a script may make another dataset before it; what
        is found last is of another dataset that had its number.
        """
        ...

    def go_on(self, dataset: int, saved: Position) -> None:
        """A dataset goes on from where one stood in the checkpoint that was restored."""
        ...

    def forget(self, saved: Position) -> None:
        """No dataset goes on from where one stood in the checkpoint that was restored."""
        ...

    def advance(
        self,
        dataset: int,
        epoch: int,
        index: int,
        more: bool,
        empty: frozenset[int],
        fraction: float | None = None,
        returned: tuple[Examples, ...] = (),
        batch: GlobalBatch | None = None,
        source: int = 0,
    ) -> None:
        """Told what was taken: which batch is next, whether this worker has it, whose batch is empty.

        Also which fraction of the batch's examples this worker has, None where it does not know those of the others;
        which examples of earlier batches are to be handed out later; the global batch, where all workers read it; and
        the digest of the dataset.
        """
        ...

    def finish(self, dataset: int) -> None:
        """Told that a pass has ended; what was being iterated around it is in use again."""
        ...

    def made_round(self, dataset: int) -> bool:
        """Returns whether this worker has made a round since `advance`, answered or not."""
        ...

    def any_more(self, dataset: int) -> bool | None:
        """Returns whether any worker had a further batch in the last round since `advance`; None without a round.

        Waits for the answers of this worker's rounds.
        """
        ...

    @property
    def backup_workers(self) -> int:
        """The workers that a round of updates does not wait for. Without any nobody is late."""
        ...

    def returned(self, dataset: int) -> tuple[Examples, ...]:
        """Returns the examples of the pass that were left out of a round, and are to be handed out again, in order.

        The same on every worker. Waits for the answers of this worker's rounds.
        """
        ...

    def excluded(self, dataset: int) -> bool:
        """Returns whether this worker was left out of a round of updates since `advance`, though it lives.

        Waits for the answers of its rounds.
        """
        ...

    def is_behind(self, dataset: int) -> bool:
        """Returns whether the others have made the next round of updates without this worker, and without its batch."""
        ...

    def deal(self, dataset: int, examples: Sequence[Examples]) -> None:
        """Told, after `advance`, which examples each replica of all workers has in this batch.

        Those of a worker that is left out of its round of updates are in `returned` afterwards.
        """
        ...


@dataclass
class Passes:
    """State that the datasets of one strategy share.

    Attributes:
        from_group: True if this process counts its passes from where the group stands; else it counts
            from 0, and the passes that the group has behind it give nothing.
        make_round: makes a round with the other members, whatever it carries. Called by every member after a step in
            which none was made, where the workers' data may end in different steps: no member can tell otherwise
            whether another goes on. None if no process shares rounds with this one.
    """

    from_group: bool = False
    make_round: Callable[[], object] | None = None
