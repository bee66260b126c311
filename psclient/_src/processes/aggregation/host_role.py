"""Who of this host's workers sends to some of the servers: this process, or another one that it follows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from psclient._src.processes.aggregation.follower import LeaderConnection
from psclient._src.processes.aggregation.leader import Leader
from psclient._src.processes.aggregation.link import Left, LinkLost, host_socket
from psclient._src.processes.aggregation.sums import OwnPush
from pswire.api import RoundReply

log = logging.getLogger("psclient")

ATTEMPTS = 3
"""How often a process looks for who leads, before it goes without for a while: another may begin, or end, meanwhile."""

AGAIN_SECONDS = 0.25
"""Seconds until it looks again."""

EARLIER_SECONDS = 2.0
"""Seconds until a process that leads at a later name tries the earlier names again."""

Lead = Callable[[str], Leader | None]
"""Begins to lead at a name; None where another one was faster, or this process leads as much as it should."""


class HostRole:
    """This process's role among the workers of its host, for some of the servers. May be used by any thread.

    The one that has bound a socket leads. The system unbinds it where that process ends, and who comes next binds it:
    nobody votes. While this process has no role it pushes by itself. Two may lead: one stood still when the other came.
    Then the process at the later name follows the other one.

    Args:
        names: of the socket: the same for all of the host. More than one, since a process that stands still keeps its
            own.
        session: number of this process's session.
        silence: seconds after which who leads counts as gone, if nothing comes from it.
        lead: begins to lead.
    """

    def __init__(self, names: Sequence[str], session: int, silence: float, lead: Lead) -> None:
        self._names = names
        self._session = session
        self._silence = silence
        self._lead = lead
        self._lock = threading.Lock()  # guards all below
        self._before = 0
        self._role: Leader | LeaderConnection | None = None
        self._earlier: Sequence[str] = ()  # the names before the one at which this process leads
        self._newest: dict[int, int] = {}  # the newest round that was pushed to each server
        self._joining = False
        self._again = 0.0
        self._closed = False

    def push(self, own: OwnPush) -> Future[RoundReply]:
        """Pushes a contribution: in a sum with those of other workers, or by itself."""
        said = own.said
        with self._lock:
            role = self._role_now()
            self._newest[own.server] = said.round
        if role is None:
            return own.singly()
        if not own.plan.sums or said.lookups or said.hints or said.rows or said.chunks:
            role.decline(own.server, said.round)
            return own.singly()
        role.push(own)
        return own.future

    def _role_now(self) -> Leader | LeaderConnection | None:
        """Returns this process's role; None while there is none, and then has a thread find one."""
        if self._role is not None and self._role.lost:
            self._before, self._role, self._earlier, self._again = self._summed(), None, (), 0.0
        if self._role is None or self._earlier:
            self._look()
        return self._role

    def _look(self) -> None:
        if not (self._joining or self._closed) and time.monotonic() >= self._again:
            self._joining = True
            threading.Thread(target=self._begin, args=(self._earlier,), name="host joins", daemon=True).start()

    def _begin(self, earlier: Sequence[str]) -> None:
        """Finds a role; a process that leads already follows a leader at an earlier name, if there is one."""
        role: Leader | LeaderConnection | None = None
        try:
            role, earlier = (self._follow_earlier(earlier), ()) if earlier else self._join()
        except Exception as error:
            log.info("local reduction is not available: %s", error)
        with self._lock:
            self._joining, closed, newest = False, self._closed, dict(self._newest)
            before = None if role is None else self._role
            if role is not None:
                self._before, self._role = self._summed(), None if closed else role
                self._earlier = earlier
            self._again = time.monotonic() + (EARLIER_SECONDS if self._earlier else AGAIN_SECONDS)
        if role is None:
            return
        if before is not None:
            before.close()
        if closed:
            role.close()
        for server, round in newest.items():
            role.decline(server, round)  # nobody waits for what this process pushed before it had this role

    def _follow(self, name: str) -> LeaderConnection:
        """Follows the process that leads at a name; raises `LinkLost` or `OSError` where none does."""
        sock = host_socket()
        try:
            sock.connect(name)
            return LeaderConnection(sock, self._session, self._silence)
        except BaseException:
            sock.close()
            raise

    def _follow_earlier(self, names: Sequence[str]) -> LeaderConnection | None:
        for name in names:
            with suppress(LinkLost, OSError):
                return self._follow(name)
        return None

    def _join(self) -> tuple[Leader | LeaderConnection | None, Sequence[str]]:
        """Follows who leads, or leads; None where neither works.

        Who leads, and stands still, keeps its name: the others go on with the next one. Who has just left gives it
        back, and all look for it again.

        Returns:
            The role, and the names before the one at which this process leads.
        """
        for left in reversed(range(ATTEMPTS)):
            free, ended = "", False
            for name in self._names:
                try:
                    return self._follow(name), ()
                except ConnectionRefusedError:
                    free = free or name
                except (LinkLost, OSError) as error:
                    log.info("a worker on this host cannot sum gradients: %s", error)
                    ended = ended or isinstance(error, Left)
            if not free:
                break
            if not (ended and left) and (leader := self._lead(free)) is not None:
                return leader, self._names[: self._names.index(free)]
        return None, ()

    def _summed(self) -> int:
        return self._before + (self._role.summed if isinstance(self._role, Leader) else 0)

    @property
    def summed(self) -> int:
        """Contributions that this process has sent in sums, those of others included, which were answered."""
        with self._lock:
            return self._summed()

    def close(self) -> None:
        """Leaves the others: they find it out at once."""
        with self._lock:
            self._closed, role = True, self._role
            self._before, self._role = self._summed(), None  # its memory is given back with it
        if role is not None:
            role.close()
