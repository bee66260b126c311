"""Completion of our commands in a real bash, at a real terminal, as docs/psctl.md sets it up."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from psclient.psctl import command

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 120.0
PROMPT = "ready> "


def setup() -> dict[str, str]:
    """The line of the document for each program."""
    text = (ROOT / "docs" / "psctl.md").read_text(encoding="utf-8").split("\n## Shell completion\n")[1]
    (block,) = re.findall(r"```bash\n(.*?)```", text.split("\n## ")[0], re.DOTALL)
    return {line.split("=bash_source ")[1].rstrip(')"'): line for line in block.splitlines()}


def typed(before: str, keys: str, expected: str) -> str:
    """What a terminal shows until `expected` comes, where bash has run a line and then gets keys."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    here, there = pty.openpty()
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PS1": PROMPT, "TERM": "dumb", "HOME": "/"}
    shell = subprocess.Popen(
        [bash, "--norc", "--noprofile", "-i"],
        stdin=there,
        stdout=there,
        stderr=there,
        env=environ,
        start_new_session=True,
    )
    os.close(there)
    try:
        read_until(here, PROMPT)
        os.write(here, f"{before}; echo set${{none}}up\n".encode())
        read_until(here, f"setup\r\n{PROMPT}")
        os.write(here, keys.encode())
        return read_until(here, expected)
    finally:
        shell.kill()
        shell.wait()
        os.close(here)


def read_until(terminal: int, expected: str) -> str:
    """Reads a terminal until it has shown something; returns all that it has."""
    shown = ""
    while expected not in shown:
        ready, _, _ = select.select([terminal], [], [], SECONDS)
        assert ready, f"{expected!r} does not come: {shown!r}"
        shown += os.read(terminal, 4096).decode()
    return shown


@pytest.mark.parametrize(
    ("program", "keys", "expected"),
    [
        ("psctl", "psctl st\t", "psctl status "),
        ("psctl", "psctl checkpoint ver\t", "psctl checkpoint verify "),
        ("psworker", "psworker --standal\t", "psworker --standalone "),
        ("psserver", "psserver --until\t", "psserver --until-done "),
    ],
)
def test_a_tab_completes(program: str, keys: str, expected: str) -> None:
    """Commands and options, of each program, after the line that the document says."""
    assert expected in typed(setup()[program], keys, expected)


def test_two_tabs_show_what_there_is() -> None:
    """All commands that begin so."""
    shown = typed(setup()["psctl"], "psctl re\t\t", f"{PROMPT}psctl re")  # which bash writes again below its list
    _, listed, _ = shown.split("\r\n")
    assert set(listed.split()) == {name for name in command.commands if name.startswith("re")}
