"""What the chief tells a process that was a server, after the job goes on without it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from psclient._src.network.remote_server import RemoteServer, elsewhere
from pswire.errors import PSError

log = logging.getLogger("psclient.chief")


def farewell(server: RemoteServer, say: Callable[[RemoteServer], object], what: str) -> Callable[[], None]:
    """Returns what tells the process that is a server now that it is none any more, once the job goes on without it.

    Args:
        server: the connection to the server, which may lead elsewhere by then.
        say: tells it, by a connection of its own.
        what: the same in words, for the log.
    """
    there = elsewhere(server, server.address)

    def tell() -> None:
        try:
            say(there)
        except PSError as error:
            log.info("%s at %s could not be notified that it %s: %s", there.task, there.address, what, error)
        finally:
            there.close()

    return tell
