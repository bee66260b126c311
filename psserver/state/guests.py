"""Sessions on a server that does not give their numbers: whose they are, as who opens them says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pswire.cluster import Task
from pswire.errors import Fenced, Forbidden
from pswire.model.log import Epoch


class Guests:
    """The sessions that were opened here. Guarded by the core's lock.

    Args:
        server: this server, for messages.
        check_count: raises `ConfigError` if so many are too many.
    """

    def __init__(self, server: Task, check_count: Callable[[int], None]) -> None:
        self._server = str(server)
        self._check_count = check_count
        self._tasks: dict[int, Task] = {}
        self._epoch: Epoch | None = None  # of which the next are
        self._stolen: dict[int, Task] = {}  # sessions that another opened than whose they are

    def open(self, session: int, task: Task) -> None:
        """A task has opened a session; raises `Forbidden` if another one has, `ConfigError` if there are too many."""
        if session not in self._tasks:
            self._check_count(len(self._tasks))
            self._look(None)
        owner = self._tasks.setdefault(session, task)
        if owner != task:
            raise Forbidden(f"session {session} is {owner}'s, and not {task}'s; restart {task}", self._server)

    def check(self, session: int, epoch: Epoch | None) -> None:
        """Raises why a session may do nothing here.

        Args:
            session: its number.
            epoch: the newest; what it says of its members is right, whoever came here before them.

        Raises:
            Fenced: it was not opened here.
            Forbidden: it was opened by a task that is not the session's.
        """
        task = self._tasks.get(session)
        if task is None:
            raise Fenced("this session was not opened here, or its job is over; restart the process")
        if epoch is not self._epoch:
            self._look(epoch)
        if session in self._stolen:
            raise Forbidden(f"session {session} is {self._stolen[session]}'s, and {task} has opened it", self._server)

    def _look(self, epoch: Epoch | None) -> None:
        """Looks for what is stolen once for each epoch: checks are many."""
        self._epoch = epoch
        members = epoch.members if epoch else ()
        self._stolen = {m.session: m.task for m in members if self._tasks.get(m.session, m.task) != m.task}

    def forget(self, sessions: Iterable[int]) -> None:
        """Their job is over."""
        for session in sessions:
            self._tasks.pop(session, None)
