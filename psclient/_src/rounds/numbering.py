"""How the rounds that this process makes are named: those of all members, a closure's, and its own beside those of all.

A strand is a sequence of rounds, which its numbers name; see `psserver.rounds.sequences`. Used by the thread that runs
cross-replica code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from psclient._src.data.adapters import GlobalBatch
from psclient._src.data.progress import Pass
from psclient._src.rounds.membership import Group
from pswire.model.closures import ClosureName

FIRST, EACH = 10, 100
"""Rounds in which workers say which global batch they read: the first ones of a job, then one of so many. All of them
know the numbers of the rounds, so that all say it in the same ones."""


def _is_compared(round: int) -> bool:
    return round < FIRST or round % EACH == 0


@dataclass
class SharedRounds:
    """The rounds of all members; of an asynchronous worker those of its task.

    Attributes:
        group: counts them.
        pushed: for each server the last round that was pushed there; -1 for none.
        host: the number of this host, whose workers sum what they contribute; 0 where they do not.
    """

    group: Group
    pushed: list[int]
    host: int = 0

    @property
    def round(self) -> int:
        """The next round."""
        return self.group.round

    def said(self, observes: bool, batch: GlobalBatch | None) -> dict[str, Any]:
        """Returns what a contribution says of where this process stands: fields of `Contribution`.

        Args:
            observes: True if nothing of it shall count.
            batch: the global batch that was in use when its section began; None for none that all workers read.
        """
        group = self.group
        # What observes was computed before this process came to the batch of the others.
        compares = batch is not None and not observes and _is_compared(group.round)
        return {
            "more": group.more,
            "positions": group.positions,
            "start": group.start,
            "chunks": () if observes else group.chunks,
            "host": 0 if group.alone or group.session.consistency.leaves_out else self.host,
            "batch": batch.words if batch is not None and compares else "",
        }

    def sent(self, trains: bool) -> Pass | None:
        """A round was sent: see `Group.sent`."""
        return self.group.sent(trains)


@dataclass
class ClosureRounds:
    """The rounds of the closure that this process runs; they are named by it, whichever worker makes them.

    Attributes:
        group: counts the rounds of this process.
        name: the closure.
        pushed: as of `SharedRounds`.
        round: its next round, from 0.
    """

    group: Group
    name: ClosureName
    pushed: list[int]
    round: int = 0

    def said(self, observes: bool, batch: GlobalBatch | None) -> dict[str, Any]:
        """Returns what a contribution says of where this process stands: which closure makes it."""
        return {"closure": self.name}

    def sent(self, trains: bool) -> Pass | None:
        """A round was sent: see `Group.sent`."""
        self.round += 1
        return self.group.sent(trains)


@dataclass
class OwnRounds:
    """The rounds that this process makes alone, beside those of all: of variables that each worker updates alone.

    Attributes:
        pushed: as of `SharedRounds`.
        round: the next of them, from 0.
    """

    pushed: list[int]
    round: int = field(default=0)

    def said(self, observes: bool, batch: GlobalBatch | None) -> dict[str, Any]:
        """Returns what a contribution says of where this process stands: that it is alone."""
        return {"alone": True}

    def sent(self, trains: bool) -> Pass | None:
        """A round was sent; datasets count those of all members."""
        self.round += 1
        return None


Numbering = SharedRounds | ClosureRounds | OwnRounds
