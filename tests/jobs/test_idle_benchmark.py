"""The benchmark of idle connections runs, and compares like with like."""

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
    """Each lane and gRPC alone have a row; what is beyond gRPC, and a beat's ratio, are those of the rows."""
    file = tmp_path / "idle.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "idle.py"), "--quick", "--seconds", "2", "--json", str(file)]
    done = subprocess.run([*command, "--processes", "2"], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert "a session has ended" not in done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    *lanes, limit = found["rows"]
    assert [row["lane"] for row in found["rows"]] == ["shm", "tcp", "grpc", ""]
    assert set(limit["us_per_beat"]) == {"calls", "streams"}
    for row in lanes:
        assert row["kb_each"] > 0
        assert row["kb_beyond"] == pytest.approx(row["kb_each"] - limit["kb_each"])
        assert row["to_stream"] == pytest.approx(row["us_per_beat"]["beats"] / limit["us_per_beat"]["streams"])
        share, rate = row["core_percent"]["beats"] / 100, row["beats_per_s"]["beats"]
        assert 0 < rate < 2 * found["sessions"] / found["beat_seconds"]
        assert row["us_per_beat"]["beats"] == pytest.approx(1e6 * share / rate)
    assert limit["kb_beyond"] == 0
