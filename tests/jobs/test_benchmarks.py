"""The benchmarks run: a quick run of each writes the figures that it promises.

`PEERS_PYTHON` names the Pythons that have the packages of other systems, separated as in PATH; without it this one is
asked.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pstesting import forks
from pstesting.hosts import Host
from tests.kit.shell import linked
from tests.kit.storage import disk
from tests.pstesting.test_planner import COSTS

approx = pytest.approx
ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
SECONDS = 300
PYTHONS = os.environ.get("PEERS_PYTHON", sys.executable).split(os.pathsep)
OF_PYTHONS = " ".join(f"--python {python}" for python in PYTHONS)
PACKAGES = {
    "tf-replicas": "tensorflow",
    "tf-graph": "tensorflow",
    "torch-tcp": "torch",
    "torch-shm": "torch",
    "ray": "ray",
    "gloo": "torch",
}


def run(words: list[str], file: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark to its end; its figures are in the file then."""
    command = [sys.executable, str(BENCHMARKS / words[0]), *words[1:], "--json", str(file)]
    return forks.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **environ})


def is_ordered(spread: dict[str, float]) -> bool:
    return 0 < spread["min"] <= spread["median"] <= spread.get("p90", spread["median"])


Check = Callable[[Any, str], None]
"""Looks at the figures of a run, and at what it printed."""

BENCHES: dict[str, tuple[str, Check]] = {}
"""By name: the program with its flags, and what its figures must be. {disk} and {costs} stand for paths."""


def bench(name: str, command: str) -> Callable[[Check], Check]:
    def known(check: Check) -> Check:
        BENCHES[name] = command, check
        return check

    return known


def ratio(rows: list[dict[str, Any]], what: str) -> None:
    """A column "a / b" is that of the columns a and b."""
    one, other = what.split(" / ")
    assert [row[what] for row in rows] == [approx(row[one] / row[other]) for row in rows]


ONE_ROUND = "round.py --quick --sizes 4KB --workers 1 --chief worker"


def names_of(value: Any, prefix: str = "") -> Iterator[str]:
    """The names of all figures, as `rounds.ms`; least, median and 90th percentile count as one."""
    if isinstance(value, list):
        value = value[0]
    if isinstance(value, dict) and set(value) != {"min", "median", "p90"}:
        for key, inner in value.items():
            yield from names_of(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix


@bench("round", ONE_ROUND)
def check_round(found: Any, said: str) -> None:
    """Every figure has its row in docs/performance.md and the other way round; ratios are those of the medians."""
    text = (ROOT / "docs" / "performance.md").read_text("utf-8").partition("## The figures in `--json`")[2]
    assert sorted(names_of(found)) == sorted(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    assert [row["lane"] for row in found["rounds"]] == ["grpc", "tcp", "shm"]
    assert all(map(is_ordered, [*found["limits"].values(), *(row["ms"] for row in found["rounds"])]))
    for row in found["rounds"]:
        assert (row["size"], row["workers"], row["servers"], row["chief"]) == ("4KB", 1, 1, "worker")
        assert row["gb_per_s"] == approx(2 * row["nbytes"] / row["ms"]["median"] / 1e6)
        assert row["to_tcp"] == approx(row["gb_per_s"] / found["limits"]["tcp_gb_per_s"]["median"])
        assert row["to_memcpy"] == approx(row["gb_per_s"] / found["limits"]["memcpy_gb_per_s"]["median"])
        assert (row["to_sgd"], row["to_token"]) == (1, 1)
        assert min(row["server_cpu_ms"], row["worker_cpu_ms"]) > 0
        assert row["server_rss_mb"] > row["server_growth_mb"]


@bench("round of optimizers", f"{ONE_ROUND} --lane shm --optimizer sgd --optimizer adam --allocator plain --rounds 4")
def check_optimizers(found: Any, said: str) -> None:
    """Adam's rounds are measured beside those of SGD in the same cluster otherwise, as many as were asked for."""
    sgd, adam = found["rounds"]
    assert [(row["optimizer"], row["allocator"], row["rounds"]) for row in (sgd, adam)] == [
        ("sgd", "plain", 4),
        ("adam", "plain", 4),
    ]
    assert adam["to_sgd"] == approx(adam["ms"]["median"] / sgd["ms"]["median"])


@bench("round with TLS", f"{ONE_ROUND} --lane tcp --security tls --security token --rounds 4")
def check_tls(found: Any, said: str) -> None:
    """Clusters with certificates are measured beside those without, on a lane that TLS seals."""
    tls, token = found["rounds"]
    assert (tls["security"], token["security"], token["to_token"]) == ("tls", "token", 1)
    assert tls["to_token"] == approx(tls["ms"]["median"] / token["ms"]["median"])


@bench("checkpoint", "checkpoint.py --nbytes 4000000 --laps 2 --directory {disk}")
def check_checkpoint(found: Any, said: str) -> None:
    """Seconds of each kind of work, and rates beside those of plain files."""
    median = {name: seconds["median"] for name, seconds in found["seconds"].items()}
    figures = found["figures"]
    assert (found["nbytes"], figures["training stops, s"]) == (4_000_000, median["stop"])
    assert figures["save, MB/s"] == approx(found["nbytes"] / median["save"] / 1e6)
    assert figures["save / save_file"] == approx(median["save_file"] / median["save"])
    assert figures["restore / load_file"] == approx(median["load_file"] / median["restore"])
    slow = max(median["stop"], median["call"]) > 0.25
    assert ("missed" in said) == (slow or min(figures["save / save_file"], figures["restore / load_file"]) < 0.6)


COLUMNS = {
    "variables": ["variables", "create", "first step, SGD", "round, SGD", "first step, Adam", "round, Adam"],
    "servers": ["workers", "servers", "round", "server CPU"],
    "large": ["MB", "create", "copy", "copy / create"],
    "rejoin": ["variables", "create", "read", "step", "in all"],
    "restore": ["MB", "restore", "load_file", "load_file / restore"],
}


@bench("growth", f"growth.py --quick {' '.join(f'--part {part}' for part in COLUMNS)}")
def check_growth(found: Any, said: str) -> None:
    """Each part has its rows, in which all that is timed took some time; ratios are those of its times."""
    parts = found["parts"]
    assert {part: list(rows[0]) for part, rows in parts.items()} == COLUMNS
    assert all(value > 0 for rows in parts.values() for row in rows for value in row.values())
    ratio(parts["large"], "copy / create")
    ratio(parts["restore"], "load_file / restore")
    assert [row["variables"] for row in parts["variables"]] == [1, 10, 100]


OF_HOSTS = "hosts.py --quick --rate 100 --nbytes 8000000"


@bench("hosts", OF_HOSTS)
def check_hosts(found: Any, said: str) -> None:
    """No round is faster than its links of 100 Mbit, and four servers are faster than one."""
    assert [(row["servers"], row["ways"]) for row in found["limits"]] == [(1, 1), (1, 2), (4, 1), (4, 2)]
    one, four = found["rounds"]
    assert (one["servers"], four["servers"]) == (1, 4)
    assert 0 < one["of_rate"] < 1
    assert four["to_one"] > 1.5


@bench("idle", "idle.py --quick --seconds 2 --processes 2")
def check_idle(found: Any, said: str) -> None:
    """Each lane and gRPC alone have a row; what is beyond gRPC, and a beat's ratio, are those of the rows."""
    assert "a session has ended" not in said
    *lanes, limit = found["rows"]
    assert [row["lane"] for row in found["rows"]] == ["shm", "tcp", "grpc", ""]
    for row in lanes:
        assert row["kb_each"] > 0
        assert row["kb_beyond"] == approx(row["kb_each"] - limit["kb_each"])
        assert row["to_stream"] == approx(row["us_per_beat"]["beats"] / limit["us_per_beat"]["streams"])
        share, rate = row["core_percent"]["beats"] / 100, row["beats_per_s"]["beats"]
        assert 0 < rate < 2 * found["sessions"] / found["beat_seconds"]
        assert row["us_per_beat"]["beats"] == approx(1e6 * share / rate)
    assert (limit["kb_beyond"], set(limit["us_per_beat"])) == (0, {"calls", "streams"})


@bench("rows", "rows.py --quick --rows 1000 --ids 64 --table static --table dynamic")
def check_rows(found: Any, said: str) -> None:
    """A row for each lane, kind of table and optimizer, in which all that is timed took some time."""
    ours = {(row["system"], row["optimizer"]) for row in found["rows"] if not row["system"].startswith("torch")}
    systems = product(("grpc", "tcp", "shm"), ("static", "dynamic"))
    assert ours == {(f"{lane}, {table}", name) for lane, table in systems for name in ("sgd", "adagrad")}
    assert all(is_ordered(row["ms"]) for row in found["rows"])
    assert {(row["laps"], row["steps"], len(row["lap_medians_ms"])) for row in found["rows"]} == {(1, 20, 1)}


@bench("staleness", "staleness.py --quick --k 2")
def check_staleness(found: Any, said: str) -> None:
    """Each consistency has its rows; no bounded worker has read of pushes more than one beyond its bound."""
    rows, names = found["rows"], ["sync", "bounded, k = 2", "async"]
    assert [(row["slow"], row["consistency"]) for row in rows] == [(s, n) for s in ("one", "in turn") for n in names]
    assert all(row["steps/s"] > row["of the last"] > 0 for row in rows)
    assert all(row["gap"] <= 3 for row in rows if row["consistency"] == "bounded, k = 2")


@bench("step", f"step.py --quick {OF_PYTHONS}")
def check_step(found: Any, said: str) -> None:
    """Clusters have the loss of a plain loop after the same steps; what is not installed is named, with a remedy."""
    rows, torch = {row["system"]: row for row in found["steps"]}, "torch RPC, 1 + 1"
    for system in ("ours, 1 + 1", "ours, 2 + 2"):
        assert rows[system]["loss"] == approx(rows["NumPy loop"]["loss"], abs=1e-4)
        assert rows[system]["server_cpu_ms"] > 0
    assert all(row["worker_cpu_ms"] > 0 and row["steps_per_s"] > 0 for row in rows.values())
    assert rows["ours, 2 + 2"]["cpu_ms"] > rows["ours, 2 + 2"]["worker_cpu_ms"]
    assert (torch in rows) != (torch in found["left_out"])
    assert "pip install" in found["left_out"].get(torch, "pip install")


@bench("table checkpoints", "table_checkpoints.py --rows 200000 --laps 2 --directory {disk}")
def check_table_checkpoints(found: Any, said: str) -> None:
    """Changes of a small table have few bytes, and all that is measured is there."""
    figures = found["figures"]
    assert figures["rows"] == 200_000
    assert figures["delta, bytes of the whole"] < 0.03
    assert figures["hold, ms"]["min"] < 10
    assert figures["lookup in read-2, ms"]["median"] > 0


@bench("tables", "tables.py --keys 5000 --laps 3")
def check_tables(found: Any, said: str) -> None:
    """Each figure of a table of one size is there, with its least time."""
    (figures,) = found["tables"]
    assert figures.pop("keys") == 5000
    assert figures.pop("index bytes a key") > 16
    assert all(map(is_ordered, figures.values()))
    assert {"find", "gather", "lookup", "round, all new"} <= figures.keys()


@bench("tier", "tier.py --path {disk} --rows 60000 --share 2 --rounds 3")
def check_tier(found: Any, said: str) -> None:
    """Each line has both tables, which are compared in the benchmark, and what was read from the disk."""
    lines = found["tiers"]
    orders = [("frequency", False), ("frequency", False), ("frequency", True), ("random", False)]
    assert [(line["order"], line["early"]) for line in lines] == orders
    assert all(min(line["memory"], line["tier"]) > 0 and line["bound, MiB"] == 7 for line in lines)
    assert lines[-1]["read"] > 0


@bench("tier of a job", "tier_job.py --path {disk} --rows 100000 --share 1 --order random --laps 1 --steps 6")
def check_tier_job(found: Any, said: str) -> None:
    """Each with its table in memory, in a file, and in one without hints; the benchmark compares their tables."""
    (figures,) = found["tiers"]
    assert all(figures[f"{system}, ms"] > 0 for system in ("memory", "tier", "unhinted"))
    assert figures["unhinted, hinted"] == 0


@bench("update", "update.py --quick")
def check_update(found: Any, said: str) -> None:
    """Seconds of each kind of work, and ratios in which reads and writes count."""
    median, ratios = {name: seconds["median"] for name, seconds in found["seconds"].items()}, found["ratios"]
    assert all(map(is_ordered, found["seconds"].values()))
    copied = 2 / median["memcpy, 1 threads"]
    for name, arrays in (("sgd", 3), ("adam", 7)):
        assert ratios[f"{name}: rate / memcpy's"] == approx(arrays / median[f"{name}, 1 threads"] / copied)
    assert ratios["adam: 5 ms / first trace"] == approx(5e-3 / median["adam, first trace"])
    assert ratios["adam: 50 us / call"] == approx(50e-6 / median["adam, call"])
    assert ratios["rows: times add.at"] == approx(median["rows, add.at"] / median["rows, 1 threads"])
    assert ("adam, torch" in median) != ("no row for torch" in said)


@bench("predictions", "predictions.py --quick --costs {costs} --lane tcp")
def check_predictions(found: Any, said: str) -> None:
    """Each row has both a prediction and a real job; errors are those of the rows, and the last line counts them."""
    rows = found["rows"]
    assert {(row["workers"], row["servers"]) for row in rows} == {(1, 1), (4, 1)}
    assert [row["error"] for row in rows] == [approx(row["predicted"] / row["measured"] - 1) for row in rows]
    assert f"{sum(abs(row['error']) <= 0.2 for row in rows)} of {len(rows)} within 20%" in said


@bench("curves", "curves.py --quick --costs {costs} --mode sync --mode async")
def check_curves(found: Any, said: str) -> None:
    """Modes have rows; one worker is its measure, and ten on one server make less than ten times as much."""
    assert "used most" in said
    for mode in ("sync", "async"):
        rows = {row["workers"]: row for row in found["rows"] if row["mode"] == mode}
        assert sorted(rows) == [1, 10, 30]
        assert (rows[1]["speedup"], rows[30]["servers"]) == (1, 3)
        assert 1 < rows[10]["speedup"] < 10
        assert rows[30]["speedup"] > 2 * rows[10]["speedup"]


@bench("many clients", "fanin.py --quick --workers 1 --workers 2 --workers 12 --processes 2")
def check_fanin(found: Any, said: str) -> None:
    """Clients that share a process and those that do not are measured alike; a client costs the server no thread."""
    assert sorted(found["server_kb_per_worker"]) == ["grpc", "shm", "tcp"]
    for lane in found["server_kb_per_worker"]:
        rows = [row for row in found["rows"] if row["lane"] == lane]
        assert [row["workers"] for row in rows] == [1, 2, 12]
        assert all(is_ordered(row["ms"]) and row["server_rss_mb"] > row["server_rss_alone_mb"] > 0 for row in rows)
        assert all(row["server_us_per_push"] == approx(1e3 * row["server_ms"] / row["workers"]) for row in rows)
        assert rows[2]["server_threads"] - rows[0]["server_threads"] < 11


@bench("other systems", f"peers/run.py --quick --sizes 4KB {OF_PYTHONS}")
def check_peers(found: Any, said: str) -> None:
    """A quick run has figures of each system that is installed, which checks its variables' values itself."""
    assert set(found["left_out"]) == {system for system, package in PACKAGES.items() if not has(package)}
    assert len(found["rounds"]) == 6 + 1 + len(PACKAGES) - len(found["left_out"])
    lanes = [row["beside"] for row in found["rounds"] if row["beside"]]
    assert all(one == other for one, other in list(pairwise(lanes))[:6:2])
    assert all(row["size"] == "4KB" and is_ordered(row["ms"]) for row in found["rounds"])


def has(package: str) -> bool:
    """Whether one of the Pythons can import a package."""
    question = f"import sys; from importlib.util import find_spec; sys.exit(find_spec({package!r}) is None)"
    return any(not forks.run([python, "-c", question], check=False).returncode for python in PYTHONS)


QUICK = ("curves",)
"""Benchmarks that CI runs; the soak runs all others."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ci if n in QUICK else pytest.mark.soak) for n in BENCHES]
)
def test_a_quick_run_writes_its_figures(tmp_path: Path, stack: ExitStack, name: str) -> None:
    """Those that the document describes, and their ratios; nothing is left in its directory."""
    command, check = BENCHES[name]
    file, places = tmp_path / "found.json", {"costs": str(tmp_path / "costs.json"), "disk": ""}
    COSTS.write(tmp_path / "costs.json")
    if name == "hosts":
        linked(stack, Host("here")).__exit__()  # else skipped
    if "{disk}" in command:
        places["disk"] = str(stack.enter_context(disk()))
    done = run(command.format(**places).split(), file)
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(file.read_text(encoding="utf-8")), done.stdout + done.stderr)
    assert not places["disk"] or not os.listdir(places["disk"])


@pytest.mark.soak
def test_another_lane_than_the_one_asked_for_is_no_result(tmp_path: Path) -> None:
    """Where a lane does not work, and the next one is used, nothing is reported under its name."""
    code = "import os\n\ndef memfd_create(*_):\n    raise OSError\n\nos.memfd_create = memfd_create\n"
    (tmp_path / "sitecustomize.py").write_text(code, encoding="utf-8")  # every process runs it
    file = tmp_path / "round.json"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = run(f"{ONE_ROUND} --lane shm".split(), file, PYTHONPATH=path)
    assert done.returncode == 1
    assert "worker 0 used tcp" in done.stderr
    assert not file.exists()


@pytest.mark.soak
def test_what_is_not_installed_is_skipped_with_a_word(tmp_path: Path) -> None:
    """Each peer's line says which package is missing where; nothing has failed."""
    bare, file = tmp_path / "python", tmp_path / "peers.json"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    chosen = " ".join(f"--systems {system}" for system in PACKAGES)
    done = run(f"peers/run.py --quick --sizes 4KB {chosen} --python {bare}".split(), file)
    assert done.returncode == 0, done.stdout + done.stderr
    left_out = json.loads(file.read_text(encoding="utf-8"))["left_out"]
    assert left_out == {
        system: f"skipped, {package} is not installed for {bare}" for system, package in PACKAGES.items()
    }
    assert all(why in done.stdout for why in left_out.values())


def test_who_cannot_make_hosts_is_told(tmp_path: Path) -> None:
    """Nothing is measured, and that is no failure: other benchmarks go on."""
    done = run(OF_HOSTS.split(), tmp_path / "none", PATH=str(tmp_path), PYTHONPATH=":".join(sys.path))
    assert done.returncode == 0, done.stderr
    assert "benchmarks/hosts.py is left out: hosts need ip, tc, nsenter, unshare" in done.stderr


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that all peers' programs share."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    monkeypatch.delitem(sys.modules, "rounds", raising=False)
    import rounds

    yield rounds
    del sys.modules["rounds"]


def test_a_round_that_lost_a_gradient_is_noticed(rounds: Any) -> None:
    """What comes out is compared exactly: one gradient less in one round of one variable is an error."""
    work = rounds.Work("tiny", (3, 2), rounds=4, warm=1)
    values = work.zeros()

    def make_round(lost: bool = False) -> list[np.ndarray]:
        for worker in range(rounds.WORKERS):
            for value, gradient in zip(values, work.gradients(worker), strict=True):
                if not (lost and worker == 1 and value is values[1]):
                    value -= rounds.RATE * gradient
        return values

    assert len(work.measure(make_round)) == work.rounds
    values = work.zeros()
    turns = iter([False, False, True, False, False])
    with pytest.raises(ValueError, match="variable 1 should be"):
        work.measure(lambda: make_round(next(turns)))


def test_a_process_that_fails_ends_its_peer(rounds: Any) -> None:
    """A process of a peer that fails ends the others, and the program with an error."""
    with pytest.raises(SystemExit, match="1"):
        rounds.run_together([(signal.pause, ()), (os._exit, (3,))], [(signal.pause, ())])
    assert not multiprocessing.active_children()
