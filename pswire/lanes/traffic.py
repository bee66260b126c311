"""How much has travelled on a lane, for the metrics of both sides."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from pswire.lanes import LANES, LaneName


class Traffic:
    """Payload bytes of one lane, repeats included. May be added to by any thread.

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


def traffic() -> Mapping[LaneName, Traffic]:
    """One for each lane."""
    return {name: Traffic() for name in LANES}
