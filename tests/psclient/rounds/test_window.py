"""Rounds under way, as one process sees them: over cores in process, with a chief that the test plays."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from psclient._src.rounds.prepared import PlanShares
from psclient._src.rounds.rounds import Outgoing
from psserver.plans.prepared import PreparedPlan
from pswire.errors import MemoryLimit
from pswire.limits import PART_BYTES, WINDOW
from pswire.model.log import Approved, Epoch, EpochClosed
from pswire.model.plan import Operand, Plan, Reduction, Ref
from pswire.model.tensor import TensorSpec
from tests.kit.rig import sum_into
from tests.kit.workers import began


def send(process, plan, value):
    """Sends a round that adds a number."""
    process.exchange.enter(plan)
    return process.exchange.send(Outgoing(plan, (1.0,), (np.asarray(value),), ()))


def value_of(process, round):
    return int(process.exchange.window.values(round)[Ref("reduction", 0)])


@pytest.fixture
def alone(job):
    """One process, and a plan of which it has made the first round, which was waited for."""
    with began(job, "sync", 1) as (one,):
        plan = sum_into(one.create("v"))
        job.append(Approved(plan))
        one.group.enter("dataset:0")
        send(one, plan, 0)
        one.exchange.window.settle()
        yield job, one, plan


def test_values_are_taken_in_the_order_of_the_rounds(alone):
    """Whichever is looked at first; each look that finds one under way is a wait."""
    _, one, plan = alone
    rounds = [send(one, plan, number) for number in range(4)]
    waits = one.exchange.measures.waits
    assert [round.values for round in rounds] == [None] * 4
    assert value_of(one, rounds[2]) == 2
    assert [round.values is None for round in rounds] == [False, False, False, True]
    assert value_of(one, rounds[1]) == 1
    assert one.exchange.measures.waits == waits + 1
    assert value_of(one, rounds[3]) == 3
    assert one.exchange.measures.waits == waits + 2
    assert one.exchange.window.last_round.number == one.group.round - 1


def test_a_variable_waits_for_the_round_that_assigns_it(alone):
    """And for no other; a thread that makes no rounds sees what came last, and waits for nobody."""
    _, one, plan = alone
    (v,) = one.exchange.creation.variables.values()
    u = one.create("u", 1)
    assert int(one.exchange.reads.read(v)) == 0
    send(one, plan, 5)
    waits = one.exchange.measures.waits
    assert int(one.exchange.reads.read(u)) == 0
    assert int(one.exchange.reads.read(v, waits=False)) == 0
    assert one.exchange.measures.waits == waits
    assert int(one.exchange.reads.read(v)) == 5
    assert one.exchange.measures.waits == waits + 1


def test_only_the_thread_that_sends_waits(alone):
    """It is the one that recorded the last round."""
    _, one, plan = alone
    send(one, plan, 1)
    found = []
    thread = threading.Thread(target=lambda: found.append(one.exchange.window.mine))
    thread.start()
    thread.join()
    assert one.exchange.window.mine
    assert found == [False]


def test_a_full_window_waits_for_its_oldest_round(alone):
    """And for no more than that one."""
    _, one, plan = alone
    rounds = [send(one, plan, number) for number in range(WINDOW)]
    assert all(round.values is None for round in rounds)
    send(one, plan, WINDOW)
    assert [round.values is None for round in rounds] == [False] + [True] * (WINDOW - 1)


def test_what_answers_say_of_the_members_waits_for_its_place(alone):
    """A look brings values; an epoch that the same answers name is taken in a window later, or before a batch."""
    job, one, plan = alone
    job.append(EpochClosed(Epoch(2, (one.member,))))
    first = send(one, plan, 1)
    assert value_of(one, first) == 1
    for number in range(WINDOW - 1):
        assert value_of(one, send(one, plan, number)) == number
        assert one.group.epoch.number == 1, "it was looked at, and is not taken in"
    send(one, plan, 7)
    assert one.group.epoch.number == 2
    job.append(EpochClosed(Epoch(3, (one.member,))))
    send(one, plan, 8)
    assert one.group.epoch.number == 2
    one.group.boundary(0)
    assert one.group.epoch.number == 3


def test_a_round_that_fails_later_ends_the_session_and_names_its_line(alone):
    """What came after it was computed as if it had been made; so did the other processes."""
    job, one, plan = alone
    job.servers.cores[0].machine.rounds.refuse(PreparedPlan(plan, 0), MemoryLimit("it does not fit any more"))
    line = f"{Path(__file__).name}:"
    refused = send(one, plan, 1)
    for look in (lambda: value_of(one, refused), one.exchange.window.settle, lambda: send(one, plan, 2)):
        with pytest.raises(MemoryLimit, match=rf"does not fit any more; .*{line}\d+ has sent it"):
            look()


def test_a_first_round_that_fails_is_told_to_its_call(alone):
    """Which may catch it, and go on: nobody has computed anything since."""
    job, one, plan = alone
    other = sum_into(one.create("u", 1))
    job.append(Approved(other))
    job.servers.cores[1].machine.rounds.refuse(PreparedPlan(other, 1), MemoryLimit("it does not fit"))
    with pytest.raises(MemoryLimit, match=r"it does not fit$"):
        send(one, other, 1)
    assert value_of(one, send(one, plan, 2)) == 2


@pytest.mark.parametrize("servers", [1, 2])
def test_an_asynchronous_worker_sends_ahead_to_one_server(job, servers):
    """With several each push is waited for: its rounds on them have no common order."""
    with began(job, "async", 1) as (one,):
        if servers == 1:
            one.session.servers = one.session.servers[:1]
        plan = sum_into(one.create("v"))
        job.append(Approved(plan))
        send(one, plan, 0)
        rounds = [send(one, plan, number) for number in range(3)]
        assert [round.values is None for round in rounds] == [servers == 1] * 3
        one.exchange.window.settle()
        assert [value_of(one, round) for round in rounds] == [0, 1, 2]


@pytest.mark.parametrize("which", ["operand", "reduction", "both"])
def test_a_push_of_more_than_a_part_is_waited_for(which):
    """Whatever it carries: it is not copied, so that its arrays must not change before; buffers do not change."""
    half, whole = (TensorSpec("int8", (PART_BYTES // 2 + 1,)), TensorSpec("int8", (PART_BYTES + 1,)))
    operands = {"operand": whole, "both": half}.get(which)
    reduced = {"reduction": whole, "both": half}.get(which)
    plan = Plan(
        (Reduction("sum", reduced, (0,)),) if reduced else (),
        (Operand(operands, (0,)),) if operands else (),
    )
    assert PlanShares(plan, {}).large
    assert not PlanShares(Plan((Reduction("sum", half, (0,)),), (Operand(half, (1,)),)), {}).large, "not to one server"


def test_lines_are_kept_until_they_are_said(alone):
    """Each once, and none after that: a script may never begin another step."""
    _, one, plan = alone
    window = one.exchange.window
    for number in range(20):
        value_of(one, send(one, plan, number))
    assert len(window._lines) == 1
    window.begin_step()
    for number in range(5):
        value_of(one, send(one, plan, number))
    assert not window._lines
