"""What a benchmark found, for people: tables on a terminal, and a plot."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from limits import quantile
from rich.table import Table

LIMITS = (
    ("memcpy", "memcpy_gb_per_s", "GB/s"),
    ("TCP one way", "tcp_gb_per_s", "GB/s"),
    ("TCP round trip", "tcp_round_trip_us", "us"),
)
"""Rows of the first table: words, the key in the report, the unit."""

COLUMNS = ("size", "workers", "servers", "chief", "min", "median", "p90 ms", "GB/s", "/ TCP", "/ memcpy")


def spread(values: Sequence[float], scale: float) -> dict[str, float]:
    """Least, median and 90th percentile, each times `scale`."""
    found = {"min": min(values), "median": statistics.median(values), "p90": quantile(values, 0.9)}
    return {name: scale * value for name, value in found.items()}


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "") if sys.platform == "linux" else ""
    return {
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "system": system or platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load": os.getloadavg()[0],
    }


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The report as two tables: limits, and rounds beside them."""
    limits = Table("limit", "median", title="Limits of this machine", title_justify="left")
    for name, key, unit in LIMITS:
        limits.add_row(name, f"{found['limits'][key]['median']:.3g} {unit}")
    yield limits
    rounds = Table(title="Synchronous rounds; GB/s counts pushes and pulls of all workers", title_justify="left")
    for heading in COLUMNS:
        rounds.add_column(heading, justify="left" if heading in ("size", "chief") else "right", no_wrap=True)
    for row in found["rounds"]:
        times = [f"{row['ms'][key]:.4g}" for key in ("min", "median", "p90")]
        rates = [f"{row[key]:.2g}" for key in ("gb_per_s", "to_tcp", "to_memcpy")]
        rounds.add_row(row["size"], str(row["workers"]), str(row["servers"]), row["chief"], *times, *rates)
    yield rounds


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws time of a round against its size, with the limits as lines.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    series: dict[str, list[tuple[float, float]]] = {}
    for row in found["rounds"]:
        label = f"{row['workers']} workers, {row['servers']} servers, chief: {row['chief']}"
        series.setdefault(label, []).append((row["nbytes"], row["ms"]["median"]))
    for label, points in series.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=label)
    _draw_limits(found, axes)
    axes.set(xscale="log", yscale="log", xlabel="bytes of parameters", ylabel="median of a round, ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _draw_limits(found: dict[str, Any], axes: Any) -> None:
    """How long the limits would take to move what a round of the most workers moves."""
    workers = max(row["workers"] for row in found["rounds"])
    sizes = sorted({row["nbytes"] for row in found["rounds"]})
    limits = found["limits"]
    ping = limits["tcp_round_trip_us"]["median"] / 1e3
    for name, key, first in (("TCP", "tcp_gb_per_s", ping), ("memcpy", "memcpy_gb_per_s", 0.0)):
        times = [first + 2 * workers * size / limits[key]["median"] / 1e6 for size in sizes]
        axes.plot(sizes, times, "--", label=f"{name}, {workers} workers")
