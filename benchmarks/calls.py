"""Calls of a step that repeats: a count, which no other load on the machine moves.

    python benchmarks/calls.py                    two workers and one server, over shm and over tcp
    python benchmarks/calls.py --transport shm    over one of them
    python benchmarks/calls.py --servers 2        with more servers, over which the variables are spread
    python benchmarks/calls.py --where            also the functions that are called most

A step is `strategy.run` of a replica function that reads ten variables of 400 bytes, applies SGD and returns a loss; it
ends when the next values are there. Counted are calls of Python functions and of C functions, in all threads of worker
0 and of each server, with those of the standard library; of the worker also those until its last push is in the
socket. Printed are medians of 100 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import os
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

import numpy as np  # noqa: E402

import psclient as ps  # noqa: E402
from pswire.network.traffic import TRANSPORTS, TransportName  # noqa: E402

WARM, STEPS, VARIABLES, BYTES = 300, 100, 10, 400
THREADS = 64
SECONDS = 120
SENDS = ("send", "sendall", "sendmsg")


class CallCounter:
    """Counts calls of this process, by thread, in a file that other processes may read.

    Args:
        path: the file.
        where: True to count by function as well.

    Attributes:
        where: of each function how often it was called in measured steps.
    """

    def __init__(self, path: str, where: bool) -> None:
        self._cells = cells(path)
        self._threads = itertools.count()
        self._by_function = where
        self.where = Counter[str]()
        self.sent = 0
        """Python calls of the thread that has sent last, up to then."""

    def begin(self) -> None:
        """Counts in this thread, and in each that begins later."""
        threading.setprofile(self._first)
        self._first(None, "", None)

    def _first(self, frame: FrameType | None, event: str, arg: Any) -> None:
        at, cells, where = 2 * next(self._threads), self._cells, self.where if self._by_function else None

        def watch(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call":
                cells[at] += 1
                if where is not None and cells[-1]:
                    where[f"{frame.f_code.co_filename.rpartition('site-packages/')[2]}:{frame.f_code.co_qualname}"] += 1
            elif event == "c_call":
                cells[at + 1] += 1
                if arg.__name__ in SENDS:
                    self.sent = cells[at]

        if frame is not None:
            watch(frame, event, arg)
        self.mine = at
        sys.setprofile(watch)

    def here(self) -> int:
        """Python calls of the thread that began."""
        return self._cells[0]


def cells(path: str) -> memoryview:
    """The counts in a file: by thread, of Python and of C functions; the last says that steps are measured."""
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def totals(counted: memoryview) -> list[int]:
    """The counts of all threads, by kind."""
    return [sum(counted[kind:-2:2]) for kind in range(2)]


def work(transport: TransportName, mine: str, theirs: Sequence[str], where: bool) -> None:
    """Trains; worker 0 prints what its steps have called."""
    counter = CallCounter(mine, where) if mine else None
    if counter is not None:
        counter.begin()
    strategy = ps.ParameterServerStrategy(["cpu:0"], transport=transport)
    with strategy.scope():
        variables = [ps.Variable(np.zeros(BYTES // 4, "float32")) for _ in range(VARIABLES)]
        optimizer = ps.optimizers.SGD(0.1)
    gradients = [np.ones(BYTES // 4, "float32") for _ in variables]
    until: list[int] = []

    def step() -> Any:
        values = [v.numpy() for v in variables]
        before = 0 if counter is None else counter.here()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        until.append(0 if counter is None else counter.sent - before)
        return values[0][0]

    seen: list[list[int]] = []
    servers = [cells(path) for path in theirs]
    for number in range(WARM + STEPS):
        if counter is not None and number == WARM:
            for each in (counter._cells, *servers):
                each[-1] = 1
        strategy.run(step)
        variables[0].numpy()
        if counter is not None:
            seen.append([count for each in (counter._cells, *servers) for count in totals(each)])
    if counter is not None:
        steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(seen[WARM - 1 :])]
        tasks = ["worker", *server_names(len(servers))]
        names = [*(f"{task}{kind}" for task in tasks for kind in ("", " c")), "until sent"]
        columns = [*zip(*steps, strict=True), until[WARM:]]
        found = {name: statistics.median(each) for name, each in zip(names, columns, strict=True)}
        print(json.dumps(found), flush=True)
        if where:
            tell(counter, "worker")
    strategy.close()


def serve(path: str, where: bool) -> None:
    """Is a server whose calls are counted."""
    counter = CallCounter(path, where)
    counter.begin()
    sys.argv = ["psserver"]
    try:
        runpy.run_module("psserver", run_name="__main__")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        if where:
            tell(counter, Path(path).name)


def server_names(count: int) -> list[str]:
    """The names of servers in what is printed."""
    return ["server", *(f"server {index}" for index in range(1, count))]


def tell(counter: CallCounter, task: str) -> None:
    """Prints the functions that a task has called most, for each measured step."""
    sys.setprofile(None)
    print(f"-- {task}", file=sys.stderr)
    for name, count in sorted(counter.where.items(), key=lambda item: -item[1])[:400]:
        print(f"{count / STEPS:8.1f} {name}", file=sys.stderr)


def measure(transport: TransportName, where: bool = False, servers: int = 1) -> dict[str, float]:
    """Runs a cluster; returns the medians."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("worker", *server_names(servers))]
        for file in files:
            Path(file).write_bytes(bytes(16 * THREADS))
        jobs = {"ps": free_addresses(servers), "worker": ["worker-0:1", "worker-1:1"]}
        started = [_start(jobs, "ps", n, where, "serve", file) for n, file in enumerate(files[1:])]
        try:
            started += [
                _start(jobs, "worker", n, where, "work", transport, mine, *files[1:])
                for n, mine in enumerate((files[0], ""))
            ]
            said, _ = started[servers].communicate(timeout=SECONDS)
            started[servers + 1].wait(SECONDS)
            for each in started[:servers]:
                each.terminate()
                each.wait(SECONDS)
        finally:
            for each in started:
                each.kill()
                each.wait()
    found: dict[str, float] = json.loads(said)
    return found


def free_addresses(count: int) -> list[str]:
    """Addresses on this host at which nothing listens."""
    with contextlib.ExitStack() as open_probes:
        probes = [open_probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


def _start(jobs: dict[str, list[str]], job: str, index: int, where: bool, *arguments: str) -> subprocess.Popen[str]:
    environ = dict(os.environ, TF_CONFIG=json.dumps({"cluster": jobs, "task": {"type": job, "index": index}}))
    command = [sys.executable, str(HERE), *(["--where"] if where else []), *arguments]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def main() -> None:
    """Measures, or is one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", action="store_true", help="count by function as well")
    parser.add_argument("--transport", choices=TRANSPORTS[:2], help="only one transport")
    parser.add_argument("--servers", type=int, default=1, help="number of servers")
    parser.add_argument("process", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.process:
        for transport in [options.transport] if options.transport else TRANSPORTS[:2]:
            print(transport, json.dumps(measure(transport, options.where, options.servers)))
        return
    kind, *arguments = options.process
    if kind == "serve":
        serve(arguments[0], options.where)
    else:
        transport, mine, *servers = arguments
        work(cast(TransportName, transport), mine, servers, options.where)


if __name__ == "__main__":
    main()
