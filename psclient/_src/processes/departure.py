"""How a worker that was told to end leaves its job, and what it does where others leave or a server comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable

from psclient._src.processes.sigterm import Notice
from pswire.cluster import Task
from pswire.model.log import Generation

log = logging.getLogger("psclient")


class Departure:
    """How this process lets others leave, and leaves itself. Used by the thread that runs cross-replica code.

    Args:
        task: the task that this process is.
        is_in: returns whether it takes part in a generation.
        notice: whether this process was told to end.

    Attributes:
        notice: the same.
        save: saves a checkpoint, as all members do at the same place; called before some of them leave.
        hand_over: saves at a path, with a state and the number of a generation, what a server held that comes back by
            it.
    """

    def __init__(self, task: Task, is_in: Callable[[Generation], bool], notice: Notice) -> None:
        self.notice = notice
        self.save: Callable[[], object] = lambda: None
        self.hand_over: Callable[[str, str, int], object] = lambda path, state, generation: None
        self._task, self._is_in = task, is_in
        self._saved_for = 0  # the generation that has ordered the last of these

    def save_for(self, generation: Generation) -> None:
        """Before a generation is taken in: saves the checkpoint that it tells of, once."""
        if generation.save > self._saved_for:
            self._saved_for = generation.save
            self.save()

    def look(self, generation: Generation | None, alone: bool) -> None:
        """Where a step begins: ends this process if it is to leave.

        Args:
            generation: the newest that it has taken in; None before it takes part.
            alone: True if it makes rounds of its own: nobody has to know where it leaves.

        Raises:
            Leaving: it leaves.
        """
        notice = self.notice
        if generation is not None and not alone and not self._is_in(generation):
            log.info("%s leaves the job after SIGTERM", self._task)
            notice.leave()
        if not notice.leaving:
            return
        if alone or generation is None:
            if alone and notice.saves:
                self.save()
            notice.leave()
        if notice.late:
            log.warning(
                "%s leaves the job before the chief confirmed it; batches assigned to it meanwhile are not processed",
                self._task,
            )
            notice.leave()
