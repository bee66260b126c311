"""What may be said of a server, to `psserver` itself and to whoever starts one."""

from __future__ import annotations

from dataclasses import dataclass

from pswire.limits import MAX_SESSIONS
from pswire.options import BYTES, DEVICE, WHOLE, option

DEFAULT_ROOT = "runs"
"""The root of checkpoints, if nobody says another: below the directory in which a process is started."""


@dataclass(frozen=True)
class ServerOptions:
    """Options that every server of a cluster may share; sizes are written as bytes with a unit."""

    device: str = option("cpu", "Where the variables live.", DEVICE, hint="cpu or gpu:N")
    memory_limit: str = option("0", "Bytes that variables may take on one server; 0 for no limit.", BYTES)
    checkpoint_root: str = option(
        DEFAULT_ROOT,
        "The directory, or the URL that fsspec knows, below which checkpoints are.",
        hint="such as s3://bucket/run",
    )
    threads: int = option(1, "Threads of one update program.", WHOLE, 1)
    shared_memory: str = option(
        "1GiB",
        "Bytes in which answers are for clients on the same host; 0 for none.",
        BYTES,
        hint="best twice the model",
    )
    in_flight: str = option(
        "64MiB",
        "Bytes of one worker's contribution that are held before they are used.",
        BYTES,
        hint="the rest waits in the worker",
    )
    snapshot_limit: str = option(
        "0",
        "Bytes of old values for checkpoints that are being written; 0 for no limit.",
        BYTES,
        hint="beyond it rounds wait",
    )
    max_sessions: int = option(MAX_SESSIONS, "Sessions that may be open at a time.", WHOLE, 1)
