"""Dynamic tables by themselves: find, create, gather, a round, and growth to ten million keys.

    python benchmarks/tables.py                     everything
    python benchmarks/tables.py --keys 100000       a table of this size alone, and no growth

One thread, no server. Each time is the median of laps over other keys, so that nothing is in a cache that would not be;
`min` is the least. Growth is from an empty table, 4,096 new keys a round: what is told of a round is the processor's
time of `begin` and `commit`, and of the growth of buckets in it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from psserver.devices import ServerDevice
from psserver.programs.kernels.compiler import Compiler
from psserver.tables.cells import CellIndex
from psserver.tables.native import Native
from psserver.tables.table import Table
from pswire.model.first_values import RowInitializer
from pswire.model.tables import LRU, Normal, SlotTensor, TableSpec, Uniform

BATCH = 4096
DIM = 64


def native() -> Native:
    """Returns functions that are all compiled."""
    compiler = Compiler(ServerDevice(), 1)
    found = Native(compiler)
    found.index()
    found.first_values("float32")
    found.mark()
    found.count()
    compiler.wait()
    assert found.index() is not None
    return found


def measured(work: Callable[[int], object], laps: int) -> dict[str, float]:
    """Returns the median and the least time of some laps, in ms."""
    times = []
    for lap in range(laps):
        began = time.perf_counter()
        work(lap)
        times.append(1e3 * (time.perf_counter() - began))
    return {"median": round(statistics.median(times), 4), "min": round(min(times), 4)}


def of_size(functions: Native, size: int, laps: int) -> dict[str, Any]:
    """Measures a table of a number of keys."""
    rng = np.random.default_rng(0)
    table = Table(TableSpec((DIM,)), (SlotTensor("accumulator", "float32", (DIM,), 0.1),), native=functions)
    for at in range(0, size, 1 << 16):
        table.begin(1, np.arange(at, min(at + (1 << 16), size)))
        table.commit()
    known = rng.integers(0, size, (laps, BATCH))
    new = np.arange(size, size + laps * BATCH).reshape(laps, BATCH)
    index = table._contents.index
    assert isinstance(index, CellIndex)
    first = RowInitializer(TableSpec((DIM,)), functions.first_values)
    normal = RowInitializer(TableSpec((DIM,), initializer=Normal()), functions.first_values)
    entries = [index.find(keys)[1] for keys in known]
    weights = table.arrays[0]

    def update(lap: int) -> None:
        table.begin(2, known[lap])
        table.commit()

    def create(lap: int) -> None:
        table.begin(3, new[lap])
        table.commit()

    found: dict[str, Any] = {"keys": size, "index bytes a key": round(index.nbytes / size, 1)}
    found["find"] = measured(lambda lap: index.find(known[lap]), laps)
    found["find, none there"] = measured(lambda lap: index.find(new[lap]), laps)
    found["gather"] = measured(lambda lap: weights.take(entries[lap] - 1, axis=0, mode="clip"), laps)
    found["lookup"] = measured(lambda lap: table.rows_at(table.find(known[lap]), known[lap]), laps)
    found["first values, uniform"] = measured(lambda lap: first.rows(new[lap]), laps)
    found["first values, normal"] = measured(lambda lap: normal.rows(new[lap]), laps)
    found["round, all known"] = measured(update, laps)
    found["round, all new"] = measured(create, laps)
    return found


def growth(functions: Native, size: int, dim: int, capacity: int = 0) -> dict[str, Any]:
    """Measures growth from nothing to a number of keys, or rounds of a table at its capacity."""
    eviction = LRU() if capacity else None
    spec = TableSpec((dim,), initializer=Uniform(), capacity=capacity, eviction=eviction)
    table = Table(spec, native=functions)
    table.begin(0, np.zeros(0, np.int64))
    table.commit()
    index = table._contents.index
    assert isinstance(index, CellIndex)
    rebuild, pauses, rounds = index._rebuild, [0.0], []

    def watched(*args: Any) -> None:
        began = time.thread_time()
        rebuild(*args)
        pauses.append(1e3 * (time.thread_time() - began))

    setattr(index, "_rebuild", watched)  # noqa: B010
    for number, at in enumerate(range(0, size, BATCH)):
        keys = np.arange(at, at + BATCH)
        began, counted = time.thread_time(), len(pauses)
        table.begin(number, keys)
        table.commit()
        rounds.append((1e3 * (time.thread_time() - began), sum(pauses[counted:]), len(pauses) - counted))
    times = sorted(each[0] for each in rounds)
    late = rounds[len(rounds) // 2 :]
    return {
        "keys": len(table),
        "dim": dim,
        "capacity": capacity,
        "growths": index.growths,
        "longest growth in a round": round(max(each[1] for each in rounds), 3),
        "longest growth in a round of the second half": round(max(each[1] for each in late), 3),
        "round, median": round(statistics.median(times), 3),
        "round, 99.9 %": round(times[int(0.999 * len(times))], 3),
        "round, longest": round(times[-1], 3),
        "evicted": table.evicted,
        "index bytes a key": round(index.nbytes / len(table), 1),
    }


@click.command()
@click.option("--keys", type=int, multiple=True, help="Sizes of tables; the default is 0.1, 1 and 5 million.")
@click.option("--laps", default=60, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there; times are in ms.")
def main(keys: tuple[int, ...], laps: int, file: Path | None) -> None:
    """Measures tables; times in ms."""
    functions = native()
    found: list[dict[str, Any]] = []
    parts: list[Callable[[], dict[str, Any]]] = [
        lambda size=size: of_size(functions, size, laps)  # type: ignore[misc]
        for size in keys or (100_000, 1_000_000, 5_000_000)
    ]
    if not keys:
        parts.append(lambda: growth(functions, 10_000_000, 4))
        parts.append(lambda: growth(functions, 4_000_000, 4, capacity=1_000_000))
    for part in parts:
        figures = part()
        found.append(figures)
        for name, value in figures.items():
            print(f"{name:45} {value}")
        print()
    if file:
        file.write_text(json.dumps({"format": 1, "tables": found}, indent=1))


if __name__ == "__main__":
    main()
