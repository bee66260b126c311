"""Commands that other packages bring to `psctl` by entry points."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from pstesting.planner import jobs, measurements
from pstesting.planner.commands import calibrate
from pstesting.planner.jobs import Cell
from pstesting.simulation.costs import Costs
from pstesting.simulation.workloads import Workload
from pswire.transport.traffic import LaneName
from tests.kit.shell import shell

PROBE = """
import sys
from psclient.psctl import main
try:
    main({args!r})
except SystemExit as ended:
    print("pstesting" in sys.modules, ended.code)
"""


@pytest.mark.parametrize(("args", "loads"), [(["status", "--help"], False), (["calibrate", "--help"], True)])
def test_a_package_is_loaded_for_its_own_commands_alone(tmp_path: Path, args: list[str], loads: bool) -> None:
    """`psctl` imports nothing of `pstesting`."""
    done = shell(["python", "-c", PROBE.format(args=args)], tmp_path, fork=False)
    assert done.out.splitlines()[-1] == f"{loads} 0", done.err


def test_what_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    """When it is called, and in the list of commands, which shows all others as well."""
    there = tmp_path / "broken-1.dist-info"
    there.mkdir()
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (there / "entry_points.txt").write_text(
        "[paramserver.psctl]\nmend = nowhere.at_all:mend\nstatus = nowhere:status\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = shell(["psctl", "mend"], tmp_path, PYTHONPATH=path)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert "psctl: error: psctl mend cannot be loaded (No module named 'nowhere')" in line
    assert "uninstall nowhere.at_all" in line
    listed = shell(["psctl", "--help"], tmp_path, PYTHONPATH=path)
    assert listed.code == 0, listed.err
    assert {"mend", "status", "top"} <= {line.split()[0] for line in listed.out.splitlines() if line.strip()}
    assert "Shows every server" in shell(["psctl", "status", "--help"], tmp_path, PYTHONPATH=path).out


def two_cells(lane: LaneName) -> list[list[Cell]]:
    return [[Cell(lane, 1, Workload(1, nbytes)) for nbytes in (measurements.SMALL, measurements.LARGE)]]


@pytest.mark.parametrize("cells", ["two", pytest.param("all", marks=pytest.mark.soak)])
def test_a_host_is_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: str) -> None:
    """The file is a cost model: a push, a round and a byte cost something."""
    if cells == "two":  # a few rounds on one server, and sums of two and of three workers
        for module, name, value in (
            (measurements, "cells_of", two_cells),
            (measurements, "SUMMED", (2, 3)),
            (measurements, "TURNS_OF_ADDING", 3),
            (jobs, "MOST_ROUNDS", 40),
            (jobs, "WARM_ROUNDS", 20),
        ):
            monkeypatch.setattr(module, name, value)
    arguments = ["--lane", "tcp", "--json", "--output", str(tmp_path / "costs.json")]
    done = CliRunner().invoke(calibrate, arguments, standalone_mode=False, catch_exceptions=False)
    said = json.loads(done.stdout)
    costs = Costs.read(tmp_path / "costs.json")
    assert said["costs"]["lanes"].keys() == costs.lanes.keys() == {"tcp"}
    lane = costs.lanes["tcp"]
    assert 0 < lane.receive + lane.answer + costs.round < 0.1
    assert 0 < lane.send + lane.take + costs.step < 0.1
    assert 0 < lane.receive_byte + lane.answer_byte + costs.kernel_byte < 1e-6
    sums = costs.part, costs.hand, 4000 * costs.hand_byte
    assert min(sums) >= 0
    assert sum(sums) < 0.1
    assert costs.cores == os.cpu_count()
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_where_no_file_can_be_it_says_so_at_once(tmp_path: Path) -> None:
    """Before a minute of measurements."""
    done = shell(["psctl", "calibrate", "--output", "none/costs.json"], tmp_path, 20.0)
    words = "psctl: error: --output none/costs.json: there is no directory none"
    assert (done.code, done.err.splitlines()) == (2, [words])
