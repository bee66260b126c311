"""What a benchmark found, for people: tables on a terminal, and a plot."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

LIMITS = (
    ("memcpy", "memcpy_gb_per_s", "GB/s"),
    ("TCP one way", "tcp_gb_per_s", "GB/s"),
    ("TCP round trip", "tcp_round_trip_us", "us"),
)
"""Rows of the first table: words, the key in the report, the unit."""

SETTINGS = {
    "workers": "workers: {}",
    "servers": "servers: {}",
    "optimizer": "{}",
    "allocator": "{} allocator",
    "security": "{}",
    "gradients": "gradients in {}",
    "compression": "compression: {}",
    "ps_strategy": "{}",
    "device": "variables on {}",
    "worker_device": "replicas on {}",
}
"""The settings in which clusters differ beside transport and chief: the key in the report, and words. Settings that all
clusters share are in the title."""

AGAINST = {"grpc": ("to_tcp", "TCP"), "tcp": ("to_tcp", "TCP"), "shm": ("to_memcpy", "memcpy")}
"""The copy that the bytes of a transport are compared with: its key in the report, and its name."""

WIDTH = 160
"""Of the tables, in characters, where the terminal is narrower."""

COLOURS = {"grpc": "tab:blue", "tcp": "tab:orange", "shm": "tab:green"}
STYLES = ("o-", "s--", "^:", "v-.")


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


# ---- Tables ----


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The report as two tables: limits, and rounds beside them."""
    limits = Table("limit", "median", title="Limits of this machine", title_justify="left")
    for name, key, unit in LIMITS:
        limits.add_row(name, f"{found['limits'][key]['median']:.3g} {unit}")
    yield limits
    cells = [_cells(row, _differing(found)) for row in found["rounds"]]
    title = f"Synchronous rounds, {_common(found)}; GB/s counts pushes and pulls of all workers, CPU is ms for a round"
    rounds = Table(title=title, title_justify="left")
    for heading in cells[0]:
        left = heading in ("size", "transport", "chief")
        rounds.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in cells:
        rounds.add_row(*row.values())
    yield rounds


def _differing(found: dict[str, Any]) -> list[str]:
    """The keys of `SETTINGS` by which the rows differ."""
    return [key for key in SETTINGS if len({row[key] for row in found["rounds"]}) > 1]


def _common(found: dict[str, Any]) -> str:
    """In words, what all rows have in common."""
    first = found["rounds"][0]
    return ", ".join(SETTINGS[key].format(first[key]) for key in SETTINGS if key not in _differing(found))


def _cells(row: dict[str, Any], differing: Sequence[str]) -> dict[str, str]:
    """One line of the table, by heading."""
    key, limit = AGAINST[row["transport"]]
    cells = {name: str(row[name]) for name in ("size", "transport", "chief", *differing)}
    cells |= {name: f"{row['ms'][name]:.4g}" for name in ("median", "p90")}
    if "optimizer" in differing:
        cells["/ sgd"] = f"{row['to_sgd']:.2f}" if row["to_sgd"] else "-"
    if "security" in differing:
        cells["/ token"] = f"{row['to_token']:.2f}" if row["to_token"] else "-"
    if "compression" in differing:
        cells["/ none"] = f"{row['to_whole']:.2f}" if row["to_whole"] else "-"
        cells["sent MB"] = f"{row['sent_mb']:.3g}"
    cells |= {"GB/s": f"{row['gb_per_s']:.2g}", "/ limit": f"{row[key]:.2g} {limit}"}
    cells |= {"server CPU": f"{row['server_cpu_ms']:.3g}", "worker CPU": f"{row['worker_cpu_ms']:.3g}"}
    return cells | {"server MB": f"{row['server_rss_mb']:.0f} ({round(row['server_growth_mb']):+d})"}


# ---- The plot ----


def publish(
    console: Console,
    found: dict[str, Any],
    tables: Iterable[Table],
    json_file: Path | None,
    draw: Callable[[], object] | None,
) -> None:
    """Shows what was measured.

    Args:
        console: where the tables go.
        found: all of it, for the file.
        tables: what a person reads.
        json_file: where it is written, if anywhere.
        draw: makes the plot, if one is wanted.
    """
    console.width = max(console.width, WIDTH)
    for table in tables:
        console.print(table)
    if json_file:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if draw:
        try:
            draw()
        except ImportError:
            console.print("not drawn: matplotlib is not installed; pip install -e '.[bench]'")


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws time of a round against its size, by transport, with the limits as lines.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in found["rounds"]:
        of = row["transport"], _kind(row, _differing(found))
        series.setdefault(of, []).append((row["nbytes"], row["ms"]["median"]))
    styles = dict(zip(dict.fromkeys(kind for _, kind in series), cycle(STYLES), strict=False))
    for (transport, kind), points in series.items():
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, styles[kind], color=COLOURS[transport], label=f"{transport} transport, {kind}")
    _draw_limits(found, axes)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="median of a round, ms")
    sizes = {row["nbytes"]: f"{row['size']} in {row['variables']}" for row in found["rounds"]}
    axes.set_xticks(list(sizes), list(sizes.values()))
    axes.set_xticks([], minor=True)
    axes.set_title(f"A synchronous round: {_common(found)}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _kind(row: dict[str, Any], differing: Sequence[str]) -> str:
    """Returns in words how clusters of one transport differ."""
    chief = "a chief of its own" if row["chief"] == "own" else "worker 0 as chief"
    return ", ".join([chief, *(SETTINGS[key].format(row[key]) for key in differing)])


def _draw_limits(found: dict[str, Any], axes: Any) -> None:
    """How long the limits would take to move what a round of the most workers moves."""
    workers = max(row["workers"] for row in found["rounds"])
    sizes = sorted({row["nbytes"] for row in found["rounds"]})
    limits = found["limits"]
    ping = limits["tcp_round_trip_us"]["median"] / 1e3
    for name, key, first, style in (("TCP", "tcp_gb_per_s", ping, "--"), ("memcpy", "memcpy_gb_per_s", 0.0, ":")):
        times = [first + 2 * workers * size / limits[key]["median"] / 1e6 for size in sizes]
        axes.plot(sizes, times, style, color="black", label=f"limit: all bytes by {name}")
