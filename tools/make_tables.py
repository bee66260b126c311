"""Checks that tables in the documents are those of benchmarks/results and of the code; with --write, makes them so.

A table, or a sentence with figures, stands between `<!-- table: NAME -->` and `<!-- end -->`. A result file is JSON:
`measured` (the date), `machine`, `load`, `command`, `what` (the job in words), and `rows`. A row may have its own date.

    python tools/make_tables.py            checks
    python tools/make_tables.py --write    writes
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from psclient._src.telemetry.exporter import OF_CHIEFS, OF_WORKERS
from psclient.psctl.checkpoint import CheckpointView
from psserver.telemetry import ROWS as SERVERS
from pswire.telemetry.metrics import PROCESS
from pswire.telemetry.metrics import Row as Metric
from pswire.telemetry.views.job_view import JobView, ServerView, TaskView
from pswire.telemetry.views.variable_list import VariableView

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KEYS = {"measured", "machine", "load", "command", "what", "rows"}
TRANSPORTS = ("shm", "tcp", "grpc")
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


def read(name: str) -> Row:
    """Returns a result file.

    Raises:
        SystemExit: it does not have exactly the keys of one.
    """
    found: Row = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if set(found) != KEYS:
        sys.exit(f"make_tables: benchmarks/results/{name}.json must have exactly {', '.join(sorted(KEYS))}")
    return found


def shown(number: float) -> str:
    """Returns a number with three digits."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table."""
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def sources(*names: str) -> Iterator[str]:
    """Yields when results were measured, at which load, and where the rest of that stands."""
    files = [(name, read(name)) for name in names]
    dates = sorted({row.get("measured", found["measured"]) for _, found in files for row in found["rows"]})
    loads = ", ".join(dict.fromkeys(found["load"] for _, found in files))
    links = ", ".join(f"[{name}.json](../benchmarks/results/{name}.json)" for name in names)
    yield ""
    yield f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} (load: {loads}). Source: {links}."


def peers() -> Iterator[str]:
    """Rounds of this project and of others."""
    found = read("peers")["rows"]
    sizes = list(found[0]["ms"])
    lines = ([row["system"], row["transport"], *(shown(row["ms"][size]) for size in sizes)] for row in found)
    yield from table(["system", "transport", *(f"{size}, ms" for size in sizes)], lines)
    yield from sources("peers")


def rows() -> Iterator[str]:
    """Steps on a table of a million rows: SGD and Adagrad."""
    lines = []
    for (system, kind), group in groupby(read("rows")["rows"], key=lambda row: (row["system"], row["table"])):
        by = {row["transport"]: row["ms"] for row in group}
        times = [f"{shown(by[each]['sgd'])}, {shown(by[each]['adagrad'])}" if each in by else "" for each in TRANSPORTS]
        lines.append([system + (", dynamic table" if kind == "dynamic" else ""), *times])
    yield from table(["SGD, Adagrad: ms", *TRANSPORTS], lines)
    yield from sources("rows")


def hosts() -> Iterator[str]:
    """A sentence: rounds of one worker over slow links, by the number of servers."""
    (row,) = (row for row in read("hosts")["rows"] if row["workers"] == 1)
    times = [f"{shown(ms)} ms with {count}" for count, ms in row["ms"].items()]
    yield f"Over 1 Gbit/s links, a 64 MB round took {', '.join(times)} servers."
    yield from sources("hosts")


def local_reduction() -> Iterator[str]:
    """Rounds of workers of one host, each by itself and in sums."""
    lines = (
        [f"{row['size']}, {row['workers']} workers", *map(shown, row["ms"]), *map(shown, row["server_cpu_ms"])]
        for row in read("local_reduction")["rows"]
    )
    yield from table(["variable", "round, ms", "with sums", "server CPU, ms", "with sums"], lines)
    yield from sources("local_reduction")


def copies() -> Iterator[str]:
    """A sentence: how much longer rounds take with replication."""
    ratios = [
        f"{shown(row['ms'][1] / row['ms'][0])} ({row['size']}, {row['transport']})" for row in read("copies")["rows"]
    ]
    yield f"A round took {', '.join(ratios[:-1])} and {ratios[-1]} times as long."
    yield from sources("copies")


def jobs() -> Iterator[str]:
    """Steps per second of five jobs, with this project and with others."""
    steps, network = read("steps")["rows"], read("frameworks")["rows"]
    dense, sparse = read("peers")["rows"], [row for row in read("rows")["rows"] if row["table"] == "static"]
    rates = {
        "digits MLP, NumPy; 1 worker, 1 server": [
            (row, row["steps_per_second"]) for row in steps if row["workers"] == 1
        ],
        "digits CNN, PyTorch; 2 servers": [(row, 1000 / row["ms"]) for row in network],
        "dense gradients, 4MB": [(row, 1000 / row["ms"]["4MB"]) for row in dense],
        "dense gradients, 100MB": [(row, 1000 / row["ms"]["100MB"]) for row in dense],
        "4,096 of a million rows, Adagrad": [(row, 1000 / row["ms"]["adagrad"]) for row in sparse],
    }
    names = ("paramserver", "torch RPC")
    lines = []
    for job, each in rates.items():
        known = [", ".join(_rate(row, rate) for row, rate in each if row["system"] == name) for name in names]
        others = (f"{row['system']} {_rate(row, rate)}" for row, rate in each if row["system"] not in names)
        lines.append([job, *known, "; ".join(others)])
    yield from table(["steps/s", *names, "others"], lines)
    yield from sources("steps", "frameworks", "peers", "rows")


def _metrics(rows: Iterable[Metric[Any]]) -> Iterator[str]:
    lines = []
    for row in rows:
        name = row.name + ("_total" if row.kind == "counter" else "")
        lines.append([f"`{name}`", row.kind, ", ".join(f"`{each}`" for each in row.labels), row.about])
    yield from table(["name", "type", "labels", "meaning"], lines)


def process_metrics() -> Iterator[str]:
    """Metrics of every process."""
    yield from _metrics(PROCESS)


def server_metrics() -> Iterator[str]:
    """Metrics of servers."""
    yield from _metrics(SERVERS)


def worker_metrics() -> Iterator[str]:
    """Metrics of workers."""
    yield from _metrics(OF_WORKERS)


def chief_metrics() -> Iterator[str]:
    """Metrics of the chief."""
    yield from _metrics(OF_CHIEFS)


def keys_of(kind: type) -> Iterator[str]:
    """The keys of a row in JSON, and their meanings: the fields of its dataclass, as the docstring explains them."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    told = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", text, re.MULTILINE)
    lists = {field.name for field in dataclasses.fields(kind) if re.match(r"tuple\[[A-Z]", str(field.type))}
    lines = []
    for names, meaning in told:
        keys = ", ".join(f"`{name}[]`" if name in lists else f"`{name}`" for name in names.split(", "))
        lines.append([keys, " ".join(meaning.split()).removesuffix(".")])
    explained = {name for names, _ in told for name in names.split(", ")}
    if explained != {field.name for field in dataclasses.fields(kind)}:
        sys.exit(f"make_tables: the docstring of {kind.__name__} must explain each of its fields, and nothing else")
    yield from table(["key", "meaning"], lines)


def status_keys() -> Iterator[str]:
    """Keys of a job."""
    yield from keys_of(JobView)


def server_keys() -> Iterator[str]:
    """Keys of a server."""
    yield from keys_of(ServerView)


def task_keys() -> Iterator[str]:
    """Keys of a task."""
    yield from keys_of(TaskView)


def variable_keys() -> Iterator[str]:
    """Keys of a variable."""
    yield from keys_of(VariableView)


def checkpoint_keys() -> Iterator[str]:
    """Keys of a checkpoint in a list."""
    yield from keys_of(CheckpointView)


def _rate(row: Row, rate: float) -> str:
    return shown(rate) + (f" ({row['transport']})" if "transport" in row else "")


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    each.__name__: each
    for each in (
        *(peers, rows, hosts, local_reduction, copies, jobs),
        *(process_metrics, server_metrics, worker_metrics, chief_metrics),
        *(status_keys, server_keys, task_keys, variable_keys, checkpoint_keys),
    )
}


def made(text: str) -> str:
    """Returns a page with its tables made anew."""
    return _TABLE.sub(lambda match: match[1] + "\n" + "\n".join(TABLES[match[2]]()) + "\n\n" + match[3], text)


def main() -> None:
    """Exits with 1 where a page differs, or a table has no page."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    used = {match[2] for text in pages.values() for match in _TABLE.finditer(text)}
    if used != set(TABLES):
        sys.exit(f"make_tables: a table without a page, or a page without one: {', '.join(sorted(used ^ set(TABLES)))}")
    stale = [path for path, text in pages.items() if made(text) != text]
    if "--write" in sys.argv:
        for path in stale:
            path.write_text(made(pages[path]), encoding="utf-8")
    elif stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"make_tables: {names} are stale; run python tools/make_tables.py --write")


if __name__ == "__main__":
    main()
