"""The restarts of a cluster: the tasks that failed by themselves cost one, those that followed a lost server none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psclient._src.processes.shutdown import SERVER_LOST
from pswire.cluster import Task


@dataclass(frozen=True)
class Replacement:
    """A task that is started again.

    Attributes:
        task: the task to start again.
        counts: True if a restart was spent on it.
    """

    task: Task
    counts: bool


def follows(task: Task, code: int | None) -> bool:
    """Returns whether a task ended because a server did, as its exit code says."""
    return task.job != "ps" and code == SERVER_LOST


class Restarts:
    """Restarts that are left, and what they are spent on. A plain state machine, without a clock.

    A client that ends with `SERVER_LOST` follows the last loss of a server that was counted, if it was there at
    that time: once, for its successor was not. If it follows none, the servers that do not answer are the cause;
    if all of them do, it is the client.

    Args:
        left: number of restarts.

    Attributes:
        left: number of restarts that are left now.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self._started: dict[Task, float] = {}
        self._lost_at = -math.inf  # when the loss of a server was counted last

    def started(self, task: Task, now: float) -> None:
        """A task was started, perhaps again; `now` is in monotonic seconds, here and below."""
        self._started[task] = now

    def unexplained(self, failed: Mapping[Task, int | None]) -> Task | None:
        """A client that follows no known loss of a server, if there is one: servers have to be asked.

        Args:
            failed: exit codes of the tasks that failed, in the order in which that was seen.
        """
        if any(task.job == "ps" for task in failed):
            return None
        followers = (task for task, code in failed.items() if follows(task, code))
        return next((task for task in followers if self._started[task] > self._lost_at), None)

    def spend(self, failed: Mapping[Task, int | None], found: Sequence[Task], now: float) -> list[Replacement]:
        """Spends restarts on tasks that failed.

        Args:
            failed: as for `unexplained`.
            found: the servers that do not answer, where `unexplained` gave a client, or else that client.
            now: the time, in monotonic seconds.

        Returns:
            The tasks to start again, those that count first; none where too few restarts are left.
        """
        causes = [*(task for task, code in failed.items() if not follows(task, code)), *found]
        if found or any(task.job == "ps" for task in causes):
            self._lost_at = now
        if len(causes) > self.left:
            return []
        self.left -= len(causes)
        return [Replacement(task, task in causes) for task in dict.fromkeys([*causes, *failed])]
