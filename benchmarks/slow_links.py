"""Local steps over slow links: DiLoCo beside synchronous training, and beside the same workers without exchange.

    python benchmarks/slow_links.py                 all rows of the table
    python benchmarks/slow_links.py --quick         small models and few steps, for a first look
    python benchmarks/slow_links.py --row overlap   one row; --torchft /path/to/python for torchft's

Needs PyTorch, and root: each task is on a host of its own (`pstesting.hosts`), whose link has 100 Mbit/s and, between
two hosts, a round trip of 50 ms. Four workers learn the text of Python's standard library with a character transformer.
Two cores cannot run four workers at full speed: where time is measured, each local step is padded to a fixed time, and
the baseline is the same workers without exchange. `late` is the part of the steps that took longer than that: where it
is large, figures tell of the machine, not of the method.

    loss       loss at equal tokens, over that of synchronous training; links without limits
    overlap    local steps per second over those without exchange, int8; today's synchronous training beside it
    workers    goodput with one of four workers killed every 30 s, quorum of 3, over that without failures
    servers    the same with one of two replicated servers killed once
    pace       asynchronous, one worker three times slower, delayed Nesterov: loss at equal time, over synchronous
    torchft    torchft's DiLoCo over gloo: the same model, links and steps

`--json FILE` writes `{"format", "machine", "rows", "runs"}`; `--plot FILE` draws loss against bytes, of the row `loss`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

if TYPE_CHECKING:
    import torch


FORMAT = 1
WORKERS, SERVERS = 4, 2
LIMIT_SECONDS = 3600.0
"""Seconds that a run may take."""

REPORTS = 20
"""Steps between two lines of a worker."""

LAST_SECONDS = 30.0
"""Seconds before the end of a run in which no worker is killed, or begins anew."""

HELD = 100_000
"""Characters of the text that no worker learns."""


@dataclass(frozen=True)
class Run:
    """How a cluster trains.

    Attributes:
        method: "diloco", "sync" (an exchange of gradients after each step), "none" (no exchange), or "torchft".
        width, layers: of the model.
        context, batch: characters of a window, and windows of a step.
        steps: steps of each worker; 0 for as many as there is time.
        seconds: the time in which workers train, from the first step of the first one; 0 for no limit.
        pad: the least seconds of a step.
        slower: by how much the steps of the last worker are slower.
        sync_every, fragments, sync_delay, alpha: as of `pst.DiLoCo`.
        compression: a name in `ps.compression`, or "".
        consistency: "sync", "quorum" or "async".
        grace: of the quorum.
        lr, outer_lr, momentum: of AdamW, and of the outer optimizer.
        links: True for slow links.
        rate, round_trip: of these: bits per second, and seconds.
        copies: True for two copies of each variable.
        kills: every so many seconds a worker is killed; 0 for never.
        kill_server: after so many seconds a server is killed; 0 for never.
    """

    method: str = "diloco"
    width: int = 128
    layers: int = 5
    context: int = 64
    batch: int = 8
    steps: int = 0
    seconds: float = 0.0
    pad: float = 0.0
    slower: float = 1.0
    sync_every: int = 50
    fragments: int = 1
    sync_delay: int = 0
    alpha: float = 0.0
    compression: str = ""
    consistency: str = "sync"
    grace: float = 1.0
    lr: float = 1e-3
    outer_lr: float = 0.7
    momentum: float = 0.9
    links: bool = True
    rate: float = 100e6
    round_trip: float = 0.05
    copies: bool = False
    kills: float = 0.0
    kill_server: float = 0.0


# ---- In a worker ----


def say(**what: Any) -> None:
    """Tells the launcher something."""
    print(json.dumps(what), flush=True)


class Text:
    """The text of a worker, and its model.

    Args:
        run: how it trains.
        rank: which of the workers it is.
    """

    def __init__(self, run: Run, rank: int) -> None:
        import torch
        from local_steps_model import Transformer, read_text

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.run = run
        self.net = Transformer(run.width, run.layers, run.context)
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=run.lr)
        text = read_text(megabytes=6)
        self._held, self._own = text[:HELD], text[HELD:].chunk(WORKERS)[rank]
        self._source = torch.Generator().manual_seed(1000 * rank + int(time.time() * bool(run.kills)))

    @property
    def tokens(self) -> int:
        """Characters of a step."""
        return self.run.batch * self.run.context

    def backward(self) -> torch.Tensor:
        """Computes gradients of a batch; returns its loss."""
        from local_steps_model import windows_of

        self.inner.zero_grad()
        loss: torch.Tensor = self.net.loss(windows_of(self._own, self.run.batch, self.run.context, self._source))
        loss.backward()
        return loss

    def held_loss(self) -> float:
        """Returns the loss on text that no worker learns."""
        import torch
        from local_steps_model import windows_of

        with torch.no_grad():
            windows = windows_of(self._held, 128, self.run.context, torch.Generator().manual_seed(1))
            return float(self.net.loss(windows))


class Clock:
    """Pads steps to a fixed time, and counts those that are late.

    Args:
        run: how long a step takes.
        slower: by how much this worker is slower.
    """

    def __init__(self, run: Run, slower: float) -> None:
        self.late = 0
        self._pad = run.pad * slower
        self._next = time.monotonic()

    def computed(self) -> None:
        """The computation of a step is over, but not its exchange: waits until its time is over."""
        now = time.monotonic()
        self.late += now > self._next + self._pad * 1.02
        self._next = max(self._next + self._pad, now)
        time.sleep(max(self._next - now, 0.0))

    def exchanged(self) -> None:
        """An exchange is over: the next step begins now."""
        self._next = max(self._next, time.monotonic())


def be_worker(run: Run, began: float) -> None:
    """Trains.

    Args:
        run: how.
        began: when the workers of this run began, in seconds since 1970; 0 if they begin now.
    """
    if run.seconds and began and time.time() > began + run.seconds - LAST_SECONDS:
        return  # the others may have ended before this one is back
    import torch

    import psclient as ps
    import psclient.torch as pst

    consistency: Any = ps.Async() if run.consistency == "async" else ps.Sync()
    if run.consistency == "quorum":
        consistency = ps.Quorum(WORKERS - 1, run.grace)
    compression = getattr(ps.compression, run.compression)() if run.compression else None
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"], consistency=consistency, compression=compression)
    rank = strategy.rank
    text = Text(run, rank)
    slower = run.slower if rank == WORKERS - 1 else 1.0
    outer: Any = None
    exchange: Callable[[], object]
    if run.method == "diloco":
        rule: Any = torch.optim.SGD
        options: dict[str, Any] = {"lr": run.outer_lr, "momentum": run.momentum, "nesterov": run.momentum > 0}
        if run.consistency == "async":
            rule, options = ps.optimizers.DelayedNesterov(run.outer_lr, run.momentum, delay=WORKERS), {}
        how: Any = {name: getattr(run, name) for name in ("sync_every", "fragments", "sync_delay", "alpha")}
        how["dynamic"] = run.consistency == "async"
        outer = pst.DiLoCo(text.net, text.inner, rule, strategy=strategy, **how, **options)
        exchange = lambda: outer.step(tokens=text.tokens)  # noqa: E731
    elif run.method == "sync":
        shared = pst.Optimizer(text.net, torch.optim.AdamW, lr=run.lr, strategy=strategy)
        exchange = shared.step
    else:
        exchange = lambda: False  # noqa: E731
    train(text, run, Clock(run, slower), exchange, lambda: sum(strategy.bytes_transferred), outer, began)
    say(rank=rank, held=text.held_loss(), exchanges=getattr(outer, "exchanges", 0))
    strategy.close()


def train(text: Text, run: Run, clock: Clock, exchange: Any, moved: Any, outer: Any, began: float) -> None:
    """Makes steps, and says how far it is.

    Args:
        text: what is learned.
        run: how.
        clock: pads steps.
        exchange: called after each step; True if parameters were merged.
        moved: returns the bytes that were sent and received so far.
        outer: as of `be_worker`.
        began: as of `be_worker`.
    """
    start, first, losses, step = time.monotonic(), moved(), list[float](), 0
    wall = began or time.time()
    counted = 0  # steps that an exchange has sent
    while step < run.steps or not run.steps:
        if run.seconds and time.time() >= wall + run.seconds:
            break
        loss = text.backward()
        if run.method != "sync":
            text.inner.step()
        clock.computed()
        before = getattr(outer, "exchanges", 0)
        exchange()
        clock.exchanged()
        step += 1
        losses.append(float(loss.detach()))
        if getattr(outer, "exchanges", 0) != before:
            counted = step
        if step % REPORTS == 0 or step in (run.steps, counted):
            seconds, bytes_moved = time.monotonic() - start, moved() - first
            said = {"step": step, "counted": counted, "seconds": seconds, "moved": bytes_moved, "late": clock.late}
            say(pid=os.getpid(), time=time.time(), loss=math.fsum(losses) / len(losses), **said)
            losses.clear()


# ---- In a worker of torchft ----


def be_torchft(run: Run, rank: int, lighthouse: str, store: str) -> None:
    """Trains with torchft's DiLoCo over gloo.

    Args:
        run: how.
        rank: which of the workers it is.
        lighthouse: the address of torchft's lighthouse.
        store: this host's address.
    """
    from datetime import timedelta

    import torch
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    text = Text(run, rank)
    server = torch.distributed.TCPStore(store, 0, is_master=True, wait_for_workers=False)
    far = timedelta(seconds=600)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=far),
        min_replica_size=WORKERS,
        load_state_dict=lambda state: None,
        state_dict=dict,
        use_async_quorum=False,
        init_sync=False,
        timeout=far,
        quorum_timeout=far,
        replica_id=f"worker{rank}",
        store_addr=store,
        store_port=server.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname=store,
    )
    outer = torch.optim.SGD(text.net.parameters(), lr=run.outer_lr, momentum=run.momentum, nesterov=True)
    received = Path("/proc/self/net/dev")

    def moved() -> int:
        line = next(line for line in received.read_text().splitlines() if "eth0:" in line)
        counts = line.split(":")[1].split()
        return int(counts[0]) + int(counts[8])

    with DiLoCo(manager, [text.net], text.inner, outer, sync_every=run.sync_every):
        train(text, run, Clock(run, 1.0), lambda: False, moved, None, 0.0)
    say(rank=rank, held=text.held_loss(), exchanges=run.steps // run.sync_every)
    manager.shutdown(wait=False)


# ---- In the launcher ----


@dataclass
class Found:
    """The reports of the workers of a run.

    Attributes:
        lines: of each worker, in the order in which they came.
        ends: the last line of each worker.
        seconds: of the run.
    """

    lines: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    def hear(self, task: str, text: str) -> None:
        """Takes a line of a worker."""
        if text.startswith("{"):
            said = json.loads(text)
            if "held" in said:
                self.ends[task] = said
            else:
                self.lines[task].append(said)

    @property
    def held(self) -> float:
        """The held-out loss of worker 0."""
        return next(float(each["held"]) for each in self.ends.values() if each["rank"] == 0)

    def steps_per_second(self, skip: int) -> float:
        """Steps per second of the slowest worker, without its first ones."""
        rates = []
        for said in self.lines.values():
            first = next((each for each in said if each["step"] >= skip), said[0])
            rates.append((said[-1]["step"] - first["step"]) / (said[-1]["seconds"] - first["seconds"]))
        return min(rates)

    @property
    def counted(self) -> int:
        """Steps of all workers, and of all their lives, that an exchange has sent."""
        lives: dict[tuple[str, int], int] = {}
        for task, said in self.lines.items():
            for each in said:
                lives[task, each["pid"]] = each["counted"]
        return sum(lives.values())

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a worker has sent and received for each of its steps."""
        said = [each[-1] for each in self.lines.values()]
        return sum(each["moved"] for each in said) / sum(each["step"] for each in said)

    @property
    def late(self) -> float:
        """The part of the steps that took longer than they were padded to."""
        said = [each[-1] for each in self.lines.values()]
        return sum(each["late"] for each in said) / sum(each["step"] for each in said)


def hosts_of(run: Run) -> list[Any]:
    """Returns the hosts of a run, to be made: one for each task."""
    from pstesting.hosts import Host

    names = [f"ps{index}" for index in range(SERVERS)] + [f"worker{index}" for index in range(WORKERS)]
    if not run.links:
        return [Host(name) for name in names]
    # A round trip passes two links, both ways.
    return [Host(name, run.rate, run.round_trip / 4) for name in names]


def measure(run: Run, torchft: str = "") -> Found:
    """Runs a cluster; returns what its workers have said.

    Raises:
        RuntimeError: a task failed.
    """
    from pstesting.hosts import Hosts

    with Hosts(hosts_of(run)) as hosts:
        began = time.monotonic()
        found = _torchft(hosts, run, torchft) if run.method == "torchft" else _cluster(hosts, run)
        found.seconds = time.monotonic() - began
    return found


def _cluster(hosts: Any, run: Run) -> Found:
    from pstesting.hosts import HostCluster
    from pswire.cluster import Task

    found, over = Found(), threading.Event()
    where = {Task("ps", index): f"ps{index}" for index in range(SERVERS)}
    where |= {Task("worker", index): f"worker{index}" for index in range(WORKERS)}
    began = Path(tempfile.mkdtemp()) / "began"
    args = ("--as-worker", json.dumps(asdict(run)), str(began))
    keys: dict[str, Any] = {"restarts": 1000 if run.kills or run.kill_server else 0}
    keys |= {"replication_factor": 2} if run.copies else {}
    script = str(Path(__file__).resolve())

    def hear(line: Any) -> None:
        if line.error:
            print(f"{line.task}: {line.text}", file=sys.stderr)
        elif line.task.job == "worker":
            found.hear(str(line.task), line.text)

    cluster = HostCluster(hosts, where, sink=hear, chief="none", script=script, args=args, **keys)

    def kill() -> None:
        while len(found.lines) < WORKERS and not over.wait(0.2):
            pass
        start = min((each[0]["time"] - each[0]["seconds"] for each in found.lines.values()), default=time.time())
        began.write_text(repr(start))
        if run.kill_server and not over.wait(run.kill_server):
            cluster.kill(Task("ps", 1))
        number = 0
        ends = start + run.seconds - run.kills - LAST_SECONDS
        while run.kills and time.time() < ends and not over.wait(run.kills):
            cluster.kill(Task("worker", 1 + number % (WORKERS - 1)))
            number += 1
        # A worker that came back after the others had ended would wait for them.
        while run.kills and not over.wait(1.0):
            if "/job:worker/task:0" in found.ends and time.time() > start + run.seconds + LAST_SECONDS:
                cluster.interrupt(signal.SIGTERM)
                return

    killer = threading.Thread(target=kill, daemon=True)
    with cluster:
        killer.start()
        outcome = cluster.wait(LIMIT_SECONDS)
        over.set()
    killer.join()
    if outcome.code and "/job:worker/task:0" not in found.ends:
        raise RuntimeError(str(outcome.report))
    return found


def _torchft(hosts: Any, run: Run, python: str) -> Found:
    found = Found()
    house, env = hosts.addresses["ps0"], {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    lighthouse = [str(Path(python).parent / "torchft_lighthouse"), "--min_replicas", str(WORKERS), "--bind"]
    lighthouse += ["0.0.0.0:29510", "--join_timeout_ms", "60000"]
    hosts.start("ps0", lighthouse, stdout=-3, stderr=-3, env=env)
    started = []
    for rank in range(WORKERS):
        name = f"worker{rank}"
        words = ["--as-torchft", json.dumps([asdict(run), rank, f"http://{house}:29510", hosts.addresses[name]])]
        environ = {**env, "GLOO_SOCKET_IFNAME": "eth0", "TORCHFT_LIGHTHOUSE": f"http://{house}:29510"}
        command = [python, str(Path(__file__).resolve()), *words]
        started.append(hosts.start(name, command, stdout=-1, stderr=-3, text=True, env=environ))

    def hear(rank: int) -> None:
        for line in started[rank].stdout:
            found.hear(f"worker{rank}", line)

    threads = [threading.Thread(target=hear, args=(rank,)) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    if len(found.ends) < WORKERS:
        raise RuntimeError("a worker of torchft failed")
    return found


# ---- Rows of the table ----


@dataclass(frozen=True)
class Row:
    """A figure and its aim.

    Attributes:
        name: of the row.
        what: the figure, in words.
        value: the figure.
        aim: in words, "" for none.
        met: True if it is reached; None for no aim.
    """

    name: str
    what: str
    value: float
    aim: str = ""
    met: bool | None = None


class Table:
    """Measures rows; runs that several rows need are made once.

    Args:
        small: the run with the model for loss.
        large: the run with the model for time and bytes.
        fast: the run for failures.
        torchft: the Python that has torchft, or "".
    """

    def __init__(self, small: Run, large: Run, fast: Run, torchft: str) -> None:
        self.small, self.large, self.fast = small, large, fast
        self.runs: dict[Run, Found] = {}
        self._torchft = torchft

    def found(self, run: Run) -> Found:
        """Returns what a run gives."""
        if run not in self.runs:
            self.runs[run] = measure(run, self._torchft)
        return self.runs[run]

    def loss(self) -> Iterator[Row]:
        """Loss at equal tokens."""
        diloco, sync = self.found(self.small), self.found(replace(self.small, method="sync"))
        ratio = diloco.held / sync.held
        yield Row("loss", f"DiLoCo H={self.small.sync_every}: held-out loss", diloco.held)
        yield Row("loss", "synchronous: held-out loss", sync.held)
        yield Row("loss", "ratio at equal tokens", ratio, "<= 1.03", ratio <= 1.03)
        small = self.found(replace(self.small, compression="Int4"))
        yield Row("loss", "the same with Int4", small.held / sync.held)

    def overlap(self) -> Iterator[Row]:
        """Local steps per second over slow links."""
        run = self.large
        every = run.sync_every
        alone = self.found(replace(run, method="none", steps=2 * every)).steps_per_second(every // 2)
        yield Row("overlap", "local steps/s without exchange", alone)
        ways = {
            "overlap": run,
            "no overlap": replace(run, sync_delay=0, fragments=1),
            "synchronous": replace(run, method="sync", steps=max(every // 10, 4), fragments=1, sync_delay=0),
        }
        for name, how in ways.items():
            found = self.found(how)
            rate = found.steps_per_second(every if how.method == "diloco" else 1) / alone
            aim = (">= 0.95", rate >= 0.95) if name == "overlap" else ("", None)
            yield Row("overlap", f"{name}, {how.compression}: steps/s over those without exchange", rate, *aim)
            yield Row("overlap", f"{name}: bytes per local step", found.bytes_per_step)
            yield Row("overlap", f"{name}: late steps", found.late)

    def workers(self) -> Iterator[Row]:
        """Goodput where workers die."""
        run = replace(self.fast, consistency="quorum")
        calm, killed = self.found(run), self.found(replace(run, kills=30.0))
        goodput = killed.counted / calm.counted
        yield Row("workers", "goodput, a worker killed every 30 s", goodput, ">= 0.9", goodput >= 0.9)
        yield Row("workers", "held-out loss with kills over without", killed.held / calm.held)

    def servers(self) -> Iterator[Row]:
        """Steps where a server dies."""
        run = replace(self.fast, copies=True, seconds=0.0, steps=int(self.fast.seconds / self.fast.pad))
        run = replace(run, steps=run.steps // run.sync_every * run.sync_every, kill_server=self.fast.seconds / 3)
        found = self.found(run)
        lost = WORKERS * run.steps - found.counted
        yield Row("servers", "steps lost, one of two servers killed", lost, "0", lost == 0)
        waits = [b["seconds"] - a["seconds"] for each in found.lines.values() for a, b in pairwise(each)]
        yield Row("servers", "longest time between two reports of a worker, s", max(waits))

    def pace(self) -> Iterator[Row]:
        """Loss at equal time, with a slow worker."""
        run = replace(self.fast, slower=3.0)
        sync, free = self.found(run), self.found(replace(run, consistency="async"))
        ratio = free.held / sync.held
        yield Row("pace", "synchronous, a worker 3 times slower: held-out loss", sync.held)
        yield Row("pace", "asynchronous: held-out loss", free.held)
        yield Row("pace", "ratio at equal time", ratio, "< 1", ratio < 1)

    def torchft(self) -> Iterator[Row]:
        """torchft's DiLoCo."""
        if not self._torchft:
            return
        for name, run in (("large", replace(self.large, sync_delay=0, fragments=1, compression="")),):
            theirs, ours = self.found(replace(run, method="torchft")), self.found(run)
            for whose, found in (("torchft", theirs), ("ours", ours)):
                yield Row("torchft", f"{name} model, {whose}: steps/s", found.steps_per_second(run.sync_every))
                yield Row("torchft", f"{name} model, {whose}: held-out loss", found.held)
                yield Row("torchft", f"{name} model, {whose}: bytes per local step", found.bytes_per_step)


ROWS = ("loss", "overlap", "workers", "servers", "pace", "torchft")


def draw(runs: Mapping[Run, Found], file: Path) -> None:
    """Draws loss against bytes of worker 0."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for run, found in runs.items():
        said = found.lines["/job:worker/task:0"]
        words = f"DiLoCo, H={run.sync_every}" if run.method == "diloco" else "synchronous"
        words += f", {run.compression}" if run.compression else ""
        axes.plot([each["moved"] / 1e6 for each in said], [each["loss"] for each in said], label=words)
    axes.set(xscale="log", xlabel="MB that a worker has sent and received", ylabel="training loss")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, or is a worker of what is measured."""
    import click

    @click.command(help=(__doc__ or "").partition("\n\n")[0])
    @click.option("--row", "rows", multiple=True, type=click.Choice(ROWS), help="Only these.")
    @click.option("--quick", is_flag=True, help="Small models and few steps, for a first look.")
    @click.option("--steps", type=int, default=1500, show_default=True, help="Steps for the loss at equal tokens.")
    @click.option("--pad", type=float, default=1.0, show_default=True, help="Seconds of a step of the large model.")
    @click.option("--seconds", type=float, default=240.0, show_default=True, help="Of runs with failures.")
    @click.option("--torchft", default="", metavar="PYTHON", help="A Python that has torchft, for its row.")
    @click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
    @click.option("--plot", type=click.Path(path_type=Path), help="Draw loss against bytes here; needs matplotlib.")
    def command(
        rows: tuple[str, ...],
        quick: bool,
        steps: int,
        pad: float,
        seconds: float,
        torchft: str,
        json_file: Path | None,
        plot: Path | None,
    ) -> None:
        small = Run(steps=steps, links=False)
        # Half of an exchange is hidden behind as many steps as there are before the next fragment's, but one.
        large = Run(width=384, layers=6, context=32, batch=1, steps=150, pad=pad, compression="Int8")
        large = replace(large, fragments=2, sync_delay=20)
        fast = Run(width=64, layers=2, batch=4, seconds=seconds, pad=0.05, grace=0.5)
        if quick:
            small = replace(small, width=32, layers=1, steps=100, context=32, sync_every=20)
            large = replace(large, width=64, layers=2, steps=60, sync_every=20, sync_delay=5, pad=0.2)
            fast = replace(fast, width=32, layers=1, context=32, seconds=120.0, sync_every=20, pad=0.2)
        table, found = Table(small, large, fast, torchft), list[Row]()
        with ExitStack() as stack:
            stack.callback(lambda: _publish(table, found, json_file, plot))
            for name in rows or ROWS:
                for row in getattr(table, name)():
                    met = {None: "", True: "  met", False: "  MISSED"}[row.met]
                    print(f"{row.name:8} {row.what:60} {row.value:12.4g}  {row.aim}{met}", flush=True)
                    found.append(row)

    command(arguments)


def _publish(table: Table, rows: Sequence[Row], json_file: Path | None, plot: Path | None) -> None:
    from figures import machine

    if json_file is not None:
        runs = [
            {"run": asdict(run), "seconds": found.seconds, "lines": found.lines, "ends": found.ends}
            for run, found in table.runs.items()
        ]
        said = {"format": FORMAT, "machine": machine(), "rows": [asdict(row) for row in rows], "runs": runs}
        json_file.write_text(json.dumps(said) + "\n")
    if plot is not None:
        draw({run: found for run, found in table.runs.items() if not run.links}, plot)  # those of the row `loss`


if __name__ == "__main__":
    if "--as-worker" in sys.argv:
        at = Path(sys.argv[-1])
        be_worker(Run(**json.loads(sys.argv[-2])), float(at.read_text()) if at.exists() else 0.0)
    elif "--as-torchft" in sys.argv:
        given, *rest = json.loads(sys.argv[-1])
        be_torchft(Run(**given), *rest)
    else:
        main()
