"""Options of dynamic tables: how many servers have them, where their rows lie, and how long rows live."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pswire.errors import InvalidRequest
from pswire.model.hashing import BUCKETS
from pswire.model.tables import TimeToLive
from pswire.sizes import parse_bytes

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*")


@dataclass(frozen=True)
class HashPartitioner:
    """Cuts a table into parts by the hashes of keys: each part has a range of the 1024 buckets.

    Source: the name is that of TensorFlow Recommenders Addons; it is the only partitioner.

    Args:
        shards: number of parts, each on its own server; for None or more than the number of servers, all servers.
        buckets: 1024.

    Raises:
        ValueError: `shards` is not a number of parts, or `buckets` is another number.
    """

    shards: int | None = None
    buckets: int = BUCKETS

    def __post_init__(self) -> None:
        if self.buckets != BUCKETS:
            raise ValueError(
                f"buckets is {self.buckets!r}, but must be {BUCKETS}: the keys of each table are always spread "
                "over that many buckets"
            )
        check_shards(self.shards)


def check_shards(shards: int | None) -> int | None:
    """Returns a number of parts; raises `ValueError` if it is none."""
    if shards is not None and (isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= BUCKETS):
        raise ValueError(f"shards is {shards!r}; use a number from 1 to {BUCKETS}, or None for all servers")
    return shards


@dataclass(frozen=True)
class StorageOption:
    """The place of a table's rows.

    Source: the name is that of DeepRec.

    Args:
        kind: "dram", the memory of the servers.
        path: the directory for rows on disks ("dram_ssd"), which is not supported; must be the default.
        dram: bytes of memory for "dram_ssd", which is not supported; must be the default.

    Raises:
        ValueError: another kind, or a path or bytes are given.
    """

    kind: str = "dram"
    path: str | None = None
    dram: int | str | None = None

    def __post_init__(self) -> None:
        if self.kind != "dram" or self.path is not None or self.dram is not None:
            kind = self.kind if self.kind != "dram" else "dram_ssd"
            raise ValueError(
                f"storage {kind!r} is not supported: rows are kept in the servers' memory; use "
                "StorageOption('dram') with a capacity or a memory_limit"
            )


def TTL(time: float | str) -> TimeToLive:
    """Returns the policy that evicts rows that were not updated for a time.

    The time is measured on the workers and checked when the table is updated: without updates nothing is evicted.

    Args:
        time: seconds, or a number with a unit: "90s", "30m", "12h", "7d", "2w".

    Returns:
        The policy, for `get_variable(eviction=...)`.

    Raises:
        ValueError: `time` is not a time, or is negative.
    """
    if isinstance(time, str):
        match = _TIME.fullmatch(time)
        if not match:
            raise ValueError(f"TTL({time!r}) is not a duration; use a number with a unit, such as '7d', '12h' or '30m'")
        time = float(match[1]) * _SECONDS[match[2]]
    policy = TimeToLive(float(time))
    try:
        policy.check()
    except InvalidRequest:
        raise ValueError(f"TTL({time!r}) is not a duration; use a number of seconds of at least 0") from None
    return policy


def limit_of(memory_limit: int | str | None, name: str) -> int:
    """Returns a memory limit in bytes, 0 for none.

    Args:
        memory_limit: bytes, or a size such as "4GiB"; None for no limit.
        name: the table's name, for messages.

    Raises:
        ValueError: it is no size.
    """
    if isinstance(memory_limit, str):
        return parse_bytes(memory_limit, f"memory_limit of table {name!r}")
    return memory_limit or 0
