"""The processes that train together, as one of them sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from psclient._src.arrays.devices import Device
from psclient._src.data.assigned import ChunkCalls
from psclient._src.data.learned import LearnedLookups
from psclient._src.data.progress import Progress
from pswire.model.log import Examples


class ReplicaGroup(Progress):
    """The processes that train together, as one of them sees them: here it is the only one.

    `rounds.membership.Group` is that of a process with servers.

    Args:
        devices: the local replicas' devices.
        has_servers: True if rows are fetched from servers, and may be fetched ahead.

    Attributes:
        alone: True if each process makes rounds of its own: its workers are asynchronous.
        coordinated: True once this process schedules closures, or runs what is scheduled: each process has all batches
            of a dataset.
        leaves_out: True if a round of updates may be made without workers that live, whose examples are assigned
            again then.
        lookups: learns from the batch in use what is looked up; None without one.
        chunk_calls: asks for batches that are assigned; None where all make rounds together, and each has a part of
            every batch.
    """

    alone = False
    coordinated = False
    leaves_out = False
    lookups: LearnedLookups | None = None
    chunk_calls: ChunkCalls | None = None
    _meanwhile: tuple[int, Callable[[], object] | None] = 0, None

    def __init__(self, devices: tuple[Device, ...], has_servers: bool = False) -> None:
        super().__init__(len(devices))
        self.devices, self.has_servers = devices, has_servers

    def meanwhile(self, work: Callable[[], object] | None) -> None:
        """Sets what this thread may do, once, while it waits for a round; None for nothing.

        Args:
            work: changes nothing that anybody sees, and what it prepares is made later where it fails.
        """
        self._meanwhile = threading.get_ident(), work

    def work_meanwhile(self) -> None:
        """Does what was set, if it is this thread's: called before a round is waited for."""
        thread, work = self._meanwhile
        if work is not None and thread == threading.get_ident():
            self.meanwhile(None)
            with suppress(Exception):
                work()

    @property
    def late(self) -> bool:
        """True if this process came to a running job: its variables are newer than any checkpoint."""
        return False

    @property
    def leads(self) -> bool:
        """True if this process writes checkpoints and summaries for all."""
        return True

    @property
    def replicas(self) -> int:
        """R: the replicas of all processes that are in sync."""
        return len(self.devices)

    @property
    def weight(self) -> Fraction:
        """How much the mean over this process's examples counts in that of all: its part of the global batch.

        An equal part where that is not known, all where each process makes rounds of its own, and nothing without
        examples.
        """
        if self.empty:
            return Fraction(0)
        if self.alone:
            return Fraction(1)
        return Fraction(1, self.replicas) if self.fraction is None else self.fraction

    @property
    def pipeline(self) -> tuple[int, int]:
        """This process's place among those that make datasets of their own, and how many they are."""
        return 0, 1

    def slice(self) -> tuple[int, int]:
        """Returns the number of this process's first replica, and how many make rounds together, as of now."""
        return 0, len(self.devices)

    def share(self) -> tuple[int, int]:
        """Returns the number of this process's first replica among those that share the data, and their count."""
        return self.slice()

    def join(self, dataset: int) -> None:
        """Takes part, if it does not yet; waits until it learns where the group stands."""

    def boundary(self, dataset: int) -> None:
        """Before each batch: takes in a newer generation of members."""

    def excluded(self, dataset: int) -> bool:
        """Returns whether this worker was left out of a round of updates since `advance`, though it lives.

        Waits for the answers of its rounds.
        """
        return False

    def is_behind(self, dataset: int) -> bool:
        """Returns whether the others have made the next round of updates without this worker, and without its batch."""
        return False

    def deal(self, dataset: int, examples: Sequence[Examples]) -> None:
        """Told, after `advance`, which examples each replica of all workers has in this batch.

        Those of a worker that is left out of its round of updates are in `returned` afterwards.
        """


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
