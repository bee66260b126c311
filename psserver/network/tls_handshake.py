"""A TLS handshake on the tcp transport."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from pswire.network.tls_socket import Sealed

log = logging.getLogger("psserver")

SECONDS = 10.0
"""Seconds that a handshake may take."""


class Handshake:
    """The server's side of a TLS handshake. Belongs to the event loop.

    Args:
        context: the server's certificate, and those that it accepts.
        sock: the connection.
        over: called at the end with the encrypted connection, or None if the handshake has failed.

    Attributes:
        failure: how the other end has failed; "" if it did not, or has said nothing.
    """

    def __init__(
        self, context: ssl.SSLContext, sock: socket.socket, over: Callable[[Handshake, Sealed | None], None]
    ) -> None:
        self.failure = ""
        self._loop = asyncio.get_running_loop()
        self._over = over
        sock.setblocking(False)
        self._sealed = Sealed(sock, context)
        self._late = self._loop.call_later(SECONDS, self.close, "it took too long")
        self._loop.add_reader(sock, self._step)

    def close(self, why: str) -> None:
        """Closes the connection."""
        log.debug("a handshake has failed: %s", why)
        self._let_go()
        self._sealed.close()
        self._over(self, None)

    def _let_go(self) -> None:
        self._late.cancel()
        self._loop.remove_reader(self._sealed)

    def _step(self) -> None:
        """Continues as far as the received data allow."""
        try:
            self._sealed.shake()
        except BlockingIOError:
            return
        except OSError as error:
            why = getattr(error, "reason", None) or str(error)
            # Who goes without a word has looked whether the port is open, as `psctl doctor` and load balancers do.
            self.failure = why if self._sealed.heard else ""
            self.close(why)
        else:
            self._let_go()
            self._over(self, self._sealed)
