"""The rows that a round's members have asked for, as they are after it."""

from __future__ import annotations

from contextlib import suppress

from psserver.devices import ServerDevice
from psserver.plans.round import ReadyRound
from psserver.values.step import StepVariables
from pswire.model.tensor import Array


class Lookups:
    """The rows that members want back. Used by one thread at a time.

    Args:
        job: the round.

    Attributes:
        variables: numbers of the variables whose rows are wanted.
        found: for each session that has asked for rows these rows, on the host, once they were taken.
    """

    def __init__(self, job: ReadyRound) -> None:
        self._job = job
        self._wanted = {part.said.session: part.said.lookups for part in job.parts if part.said.lookups}
        self.variables = frozenset([read.variable for reads in self._wanted.values() for read in reads])
        self.found: dict[int, list[Array]] = {}

    def take(self, variables: StepVariables, device: ServerDevice) -> None:
        """Takes the rows, after the last step.

        Variables are written by then. So those for which there is no memory are left out, to be taken by themselves.
        """
        after = not self._job.skipped
        with suppress(MemoryError):
            for session, reads in self._wanted.items():
                taken = [variables.rows(read.variable, read.numbers(), after, device.xp) for read in reads]
                self.found[session] = device.get_all(taken)
