"""The benchmark of training steps runs, and all systems train the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "step.py"
PYTHONS = os.environ.get("PEERS_PYTHON", sys.executable).split(os.pathsep)
SECONDS = 300


@pytest.mark.soak
def test_all_systems_train_the_same(tmp_path):
    """Clusters have the loss of a plain loop after the same steps; what is not installed is named, with a remedy."""
    file = tmp_path / "step.json"
    pythons = [word for python in PYTHONS for word in ("--python", python)]
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(file), *pythons]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["system"]: row for row in found["steps"]}
    plain = rows["NumPy loop"]
    for system in ("ours, 1 + 1", "ours, 2 + 2"):
        assert rows[system]["loss"] == pytest.approx(plain["loss"], abs=1e-4)
        assert rows[system]["server_cpu_ms"] > 0
    assert all(row["worker_cpu_ms"] > 0 and row["steps_per_s"] > 0 for row in rows.values())
    assert rows["ours, 2 + 2"]["cpu_ms"] > rows["ours, 2 + 2"]["worker_cpu_ms"]
    torch = "torch RPC, 1 + 1"
    assert (torch in rows) != (torch in found["left_out"])
    assert "pip install" in found["left_out"].get(torch, "pip install")
