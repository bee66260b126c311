"""Services: features of a server that take calls of their own."""

from __future__ import annotations

from typing import ClassVar

from psserver.effects import Effect
from pswire.cluster import Task
from pswire.errors import PSError


class Service:
    """A feature that takes calls of its own. Guarded by the core's lock.

    A verb is a method that takes the time and a request, and returns an answer and effects, as a stimulus does. One of
    a service for sessions takes the session's task, the request and its future, and returns effects.

    Attributes:
        verbs: the names of its verbs.
        for_sessions: what it does for sessions, and server 0 alone, in words; "" for one that takes calls of anybody.
    """

    verbs: ClassVar[frozenset[str]]
    for_sessions: ClassVar[str] = ""

    def session_ended(self, session: int, error: PSError) -> list[Effect]:
        """A session has ended, or its job: its calls fail, and what was assigned to it is assigned again."""
        return []

    def task_left(self, task: Task) -> list[Effect]:
        """A process has left cleanly."""
        return []
