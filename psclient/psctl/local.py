"""`psctl --local`: the clusters that the launcher runs on this machine, and which of them a command is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from psclient._src.processes.local_clusters import find_clusters
from psclient.psctl.output import table

FLAG = "--local"


def with_values(args: Sequence[str]) -> list[str]:
    """Returns a command line in which `--local` has a value, which users need not write: `--local=` is any cluster.

    A name is written behind an equals sign alone, so that no command is taken for one.
    """
    end = args.index("--") if "--" in args else len(args)
    return [f"{each}=" if each == FLAG and index < end else each for index, each in enumerate(args)]


def clusters() -> tuple[dict[str, Any], RenderableType]:
    """Returns what `psctl --local` says: as JSON, and for people."""
    found = find_clusters()
    said = {
        "clusters": [
            {"name": one.name, "pid": one.pid, "script": one.script, "servers": list(one.servers)} for one in found
        ]
    }
    rows = [(one.name, one.script, ", ".join(one.servers)) for one in found]
    none = "no cluster of the launcher runs on this machine under this user"
    return said, table(("cluster", "script", "servers"), rows) if rows else none
