"""The benchmark of rounds runs, and writes the figures that the document describes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """The names of all figures, as `rounds.ms`; least, median and 90th percentile count as one."""
    if isinstance(value, list):
        value = value[0]
    if isinstance(value, dict) and set(value) != {"min", "median", "p90"}:
        for key, inner in value.items():
            yield from paths(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix


def test_a_quick_run_writes_what_is_documented(tmp_path):
    """Every figure has its row in docs/performance.md and the other way round; ratios are those of the medians."""
    file = tmp_path / "round.json"
    args = ["--quick", "--sizes", "4KB", "--workers", "1", "--servers", "1", "--chief", "worker", "--json", str(file)]
    command = [sys.executable, str(ROOT / "benchmarks" / "round.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    documented = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "performance.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(paths(found)) == sorted(documented)
    (row,) = found["rounds"]
    assert (row["size"], row["workers"], row["servers"], row["chief"]) == ("4KB", 1, 1, "worker")
    for spread in (row["ms"], *found["limits"].values()):
        assert 0 < spread["min"] <= spread["median"] <= spread["p90"]
    assert row["gb_per_s"] == pytest.approx(2 * row["nbytes"] / row["ms"]["median"] / 1e6)
    assert row["to_tcp"] == pytest.approx(row["gb_per_s"] / found["limits"]["tcp_gb_per_s"]["median"])
    assert row["to_memcpy"] == pytest.approx(row["gb_per_s"] / found["limits"]["memcpy_gb_per_s"]["median"])
    assert row["server_rss_mb"] > 0
