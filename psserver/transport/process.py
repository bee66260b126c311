"""The status of a server's process and machine, for operators."""

from __future__ import annotations

import os
import time
from pathlib import Path

from psserver.transport.lane_server import LaneServer
from pswire.model.status import ProcessStatus
from pswire.process import versions

STARTED = time.monotonic()
"""Time of the process's start, nearly, in monotonic seconds."""

STATM = Path("/proc/self/statm")
"""File in which Linux reports a process's memory, in pages."""


def process_status(lanes: LaneServer) -> ProcessStatus:
    """Returns the process's current status. Must run on the event loop, to which the lanes belong."""
    used = {c.session: c.lane for c in lanes.connections if c.session is not None}
    moved = {f"{name} received": each.received for name, each in lanes.traffic.items()}
    moved |= {f"{name} sent": each.sent for name, each in lanes.traffic.items()}
    return ProcessStatus(
        time.time(), resident_bytes(), versions(), lanes.port, lanes.path, used, moved, time.monotonic() - STARTED
    )


def resident_bytes() -> int:
    """Returns the memory of this process, in bytes; 0 if the system does not report it."""
    try:
        pages = int(STATM.read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
