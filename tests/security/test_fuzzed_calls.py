"""R19: whoever is no member of a job may say what he likes to its server: the job goes on, and its sums stay exact."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from attacks import Attacker
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_rig import Site
from rig import eventually

MIB = 1 << 20


@dataclass
class Siege:
    """A server with a job on it, and who attacks it.

    Attributes:
        site: what is attacked.
        attacker: who does.
        root: of the server's checkpoints.
        surprises: what the server did not foresee.
    """

    site: Site
    attacker: Attacker
    root: Path
    surprises: list[str]


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    """One server for all attacks; nothing that it does not foresee may happen to it."""
    surprises: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: surprises.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("psserver").addHandler(handler)
    above = tmp_path_factory.mktemp("above")
    with ExitStack() as stack:
        site = Site(stack, "grpc", elements=64, root=above / "root", memory_limit=256 * MIB)
        site.thread._loop.set_exception_handler(lambda loop, context: surprises.append(str(context)))
        yield Siege(site, Attacker(site), above / "root", surprises)
    logging.getLogger("psserver").removeHandler(handler)
    assert surprises == []
    assert [path.name for path in above.iterdir() if path.name != "root"] == []


@given(data=st.data())
def test_whatever_is_called_the_job_goes_on(siege: Siege, data: st.DataObject) -> None:
    """Each call is answered or waits, with no internal error, in whatever order; every round has its exact sums."""
    for _ in range(data.draw(st.integers(1, 4))):
        verb, messages = siege.attacker.attack(data.draw)
        said = siege.attacker.send(verb, messages, leaves=data.draw(st.integers(0, 9)) == 0)
        if said == "Fenced":
            siege.attacker.open()
    siege.site.round()
    assert siege.surprises == []
