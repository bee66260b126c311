"""Fits the cost model to timed jobs."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import inf
from statistics import median
from types import MappingProxyType

import numpy as np

from pstesting.planner.jobs import Cell, Timed, time_cells
from pstesting.simulation.clusters import Cluster
from pstesting.simulation.costs import Costs, LaneCosts
from pstesting.simulation.jobs import SimulatedJob
from pstesting.simulation.workloads import Workload
from pswire.transport.traffic import LaneName

AllTimed = Mapping[LaneName, Sequence[tuple[Cell, Timed]]]

SMALL = 4000.0
"""Bytes of a round whose bytes cost nothing."""


LARGE = 2e6
"""Bytes of one whose bytes cost most."""

SUMMED = 2, 8
"""Workers by whose difference it is told what one more in a sum costs."""

ALONE = 3.0
"""How much more a cell counts whose processes do not share cores, as those of a cluster do not."""

MANY = 4
"""Pushes of a round by which it is told what many processes on few cores cost, beside what each of them does."""

ADDED = 1 << 24
"""Bytes of arrays by which it is told what adding costs: more than caches hold of two of them."""

MOST_SWITCH = 1e-3

SIMULATED_ROUNDS, ROUNDS_OF_SUMS = 8, 40

TURNS, TURNS_OF_ADDING = 2, 21


def cells_of(lane: LaneName) -> list[list[Cell]]:
    """Returns the cells by which the costs of a lane are told apart, by the jobs that time them."""
    small, many, large = Workload(1, SMALL), Workload(1, 64 * SMALL, 64), Workload(1, LARGE)
    stream, rows, few_rows = Workload(1, 32e6, 8), Workload(1, 0.0, 0, 4096, 64), Workload(1, 0.0, 0, 512, 16)
    return [
        [Cell(lane, 1, work) for work in (small, many, large, stream, rows, few_rows)],
        [Cell(lane, 2, work) for work in (small, large, stream)],
        [Cell(lane, 1, Workload(2, 2 * SMALL, 2)), Cell(lane, 1, Workload(2, LARGE, 4))],
        [Cell(lane, 2, Workload(2, 2 * SMALL, 2))],
        [Cell(lane, 8, work) for work in (small, large)],
        [Cell(lane, 4, Workload(2, 2 * SMALL, 2))],
    ]


def fitted(timed: AllTimed, kernel_byte: float) -> Costs:
    """Returns the costs with which the model tells best what was timed, relative to each cell.

    What a byte costs that is summed is given: the more contributions a round has, the more bytes come as well, so that
    times of rounds do not tell the two apart.
    """
    few = {lane: [pair for pair in found if _pushes(pair[0]) < MANY] for lane, found in timed.items()}
    many = [pair for found in timed.values() for pair in found if _pushes(pair[0]) >= MANY]
    costs = _without_switches(few, kernel_byte)
    for _ in range(TURNS):
        costs = replace(costs, switch=_switch(costs, many))
        alone = {lane: [(cell, _less_switches(cell, took, costs)) for cell, took in f] for lane, f in few.items()}
        costs = replace(_without_switches(alone, kernel_byte), switch=costs.switch)
    return costs


def _pushes(cell: Cell) -> int:
    return cell.workers * cell.workload.servers


def _less_switches(cell: Cell, took: Timed, costs: Costs) -> Timed:
    """Returns what a cell would have taken of processors if these took no time to come to another process."""
    if not _is_crowded(cell, costs):
        return took
    with_, without = (seen(cell, each) for each in (costs, replace(costs, switch=0.0)))
    return replace(
        took, server=took.server * without.server / with_.server, worker=took.worker * without.worker / with_.worker
    )


def seen(cell: Cell, costs: Costs, rounds: int = SIMULATED_ROUNDS) -> Timed:
    """Returns what a cell takes in a simulation of so many rounds."""
    one_host, sums = cell.rate == inf, cell.aggregation
    cluster = Cluster(cell.workers, cell.workload, costs, cell.lane, cell.rate, one_host, aggregation=sums)
    found = SimulatedJob(cluster, rounds).train()
    seconds = found.seconds / (rounds - 1)
    server = seconds * (found.use["the servers' event loops"] + found.use["the servers' array work"])
    return Timed(found.round_seconds, server, seconds * found.average["the workers' processors"])


def _without_switches(timed: AllTimed, kernel_byte: float) -> Costs:
    """Returns the costs of rounds and steps, which are those of the lane in the middle, and with them of each lane."""
    adding = {KERNEL: kernel_byte}
    servers = [_costs(_server_row, found, [took.server for _, took in found], adding) for found in timed.values()]
    workers = [_costs(_worker_row, found, [took.worker for _, took in found]) for found in timed.values()]
    idle = [found[0][1].wall - found[0][1].server - found[0][1].worker for found in timed.values()]
    round, variable, apply, row, table, *_ = np.median(servers, axis=0).tolist()
    step, step_variable, step_row, step_table, *_ = np.median(workers, axis=0).tolist()
    settle = min(max(-median(idle), 0.0), round)  # what a server does once its answers have left
    of_server, of_worker = (
        dict(enumerate((round, variable, apply, row, table))),
        dict(enumerate((step, step_variable, step_row, step_table))),
    )
    lanes: dict[str, LaneCosts] = {}
    for (lane, found), rest in zip(timed.items(), idle, strict=True):
        *_, push, nbyte, piece = _costs(_server_row, found, [took.server for _, took in found], of_server | adding)
        *_, send, send_byte, send_piece = _costs(_worker_row, found, [took.worker for _, took in found], of_worker)
        lanes[lane] = LaneCosts(
            send / 2, send_byte / 2, push / 2, nbyte / 2, push / 2, nbyte / 2, send / 2, send_byte / 2,
            (piece + send_piece) / 2, max(rest / 2, 0.0),
        )  # fmt: skip
    push = max(lane.receive for lane in lanes.values())
    return Costs(
        lanes, step, step_variable, round - settle, variable, kernel_byte, apply, row, step_row,
        vote=push, call=4 * push, beat=4 * push, table=table, step_table=step_table, settle=settle,
        cores=os.cpu_count() or 1, machine=f"{platform.node()}, {platform.machine()}",
    )  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What a machine took, once.

    Attributes:
        lanes: the cells of `cells_of`, by lane.
        sums: those of `cells_of_sums`.
        adding: seconds of adding a byte.
    """

    lanes: AllTimed
    sums: Sequence[tuple[Cell, Timed]]
    adding: float


def measure(lanes: Sequence[LaneName]) -> Measured:
    """Times jobs on this machine; raises `PSError` where a process failed."""
    timed = {lane: _timed(cells_of(lane)) for lane in lanes}
    return Measured(timed, _timed(cells_of_sums(lanes[0])), seconds_of_adding())


def calibrated(turns: Sequence[Measured]) -> Costs:
    """Returns a machine's costs, by the medians of several turns: its speed changes from one to the next."""
    lanes = {lane: middle([turn.lanes[lane] for turn in turns]) for lane in turns[0].lanes}
    costs = fitted(lanes, median(turn.adding for turn in turns))
    return with_sums(costs, middle([turn.sums for turn in turns]))


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


def cells_of_sums(lane: LaneName) -> list[list[Cell]]:
    """Returns the cells by which it is told what sums cost, by the jobs that time them."""
    small, large = Workload(1, SMALL), Workload(1, LARGE)
    few, many = SUMMED
    return [
        [Cell(lane, few, small, aggregation=True)],
        [Cell(lane, many, work, aggregation=True) for work in (small, large)],
    ]


def with_sums(costs: Costs, timed: Sequence[tuple[Cell, Timed]]) -> Costs:
    """Returns the costs with those of sums: what the cells of `cells_of_sums` took beyond all that is known of them."""

    def beyond(cell: Cell, took: Timed) -> tuple[float, float]:
        known = seen(cell, costs, ROUNDS_OF_SUMS)
        return took.server - known.server, took.worker - known.worker

    few, small, large = timed
    workers, fewer = small[0].workers, few[0].workers
    handed = 4 * (workers - 1) / workers  # a contribution and its answer, by two each; the first's is not
    costs = replace(costs, part=max(beyond(*small)[0] - beyond(*few)[0], 0.0) / (workers - fewer))
    costs = replace(costs, hand=max(beyond(*small)[1], 0.0) / handed)
    return replace(costs, hand_byte=max(beyond(*large)[1], 0.0) / handed / large[0].workload.on(0).pushed)


def _switch(costs: Costs, timed: Sequence[tuple[Cell, Timed]]) -> float:
    """Returns the time that a core takes to come to another process, with which half of the cells are predicted longer.

    0 where there are as many cores as processes: nothing tells.
    """
    crowded = [(cell, took) for cell, took in timed if _is_crowded(cell, costs)]

    def is_too_long(switch: float) -> bool:
        tried = replace(costs, switch=switch)
        return median(seen(cell, tried).wall / took.wall for cell, took in crowded) > 1

    if not crowded or is_too_long(0.0):
        return 0.0
    least, most = 0.0, MOST_SWITCH
    while most - least > MOST_SWITCH / 256:
        middle = (least + most) / 2
        least, most = (least, middle) if is_too_long(middle) else (middle, most)
    return least


def _is_crowded(cell: Cell, costs: Costs) -> bool:
    """Returns True if a cell has more processes than there are cores."""
    return cell.workers + cell.workload.servers > costs.cores > 0


def _server_row(cell: Cell) -> list[float]:
    """How often a server pays each cost in a round.

    Round, variables, bytes applied, rows, tables, bytes summed, pushes, bytes pushed, pieces.
    """
    share, workers = cell.workload.on(0), cell.workers
    return [
        1.0, share.variables, share.nbytes, workers * share.rows, share.rows > 0, workers * share.nbytes,
        workers, workers * share.pushed, workers * (share.chunks - 1) * 2.0,
    ]  # fmt: skip


KERNEL = 5
"""Where bytes summed stand in it."""


def _worker_row(cell: Cell) -> list[float]:
    """The same of a worker: the step, its variables, rows, tables, pushes to servers, bytes, pieces."""
    workload, servers = cell.workload, cell.workload.servers
    share = workload.on(0)
    return [
        1.0, workload.variables, workload.ids, workload.ids > 0,
        servers, servers * share.pushed, servers * (share.chunks - 1) * 2.0,
    ]  # fmt: skip


def _costs(
    row: Callable[[Cell], list[float]],
    found: Sequence[tuple[Cell, Timed]],
    seen: Sequence[float],
    known: Mapping[int, float] = MappingProxyType({}),
) -> list[float]:
    """Returns the costs, none of them below 0, that come closest to what was seen, relative to it.

    Args:
        row: how often a cell has each cost.
        found: the cells.
        seen: the processor time of each.
        known: costs that are known, by their place in a row.
    """
    weights = np.asarray([ALONE if cell.workers == cell.workload.servers == 1 else 1.0 for cell, _ in found])
    matrix = np.asarray([row(cell) for cell, _ in found]) * (weights / np.asarray(seen))[:, None]
    costs = np.zeros(matrix.shape[1])
    costs[[*known]] = [*known.values()]
    used, rest = [column for column in range(len(costs)) if column not in known], weights - matrix @ costs
    while True:
        solved, *_ = np.linalg.lstsq(matrix[:, used], rest, rcond=None)
        below = [column for column, cost in zip(used, solved, strict=True) if cost < 0]
        if not below:
            break
        used.remove(min(zip(solved, used, strict=True))[1])
    costs[used] = solved
    return [float(cost) for cost in costs]
