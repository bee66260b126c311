"""What a server's process tells of itself and of its machine, for those who look after it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from psserver.transport.lane_server import LaneServer
from pswire.model.status import ProcessStatus
from pswire.versions import versions

STARTED = time.monotonic()
"""When this process began, as far as it matters."""

STATM = Path("/proc/self/statm")
"""Where Linux tells a process how much memory it has, in pages."""


def process_status(lanes: LaneServer) -> ProcessStatus:
    """Returns what there is to tell now. On the event loop, to which the lanes belong."""
    used = {c.session: c.lane for c in lanes.connections if c.session is not None}
    moved = {f"{name} received": each.received for name, each in lanes.traffic.items()}
    moved |= {f"{name} sent": each.sent for name, each in lanes.traffic.items()}
    return ProcessStatus(
        time.time(), resident_bytes(), versions(), lanes.port, lanes.path, used, moved, time.monotonic() - STARTED
    )


def resident_bytes() -> int:
    """The memory of this process, in bytes; 0 where the system does not tell."""
    try:
        pages = int(STATM.read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
