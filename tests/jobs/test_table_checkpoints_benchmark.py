"""The benchmark of checkpoints of tables runs, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300


@pytest.mark.soak
def test_a_short_run_writes_its_figures(tmp_path):
    """Of a small table: its changes have few bytes, and all that is measured is there."""
    file = tmp_path / "found.json"
    (tmp_path / "disk").mkdir()
    command = [sys.executable, str(ROOT / "benchmarks" / "table_checkpoints.py"), "--rows", "200000", "--laps", "2"]
    command += ["--directory", str(tmp_path / "disk"), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))["figures"]
    assert found["rows"] == 200_000
    assert found["delta, bytes of the whole"] < 0.03
    assert found["hold, ms"]["min"] < 10
    assert found["lookup in read-2, ms"]["median"] > 0
    assert list((tmp_path / "disk").iterdir()) == []
