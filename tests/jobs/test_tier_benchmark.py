"""The benchmark of tables in files runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.disks import disk

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300


@pytest.mark.soak
def test_a_small_table_is_measured(tmp_path):
    """Each line has both tables, which are compared in the benchmark, and what was read from the disk."""
    file = tmp_path / "tier.json"
    with disk() as directory:
        command = [sys.executable, str(ROOT / "benchmarks" / "tier.py"), "--path", str(directory), "--rows", "60000"]
        command += ["--share", "2", "--rounds", "3", "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))["tiers"]
    assert [(line["order"], line["early"]) for line in found] == [
        ("frequency", False),
        ("frequency", False),
        ("frequency", True),
        ("random", False),
    ]
    assert all(min(line["memory"], line["tier"]) > 0 and line["bound, MiB"] == 7 for line in found)
    assert found[-1]["read"] > 0


@pytest.mark.soak
def test_jobs_are_measured(tmp_path):
    """Each with its table in memory, in a file, and in one without hints; the benchmark compares their tables."""
    file = tmp_path / "jobs.json"
    with disk() as directory:
        command = [sys.executable, str(ROOT / "benchmarks" / "tier_job.py"), "--path", str(directory)]
        command += ["--rows", "100000", "--share", "1", "--order", "random", "--laps", "1", "--steps", "6"]
        done = subprocess.run(
            [*command, "--json", str(file)], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(file.read_text(encoding="utf-8"))["tiers"]
    assert all(found[f"{system}, ms"] > 0 for system in ("memory", "tier", "unhinted"))
    assert found["unhinted, hinted"] == 0
