"""Steps of `psclient.torch` beside the same round without torch, and jobs beside torch RPC and DDP.

    python benchmarks/frameworks.py                                all that torch is there for
    python benchmarks/frameworks.py --python peers/bin/python      torch RPC and DDP as well, in turns
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
- **wide**: the same with dense layers of a million parameters and SGD on one server, beside `DistributedDataParallel`
  over gloo, which has no servers.

`--json FILE` writes `{"format", "machine", "rows", "excluded"}`; docs/lab/performance.md says what is in it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import machine
from measures import Failed, spread
from rich.console import Console
from rich.table import Table
from step import run_torch

import psclient as ps
from psclient._src.launch.cluster import Cluster
from psclient._src.processes.output import Line
from pswire.cluster import Task
from pswire.network.traffic import TRANSPORTS

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "examples"), str(HERE / "peers")]

FORMAT = 1
SECONDS = 300
BATCH = 64
WORKERS, FIRST = 2, Task("worker", 0)
MEASURED = "measured"
SHAPES = {"step": (20, (64, 64)), "large": (50, (512, 1024))}
"""Of each work the number of parameters, and the shape of one, float32."""

JOBS = {"cnn": (2, 3e-3, "torch_step.py", "torch RPC"), "wide": (1, 0.3, "torch_ddp.py", "DDP")}
"""Networks of `peers.torch_step.MODELS` that two workers train: servers, rate, and the peer that does the same."""

WORKS = [*SHAPES, "trace", *JOBS]

TURNS = 10
"""Of each work's ways, in a run."""

WARM = 600
"""Steps before those of the network that are measured: small variables have kernels after 256 rounds."""

LEAVES, BACKWARD, STEP = "first gradient leaves", "backward ends", "step ends"
"""What a trace has, in this order."""

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


def train_job(work: str, steps: int, warm: int) -> None:
    """Trains a network; worker 0 tells how long a step took."""
    import torch
    from digits import load_data
    from torch_step import MODELS

    import psclient.torch as pst

    torch.manual_seed(0)
    strategy = ps.ParameterServerStrategy(["cpu:0"])
    make, rule, options = MODELS[work]
    net = make()
    optimizer = pst.Optimizer(net, rule, lr=JOBS[work][1], strategy=strategy, **options)
    (images, targets), _ = load_data()
    data = ps.ArrayDataset((images, targets.argmax(axis=1))).shuffle(0).batch(BATCH, drop_remainder=True)
    batches, losses, began = pst.Loader(data, optimizer), list[float](), 0.0
    for _ in batches.epochs(-(-(warm + steps) // data.batches(0))):
        for x, y in batches:
            if len(losses) == warm:
                began = time.perf_counter()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == warm + steps and strategy.task == FIRST:
                took = (time.perf_counter() - began) / steps
                found = {f"{work}, psclient.torch": [took], "loss": float(np.mean(losses[-20:]))}
                print(MEASURED, json.dumps(found), flush=True)


def work_on(work: str, steps: int, warm: int) -> None:
    """Measures one work, in a worker."""
    if work in JOBS:
        train_job(work, steps, warm)
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

    with Cluster(
        sink=hear,
        ps=JOBS[work][0] if work in JOBS else 1,
        workers=WORKERS if work in JOBS else 1,
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


def run_other(work: str, python: str, steps: int, warm: int) -> dict[str, list[float]]:
    """Has a peer train the network of a job."""
    servers, rate, program, name = JOBS[work]
    numbers = {"rate": rate, "batch": BATCH, "warm": warm, "steps": steps, "workers": WORKERS, "servers": servers}
    said = run_torch(program, python, model=work, **numbers).said
    check_loss(said)
    return {f"{work}, {name}": [said["seconds"] / steps]}


def has_torch(python: str) -> bool:
    """Returns whether a Python has torch."""
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    return not subprocess.run([python, "-c", look], check=False).returncode


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--work", "works", multiple=True, type=click.Choice(WORKS), default=WORKS)
@click.option("--transport", type=click.Choice(TRANSPORTS), default="shm", show_default=True)
@click.option("--python", "pythons", multiple=True, help="A Python with torch for peers [default: this one].")
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
    counts, warm = {"step": 500, "large": 30, "trace": 30, **dict.fromkeys(JOBS, 300)}, 30 if quick else WARM
    laps: dict[tuple[str, str], list[list[float]]] = {}
    excluded = []
    for _ in range(repeats or (1 if quick else 3)):
        for work in works:
            count = max(counts[work] // (10 if quick else 1), TURNS)
            runs: list[Callable[[], dict[str, list[float]]]] = [partial(run_ours, work, transport, count, warm)]
            if work in JOBS:
                runs.append(partial(run_other, work, python, count, warm))
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
