"""A dynamic table that is larger than the memory it may take, beside the same table in memory, round by round.

    python benchmarks/tier.py                             rows of 64 float32, a million, a tenth of them in memory
    python benchmarks/tier.py --path /nvme --rows 4000000     on another disk, a gigabyte

One process, no server and no network. A round has the keys of two workers, 4,096 each, drawn by Zipf's law: it updates
their rows by SGD, and looks up those of the next round, as a server does. Both tables make the same rounds, in turns,
and are compared at the end.

- `order`: "frequency" where keys came first that come often, as in training, "random" where any came first: then a page
  of 4 KiB has rows of both kinds.
- `pause`: time between two rounds, in which workers compute, and pages leave memory.
- `early`: the keys of the next round are told before the pause, as a hint tells them to a server. `tier_job.py`
  measures jobs with hints.
- `read` and `written` are pages of 4 KiB a round, by the system's word (/proc/self/io), so that they did come from a
  disk; that of a virtual machine may be the memory of its host. `resident` is by the system's word as well (mincore).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import tempfile
import time
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from tables import native

from psserver.devices import ServerDevice
from psserver.programs.kernels.kernels import Kernels
from psserver.tables.table import Table
from psserver.tiers import paging
from psserver.tiers.paging import PAGE
from psserver.tiers.tier import Tier
from pswire.model.tables import TableSpec
from pswire.model.tensor import address_of

BATCH, WORKERS, DIM = 4096, 2, 64
AIM = 2.0
"""What the ratio should be at most."""


@dataclass(frozen=True)
class Work:
    """One measurement.

    Attributes:
        rows: of the table.
        share: how many times larger than its memory it is.
        zipf: exponent of the keys' frequencies.
        order: of the keys' first rounds.
        pause: milliseconds between two rounds.
        early: True to tell the next keys before the pause.
    """

    rows: int
    share: int
    zipf: float
    order: str
    pause: float
    early: bool


class Keys:
    """Batches of keys."""

    def __init__(self, work: Work) -> None:
        frequencies = np.arange(1, work.rows + 1) ** -work.zipf
        self._sums = np.cumsum(frequencies / frequencies.sum())
        self._rng = np.random.default_rng(0)
        self._keys = np.arange(work.rows) if work.order == "frequency" else self._rng.permutation(work.rows)

    def batches(self) -> list[Any]:
        """Returns the keys of each worker, each once."""
        drawn = self._rng.random((WORKERS, BATCH))
        places = np.searchsorted(self._sums, drawn, "right").clip(0, len(self._keys) - 1)
        return [np.unique(self._keys[one]) for one in places]


def looked_up(table: Table, keys: Any) -> Any:
    """Returns rows by keys."""
    return table.rows_at(table.find(keys), keys)


def made_round(table: Table, number: int, now: list[Any], after: list[Any], told: bool) -> float:
    """Makes a round; returns the seconds that it took."""
    began = time.perf_counter()
    if not told:
        for keys in after:
            table.read_ahead(keys)
    opened = table.begin(number, np.concatenate(now), None, -1, [keys.size for keys in now])
    table.arrays[0][np.unique(opened.slots[opened.slots >= 0])] -= np.float32(0.01)
    table.commit()
    for keys in after:
        looked_up(table, keys)
    return time.perf_counter() - began


def used() -> dict[str, int]:
    """Returns what this process has used so far: pages read and written, and faults that had to wait for a disk."""
    words = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {"read": int(words["read_bytes"]) // PAGE, "written": int(words["write_bytes"]) // PAGE, "waited": faults}


def measure(work: Work, path: str, rounds: int) -> dict[str, Any]:
    """Measures one table in memory, and one in a file."""
    tier = Tier(path, work.rows * DIM * 4 // work.share)
    functions, spec = native(Kernels(ServerDevice(), patience=1)), TableSpec((DIM,))
    below = copy(functions)
    below.tier = tier
    tables = {"memory": Table(spec, native=functions), "tier": Table(spec, native=below)}
    for table in tables.values():
        for at in range(0, work.rows, BATCH):
            table.begin(1, np.arange(at, min(at + BATCH, work.rows)))
            table.commit()
    tier.settle()
    keys, times, resident = Keys(work), {name: list[float]() for name in tables}, []
    now = keys.batches()
    for number in range(2 * rounds):
        if number == rounds:
            before = used()
        after = keys.batches()
        for name, table in tables.items():
            if work.early:
                for each in after:
                    table.read_ahead(each)
            time.sleep(work.pause / 1e3)
            times[name].append(1e3 * made_round(table, 2 + number, now, after, work.early))
        rows = tables["tier"].arrays[0]
        resident.append(PAGE * int(paging.are_resident(address_of(rows), rows.nbytes // PAGE).sum()))
        now = after
    counted = {name: round((count - before[name]) / rounds) for name, count in used().items()}
    for first in range(0, work.rows, 1 << 16):
        some = np.arange(first, min(first + (1 << 16), work.rows))
        assert np.array_equal(*(looked_up(tables[kind], some) for kind in ("memory", "tier")))
    medians = {name: round(statistics.median(found[rounds:]), 2) for name, found in times.items()}
    tier.close()
    return {
        **asdict(work),
        "memory": medians["memory"],
        "tier": medians["tier"],
        "ratio": round(medians["tier"] / medians["memory"], 1),
        "keys a round": sum(map(len, now)),
        **counted,
        "table, MiB": work.rows * DIM * 4 >> 20,
        "bound, MiB": tier.memory >> 20,
        "resident at most, MiB": max(resident[rounds:]) >> 20,
        "load": round(os.getloadavg()[0], 1),
    }


@click.command()
@click.option("--path", default=tempfile.gettempdir(), show_default=True, help="A directory on the disk.")
@click.option("--rows", default=1_000_000, show_default=True, help="Rows of the table, of 64 float32.")
@click.option("--share", default=10, show_default=True, help="How many times larger than its memory it is.")
@click.option("--zipf", default=1.05, show_default=True, help="Exponent of the keys' frequencies.")
@click.option("--rounds", default=60, show_default=True, help="Rounds that are measured, and as many before.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there; times are in ms.")
def main(path: str, rows: int, share: int, zipf: float, rounds: int, file: Path | None) -> None:
    """Measures tables in files; times in ms."""
    found = []
    for order, pause, early in (
        ("frequency", 0.0, False),
        ("frequency", 50.0, False),
        ("frequency", 50.0, True),
        ("random", 50.0, False),
    ):
        figures = measure(Work(rows, share, zipf, order, pause, early), path, rounds)
        found.append(figures)
        for name, value in figures.items():
            print(f"{name:25} {value}")
        print(f"{'aim':25} {'reached' if figures['ratio'] <= AIM else 'missed'}: at most {AIM}\n", flush=True)
    if file:
        file.write_text(json.dumps({"format": 1, "tiers": found}, indent=1))


if __name__ == "__main__":
    main()
