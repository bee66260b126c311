"""Dynamic tables by themselves: find, create, gather, a round, growth to ten million keys, new rows and training.

    python benchmarks/tables.py                               everything
    python benchmarks/tables.py --part sizes --keys 100000    a table of this size alone
    python benchmarks/tables.py --part new --part training    million rows per second of the thread's processor time

One thread, no server. Each time is the median of laps over other keys, so that nothing is in a cache that would not be;
`min` is the least. Growth is from an empty table, 4,096 new keys a round: what is told of a round is the processor's
time of `begin` and `commit`.

`new` is of rounds in which all keys are new, from an empty table on. In a round of `training` two members send
gradients for half of the keys each, and look up what they need next, in a table of 500,000 rows. Both have Adagrad's
tensor beside the rows, `training` without it, too.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import click
import numpy as np

from psserver.devices import ServerDevice
from psserver.execution.execution import Execution
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare, ReadyRound
from psserver.programs.kernels.kernels import Kernels
from psserver.state.variables import Store
from psserver.tables.cells import CellIndex
from psserver.tables.native import Native
from psserver.tables.table import Table
from pswire.api import Contribution, RowRead
from pswire.cluster import Task
from pswire.model.first_values import RowInitializer
from pswire.model.hashing import BUCKETS
from pswire.model.log import Member
from pswire.model.plan import Apply, Operand, PlacedVariable, Plan, Reduction, Ref, VariableSpec
from pswire.model.program import Input, Node, Program
from pswire.model.tables import LRU, ROWS, Normal, SlotTensor, TablePart, TableSpec, Uniform
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload

BATCH = 4096
DIM = 64
SIZE = 500_000
MEMBERS = 2
PARTS = ("sizes", "growth", "new", "training")


def native(kernels: Kernels) -> Native:
    """Returns functions that are all compiled."""
    found = Native(kernels.compiler)
    found.index()
    found.first_values("float32")
    found.mark()
    found.count()
    kernels.compiler.groups()
    kernels.compiler.wait()
    assert found.index() is not None
    return found


def accumulator(dim: int) -> SlotTensor:
    """Returns Adagrad's tensor beside rows."""
    return SlotTensor("accumulator", "float32", (dim,), 0.1)


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
    table = Table(TableSpec((DIM,)), (accumulator(DIM),), native=functions)
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
    rounds = []
    for number, at in enumerate(range(0, size, BATCH)):
        keys = np.arange(at, at + BATCH)
        began = time.thread_time()
        table.begin(number, keys)
        table.commit()
        rounds.append(1e3 * (time.thread_time() - began))
    times = sorted(rounds)
    return {
        "keys": len(table),
        "dim": dim,
        "capacity": capacity,
        "growths": index.growths,
        "round, median": round(statistics.median(times), 3),
        "round, 99.9 %": round(times[int(0.999 * len(times))], 3),
        "round, longest": round(times[-1], 3),
        "evicted": table.evicted,
        "index bytes a key": round(index.nbytes / len(table), 1),
    }


# ---- Rows per second of the thread's processor time ----


def pace(batch: int, times: list[float]) -> dict[str, float]:
    """Returns million rows per second, by the median of some rounds and by the fastest."""
    return {"median": round(batch / statistics.median(times) / 1e6, 2), "best": round(batch / min(times) / 1e6, 2)}


def new_rows(functions: Native, dim: int, batch: int, laps: int) -> dict[str, Any]:
    """Measures rounds that make all of their rows."""
    table = Table(TableSpec((dim,)), (accumulator(dim),), native=functions)
    keys = np.random.default_rng(0).permutation(8 * laps * batch)[: laps * batch].reshape(laps, batch)
    times = []
    for number, own in enumerate(keys, 1):
        began = time.thread_time()
        table.begin(number, own)
        table.commit()
        times.append(time.thread_time() - began)
    over = table.in_memory / len(table) - 2 * 4 * dim
    return {f"million new rows/s, dim {dim}, {batch} a round": pace(batch, times), "bytes beside a row": round(over, 1)}


def program(optimizer: str, dim: int) -> Program:
    """Returns the update of a table by an optimizer."""
    table, number = TensorSpec("float32", (ROWS, dim)), TensorSpec("float32", ())
    value, rate = Input("value", table), Input("operand", number)
    if optimizer == "sgd":
        moved = (Node("multiply", (1, 2)), Node("subtract", (0, 3)))
        return Program((Input("variable", table), value, rate), moved, ((0, 4),), ())
    scaled = (Node("square", (2,)), Node("add", (1, 4)), Node("sqrt", (5,)), Node("divide", (2, 6)))
    nodes = (*scaled, Node("multiply", (7, 3)), Node("subtract", (0, 8)))
    return Program((*[Input("variable", table)] * 2, value, rate), nodes, ((1, 5), (0, 9)), ())


class Trained:
    """A table of `SIZE` rows on a server without a network.

    Args:
        kernels: the server's.
        functions: compiled functions of tables.
        optimizer: "sgd" or "adagrad".
        dim: elements of a row.
    """

    def __init__(self, kernels: Kernels, functions: Native, optimizer: str, dim: int) -> None:
        self._kernels = kernels
        self._store = Store(0, kernels.device, 0, functions)
        slots = [None, accumulator(dim)][: 1 + (optimizer == "adagrad")]
        for id, slot in enumerate(slots):
            part = TablePart("table", TableSpec((dim,)), 0, BUCKETS, slot)
            spec = VariableSpec(part.whole, part.tensor, part=part)
            self._store.declare(PlacedVariable(id, spec, (0,)))
        args = (*[Ref("variable", id) for id in range(len(slots))], Ref("reduction", 0), Ref("operand", 0))
        rows = TensorSpec("float32", (ROWS, dim))
        self._plan = Plan(
            (Reduction("sum", rows, (0,), "table", "keys"),),
            operands=(Operand(TensorSpec("float32", ()), (0,)),),
            programs=(program(optimizer, dim),),
            applies=(Apply(0, (0,), args),),
        )
        self._prepared = PreparedPlan(self._plan, 0)
        self._round = 0
        for at in range(0, SIZE, BATCH):
            self.train([(np.arange(at, min(at + BATCH, SIZE)), np.empty(0, np.int64))], dim)

    def train(self, members: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]], dim: int) -> float:
        """Makes a round; returns its seconds. Each member has the keys of its gradient, and those that it looks up."""
        self._round += 1
        parts = []
        for place, (keys, asked) in enumerate(members):
            rows = np.full((len(keys), dim), 1e-3, "float32")
            payload = Payload.pack([np.array(0.01, "float32"), np.stack([keys, np.ones_like(keys)]), rows])
            more = {"rows": (len(keys),), "lookups": (RowRead(0, asked.tobytes()),)}
            said = Contribution(place + 1, 1, self._round, self._plan.id, (1.0,), **more)  # type: ignore[arg-type]
            parts.append(MemberShare(Member(Task("worker", place), place + 1, 1), said, payload))
        job = ReadyRound(self._round, self._prepared, tuple(parts), (), lambda: "a round")
        began = time.thread_time()
        execution = Execution(job, self._kernels)
        variables = self._store.borrow(execution.reads(), True, {})
        execution.step(variables, self._store.take_spare, self._store.room)
        return time.thread_time() - began


def training(kernels: Kernels, functions: Native, optimizer: str, dim: int, laps: int) -> dict[str, Any]:
    """Measures rounds of a table of which all rows are there, in batches of 4,096 and of 16,384 rows."""
    trained, found = Trained(kernels, functions, optimizer, dim), dict[str, Any]()
    rng = np.random.default_rng(0)
    for batch in (BATCH, 4 * BATCH):
        own = [[np.sort(rng.choice(SIZE, batch // MEMBERS, False)) for _ in range(MEMBERS)] for _ in range(9)]
        turns = [list(zip(own[lap % 9], own[(lap + 1) % 9], strict=True)) for lap in range(laps + 4)]
        for turn in turns[:4]:
            trained.train(turn, dim)
            kernels.compiler.wait()
        name = f"million rows/s, dim {dim}, {optimizer}, {batch} a round"
        found[name] = pace(batch, [trained.train(turn, dim) for turn in turns[4:]])
    return found


@click.command()
@click.option("--part", multiple=True, type=click.Choice(PARTS), help="What is measured; the default is everything.")
@click.option("--keys", type=int, multiple=True, help="Sizes of tables; the default is 0.1, 1 and 5 million.")
@click.option("--laps", default=60, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there; times are in ms.")
def main(part: tuple[str, ...], keys: tuple[int, ...], laps: int, file: Path | None) -> None:
    """Measures tables; times in ms."""
    kernels = Kernels(ServerDevice(), 1, patience=1, smallest=0)
    functions = native(kernels)
    found: list[dict[str, Any]] = []
    measures: dict[str, list[Callable[[], dict[str, Any]]]] = {
        "sizes": [partial(of_size, functions, size, laps) for size in keys or (100_000, 1_000_000, 5_000_000)],
        "growth": [partial(growth, functions, 10_000_000, 4), partial(growth, functions, 4_000_000, 4, 1_000_000)],
        "new": [partial(new_rows, functions, dim, size, laps) for dim in (16, 64) for size in (BATCH, 4 * BATCH)],
        "training": [
            partial(training, kernels, functions, optimizer, dim, laps)
            for dim in (16, 64, 128)
            for optimizer in ("sgd", "adagrad")
        ],
    }
    for measure in chain.from_iterable(measures[name] for name in part or PARTS):
        figures = measure()
        found.append(figures)
        for name, value in figures.items():
            print(f"{name:45} {value}")
        print()
    if file:
        file.write_text(json.dumps({"format": 1, "tables": found}, indent=1))


if __name__ == "__main__":
    main()
