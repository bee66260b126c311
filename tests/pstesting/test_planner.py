"""The planner: costs fitted to known jobs, networks measured; what psctl plan says of servers, and of tables."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pstesting.hosts import Host
from pstesting.planner import jobs
from pstesting.planner import plan as planning
from pstesting.planner.commands import calibrate, plan
from pstesting.planner.distinct import Estimate, distinct_at, distinct_in
from pstesting.planner.fit import ROUNDS_OF_SUMS, fitted, seen, with_sums
from pstesting.planner.jobs import Cell, Timed, time_cells
from pstesting.planner.local_steps import LocalSteps, plan_local, predict_local
from pstesting.planner.measurements import cells_of, cells_of_sums, middle
from pstesting.planner.network import LEAST, MOST, WORD, answer
from pstesting.planner.plan import DAY, Lost, Plan, Question
from pstesting.planner.tables import INDEX_BYTES, SHARD_BYTES, PlannedTable, Sample, collections_of, plan_tables
from pstesting.planner.typical import TYPICAL
from pstesting.simulation.costs import OF_FRAMES, TransportCosts
from pstesting.simulation.workloads import Workload
from tests.kit.internals import ConfigError, Timeouts, TransportName, Unreachable
from tests.kit.shell import linked
from tests.kit.simulated import FREE, US

WORK = {"send": 60, "receive": 80, "answer": 80, "take": 60, "piece": 20}
BYTE = {"send_byte": 1, "receive_byte": 2, "answer_byte": 2, "take_byte": 1}
COSTS = replace(
    FREE,
    transports={
        transport: TransportCosts(
            **{name: factor * cost * US for name, cost in WORK.items()},
            **{name: factor * cost * 1e-10 for name, cost in BYTE.items()},
            latency=40 * US,
        )
        for transport, factor in (("tcp", 1.0), ("grpc", 3.0))
    },
    step=250 * US,
    step_variable=6 * US,
    round=300 * US,
    round_variable=4 * US,
    row=2e-7,
    kernel_byte=5e-11,
    apply_byte=8e-11,
    step_row=1e-7,
    table=150 * US,
    step_table=100 * US,
)


@pytest.mark.ci  # the parts of the calibration have tests of their own
@pytest.mark.parametrize("transports", [("tcp",), pytest.param(("tcp", "grpc"), marks=pytest.mark.soak)])
def test_known_costs_are_found(transports: tuple[TransportName, ...]) -> None:
    """From cells that were timed without an error the fit tells what others take, of more workers and servers."""
    timed = {
        transport: [(cell, seen(cell, COSTS)) for cells in cells_of(transport) for cell in cells]
        for transport in transports
    }
    found = replace(fitted(timed, COSTS.kernel_byte), cores=0)
    for transport in transports:
        for workers, workload in (
            (1, Workload(1, 1e5, 10)),
            (4, Workload(1, 4000.0)),
            (8, Workload(2, 1e6, 4)),
            (16, Workload(4, 4000.0)),
            (2, Workload(1, 64e6, 16)),
            (4, Workload(1, 16e6, 8)),
            (2, Workload(2, 0.0, 0, 1024, 32)),
        ):
            cell = Cell(transport, workers, workload)
            took = seen(cell, COSTS).wall
            # The fit takes a vote for as dear as a push, which shows where rounds are of several servers.
            within = 0.15 if workload.servers > 2 else 0.1
            assert seen(cell, found).wall == pytest.approx(took, rel=within), cell


@pytest.mark.ci  # as above
def test_known_costs_of_sums_are_found() -> None:
    """From what rounds with sums took beyond those costs that were known before."""
    true = replace(COSTS, part=45 * US, hand=150 * US, hand_byte=2e-10)
    cells = [cell for job in cells_of_sums("tcp") for cell in job]
    found = with_sums(COSTS, [(cell, seen(cell, true, ROUNDS_OF_SUMS)) for cell in cells])
    assert [found.part, found.hand, found.hand_byte] == pytest.approx([true.part, true.hand, true.hand_byte], rel=0.02)


def test_of_several_turns_the_medians_count() -> None:
    cells = [Cell("tcp", workers, Workload(1)) for workers in (1, 2)]
    took = [[Timed(3.0, 1.0, 5.0), Timed(1.0, 1.0, 1.0)], [Timed(2.0, 2.0, 6.0), Timed(9.0, 2.0, 3.0)]]
    took.append([Timed(1.0, 9.0, 7.0), Timed(2.0, 3.0, 2.0)])
    found = middle([[*zip(cells, turn, strict=True)] for turn in took])
    assert found == [(cells[0], Timed(2.0, 2.0, 6.0)), (cells[1], Timed(2.0, 2.0, 2.0))]
    with pytest.raises(ValueError, match="the same transport"):  # cells of one job are alike
        time_cells([cells[0], replace(cells[0], transport="grpc")])
    with pytest.raises(ValueError, match="local_reduction"):
        time_cells([cells[1], replace(cells[1], local_reduction=True)])


def test_a_real_job_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes take longer, and more of the processors of both ends."""
    monkeypatch.setattr(jobs, "WARM_ROUNDS", 30)
    monkeypatch.setattr(jobs, "MOST_ROUNDS", 60)
    small, large = time_cells([Cell("tcp", 1, Workload(1, 4000.0)), Cell("tcp", 1, Workload(1, 16e6, 8))])
    assert all(0 < seconds < 10 for timed in (small, large) for seconds in (timed.server, timed.worker, timed.wall))
    assert large.wall > small.wall
    assert large.server > small.server


RATE = 1e8
JOB = Question(FREE, workers=4, dense=16e6, rate=RATE, step=0.1, slots=2)


@pytest.fixture(scope="module")
def planned() -> Plan:
    """The answer for a job of which 8 servers would save too little beside 4."""
    return planning.plan(replace(JOB, worth=0.2))


def ask(*words: object) -> str:
    return CliRunner().invoke(plan, list(map(str, words)), standalone_mode=False, catch_exceptions=False).output


@pytest.mark.ci  # a long plan
def test_as_many_servers_as_are_worth_it(planned: Plan) -> None:
    """Twice as many halve what the links take alone; copies cost, and a backup worker makes up for one that is slow."""
    found = planned
    tried = {each.servers: each for each in found.tried}
    assert list(tried) == [1, 2, 4, 8]
    assert found.chosen is tried[4]
    for before, after in ((1, 2), (2, 4)):
        assert tried[after].step_seconds < 0.8 * tried[before].step_seconds
    assert tried[8].step_seconds > 0.8 * tried[4].step_seconds
    for each in found.tried:
        assert each.round_seconds == pytest.approx(each.step_seconds - 0.1)
        assert each.held_bytes == 3 * 16e6 / each.servers
    assert "links" in tried[1].bottleneck
    assert found.one_more.servers == 5
    assert found.one_more.step_seconds < tried[4].step_seconds * 1.001
    assert tried[8].step_seconds < tried[4].step_seconds * 1.001
    assert found.other_copies is not None
    assert found.other_copies.round_seconds > 1.4 * found.chosen.round_seconds
    assert found.slow is not None
    assert found.backed is not None
    assert found.slow.step_seconds > found.chosen.step_seconds + 0.04
    assert found.backed.step_seconds < found.slow.step_seconds - 0.02


@pytest.mark.ci  # a whole plan, of which each part has a test
def test_what_sums_of_a_host_give() -> None:
    """Four workers of a host have one link, which all use or one; where handing over is dear, servers are fewer."""
    shared = replace(JOB, per_host=4, costs=replace(FREE, hand=1e-6), worth=0.3)
    found = planning.plan(shared)
    assert found.summed is not None
    assert found.chosen.step_seconds - 0.1 > 3 * (found.summed.step_seconds - 0.1)
    few = replace(shared, dense=4000.0)
    for other in (replace(few, per_host=1), replace(few, costs=FREE), replace(few, workers=1)):
        assert planning.plan(other).summed is None
    assert not replace(shared, rows=1e6, dimension=8, ids=100).sums
    for price in ("part", "hand", "hand_byte"):
        assert replace(shared, costs=replace(FREE, **{price: 1e-9})).sums
    dear = planning.plan(replace(JOB, workers=8, per_host=4, costs=replace(FREE, hand=0.05), worth=0.3))
    assert dear.summed is not None
    assert (dear.chosen.servers, dear.summed.servers) == (2, 1)


@pytest.mark.ci  # two plans
def test_servers_have_room() -> None:
    """With slots, the index of tables, and copies; of these there are two servers at least."""
    rows = Question(FREE, 2, rows=1e6, dimension=64, ids=1000, rate=RATE, step=0.1, memory=3e8, slots=1)
    assert rows.held(1) == 1e6 * (4 * 64 * 2 + 40)
    assert planning.plan(rows).tried[0].servers == 2
    assert planning.plan(replace(rows, memory=0.0, copies=True)).tried[0].servers == 2
    assert planning.plan(replace(rows, workers=1)).slow is None


def test_time_that_hosts_which_fail_cost() -> None:
    """A lease for each worker, and for each server with copies; without, half of what is between two checkpoints."""
    day, lease = 86400.0, Timeouts().session_timeout
    often = replace(JOB, between_failures=day / 2, save_every=600.0, restart=60.0)
    assert often.lost(3, 1.0) == Lost(2 * 4 * (lease + 1), 2 * 3 * 360)
    assert replace(often, copies=True).lost(3, 1.0) == Lost(2 * 4 * (lease + 1), 2 * 3 * (lease + 1.5))
    assert JOB.lost(3, 1.0) == Lost(0.0, 0.0)


# ---- Local steps ----

SLOW_LINKS = replace(FREE, network_latency=0.025)
EXCHANGED = Question(SLOW_LINKS, workers=4, dense=4e6, rate=12.5e6, step=0.2, worth=0.3, slots=1)
LINK = 4e6 / 12.5e6 / OF_FRAMES
"""Seconds that the model needs on a link, one way."""


@pytest.mark.parametrize(
    ("how", "compressed", "exchange", "exposed"),
    [
        (LocalSteps(50), 1.0, 0.05 + 2 * LINK, 0.05 + 2 * LINK),
        (LocalSteps(50), 0.25, 0.05 + 1.25 * LINK, 0.05 + 1.25 * LINK),
        (LocalSteps(50, 2), 0.25, 0.05 + 0.625 * LINK, 0.05 + 0.625 * LINK),
        (LocalSteps(50, 2, 1), 0.25, 0.05 + 0.625 * LINK, 0.05 + 0.625 * LINK - 0.2),
        (LocalSteps(50, 1, 5), 0.25, 0.05 + 1.25 * LINK, 0.0),
        (LocalSteps(1), 1.0, 0.05 + 2 * LINK, 0.05 + 2 * LINK),
    ],
    ids=str,
)
def test_local_steps_take_what_their_exchanges_show(
    how: LocalSteps, compressed: float, exchange: float, exposed: float
) -> None:
    """Gradients one way, whole values back, and a round trip for each fragment; less what steps meanwhile hide."""
    found = predict_local(replace(EXCHANGED, workers=1, compressed=compressed), how, 1)
    assert found.exchange_seconds == pytest.approx(exchange, rel=0.01)
    assert found.exposed_seconds == pytest.approx(exposed, abs=0.01 * exchange)
    period = how.sync_every * 0.2 + how.fragments * found.exposed_seconds
    assert found.steps_per_second == pytest.approx(how.sync_every / period)
    assert found.efficiency == found.goodput == pytest.approx(how.sync_every * 0.2 / period)
    sent, received = 4e6 * compressed / how.sync_every, 4e6 / how.sync_every
    assert (found.sent_bytes, found.received_bytes) == pytest.approx((sent, received))
    shared = predict_local(replace(EXCHANGED, compressed=compressed), how, 1)
    assert shared.exchange_seconds == pytest.approx(0.05 + 4 * (exchange - 0.05), rel=0.1), "a server's link for four"


def test_failures_of_workers_that_make_local_steps() -> None:
    """Each loses half of its local steps and the time until it is back; the others wait a grace, or a lease."""
    often = replace(EXCHANGED, between_failures=120.0, copies=True)
    calm = predict_local(replace(often, between_failures=inf), LocalSteps(50, 1, 10), 4)
    found = predict_local(often, LocalSteps(50, 1, 10, wait=1.0, rejoin=3.0), 4)
    servers = often.lost(4, found.exchange_seconds).servers / DAY
    assert calm.goodput == calm.efficiency == 1.0
    assert found.goodput == pytest.approx(1 - (5 + 3 + 4 * 1) / 120 - servers)


def test_local_steps_get_as_many_servers_as_are_worth_it() -> None:
    """Four links of servers, where one would be shared by all workers; none more where nothing of an exchange shows."""
    (seen, hidden) = plan_local(EXCHANGED, [LocalSteps(2), LocalSteps(50, 1, 40)])
    assert (seen.servers, hidden.servers) == (4, 1)
    assert hidden.efficiency == 1.0


def test_local_steps_are_compared_by_the_command(costs: Path) -> None:
    """The first row exchanges after each step; what cannot be is refused with the flags that say it."""
    flags = ["--costs", costs, "--round-trip", "50ms", "--compression", "int4", "--fragments", "2", "--sync-delay", "3"]
    said = json.loads(ask(*ASKED, *flags, "--sync-every", "100", "--sync-every", "50", "--json"))["local_steps"]
    assert [each["sync_every"] for each in said] == [1, 50, 100]
    assert said[1]["sent_bytes"] / said[1]["received_bytes"] == pytest.approx(0.125 + 1 / 256)
    assert said[0]["efficiency"] < said[1]["efficiency"] <= said[2]["efficiency"]
    assert "local steps/s" in ask(*ASKED, *flags, "--sync-every", "50")
    with pytest.raises(ConfigError, match=r"--sync-every 51 is not divisible by --fragments 2"):
        ask(*ASKED, *flags, "--sync-every", "51")
    with pytest.raises(ConfigError, match=r"--sync-delay 3 is too long .* below 2"):
        ask(*ASKED, *flags, "--sync-every", "4")
    with pytest.raises(ConfigError, match="local steps need a time"):
        ask("--workers", "2", "--parameters", "1MB", "--sync-every", "4", "--costs", costs, "--network", "1Gbit")


# ---- The command ----

ASKED = ["--workers", "2", "--parameters", "16MB", "--network", "800Mbit", "--step", "100ms", "--worth", "0.3"]


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    FREE.write(path)
    return path


def test_the_answer_for_machines_and_for_people(costs: Path, tmp_path: Path) -> None:
    """JSON has the chosen number beside its prediction; the table marks it; a plot is in the format of its name."""
    said = json.loads(ask(*ASKED, "--costs", costs, "--json"))
    assert {"servers", "bottleneck", "step_seconds", "round_seconds", "held_bytes", "use"} <= said.keys()
    assert {"tried", "one_more", "other_copies", "slow", "slow_by", "backed", "summed"} <= said.keys()
    assert said["servers"] in [each["servers"] for each in said["tried"]]
    plotted = ["--plot", tmp_path / "plan.svg"] if find_spec("matplotlib") else []
    shown = ask(*ASKED, "--costs", costs, *plotted)
    assert f"{said['servers']} *" in shown
    assert "twice as many would save less than 30 % of a step" in shown
    assert "local reduction" not in shown
    a_day = DAY / (90 * DAY) * said["servers"] * (300 + 60)
    assert said["lost"]["servers"] == pytest.approx(a_day)
    lost = sum(said["lost"].values())
    assert f"without copies: {lost:.0f} s per day, of that {a_day:.0f} s because of servers" in shown
    if not plotted:
        pytest.skip("no matplotlib: nothing is drawn")
    drawn = (tmp_path / "plan.svg").read_text()
    assert "<svg" in drawn
    assert "servers are enough" in drawn


def test_without_a_calibration_the_answer_is_rough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs that are built in answer, a network included, and say what they are; costs.json goes before them."""
    monkeypatch.chdir(tmp_path)
    asked = ["--workers", 2, "--parameters", "1MB", "--step", "10ms"]
    shown = ask(*asked)
    assert f"costs of {TYPICAL.machine}, which are built in: psctl calibrate measures those of your hosts" in shown
    assert json.loads(ask(*asked, "--transport", "grpc", "--json"))["step_seconds"] > 0.010
    replace(FREE, network=1e8, machine="this one").write(tmp_path / "costs.json")
    assert "costs of this one\n" in ask(*asked)


@pytest.mark.ci  # two plans
def test_sums_are_told_where_workers_share_hosts(costs: Path) -> None:
    """And where their price was measured; else, that it was not."""
    asked = [*ASKED, "--costs", costs, "--per-host", "2"]
    assert f"{costs} has no cost for local reduction; run psctl calibrate again" in ask(*asked)
    replace(FREE, hand=1e-6).write(costs)
    assert "servers and local reduction: " in ask(*asked)


@pytest.mark.ci  # four plans
def test_the_network_that_was_measured(costs: Path) -> None:
    """Counts where none is given; without either nothing is asked."""
    asked = [*(word for word in ASKED if word not in ("--network", "800Mbit")), "--costs", costs]
    with pytest.raises(ConfigError, match=r"costs.json has no network between hosts; give --network, such as 25Gbit"):
        ask(*asked)
    given = json.loads(ask(*ASKED, "--costs", costs, "--json"))
    replace(FREE, network=1e8).write(costs)
    found = json.loads(ask(*asked, "--json"))
    assert found == given
    replace(FREE, network=1e8, network_latency=0.01).write(costs)
    assert json.loads(ask(*asked, "--json"))["round_seconds"] > found["round_seconds"] + 0.015


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--network", "25"], "--network '25' is not a rate; write bits per second with a unit, such as 25Gbit"),
        (["--network", "0Gbit"], "--network '0Gbit' is not a rate"),
        (["--step", "fast"], "--step 'fast' is not a time; write a number with a unit, such as 120ms, 10min or 90d"),
        (["--mtbf", "90"], "--mtbf '90' is not a time; write a number with a unit, such as 120ms, 10min or 90d"),
        (["--rows", "200M"], "--rows '200M' is not a table; write rows and numbers per row, such as 200M:64"),
        (["--parameters", "ten"], "--parameters 'ten' is not a size"),
        (["--parameters", "0"], "a job needs variables; give --parameters, or --rows and --ids"),
        (["--transport", "shm"], "has no transport shm, only tcp; measure it with psctl calibrate --transport shm"),
        (["--workers", "40001"], "40001 workers with 1 servers are too many to simulate"),
        (["--costs", "none.json"], "none.json is not a cost model"),
    ],
)
def test_questions_that_cannot_be_answered(costs: Path, flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(*ASKED, "--costs", costs, *flags)
    assert said in str(caught.value)


ANSWER = """
from pstesting.planner.network import answer
answer({host!r}, {port}, lambda at: print(at, flush=True))
"""

MEASURE = """
import json
from pstesting.planner import network
network.PINGS = 200
found = network.measure({host!r}, {port})
print(json.dumps([found.rate, found.latency]))
"""


@pytest.mark.ci  # hosts are made, and measured
def test_the_rate_of_the_slower_way_and_the_latency_of_a_link(stack: ExitStack) -> None:
    """Two hosts of 80 and 40 Mbit move 40, either way."""
    hosts = linked(stack, Host("one", 80e6), Host("two", 40e6))
    at = hosts.addresses["two"]

    def start(host: str, code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code.format(host=at, port=5000)]
        return hosts.start(host, command, stdout=subprocess.PIPE, text=True)

    peer = start("two", ANSWER)
    assert peer.stdout is not None
    assert peer.stdout.readline() == f"{at}:5000\n"
    rate, latency = json.loads(start("one", MEASURE).communicate(timeout=60)[0])
    assert 40e6 / 8 * 0.3 < rate < 40e6 / 8 * 1.2  # others may use this machine, and no more comes than that
    assert 0 <= latency < 0.01
    assert peer.wait(10) == 0


@pytest.mark.parametrize("word", [WORD.pack(b"x", 1), WORD.pack(b"t", MOST + 1), b"GET /", b""])
def test_nonsense_ends_a_connection_and_no_more(word: bytes) -> None:
    listening = SimpleQueue[str]()
    peer = Thread(target=answer, args=("127.0.0.1", 0, listening.put), daemon=True)
    peer.start()
    host, _, port = listening.get(timeout=20).rpartition(":")
    address = host, int(port)
    with socket.create_connection(address, 20) as sock:
        sock.sendall(word)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    with socket.create_connection(address, 20) as sock:
        sock.sendall(WORD.pack(b"s", LEAST))
        left = LEAST
        while left:
            came = sock.recv(1 << 16)
            assert came
            assert came.count(0) == len(came)
            left -= len(came)
        sock.sendall(WORD.pack(b"e", 0))
    peer.join(20)
    assert not peer.is_alive()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", "127.0.0.1:1"], "127.0.0.1:1 does not answer ([Errno 111] Connection refused); run psctl"),
        (["--peer", "here"], "--peer: 'here' is not an address"),
        (["--answer", "many"], "--answer: '0.0.0.0:many' is not an address"),
        (["--answer", "192.0.2.1:5000"], "cannot listen at 192.0.2.1:5000"),
    ],
)
def test_hosts_that_cannot_be_measured(tmp_path: Path, arguments: list[str], said: str) -> None:
    asked = ["--output", str(tmp_path / "costs.json"), *arguments]
    with pytest.raises((ConfigError, Unreachable), match=re.escape(said)):
        CliRunner().invoke(calibrate, asked, standalone_mode=False, catch_exceptions=False)
    assert not list(tmp_path.iterdir())


# ---- Tables that psctl plan suggests from a sample of ids ----


def zipf(size: int, exponent: float) -> Any:
    frequencies = np.arange(1, size + 1) ** -exponent
    return frequencies / frequencies.sum()


def draw(count: int, frequencies: Any, seed: int = 1) -> Any:
    """How often each id came that came at all."""
    counts = np.random.default_rng(seed).multinomial(count, frequencies)
    return counts[counts > 0]


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.05, 1.5])
def test_distinct_ids_of_a_known_zipf_law(exponent: float) -> None:
    """Of 20 times as many ids as in a sample the distinct ones are within 10 % and within the interval."""
    frequencies, count, times = zipf(100_000, exponent), 20_000, 20
    true = -np.expm1(times * count * np.log1p(-frequencies)).sum()
    seen = draw(count, frequencies)
    found = distinct_at(seen, times)
    assert true > 3 * len(seen)
    assert found.low < true < found.high
    assert found.value == pytest.approx(true, rel=0.1)


def test_frequent_ids_do_not_matter_for_what_is_to_come() -> None:
    """Half of all ids are one id, as where values are missing; and where all ids came often, no more are expected."""
    frequencies = np.append(0.5, zipf(100_000, 1.05) / 2)
    true = -np.expm1(20 * 40_000 * np.log1p(-frequencies)).sum()
    assert distinct_at(draw(40_000, frequencies), 20).value == pytest.approx(true, rel=0.1)
    assert distinct_at([100, 200, 300], 1000) == Estimate(3, 3, 3)
    assert distinct_at([1, 1, 1], 1) == Estimate(3, 3, 3)


def test_distinct_ids_of_a_batch() -> None:
    """The average of what parts of the sample have."""
    ids = np.random.default_rng(2).integers(0, 300, 2000)
    counts = np.unique(ids, return_counts=True)[1]
    parts = np.random.default_rng(3).permuted(np.tile(ids, (50, 1)), axis=1)[:, :200]
    average = np.mean([len(np.unique(part)) for part in parts])
    assert distinct_in(counts, 0.1) == pytest.approx(average, rel=0.02)
    assert distinct_in(counts, 3.0) == len(counts)


IDS = {"user": np.array([[5, 6], [5, 7], [8, 5]]), "item": np.array([[1], [2], [1]])}


def test_files(tmp_path: Path) -> None:
    """All formats have the same ids; a cell of a CSV file may have several, or none."""
    np.savez(tmp_path / "sample.npz", **IDS)
    np.save(tmp_path / "sample.npy", np.hstack(list(IDS.values())))
    (tmp_path / "sample.csv").write_text("user,item\n5 6,1\n5 7,2\n8 5,1\n")
    (tmp_path / "bags.csv").write_text('user\n5\n""\n6 7\n')
    for name in ("sample.npz", "sample.csv"):
        found = Sample.read(tmp_path / name)
        assert found.examples == 3
        assert found.ids.keys() == IDS.keys()
        assert all(found.ids[name].tolist() == IDS[name].ravel().tolist() for name in IDS)
    found = Sample.read(tmp_path / "sample.npy")
    assert {name: ids.tolist() for name, ids in found.ids.items()} == {"0": [5, 5, 8], "1": [6, 7, 5], "2": [1, 2, 1]}
    bags = Sample.read(tmp_path / "bags.csv")
    assert (bags.examples, bags.ids["user"].tolist()) == (3, [5, 6, 7])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ids.txt", "", "unknown format; use .npz, .npy, .csv"),
        ("none.csv", None, "cannot be read"),
        ("empty.csv", "", "cannot be read"),
        ("words.csv", "user\nfive\n", "cannot be read: invalid literal"),
        ("no.csv", 'user\n""\n', "'user' has no ids"),
        ("short.csv", "user,item\n5\n", "cannot be read"),
        ("broken.npz", "x", "cannot be read"),
        ("floats.npz", {"user": np.zeros(3)}, "ids of 'user' are float64, not integers"),
        ("number.npz", {"user": np.array(3)}, "an array without dimensions"),
        ("uneven.npz", {"user": np.array([3]), "item": np.array([3, 4])}, "tables have 1, 2 examples"),
        ("row.npy", np.arange(3), "an array of shape (3,), not (examples, tables)"),
    ],
)
def test_files_without_ids(tmp_path: Path, name: str, text: Any, said: str) -> None:
    path = tmp_path / name
    if isinstance(text, dict):
        np.savez(path, **text)
    elif isinstance(text, np.ndarray):
        np.save(path, text)
    elif text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Sample.read(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def sample() -> dict[str, Any]:
    """Ids of 20,000 examples: of days and shops, hashed users, and words with keys of 64 bits."""
    rng = np.random.default_rng(4)
    users = rng.choice(100_000, 20_000, p=zipf(100_000, 1.05))
    return {
        "day": rng.integers(0, 7, 20_000),
        "user": users * 2654435761 % 2**40,
        "shop": rng.integers(0, 500, 20_000),
        "word": users * 2**33,
        "page": users * 48271 % 2**40,
    }


def test_kinds_and_collections() -> None:
    """Few ids from 0 on are rows of a static table; keys of 48 bits go into one group, others into a table alone."""
    found = {each.name: each for each in plan_tables(Sample(20_000, sample()), 200_000, 1000, 128)}
    assert {name: each.kind for name, each in found.items()} == {
        **dict.fromkeys(("day", "shop"), "static"),
        **dict.fromkeys(("user", "word", "page"), "dynamic"),
    }
    assert (found["day"].rows, found["shop"].rows) == (7, 500)
    assert (found["day"].batch, found["shop"].held_bytes) == (pytest.approx(7), 500 * 128)
    user = found["user"]
    assert user.expected.low < user.rows < user.expected.high
    assert user.held_bytes == user.rows * (128 + INDEX_BYTES)
    assert abs(user.checked) < 0.1
    collections = collections_of(list(found.values()), 4)
    assert [each.tables for each in collections] == [("day", "shop"), ("user", "page"), ("word",)]
    assert [each.shards for each in collections] == [1, 4, 4]
    assert collections[1].rows == user.rows + found["page"].rows


def test_static_tables_are_cut_into_worthwhile_shards() -> None:
    table = PlannedTable("shop", 1, 1, Estimate(1, 1, 1), 0.0, "static", 1.0, 2.5 * SHARD_BYTES, 0)
    assert [collections_of([table], servers)[0].shards for servers in (1, 2, 8)] == [1, 2, 2]


def test_the_plan_of_a_sample(tmp_path: Path) -> None:
    """Rows and ids of the sample are those of the job; servers have the memory for them."""
    np.savez(tmp_path / "sample.npz", **sample())
    FREE.write(tmp_path / "costs.json")
    asked = ["--workers", 2, "--costs", tmp_path / "costs.json", "--network", "10Gbit", "--step", "100ms"]
    asked += ["--tables", tmp_path / "sample.npz", "--examples", "200K", "--dim", 16, "--slots", 1, "--memory", "10MB"]
    said = json.loads(ask(*asked, "--json"))
    rows = sum(table["rows"] for table in said["tables"])
    assert said["servers"] == -(-rows * (128 + INDEX_BYTES) // 10**7)
    assert said["held_bytes"] == rows * (128 + INDEX_BYTES) / said["servers"]
    assert said["ids"] == pytest.approx(sum(table["batch"] for table in said["tables"]), abs=1)
    assert [each["shards"] for each in said["collections"]] == [1, said["servers"], said["servers"]]
    shown = ask(*asked)
    assert f"{said['tables'][1]['rows']:,}" in shown
    assert "collection 1: 2 dynamic tables, " in shown
    with pytest.raises(ConfigError, match="leave out --rows and --ids"):
        ask(*asked, "--rows", "1M:16")
    with pytest.raises(ConfigError, match="--examples 'many' is not a number"):
        ask(*asked[:-8], "--examples", "many")
