"""Rounds under way, one section by itself, and what is left of a round's answers."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from psclient._src.distribute.reduction import combine
from psclient._src.rounds.prepared import PlanShares
from psclient._src.rounds.rounds import Outgoing
from psclient._src.rounds.section import Section
from psclient._src.rounds.window import MANY_STEPS
from psserver.plans.prepared import PreparedPlan
from pstesting import InProcessCluster
from pswire.api import RoundReply
from pswire.errors import MemoryLimit
from pswire.limits import PART_BYTES, WINDOW
from pswire.model.log import Approved, Generation, GenerationClosed
from pswire.model.plan import Operand, Plan, Reduction, Ref
from pswire.model.tensor import TensorSpec
from tests.kit.rig import sum_into
from tests.kit.workers import began, in_threads


def send(process, plan, value):
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
    """Whichever is looked at first; each look at one under way is a wait, of the thread that sent it alone. Heartbeats
    tell the oldest that is not answered."""
    _, one, plan = alone
    rounds = [send(one, plan, number) for number in range(4)]
    waits = one.exchange.measures.waits
    assert [round.values for round in rounds] == [None] * 4
    assert value_of(one, rounds[2]) == 2
    assert [round.values is None for round in rounds] == [False, False, False, True]
    assert one.session.waits == (rounds[3].number, plan.id)
    assert value_of(one, rounds[1]) == 1
    assert one.exchange.measures.waits == waits + 1
    assert value_of(one, rounds[3]) == 3
    assert (one.exchange.measures.waits, one.session.waits) == (waits + 2, (-1, b""))
    assert one.exchange.window.last_round.number == one.group.round - 1
    send(one, plan, 1)
    found = []
    thread = threading.Thread(target=lambda: found.append(one.exchange.window.mine))
    thread.start()
    thread.join()
    assert one.exchange.window.mine
    assert found == [False]


def test_a_thread_works_while_it_waits_for_a_round(alone):
    """Once, and not for a round that was taken, nor in another thread; work that fails is passed over."""
    _, one, plan = alone
    done = []

    def work():
        done.append(threading.get_ident())
        raise ValueError("no row")

    one.group.meanwhile(work)
    first, second = send(one, plan, 1), send(one, plan, 2)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(value_of, one, first).result() == 1
    assert done == []
    assert (value_of(one, first), done) == (1, [])
    assert (value_of(one, second), done) == (2, [threading.get_ident()])
    assert (value_of(one, send(one, plan, 3)), len(done)) == (3, 1)


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


def test_a_full_window_waits_for_its_oldest_round(alone):
    _, one, plan = alone
    rounds = [send(one, plan, number) for number in range(WINDOW)]
    assert all(round.values is None for round in rounds)
    send(one, plan, WINDOW)
    assert [round.values is None for round in rounds] == [False] + [True] * (WINDOW - 1)


def test_what_answers_say_of_the_members_waits_for_its_place(alone):
    """A look brings values; a generation that the same answers name is taken in a window later, or before a batch."""
    job, one, plan = alone
    job.append(GenerationClosed(Generation(2, (one.member,))))
    first = send(one, plan, 1)
    assert value_of(one, first) == 1
    for number in range(WINDOW - 1):
        assert value_of(one, send(one, plan, number)) == number
        assert one.group.generation.number == 1, "it was looked at, and is not taken in"
    send(one, plan, 7)
    assert one.group.generation.number == 2
    job.append(GenerationClosed(Generation(3, (one.member,))))
    send(one, plan, 8)
    assert one.group.generation.number == 2
    one.group.boundary(0)
    assert one.group.generation.number == 3


def test_a_round_that_fails_later_ends_the_session_and_names_its_line(alone):
    """Others computed as if it had been made; a first one is told to its call, which may catch it and go on."""
    job, one, plan = alone
    other = sum_into(one.create("u", 1))
    job.append(Approved(other))
    job.servers.cores[1].machine.job.rounds.refuse(PreparedPlan(other, 1), MemoryLimit("it does not fit"))
    with pytest.raises(MemoryLimit, match=r"it does not fit$"):
        send(one, other, 1)
    assert value_of(one, send(one, plan, 2)) == 2
    job.servers.cores[0].machine.job.rounds.refuse(PreparedPlan(plan, 0), MemoryLimit("it does not fit any more"))
    line = f"{Path(__file__).name}:"
    refused = send(one, plan, 1)
    for look in (lambda: value_of(one, refused), one.exchange.window.settle, lambda: send(one, plan, 2)):
        with pytest.raises(MemoryLimit, match=rf"does not fit any more; sent by .*{line}\d+"):
            look()


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
    plan = Plan((Reduction("sum", reduced, (0,)),) if reduced else (), (Operand(operands, (0,)),) if operands else ())
    assert PlanShares(plan, {}).large
    assert not PlanShares(Plan((Reduction("sum", half, (0,)),), (Operand(half, (1,)),)), {}).large, "not to one server"


def test_lines_are_kept_until_they_are_said(alone):
    """Each once, and none after that: a script may never begin another step."""
    _, one, plan = alone
    window = one.exchange.window
    for step in range(MANY_STEPS):
        for number in range(5):
            value_of(one, send(one, plan, number))
        assert len(window._lines) == (step == MANY_STEPS - 1), "only where the end of the step may say them"
        window._begin_step()
    for step in range(1 + MANY_STEPS):
        for number in range(5 if step else 0):  # once waits for nothing, and then too often again
            value_of(one, send(one, plan, number))
        assert not window._lines
        window._begin_step()


VALUE = np.full(2, 7.0)


@ps.update_function
def doubled(x):
    return x + x


def reduced(*places):
    """A section of three servers that has reduced a pair for each place; whatever is asked of it is `VALUE`."""

    def send(section):
        found = dict.fromkeys(section.outgoing().plan.returned, VALUE)
        section.sent(lambda: found)

    section = Section(3, send)
    return section, [section.reduce(combine("sum", [np.ones(2)], frozenset(), None), place) for place in places]


def test_a_reduction_without_a_place_gets_it_where_it_is_used():
    """One that has a place keeps it; one that nothing uses is made beside the rest, with a server less."""
    section, (here, anywhere) = reduced((0,), None)
    section.apply((2,), doubled, (anywhere,), {})
    section.apply((0,), doubled, (here,), {})
    assert [reduction.servers for reduction in section.outgoing().plan.reductions] == [(0,), (2,)]
    reducing, _ = reduced(None, (2,))
    updating, _ = reduced(None)
    updating.apply((1,), doubled, (np.ones(2),), {})
    assert [section.outgoing().plan.reductions[0].servers for section in (reducing, updating)] == [(2,), (1,)]


def test_a_reduction_without_a_place_comes_back():
    """Though a program takes it; of what has a place only what a program made last may be looked at."""
    section, (anywhere,) = reduced(None)
    section.apply((2,), doubled, (anywhere,), {})
    assert section.outgoing().plan.returned == (anywhere.ref,)
    section, (total,) = reduced((0,))
    made = section.apply((0,), doubled, (total,), {})
    section.give_back_unused()
    assert section.outgoing().plan.returned == (made.ref,)


def test_a_value_of_another_section_is_an_operand():
    """That section ends, and this one sends what came back: a reference would name something of its own."""
    other, (total,) = reduced((0,))
    section, _ = reduced((0,))
    section.apply((0,), doubled, (total,), {})
    assert other.flushed
    assert [array.tolist() for array in section.outgoing().operands] == [VALUE.tolist()]


def test_a_thread_that_did_not_open_a_section_does_not_end_it():
    """It may look at a value once the section is sent."""
    section, (total,) = reduced((0,))
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(RuntimeError, match="another thread is recording a step"):
            other.submit(np.asarray, total).result()
        assert not section.flushed
        assert np.asarray(total).tolist() == other.submit(np.asarray, total).result().tolist() == VALUE.tolist()


@pytest.mark.parametrize("elements", [4, PART_BYTES // 4], ids=["small", "streamed"])
def test_a_round_s_values_are_let_go_at_once(tmp_path, elements):
    """Not when the garbage collector comes: until then servers have no room in shared memory for the next ones."""
    mine = set()

    def train(strategy, worker):
        mine.add(strategy.backend.exchange.session.number)
        with strategy.scope():
            variables = [ps.Variable(np.zeros(elements, "float32")) for _ in range(4)]
            optimizer = ps.optimizers.SGD(1.0)
        gradients = [np.ones(elements, "float32") for _ in variables]
        for _ in range(6):
            strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))

    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        with InProcessCluster(servers=2, workers=2, checkpoint_root=tmp_path) as cluster:
            in_threads(train, cluster=cluster, devices=["cpu:0"])
            gc.collect()
            replies = [one for one in gc.garbage if isinstance(one, RoundReply)]
            # Other tests may have left jobs in this process, of which some are let go of now.
            kept = [one for one in replies if mine & {member.session for member in one.generation.members}]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not kept
