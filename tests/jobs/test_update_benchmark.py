"""The benchmark of update programs runs, and its ratios are those of its medians."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300


@pytest.mark.soak
def test_a_quick_run_writes_its_figures(tmp_path):
    """Seconds of each kind of work, and ratios in which reads and writes count."""
    file = tmp_path / "update.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "update.py"), "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    median = {name: seconds["median"] for name, seconds in found["seconds"].items()}
    for seconds in found["seconds"].values():
        assert 0 < seconds["min"] <= seconds["median"] <= seconds["p90"]
    copied = 2 / median["memcpy, 1 threads"]
    for name, arrays in (("sgd", 3), ("adam", 7)):
        assert found["ratios"][f"{name}: rate / memcpy's"] == pytest.approx(
            arrays / median[f"{name}, 1 threads"] / copied
        )
    assert found["ratios"]["adam: 5 ms / first trace"] == pytest.approx(5e-3 / median["adam, first trace"])
    assert found["ratios"]["adam: 50 us / call"] == pytest.approx(50e-6 / median["adam, call"])
    assert found["ratios"]["rows: times add.at"] == pytest.approx(median["rows, add.at"] / median["rows, 1 threads"])
    assert ("adam, torch" in median) != ("no row for torch" in done.stdout)
