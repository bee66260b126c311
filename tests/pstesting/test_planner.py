"""The cost model: fitted to jobs whose costs are known, and timed on real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pstesting.planner import jobs
from pstesting.planner.fit import ROUNDS_OF_SUMS, fitted, seen, with_sums
from pstesting.planner.jobs import Cell, Timed, time_cells
from pstesting.planner.measurements import cells_of, cells_of_sums, middle
from pstesting.simulation.costs import Costs, LaneCosts
from pstesting.simulation.workloads import Workload
from tests.kit.internals import LaneName

US = 1e-6

COSTS = Costs(
    lanes={
        name: LaneCosts(
            send=factor * 60 * US,
            send_byte=factor * 1e-10,
            receive=factor * 80 * US,
            receive_byte=factor * 2e-10,
            answer=factor * 80 * US,
            answer_byte=factor * 2e-10,
            take=factor * 60 * US,
            take_byte=factor * 1e-10,
            piece=factor * 20 * US,
            latency=40 * US,
        )
        for name, factor in (("tcp", 1.0), ("grpc", 3.0))
    },
    step=250 * US,
    step_variable=6 * US,
    round=300 * US,
    round_variable=4 * US,
    kernel_byte=5e-11,
    apply_byte=8e-11,
    row=2e-7,
    step_row=1e-7,
    vote=0.0,
    call=0.0,
    beat=0.0,
    table=150 * US,
    step_table=100 * US,
)


@pytest.mark.parametrize("lanes", [("tcp",), pytest.param(("tcp", "grpc"), marks=pytest.mark.soak)])
def test_known_costs_are_found(lanes: tuple[LaneName, ...]) -> None:
    """From cells that were timed without an error the fit tells what others take, of more workers and servers."""
    timed = {lane: [(cell, seen(cell, COSTS)) for cells in cells_of(lane) for cell in cells] for lane in lanes}
    found = replace(fitted(timed, COSTS.kernel_byte), cores=0)
    for lane in lanes:
        for workers, workload in (
            (1, Workload(1, 1e5, 10)),
            (4, Workload(1, 4000.0)),
            (8, Workload(2, 1e6, 4)),
            (16, Workload(4, 4000.0)),
            (2, Workload(1, 64e6, 16)),
            (4, Workload(1, 16e6, 8)),
            (2, Workload(2, 0.0, 0, 1024, 32)),
        ):
            cell = Cell(lane, workers, workload)
            took = seen(cell, COSTS).wall
            assert seen(cell, found).wall == pytest.approx(took, rel=0.1), cell


def test_known_costs_of_sums_are_found() -> None:
    """From what rounds with sums took beyond those costs that were known before."""
    true = replace(COSTS, part=45 * US, hand=150 * US, hand_byte=2e-10)
    cells = [cell for job in cells_of_sums("tcp") for cell in job]
    found = with_sums(COSTS, [(cell, seen(cell, true, ROUNDS_OF_SUMS)) for cell in cells])
    assert [found.part, found.hand, found.hand_byte] == pytest.approx([true.part, true.hand, true.hand_byte], rel=0.02)


def test_of_several_turns_the_medians_count() -> None:
    """Each figure by itself, whatever the turn."""
    cells = [Cell("tcp", workers, Workload(1)) for workers in (1, 2)]
    took = [[Timed(3.0, 1.0, 5.0), Timed(1.0, 1.0, 1.0)], [Timed(2.0, 2.0, 6.0), Timed(9.0, 2.0, 3.0)]]
    took.append([Timed(1.0, 9.0, 7.0), Timed(2.0, 3.0, 2.0)])
    found = middle([[*zip(cells, turn, strict=True)] for turn in took])
    assert found == [(cells[0], Timed(2.0, 2.0, 6.0)), (cells[1], Timed(2.0, 2.0, 2.0))]


def test_cells_of_one_job_are_alike() -> None:
    """Those of several lanes cannot be timed in one, nor those with sums and those without."""
    with pytest.raises(ValueError, match="one lane"):
        time_cells([Cell("tcp", 1, Workload(1)), Cell("grpc", 1, Workload(1))])
    with pytest.raises(ValueError, match="aggregation"):
        time_cells([Cell("tcp", 2, Workload(1)), Cell("tcp", 2, Workload(1), aggregation=True)])


def test_a_real_job_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes take longer, and more of the processors of both ends."""
    monkeypatch.setattr(jobs, "WARM_ROUNDS", 30)
    monkeypatch.setattr(jobs, "MOST_ROUNDS", 60)
    small, large = time_cells([Cell("tcp", 1, Workload(1, 4000.0)), Cell("tcp", 1, Workload(1, 16e6, 8))])
    for timed in (small, large):
        assert 0 < timed.server < 10
        assert 0 < timed.worker < 10
        assert 0 < timed.wall < 10
    assert large.wall > small.wall
    assert large.server > small.server
