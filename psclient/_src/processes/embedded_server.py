"""One server process for a script that no cluster has started."""

from __future__ import annotations

import atexit
import os
import secrets
import subprocess

from psclient._src.interpreter.lifetimes import weakly
from psclient._src.processes.process import start_server
from pswire.errors import ConfigError, Unreachable
from pswire.limits import Timeouts
from pswire.security.identity import TOKEN_BYTES, Security, SecurityOptions
from pswire.server_options import ServerOptions

END_SECONDS = 5.0
"""Seconds that the server may take to end, before SIGTERM and again before SIGKILL."""


class EmbeddedServer:
    """Starts a local server; it ends with `stop`, at the exit of this process, or at its death.

    A fork of this process does not own the server: it neither keeps it alive nor ends it.

    Args:
        options: the server's flags.
        timeouts: time limits that it is started with; None leaves the environment's.

    Attributes:
        address: the server's address, as `host:port`.
        security: the token that it requires of callers, so that nobody else on this machine is let in.

    Raises:
        Unreachable: the server did not start.
    """

    def __init__(self, options: ServerOptions | None = None, timeouts: Timeouts | None = None) -> None:
        self._owner = os.getpid()
        token = secrets.token_hex(TOKEN_BYTES)
        self.security = Security(token=token)
        try:
            self._process, self.address = start_server(
                options=options,
                timeouts=timeouts,
                flags=("--log-level", "warning"),
                security=SecurityOptions(token=token),
            )
        except ConfigError as error:
            raise Unreachable(f"the embedded server did not start: {error.message}", error.task) from error
        os.register_at_fork(after_in_child=weakly(self._close))
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def stop(self) -> None:
        """Ends the server and waits for its end; does nothing in a fork, or the second time."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.stop)
        if self._process.stdin:
            self._process.stdin.close()
        for end in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(END_SECONDS)
                break
            except subprocess.TimeoutExpired:
                end()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def _close(self) -> None:
        """In a fork: lets go of the pipe, whose end is what tells the server that we are gone."""
        if self._process.stdin:
            self._process.stdin.close()
