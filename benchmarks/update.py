"""Rates of update programs on the server's array work, beside memcpy, plain NumPy and torch on this machine.

    python benchmarks/update.py             everything
    python benchmarks/update.py --quick     fewer laps, for a first look

All take turns, many times over, so that all see the same machine; figures are ratios of medians of one run. An update
is what a server does in a round of one worker: contributions in parts of 1 MiB, a compiled kernel, values in place.
Bytes that are read and bytes that are written both count, for memcpy too. Torch is compared with where it is installed.
What a client spends on a call is measured beside that, on a section that is recorded and not sent.
It runs with the allocator that launchers set for servers; without it blocks of 1 MiB, as parts are, lie on small pages.

`--json FILE` writes `{"format", "machine", "seconds", "ratios"}`.
"""

from __future__ import annotations

import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import machine
from measures import spread
from rich.console import Console
from rich.table import Table

import psclient as ps
from psclient._src.config import GLIBC_TUNABLES
from psclient._src.tracing.recorder import Recording, trace
from psclient.optimizers.state import state_of
from psclient.optimizers.step_functions import apply, begin
from psserver.devices import ServerDevice
from psserver.execution.execution import Execution
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare, ReadyRound
from psserver.programs.kernels.kernels import Kernels
from psserver.programs.kernels.rows import apply_rows
from psserver.values.dense import Dense
from psserver.values.step import StepVariables
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.model.log import Member
from pswire.model.plan import Apply, Operand, Plan, Reduction, Ref
from pswire.model.program import Program
from pswire.model.tensor import TensorSpec, spec_of
from pswire.network.parts import parts_of
from pswire.network.payload import Payload

FORMAT = 1
SIZE = (64 << 20) // 4
"""Elements of a variable; they are float32."""

LAPS, QUICK_LAPS = 25, 3
ROW_TURNS = 10
"""Rows are updated this many times in a lap: once would tell of the caches that others have left."""

CALLED, CALL_TURNS = (64, 10), 20
"""Shape of a variable whose update is only recorded, and how often that is done in a lap."""

TABLE, ROWS = (1_000_000, 64), 4096
MEMBERS = 2
"""Workers whose rows an update takes where updates along rows are compared with elementwise ones."""

RATE, MOMENTUM, BETA_1, BETA_2, EPSILON = 1e-3, 0.9, 0.9, 0.999, 1e-7

Update = Callable[..., Any]
Work = Callable[[], object]


class Plain(np.ndarray[Any, Any]):
    """An array that is assigned as variables are, so that one function is run on both."""

    def assign_add(self, value: Any) -> None:
        """Adds in place."""
        self += value

    def assign_sub(self, value: Any) -> None:
        """Subtracts in place."""
        self -= value


def sgd(w: Any, g: Any) -> None:
    """Gradient descent."""
    w.assign_sub(RATE * g)


def momentum(w: Any, m: Any, g: Any) -> None:
    """Gradient descent with momentum."""
    m.assign_add(g - (1 - MOMENTUM) * m)
    w.assign_sub(RATE * m)


def adam(w: Any, m: Any, s: Any, g: Any) -> None:
    """Adam without the correction of bias, which is about scalars."""
    m.assign_add((1 - BETA_1) * (g - m))
    s.assign_add((1 - BETA_2) * (g * g - s))
    w.assign_sub(RATE * m / (np.sqrt(s) + EPSILON))


def adagrad(w: Any, a: Any, g: Any) -> None:
    """Adagrad."""
    a.assign_add(g * g)
    w.assign_sub(RATE * g / (np.sqrt(a) + EPSILON))


def rowwise_adagrad(w: Any, a: Any, g: Any) -> None:
    """Adagrad with one sum for each row."""
    a.assign_add(np.mean(g * g, axis=(1,), keepdims=True))
    w.assign_sub(RATE * g / (np.sqrt(a) + EPSILON))


def clipped_sgd(w: Any, g: Any) -> None:
    """Gradient descent by gradients of which each row has at most length 1."""
    length = np.sqrt(np.sum(g * g, axis=(1,), keepdims=True))
    w.assign_sub(RATE * g / np.maximum(length, 1.0))


def sgd_in_a_ball(w: Any, g: Any) -> None:
    """Gradient descent after which each row is brought back to length 1."""
    w.assign_sub(RATE * g)
    length = np.sqrt(np.sum(w * w, axis=(1,), keepdims=True))
    w.assign(w / np.maximum(length, 1.0))


@dataclass(frozen=True)
class Case:
    """One update to measure.

    Attributes:
        fn: the update.
        variables: how many it takes.
        workers: whose gradients are summed first.
    """

    fn: Update
    variables: int
    workers: int = 1

    @property
    def moved(self) -> int:
        """Arrays that are read or written: variables both; memcpy has two."""
        return 2 * self.variables + self.workers


CASES = {
    "sgd": Case(sgd, 1),
    "adam": Case(adam, 3),
    "sgd, 2 workers": Case(sgd, 1, 2),
    "sgd, 4 workers": Case(sgd, 1, 4),
    "momentum": Case(momentum, 2),
    "momentum, 2 workers": Case(momentum, 2, 2),
}
ONE_EACH = (TABLE[0], 1)
"""Shape of a table with one number for each row."""

ALONG_ROWS: dict[str, tuple[Update, tuple[tuple[int, ...], ...]]] = {
    "SGD": (sgd, (TABLE,)),
    "SGD, clipped by row": (clipped_sgd, (TABLE,)),
    "SGD in a ball": (sgd_in_a_ball, (TABLE,)),
    "Adagrad": (adagrad, (TABLE, TABLE)),
    "RowwiseAdagrad": (rowwise_adagrad, (TABLE, ONE_EACH)),
}
"""Updates on the rows of two workers, and the shapes of their tables."""

BESIDE = {"SGD, clipped by row": "SGD", "SGD in a ball": "SGD", "RowwiseAdagrad": "Adagrad"}
"""The elementwise update beside each one that reduces along rows."""

BY_THREADS = ("sgd", "adam")
"""What is also measured with two threads."""


@dataclass(frozen=True)
class Traced:
    """An update function as a program.

    Attributes:
        program: the program.
        origins: for each of its inputs ("variable", n), ("value", 0), or an operand's array.
    """

    program: Program
    origins: tuple[Any, ...]

    @classmethod
    def of(cls, fn: Update, shapes: Sequence[tuple[int, ...]]) -> Traced:
        """Traces a function of variables and a gradient of the first one's shape, which updates them in place."""
        recording, specs = Recording(), [TensorSpec("float32", shape) for shape in shapes]
        tracers = [recording.variable(spec, f"v{n}", ("variable", n)) for n, spec in enumerate(specs)]
        found = trace(recording, fn, (*tracers, recording.value(specs[0], ("value", 0))))
        return cls(found.program, found.origins)

    def job(self, gradients: Sequence[Any]) -> ReadyRound:
        """A round of it, with each worker's gradient in parts."""
        operands = [origin for origin in self.origins if isinstance(origin, np.ndarray)]
        numbers = iter(range(len(operands)))
        kinds: dict[str, Any] = {"variable": "variable", "value": "reduction"}
        refs = [
            Ref("operand", next(numbers)) if isinstance(origin, np.ndarray) else Ref(kinds[origin[0]], origin[1])
            for origin in self.origins
        ]
        plan = Plan(
            (Reduction("sum", spec_of(gradients[0]), (0,)),),
            tuple(Operand(spec_of(operand), (0,)) for operand in operands),
            (self.program,),
            (Apply(0, (0,), tuple(refs)),),
        )
        parts = [_part(place, plan, gradient, operands) for place, gradient in enumerate(gradients)]
        return ReadyRound(0, PreparedPlan(plan, 0), tuple(parts), (), str)


def _part(place: int, plan: Plan, gradient: Any, operands: Sequence[Any]) -> MemberShare:
    """What one worker sends."""
    packed = Payload.pack([*operands, gradient])
    payload = Payload([(at, memoryview(b"".join(buffers))) for at, buffers in parts_of(packed)], packed.size)
    said = Contribution(place + 1, 1, 0, plan.id, (1.0,))
    return MemberShare(Member(Task("worker", place), place + 1, 1), said, payload)


# ---- What is measured ----


def copying(threads: int, pool: ThreadPoolExecutor) -> Work:
    """memcpy of as many bytes as a variable has, by some threads at once."""
    source, target = np.ones(SIZE, "float32"), np.zeros(SIZE, "float32")
    pairs = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    if threads == 1:
        return lambda: np.copyto(target, source)
    return lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs))


def adding() -> Work:
    """An addition in place: two reads and a write, as gradient descent has them."""
    total, other = np.ones(SIZE, "float32"), np.ones(SIZE, "float32")
    return lambda: np.add(total, other, out=total)


def updating(case: Case, threads: int) -> Work:
    """A server's array work of one round, with its kernel compiled."""
    gradients = [np.full(SIZE, 1e-3, "float32") for _ in range(case.workers)]
    job = Traced.of(case.fn, [(SIZE,)] * case.variables).job(gradients)
    values = {n: Dense(np.ones(SIZE, "float32")) for n in range(case.variables)}
    ids = frozenset(values)
    kernels = Kernels(ServerDevice(), threads, patience=1)

    def once() -> None:
        execution = Execution(job, kernels)
        execution.reads()
        execution.step(StepVariables(values, ids, ids), lambda id: None)

    once()
    kernels.compiler.wait()
    return once


def expressions(case: Case) -> Work:
    """The function on plain arrays, after the sum of the gradients."""
    made = [np.full(SIZE, 1e-3, "float32").view(Plain) for _ in range(case.variables + case.workers)]
    variables, gradients = made[: case.variables], made[case.variables :]
    return lambda: case.fn(*variables, sum(gradients[1:], gradients[0]))


def torch_adam() -> Work:
    """The fused Adam of torch, by one thread."""
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.ones(SIZE))
    parameter.grad = torch.full((SIZE,), 1e-3)
    optimizer = torch.optim.Adam([parameter], lr=RATE, fused=True)
    work: Work = optimizer.step
    return work


class Rows:
    """An update of random rows of tables, others each time.

    Args:
        fn: the update.
        shapes: of the tables.
        count: rows of an update.
        threads: that make it.
    """

    def __init__(self, fn: Update, shapes: Sequence[tuple[int, ...]], count: int = ROWS, threads: int = 1) -> None:
        self._random = np.random.default_rng(0)
        self._tables = [np.ones(shape, "float32") for shape in shapes]
        self._rows = self._random.random((count, TABLE[1]), "float32")
        self._traced = Traced.of(fn, shapes)
        self._kernels = Kernels(ServerDevice(), threads, patience=1)
        self.draw()
        self.update()
        self._kernels.compiler.wait()

    def draw(self) -> None:
        """Other rows."""
        self._ids = self._random.integers(0, TABLE[0], len(self._rows))

    def update(self) -> None:
        """By a kernel, repeated ids summed first."""
        known = {("variable", n): table for n, table in enumerate(self._tables)} | {("value", 0): self._rows}
        inputs = [o if isinstance(o, np.ndarray) else known[o] for o in self._traced.origins]
        apply_rows(self._kernels, self._traced.program, inputs, self._ids)

    def add_at(self) -> None:
        """Adagrad in NumPy, which sums repeated ids with `add.at`, and then updates those rows."""
        w, a = self._tables
        np.add.at(a, self._ids, self._rows * self._rows)
        step = RATE * self._rows / (np.sqrt(a[self._ids]) + np.float32(EPSILON))
        np.add.at(w, self._ids, -step)


def calls(laps: int) -> dict[str, list[float]]:
    """Seconds that a client spends on one update by Adam: where it is traced and verified, and where that is known."""
    with ps.ParameterServerStrategy(["cpu:0"]) as strategy, strategy.scope():
        w, optimizer = ps.Variable(np.zeros(CALLED, "float32"), name="w"), ps.optimizers.Adam()
        optimizer.build([w])
        extended, state, own = strategy.extended, state_of(optimizer), optimizer._settings()
        total = extended.reduce_to("sum", np.ones(CALLED, "float32"), w)
        shared = state.beside(w)
        begun = extended.update_non_slot(shared["iterations"].devices, begin, (own, shared, None))
        args = (own, total, None, begun, None, None, False, state.of(w).slots)

        def seconds(fn: Any) -> float:
            start = time.perf_counter()
            extended.update(w, fn, args)
            return time.perf_counter() - start

        traced = [seconds(ps.update_function(inspect.unwrap(apply))) for _ in range(CALL_TURNS * laps)]
        known = [seconds(apply) for _ in range(1 + CALL_TURNS * laps)]
        strategy.backend.drop()  # What is recorded is not sent.
    return {"adam, first trace": traced, "adam, call": known[1:]}


# ---- Results ----


def measure(laps: int, console: Console) -> dict[str, list[float]]:
    """Seconds of each kind of work, in every lap."""
    with ThreadPoolExecutor(2) as pool:
        work = {f"memcpy, {n} threads": copying(n, pool) for n in (1, 2)}
        work["addition in place"] = adding()
        for name, case in CASES.items():
            work |= {f"{name}, {n} threads": updating(case, n) for n in (1, 2) if n == 1 or name in BY_THREADS}
            work[f"{name}, NumPy"] = expressions(case)
        if util.find_spec("torch"):
            work["adam, torch"] = torch_adam()
        else:
            console.print("no row for torch: it is not installed; pip install torch")
        rows = {f"rows, {n} threads": Rows(adagrad, (TABLE, TABLE), threads=n) for n in (1, 2)}
        rows |= {f"rows, {name}": Rows(fn, shapes, MEMBERS * ROWS) for name, (fn, shapes) in ALONG_ROWS.items()}
        work |= {name: each.update for name, each in rows.items()}
        work["rows, add.at"] = rows["rows, 1 threads"].add_at
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for lap in range(-1, laps):
            with console.status(f"lap {lap + 1} of {laps}"):
                for name, one in work.items():
                    turns = [_seconds(one, rows.values()) for _ in range(ROW_TURNS if name.startswith("rows") else 1)]
                    seconds[name] += turns if lap >= 0 else []  # the first one touches the memory
    return seconds | calls(laps)


def _seconds(work: Work, rows: Iterable[Rows]) -> float:
    for each in rows:
        each.draw()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Ratio:
    """One figure, and what it should be.

    Attributes:
        words: what it is.
        value: what was found.
        least: what it should be at least; 0 if nobody has said.
    """

    words: str
    value: float
    least: float


def ratios(seconds: dict[str, list[float]]) -> Iterator[Ratio]:
    """The figures, from medians of one run."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, case in CASES.items():
        rate = case.moved / median[f"{name}, 1 threads"]
        yield Ratio(f"{name}: rate / memcpy's", rate / (2 / median["memcpy, 1 threads"]), 0.8)
        yield Ratio(f"{name}: rate / an addition's in place", rate / (3 / median["addition in place"]), 0)
        yield Ratio(f"{name}: times NumPy", median[f"{name}, NumPy"] / median[f"{name}, 1 threads"], 4.0)
    for name in BY_THREADS:
        gain = median[f"{name}, 1 threads"] / median[f"{name}, 2 threads"]
        copied = median["memcpy, 1 threads"] / median["memcpy, 2 threads"]
        yield Ratio(f"{name}: second thread's gain / memcpy's", gain / copied, 0.9)
    if "adam, torch" in median:
        yield Ratio("adam: rate / torch's fused", median["adam, torch"] / median["adam, 1 threads"], 0.65)
    for threads in (1, 2):
        rows = median[f"rows, {threads} threads"]
        yield Ratio(f"rows: 0.4 ms / ours, {threads} threads", 0.4e-3 / rows, 1.0)
    for name, plain in BESIDE.items():
        yield Ratio(f"rows: {plain} / {name}", median[f"rows, {plain}"] / median[f"rows, {name}"], 1 / 1.2)
    yield Ratio("adam: 5 ms / first trace", 5e-3 / median["adam, first trace"], 1.0)
    yield Ratio("adam: 50 us / call", 50e-6 / median["adam, call"], 1.0)
    yield Ratio("rows: times add.at", median["rows, add.at"] / median["rows, 1 threads"], 8.0)


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--quick", is_flag=True, help=f"{QUICK_LAPS} laps, not {LAPS}.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(quick: bool, json_file: Path | None) -> None:
    """Measures, and says what was found."""
    console = Console()
    seconds = measure(QUICK_LAPS if quick else LAPS, console)
    times = Table(
        "work",
        "min",
        "median",
        "p90 ms",
        title=f"64 MB of float32; {ROWS} rows x 64, or {MEMBERS * ROWS}",
        title_justify="left",
    )
    for name, values in seconds.items():
        found = spread(values, 1e3)
        times.add_row(name, *(f"{found[key]:.3g}" for key in ("min", "median", "p90")))
    figures = Table("figure", "found", "at least", "", title="Ratios of medians", title_justify="left")
    for ratio in ratios(seconds):
        verdict = "" if ratio.value >= ratio.least else "missed"
        figures.add_row(ratio.words, f"{ratio.value:.2f}", f"{ratio.least:g}" if ratio.least else "", verdict)
    console.print(times, figures)
    if json_file:
        report = {
            "format": FORMAT,
            "machine": machine(),
            "seconds": {name: spread(values, 1.0) for name, values in seconds.items()},
            "ratios": {ratio.words: ratio.value for ratio in ratios(seconds)},
        }
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "GLIBC_TUNABLES" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": GLIBC_TUNABLES})
    main()
