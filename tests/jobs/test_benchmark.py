"""The benchmark of rounds runs, and writes the figures that the document describes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmarks" / "round.py"
SECONDS = 120


NO_SHARED_MEMORY = """
import os

def memfd_create(*_):
    raise OSError("there is none")

os.memfd_create = memfd_create
"""
"""Every process runs it that finds it as `sitecustomize`."""


def run(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs it to its end: a few rounds of the smallest model, one worker and one server."""
    small = ["--quick", "--sizes", "4KB", "--workers", "1", "--chief", "worker"]
    command = [sys.executable, str(BENCHMARK), *small, *args]
    told = {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=told)


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """The names of all figures, as `rounds.ms`; least, median and 90th percentile count as one."""
    if isinstance(value, list):
        value = value[0]
    if isinstance(value, dict) and set(value) != {"min", "median", "p90"}:
        for key, inner in value.items():
            yield from paths(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix


@pytest.mark.soak
def test_a_quick_run_writes_what_is_documented(tmp_path):
    """Every figure has its row in docs/performance.md and the other way round; ratios are those of the medians."""
    file = tmp_path / "round.json"
    done = run("--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    documented = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "performance.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(paths(found)) == sorted(documented)
    assert [row["lane"] for row in found["rounds"]] == ["grpc", "tcp", "shm"]
    for spread in found["limits"].values():
        assert 0 < spread["min"] <= spread["median"] <= spread["p90"]
    for row in found["rounds"]:
        assert (row["size"], row["workers"], row["servers"], row["chief"]) == ("4KB", 1, 1, "worker")
        assert 0 < row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["p90"]
        assert row["gb_per_s"] == pytest.approx(2 * row["nbytes"] / row["ms"]["median"] / 1e6)
        assert row["to_tcp"] == pytest.approx(row["gb_per_s"] / found["limits"]["tcp_gb_per_s"]["median"])
        assert row["to_memcpy"] == pytest.approx(row["gb_per_s"] / found["limits"]["memcpy_gb_per_s"]["median"])
        assert (row["to_sgd"], row["to_token"]) == (1, 1)
        assert row["server_cpu_ms"] > 0
        assert row["worker_cpu_ms"] > 0
        assert row["server_rss_mb"] > row["server_growth_mb"]


@pytest.mark.soak
def test_optimizers_are_compared_with_descent(tmp_path):
    """Adam's rounds are measured beside those of SGD in the same cluster otherwise, as many as were asked for."""
    file = tmp_path / "round.json"
    chosen = ["--lane", "shm", "--optimizer", "sgd", "--optimizer", "adam", "--allocator", "plain", "--rounds", "4"]
    done = run(*chosen, "--json", str(file))
    assert done.returncode == 0, done.stderr
    sgd, adam = json.loads(file.read_text(encoding="utf-8"))["rounds"]
    assert (sgd["optimizer"], adam["optimizer"]) == ("sgd", "adam")
    assert (sgd["allocator"], sgd["rounds"], adam["rounds"]) == ("plain", 4, 4)
    assert adam["to_sgd"] == pytest.approx(adam["ms"]["median"] / sgd["ms"]["median"])


@pytest.mark.soak
def test_tls_is_compared_with_a_token(tmp_path):
    """Clusters with certificates are measured beside those without, on a lane that TLS seals."""
    file = tmp_path / "round.json"
    done = run("--lane", "tcp", "--security", "tls", "--security", "token", "--rounds", "4", "--json", str(file))
    assert done.returncode == 0, done.stderr
    tls, token = json.loads(file.read_text(encoding="utf-8"))["rounds"]
    assert (tls["security"], token["security"], token["to_token"]) == ("tls", "token", 1)
    assert tls["to_token"] == pytest.approx(tls["ms"]["median"] / token["ms"]["median"])


@pytest.mark.soak
def test_another_lane_than_the_one_asked_for_is_no_result(tmp_path):
    """Where a lane does not work, and the next one is used, nothing is reported under its name."""
    (tmp_path / "sitecustomize.py").write_text(NO_SHARED_MEMORY, encoding="utf-8")
    file = tmp_path / "round.json"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = run("--lane", "shm", "--json", str(file), PYTHONPATH=path)
    assert done.returncode == 1
    assert "worker 0 used tcp" in done.stderr
    assert not file.exists()
