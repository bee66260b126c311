"""This process among the workers of its host: who of them sends, and what they send together."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from psclient._src.processes.aggregation.follower import Follower
from psclient._src.processes.aggregation.leader import Leader, Push, VariableOf
from psclient._src.processes.aggregation.link import SOCKETS, LinkLost
from psclient._src.processes.aggregation.sums import Own
from pswire.api import RoundReply

log = logging.getLogger("psclient")

ATTEMPTS = 3
"""How often a process looks for who leads, before it goes without for a while: another may begin, or end, meanwhile."""

NAMES = 4
"""Names of the host's socket; more than one, since a process that stands still keeps its own."""

AGAIN_SECONDS = 1.0
"""Seconds until it looks again."""

QUEUE = 128
"""Workers that may come at a time."""


class HostGroup:
    """The workers of this host, and who of them sends. May be used by any thread.

    The one that has bound the host's socket leads. The system unbinds it where that process ends, and who comes next
    binds it: nobody votes. While this process has no role it pushes by itself. Processes see each other where they
    have one network, as the system separates them, and one user; others are other hosts.

    Args:
        job: identifies the job, among all of this host.
        session: number of this process's session.
        lease: the job's lease, in seconds.
        push: pushes a sum.
        variable: returns a variable, by its number.

    Attributes:
        number: the number of this host, the same for all of its workers in the job.
        singly: contributions that this process has pushed by themselves.
    """

    def __init__(self, job: bytes, session: int, lease: float, push: Push, variable: VariableOf) -> None:
        self.number = host_number(job)
        self._names = [f"\0paramserver-{self.number:016x}-{each}" for each in range(NAMES)]
        self._session = session
        self._lease = lease
        self._push = push
        self._variable = variable
        self._lock = threading.Lock()  # guards all below
        self.singly = self._before = 0
        self._role: Leader | Follower | None = None
        self._newest: dict[int, int] = {}  # the newest round that was pushed to each server
        self._joining = False
        self._again = 0.0
        self._closed = False

    def push(self, own: Own) -> Future[RoundReply]:
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

    def _role_now(self) -> Leader | Follower | None:
        """Returns this process's role; None while there is none, and then has a thread find one."""
        if self._role is not None and not self._role.lost:
            return self._role
        self._before, self._role = self.summed, None
        if not (self._joining or self._closed) and time.monotonic() >= self._again:
            self._joining = True
            threading.Thread(target=self._begin, name="host joins", daemon=True).start()
        return None

    def _begin(self) -> None:
        try:
            role = self._join()
        except Exception as error:
            role = None
            log.info("what this host's workers contribute is not summed: %s", error)
        with self._lock:
            self._joining, closed = False, self._closed
            self._again = time.monotonic() + AGAIN_SECONDS if role is None else 0.0
            self._role = None if closed else role
            newest = dict(self._newest)
        if role is None:
            return
        if closed:
            role.close()
        for server, round in newest.items():
            role.decline(server, round)  # nobody waits for what this process pushed before it had this role

    def _join(self) -> Leader | Follower | None:
        """Follows who leads, or leads; None where neither works.

        Who leads, and stands still, keeps its name: the others go on with the next one.
        """
        for _ in range(ATTEMPTS):
            free = ""
            for name in self._names:
                sock = _socket()
                try:
                    sock.connect(name)
                    return Follower(sock, self._session, self._lease / 2)
                except ConnectionRefusedError:
                    free = free or name
                except (LinkLost, OSError) as error:
                    log.info("a worker of this host does not lead: %s", error)
                sock.close()
            if not free:
                break
            listener = _socket()
            try:
                listener.bind(free)
                listener.listen(QUEUE)
            except OSError:  # another one was faster
                listener.close()
            else:
                return self._lead(listener)
        return None

    def _lead(self, listener: socket.socket) -> Leader:
        try:
            return Leader(listener, self._lease / 2, self._lease, self._push, self._variable)
        except BaseException:
            listener.close()
            raise

    @property
    def leads(self) -> bool:
        """True if this process sends for others of its host."""
        return isinstance(self._role, Leader) and not self._role.lost

    @property
    def summed(self) -> int:
        """Contributions that this process has sent in sums, those of others included, which were answered."""
        return self._before + (self._role.summed if isinstance(self._role, Leader) else 0)

    def by_itself(self, push: Callable[[], Future[RoundReply]]) -> Future[RoundReply]:
        """Pushes a contribution that is in no sum."""
        with self._lock:
            self.singly += 1
        return push()

    def close(self) -> None:
        """Leaves the others: they find it out at once."""
        with self._lock:
            self._closed, role = True, self._role
            self._before, self._role = self.summed, None  # its memory is given back with it
        if role is not None:
            role.close()


def host_number(job: bytes) -> int:
    """Returns the number of this host for a job: of all processes that may find each other; never 0."""
    parts = [job, str(os.geteuid()).encode()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        with suppress(OSError):
            parts.append(str(os.stat(path).st_ino).encode() if "ns" in path else Path(path).read_bytes())
    return int.from_bytes(hashlib.sha256(b"\0".join(parts)).digest()[:8], "little") | 1


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    SOCKETS.add(sock)
    return sock
