"""A connection on the tcp lane while both ends show their certificates."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from pswire.transport.tls_socket import Sealed

log = logging.getLogger("psserver")

SECONDS = 10.0
"""How long it may take."""


class Handshake:
    """A handshake of TLS, as the server has it. Belongs to the event loop.

    Args:
        context: what the server shows and asks for.
        sock: the connection.
        over: called once it is over, with the connection that came of it, or None.
    """

    def __init__(
        self, context: ssl.SSLContext, sock: socket.socket, over: Callable[[Handshake, Sealed | None], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = over
        sock.setblocking(False)
        self._sealed = Sealed(sock, context)
        self._late = self._loop.call_later(SECONDS, self.close, "it takes too long")
        self._loop.add_reader(sock, self._step)

    def close(self, why: str) -> None:
        """Ends the connection."""
        log.debug("a handshake has failed: %s", why)
        self._let_go()
        self._sealed.close()
        self._over(self, None)

    def _let_go(self) -> None:
        self._late.cancel()
        self._loop.remove_reader(self._sealed)

    def _step(self) -> None:
        """Goes on as far as what the other end has sent allows."""
        try:
            self._sealed.shake()
        except BlockingIOError:
            return
        except OSError as error:
            self.close(getattr(error, "reason", None) or str(error))
        else:
            self._let_go()
            self._over(self, self._sealed)
