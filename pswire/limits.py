"""Sizes and times that both ends must agree on, or that bound what a peer may ask for."""

from __future__ import annotations

from dataclasses import dataclass

PART_BYTES = 1 << 20
"""Payload of one part. 1 MiB is the fastest over gRPC; never above 4 MiB, gRPC's default message limit."""

ALIGN = 16
"""Tensors start at multiples of this in a payload, and payloads at multiples of it in a frame, in bytes."""

MAX_NODES = 10_000
"""Nodes of one update program."""

MAX_PLANS = 10_000
"""Plans that a server remembers; more means that every round has another shape."""

MAX_PLAN_BYTES = 3 << 20
"""Encoded size of one plan: it travels in one message."""

MAX_NAME = 512
"""Characters in a variable's name."""

MAX_NDIM = 32
"""Dimensions of a tensor."""

MAX_TENSOR_BYTES = 1 << 44
"""Size of one tensor that a message may announce; what may be held is the server's memory limit."""


@dataclass(frozen=True)
class Timeouts:
    """How long everything may take, in seconds.

    Attributes:
        lease: a session that does not beat for this long is ended.
        beat: pause between two beats; several must fit into a lease.
        call: an ordinary call, retries included.
        round: a synchronous round, from the push to its completion.
        word: pause between two log lines that say whom a waiting call waits for.
        chief: how long what needs a chief waits for one.
        start: how long a process waits at the start for the tasks of its cluster.
    """

    lease: float = 10.0
    beat: float = 2.0
    call: float = 30.0
    round: float = 600.0
    word: float = 10.0
    chief: float = 300.0
    start: float = 120.0
