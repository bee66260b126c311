"""The benchmark of staleness runs, and its bound holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240


@pytest.mark.soak
def test_a_short_run_writes_its_figures(tmp_path):
    """Each consistency has its rows; no bounded worker has read of pushes more than one beyond its bound."""
    file = tmp_path / "staleness.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "staleness.py"), "--quick", "--k", "2", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    names = ["sync", "bounded, k = 2", "async"]
    assert [(row["slow"], row["consistency"]) for row in rows] == [(s, n) for s in ("one", "in turn") for n in names]
    assert all(row["steps/s"] > row["of the last"] > 0 for row in rows)
    assert all(row["gap"] <= 3 for row in rows if row["consistency"] == "bounded, k = 2")
