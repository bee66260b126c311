"""The benchmarks of the planner run: predictions beside real jobs, and simulated curves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pstesting.test_planner import COSTS

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300


def run(name, directory, *flags):
    """Runs a benchmark quickly, with costs that are known; returns its figures and what it printed."""
    costs, file = directory / "costs.json", directory / "found.json"
    COSTS.write(costs)
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--quick", "--costs", str(costs), "--json", str(file)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text(encoding="utf-8")), done.stdout


def test_simulated_curves(tmp_path):
    """Modes have rows; one worker is its measure, and ten on one server make less than ten times as much."""
    found, said = run("curves.py", tmp_path, "--mode", "sync", "--mode", "async")
    assert "used most" in said
    for mode in ("sync", "async"):
        rows = {row["workers"]: row for row in found["rows"] if row["mode"] == mode}
        assert sorted(rows) == [1, 10, 30]
        assert rows[1]["speedup"] == 1
        assert 1 < rows[10]["speedup"] < 10
        assert rows[30]["servers"] == 3
        assert rows[30]["speedup"] > 2 * rows[10]["speedup"]


@pytest.mark.soak
def test_predictions_beside_real_jobs(tmp_path):
    """Each row has both; errors are those of the rows, and the last line counts them."""
    found, said = run("predictions.py", tmp_path, "--lane", "tcp")
    rows = found["rows"]
    assert {(row["workers"], row["servers"]) for row in rows} == {(1, 1), (4, 1)}
    for row in rows:
        assert row["measured"] > 0
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    near = sum(abs(row["error"]) <= 0.2 for row in rows)
    assert f"{near} of {len(rows)} within 20%" in said
