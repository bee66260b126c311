"""What a worker learns that joins a running job."""

from __future__ import annotations

from dataclasses import dataclass

from pswire.cluster import Task


@dataclass(frozen=True)
class Enlisted:
    """The task that a worker has got in a job that runs.

    Attributes:
        task: the task that the process is to be.
        opened: True if a session of that task is open: it keeps the place by itself.
    """

    task: Task
    opened: bool
