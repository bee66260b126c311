"""The status of a server's process and machine, for operators."""

from __future__ import annotations

import os
import time
from pathlib import Path

from psserver.network.transport_server import TransportServer
from pswire.model.status import ProcessStatus
from pswire.process import versions

STARTED = time.monotonic()
"""Time of the process's start, nearly, in monotonic seconds."""

STATM = Path("/proc/self/statm")
"""File in which Linux reports a process's memory, in pages."""


def process_status(transports: TransportServer) -> ProcessStatus:
    """Returns the process's current status. Must run on the event loop, to which the transports belong."""
    used = {c.session: c.transport for c in transports.connections if c.session is not None}
    moved = {f"{name} received": each.received for name, each in transports.traffic.items()}
    moved |= {f"{name} sent": each.sent for name, each in transports.traffic.items()}
    return ProcessStatus(
        time.time(),
        resident_bytes(),
        versions(),
        transports.port,
        transports.path,
        used,
        moved,
        time.monotonic() - STARTED,
    )


def resident_bytes() -> int:
    """Returns the memory of this process, in bytes; 0 if the system does not report it."""
    try:
        pages = int(STATM.read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
