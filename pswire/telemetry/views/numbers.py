"""Sizes, times, shapes and tasks, as people read them: in `psctl`, and on the status page."""

from __future__ import annotations

import math
from collections.abc import Iterable

SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB")

THOUSANDS = ("", "k", "M", "G", "T")

TIMES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


def size(nbytes: float) -> str:
    """Bytes for people: `1.5 MiB`."""
    power = min(int(math.log2(nbytes) // 10), len(SIZES) - 1) if nbytes >= 1 else 0
    number = nbytes / 1024**power
    return f"{number:.{0 if power == 0 or number >= 100 else 1}f} {SIZES[power]}"


def count(number: float) -> str:
    """A number of things for people: `950`, `1.5 M`."""
    power = min(int(math.log10(number) // 3), len(THOUSANDS) - 1) if number >= 1 else 0
    return f"{number / 1000**power:.{1 if power else 0}f} {THOUSANDS[power]}".rstrip()


def used(used: int, limit: int) -> str:
    """Bytes, and of how many; a limit of 0 is none."""
    return f"{size(used)} of {size(limit)}" if limit else size(used)


def duration(seconds: float) -> str:
    """A time for people: `12 s`, `3.5 h`."""
    for length, unit in TIMES:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def shape(sizes: Iterable[int | None]) -> str:
    """A shape for people: `[64,10]`; of a dynamic table, which has no size, `[?,10]`."""
    return f"[{','.join('?' if n is None else str(n) for n in sizes)}]"


def short(task: str) -> str:
    """A task for tables: `worker-1` for `/job:worker/task:1`; anything else stays."""
    return task.removeprefix("/job:").replace("/task:", "-")


def ago(seconds: float) -> str:
    """How long ago something was, for people; of rounds that follow each other fast as exact as they are."""
    return f"{seconds:.2f} s" if seconds < 10 else duration(seconds)
