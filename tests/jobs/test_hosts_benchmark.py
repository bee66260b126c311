"""The benchmark of rounds over hosts runs; a link of 100 Mbit limits it, and more of them less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pstesting.hosts import Host
from tests.kit.linked import linked

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
FLAGS = ("--quick", "--rate", "100", "--nbytes", "8000000")


@pytest.mark.soak
def test_a_short_run_writes_its_figures(tmp_path, stack):
    """No round is faster than its links, and four servers are faster than one."""
    linked(stack, Host("here")).__exit__()  # else skipped
    file = tmp_path / "hosts.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "hosts.py"), *FLAGS, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["servers"], row["ways"]) for row in found["limits"]] == [(1, 1), (1, 2), (4, 1), (4, 2)]
    one, four = found["rounds"]
    assert (one["servers"], four["servers"]) == (1, 4)
    assert 0 < one["of_rate"] < 1
    assert four["to_one"] > 1.5


def test_who_cannot_make_hosts_is_told(tmp_path):
    """Nothing is measured, and that is no failure: other benchmarks go on."""
    command = [sys.executable, str(ROOT / "benchmarks" / "hosts.py"), *FLAGS]
    environ = {"PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert "benchmarks/hosts.py is left out: hosts need ip, tc, nsenter, unshare" in done.stderr
