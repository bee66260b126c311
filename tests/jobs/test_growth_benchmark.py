"""The benchmark of growth runs, and its ratios are those of its times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
COLUMNS = {
    "variables": ["variables", "create", "first step, SGD", "round, SGD", "first step, Adam", "round, Adam"],
    "servers": ["workers", "servers", "round", "server CPU"],
    "large": ["MB", "create", "copy", "copy / create"],
    "rejoin": ["variables", "create", "read", "step", "in all"],
    "restore": ["MB", "restore", "load_file", "load_file / restore"],
}


@pytest.mark.soak
def test_a_short_run_writes_its_figures(tmp_path):
    """Each part has its rows, in which all that is timed took some time."""
    file = tmp_path / "growth.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "growth.py"), "--quick", "--json", str(file)]
    command += [word for part in COLUMNS for word in ("--part", part)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    parts = json.loads(file.read_text(encoding="utf-8"))["parts"]
    assert {part: list(rows[0]) for part, rows in parts.items()} == COLUMNS
    assert all(value > 0 for rows in parts.values() for row in rows for value in row.values())
    for part, ratio in (("large", "copy / create"), ("restore", "load_file / restore")):
        one, other = ratio.split(" / ")
        assert [row[ratio] for row in parts[part]] == [pytest.approx(row[one] / row[other]) for row in parts[part]]
    assert [row["variables"] for row in parts["variables"]] == [1, 10, 100]
