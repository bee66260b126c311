"""The benchmarks of other systems and of many clients run, and say what they could not run.

`PEERS_PYTHON` names the Pythons that have peers' packages, separated as in PATH; without it this one is asked.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SECONDS = 300
PYTHONS = os.environ.get("PEERS_PYTHON", sys.executable).split(os.pathsep)
PACKAGES = {
    "tf-replicas": "tensorflow",
    "tf-graph": "tensorflow",
    "torch-tcp": "torch",
    "torch-shm": "torch",
    "ray": "ray",
    "gloo": "torch",
}


def run(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark to its end."""
    command = [sys.executable, str(BENCHMARKS / program), "--quick", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def has(package: str) -> bool:
    """Whether one of the Pythons can import a package."""
    question = f"import sys; from importlib.util import find_spec; sys.exit(find_spec({package!r}) is None)"
    return any(not subprocess.run([python, "-c", question], check=False).returncode for python in PYTHONS)


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python that has no packages."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch):
    """The module that all peers' programs share."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    monkeypatch.delitem(sys.modules, "rounds", raising=False)
    import rounds

    yield rounds
    del sys.modules["rounds"]


@pytest.mark.soak
@pytest.mark.parametrize("system", ["ours", "grpc-floor", *PACKAGES])
def test_a_system_that_is_there_is_measured(system, tmp_path):
    """A quick run has figures of the system, which checks its variables' values itself, and leaves nothing out."""
    if system in PACKAGES and not has(PACKAGES[system]):
        pytest.skip(f"{PACKAGES[system]} is installed for none of {', '.join(PYTHONS)}; set PEERS_PYTHON")
    file = tmp_path / "peers.json"
    pythons = [word for python in PYTHONS for word in ("--python", python)]
    done = run("peers/run.py", "--sizes", "4KB", "--systems", system, *pythons, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["left_out"] == {}
    beside = [row["beside"] for row in found["rounds"]]
    assert beside == [lane for lane in ("grpc", "tcp", "shm") for _ in "ab"] if system == "ours" else len(beside) == 1
    for row in found["rounds"]:
        assert row["size"] == "4KB"
        assert 0 < row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["p90"]


@pytest.mark.soak
def test_what_is_not_installed_is_skipped_with_a_word(bare_python, tmp_path):
    """Each peer's line says which package is missing where; nothing has failed."""
    file = tmp_path / "peers.json"
    chosen = [word for system in PACKAGES for word in ("--systems", system)]
    done = run("peers/run.py", "--sizes", "4KB", *chosen, "--python", bare_python, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    left_out = json.loads(file.read_text(encoding="utf-8"))["left_out"]
    assert left_out == {
        system: f"skipped, {package} is not installed for {bare_python}" for system, package in PACKAGES.items()
    }
    assert all(why in done.stdout for why in left_out.values())


def test_a_round_that_lost_a_gradient_is_noticed(rounds):
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


def test_a_process_that_fails_ends_its_peer(rounds):
    """A process of a peer that fails ends the others, and the program with an error."""
    with pytest.raises(SystemExit, match="1"):
        rounds.run_together([(signal.pause, ()), (os._exit, (3,))], [(signal.pause, ())])
    assert not multiprocessing.active_children()


@pytest.mark.soak
@pytest.mark.parametrize("lane", ["grpc", "tcp", "shm"])
def test_many_clients_of_one_server(lane, tmp_path):
    """Clients that share a process and those that do not are measured alike; a client costs the server no thread."""
    file = tmp_path / "fanin.json"
    workers = ["--workers", "1", "--workers", "2", "--workers", "12", "--processes", "2"]
    done = run("fanin.py", "--lane", lane, *workers, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["lane"], row["workers"]) for row in found["rows"]] == [(lane, 1), (lane, 2), (lane, 12)]
    assert list(found["server_kb_per_worker"]) == [lane]
    for row in found["rows"]:
        assert 0 < row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["p90"]
        assert row["server_rss_mb"] > row["server_rss_alone_mb"] > 0
        assert row["server_us_per_push"] == pytest.approx(1e3 * row["server_ms"] / row["workers"])
    few, _, many = found["rows"]
    assert many["server_threads"] - few["server_threads"] < 11
