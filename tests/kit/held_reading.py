"""Servers that read what was handed over to them only once a test lets them.

Python imports the file `sitecustomize.py` that `holds_reading` writes at the start of every process that finds it; in a
server it wraps what reads. Nothing of the package knows of it.
"""

from __future__ import annotations

import os
from pathlib import Path

CODE = """
import os
import sys
import time

if "psserver" in sys.orig_argv:
    from psserver.checkpoints.handover import Handover
    from psserver.plans import backlog

    read = Handover._read

    def held(self, order, *rest):
        parent = os.getppid()  # a test that was killed lets nobody read any more
        while os.getppid() == parent and not os.path.exists(os.path.join("{directory}", "read")):
            time.sleep(0.01)
        return read(self, order, *rest)

    Handover._read = held
    backlog.BACKLOG_BYTES = {most}
"""


def holds_reading(directory: Path, most: int = 1 << 30) -> dict[str, str]:
    """Returns what the environment of servers has to have so that they wait for `let_read`.

    Args:
        directory: where the test tells them.
        most: bytes of contributions that a server keeps meanwhile.
    """
    place = directory / "reading"
    place.mkdir(parents=True)
    (place / "sitecustomize.py").write_text(CODE.format(directory=place, most=most), encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}


def let_read(directory: Path) -> None:
    """Lets servers read, now and from now on."""
    (directory / "reading" / "read").touch()
