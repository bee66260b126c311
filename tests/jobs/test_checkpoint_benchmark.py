"""The benchmark of checkpoints runs, and its figures are those of its medians."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
NBYTES = 4_000_000


@pytest.mark.soak
def test_a_short_run_writes_its_figures(tmp_path):
    """Seconds of each kind of work, and rates beside those of plain files; nothing is left in the directory."""
    file = tmp_path / "checkpoint.json"
    (tmp_path / "disk").mkdir()
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint.py"), "--nbytes", str(NBYTES), "--laps", "2"]
    command += ["--directory", str(tmp_path / "disk"), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    median = {name: seconds["median"] for name, seconds in found["seconds"].items()}
    assert found["nbytes"] == NBYTES
    assert found["figures"]["training stops, s"] == median["stop"]
    assert found["figures"]["save, MB/s"] == pytest.approx(NBYTES / median["save"] / 1e6)
    assert found["figures"]["save / save_file"] == pytest.approx(median["save_file"] / median["save"])
    assert found["figures"]["restore / load_file"] == pytest.approx(median["load_file"] / median["restore"])
    assert ("missed" in done.stdout) == (
        max(median["stop"], median["call"]) > 0.25
        or min(found["figures"]["save / save_file"], found["figures"]["restore / load_file"]) < 0.6
    )
    assert list((tmp_path / "disk").iterdir()) == []
