"""Commands that other packages bring to `psctl`; and their completion in a real bash."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from psclient.psctl.cli import COMMANDS
from pstesting.planner import jobs, measurements
from pstesting.planner.commands import calibrate
from pstesting.planner.jobs import Cell
from pstesting.simulation.costs import Costs
from pstesting.simulation.workloads import Workload
from pswire.network.traffic import TransportName
from tests.kit.shell import shell, shown, terminal

PROBE = """
import sys
from psclient.psctl import main
try:
    main({args!r})
except SystemExit as ended:
    print("pstesting" in sys.modules, ended.code)
"""


@pytest.mark.parametrize(("args", "loads"), [(["status", "--help"], False), (["calibrate", "--help"], True)])
def test_a_package_is_loaded_for_its_own_commands_alone(tmp_path, args, loads):
    done = shell(["python", "-c", PROBE.format(args=args)], tmp_path, fork=False)
    assert done.out.splitlines()[-1] == f"{loads} 0", done.err


def test_what_cannot_be_loaded_says_so(tmp_path):
    """When it is called, and in the list of commands, which shows all others as well."""
    there = tmp_path / "broken-1.dist-info"
    there.mkdir()
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (there / "entry_points.txt").write_text(
        "[paramserver.psctl]\nmend = unheard_of.at_all:mend\nstatus = unheard_of:status\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = shell(["psctl", "mend"], tmp_path, PYTHONPATH=path)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert "psctl: error: psctl mend cannot be loaded (No module named 'unheard_of')" in line
    assert "uninstall unheard_of.at_all" in line
    listed = shell(["psctl", "--help"], tmp_path, PYTHONPATH=path)
    assert listed.code == 0, listed.err
    assert {"mend", "status", "top"} <= {line.split()[0] for line in listed.out.splitlines() if line.strip()}
    assert "Show every server" in shell(["psctl", "status", "--help"], tmp_path, PYTHONPATH=path).out


def two_cells(transport: TransportName) -> list[list[Cell]]:
    return [[Cell(transport, 1, Workload(1, nbytes)) for nbytes in (measurements.SMALL, measurements.LARGE)]]


@pytest.mark.ci  # it measures this machine
@pytest.mark.parametrize("cells", ["two", pytest.param("all", marks=pytest.mark.soak)])
def test_a_host_is_calibrated(tmp_path, monkeypatch, cells):
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
    arguments = ["--transport", "tcp", "--json", "--output", str(tmp_path / "costs.json")]
    done = CliRunner().invoke(calibrate, arguments, standalone_mode=False, catch_exceptions=False)
    said = json.loads(done.stdout)
    costs = Costs.read(tmp_path / "costs.json")
    assert said["costs"]["transports"].keys() == costs.transports.keys() == {"tcp"}
    transport = costs.transports["tcp"]
    assert 0 < transport.receive + transport.answer + costs.round < 0.1
    assert 0 < transport.send + transport.take + costs.step < 0.1
    assert 0 < transport.receive_byte + transport.answer_byte + costs.kernel_byte < 1e-6
    sums = costs.part, costs.hand, 4000 * costs.hand_byte
    assert min(sums) >= 0
    assert sum(sums) < 0.1
    assert costs.cores == os.cpu_count()
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_where_no_file_can_be_it_says_so_at_once(tmp_path):
    done = shell(["psctl", "calibrate", "--output", "none/costs.json"], tmp_path, 20.0)
    words = "psctl: error: --output none/costs.json: there is no directory none"
    assert (done.code, done.err.splitlines()) == (2, [words])


ROOT = Path(__file__).resolve().parents[3]
PROMPT = "ready> "


def setup() -> dict[str, str]:
    """The line of the document for each program."""
    text = (ROOT / "docs" / "psctl.md").read_text(encoding="utf-8").split("\n## Shell completion\n")[1]
    (block,) = re.findall(r"```bash\n(.*?)```", text.split("\n## ")[0], re.DOTALL)
    return {line.split("=bash_source ")[1].rstrip(')"'): line for line in block.splitlines()}


@contextmanager
def bash(program: str) -> Iterator[int]:
    """A terminal in whose bash a program's line of the document has run, and which waits for keys."""
    path = shutil.which("bash")
    if path is None:
        pytest.skip("there is no bash")
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PS1": PROMPT, "TERM": "dumb", "HOME": "/"}
    with terminal(partial(subprocess.Popen, [path, "--norc", "--noprofile", "-i"], env=environ)) as (_, screen):
        shown(screen, PROMPT)
        os.write(screen, f"{setup()[program]}; echo set${{none}}up\n".encode())
        shown(screen, f"setup\r\n{PROMPT}")
        yield screen


@pytest.mark.ci
@pytest.mark.parametrize(("program", "option"), [("psworker", "--standalone"), ("psserver", "--until-done")])
def test_a_tab_completes_an_option(program, option):
    with bash(program) as screen:
        os.write(screen, f"{program} {option[:-2]}\t".encode())
        shown(screen, f"{program} {option} ")


def test_a_tab_completes_commands_of_psctl():
    """Also those of a group; two tabs list all commands that begin so."""
    with bash("psctl") as screen:
        os.write(screen, b"psctl checkpoint ver\t")
        shown(screen, "psctl checkpoint verify ")
        os.write(screen, b"\x15echo do${none}ne\n")  # the line is cleared
        shown(screen, f"done\r\n{PROMPT}")
        os.write(screen, b"psctl re\t\t")
        said = shown(screen, f"{PROMPT}psctl re")  # which bash writes again below its list
    _, listed, _ = said.split("\r\n")
    assert set(listed.split()) == {name for name in COMMANDS if name.startswith("re")}
