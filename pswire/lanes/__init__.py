"""How the parts of payloads travel: what both ends of each lane share."""

from __future__ import annotations

from typing import Literal, get_args

LaneName = Literal["shm", "tcp", "grpc"]
LANES: tuple[LaneName, ...] = get_args(LaneName)
"""From the fastest to the one that works wherever gRPC does: shared memory, a plain socket, gRPC's messages."""
