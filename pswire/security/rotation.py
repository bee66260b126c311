"""Certificates that change while a process runs: they are read again for new connections."""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from pswire.errors import ConfigError

LOOK_SECONDS = 1.0
"""Least seconds between two looks at the files."""

AGAIN_SECONDS = 10.0
"""Seconds after which files that were not taken are read again: a certificate may become valid."""

State = tuple[tuple[int, int, int], ...] | str
"""Times, inodes and sizes of the files; or why they cannot be looked at."""

log = logging.getLogger("pswire")


class Proofs(Protocol):
    """Certificate, key and CA of a process."""

    @property
    def expiry(self) -> float:
        """Returns the end of their validity in Unix seconds."""

    def newest(self) -> Self:
        """Returns what a new connection is to use."""

    def check_usable(self) -> None:
        """Raises `ssl.SSLError` if OpenSSL does not take them."""

    def server_context(self, asks: bool = True) -> ssl.SSLContext:
        """Returns a context for sockets that accept."""


T = TypeVar("T", bound=Proofs)


class CertificateFiles(Generic[T]):
    """The files that a process's certificates came from. May be used from any thread.

    Files that do not fit one another, as between two writes, are not taken: the certificates before stay in use. The
    log is told if that lasts, once for each state of the files.

    Args:
        paths: of certificate, key and CA.
        read: reads and checks them; raises `ConfigError` if they are not what they should be.
        clock: monotonic seconds.
    """

    def __init__(
        self, paths: Sequence[str], read: Callable[[], T], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._taken = self._state()
        self._newest: T | None = None
        self._looked = clock()
        self._refused: State = ()
        self._refused_since = 0.0
        self._told: State = ()

    def newest(self) -> T | None:
        """Returns what the files have now; None while they have not changed since they were read first."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                self._look(now)
            return self._newest

    def _look(self, now: float) -> None:
        state = self._state()
        if state == self._taken or (state == self._told and now - self._refused_since < AGAIN_SECONDS):
            return
        try:
            if isinstance(state, str):
                raise ConfigError(state)
            found = self._read()
            found.check_usable()
        except (ConfigError, ssl.SSLError) as error:
            self._refuse(state, now, str(error))
            return
        if state != self._state():
            return  # they change just now: the next look sees it
        self._newest, self._taken, self._refused, self._told = found, state, (), ()
        until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(found.expiry))
        log.info("reloaded %s, which is valid until %s UTC; new connections use it", self._paths[0], until)

    def _refuse(self, state: State, now: float, why: str) -> None:
        lasts, self._refused = state == self._refused, state
        self._refused_since = now
        if lasts and state != self._told:
            self._told = state
            log.warning("the changed certificates cannot be used, so the previous ones stay in use: %s", why)

    def _state(self) -> State:
        try:
            found = [os.stat(path) for path in self._paths]
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror}"
        return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)


class ServerContexts:
    """Contexts for sockets that accept, made anew when certificates have changed. May be used from any thread.

    Args:
        security: the certificates.
        asks: True if the other end must show a certificate.
    """

    def __init__(self, security: Proofs, asks: bool = True) -> None:
        self._security = security
        self._asks = asks
        self._made: tuple[Proofs, ssl.SSLContext] | None = None

    def newest(self) -> ssl.SSLContext:
        """Returns the context for a new connection."""
        newest, made = self._security.newest(), self._made
        if made is None or made[0] is not newest:
            made = self._made = newest, newest.server_context(self._asks)
        return made[1]
