"""The other end of `ProcessCluster`: names for programs that run in its processes."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

import numpy as np

import psclient as ps
from psclient._src.config import task_config

CONFIG = task_config()
TASK = str(CONFIG.task) if CONFIG else ""
ME = CONFIG.task.index if CONFIG else 0
DIRECTORY = Path(sys.argv[0]).parent


def say(what: str, value: Any = None) -> None:
    """Tells the test something; it waits for it with `hear`."""
    print(json.dumps({what: value}, default=_plain), flush=True)  # noqa: T201


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()


def gate(name: str) -> None:
    """Waits until the test opens a gate; a gate once opened lets everyone through."""
    pipe = os.open(DIRECTORY / name, os.O_RDONLY)
    try:
        while not select.select([pipe], [], [], 0.2)[0]:
            pass  # a signal that came just before the call is handled now
        os.read(pipe, 1)
    finally:
        os.close(pipe)


def open_gate(name: str) -> None:
    """Opens a gate for the other processes, as a test does."""
    pipe = os.open(DIRECTORY / name, os.O_WRONLY)
    try:
        os.write(pipe, b"." * 64)
    finally:
        os.close(pipe)


def add(v: ps.Variable, value: Any) -> None:
    """One section that adds the replicas' sum of a value to a variable. In replica context."""

    def merge(strategy: Any, value: Any) -> None:
        total = strategy.extended.reduce_to("sum", value, v)
        strategy.extended.update(v, lambda v, total: v.assign_add(total), (total,))

    context = ps.get_replica_context()
    assert context is not None
    context.merge_call(merge, (value,))


def add_all(pairs: list[tuple[ps.Variable, Any]]) -> None:
    """As `add`, for several variables in one section."""

    def merge(strategy: Any, values: list[Any]) -> None:
        for (v, _), value in zip(pairs, values, strict=True):
            total = strategy.extended.reduce_to("sum", value, v)
            strategy.extended.update(v, lambda v, total: v.assign_add(total), (total,))

    context = ps.get_replica_context()
    assert context is not None
    context.merge_call(merge, ([value for _, value in pairs],))
