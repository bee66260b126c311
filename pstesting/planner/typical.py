"""Costs for `psctl plan` where nothing was measured: those of one host, in typical.json.

They are what `psctl calibrate --turns 2` found on 2026-11-29 on a virtual machine with two cores, at rest, to three
digits. Its network of 10 Gbit/s and 50 us was not measured.
"""

from __future__ import annotations

from pathlib import Path

from pstesting.simulation.costs import Costs

TYPICAL = Costs.read(Path(__file__).with_suffix(".json"))
