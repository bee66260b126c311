"""The transports by name, and how much has travelled on each, for the metrics of both sides."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Literal, get_args

TransportName = Literal["shm", "tcp", "grpc"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)
"""From the fastest to the one that works wherever gRPC does: shared memory, a plain socket, gRPC's messages."""


class Traffic:
    """Payload bytes of one transport, repeats included. May be added to by any thread.

    Attributes:
        sent, received: in bytes.
    """

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._lock = threading.Lock()  # guards both

    def add(self, sent: int = 0, received: int = 0) -> None:
        """So many bytes more."""
        with self._lock:
            self.sent += sent
            self.received += received


def traffic() -> Mapping[TransportName, Traffic]:
    """One for each transport."""
    return {name: Traffic() for name in TRANSPORTS}
