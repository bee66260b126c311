"""Each task started by itself, as docs/deployment.md says: on loopback, and as between hosts, with certificates."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from pstesting.forks import Forked
from tests.kit.internals import address_in
from tests.kit.shell import PROGRAMS, shell

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
SECONDS = 120


def commands(section: str) -> list[str]:
    """The commands of one section of the document."""
    text = DOCUMENT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [line[2:] for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def start(line: str, cwd: Path, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Types a line of the document into a shell of its own."""
    words = shlex.split(line)
    given = dict(word.split("=", 1) for word in words if word.startswith(("TF_CONFIG=", "PS_")))
    program, *args = words[len(given) :]
    return Forked(
        [*PROGRAMS[program], *args, *(["--epochs", "1"] if args[-1:] == ["examples/digits.py"] else [])],
        cwd=cwd,
        env=os.environ | environ | given,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# On one host they are the same commands, without certificates.
@pytest.mark.parametrize("hosts", [pytest.param("one", marks=pytest.mark.soak), "many"])
def test_three_shells_are_a_cluster(tmp_path: Path, hosts: str) -> None:
    """The server, the chief and the worker of the document train, and end by themselves; between hosts with TLS."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = commands("By hand")
    server, chief, worker = lines[:3]
    environ: dict[str, str] = {}
    if hosts == "many":
        certs, export, _ = lines[3:]
        made = shell(shlex.split(certs), tmp_path)
        assert made.code == 0, made.err
        environ = dict(word.split("=", 1) for word in shlex.split(export)[1:])
        server += " --host 0.0.0.0"
    # Two suites on one machine would want the same port: the server picks one, and the others are told.
    tasks = [start(f"{server} --port 0", tmp_path, environ)]
    try:
        assert tasks[0].stdout is not None
        heard = tasks[0].stdout.readline()
        port = address_in(heard).rpartition(":")[2]
        tasks += [start(line.replace(":2222", f":{port}"), tmp_path, environ) for line in (chief, worker)]
        said = [task.communicate(timeout=SECONDS) for task in reversed(tasks)]  # the worker knows first what is wrong
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert [task.returncode for task in tasks] == [0, 0, 0], said
    assert "test accuracy" in said[0][0]
    assert "psserver /job:ps/task:0 ended; it held" in said[2][0]
    assert json.loads((tmp_path / "runs" / "digits" / "ckpt-1" / "manifest.json").read_text())
