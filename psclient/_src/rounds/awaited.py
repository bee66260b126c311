"""The processes that a round of a server waits for, in words: asked only where something takes long."""

from __future__ import annotations

from psclient._src.network.session import Session
from psclient._src.rounds.membership import Group
from pswire.cluster import Task
from pswire.errors import PSError


class Awaited:
    """Names the processes that a server waits for. May be used by any thread.

    Args:
        session: this process's session.
        group: this process's place among the members.
    """

    def __init__(self, session: Session, group: Group) -> None:
        self._session = session
        self._group = group

    def names(self, server: int) -> list[str]:
        """Returns whom a round waits for: members, or the chief to approve it or to drop members that are gone."""
        return self._look(server)[0]

    def _look(self, server: int) -> tuple[list[str], bool]:
        """Returns whom a round waits for, and whether all of them compute, not much longer than they did before."""
        open_rounds = self._session.servers[server].status().waiting
        if self._group.alone:
            # The one that is sent, or is to be sent next.
            mine = (self._group.round - 1, self._group.round)
            open_rounds = tuple(item for item in open_rounds if item.round in mine)
        missing = dict.fromkeys(task for item in open_rounds for task in item.missing if task != self._session.task)
        gone = [member.task for member in self._session.ended()]
        chief = any(not item.approved for item in open_rounds) or bool(set(missing) & set(gone))
        computing = {task for item in open_rounds for task in item.computing}
        names = [*map(str, missing), *(["the chief"] if chief else [])] or [str(Task("ps", server))]
        return names, bool(missing) and not chief and missing.keys() <= computing

    def reminder(self, server: int, round: int) -> str:
        """Returns the line to log while a round is waited for; "" while it only waits for members that compute."""
        names, expected = self._look(server)
        if expected:
            return ""
        idle = [name for name in names if "worker" in name]
        remedy = "; if its script has stopped, as after Ctrl-C in a notebook, run its next step or close its strategy"
        return f"waits in round {round} for {', '.join(names)}{remedy if idle else ''}"

    def told(self, server: int) -> str:
        """Returns whom a round of a server waits for, in words, as far as it still answers."""
        try:
            return ", ".join(self.names(server))
        except (PSError, TimeoutError) as error:
            return f"unknown tasks ({error})"

    def held_up(self, server: int) -> str:
        """Returns whom a server waits for, in words, if it is somebody else."""
        told = self.told(server)
        return "" if told == str(Task("ps", server)) else f", which waits for {told}"
