"""Completion of our commands in a real bash, at a real terminal, as docs/psctl.md sets it up."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def terminal(line: str) -> Iterator[int]:
    """A terminal on which bash has run a line, and waits for keys."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    here, there = pty.openpty()
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PS1": PROMPT, "TERM": "dumb", "HOME": "/"}
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), there)
    shell = subprocess.Popen([bash, "--norc", "--noprofile", "-i"], env=environ, start_new_session=True, **ends)
    os.close(there)
    try:
        read_until(here, PROMPT)
        os.write(here, f"{line}; echo set${{none}}up\n".encode())
        read_until(here, f"setup\r\n{PROMPT}")
        yield here
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


TABS = {
    "psworker": ("psworker --standal\t", "psworker --standalone "),
    "psserver": ("psserver --until\t", "psserver --until-done "),
}


@pytest.mark.ci
@pytest.mark.parametrize("program", TABS)
def test_a_tab_completes_an_option(program: str) -> None:
    """After the line that the document says."""
    keys, expected = TABS[program]
    with terminal(setup()[program]) as screen:
        os.write(screen, keys.encode())
        assert expected in read_until(screen, expected)


def test_a_tab_completes_commands_of_psctl() -> None:
    """Also those of a group; two tabs list all commands that begin so."""
    with terminal(setup()["psctl"]) as screen:
        for keys, expected in {
            "psctl st\t": "psctl status ",
            "psctl checkpoint ver\t": "psctl checkpoint verify ",
        }.items():
            os.write(screen, keys.encode())
            assert expected in read_until(screen, expected)
            os.write(screen, b"\x15echo do${none}ne\n")  # the line is cleared
            read_until(screen, f"done\r\n{PROMPT}")
        os.write(screen, b"psctl re\t\t")
        shown = read_until(screen, f"{PROMPT}psctl re")  # which bash writes again below its list
    _, listed, _ = shown.split("\r\n")
    assert set(listed.split()) == {name for name in command.commands if name.startswith("re")}
