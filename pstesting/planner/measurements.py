"""What is timed on a machine to learn its costs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import median

import numpy as np

from pstesting.planner.jobs import Cell, Timed, time_cells
from pstesting.simulation.workloads import Workload
from pswire.network.traffic import TransportName

AllTimed = Mapping[TransportName, Sequence[tuple[Cell, Timed]]]

SMALL = 4000.0
"""Bytes of a round whose bytes cost nothing."""

LARGE = 2e6
"""Bytes of one whose bytes cost most."""

SUMMED = 2, 8
"""Workers by whose difference it is told what one more in a sum costs."""

ADDED = 1 << 24
"""Bytes of arrays by which it is told what adding costs: more than caches hold of two of them."""

TURNS_OF_ADDING = 21


@dataclass(frozen=True)
class Measured:
    """What a machine took, once.

    Attributes:
        transports: the cells of `cells_of`, by transport.
        sums: those of `cells_of_sums`.
        adding: seconds of adding a byte.
    """

    transports: AllTimed
    sums: Sequence[tuple[Cell, Timed]]
    adding: float


def cells_of(transport: TransportName) -> list[list[Cell]]:
    """Returns the cells by which the costs of a transport are told apart, by the jobs that time them."""
    small, many, large = Workload(1, SMALL), Workload(1, 64 * SMALL, 64), Workload(1, LARGE)
    stream, rows, few_rows = Workload(1, 32e6, 8), Workload(1, 0.0, 0, 4096, 64), Workload(1, 0.0, 0, 512, 16)
    return [
        [Cell(transport, 1, work) for work in (small, many, large, stream, rows, few_rows)],
        [Cell(transport, 2, work) for work in (small, large, stream)],
        [Cell(transport, 1, Workload(2, 2 * SMALL, 2)), Cell(transport, 1, Workload(2, LARGE, 4))],
        [Cell(transport, 2, Workload(2, 2 * SMALL, 2))],
        [Cell(transport, 8, work) for work in (small, large)],
        [Cell(transport, 4, Workload(2, 2 * SMALL, 2))],
    ]


def cells_of_sums(transport: TransportName) -> list[list[Cell]]:
    """Returns the cells by which it is told what sums cost, by the jobs that time them."""
    small, large = Workload(1, SMALL), Workload(1, LARGE)
    few, many = SUMMED
    return [
        [Cell(transport, few, small, local_reduction=True)],
        [Cell(transport, many, work, local_reduction=True) for work in (small, large)],
    ]


def measure(transports: Sequence[TransportName]) -> Measured:
    """Times jobs on this machine; raises `PSError` where a process failed."""
    timed = {transport: _timed(cells_of(transport)) for transport in transports}
    return Measured(timed, _timed(cells_of_sums(transports[0])), seconds_of_adding())


def middle(turns: Sequence[Sequence[tuple[Cell, Timed]]]) -> list[tuple[Cell, Timed]]:
    """Returns cells that were timed in each of several turns with their medians."""
    cells = [cell for cell, _ in turns[0]]
    found = [[astuple(took) for _, took in turn] for turn in turns]
    return [(cell, Timed(*map(median, zip(*each, strict=True)))) for cell, *each in zip(cells, *found, strict=True)]


def seconds_of_adding() -> float:
    """Times the addition of large arrays; returns what a byte takes."""
    total, *others = (np.ones(ADDED // 4, np.float32) for _ in range(4))
    seconds = []
    for turn in range(TURNS_OF_ADDING):
        begun = time.perf_counter()
        np.add(total, others[turn % len(others)], out=total)
        seconds.append(time.perf_counter() - begun)
    return median(seconds) / ADDED


def _timed(jobs: Sequence[Sequence[Cell]]) -> list[tuple[Cell, Timed]]:
    return [pair for cells in jobs for pair in zip(cells, time_cells(cells), strict=True)]
