"""Fits the cost model to timed jobs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pstesting.planner.jobs import Cell, Timed
from pstesting.simulation.costs import Costs, LaneCosts
from pstesting.simulation.workloads import Workload
from pswire.transport.traffic import LaneName

Floats = npt.NDArray[np.float64]

SMALL = 4000.0
"""Bytes of a round whose bytes cost nothing."""


def cells_of(lane: LaneName) -> list[list[Cell]]:
    """Returns the cells by which the costs of a lane are told apart, by the jobs that time them."""
    small, many, large = Workload(1, SMALL), Workload(1, 64 * SMALL, 64), Workload(1, 2e6)
    stream, rows = Workload(1, 32e6, 8), Workload(1, 0.0, 0, 4096, 64)
    return [
        [Cell(lane, 1, work) for work in (small, many, large, stream, rows)],
        [Cell(lane, 2, work) for work in (small, large)],
        [Cell(lane, 1, Workload(2, SMALL))],
    ]


def fitted(timed: Mapping[LaneName, Sequence[tuple[Cell, Timed]]]) -> Costs:
    """Returns the costs with which the model tells best what was timed, relative to each cell."""
    lanes: dict[str, LaneCosts] = {}
    rounds: list[tuple[float, ...]] = []
    for lane, found in timed.items():
        server = _least_squares([_server_row(cell) for cell, _ in found], [each.server for _, each in found])
        worker = _least_squares([_worker_row(cell) for cell, _ in found], [each.worker for _, each in found])
        round, variable, push, nbyte, kernel, piece, row = server
        step, step_variable, send, send_byte, send_piece, step_row = worker
        rounds.append((round, variable, kernel, step, step_variable, row, step_row))
        small = found[0][1]
        idle = small.wall - small.server - small.worker
        lanes[lane] = LaneCosts(
            send / 2, send_byte / 2, push / 2, nbyte / 2, push / 2, nbyte / 2, send / 2, send_byte / 2,
            (piece + send_piece) / 2, max(idle / 2, 0.0),
        )  # fmt: skip
    round, round_variable, kernel, step, step_variable, row, step_row = np.median(rounds, axis=0).tolist()
    push = max(lane.receive for lane in lanes.values())
    return Costs(
        lanes, step, step_variable, round, round_variable, kernel, row=row,
        step_row=step_row, vote=push, call=4 * push, beat=4 * push,
        cores=os.cpu_count() or 1, machine=f"{platform.node()}, {platform.machine()}",
    )  # fmt: skip


def _server_row(cell: Cell) -> list[float]:
    """How often a server pays each cost in a round: round, variables, pushes, bytes, kernels, pieces, rows."""
    share = cell.workload.on(0)
    return [
        1.0, share.variables, cell.workers, cell.workers * share.pushed, (cell.workers + 1) * share.nbytes,
        cell.workers * (share.chunks - 1) * 2.0,
        cell.workers * share.rows,
    ]  # fmt: skip


def _worker_row(cell: Cell) -> list[float]:
    """The same of a worker: the step, its variables, pushes to servers, bytes, pieces, rows."""
    share, servers = cell.workload.on(0), cell.workload.servers
    pieces = servers * (share.chunks - 1) * 2.0
    return [1.0, cell.workload.variables, servers, servers * share.pushed, pieces, cell.workload.ids]


def _least_squares(rows: Sequence[Sequence[float]], seen: Sequence[float]) -> list[float]:
    """Returns the costs, none of them below 0, that come closest to what was seen, relative to it."""
    weights = 1.0 / np.asarray(seen)
    matrix = np.asarray(rows) * weights[:, None]
    used = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, used], np.ones(len(seen)), rcond=None)
        below = [column for column, cost in zip(used, found, strict=True) if cost < 0]
        if not below:
            break
        worst = min(zip(found, used, strict=True))[1]
        used.remove(worst)
    costs = np.zeros(matrix.shape[1])
    costs[used] = found
    return [float(cost) for cost in costs]
