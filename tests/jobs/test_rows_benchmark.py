"""The benchmark of rows runs, and its table sums to what it must."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240


@pytest.mark.soak
def test_a_short_run_writes_its_figures(tmp_path):
    """A row for each lane, kind of table and optimizer, in which all that is timed took some time."""
    file = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "rows.py"), "--quick", "--rows", "1000", "--ids", "64"]
    command += ["--table", "static", "--table", "dynamic"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    ours = {(row["system"], row["optimizer"]) for row in rows if not row["system"].startswith("torch")}
    systems = product(("grpc", "tcp", "shm"), ("static", "dynamic"))
    assert ours == {(f"{lane}, {table}", name) for lane, table in systems for name in ("sgd", "adagrad")}
    for row in rows:
        assert 0 < row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["p90"]
        assert (row["laps"], row["steps"], len(row["lap_medians_ms"])) == (1, 20, 1)
