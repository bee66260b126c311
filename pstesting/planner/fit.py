"""Fits the cost model to timed jobs."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median
from types import MappingProxyType

import numpy as np

from pstesting.planner.jobs import Cell, Timed
from pstesting.planner.measurements import AllTimed, Measured, middle
from pstesting.simulation.clusters import Cluster
from pstesting.simulation.costs import Costs, TransportCosts
from pstesting.simulation.jobs import SimulatedJob

ALONE = 3.0
"""How much more a cell counts whose processes do not share cores, as those of a cluster do not."""

MANY = 4
"""Pushes of a round by which it is told what many processes on few cores cost, beside what each of them does."""

MOST_SWITCH = 1e-3

SIMULATED_ROUNDS, ROUNDS_OF_SUMS = 8, 40

TURNS = 2


def fitted(timed: AllTimed, kernel_byte: float) -> Costs:
    """Returns the costs with which the model tells best what was timed, relative to each cell.

    What a byte costs that is summed is given: the more contributions a round has, the more bytes come as well, so that
    times of rounds do not tell the two apart.
    """
    few = {transport: [pair for pair in found if _pushes(pair[0]) < MANY] for transport, found in timed.items()}
    many = [pair for found in timed.values() for pair in found if _pushes(pair[0]) >= MANY]
    costs = _without_switches(few, kernel_byte)
    for _ in range(TURNS):
        costs = replace(costs, switch=_switch(costs, many))
        alone = {
            transport: [(cell, _less_switches(cell, took, costs)) for cell, took in f] for transport, f in few.items()
        }
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
    one_host, sums = cell.rate == inf, cell.local_reduction
    cluster = Cluster(cell.workers, cell.workload, costs, cell.transport, cell.rate, one_host, local_reduction=sums)
    found = SimulatedJob(cluster, rounds).train()
    seconds = found.seconds / (rounds - 1)
    server = seconds * (found.use["the servers' event loops"] + found.use["the servers' array work"])
    return Timed(found.round_seconds, server, seconds * found.average["the workers' processors"])


def _without_switches(timed: AllTimed, kernel_byte: float) -> Costs:
    """Returns the costs of rounds and steps, for each transport and for the one in the middle."""
    adding = {KERNEL: kernel_byte}
    servers = [_costs(_server_row, found, [took.server for _, took in found], adding) for found in timed.values()]
    workers = [_costs(_worker_row, found, [took.worker for _, took in found]) for found in timed.values()]
    idle = [found[0][1].wall - found[0][1].server - found[0][1].worker for found in timed.values()]
    round, variable, apply, row, table, *_ = np.median(servers, axis=0).tolist()
    step, step_variable, step_row, step_table, *_ = np.median(workers, axis=0).tolist()
    settle = min(max(-median(idle), 0.0), round)  # what a server does once its answers have left
    of_server = dict(enumerate((round, variable, apply, row, table)))
    of_worker = dict(enumerate((step, step_variable, step_row, step_table)))
    transports: dict[str, TransportCosts] = {}
    for (transport, found), rest in zip(timed.items(), idle, strict=True):
        *_, push, nbyte, piece = _costs(_server_row, found, [took.server for _, took in found], of_server | adding)
        *_, send, send_byte, send_piece = _costs(_worker_row, found, [took.worker for _, took in found], of_worker)
        transports[transport] = TransportCosts(
            send / 2, send_byte / 2, push / 2, nbyte / 2, push / 2, nbyte / 2, send / 2, send_byte / 2,
            (piece + send_piece) / 2, max(rest / 2, 0.0),
        )  # fmt: skip
    push = max(transport.receive for transport in transports.values())
    return Costs(
        transports, step, step_variable, round - settle, variable, kernel_byte, apply, row, step_row,
        vote=push, call=4 * push, heartbeat=4 * push, table=table, step_table=step_table, settle=settle,
        cores=os.cpu_count() or 1, machine=f"{platform.node()}, {platform.machine()}",
    )  # fmt: skip


def calibrated(turns: Sequence[Measured]) -> Costs:
    """Returns a machine's costs, by the medians of several turns: its speed changes from one to the next."""
    transports = {
        transport: middle([turn.transports[transport] for turn in turns]) for transport in turns[0].transports
    }
    costs = fitted(transports, median(turn.adding for turn in turns))
    return with_sums(costs, middle([turn.sums for turn in turns]))


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
