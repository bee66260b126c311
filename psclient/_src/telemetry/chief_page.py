"""The chief's status page: all servers, which it asks by connections of its own, while somebody looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psclient._src.chief.driver import Chief
from psclient._src.telemetry.observer import Servers
from pswire.cluster import Task
from pswire.security.identity import Security
from pswire.telemetry.page.sampler import PageSource
from pswire.telemetry.page.status_page import StatusPage
from pswire.telemetry.views.looked import Looked
from pswire.telemetry.web_server import Answer

ANSWER_SECONDS = 3.0
"""Seconds that a server may take to answer; the page shows the others meanwhile as they were."""


class ChiefPage:
    """The status page of a chief.

    Args:
        chief: says which servers there are, and has the log.
        task: the task of this process.
        security: what it shows to servers; its token opens the page.
    """

    def __init__(self, chief: Chief, task: Task, security: Security) -> None:
        self._chief = chief
        self._security = security
        self._addresses: Mapping[Task, str] = {}
        self._servers: Servers | None = None
        scope = f"{task} as the chief, with all servers."
        self._page = StatusPage(PageSource(task, scope, self._look, chief.log_from), security.token)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Returns what answers each path."""
        return self._page.answers

    def close(self) -> None:
        """Ends the page, and its connections."""
        self._page.close()
        if self._servers:
            self._servers.close()

    def _look(self) -> tuple[Sequence[Looked], Sequence[Task]]:
        """Asks all servers; in the sampler's thread."""
        addresses = self._chief.addresses
        if self._servers is None or addresses != self._addresses:
            before, self._servers = self._servers, Servers(addresses, ANSWER_SECONDS, self._security)
            self._addresses = addresses
            if before:
                before.close()
        return self._servers.look(recent=True), self._chief.expected
