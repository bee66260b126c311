"""What a step of `psclient.torch` costs beside the same round without torch, and a job beside torch RPC.

    python benchmarks/frameworks.py                                all that torch is there for
    python benchmarks/frameworks.py --python peers/bin/python      and torch RPC, in turns, where that Python has torch
    python benchmarks/frameworks.py --quick                        a few steps of each

Needs torch in the Python that runs it (`make test-frameworks` installs it). All are real processes on this machine.

- **step**: 20 parameters of 64 x 64, one worker and one server. `optimizer.step()` of torch beside `apply_gradients` of
  the same arrays and a look at all variables, which wait for the same round; they take turns in one process. Gradients
  are there before either.
- **large**: the same with 50 parameters of 2 MB. Also a step with its backward: `early` sends gradients while that goes
  on.
- **trace**: of a step of `large` that sends early, when its first gradient leaves, backward ends, and the step ends,
  each from the beginning of backward.
- **cnn**: the network of examples/digits_torch.py, batches of 64 over two workers, AdamW on two servers, a look at the
  loss in each step; torch RPC makes the same steps, with the answer of the slower worker's call, in lock step. Both
  take their examples out of arrays by index, and are measured after 600 steps, when updates have their kernels.

`--json FILE` writes `{"format", "machine", "rows", "excluded"}`; docs/lab/performance.md says what is in it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import machine
from measures import Failed, check_exit, spread
from rich.console import Console
from rich.table import Table

import psclient as ps
from psclient._src.config import child_environ
from psclient._src.launch.cluster import Cluster
from psclient._src.processes.output import Line
from psclient._src.processes.process import spawn
from pswire.cluster import Task
from pswire.network.traffic import TRANSPORTS

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "examples"))

FORMAT = 1
SECONDS = 300
RATE, BATCH = 3e-3, 64
FIRST = Task("worker", 0)
MEASURED = "measured"
SHAPES = {"step": (20, (64, 64)), "large": (50, (512, 1024))}
"""Of each work the number of parameters, and the shape of one, float32."""

WORKS = [*SHAPES, "trace", "cnn"]

TURNS = 10
"""Of each work's ways, in a run."""

WARM = 600
"""Steps before those of the network that are measured: small variables have kernels after 256 rounds."""

LEAVES, BACKWARD, STEP = "first gradient leaves", "backward ends", "step ends"
"""What a trace has, in this order."""

CNN, RPC = "cnn, psclient.torch", "cnn, torch RPC"

# ---- In a worker of ours ----


def make_model(work: str) -> Any:
    """A module of the parameters of a work, whose loss has a gradient to each."""
    import torch

    count, shape = SHAPES[work]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.ParameterList(torch.ones(shape) for _ in range(count))

        def forward(self) -> Any:
            return sum((w * w).mean() for w in self.w)

    return Model()


def train_module(work: str, steps: int) -> None:
    """Measures steps of torch and of plain arrays, in turns."""
    import torch

    import psclient.torch as pst

    count, shape = SHAPES[work]
    strategy = ps.ParameterServerStrategy(["cpu:0"])
    models = {early: make_model(work) for early in (False, True)}
    optimizers = {e: pst.Optimizer(m, torch.optim.SGD, lr=0.1, strategy=strategy, overlap=e) for e, m in models.items()}
    with strategy.scope():
        variables = [ps.Variable(np.ones(shape, "float32"), name=f"plain{n}") for n in range(count)]
        plain = ps.optimizers.SGD(0.1)
    gradients = [np.full(shape, 1e-6, "float32") for _ in variables]

    def backward(early: bool) -> None:
        optimizers[early].zero_grad()
        models[early]().backward()

    def apply() -> None:
        plain.apply_gradients(zip(gradients, variables, strict=True))
        for v in variables:
            v.read_value()

    def both(early: bool) -> None:
        backward(early)
        optimizers[early].step()

    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "apply_gradients": (lambda: None, apply),
        "step": (lambda: backward(False), optimizers[False].step),
    }
    if work == "large":
        ways["backward and step"] = (lambda: None, lambda: both(False))
        ways["backward and step, early"] = (lambda: None, lambda: both(True))
        ways["backward"] = (optimizers[False].zero_grad, lambda: backward(False))
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(1 + TURNS):
        for way, (prepare, run) in ways.items():
            for _ in range(max(steps // TURNS, 1)):
                prepare()
                start = time.perf_counter()
                run()
                seconds = time.perf_counter() - start
                if turn:
                    found[way].append(seconds)
    print(MEASURED, json.dumps(found), flush=True)


def trace(steps: int) -> None:
    """Tells when what happens in a step, in seconds from the beginning of its backward."""
    import torch

    import psclient.torch as pst

    strategy = ps.ParameterServerStrategy(["cpu:0"])
    model = make_model("large")
    optimizer = pst.Optimizer(model, torch.optim.SGD, lr=0.1, strategy=strategy)
    sent: list[tuple[float, int]] = []
    for p in model.parameters():  # called after the optimizer's own hook, which hands the gradient to the transport
        p.register_post_accumulate_grad_hook(lambda _: sent.append((time.perf_counter(), strategy.round)))
    found: dict[str, list[float]] = {event: [] for event in (LEAVES, BACKWARD, STEP)}
    for number in range(TURNS + steps):
        optimizer.zero_grad()
        loss, before = model(), strategy.round
        sent.clear()
        start = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        if number >= TURNS:
            first = next((at for at, now in sent if now > before), end)  # in a round that is under way, if any was
            for event, at in ((LEAVES, first), (BACKWARD, backward), (STEP, end)):
                found[event].append(at - start)
    print(MEASURED, json.dumps(found), flush=True)


def train_cnn(steps: int, warm: int) -> None:
    """Trains the network of the example; worker 0 tells how long a step took."""
    import torch
    from digits import load_data
    from torch import nn

    import psclient.torch as pst

    torch.manual_seed(0)
    strategy = ps.ParameterServerStrategy(["cpu:0"])
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))
    optimizer = pst.Optimizer(net, torch.optim.AdamW, lr=RATE, weight_decay=0.01, strategy=strategy)
    (images, targets), _ = load_data()
    data = ps.ArrayDataset((images, targets.argmax(axis=1))).shuffle(0).batch(BATCH, drop_remainder=True)
    batches, losses, began = pst.Loader(data, optimizer), list[float](), 0.0
    for _ in batches.epochs(-(-(warm + steps) // data.batches(0))):
        for x, y in batches:
            if len(losses) == warm:
                began = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == warm + steps and strategy.task == FIRST:
                took = (time.perf_counter() - began) / steps
                print(MEASURED, json.dumps({CNN: [took], "loss": float(np.mean(losses[-20:]))}), flush=True)


def work_on(work: str, steps: int, warm: int) -> None:
    """Measures one work, in a worker."""
    if work == "cnn":
        train_cnn(steps, warm)
    elif work == "trace":
        trace(steps)
    else:
        train_module(work, steps)


# ---- In the launcher ----


def run_ours(work: str, transport: str, steps: int, warm: int) -> dict[str, list[float]]:
    """Starts a cluster on one transport; returns what its first worker tells."""
    found: dict[str, Any] = {}

    def hear(line: Line) -> None:
        if line.task == FIRST and not line.error and line.text.startswith(MEASURED):
            found.update(json.loads(line.text.removeprefix(MEASURED)))

    size = 2 if work == "cnn" else 1
    with Cluster(
        sink=hear,
        ps=size,
        workers=size,
        chief="none",
        transport=transport,
        script=__file__,
        args=("--as-worker", work, "--steps", str(steps), "--warm", str(warm)),
    ) as cluster:
        outcome = cluster.wait(SECONDS)
    if outcome.code or not found:
        raise Failed(f"{work}: {outcome.report}")
    check_loss(found)
    return found


def check_loss(found: dict[str, Any]) -> None:
    """Raises `Failed` if what was trained has learned nothing."""
    loss = found.pop("loss", 0.0)
    if loss > 1:
        raise Failed(f"the network has learned nothing: its loss is {loss:.2f}")


def run_rpc(python: str, steps: int, warm: int) -> dict[str, list[float]]:
    """Has torch RPC train the network."""
    from digits import load_data

    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as errors:
        (images, targets), _ = load_data()
        data = Path(directory) / "digits.npz"
        np.savez(data, images=images, labels=targets.argmax(axis=1))
        numbers = ("--rate", RATE, "--batch", BATCH, "--warm", warm, "--steps", steps)
        command = [python, str(HERE / "peers" / "torch_cnn.py"), str(data), *map(str, numbers)]
        process = spawn(command, child_environ(4, None), subprocess.PIPE, errors.fileno())
        try:
            out, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.wait()
        check_exit(process, errors)
    said = json.loads(out.decode().splitlines()[-1])
    check_loss(said)
    return {RPC: [said["seconds"] / steps]}


def has_torch(python: str) -> bool:
    """Returns whether a Python has torch."""
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    return not subprocess.run([python, "-c", look], check=False).returncode


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--work", "works", multiple=True, type=click.Choice(WORKS), default=WORKS)
@click.option("--transport", type=click.Choice(TRANSPORTS), default="shm", show_default=True)
@click.option("--python", "pythons", multiple=True, help="A Python that has torch, for torch RPC [default: this one].")
@click.option("--repeats", type=click.IntRange(1), help="How many times over [default: 3, with --quick 1].")
@click.option("--quick", is_flag=True, help="A few steps only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--steps", type=click.IntRange(1), default=1, hidden=True)
@click.option("--warm", type=click.IntRange(0), default=0, hidden=True)
@click.option("--as-worker", "said", hidden=True)
def main(
    works: Sequence[str],
    transport: str,
    pythons: tuple[str, ...],
    repeats: int | None,
    quick: bool,
    json_file: Path | None,
    steps: int,
    warm: int,
    said: str | None,
) -> None:
    """Measures, or is a worker of a cluster that is measured."""
    if said:
        work_on(said, steps, warm)
        return
    if find_spec("torch") is None:
        raise click.ClickException("this Python has no torch; `make test-frameworks` installs it into .venv")
    python = next(filter(has_torch, (*pythons, sys.executable)))
    counts, warm = {"step": 500, "large": 30, "trace": 30, "cnn": 300}, 30 if quick else WARM
    laps: dict[tuple[str, str], list[list[float]]] = {}
    excluded = []
    for _ in range(repeats or (1 if quick else 3)):
        for work in works:
            count = max(counts[work] // (10 if quick else 1), TURNS)
            runs: list[Callable[[], dict[str, list[float]]]] = [partial(run_ours, work, transport, count, warm)]
            if work == "cnn":
                runs.append(partial(run_rpc, python, count, warm))
            for run in runs:
                try:
                    found = run()
                except Failed as error:
                    excluded.append(str(error))
                    continue
                for way, seconds in found.items():
                    laps.setdefault((work, way), []).append(seconds)
    rows: list[dict[str, Any]] = [
        {
            "work": work,
            "way": way,
            "laps": len(each),
            "ms": spread([second for lap in each for second in lap], 1e3),
            "lap_medians_ms": [1e3 * statistics.median(lap) for lap in each],
        }
        for (work, way), each in laps.items()
    ]
    figures: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine(),
        "transport": transport,
        "rows": rows,
        "excluded": excluded,
    }
    table = Table(
        "work", "way", title=f"Steps of psclient.torch on {transport}, ms; load {figures['machine']['load']:.1f}"
    )
    for heading in ("median", "p90", "min"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row["work"], row["way"], *(f"{row['ms'][key]:.3f}" for key in ("median", "p90", "min")))
    Console().print(table, *excluded, sep="\n")
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
