"""The benchmark of tables runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300


@pytest.mark.soak
def test_a_small_table_is_measured(tmp_path):
    """Each figure of a table of one size is there, with its least time."""
    file = tmp_path / "tables.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--keys", "5000", "--laps", "3"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(file.read_text(encoding="utf-8"))["tables"]
    assert figures.pop("keys") == 5000
    assert figures.pop("index bytes a key") > 16
    assert all(0 < times["min"] <= times["median"] for times in figures.values())
    assert {"find", "gather", "lookup", "round, all new"} <= figures.keys()
