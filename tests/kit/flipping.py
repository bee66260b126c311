"""A server whose memory fails: in the processes of servers a bit of a variable turns over.

Python imports the file `sitecustomize.py` that `flips` writes at the start of every process that finds it; in a server
it wraps the store. Nothing of the package knows of it.
"""

from __future__ import annotations

import os
from pathlib import Path

BIT = 1 << 20
"""The bit of a float32: not the last, which the next addition may round away."""

CODE = """
import os
import sys

args = sys.orig_argv
if "psserver" in args and args[args.index("--task") + 1] == "{server}":
    from psserver.state.variables import Store

    commit = Store.commit

    def failing(self, values, *rest):
        commit(self, values, *rest)
        for id in values:
            name = self.variables[id].spec.name
            mark = os.path.join("{directory}", name.replace("/", "-"))
            if os.path.exists(mark):
                value = self._values[id] = self._values[id].copy()
                if {always}:
                    value.reshape(-1)[0] *= 1.001
                else:
                    value.reshape(-1).view("uint32")[0] ^= {bit}
                    os.unlink(mark)

    Store.commit = failing
"""


def flips(directory: Path, server: int, always: bool = False) -> dict[str, str]:
    """Returns what the environment of servers has to have so that a variable of one of them can fail.

    Args:
        directory: where `fail` marks variables.
        server: the number of the server.
        always: True if each value that a round assigns is a thousandth too large; False if the next one has another
            bit, and all others are right.
    """
    place = directory / "failing"
    place.mkdir()
    code = CODE.format(server=server, directory=place, bit=BIT, always=always)
    (place / "sitecustomize.py").write_text(code, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}


def fail(directory: Path, name: str) -> None:
    """Has a variable fail with the next round that assigns it."""
    (directory / "failing" / name.replace("/", "-")).touch()
