"""Simulated jobs: what they decide is what the real code decides, and what they take is what the model says."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pstesting.simulation.clusters import Cluster
from pstesting.simulation.costs import OF_FRAMES, Costs
from pstesting.simulation.jobs import SimulatedJob
from pstesting.simulation.machines import Host, Strand, travel
from pstesting.simulation.scheduler import Scheduler, UnlockedFuture
from pstesting.simulation.workloads import Workload
from pswire.api import LeaveRequest, StatusRequest
from tests.kit import simulated
from tests.kit.fixtures import Calls
from tests.kit.internals import ConfigError, Consistency, Core, Task
from tests.kit.simulated import FREE, US

BYTES = {"send_byte": 1e-10, "receive_byte": 2e-10, "answer_byte": 2e-10, "take_byte": 1e-10}
TRANSPORT = replace(simulated.COSTS.transports["tcp"], **BYTES)
SIZES = {"kernel_byte": 1e-10, "apply_byte": 1e-10, "row": 1e-7, "step_row": 1e-7}
COSTS = replace(simulated.COSTS, transports={"tcp": TRANSPORT}, **SIZES, cores=2)
ROUNDS = 12


def values(job: SimulatedJob) -> list[float]:
    """The first number of each server's variable, on the servers that live."""
    living = [server for server in job.servers if server.alive]
    return [float(np.asarray(server.core.machine.job.store.find(server.index).array)[0]) for server in living]


def trained(cluster: Cluster, rounds: int = ROUNDS) -> Any:
    """What was seen of a job."""
    return SimulatedJob(cluster, rounds).train()


def test_one_round_takes_the_sum_of_its_parts() -> None:
    """With one worker and one server one piece of work follows the other."""
    seen = trained(Cluster(1, Workload(1, dense=4000.0), COSTS))
    transport, small = TRANSPORT, 4200.0
    work = transport.send + transport.receive + COSTS.round + transport.answer + transport.take + COSTS.step
    moved = small * (transport.send_byte + transport.receive_byte + transport.answer_byte + transport.take_byte)
    kernel = 4000 * (COSTS.kernel_byte + COSTS.apply_byte)
    assert seen.round_seconds == pytest.approx(work + moved + kernel + 2 * transport.latency, rel=1e-3)


def test_a_thousand_workers_ask_servers_for_their_state_seldom(calls_of: Callable[..., Calls]) -> None:
    """A state is as long as there are workers: who waits for a first value asks for some of it, and looks now and then.

    Here the first worker takes seconds until it gives its own.
    """
    workers, calls = 20, calls_of("call", Core)
    job = SimulatedJob(Cluster(workers, Workload(2), COSTS, slow={0: 1e5}), 1)
    with pytest.raises(RuntimeError, match="10 s have passed"):
        job.train(10.0)
    asked = Counter(core.task.index for core, request in calls if isinstance(request, StatusRequest))
    assert 0 < max(asked.values()) < 30 * workers


def test_waits_end_in_time_and_leave_no_events() -> None:
    """A process has one alarm for all its waits: those that end early leave nothing that would come at their ends."""
    scheduler, waited = Scheduler(), list[float]()

    def work() -> None:
        for limit in (*[1000.0] * 50, 0.5, 1000.0, 0.25):
            answer = UnlockedFuture[None]()
            scheduler.after(1.0, answer.set_result, None)
            scheduler.wait([answer], limit)
            waited.append(scheduler.now)

    process = scheduler.spawn(work)
    scheduler.run(lambda: process.over)
    assert waited[49:] == [50.0, 50.5, 51.5, 51.75]
    before = scheduler.events
    with pytest.raises(RuntimeError, match="nothing is left"):
        scheduler.run(lambda: False)
    assert scheduler.events - before <= 4  # the last answer, and an alarm for each change of the limit


def test_two_runs_are_equal() -> None:
    """Nothing depends on the machine that simulates, nor on its clock."""
    runs = [SimulatedJob(Cluster(4, Workload(2), COSTS, slow={1: 2.5}), ROUNDS) for _ in range(2)]
    seen = [job.train() for job in runs]
    assert seen[0] == seen[1]
    assert runs[0].scheduler.events == runs[1].scheduler.events


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_a_round_takes_what_the_links_of_servers_let_through(servers: int) -> None:
    """All workers share a server's link, as connections do: pushes are there at one time, and answers leave then.

    Servers wait for the last one's vote.
    """
    rate, dense, workers = 1e8, 4e6, 4
    seen = trained(Cluster(workers, Workload(servers, dense), FREE, rate=rate))
    one = dense / servers / (OF_FRAMES * rate)
    assert seen.round_seconds == pytest.approx(2 * workers * one, rel=0.13)
    assert "links" in seen.bottleneck


@pytest.mark.parametrize("dense", [4e6, 16e6])
def test_workers_of_a_host_send_one_sum(dense: float) -> None:
    """A server's link has one contribution of each host, which does not stream; what is applied is of all workers."""
    rate, hosts, per_host = 1e8, 3, 4
    cluster = Cluster(hosts * per_host, Workload(2, dense), FREE, rate=rate, per_host=per_host, local_reduction=True)
    job = SimulatedJob(cluster, ROUNDS)
    seen = job.train()
    assert values(job) == [float(hosts * per_host * ROUNDS)] * 2
    assert seen.round_seconds == pytest.approx(2 * hosts * dense / 2 / (OF_FRAMES * rate), rel=0.08)


def test_what_is_handed_over_takes_its_price() -> None:
    """Of a sum of two the other one's contribution and answer pass twice, between three pieces of work of either."""
    costs = replace(COSTS, cores=0, part=70 * US, hand=500 * US, hand_byte=1e-8)
    alone = trained(Cluster(1, Workload(1), costs))
    two = trained(Cluster(2, Workload(1), costs, per_host=2, local_reduction=True))
    handed = 4 * (costs.hand + 4000 * costs.hand_byte) + 2 * TRANSPORT.latency
    assert two.round_seconds - alone.round_seconds == pytest.approx(handed + 2 * costs.part, rel=0.02)


def test_a_stream_uses_both_ways_of_a_link_at_once() -> None:
    """What is large is answered while it comes: its round takes the time of one way, and of one piece."""
    rate, dense = 1e8, 64e6
    seen = SimulatedJob(Cluster(1, Workload(1, dense), FREE, rate=rate), ROUNDS).train()
    assert seen.round_seconds == pytest.approx((1 + 1 / 16) * dense / (OF_FRAMES * rate), rel=0.02)


def test_a_slow_link_holds_up_no_other() -> None:
    """Two workers of 1 to a server of 10: both push at once, each at its own rate."""
    scheduler, came = Scheduler(), list[float]()
    sink, sources = Host(scheduler, 0, 10e6), [Host(scheduler, 0, 1e6) for _ in range(2)]
    for source in sources:
        travel(scheduler, source, sink, 1e6, 0.0, lambda: came.append(scheduler.now))
    scheduler.run(lambda: len(came) == 2)
    assert came == pytest.approx([1.0, 1.0])


def test_who_leaves_is_told_nothing_of_an_end_that_others_saw_first(calls_of: Callable[..., Calls]) -> None:
    """With copies all servers hear that a worker leaves, and that which keeps the log last.

    Where the chief saw it there first, it closed a generation without the worker; others then took it for one that
    hangs.
    """
    calls, workers = calls_of("call", Core), 3
    SimulatedJob(Cluster(workers, Workload(3, copies=1), COSTS), ROUNDS).train()
    left = [(asked.session, core.task.index) for core, asked in calls if isinstance(asked, LeaveRequest)]
    told = Counter(session for session, _ in left)
    of_all = [[at for session, at in left if session == each] for each, count in told.items() if count == 3]
    assert len(of_all) >= workers
    assert all(at[-1] == 0 for at in of_all)


def test_a_straggler_holds_all_up_but_with_backup_workers() -> None:
    """And with bounded staleness it lets the others get ahead by so many rounds, and no more."""
    step = Workload(1, step=0.010)
    slow = Cluster(4, step, COSTS, slow={0: 4.0})
    jobs = Cluster(4, step, COSTS), slow, replace(slow, consistency=Consistency(backup_workers=1))
    alike, held, backed = (trained(job, 30) for job in jobs)
    assert held.round_seconds == pytest.approx(4 * alike.round_seconds, rel=0.2)
    assert backed.round_seconds == pytest.approx(alike.round_seconds, rel=0.1)
    job = SimulatedJob(replace(slow, consistency=Consistency("bounded", 0, 3)), 30)
    job.train()
    late, early = (job.times[Task("worker", index)] for index in (0, 1))
    for number, when in enumerate(early):
        assert number - sum(time <= when for time in late) <= 3


def test_processes_of_one_host_share_its_cores() -> None:
    """Twice the workers on one core take twice the time."""
    one, work = replace(COSTS, cores=1), Workload(1, step=0.01)
    few, many = (trained(Cluster(count, work, one, one_host=True)) for count in (2, 4))
    assert many.round_seconds == pytest.approx(2 * few.round_seconds, rel=0.1)
    assert many.bottleneck == "the host's processors"
    assert many.use[many.bottleneck] == pytest.approx(1.0, abs=0.05)


def test_no_other_process_has_the_core_within_a_message() -> None:
    """Parts come one after the other; after the last a core comes to who waits, for a price."""
    scheduler, done = Scheduler(), dict[str, float]()
    host = Host(scheduler, cores=1, switch=0.5)

    def note(name: str) -> None:
        done[name] = scheduler.now

    for strand, name in ((Strand(host), "one"), (Strand(host), "other")):
        strand.do_part(1.0, note, f"{name}, begun")
        strand.do(1.0, note, f"{name}, whole")
        strand.do(1.0, note, f"{name}, next")
    scheduler.run(lambda: len(done) == 6)
    one = {"one, begun": 1.5, "one, whole": 2.5, "one, next": 6.5}
    assert done == one | {"other, begun": 4.0, "other, whole": 5.0, "other, next": 8.0}


def test_a_cost_model_is_written_and_read(tmp_path: Path) -> None:
    """A file that is none is refused, with what to do."""
    path = tmp_path / "costs.json"
    COSTS.write(path)
    assert Costs.read(path) == COSTS
    for text in ("", "[]", "{}", '{"format": 99}', path.read_text().replace('"send"', '"sent"')):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"is not a cost model .*psctl calibrate"):
            Costs.read(path)
    with pytest.raises(ConfigError, match=r"is not a cost model .*psctl calibrate"):
        Costs.read(tmp_path / "none")


def test_a_job_that_is_over_is_dropped() -> None:
    """A planner simulates many: what stands still in one that is over would keep all of it."""
    job = SimulatedJob(Cluster(2, Workload(1), COSTS), ROUNDS)
    job.train()
    server = weakref.ref(job.servers[0])
    del job
    SimulatedJob(Cluster(2, Workload(1), COSTS), ROUNDS).train()  # what ran last may be held by what Python keeps of it
    gc.collect()
    assert server() is None
