"""Plain votes as packed numbers: nearly every vote says only whose contributions are whole, and a round waits for it.

    job (8), round (8), generation (8), last closed round (8), attempt (4), count of sessions (4), sessions (8 each),
    plan id

Sizes are in bytes, and all numbers are little-endian. The session of the server that votes is the connection's.
"""

from __future__ import annotations

import struct

from pswire.errors import InvalidRequest
from pswire.servers.votes import Testimony, Vote

HEAD = struct.Struct("<QQQqII")


def pack(said: Vote | Testimony) -> bytes | None:
    """Packs a plain vote; returns None for a testimony, and for a vote with more than whole contributions."""
    if not isinstance(said, Vote) or said.error is not None or said.digest is not None or said.sums or said.late:
        return None
    whole = said.whole
    head = HEAD.pack(said.job, said.round, said.generation, said.closed, said.attempt, len(whole))
    return head + struct.pack(f"<{len(whole)}Q", *sorted(whole)) + said.plan_id


def unpack(data: bytes) -> Vote:
    """Reads a plain vote; raises `InvalidRequest` if it is shorter than it says."""
    try:
        job, round, generation, closed, attempt, count = HEAD.unpack_from(data)
        whole = struct.unpack_from(f"<{count}Q", data, HEAD.size)
    except struct.error:
        raise InvalidRequest(f"a vote of {len(data)} bytes is not whole") from None
    return Vote(job, round, data[HEAD.size + 8 * count :], generation, attempt, frozenset(whole), None, closed)
