"""The benchmark of PyTorch runs, and says what its document says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "frameworks.py"
SECONDS = 300


def measured(tmp_path, *works):
    """The report of a quick run, and its rows by work and way."""
    file = tmp_path / "frameworks.json"
    options = [word for work in works for word in ("--work", work)]
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["left_out"] == []
    assert (found["format"], found["lane"]) == (1, "shm")
    return found, {(row["work"], row["way"]): row for row in found["rows"]}


@pytest.mark.soak
def test_a_trace_shows_that_the_first_gradient_leaves_early(tmp_path):
    """Before backward ends, in the median of the steps of 100 MB."""
    _, rows = measured(tmp_path, "trace")
    ways = ["first gradient leaves", "backward ends", "step ends"]
    first, backward, step = (rows["trace", way]["ms"]["median"] for way in ways)
    assert 0 < first < backward / 2
    assert backward < step


@pytest.mark.soak
def test_all_ways_train(tmp_path):
    """The network learns with us and with torch RPC, and each way has its figures."""
    found, rows = measured(tmp_path, "step", "large", "cnn")
    assert {work for work, _ in rows} == {"step", "large", "cnn"}
    assert [way for work, way in rows if work == "cnn"] == ["cnn, psclient.torch", "cnn, torch RPC"]
    assert all(row["laps"] == len(row["lap_medians_ms"]) == 1 for row in rows.values())
    assert found["machine"]["cores"] > 0
