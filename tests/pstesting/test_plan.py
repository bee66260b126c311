"""`psctl plan`: how many servers a job needs, by a cost model that the test knows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pstesting.planner import plan as planning
from pstesting.planner.commands import plan
from pstesting.planner.plan import DAY, Lost, Plan, Question
from pstesting.simulation.costs import Costs, LaneCosts
from tests.kit.internals import ConfigError, Timeouts

FREE = Costs(
    lanes={"tcp": LaneCosts(*[0.0] * 10)},
    step=0.0,
    step_variable=0.0,
    round=0.0,
    round_variable=0.0,
    kernel_byte=0.0,
    apply_byte=0.0,
    row=0.0,
    step_row=0.0,
    vote=0.0,
    call=0.0,
    beat=0.0,
)
"""Nothing but links takes time."""

RATE = 1e8
JOB = Question(FREE, workers=4, dense=16e6, rate=RATE, step=0.1, slots=2)


@pytest.fixture(scope="module")
def planned() -> Plan:
    """The answer for a job of which 8 servers would save too little beside 4."""
    return planning.plan(replace(JOB, worth=0.2))


def test_as_many_servers_as_are_worth_it(planned: Plan) -> None:
    """Twice as many halve what the links take, and not what a worker computes."""
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
    assert tried[8].step_seconds < found.one_more.step_seconds < tried[4].step_seconds * 1.001


def test_what_copies_cost_and_backup_workers_give(planned: Plan) -> None:
    """Copies are pushed and answered as well; a backup worker makes up for one that is slow."""
    found = planned
    assert found.other_copies is not None
    assert found.other_copies.round_seconds > 1.4 * found.chosen.round_seconds
    assert found.slow is not None
    assert found.backed is not None
    assert found.slow.step_seconds > found.chosen.step_seconds + 0.04
    assert found.backed.step_seconds < found.slow.step_seconds - 0.02


def test_what_sums_of_a_host_give() -> None:
    """Four workers of one host have one link, which either all use, or one of them."""
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


def test_sums_are_worth_fewer_servers() -> None:
    """Whoever sends for its host takes what all others hand over for each of them."""
    found = planning.plan(replace(JOB, workers=8, per_host=4, costs=replace(FREE, hand=0.05), worth=0.3))
    assert found.summed is not None
    assert (found.chosen.servers, found.summed.servers) == (2, 1)


def test_servers_have_room() -> None:
    """With slots, the index of tables, and copies; of these there are two servers at least."""
    rows = Question(FREE, 2, rows=1e6, dimension=64, ids=1000, rate=RATE, step=0.1, memory=3e8, slots=1)
    assert rows.held(1) == 1e6 * (4 * 64 * 2 + 24)
    assert planning.plan(rows).tried[0].servers == 2
    assert planning.plan(replace(rows, memory=0.0, copies=True)).tried[0].servers == 2
    assert planning.plan(replace(rows, workers=1)).slow is None


def test_time_that_hosts_which_fail_cost() -> None:
    """A lease for each worker, and for each server with copies; without, half of what is between two checkpoints."""
    day, lease = 86400.0, Timeouts().lease
    often = replace(JOB, between_failures=day / 2, save_every=600.0, restart=60.0)
    assert often.lost(3, 1.0) == Lost(2 * 4 * (lease + 1), 2 * 3 * 360)
    assert replace(often, copies=True).lost(3, 1.0) == Lost(2 * 4 * (lease + 1), 2 * 3 * (lease + 1.5))
    assert JOB.lost(3, 1.0) == Lost(0.0, 0.0)


ASKED = ["--workers", "2", "--parameters", "16MB", "--network", "800Mbit", "--step", "100ms", "--worth", "0.3"]


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    FREE.write(path)
    return path


def test_the_answer_for_machines_and_for_people(costs: Path) -> None:
    """JSON has the chosen number beside its prediction; the table marks it."""
    asked = [*ASKED, "--costs", str(costs)]
    said = json.loads(CliRunner().invoke(plan, [*asked, "--json"], standalone_mode=False).output)
    assert {"servers", "bottleneck", "step_seconds", "round_seconds", "held_bytes", "use"} <= said.keys()
    assert {"tried", "one_more", "other_copies", "slow", "slow_by", "backed", "summed"} <= said.keys()
    assert said["servers"] in [each["servers"] for each in said["tried"]]
    shown = CliRunner().invoke(plan, asked, standalone_mode=False).output
    assert f"{said['servers']} *" in shown
    assert "twice as many would save less than 30 % of a step" in shown
    assert "sums" not in shown
    a_day = DAY / (90 * DAY) * said["servers"] * (300 + 60)
    assert said["lost"]["servers"] == pytest.approx(a_day)
    assert f"without copies: {sum(said['lost'].values()):.0f} s a day, of it {a_day:.0f} s by servers" in shown


def test_sums_are_told_where_workers_share_hosts(costs: Path) -> None:
    """And where their price was measured; else, that it was not."""
    asked = [*ASKED, "--costs", str(costs), "--per-host", "2"]
    shown = CliRunner().invoke(plan, asked, standalone_mode=False).output
    assert f"{costs} has no price for sums of a host: measure it again" in shown
    replace(FREE, hand=1e-6).write(costs)
    shown = CliRunner().invoke(plan, asked, standalone_mode=False).output
    assert "servers, where workers of a host send sums: " in shown


def test_the_network_that_was_measured(costs: Path) -> None:
    """Counts where none is given; without either nothing is asked."""
    asked = [word for word in ASKED if word not in ("--network", "800Mbit")]
    with pytest.raises(ConfigError, match=r"costs.json has no network between hosts: give --network, such as 25Gbit"):
        CliRunner().invoke(plan, [*asked, "--costs", str(costs)], standalone_mode=False, catch_exceptions=False)
    given = CliRunner().invoke(plan, [*ASKED, "--costs", str(costs), "--json"], standalone_mode=False).output
    replace(FREE, network=1e8).write(costs)
    found = CliRunner().invoke(plan, [*asked, "--costs", str(costs), "--json"], standalone_mode=False).output
    assert json.loads(found) == json.loads(given)
    replace(FREE, network=1e8, network_latency=0.01).write(costs)
    later = CliRunner().invoke(plan, [*asked, "--costs", str(costs), "--json"], standalone_mode=False).output
    assert json.loads(later)["round_seconds"] > json.loads(found)["round_seconds"] + 0.015


def test_a_plot(costs: Path, tmp_path: Path) -> None:
    """Is a picture, in the format that the file's name says."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    CliRunner().invoke(plan, [*ASKED, "--costs", str(costs), "--plot", str(path)], standalone_mode=False)
    drawn = path.read_text()
    assert "<svg" in drawn
    assert "servers are enough" in drawn


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--network", "25"], "--network '25' is no rate; write bits per second with a unit, such as 25Gbit"),
        (["--network", "0Gbit"], "--network '0Gbit' is no rate"),
        (["--step", "fast"], "--step 'fast' is no time; write a number with a unit, such as 120ms, 10min or 90d"),
        (["--mtbf", "90"], "--mtbf '90' is no time; write a number with a unit, such as 120ms, 10min or 90d"),
        (["--rows", "200M"], "--rows '200M' is no table; write rows and numbers of a row, such as 200M:64"),
        (["--parameters", "ten"], "--parameters 'ten' is no size"),
        (["--parameters", "0"], "a job has variables; give --parameters, or --rows and --ids"),
        (["--lane", "shm"], "the cost model has no lane shm; it has tcp: measure it with psctl calibrate --lane shm"),
        (["--workers", "40001"], "40001 workers with 1 servers are too many to be simulated"),
        (["--costs", "none.json"], "none.json is no calibration"),
    ],
)
def test_questions_that_cannot_be_answered(costs: Path, flags: list[str], said: str) -> None:
    """Are refused at once, with what to write."""
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(plan, [*ASKED, "--costs", str(costs), *flags], standalone_mode=False, catch_exceptions=False)
    assert said in str(caught.value)
