"""Options of a server, for `psserver` itself and for launchers that start one."""

from __future__ import annotations

from dataclasses import dataclass

from pswire.limits import MAX_SESSIONS
from pswire.options import BYTES, DEVICE, WHOLE, option

DEFAULT_ROOT = "runs"
"""The root of checkpoints, if nobody says another: below the directory in which a process is started."""


@dataclass(frozen=True)
class ServerOptions:
    """Options that every server of a cluster may share; sizes are written as bytes with a unit."""

    device: str = option("cpu", "Device that holds the variables.", DEVICE, hint="cpu or gpu:N")
    memory_limit: str = option("0", "Maximum bytes of variables on one server; 0 for no limit.", BYTES)
    checkpoint_root: str = option(
        DEFAULT_ROOT,
        "Directory of checkpoints, or a URL that fsspec knows.",
        hint="such as s3://bucket/run",
    )
    threads: int = option(1, "Number of threads that run one update program.", WHOLE, 1)
    shared_memory: str = option(
        "1GiB",
        "Bytes of shared memory for answers to clients on the same host; 0 for none.",
        BYTES,
        hint="twice the model is best",
    )
    in_flight: str = option(
        "64MiB",
        "Maximum bytes of one worker's contribution that wait to be used.",
        BYTES,
        hint="the rest stays in the worker",
    )
    snapshot_limit: str = option(
        "0",
        "Maximum bytes of old values that are kept for checkpoints under way; 0 for no limit.",
        BYTES,
        hint="rounds wait at the limit",
    )
    max_sessions: int = option(MAX_SESSIONS, "Maximum number of concurrent sessions.", WHOLE, 1)
    tier_path: str = option(
        "",
        "Directory on a fast local disk for rows of dynamic tables that are not in memory.",
        otherwise="all rows are in memory",
    )
    tier_memory: str = option("0", "With --tier-path: maximum bytes of rows of dynamic tables in memory.", BYTES)
