"""Scripts and waits of the tests of clusters whose tasks run on other hosts, however these are reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

ME = "import json, os, pathlib, signal, sys, time\nme = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
"""The begin of a script, by which it knows which worker it is."""

WAITING = "pathlib.Path(f'pid-{me}').write_text(str(os.getpid()))\ntime.sleep(600)\n"
"""The rest of one that waits, and says which process it is."""

ENDS = [
    ("sys.exit(7 * me)", 7, "(exit code 7)"),
    ("os.kill(os.getpid(), signal.SIGKILL) if me else time.sleep(600)", 137, "(killed by SIGKILL)"),
    ("raise KeyError('mine') if me else time.sleep(600)", 1, "KeyError: 'mine'"),
]
"""Of scripts in which worker 1 fails the rest, the launcher's exit code, and what its report says."""


def eventually(found: Callable[[], object], seconds: float, why: Callable[[], str] = lambda: "") -> None:
    """Waits until something is true; fails, with a reason, where it does not become so."""
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until, why()
        time.sleep(0.05)


def pids(directory: Path, seconds: float) -> list[int]:
    """The process ids of two workers of a script that waits, once they do."""
    paths = [directory / f"pid-{me}" for me in range(2)]
    eventually(lambda: all(path.exists() and path.read_text() for path in paths), seconds)
    return [int(path.read_text()) for path in paths]
