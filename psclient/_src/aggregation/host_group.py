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

from psclient._src.aggregation.follower import Follower
from psclient._src.aggregation.leader import Leader, Push
from psclient._src.aggregation.link import SOCKETS, LinkLost
from psclient._src.aggregation.sums import Own, may_sum
from pswire.api import RoundReply
from pswire.model.tensor import TensorSpec

log = logging.getLogger("psclient")

ATTEMPTS = 3
"""How often a process looks for who leads, before it goes without for a while: another may begin, or end, meanwhile."""

AGAIN_SECONDS = 1.0
"""Seconds until it looks again."""

QUEUE = 128
"""Workers that may come at a time."""


class HostGroup:
    """The workers of this host, and who of them sends. May be used by any thread.

    The one that has bound the host's socket leads. The system unbinds it where that process ends, and who comes next
    binds it: nobody votes. Processes see each other where they have one network, as the system separates them, and one
    user; others are other hosts.

    Args:
        job: identifies the job, among all of this host.
        session: number of this process's session.
        lease: the job's lease, in seconds.
        push: pushes a sum.
        spec: returns a variable's tensor, by its number.

    Attributes:
        number: the number of this host, the same for all of its workers in the job.
    """

    def __init__(self, job: bytes, session: int, lease: float, push: Push, spec: Callable[[int], TensorSpec]) -> None:
        self.number = host_number(job)
        self._name = f"\0paramserver-{self.number:016x}"
        self._session = session
        self._lease = lease
        self._push = push
        self._spec = spec
        self._lock = threading.Lock()  # guards all below
        self._role: Leader | Follower | None = None
        self._again = 0.0
        self._closed = False

    def push(self, own: Own) -> Future[RoundReply]:
        """Pushes a contribution: in a sum with those of other workers, or by itself."""
        if not may_sum(own.plan):
            return own.singly()
        role = self._role_now()
        said = own.said
        if role is None:
            return own.singly()
        if said.lookups or said.rows or said.seconds:
            role.decline(own.server, said.round)
            return own.singly()
        role.push(own)
        return own.future

    def _role_now(self) -> Leader | Follower | None:
        with self._lock:
            role = self._role
            if (role is None or role.lost) and not self._closed and time.monotonic() >= self._again:
                role = self._role = self._join()
                if role is None:
                    self._again = time.monotonic() + AGAIN_SECONDS
            return None if role is None or role.lost else role

    def _join(self) -> Leader | Follower | None:
        """Follows who leads, or leads; None where neither works."""
        try:
            for _ in range(ATTEMPTS):
                sock = _socket()
                try:
                    sock.connect(self._name)
                except ConnectionRefusedError:
                    sock.close()
                else:
                    return Follower(sock, self._session, self._lease / 2)
                listener = _socket()
                try:
                    listener.bind(self._name)
                    listener.listen(QUEUE)
                except OSError:  # another one was faster
                    listener.close()
                else:
                    return self._lead(listener)
        except (LinkLost, OSError) as error:
            log.info("what this host's workers contribute is not summed: %s", error)
        return None

    def _lead(self, listener: socket.socket) -> Leader:
        try:
            return Leader(listener, self._session, self._lease / 2, self._lease, self._push, self._spec)
        except BaseException:
            listener.close()
            raise

    @property
    def leads(self) -> bool:
        """True if this process sends for others of its host."""
        return isinstance(self._role, Leader) and not self._role.lost

    @property
    def summed(self) -> int:
        """Contributions that this process has sent in sums."""
        return self._role.summed if isinstance(self._role, Leader) else 0

    def close(self) -> None:
        """Leaves the others: they find it out at once."""
        with self._lock:
            self._closed, role = True, self._role
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
