"""Processor time of processes, and when they rest."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from pstesting import processor_time
from pstesting.processor_time import await_rest

LOOPS = "while True: pass"
SLEEPS = "import time; time.sleep(60)"


def test_who_sleeps_rests() -> None:
    """Once it has begun."""
    with subprocess.Popen([sys.executable, "-c", SLEEPS]) as process:
        try:
            (used,) = await_rest([process.pid])
            assert 0 < used < processor_time.MOST_SECONDS
        finally:
            process.kill()


def test_who_always_works_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server at which 64 idle workers beat never rests."""
    monkeypatch.setattr(processor_time, "MOST_SECONDS", 1.0)
    with subprocess.Popen([sys.executable, "-c", LOOPS]) as process:
        try:
            begun = time.monotonic()
            await_rest([process.pid])
            assert time.monotonic() - begun > 1.0
        finally:
            process.kill()
