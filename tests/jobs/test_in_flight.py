"""Contributions that are larger than what a server holds of them: every plan completes, whatever its order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from tests.kit.internals import LANES, LEAST_IN_FLIGHT, PART_BYTES, Apply, LaneName, Plan, Reduction, Ref, TensorSpec
from tests.kit.lanes import Site, eventually
from tests.kit.rig import SOON, sum_into

IN_FLIGHT = 1 << 22
NUMBER = TensorSpec("float32", ())


def with_a_loss(plan: Plan) -> Plan:
    """A small value is reduced before all gradients, and read after them."""
    applies = tuple(
        Apply(apply.program, apply.servers, (apply.args[0], Ref("reduction", apply.args[1].index + 1)))
        for apply in plan.applies
    )
    loss = Reduction("mean", NUMBER, (0,), "loss")
    return replace(plan, reductions=(loss, *plan.reductions), applies=applies, returned=(Ref("reduction", 0),))


ORDERS: dict[str, Callable[[Plan], Plan]] = {
    "in order": lambda plan: plan,
    "a loss first": with_a_loss,
    "backwards": lambda plan: replace(plan, applies=plan.applies[::-1]),
    "two passes": lambda plan: replace(plan, applies=plan.applies * 2),
    "most is never read": lambda plan: replace(plan, applies=plan.applies[:1]),
}


QUICK = {("in order", "tcp"), ("backwards", "shm"), ("two passes", "grpc"), ("most is never read", "tcp")}
"""Each order on one lane, and that which needs the most on all of them; all others in `make soak`."""


@pytest.mark.parametrize(
    ("order", "lane"),
    [
        pytest.param(order, lane, marks=[] if order == "a loss first" or (order, lane) in QUICK else pytest.mark.soak)
        for order in ORDERS
        for lane in LANES
    ],
)
@pytest.mark.parametrize("elements", [pytest.param(1 << 18, marks=pytest.mark.soak), (1 << 18) - 3])
def test_a_round_larger_than_what_is_in_flight_completes(lane: LaneName, order: str, elements: int) -> None:
    """And so does the next one, on the same connections; sizes need not be multiples of anything."""
    with ExitStack() as stack:
        site = Site(stack, lane, elements=elements, variables=8, between=limit)
        plan = site.job.approve(ORDERS[order](sum_into(*site.variables, returned=False)), site.workers[0])
        assert plan.streams
        values = [np.ones(reduction.tensor.shape, "float32") for reduction in plan.reductions]
        passes = 2 if order == "two passes" else 1
        for number in range(2):
            replies = [worker.push(plan, values) for worker in site.workers]
            for worker, reply in zip(site.workers, replies, strict=True):
                assert reply.result(SOON).round == worker.round == number
                worker.round += 1
        first = site.job.value(site.workers[0], site.variables[0])
        assert first.tolist() == [2.0 * passes * len(site.workers)] * elements


@pytest.mark.parametrize("lane", LANES)
def test_a_part_that_is_read_by_half_does_not_stop_what_comes_next(lane: LaneName) -> None:
    """The least that may be in flight is less than a part, and an update may need what lies in two of them."""
    with ExitStack() as stack:
        site = Site(stack, lane, elements=1 << 14, variables=160, between=least)
        summed = sum_into(*site.variables, returned=False)
        applies = [apply for at in range(1, 159, 2) for apply in (summed.applies[at + 1], summed.applies[at])]
        crosswise = replace(summed, applies=(summed.applies[0], *applies, summed.applies[159]))
        plan = site.job.approve(crosswise, site.workers[0])
        assert plan.streams
        values = [np.ones(reduction.tensor.shape, "float32") for reduction in plan.reductions]
        for reply in [worker.push(plan, values) for worker in site.workers]:
            assert reply.result(SOON).round == 0


def least(lanes: object) -> None:
    """Lets a server hold the least that it can be told."""
    lanes.in_flight = LEAST_IN_FLIGHT  # type: ignore[attr-defined]


def limit(lanes: object) -> None:
    """Lets a server hold little."""
    lanes.in_flight = IN_FLIGHT  # type: ignore[attr-defined]


def rests(value: Callable[[], int]) -> int:
    """What a number is once it has been the same for a while."""
    seen: list[int] = []

    def same() -> bool:
        seen.append(value())
        return len(seen) > 100 and len(set(seen[-100:])) == 1

    eventually(same)
    return seen[-1]


@pytest.mark.parametrize("lane", ["tcp", "shm"])
def test_a_push_that_is_sent_again_is_bounded_too(lane: LaneName) -> None:
    """Its connection breaks when it has sent as much as it may: on the next one it sends no more than that."""
    with ExitStack() as stack:
        site = Site(stack, lane, elements=1 << 18, variables=12, between=limit)
        here, other = site.workers
        second = site.push(other, 2)
        (waiting,) = eventually(lambda: [*site.core.machine.rounds.strands[None].open.values()])
        payload = waiting.parts[other.session].payload
        held = rests(lambda: payload.end - payload.begin)
        assert 0 < held <= IN_FLIGHT + PART_BYTES
        lost = site.lane(other)
        lost._sock.shutdown(2)
        eventually(lambda: site.lane(other) is not lost)
        assert held <= rests(lambda: payload.end - payload.begin) <= 2 * IN_FLIGHT
        site.whole([1, 2], site.push(here, 1), second)
        site.round()
