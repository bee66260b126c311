"""This process among the workers of its host: who of them sends, and what they send together."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from psclient._src.processes.aggregation.host_role import HostRole
from psclient._src.processes.aggregation.leader import Leader, Push, VariableOf
from psclient._src.processes.aggregation.link import host_socket
from psclient._src.processes.aggregation.sums import OwnPush
from pswire.api import RoundReply

PARTS = 8
"""Parts of the servers, to each of which one worker of a host sends: as many as a host has workers, mostly."""

NAMES = 4
"""Names of a part's socket; more than one, since a process that stands still keeps its own."""

QUEUE = 128
"""Workers that may come at a time."""


class HostGroup:
    """The workers of this host, and who of them sends to which servers. May be used by any thread.

    For each part of the servers one of them leads, who sends to these. None leads more parts than its share: who has
    more leaves them to others when these come. Processes see each other where they have one network, as the system
    separates them, and one user; others are other hosts.

    Args:
        job: identifies the job, among all of this host.
        session: number of this process's session.
        lease: the job's lease, in seconds.
        servers: number of servers.
        push: pushes a sum.
        variable: returns a variable, by its number.

    Attributes:
        number: the number of this host, the same for all of its workers in the job.
        singly: contributions that this process has pushed by themselves.
    """

    def __init__(self, job: bytes, session: int, lease: float, servers: int, push: Push, variable: VariableOf) -> None:
        self.number = host_number(job)
        self._lease = lease
        self._push = push
        self._variable = variable
        self._lock = threading.Lock()  # guards all below
        self.singly = 0
        self._leaders = weakref.WeakSet[Leader]()  # roles keep them; the memory of one that is over is given back
        self._roles = [HostRole(self._names(part), session, lease / 2, self._lead) for part in range(parts_of(servers))]

    def _names(self, part: int) -> list[str]:
        return [f"\0paramserver-{self.number:016x}-{part}-{each}" for each in range(NAMES)]

    def push(self, own: OwnPush) -> Future[RoundReply]:
        """Pushes a contribution: in a sum with those of other workers, or by itself."""
        return self._roles[own.server % len(self._roles)].push(own)

    def _lead(self, name: str) -> Leader | None:
        """Leads at a name; None where another process does, or this one has its share."""
        with self._lock:
            led = self._led()
            if len(led) >= self._share(led):
                return None
            listener = host_socket()
            try:
                listener.bind(name)
                listener.listen(QUEUE)
            except OSError:  # another one was faster
                listener.close()
                return None
            try:
                leader = Leader(listener, self._lease / 2, self._lease, self._push, self._variable, self._balance)
            except BaseException:
                listener.close()
                raise
            self._leaders.add(leader)
            return leader

    def _led(self) -> list[Leader]:
        return [leader for leader in self._leaders if not leader.lost]

    def _share(self, led: list[Leader]) -> int:
        """Returns how many parts a worker of this host leads at most, by what those that it leads know of others."""
        workers = max((leader.workers for leader in led), default=1)
        return -(-len(self._roles) // workers)

    def _balance(self) -> None:
        """Another worker has come: leaves to it what is more than this one's share."""
        with self._lock:
            led = self._led()
            spare = led[self._share(led) :]
            self._leaders.difference_update(spare)
        for leader in spare:
            leader.close()

    @property
    def leads(self) -> bool:
        """True if this process sends for others of its host."""
        with self._lock:
            return bool(self._led())

    @property
    def summed(self) -> int:
        """Contributions that this process has sent in sums, those of others included, which were answered."""
        return sum(role.summed for role in self._roles)

    def by_itself(self, push: Callable[[], Future[RoundReply]]) -> Future[RoundReply]:
        """Pushes a contribution that is in no sum."""
        with self._lock:
            self.singly += 1
        return push()

    def close(self) -> None:
        """Leaves the others: they find it out at once."""
        for role in self._roles:
            role.close()


def parts_of(servers: int) -> int:
    """Returns the number of parts of some servers; server `s` is of part `s` modulo this number."""
    return min(servers, PARTS)


def host_number(job: bytes) -> int:
    """Returns the number of this host for a job: of all processes that may find each other; never 0."""
    parts = [job, str(os.geteuid()).encode()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        with suppress(OSError):
            parts.append(str(os.stat(path).st_ino).encode() if "ns" in path else Path(path).read_bytes())
    return int.from_bytes(hashlib.sha256(b"\0".join(parts)).digest()[:8], "little") | 1
