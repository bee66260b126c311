"""The benchmarks run: a quick run of each writes the figures that it promises.

`PEERS_PYTHON` names the Pythons that have the packages of other systems, separated as in PATH; without it this one is
asked.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


def run(words: list[str], file: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / words[0]), *words[1:], "--json", str(file)]
    return forks.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **environ})


def is_ordered(spread: dict[str, float]) -> bool:
    return 0 < spread["min"] <= spread["median"] <= spread.get("p90", spread["median"])


Check = Callable[[Any, str], None]
"""Looks at the figures of a run, and at what it printed."""


def figures(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All figures with their names, as `rounds.ms`; least, median and 90th percentile are one."""
    if isinstance(value, list):
        for inner in value:
            yield from figures(inner, prefix)
    elif isinstance(value, dict) and not set(value) >= {"min", "median"}:
        for key, inner in value.items():
            yield from figures(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value


def check_round(found: Any, said: str) -> None:
    """Every figure has its row in docs/lab/performance.md and the other way round; ratios are those of the medians."""
    text = (ROOT / "docs" / "lab" / "performance.md").read_text("utf-8").partition("## The figures in `--json`")[2]
    assert {name for name, _ in figures(found)} == set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    assert [row["transport"] for row in found["rounds"]] == ["grpc", "tcp", "shm"]
    assert all(map(is_ordered, [*found["limits"].values(), *(row["ms"] for row in found["rounds"])]))
    for row in found["rounds"]:
        assert (row["size"], row["workers"], row["servers"], row["chief"]) == ("4KB", 1, 1, "worker")
        assert row["gb_per_s"] == approx(2 * row["nbytes"] / row["ms"]["median"] / 1e6)
        assert row["to_tcp"] == approx(row["gb_per_s"] / found["limits"]["tcp_gb_per_s"]["median"])
        assert row["to_memcpy"] == approx(row["gb_per_s"] / found["limits"]["memcpy_gb_per_s"]["median"])
        assert (row["to_sgd"], row["to_token"]) == (1, 1)
        assert min(row["server_cpu_ms"], row["worker_cpu_ms"]) > 0
        assert row["server_rss_mb"] > row["server_growth_mb"]


def check_staleness(found: Any, said: str) -> None:
    """Each consistency has its rows; no bounded worker has read of pushes more than one beyond its bound."""
    rows, names = found["rows"], ["sync", "bounded, k = 2", "async"]
    assert [(row["slow"], row["consistency"]) for row in rows] == [(s, n) for s in ("one", "in turn") for n in names]
    assert all(row["steps/s"] > row["of the last"] > 0 for row in rows)
    assert all(row["gap"] <= 3 for row in rows if row["consistency"] == "bounded, k = 2")


def check_step(found: Any, said: str) -> None:
    """Clusters have the loss of a plain loop after the same steps; what is not installed is named, with a remedy."""
    rows, torch = {row["system"]: row for row in found["steps"]}, "torch RPC, 1 + 1"
    for system in ("ours, 1 + 1", "ours, 2 + 2"):
        assert rows[system]["loss"] == approx(rows["NumPy loop"]["loss"], abs=1e-4)
        assert rows[system]["server_cpu_ms"] > 0
    assert all(row["worker_cpu_ms"] > 0 and row["steps_per_s"] > 0 for row in rows.values())
    assert rows["ours, 2 + 2"]["cpu_ms"] > rows["ours, 2 + 2"]["worker_cpu_ms"]
    assert (torch in rows) != (torch in found["excluded"])
    assert "pip install" in found["excluded"].get(torch, "pip install")


def check_curves(found: Any, said: str) -> None:
    """Modes have rows; one worker is its measure, and ten on one server make less than ten times as much."""
    assert "used most" in said
    for mode in ("sync", "async"):
        rows = {row["workers"]: row for row in found["rows"] if row["mode"] == mode}
        assert sorted(rows) == [1, 10, 30]
        assert (rows[1]["speedup"], rows[30]["servers"]) == (1, 3)
        assert 1 < rows[10]["speedup"] < 10
        assert rows[30]["speedup"] > 2 * rows[10]["speedup"]


ONE_ROUND = "round.py --quick --sizes 4KB --workers 1 --chief worker"
PARTS = ("variables", "servers", "large", "rejoin", "restore")
TIERED = "--order random --laps 1 --steps 6"
OF_HOSTS = "hosts.py --quick --rate 100 --nbytes 8000000"
BENCHES: dict[str, tuple[str, str, Check | None]] = {
    "round": (ONE_ROUND, "rounds", check_round),
    "round of optimizers": (f"{ONE_ROUND} --transport shm --optimizer sgd --optimizer adam --rounds 4", "rounds", None),
    "round with TLS": (f"{ONE_ROUND} --transport tcp --security token --security tls --rounds 4", "rounds", None),
    "checkpoint": ("checkpoint.py --nbytes 4000000 --laps 2 --directory {disk}", "figures", None),
    "growth": (f"growth.py --quick {' '.join(f'--part {part}' for part in PARTS)}", "parts", None),
    "hosts": (OF_HOSTS, "rounds", None),
    "idle": ("idle.py --quick --seconds 2 --processes 2", "rows", None),
    "rows": ("rows.py --quick --rows 1000 --ids 64 --table static --table dynamic", "rows", None),
    "staleness": ("staleness.py --quick --k 2", "rows", check_staleness),
    "step": (f"step.py --quick {OF_PYTHONS}", "steps", check_step),
    "table checkpoints": ("table_checkpoints.py --rows 200000 --laps 2 --directory {disk}", "figures", None),
    "tables": ("tables.py --part sizes --part new --keys 5000 --laps 3", "tables", None),
    "tier": ("tier.py --path {disk} --rows 60000 --share 2 --rounds 3", "tiers", None),
    "tier of a job": (f"tier_job.py --path {{disk}} --rows 100000 --share 1 {TIERED}", "tiers", None),
    "update": ("update.py --quick", "ratios", None),
    "predictions": ("predictions.py --quick --costs {costs} --transport tcp", "rows", None),
    "curves": ("curves.py --quick --costs {costs} --mode sync --mode async", "rows", check_curves),
    "many clients": ("fanin.py --quick --workers 1 --workers 2 --workers 12 --processes 2", "rows", None),
    "other systems": (f"peers/run.py --quick --sizes 4KB {OF_PYTHONS}", "rounds", None),
}
"""By name: the program with its flags, what its figures are called, and what they must be beside numbers in order.

{disk} and {costs} stand for paths.
"""

QUICK = ("curves",)
"""Benchmarks that CI runs; the soak runs all others."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ci if n in QUICK else pytest.mark.soak) for n in BENCHES]
)
def test_a_quick_run_writes_its_figures(tmp_path: Path, stack: ExitStack, name: str) -> None:
    """Those that the document describes, and their ratios; nothing is left in its directory."""
    command, what, check = BENCHES[name]
    file, places = tmp_path / "found.json", {"costs": str(tmp_path / "costs.json"), "disk": ""}
    COSTS.write(tmp_path / "costs.json")
    if name == "hosts":
        linked(stack, Host("here")).__exit__()  # else skipped
    if "{disk}" in command:
        places["disk"] = str(stack.enter_context(disk()))
    done = run(command.format(**places).split(), file)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found[what], "there are none"
    for figure, value in figures(found):
        assert not isinstance(value, dict) or is_ordered(value), figure
    if check:
        check(found, done.stdout + done.stderr)
    assert not places["disk"] or not os.listdir(places["disk"])


@pytest.mark.soak
def test_another_transport_than_the_one_asked_for_is_no_result(tmp_path: Path) -> None:
    """Where a transport does not work, and the next one is used, nothing is reported under its name."""
    code = "import os\n\ndef memfd_create(*_):\n    raise OSError\n\nos.memfd_create = memfd_create\n"
    (tmp_path / "sitecustomize.py").write_text(code, encoding="utf-8")  # every process runs it
    file = tmp_path / "round.json"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = run(f"{ONE_ROUND} --transport shm".split(), file, PYTHONPATH=path)
    assert done.returncode == 1
    assert "worker 0 used tcp" in done.stderr
    assert not file.exists()


MOST_CALLS = {
    1: {"worker": 350, "until sent": 120, "server": 420},
    2: {"worker": 450, "until sent": 160, "server": 540, "server 1": 540},
}
"""For each number of servers Python calls of a repeated step, of which some are made until the push is sent, and of a
server for the round: some more than on a quiet machine, since beside other work messages come in pieces."""


@pytest.mark.ci
@pytest.mark.parametrize("servers", MOST_CALLS)
def test_a_repeated_step_makes_few_calls(servers: int) -> None:
    """Of all threads, with those of the standard library."""
    command = [sys.executable, str(BENCHMARKS / "calls.py"), "--transport", "shm", "--servers", str(servers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    found = json.loads(done.stdout.partition(" ")[2])
    assert {name: found[name] for name, most in MOST_CALLS[servers].items() if not 0 < found[name] <= most} == {}


def test_who_cannot_make_hosts_is_told(tmp_path: Path) -> None:
    """Nothing is measured, and that is no failure: other benchmarks go on."""
    done = run(OF_HOSTS.split(), tmp_path / "none", PATH=str(tmp_path), PYTHONPATH=":".join(sys.path))
    assert done.returncode == 0, done.stderr
    assert "benchmarks/hosts.py is left out: hosts need ip, tc, nsenter, unshare" in done.stderr
