"""Checkpoints of dynamic tables: for how long one stops a server, what a delta costs, restores, and lookups in files.

    python benchmarks/table_checkpoints.py                  a gigabyte: rows of 64 float32, and Adagrad's sums beside
    python benchmarks/table_checkpoints.py --rows 100000    fewer, for a first look

One process, no server and no network: one thread makes rounds of 4,096 keys, another one writes the files, as in a
server. Times are medians; `min` is the least. Files are in the page cache where they are read.

- `hold` is what a checkpoint takes while rounds wait; `round` and `round while writing` are of the table alone.
- The delta has 1 % of the rows, those that a round each of 4,096 keys has changed; `of the whole` compares both.
- A restore makes a table for a server of a checkpoint, all of it, with its index.
- `lookup` is of 4,096 keys in a `Reader`; a million of rows are in its table.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

import psclient as ps
from psserver.checkpoints.tables import FrozenPart, Wanted, restored
from psserver.devices import ServerDevice
from psserver.programs.kernels.compiler import Compiler
from psserver.tables.native import Native
from psserver.tables.table import Table
from pswire.checkpoint.assembly import manifest_of
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.storage import storage_at
from pswire.checkpoint.writer import Frozen, write_manifest, write_shard
from pswire.model.plan import SnapshotOrder
from pswire.model.tables import SlotTensor, TableSpec

BATCH, DIM = 4096, 64
SLOT = SlotTensor("adagrad/users/sum", "float32", (DIM,), 0.1)
READ_ROWS = 1_000_000
STOP_MS, SHARE, RESTORE = 10.0, 0.03, 1.0
"""What has to be reached: ms, parts of the whole, GB/s."""


def native() -> Native:
    """Returns functions that are all compiled."""
    compiler = Compiler(ServerDevice(), 1)
    found = Native(compiler)
    found.index(), found.mark(), found.first_values("float32")
    compiler.wait()
    return found


def filled(functions: Native, rows: int) -> Table:
    """Returns a table with rows for the keys from 0 on."""
    table = Table(TableSpec((DIM,)), (SLOT,), native=functions)
    for at in range(0, rows, 1 << 16):
        table.begin(table.round + 1, np.arange(at, min(at + (1 << 16), rows)))
        table.commit()
    return table


class Bench:
    """Saves and restores one table.

    Args:
        functions: compiled functions.
        rows: number of rows.
        root: directory of the checkpoints.
    """

    def __init__(self, functions: Native, rows: int, root: Path) -> None:
        self._functions = functions
        self._rows = rows
        self._place = storage_at(root)
        self._rng = np.random.default_rng(0)
        self.table = filled(functions, rows)

    def round(self, keys: Any = None) -> float:
        """Makes a round, which writes rows; returns its seconds."""
        keys = self._rng.integers(0, self._rows, BATCH) if keys is None else keys
        began = time.perf_counter()
        opened = self.table.begin(self.table.round + 1, keys)
        for array in self.table.arrays:
            array[np.unique(opened.slots[opened.slots >= 0])] += np.float32(1)
        self.table.commit()
        return time.perf_counter() - began

    def hold(self, name: str, since: int = -1, base: str = "") -> tuple[Frozen, float]:
        """Holds the table; returns it, and the seconds that this took."""
        began = time.perf_counter()
        part = FrozenPart("users", self.table, self.table.freeze(since), bool(base))
        seconds = time.perf_counter() - began
        order = SnapshotOrder(name, (0,), state=json.dumps({"base": base}))
        return Frozen(order, 0, 1, (), {}, tables={"users": part}), seconds

    def write(self, frozen: Frozen) -> float:
        """Writes what is held; returns the seconds."""
        began = time.perf_counter()
        shard = write_shard(self._place, frozen, lambda value: (value,), lambda name: None)
        write_manifest(self._place, frozen, manifest_of([shard], frozen.order).text())
        return time.perf_counter() - began

    def write_beside_rounds(self, frozen: Frozen) -> list[float]:
        """Writes what is held in a thread of its own; returns the seconds of each round that was made meanwhile."""
        thread = threading.Thread(target=self.write, args=(frozen,))
        thread.start()
        rounds = []
        while thread.is_alive():
            rounds.append(self.round())
        thread.join()
        return rounds

    def opened(self, name: str) -> SavedCheckpoint:
        """Opens a checkpoint."""
        return SavedCheckpoint.at(self._place, name)

    def restore(self, name: str) -> float:
        """Makes a table of a checkpoint; returns the seconds."""
        saved, spec = self.opened(name), self.table.spec
        wanted = Wanted("users", spec, (SLOT,), self.table.buckets, "users", {SLOT.name: SLOT.name})
        began = time.perf_counter()
        table = restored(saved, wanted, self._functions)
        seconds = time.perf_counter() - began
        assert len(table) == len(self.table)
        return seconds


def nbytes(saved: SavedCheckpoint) -> int:
    """Returns the bytes of a checkpoint's files."""
    return sum(saved.manifest.files.values())


def measured(work: Callable[[], float], laps: int) -> dict[str, float]:
    """Returns the median and the least of the seconds of some laps, in ms."""
    times = [1e3 * work() for _ in range(laps)]
    return {"median": round(statistics.median(times), 3), "min": round(min(times), 3)}


def measure(functions: Native, rows: int, laps: int, root: Path) -> dict[str, Any]:
    """Measures all but lookups."""
    bench = Bench(functions, rows, root)
    found: dict[str, Any] = {"rows": rows}
    found["hold, ms"] = measured(lambda: bench.hold("held")[1], 10)
    found["round, ms"] = measured(bench.round, 50)
    beside = bench.write_beside_rounds(bench.hold("beside")[0])
    found["round while writing, ms"] = {
        "median": round(1e3 * statistics.median(beside), 3),
        "longest": round(1e3 * max(beside), 3),
        "rounds": len(beside),
    }
    whole = measured(lambda: bench.write(bench.hold("whole")[0]), laps)
    since = bench.table.round
    for at in range(0, rows // 100, BATCH):
        bench.round(bench._rng.integers(0, rows, min(BATCH, rows // 100 - at)))
    delta = measured(lambda: bench.write(bench.hold("delta", since, "whole")[0]), laps)
    size, changes = nbytes(bench.opened("whole")), nbytes(bench.opened("delta"))
    found["size, MB"] = round(size / 1e6, 1)
    found["write, GB/s"] = round(size / whole["median"] / 1e6, 3)
    found["delta, bytes of the whole"] = round(changes / size, 4)
    found["delta, time of the whole"] = round(delta["median"] / whole["median"], 4)
    restores = measured(lambda: bench.restore("whole"), laps)
    found["restore, GB/s"] = round(size / restores["median"] / 1e6, 3)
    found["restore of a delta, GB/s"] = round(size / measured(lambda: bench.restore("delta"), laps)["median"] / 1e6, 3)
    return found


def lookups(functions: Native, root: Path, laps: int) -> dict[str, Any]:
    """Measures lookups in a reader, without and with a delta upon what it has."""
    bench = Bench(functions, READ_ROWS, root)
    bench.write(bench.hold("read-1")[0])
    since = bench.table.round
    bench.round()
    bench.write(bench.hold("read-2", since, "read-1")[0])
    found: dict[str, Any] = {}
    for name in ("read-1", "read-2"):
        began = time.perf_counter()
        table = ps.dynamic_embedding.Reader(str(root / name))["users"]
        found[f"opening {name}, ms"] = round(1e3 * (time.perf_counter() - began), 3)
        keys = [np.random.default_rng(lap).integers(0, READ_ROWS, BATCH) for lap in range(laps)]

        def look(table: Any = table, keys: Any = keys) -> float:
            each = keys.pop()
            began = time.perf_counter()
            table.rows_at(table.find(each), each)
            return time.perf_counter() - began

        found[f"lookup in {name}, ms"] = measured(look, laps)
    return found


@click.command()
@click.option("--rows", default=2_000_000, show_default=True, help="Rows of the table; one takes 512 bytes.")
@click.option("--laps", default=5, show_default=True)
@click.option("--directory", type=click.Path(path_type=Path), help="Where files are written; a temporary one else.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
def main(rows: int, laps: int, directory: Path | None, file: Path | None) -> None:
    """Measures checkpoints of tables."""
    functions = native()
    with tempfile.TemporaryDirectory(dir=directory) as root:
        found = measure(functions, rows, laps, Path(root)) | lookups(functions, Path(root), 50)
    for name, value in found.items():
        print(f"{name:32} {value}")
    delta = max(found["delta, bytes of the whole"], found["delta, time of the whole"])
    reached = {
        f"hold <= {STOP_MS} ms": found["hold, ms"]["median"] <= STOP_MS,
        f"delta <= {SHARE} of the whole": delta <= SHARE,
        f"restore >= {RESTORE} GB/s": found["restore, GB/s"] >= RESTORE,
    }
    for name, is_reached in reached.items():
        print(f"{name:32} {'reached' if is_reached else 'missed'}")
    if file:
        file.write_text(json.dumps({"format": 1, "figures": found}, indent=1))


if __name__ == "__main__":
    main()
