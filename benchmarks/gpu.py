"""Update programs, rows and copies on a GPU, beside what the card and its bus can do.

    python benchmarks/gpu.py                     on gpu:0
    python benchmarks/gpu.py --part rows         only the rows
    python benchmarks/gpu.py --quick             for a first look

In this process, without a server: what a server with `--device gpu:0` does with a round that has arrived. Limits are
measured in the same run, before and after:

- *device copy*: one array of the card copied into another; bytes read and written are both counted.
- *to the card*, *from the card*: pinned memory of the host, the way that contributions and values go.
- *launch*: a kernel that does nothing, from call to call.

The parts:

- *programs*: SGD, momentum and Adam. "kernel" is the compiled update alone, arrays on the card, by the card's clock,
  over several sets of arrays, so that none of them is in the card's cache; its limit is the device copy of the bytes
  that must move. "step" is all array work of a round of one worker (`Execution.step`), whose gradient is on the host
  and whose new values come back there, by the host's clock; its limit is the bus in both directions, and the kernel.
- *copies*: gradients of 4 KB in ten arrays to the host, and as many values back, as a replica's rounds copy them:
  together, and each by itself; and the same within the host. The host waits for the end.
- *rows*: an update of 4,096 random rows of a million x 64 (Adagrad, Adam, SGD), and a lookup of as many; the same on
  the CPU, in turns.

`--json FILE` writes `{"format", "machine", "card", "limits", "seconds"}`. Rounds of real processes with servers and
workers on a GPU: `round.py` and `rows.py` with `--device gpu:0` and `--worker-device gpu:0`. The round that the copies
belong to, on both: `round.py --sizes 4KB --worker-device cpu:0 --worker-device gpu:0`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import machine
from measures import spread
from rich.console import Console
from rich.table import Table
from update import CASES, TABLE, Case, Traced, Update, adagrad, adam, sgd

from psclient._src.arrays.devices import (
    CPU,
    Device,
    begin_downloads,
    begin_uploads,
    for_host,
    gpu_report,
    to_device,
)
from psclient._src.network.staging import fill, keep
from psserver.devices import ServerDevice
from psserver.execution.execution import Execution
from psserver.programs.kernels.kernels import Kernels
from psserver.programs.kernels.rows import apply_rows
from psserver.values.dense import Dense
from psserver.values.step import StepVariables
from psserver.values.value import Value

FORMAT = 1
LAPS, QUICK_LAPS = 100, 20
SIZES = {"4KB": 1_000, "1MB": 250_000, "100MB": 25_000_000}
"""Elements of each variable, float32."""

CACHED = 200_000_000
"""Bytes that the sets of arrays of one program have together, at least: several times the card's cache."""

PROGRAMS = ("sgd", "momentum", "adam")
COPIED = (400,) * 10
"""Bytes of each array that is copied."""

ROWS = 4096
ROW_UPDATES: dict[str, tuple[Update, int]] = {"SGD": (sgd, 1), "Adagrad": (adagrad, 2), "Adam": (adam, 3)}
"""Updates of rows, with their number of tables."""

PARTS = ("programs", "copies", "rows")
LIMITS = {"device copy": "GB/s", "to the card": "GB/s", "from the card": "GB/s", "launch": "us"}


class Card:
    """The device, and its clocks.

    Args:
        name: as `--device` has it.
    """

    def __init__(self, name: str) -> None:
        self.device = ServerDevice.parse(name)
        import cupy

        self.cupy: Any = cupy

    def seconds(self, work: Callable[[], object], laps: int) -> list[float]:
        """By the card's clock, of each lap."""
        cuda = self.cupy.cuda
        found = []
        for _ in range(laps):
            begin, end = cuda.Event(), cuda.Event()
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(cuda.get_elapsed_time(begin, end) / 1e3)
        return found

    def waited(self, work: Callable[[], object], laps: int) -> list[float]:
        """By the host's clock, until the card has done it."""
        found = []
        for _ in range(laps):
            start = time.perf_counter()
            work()
            self.cupy.cuda.get_current_stream().synchronize()
            found.append(time.perf_counter() - start)
        return found

    def pinned(self, size: int) -> Any:
        """Host memory, float32."""
        return np.frombuffer(self.cupy.cuda.alloc_pinned_memory(4 * size), "float32", size)

    def limits(self, laps: int) -> dict[str, list[float]]:
        """Bytes per second, and seconds of a launch, of each lap."""
        size = SIZES["100MB"]
        one, other = self.cupy.ones(4 * size, "float32"), self.cupy.zeros(4 * size, "float32")
        host, stream = self.pinned(size), self.cupy.cuda.get_current_stream()
        host.fill(1)
        nothing = self.cupy.ElementwiseKernel("", "float32 x", "", "nothing")
        small, nbytes = self.cupy.zeros(1, "float32"), 4 * size

        def rates(moved: int, work: Callable[[], object]) -> list[float]:
            self.seconds(work, 3)
            return [moved / each for each in self.seconds(work, laps)]

        launches = self.waited(lambda: [nothing(small) for _ in range(100)], laps)
        return {
            "device copy": rates(8 * nbytes, lambda: other.data.copy_from_device_async(one.data, 4 * nbytes, stream)),
            "to the card": rates(nbytes, lambda: one.data.copy_from_host_async(host.ctypes.data, nbytes, stream)),
            "from the card": rates(nbytes, lambda: one.data.copy_to_host_async(host.ctypes.data, nbytes, stream)),
            "launch": [each / 100 for each in launches],
        }


@dataclass(frozen=True)
class Line:
    """One kind of work.

    Attributes:
        name: what it is.
        seconds: of each lap.
        limit: seconds that its bytes take at the rates of this run; 0 for none.
    """

    name: str
    seconds: Sequence[float]
    limit: float


# ---- Programs ----


def programs(card: Card, rates: dict[str, float], laps: int) -> Iterator[Line]:
    """Times each program at each size."""
    for name in PROGRAMS:
        case = CASES[name]
        for label, size in SIZES.items():
            moved = case.moved * 4 * size / rates["device copy"]
            yield Line(f"{name}, {label}, kernel", _kernel(card, case, size, laps), moved)
            bus = 4 * size / rates["to the card"] + case.variables * 4 * size / rates["from the card"]
            yield Line(f"{name}, {label}, step", _step(card, case, size, laps), moved + bus)


def _kernel(card: Card, case: Case, size: int, laps: int) -> list[float]:
    """The compiled update, of arrays on the card."""
    kernels = Kernels(card.device, patience=1, smallest=0)
    traced = Traced.of(case.fn, [(size,)] * case.variables)
    (step,) = (each for each in kernels.steps(traced.program) if each.shape is not None)
    kernels.kernel(step, {})
    kernels.compiler.wait()
    kernel = kernels.kernel(step, {})
    if kernel is None:
        raise click.ClickException("the kernel could not be compiled")
    sets = []
    for _ in range(max(1, -(-CACHED // (4 * size * (2 * case.variables + 1))))):
        made = [card.cupy.full(size, 1e-3, "float32") for _ in range(2 * case.variables + 1)]
        variables, news, gradient = made[: case.variables], made[case.variables : -1], made[-1]
        known = {("variable", n): each for n, each in enumerate(variables)} | {("value", 0): gradient}
        inputs = [known[o] if not isinstance(o, np.ndarray) else card.cupy.asarray(o) for o in traced.origins]
        given = [inputs[step.args[p.value]] for p in kernel.parameters if p.role != "output"]
        sets.append((given, [*news, card.cupy.zeros(2, "bool")]))
        if len(sets) == 64:
            break
    turns = iter(range(10**9))

    def once() -> None:
        given, news = sets[next(turns) % len(sets)]
        kernel.function(*given, *news)

    card.seconds(once, len(sets) + 3)
    found = card.seconds(once, laps)
    kernels.close()
    return found


def _step(card: Card, case: Case, size: int, laps: int) -> list[float]:
    """All array work of a round, whose new values come to the host."""
    kernels = Kernels(card.device, patience=1, smallest=0)
    job = Traced.of(case.fn, [(size,)] * case.variables).job([np.full(size, 1e-3, "float32")])
    with card.device.scope():
        values: dict[int, Value] = {n: Dense(card.device.put(np.ones(size, "float32"))) for n in range(case.variables)}

        def once() -> None:
            execution = Execution(job, kernels)
            execution.wanted = frozenset(values)
            execution.reads()
            assigned, _ = execution.step(StepVariables(values), lambda id: None)
            values.update(assigned)

        return _compiled(card, kernels, once, laps)


def _compiled(card: Card, kernels: Kernels, once: Callable[[], None], laps: int) -> list[float]:
    """Times array work by the host's clock, once its kernels are there; closes them."""
    for _ in range(3):
        once()
        kernels.compiler.wait()
    found = card.waited(once, laps)
    kernels.close()
    return found


# ---- Copies ----


def copies(card: Card, rates: dict[str, float], laps: int) -> Iterator[Line]:
    """Times the copies of small gradients and values, of a replica on the card and of one on the CPU."""
    device = Device("gpu", card.device.gpu or 0)
    values = [np.full(size // 4, 1e-3, "float32") for size in COPIED]
    for where, place, rate in (("the card", device, rates["from the card"]), ("the CPU", CPU, 0.0)):
        there = [to_device(value, place) for value in values]
        for how, groups in (("together", [there]), ("one by one", [[each] for each in there])):
            limit = sum(COPIED) / rate if rate else 0.0
            yield Line(f"4KB in 10 from {where}, {how}", card.waited(partial(_downloads, groups), laps + 3)[3:], limit)
    for how, hosts in (("together", [values]), ("one by one", [[each] for each in values])):
        work = partial(_uploads, hosts, device)
        yield Line(f"4KB in 10 to the card, {how}", card.waited(work, laps + 3)[3:], sum(COPIED) / rates["to the card"])


def _downloads(groups: Sequence[Sequence[Any]]) -> None:
    """Copies arrays to the host as a push does, each group together, and waits for all of them."""
    payloads = []
    for group in groups:
        sent = [for_host(array, array.dtype, array.shape) for array in group]
        begin_downloads(sent)
        payloads.append((sent, keep(sent)))
    for sent, payload in payloads:
        fill(sent, [payload])


def _uploads(groups: Sequence[Sequence[Any]], device: Device) -> None:
    """Copies arrays to the card, each group together."""
    for group in groups:
        for each in begin_uploads(group, device):
            each.array()


# ---- Rows ----


def rows(card: Card, rates: dict[str, float], laps: int) -> Iterator[Line]:
    """Times updates and lookups of rows, on the card and on the CPU in turns."""
    for device in (card.device, ServerDevice()):
        where = "the card" if device.gpu is not None else "the CPU"
        for name, (fn, tables) in ROW_UPDATES.items():
            nbytes = ROWS * TABLE[1] * 4
            limit = nbytes / rates["to the card"] + (1 + 2 * tables) * nbytes / rates["device copy"]
            yield Line(
                f"{name} of rows, on {where}", _rows(card, device, fn, tables, laps), limit * (device.gpu is not None)
            )
        yield Line(
            f"a lookup, on {where}",
            _lookup(card, device, laps),
            nbytes / rates["from the card"] * (device.gpu is not None),
        )


def _rows(card: Card, device: ServerDevice, fn: Update, tables: int, laps: int) -> list[float]:
    random = np.random.default_rng(0)
    kernels = Kernels(device, patience=1)
    traced = Traced.of(fn, [TABLE] * tables)
    gradient = random.random((ROWS, TABLE[1]), "float32")
    with device.scope():
        made = [device.put(np.ones(TABLE, "float32")) for _ in range(tables)]
        known = {("variable", n): table for n, table in enumerate(made)}
        operands = {id(o): device.put(o) for o in traced.origins if isinstance(o, np.ndarray)}

        def once() -> None:
            known["value", 0] = device.put(gradient)
            inputs = [operands[id(o)] if isinstance(o, np.ndarray) else known[o] for o in traced.origins]
            apply_rows(kernels, traced.program, inputs, random.integers(0, TABLE[0], ROWS))

        return _compiled(card, kernels, once, laps)


def _lookup(card: Card, device: ServerDevice, laps: int) -> list[float]:
    random = np.random.default_rng(0)
    with device.scope():
        table = device.put(np.ones(TABLE, "float32"))
        return card.waited(
            lambda: device.get(Dense(table).rows(random.integers(0, TABLE[0], ROWS), device.xp)), laps + 3
        )[3:]


# ---- Results ----

MEASURES = {"programs": programs, "copies": copies, "rows": rows}


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--device", default="gpu:0", show_default=True, help="The GPU.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, show_default=True)
@click.option("--quick", is_flag=True, help=f"{QUICK_LAPS} laps, not {LAPS}.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(device: str, parts: tuple[str, ...], quick: bool, json_file: Path | None) -> None:
    """Measures, and says what was found."""
    console, laps = Console(), QUICK_LAPS if quick else LAPS
    card = Card(device)
    with card.device.scope():
        limits = card.limits(laps)
        rates = {name: statistics.median(values) for name, values in limits.items()}
        lines = [line for part in parts for line in MEASURES[part](card, rates, laps)]
        for name, values in card.limits(laps).items():
            limits[name] += values
    report = gpu_report()
    name = report.names[card.device.gpu or 0]
    title = f"{name}, CUDA {report.runtime}, driver for CUDA {report.driver}, CuPy {report.cupy}"
    table = Table("limit", "min", "median", "p90", title=title, title_justify="left")
    for limit, unit in LIMITS.items():
        scale = 1e-9 if unit == "GB/s" else 1e6
        table.add_row(f"{limit}, {unit}", *(f"{value:.4g}" for value in spread(limits[limit], scale).values()))
    work = Table("work", "min", "median", "p90 ms", "limit ms", "times its limit")
    for line in lines:
        found = spread(line.seconds, 1e3)
        beside = [f"{1e3 * line.limit:.4g}", f"{found['median'] / 1e3 / line.limit:.2f}"] if line.limit else ["", ""]
        work.add_row(line.name, *(f"{value:.4g}" for value in found.values()), *beside)
    console.print(table, work)
    if json_file:
        found_all = {
            "format": FORMAT,
            "machine": machine(),
            "card": {"name": name, "cuda": report.runtime, "driver": report.driver, "cupy": report.cupy},
            "limits": {limit: spread(values, 1.0) for limit, values in limits.items()},
            "seconds": {line.name: spread(line.seconds, 1.0) | {"limit": line.limit} for line in lines},
        }
        json_file.write_text(json.dumps(found_all, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
