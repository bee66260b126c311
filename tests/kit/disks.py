"""Directories on a disk, for files of dynamic tables: where tests keep theirs may be memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from psserver.tiers.tier import Tier
from pswire.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def disk() -> Iterator[Path]:
    """Gives an empty directory that a tier takes; skips the test where this machine has none."""
    for where in (Path(tempfile.gettempdir()), Path("/var/tmp"), ROOT):
        directory = Path(tempfile.mkdtemp(prefix="tier-", dir=where))
        try:
            Tier(str(directory), 1 << 20).close()
        except ConfigError:
            shutil.rmtree(directory)
            continue
        try:
            yield directory
        finally:
            shutil.rmtree(directory)
        return
    pytest.skip("this machine has no disk for the files of tables")


def on_small_disk(script: str, directory: Path, size: str) -> list[str]:
    """Runs a script, whose argument is a directory on a disk of a size, such as 8m; returns the lines that it prints.

    A file system of memory stands for the disk: the script has a tier take it.
    Skips the test where none can be mounted.
    """
    enter = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    shell = 'mount -t tmpfs -o size="$1" none "$2" && exec "$3" -c "$4" "$2"'
    command = [*enter, "sh", "-c", shell, "sh", size, str(directory), sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
