"""Options of a server, for `psserver` itself and for launchers that start one."""

from __future__ import annotations

from dataclasses import dataclass

from pswire.limits import MAX_SESSIONS
from pswire.options import BYTES, CHECKPOINTS, DEVICE, PATH, RESOURCES, WHOLE, option

DEFAULT_ROOT = "runs"
"""The root of checkpoints, if nobody says another: below the directory in which a process is started."""


@dataclass(frozen=True)
class ServerOptions:
    """Options that every server of a cluster may share; sizes are written as bytes with a unit."""

    device: str = option("cpu", "Device that holds the variables: cpu or gpu:N.", DEVICE, group=RESOURCES)
    memory_limit: str = option("0", "Maximum bytes of variables on one server; 0 for no limit.", BYTES, group=RESOURCES)
    checkpoint_root: str = option(
        DEFAULT_ROOT,
        "Directory of checkpoints, or an fsspec URL such as s3://bucket/run.",
        group=CHECKPOINTS,
        metavar="PATH|URL",
    )
    threads: int = option(1, "Number of threads that run one update program.", WHOLE, 1, group=RESOURCES)
    shared_memory: str = option(
        "1GiB",
        "Shared memory for responses to clients on the same host; 0 for none. Twice the size of the model is best.",
        BYTES,
        group=RESOURCES,
    )
    in_flight: str = option(
        "64MiB",
        "Maximum bytes of one worker's gradients that a server holds before it uses them; the worker keeps the rest.",
        BYTES,
        group=RESOURCES,
    )
    snapshot_limit: str = option(
        "0",
        "Maximum bytes of old values kept for checkpoints that are being written; 0 for no limit. At the limit rounds "
        "wait.",
        BYTES,
        group=CHECKPOINTS,
    )
    max_sessions: int = option(MAX_SESSIONS, "Maximum number of concurrent sessions.", WHOLE, 1, group=RESOURCES)
    tier_path: str = option(
        "",
        "Directory on a fast local disk for rows of dynamic tables that are not in memory.",
        PATH,
        otherwise="all rows in memory",
        group=RESOURCES,
    )
    tier_memory: str = option(
        "0", "With --tier-path: maximum bytes of rows of dynamic tables in memory.", BYTES, group=RESOURCES
    )
